"""What a rank wants its parent to know: a marked line of JSON on stdout. Anything else is a message."""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "@told "


def tell(**told: Any) -> None:
    """One line to the parent."""
    sys.stdout.write(f"{MARK}{json.dumps(told)}\n")
    sys.stdout.flush()


def told_in(line: str) -> tuple[str, dict[str, Any] | None]:
    """What else stands in a line, which a library's message may have begun, and what the parent is told."""
    other, mark, told = line.partition(MARK)
    return other, json.loads(told) if mark else None
