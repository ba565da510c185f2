"""labelSelector and fieldSelector of a list or a watch, as Kubernetes writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.kubeapi.answers import Refused, bad_request
from tests.kubeapi.kinds import Kind, Object

Matches = Callable[[Object], bool]

_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_SETS = re.compile(rf"(?P<key>{_NAME})\s+(?P<how>in|notin)\s*\((?P<values>[^()]*)\)")
_EQUAL = re.compile(rf"(?P<key>{_NAME})\s*(?P<how>==|!=|=)\s*(?P<value>{_VALUE})")
_EXISTS = re.compile(rf"(?P<how>!?)(?P<key>{_NAME})")


def labels(selector: str) -> Matches:
    """Does an object have these labels? Equality, sets and existence, all of which must hold. Raises Refused."""
    terms = [_label_term(term.strip(), selector) for term in _split(selector)]
    return lambda found: all(term(found["metadata"].get("labels") or {}) for term in terms)


def _split(selector: str) -> list[str]:
    """At commas that are not in parentheses."""
    return re.split(r",(?![^(]*\))", selector) if selector.strip() else []


def _label_term(term: str, whole: str) -> Callable[[dict[str, str]], bool]:
    if found := _SETS.fullmatch(term):
        key, values = found["key"], {value.strip() for value in found["values"].split(",")}
        if found["how"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if found := _EQUAL.fullmatch(term):
        key, value = found["key"], found["value"]
        if found["how"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _EXISTS.fullmatch(term):
        key, is_there = found["key"], not found["how"]
        return lambda labels: (key in labels) is is_there
    raise bad_request(f"unable to parse requirement: {term!r} of the selector {whole!r}")


def fields(kind: Kind, selector: str) -> Matches:
    """Does an object have these values in fields that its kind can be selected by? Raises Refused."""
    terms: list[Matches] = []
    for term in filter(None, selector.split(",")):
        found = re.fullmatch(r"(?P<path>[A-Za-z.]+)(?P<how>==|!=|=)(?P<value>.*)", term)
        if found is None or found["path"] not in kind.selectable():
            raise _unselectable(kind, selector, term)
        terms.append(_field_term(found["path"], found["value"], found["how"] != "!="))
    return lambda found: all(term(found) for term in terms)


def _field_term(path: str, value: str, is_equal: bool) -> Matches:
    def matches(found: Object) -> bool:
        here: Any = found
        for part in path.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        if path == "source" and isinstance(here, dict):  # of an event: its component
            here = here.get("component")
        return (str("" if here is None else here) == value) is is_equal

    return matches


def _unselectable(kind: Kind, selector: str, term: str) -> Refused:
    return bad_request(
        f'Unable to find "{kind.api_version}, Resource={kind.plural}" that match label selector "", field selector '
        f'"{selector}": field label not supported: {re.split("[=!]", term)[0]}'
    )
