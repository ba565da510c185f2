"""The process group of one generation: how it comes together, and what a collective takes.

A pair of members connects when both are there and packets pass in both directions. A collective is complete at a rank
when the data of all ranks have arrived there; so one rank may complete it where another does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.workers.membership.simulator.network import Stream
from thinwire.workers.membership.seats import Seat

if TYPE_CHECKING:
    from tests.workers.membership.simulator.job import Job
    from tests.workers.membership.simulator.worker import Worker

REGROUP, RESUME = -1, 0
"""The collectives before the first step; those of a step have its number."""


class Branch:
    """The history of a state: the steps of one generation, from a step of another branch on."""

    def __init__(self, group: Group, base_step: int, parent: Branch | None) -> None:
        self.group, self.base_step, self.parent = group, base_step, parent

    def contains(self, branch: Branch, step: int, at: int) -> bool:
        """Has a state of this branch at step `at` passed that step of that branch?"""
        one: Branch | None = self
        while one is not None:
            if one is branch:
                return step <= at
            at, one = min(at, one.base_step), one.parent
        return False


class Collective:
    """sent: what each rank has given. at: by rank, whose data have arrived."""

    def __init__(self, size: int) -> None:
        self.sent: dict[int, Any] = {}
        self.at: list[int] = [0] * size


class Group:
    """Of one seating."""

    def __init__(self, job: Job, seat: Seat) -> None:
        self._job = job
        self.generation, self.size = seat.generation, seat.size
        self.ids = tuple(member.identity.id for member in seat.members)
        self.reason = seat.reason
        self.there: dict[int, Worker] = {}
        self.paired: dict[tuple[int, int], bool] = {}
        self.collectives: dict[int, Collective] = {}
        self._streams: dict[tuple[int, int], Stream] = {}
        self.branch: Branch | None = None
        self.token: int | None = None
        """Of its checkpoints."""
        self.seated_at = job.clockwork.now
        self.silent_s = job.laws.all_silent_s()
        """When it was seated: for how long the server had not heard each worker."""
        self._sent: dict[str, int] = {}
        """The last step for which each member has sent its data."""
        self.running: int | None = None
        """The last step that it may commit once the next generation was seated: that for which all of its members that
        are in the next have sent their data. 0 where there is none of them."""

    def arrive(self, worker: Worker, rank: int) -> None:
        """A member begins to form the group."""
        self.there[rank] = worker
        if self.size == 1:
            worker.formed(self)
        for other in sorted(self.there):
            if other != rank:
                self._connect(min(rank, other), max(rank, other))

    def unreachable(self, rank: int) -> dict[int, str]:
        """With which of those that are there it cannot talk."""
        here = self.there[rank].machine
        found = {}
        for other, worker in sorted(self.there.items()):
            pair = (min(rank, other), max(rank, other))
            if other != rank and pair not in self.paired and not self._job.network.both(here, worker.machine):
                found[other] = "no answer"
        return found

    def unreached(self, rank: int) -> set[int]:
        """Whom it would get no answer from, of all."""
        here, job = self.there[rank].machine, self._job
        others = {other: job.process(id).machine for other, id in enumerate(self.ids) if other != rank}
        return {other for other, machine in others.items() if not job.network.both(here, machine)}

    def send(self, rank: int, number: int, value: Any) -> None:
        """A rank gives its data to a collective."""
        collective = self.collectives.get(number)
        if collective is None:
            collective = self.collectives[number] = Collective(self.size)
        collective.sent[rank] = value
        self._sent[self.ids[rank]] = number
        for other in range(self.size):
            if other != rank:
                self._stream(rank, other).send(lambda other=other: self._arrived(other, number))
        self._arrived(rank, number)

    def followed_by(self, later: Group) -> None:
        """Another generation is seated."""
        if self.running is None and later.generation > self.generation:
            shared = [id for id in self.ids if id in later.ids]
            self.running = min((self._sent.get(id, 0) for id in shared), default=0)

    def leave(self, rank: int) -> None:
        """The connections of a rank end: the others fail in what they wait for."""
        for other in range(self.size):
            if other != rank and (rank, other) in self._streams:
                self._stream(rank, other).send(lambda other=other: self.there[other].peer_ended(self))

    def _arrived(self, rank: int, number: int) -> None:
        collective = self.collectives[number]
        collective.at[rank] += 1
        if collective.at[rank] == self.size:
            self.there[rank].collected(self, number, collective.sent)

    def _stream(self, rank: int, other: int) -> Stream:
        stream = self._streams.get((rank, other))
        if stream is None:
            job = self._job
            stream = Stream(job.network, job.clockwork, self.there[rank], job.process(self.ids[other]))
            self._streams[rank, other] = stream
        return stream

    def _connect(self, rank: int, other: int) -> None:
        job, pause_s = self._job, self._job.chance.uniform(0.02, 0.3)

        def attempt() -> bool:
            """Again at a heal?"""
            one, two = self.there[rank], self.there[other]
            if one.group is not self or two.group is not self or not one.alive or not two.alive:
                return False
            if not job.network.both(one.machine, two.machine):
                return True
            if one.stopped or two.stopped:
                job.clockwork.after(1.0, again)
                return False
            self.paired[rank, other] = True
            for at in (rank, other):
                pairs = sum(at in pair for pair in self.paired)
                if pairs == self.size - 1:
                    worker = self.there[at]
                    worker.do("train", lambda worker=worker: worker.formed(self))
            return False

        def again() -> None:
            if attempt():
                job.network.watch(attempt)

        job.clockwork.after(pause_s, again)
