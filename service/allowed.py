"""What a field of a request allows, in words, from its JSON schema; and how to move about in that schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.contract.script import ABSOLUTE, REQUIREMENT, SHA256, VARIABLE

Schema = Mapping[str, Any]


def allowed(node: Schema, document: Schema) -> str:
    """What the field allows, to stand after "must be": "a whole number at least 1". Empty where nothing is known.

    document: what the references of `node` point into.
    """
    node = resolve(node, document)
    if found := branches(node, document):
        return ", or ".join(allowed(branch, document) for branch in found)
    if "discriminator" in node:
        name, tags = node["discriminator"]["propertyName"], list(node["discriminator"]["mapping"])
        return f"a mapping of fields whose {name} is one of {', '.join(tags)}, such as {{{name}: {tags[0]}}}"
    if "const" in node or "enum" in node:
        return "one of " + ", ".join(str(value) for value in node.get("enum", [node.get("const")]))
    kind = node.get("type", "")
    if kind == "object":
        return _mapping(node)
    if kind == "string":
        return _text(node)
    if kind == "array":
        return _list(node, document)
    bounds = [f"{words} {_plain(node[key])}" for key, words in _BOUNDS.items() if key in node]
    return " ".join([_NOUNS.get(kind, ""), " and ".join(bounds)]).strip()


def resolve(node: Schema, document: Schema) -> Schema:
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


def branches(node: Schema, document: Schema) -> list[Schema]:
    """The branches of a union that has no tag; empty for anything else."""
    node = resolve(node, document)
    return [] if "discriminator" in node else list(node.get("anyOf", ()))


def _mapping(node: Schema) -> str:
    """A mapping, with its first two fields as they are by default, where they have one, for an example."""
    defaults = {name: field["default"] for name, field in node.get("properties", {}).items() if "default" in field}
    scalars = [f"{name}: {value}" for name, value in defaults.items() if isinstance(value, str | int | float)]
    if len(scalars) < 2 or node.get("required"):
        return "a mapping of fields"
    return f"a mapping of fields, such as {{{', '.join(scalars[:2])}}}"


def _text(node: Schema) -> str:
    least, most = node.get("minLength", 0), node.get("maxLength")
    length = f" of {least} to {most} characters" if most else " that is not empty" if least else ""
    pattern = node.get("pattern")
    return f"text{length}" + (f": {named(pattern)}" if pattern else "")


def named(pattern: str) -> str:
    """What a pattern asks of a text, in words."""
    return _PATTERNS.get(pattern, f"it must match {pattern}")


def _list(node: Schema, document: Schema) -> str:
    items = [allowed(item, document) for item in node.get("prefixItems", ())]
    if not items:
        return "a list" + (f" of at most {node['maxItems']}" if "maxItems" in node else "")
    return f"a list of {len(items)}: {', then '.join(items)}"


def _plain(bound: float) -> str:
    """A bound as a person writes it: 1000000000, not 1e+09 or 1000000000.0."""
    return str(int(bound)) if bound == int(bound) else str(bound)


_NOUNS = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "null": "null"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
_PATTERNS = {
    r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$": "lower-case letters, digits, dots and dashes, beginning and ending with a "
    "letter or digit",
    SHA256: "the sha256 of a package, 64 hexadecimal digits in lower case",
    VARIABLE: "of letters, digits and underscores, not beginning with a digit",
    ABSOLUTE: "an absolute path",
    REQUIREMENT: "one requirement, such as einops==0.8, without blanks before and behind it; not an option of pip, "
    "which begins with -, and no comment",
}
