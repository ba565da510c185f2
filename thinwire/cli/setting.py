"""`--set optimizer.lr=1e-3`: fields of a job, changed on the command line.

A value is read as it would be in a job file: 60 is a number, true a truth, [a, b] a list, null nothing. Where a field
takes text alone it is that text, so that `--set name=007` is a name. Which fields there are says the service.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import JsonValue, TypeAdapter

from thinwire.cli.job_file import JobFileError, read_value
from thinwire.contract.spec import AnySpec

Fields = dict[str, JsonValue]


class WrongSetting(JobFileError):
    """A --set that cannot be read; the message says what it must be."""


def changes_of(settings: Sequence[str]) -> Fields:
    """The fields that `--set` names, nested as a job has them: a JSON merge patch. Raises WrongSetting."""
    found: Fields = {}
    given: set[str] = set()
    for one in settings:
        path, equals, text = one.partition("=")
        names = _names_in(path)
        if not equals or not all(names):
            raise WrongSetting(f"--set {one!r} must be FIELD=VALUE, such as steps=60 or optimizer.lr=1e-3")
        if path in given:
            raise WrongSetting(f"--set {path} is given twice: give it once")
        given.add(path)
        inside = found
        for depth, name in enumerate(names[:-1], 1):
            below = inside.setdefault(name, {})
            if not isinstance(below, dict):
                upper = ".".join(names[:depth])
                raise WrongSetting(f"--set {path} is inside of {upper}, which another --set gives a value")
            inside = below
        if isinstance(inside.get(names[-1]), dict):
            raise WrongSetting(f"--set {path} gives a value to what another --set is inside of")
        inside[names[-1]] = text if _takes_text_alone(tuple(names)) else read_value(text, f"--set {path}")
    return found


def _names_in(path: str) -> list[str]:
    """The fields from the outermost on; but the name of a label, which may have dots, is one."""
    names = path.split(".")
    document = _schema()
    nodes: list[Mapping[str, Any]] = [document]
    for depth, name in enumerate(names):
        if nodes and all(_holds_texts(node, document) for node in nodes):
            return [*names[:depth], ".".join(names[depth:])]
        nodes = [below for node in nodes for below in _below(node, name, document)]
    return names


@cache
def _schema() -> dict[str, Any]:
    return TypeAdapter(AnySpec).json_schema()


def _takes_text_alone(path: tuple[str, ...]) -> bool:
    """Of every kind of job, recipe and optimizer that has this field; one that none has is for the service to name."""
    document = _schema()
    nodes: list[Mapping[str, Any]] = [document]
    for name in path:
        nodes = [below for node in nodes for below in _below(node, name, document)]
    kinds = {kind for node in nodes for kind in _kinds(node, document)}
    return kinds == {"string"}


def _alternatives(node: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What the node may be, behind references and unions."""
    if "$ref" in node:
        yield from _alternatives(document["$defs"][node["$ref"].rpartition("/")[2]], document)
        return
    some = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    if not some:
        yield node
    for one in some:
        yield from _alternatives(one, document)


def _below(node: Mapping[str, Any], name: str, document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for one in _alternatives(node, document):
        if name in (fields := one.get("properties", {})):
            yield fields[name]
        elif one.get("type") == "object":
            open_names = [*one.get("patternProperties", {}).values(), one.get("additionalProperties")]
            yield from (found for found in open_names if isinstance(found, Mapping))


def _holds_texts(node: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    """By names that no schema knows."""
    values = [
        value
        for one in _alternatives(node, document)
        for value in (one.get("patternProperties", {}).values() if "properties" not in one else [None])
    ]
    return bool(values) and all(value is not None and _kinds(value, document) == {"string"} for value in values)


def _kinds(node: Mapping[str, Any], document: Mapping[str, Any]) -> set[str]:
    """The JSON types that it may have, but for null. A constant that is text may be written as anything is."""
    found = {
        one.get("type") or ("string" if isinstance(one.get("const"), str) else "any")
        for one in _alternatives(node, document)
    }
    return found - {"null"}
