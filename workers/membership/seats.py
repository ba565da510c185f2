"""Who a worker is, what it brings, and where it is seated: the words that members, rules and server share.

A generation is a group of workers that train together: a number, and a rank for each member. It never changes. When a
member is lost, comes or leaves, the next generation closes, with a larger number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints

LONGEST_REASON = 500
"""Characters of a reason in words. Longer ones are cut where they are made: a line on the wire is bounded."""
Whole = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""A step, a generation, a number of anything: what JSON, a checkpoint's name and a tensor can hold."""
Name = Annotated[str, StringConstraints(max_length=255)]
_STRICT = ConfigDict(extra="forbid")
Text = Annotated[str, StringConstraints(max_length=LONGEST_REASON)]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker is.

    id: unique for each incarnation of the process. slot: the place of the job that it fills. host, port: where its
    peers reach it while a group forms; port 0 where none will. node: informational.
    """

    __pydantic_config__ = _STRICT
    id: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    slot: Whole
    host: Name
    pid: Whole
    node: Name = ""
    port: Annotated[int, Field(ge=0, le=65535)] = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a worker brings to the next generation.

    generation and rank: where it was seated last, None for a newcomer. step: steps that it has committed. has_state:
    it holds the parameters and optimizer state of that step.
    """

    __pydantic_config__ = _STRICT
    generation: Whole | None
    rank: Whole | None
    step: Whole
    has_state: bool


@dataclass(frozen=True, slots=True)
class Doing:
    """What the training thread of a worker is at that has not moved for a while, as its process has seen.

    what: in words: "step 413". seconds: since it began that. operation: the collective that it waits in, or has begun
    last, in words; "" for none. begun: how many collectives of its group it has begun. waits: it waits for others in
    one, as far as is known. stack: its frames, those of the user's code first, each the innermost first. at_end: no
    further step is to come.
    """

    __pydantic_config__ = _STRICT
    what: Text
    seconds: Annotated[float, Field(ge=0)]
    operation: Text = ""
    begun: Whole = 0
    waits: bool = False
    stack: Annotated[tuple[Text, ...], Field(max_length=32)] = ()
    at_end: bool = False


@dataclass(frozen=True, slots=True)
class Seated:
    """A member of a generation; its rank is its place in the list."""

    __pydantic_config__ = _STRICT
    identity: Identity
    standing: Standing


@dataclass(frozen=True, slots=True)
class LostMember:
    """A member of the generation before that is gone without a clean goodbye."""

    __pydantic_config__ = _STRICT
    id: Name
    slot: Whole
    rank: Whole
    why: str


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one worker in a generation, and who the others are.

    members: by rank. reason: in words, why this generation came to be. lost: of the generation before. furthest: the
    last step that any member of that has reported.
    """

    __pydantic_config__ = _STRICT
    generation: Annotated[Whole, Field(ge=1)]
    rank: Whole
    size: Annotated[Whole, Field(ge=1)]
    members: tuple[Seated, ...]
    reason: str
    lost: tuple[LostMember, ...]
    furthest: Whole = 0


@dataclass(frozen=True, slots=True)
class Change:
    """The present generation ends after `step` as planned. leaving: this member is to leave for good."""

    step: int
    leaving: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """How many workers a generation may have. Raises ValueError unless 1 <= min <= max."""

    min: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"limits are 1 <= min <= max, not min={self.min} max={self.max}: give other numbers")


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """Something that happened at the server, for logs and metrics. time: unix seconds.

    kinds: connected, joined, seated, over, cut, silent, heard, unreachable, lost, returned, fenced, failed,
    refused, left, dismissed, proposed, confirmed, cancelled, notice, adopted, minority, gave_up, limits, finished,
    waited_for, stands_still
    """

    kind: str
    time: float
    generation: int
    fields: dict[str, JsonValue]


Status = Literal["forming", "training", "regrouping", "waiting for workers", "finished"]


class Occupant(BaseModel):
    """A worker as the server sees it. rank is None where it waits for its first seat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    slot: int
    rank: int | None
    host: str
    pid: int
    step: int


class Snapshot(BaseModel):
    """What the server knows at one moment. status_text is for people. joined: workers that the next generation has.

    given_up: the last events `minority` and `gave_up`: others have gone on without members that had committed steps.
    still: the last events `waited_for` and `stands_still`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: int
    status: Status
    status_text: str
    limits: Limits
    members: tuple[Occupant, ...]
    waiting: tuple[Occupant, ...]
    joined: int
    last_step: int
    events: int
    given_up: tuple[MembershipEvent, ...] = ()
    still: tuple[MembershipEvent, ...] = ()


def worker_name(identity: Identity) -> str:
    """How messages name a worker: by its slot, which outlives its process."""
    return f"w{identity.slot}"
