"""The workers that the server knows: who is seated next, and who must leave.

seating   members of the present generation that hold state, by their rank; members without state, by their rank;
          then newcomers by slot and id that are not silent, one a slot. At most limits.max of them
leaving   who was dismissed, and the highest ranks beyond limits.max

A planned change comes at a step at which all members stop, agreed on in two phases and without a collective. The server
proposes a step a little beyond the largest that it knows. A member says yes unless its loop has passed it, and its yes
binds it: it will not go past that step before it has heard the outcome. All yes: confirmed. One no, or a death:
cancelled, and proposed again further on. The server's knowledge is as old as the last beat, but each no brings the step
of the loop, and each try doubles the distance, so that quick loops are caught in a few round trips.

A signature says in words what a worker trains, and a worker that trains something else than the job is refused. The
job's signature is that of its members. Where there are none it is that of most workers that come, of those that do not
differ from what the driver knows of it: the job file, for one. A worker without a signature is never refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from thinwire.workers.membership.seats import (
    LONGEST_REASON,
    Doing,
    Identity,
    Limits,
    LostMember,
    Occupant,
    Seated,
    Standing,
    worker_name,
)

FIRST_MARGIN_STEPS = 2
TRIES = 10
"""In a row; then REST_S are let pass. The last try is 1024 steps ahead."""
REST_S = 1.0
MOST_NAMED = 8
"""Workers in a reason."""
SOON_S, LATE_S = 0.1, 2.0
"""While a member of a new generation has not begun to step: where it will begin, after a resume, nobody else knows. The
second time is twice as long, and so on up to LATE_S: to be given the state may take minutes, and each try is told to
all."""


@dataclass(slots=True)
class Worker:
    """A worker that is not gone (attendance.py).

    rank: in the present generation, None for a newcomer. standing: from its join() until it is seated. connected: it
    has a connection; reset: it was, until when it may come back, and why. silent, awaited: as there. has_state: it
    holds the parameters, as far as is known. here_since: when it came, or came back. formed: it has its process group.
    signature: what it joined to train. doing: what it is at, where that has not moved for a while.
    """

    identity: Identity
    heard_at: float
    rank: int | None = None
    standing: Standing | None = None
    joined_at: float = 0.0
    step: int = 0
    longest_step_s: float = 0.0
    connected: bool = True
    reset: tuple[float, str] | None = None
    silent: bool = False
    awaited: bool = False
    has_state: bool = False
    here_since: float = 0.0
    formed: bool = False
    signature: dict[str, str] | None = None
    doing: Doing | None = None

    @property
    def here(self) -> bool:
        """It can be reached, and has been heard of lately."""
        return self.connected and not self.silent

    @property
    def name(self) -> str:
        """Its slot, for messages."""
        return worker_name(self.identity)

    def occupant(self) -> Occupant:
        """For a snapshot."""
        who = self.identity
        return Occupant(id=who.id, slot=who.slot, rank=self.rank, host=who.host, pid=who.pid, step=self.step)


def members(workers: Collection[Worker]) -> list[Worker]:
    """Those of the present generation, by rank."""
    return sorted((w for w in workers if w.rank is not None), key=lambda w: w.rank or 0)


def newcomers(workers: Collection[Worker]) -> list[Worker]:
    """Those that have joined and wait for their first seat, in the order of seating."""
    filled = {w.identity.slot for w in workers if w.rank is not None}
    waiting: list[Worker] = []
    for worker in sorted(workers, key=lambda w: (w.identity.slot, w.identity.id)):
        if worker.rank is None and worker.standing is not None and worker.here and worker.identity.slot not in filled:
            filled.add(worker.identity.slot)
            waiting.append(worker)
    return waiting


def waiting_slots(workers: Collection[Worker]) -> set[int]:
    """The slots of those that have joined and wait for their first seat, also where a member of that slot is silent."""
    return {w.identity.slot for w in workers if w.rank is None and w.standing is not None and w.here}


def seating(workers: Collection[Worker]) -> list[Worker]:
    """All that have joined, in the order in which seats are given."""
    joined = [w for w in members(workers) if w.standing is not None]
    with_state = [w for w in joined if w.standing is not None and w.standing.has_state]
    without = [w for w in joined if w.standing is not None and not w.standing.has_state]
    return with_state + without + newcomers(workers)


def to_seated(worker: Worker) -> Seated:
    """A joined worker as a member of the next generation."""
    if worker.standing is None:
        raise ValueError(f"{worker.name} has not joined and cannot be seated: seat those that seating() names")
    return Seated(worker.identity, worker.standing)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A change of the present generation that should come at a boundary. leaving: id -> why."""

    leaving: dict[str, str]
    reason: str


def wanted(workers: Collection[Worker], unwanted: dict[str, str], limits: Limits) -> Wanted | None:
    """What should change, all being well; None if nothing. unwanted: id -> why, of those that were dismissed."""
    present, waiting = members(workers), newcomers(workers)
    leaving = {w.identity.id: unwanted[w.identity.id] for w in present if w.identity.id in unwanted}
    words = [f"{w.name} was dismissed: {leaving[w.identity.id]}" for w in present if w.identity.id in leaving]
    staying = [w for w in present if w.identity.id not in leaving]
    if surplus := staying[limits.max :]:
        leaving |= dict.fromkeys((w.identity.id for w in surplus), f"the job was shrunk to {limits.max} workers")
    size = min(limits.max, len(staying) - len(surplus) + len(waiting))
    if not leaving and size <= len(present):
        return None
    return Wanted(leaving, "; ".join([*_first(words), *_sizes(len(present), size)]))


def reason(lost: Sequence[LostMember], planned: str | None, before: int, after: int, stopped: str | None) -> str:
    """Why a generation of `after` workers follows one of `before`, in words.

    planned: what was confirmed. stopped: what ended the generation where nobody was lost.
    """
    if lost:
        return "; ".join(_first([f"worker w{gone.slot} was lost: {gone.why}" for gone in lost]))
    if planned is not None:  # newcomers may have come or gone since it was planned
        kept = [part for part in planned.split("; ") if not part.startswith(("grow ", "shrink "))]
        return "; ".join([*kept, *_sizes(before, after)]) or "a newcomer that was planned for has gone"
    return stopped or ("first" if not before else "; ".join(_sizes(before, after)) or "all members have left")


def _first(words: list[str]) -> list[str]:
    """Those, and how many more: every member of a generation is told its reason."""
    more = len(words) - MOST_NAMED
    return words if more <= 0 else [*words[:MOST_NAMED], f"and {more} more"]


def _sizes(before: int, after: int) -> list[str]:
    if before == after:
        return []
    return [f"{'grow' if after > before else 'shrink'} {before} -> {after}"]


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
        self._tries = self._early = 0
        self._rest_until = 0.0

    def may_propose(self, now: float) -> bool:
        """None is open, and no rest is due."""
        return self.open is None and now >= self._rest_until

    def propose(self, voters: Collection[str], largest_step: int, leaving: dict[str, str], reason: str) -> Plan:
        """A new open plan, where it may be."""
        self._number += 1
        step = largest_step + FIRST_MARGIN_STEPS * 2**self._tries
        made = self.open = Plan(self._number, step, leaving, reason, frozenset(voters))
        return made

    def hold(self, until: float) -> None:
        """Propose nothing before."""
        self._rest_until = max(self._rest_until, until)

    def refused(self, now: float, *, stepping: bool) -> None:
        """A member said no: the next proposal goes further; soon, and no further, where it is not stepping yet."""
        self.open = None
        if not stepping:
            self.hold(now + min(SOON_S * 2**self._early, LATE_S))
            self._early += 1
            return
        self._tries += 1
        if self._tries == TRIES:
            self._tries, self._rest_until = 0, now + REST_S

    def vote(self, voter: str, number: int) -> Plan | None:
        """Count a yes. The plan, once all have said yes."""
        if self.open is None or self.open.number != number:
            return None
        if voter in self.open.voters:
            self.open.yes.add(voter)
        return self.open if len(self.open.yes) == len(self.open.voters) else None

    def reset(self) -> None:
        """Nothing is open, and the next proposal is a first one."""
        self.open, self._tries, self._early, self._rest_until = None, 0, 0, 0.0


def signature_of_most(workers: Sequence[Worker]) -> dict[str, str] | None:
    """The signature of most of them; of several, that of the lowest slot. None where nobody has one."""
    signed = sorted((w for w in workers if w.signature is not None), key=lambda w: w.identity.slot)
    texts = [tuple(sorted((w.signature or {}).items())) for w in signed]
    return dict(Counter(texts).most_common(1)[0][0]) if texts else None


def signature_difference(own: dict[str, str] | None, jobs: dict[str, str] | None) -> str | None:
    """In words, how a worker's differs from the job's; None where it does not."""
    if own is None or jobs is None or own == jobs:
        return None
    fields = sorted(name for name in own.keys() | jobs.keys() if own.get(name) != jobs.get(name))
    said = [f"{name} is {own.get(name, 'missing')}, the job's is {jobs.get(name, 'missing')}" for name in fields]
    return f"this worker trains something else: {'; '.join(said)}"[:LONGEST_REASON]


def differs_from_known(own: dict[str, str] | None, known: dict[str, str]) -> str | None:
    """In words, how a worker's differs from what is known of the job's; None where it does not."""
    return None if own is None else signature_difference({name: own[name] for name in known if name in own}, known)
