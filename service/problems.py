"""What is wrong with a request, field by field: pydantic's errors turned into schemas.Problem.

Pydantic's locations hold more than field names: the tag of a discriminated union ('onebit_adam') and a label for
each branch of a plain union ('constrained-int'), with one error a branch. Walking the JSON schema beside the
location tells the two apart and says what the field allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from thinwire.service.jobs.schemas import Problem

Schema = Mapping[str, Any]

LONGEST_VALUE = 200
"""Characters of a refused value that are shown back."""


def describe_problems(errors: Sequence[Mapping[str, Any]], body: Schema, document: Schema) -> list[Problem]:
    """One Problem a field, in the order found.

    errors: as pydantic's `errors()`, locations starting with 'body', 'query', 'path' or 'header'.
    body: the JSON schema of the body; document: what its references point into.
    """
    found: dict[str, Problem] = {}
    for error in errors:
        for problem in _one(error, body, document):
            earlier = found.get(problem.path)
            if earlier is None:
                found[problem.path] = problem
            elif problem.message not in earlier.message:
                joined = f"{earlier.message}; {problem.message}"
                found[problem.path] = earlier.model_copy(update={"message": joined})
    return list(found.values())


def shown(value: Any) -> JsonValue:
    """The value as it can stand in an answer: itself if it is short JSON, else the beginning of its text."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()  # a lone surrogate cannot be sent
    except (TypeError, ValueError):
        text = ascii(value)
        return text if len(text) <= LONGEST_VALUE else text[:LONGEST_VALUE] + "..."
    if len(text) <= LONGEST_VALUE:
        shown_value: JsonValue = json.loads(text)
        return shown_value
    return text[:LONGEST_VALUE] + "..."


def _one(error: Mapping[str, Any], body: Schema, document: Schema) -> Iterator[Problem]:
    kind, context = error["type"], error.get("ctx") or {}
    where, *loc = error["loc"]
    if kind == "impossible":
        for found in context["problems"]:
            yield Problem(path=found["path"], value=shown(found["value"]), message=f"must be {found['allowed']}")
        return
    if kind == "json_invalid":
        at = f", at character {loc[0]}" if loc else ""
        yield Problem(path="", message=f"the body is not JSON: {context.get('error', error['msg'])}{at}")
        return
    if where != "body":
        yield Problem(path=".".join(map(str, loc)), value=shown(error["input"]), message=error["msg"])
        return
    path, node, parent = _walk(loc, body, document)
    value = None if kind == "missing" else shown(error["input"])
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = str(context["discriminator"]).strip("'")
        tags = ", ".join(_resolve(node, document).get("discriminator", {}).get("mapping", {}))
        value = shown(context["tag"]) if "tag" in context else None
        yield Problem(path=".".join([*path, tag]), value=value, message=f"must be one of {tags}")
        return
    if kind == "extra_forbidden":
        message = "there is no such field; allowed here: " + ", ".join(_resolve(parent, document).get("properties", {}))
    elif kind == "missing":
        message = f"this field is required: {_allowed(node, document)}" if loc else "a JSON body is required"
    elif _branches(node, document):
        message = f"must be {_allowed(node, document)}"
    else:
        message = error["msg"]
    yield Problem(path=".".join(path), value=value, message=message)


def _walk(loc: Sequence[str | int], body: Schema, document: Schema) -> tuple[list[str], Schema, Schema]:
    """The names of fields in `loc`, the schema it ends at, and the schema of what holds that field."""
    path: list[str] = []
    parent: Schema = {}
    node: Schema = body
    for part in loc:
        node = _resolve(node, document)
        tags = node.get("discriminator", {}).get("mapping", {})
        if part in tags:
            node = {"$ref": tags[part]}
        elif not node or _branches(node, document):
            break  # `part` names a branch of a union, or is inside of what may be any JSON
        else:
            path.append(str(part))
            parent, node = node, _inside(node, part)
    return path, node, parent


def _inside(node: Schema, part: str | int) -> Schema:
    """The schema of one member of an object or an array; empty where nothing is known of it."""
    if isinstance(part, int):
        prefix: Sequence[Schema] = node.get("prefixItems", ())
        found: Any = prefix[part] if part < len(prefix) else node.get("items", {})
    else:
        found = node.get("properties", {}).get(part, {})
    return found if isinstance(found, Mapping) else {}


def _resolve(node: Schema, document: Schema) -> Schema:
    """The schema itself, behind references and behind 'or null'."""
    while True:
        if "$ref" in node:
            target: Any = document
            for name in node["$ref"].removeprefix("#/").split("/"):
                target = target[name]
            node = target
            continue
        some = [branch for branch in node.get("anyOf", ()) if branch.get("type") != "null"]
        if len(some) == 1:
            node = some[0]
            continue
        return node


def _branches(node: Schema, document: Schema) -> list[Schema]:
    """The branches of a union that has no tag; empty for anything else."""
    node = _resolve(node, document)
    return [] if "discriminator" in node else list(node.get("anyOf", ()))


def _allowed(node: Schema, document: Schema) -> str:
    """What a field allows, in words."""
    node = _resolve(node, document)
    if branches := _branches(node, document):
        return ", or ".join(_allowed(branch, document) for branch in branches)
    if "discriminator" in node:
        return f"an object whose {node['discriminator']['propertyName']} is one of " + ", ".join(
            node["discriminator"]["mapping"]
        )
    if "const" in node or "enum" in node:
        return "one of " + ", ".join(str(value) for value in node.get("enum", [node.get("const")]))
    noun = _NOUNS.get(node.get("type", ""), "a value")
    bounds = [f"{words} {_plain(node[key])}" for key, words in _BOUNDS.items() if key in node]
    return " ".join([noun, " and ".join(bounds)]).strip()


def _plain(bound: float) -> str:
    """A bound as a person writes it: 1000000000, not 1e+09 or 1000000000.0."""
    return str(int(bound)) if bound == int(bound) else str(bound)


_NOUNS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
