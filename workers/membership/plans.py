"""Agrees on the step at which all members stop: in two phases, without a collective.

The server proposes a step a little beyond the largest that it knows. A member says yes unless its loop has passed it,
and its yes binds it: it will not go past that step before it has heard the outcome. All yes: confirmed. One no, or a
death: cancelled, and proposed again further on. The server's knowledge is as old as the last beat, but each no brings
the step of the loop, and each try doubles the distance, so that quick loops are caught in a few round trips.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

FIRST_MARGIN_STEPS = 2
TRIES = 10
"""In a row; then REST_S are let pass. The last try is 1024 steps ahead."""
REST_S = 1.0
SOON_S = 0.1
"""While a member of a new generation has not begun to step: where it will begin, after a resume, nobody else knows."""


@dataclass(slots=True)
class Plan:
    """A proposal that is not decided. leaving: id -> why."""

    number: int
    step: int
    leaving: dict[str, str]
    reason: str
    voters: frozenset[str]
    yes: set[str] = field(default_factory=set)


class Plans:
    """The proposals of one server, one at a time."""

    def __init__(self) -> None:
        self.open: Plan | None = None
        self._number = 0
        self._tries = 0
        self._rest_until = 0.0

    def propose(
        self, voters: Collection[str], largest_step: int, leaving: dict[str, str], reason: str, now: float
    ) -> Plan | None:
        """A new open plan; None while it should rest."""
        if now < self._rest_until:
            return None
        self._number += 1
        step = largest_step + FIRST_MARGIN_STEPS * 2**self._tries
        self.open = Plan(self._number, step, leaving, reason, frozenset(voters))
        return self.open

    def hold(self, until: float) -> None:
        """Propose nothing before."""
        self._rest_until = max(self._rest_until, until)

    def refused(self, now: float, *, stepping: bool) -> None:
        """A member said no: the next proposal goes further; soon, and no further, where it is not stepping yet."""
        self.open = None
        if not stepping:
            self.hold(now + SOON_S)
            return
        self._tries += 1
        if self._tries == TRIES:
            self._tries, self._rest_until = 0, now + REST_S

    def vote(self, voter: str, number: int) -> Plan | None:
        """Count a yes. The plan, once all have said yes."""
        if self.open is None or self.open.number != number:
            return None
        self.open.yes.add(voter)
        return self.open if self.open.yes >= self.open.voters else None

    def reset(self) -> None:
        """Nothing is open, and the next proposal is a first one."""
        self.open, self._tries, self._rest_until = None, 0, 0.0
