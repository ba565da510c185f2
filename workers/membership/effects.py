"""What the rules ask the server to do, and how long they wait."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from thinwire.workers.membership.messages import FromServer


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the rules wait. quiet_s: no first generation closes earlier than this after the start of the server."""

    start_wait_s: float = 20.0
    beat_timeout_s: float = 10.0
    join_timeout_s: float = 10.0
    adopt_s: float = 5.0
    quiet_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to that worker, after what was sent before."""

    to: str
    message: FromServer


@dataclass(frozen=True, slots=True)
class Close:
    """End the connection of that worker when all is sent."""

    id: str


@dataclass(frozen=True, slots=True)
class Happened:
    """For the log and the metrics."""

    kind: str
    generation: int
    fields: dict[str, JsonValue]


Effect = Send | Close | Happened
