"""How the seats of a generation cross the wire: all of them, or what has changed since the seats before.

All members are told the same, but for their ranks. So it is encoded once, and a member that has the seats of the
generation before is told the changes alone: a death among a thousand members takes 200 bytes for each of the others,
where all seats take 200 KB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from thinwire.workers.membership.seats import LostMember, Seat, Seated, Standing, Whole

_Positive = Annotated[int, Field(ge=1, le=2**53 - 1)]


@dataclass(frozen=True, slots=True)
class Run:
    """Members of consecutive ranks that stay in this order: `count` of them, from rank `first` of the last generation.

    What each brings is what it had: that generation, its rank in it, and for all of them one step and one has_state.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    first: Whole
    count: _Positive
    step: Whole
    has_state: bool


class _Generation(BaseModel):
    """What its members are told of a generation beside who they are, as in seats.Seat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    generation: _Positive
    reason: str
    lost: tuple[LostMember, ...] = ()
    furthest: Whole = 0

    @cached_property
    def json_bytes(self) -> bytes:
        """Encoded, once."""
        return self.model_dump_json().encode()


class Roster(_Generation):
    """All members of a generation, by rank."""

    members: tuple[Seated, ...]

    def seat(self, rank: int) -> Seat:
        """That of this rank. Raises ValueError where there is none."""
        size = len(self.members)
        if rank >= size:
            raise ValueError(f"generation {self.generation} has no rank {rank}: it has {size} members")
        return Seat(self.generation, rank, size, self.members, self.reason, self.lost, self.furthest)


class Turnover(_Generation):
    """The members of a generation, by rank, in terms of generation `base`, the one before."""

    base: _Positive
    pieces: tuple[Run | Seated, ...]

    @staticmethod
    def between(base: int, before: Sequence[Seated], roster: Roster) -> Turnover:
        """From the members of generation `base` to that roster."""
        ranks = {member.identity.id: rank for rank, member in enumerate(before)}
        pieces: list[Run | Seated] = []
        for member in roster.members:
            rank, brings = ranks.get(member.identity.id), member.standing
            if rank is None or member != _stayed(before, base, Run(rank, 1, brings.step, brings.has_state), rank):
                pieces.append(member)
                continue
            last = pieces[-1] if pieces else None
            if isinstance(last, Run) and (last.first + last.count, last.step, last.has_state) == (
                rank,
                brings.step,
                brings.has_state,
            ):
                pieces[-1] = Run(last.first, last.count + 1, last.step, last.has_state)
            else:
                pieces.append(Run(rank, 1, brings.step, brings.has_state))
        return Turnover(
            generation=roster.generation,
            reason=roster.reason,
            lost=roster.lost,
            furthest=roster.furthest,
            base=base,
            pieces=tuple(pieces),
        )

    def roster(self, known: Seat) -> Roster:
        """All members, for who has a seat of generation `base`. Raises ValueError where that seat is of another one."""
        if known.generation != self.base:
            raise ValueError(f"the seats of generation {self.generation} are told by those of {self.base}")
        members: list[Seated] = []
        for piece in self.pieces:
            if isinstance(piece, Seated):
                members.append(piece)
            elif piece.first + piece.count > known.size:
                raise ValueError(f"generation {self.base} has {known.size} members, not {piece.first + piece.count}")
            else:
                ranks = range(piece.first, piece.first + piece.count)
                members += [_stayed(known.members, self.base, piece, rank) for rank in ranks]
        return Roster(
            generation=self.generation,
            reason=self.reason,
            lost=self.lost,
            furthest=self.furthest,
            members=tuple(members),
        )


def _stayed(before: Sequence[Seated], base: int, run: Run, rank: int) -> Seated:
    return Seated(before[rank].identity, Standing(base, rank, run.step, run.has_state))
