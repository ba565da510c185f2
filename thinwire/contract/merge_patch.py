"""Changes of a JSON document, as RFC 7396 has them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue


def merged(document: Mapping[str, JsonValue], changes: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The document with these fields: null takes one away, an object changes what is inside, all else replaces it."""
    found = dict(document)
    for name, value in changes.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict):
            below = found.get(name)
            found[name] = merged(below if isinstance(below, dict) else {}, value)
        else:
            found[name] = value
    return found
