"""Where a page of a list ends, as a text that a client hands back to have the next one.

It holds the key of the last row that was shown, by which the list is in order, and no offset: what is added or removed
between two pages moves nothing, and that row need not be there any more. It is opaque to clients, and no secret: what
somebody makes up names a place in the list, and no more.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from thinwire.service.errors import InvalidRequest

LONGEST = 512
"""Characters; of a cursor, and of what is taken for one."""

LARGEST = 2**31 - 1
"""Whole number in a key: what the column of an id holds."""

Part = float | int | str


def cursor(of: str, *key: Part) -> str:
    """The text for this key of a list. of: which list, so that a cursor of another one is refused."""
    written = json.dumps([of, *key], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(written).decode().rstrip("=")


def key_of(of: str, text: str, kinds: tuple[type, ...], parameter: str) -> tuple[Any, ...]:
    """The key that `cursor(of, ...)` was made of. kinds: of its parts, str, int or float.

    Raises InvalidRequest, of this parameter, for any other text.
    """
    try:
        padded = text + "=" * (-len(text) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if isinstance(found, list) and found[:1] == [of] and len(found) == 1 + len(kinds):
            return tuple(_part(part, kind) for part, kind in zip(found[1:], kinds, strict=True))
    except (ValueError, OverflowError, RecursionError):
        pass  # it says so below
    raise InvalidRequest.at(
        parameter, text[:200], f"must be `next` of an earlier answer of this list of {of}: begin again without it"
    )


def _part(part: object, kind: type) -> Part:
    """Raises ValueError."""
    if kind is float and isinstance(part, int | float) and not isinstance(part, bool):
        number = float(part)
        if math.isfinite(number):
            return number
    if kind is int and isinstance(part, int) and not isinstance(part, bool) and abs(part) <= LARGEST:
        return part
    if kind is str and isinstance(part, str) and "\0" not in part:
        part.encode()  # half of a surrogate pair is no text
        return part
    raise ValueError
