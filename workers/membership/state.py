"""What a member knows, what it does about what the server says, and what can go wrong. No sockets, no threads.

    state      until                                                                            then
    new        join()                                                                           joining
    joining    Seating                                                                          seated
    seated     LostPeers, Over, or a promised stop whose outcome nobody knows                   over
               join(), after a planned stop or of its own accord                                joining
    over       join()                                                                           joining
    any        Refusal, finish(), fail(), close()                                               ended

Beside that it has a lease (commit_lease.py), which may hold or not in any state but `ended`, where it does not.

`changed` guards all of it: the thread that reads changes it here, the training loop looks at it in member.py.

MembershipError
|-- JoinTimeout      no generation closed in the time that join() was given; join() may be called again
|-- GenerationOver   a member was lost while this one waited for something of the present generation
|-- NotSeated        a call that needs a seat came before join() gave one
`-- Ended            there is no way back for this member: its process must end
    |-- Fenced       the others have gone on without it; a new process may come as a newcomer
    |-- Dismissed    it was asked to leave, or the job has finished
    `-- Refused      the server does not take it: wrong secret, or its id or slot is filled
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.workers.membership import messages as m
from thinwire.workers.membership.commit_lease import CommitLease, lease_clock
from thinwire.workers.membership.seats import Doing, Identity, Seat, Standing, worker_name


class MembershipError(RuntimeError):
    """The membership did not give what was asked."""


class JoinTimeout(MembershipError):
    """No generation closed in time. This member still waits at the server; call join() again, or end the process."""


class GenerationOver(MembershipError):
    """A member was lost meanwhile: call join() for the next generation."""


class NotSeated(MembershipError):
    """This member has no seat yet: call join() first."""


class Ended(MembershipError):
    """This member will not be seated again."""


class Fenced(Ended):
    """The server has gone on without this member. End the process; a new one with a new id may join."""


class Dismissed(Ended):
    """This member was asked to leave, or came when the job had finished. End the process, without an error."""


class Refused(Ended):
    """The server does not take this member: the message says why."""


_VERDICTS = {"fenced": Fenced, "dismissed": Dismissed, "refused": Refused}


@dataclass(slots=True)
class Promise:
    """This member has said yes to a proposal. cut: the connection ended before the outcome."""

    proposal: m.Proposal
    confirmed: bool = False
    cut: bool = False

    @property
    def undecided(self) -> bool:
        """The outcome may still come."""
        return not self.confirmed and not self.cut


class State:
    """Of one member. The link passes on what it hears (member.py). clock: of its lease."""

    def __init__(
        self,
        identity: Identity,
        clock: Callable[[], float] = lease_clock,
        on_heard: Callable[[], None] = lambda: None,
    ) -> None:
        self._identity, self._clock, self._on_heard = identity, clock, on_heard
        self.changed = threading.Condition()
        self.seat: Seat | None = None
        self.handed_out = False
        """join() has returned the seat."""
        self.standing: Standing | None = None
        """While joining."""
        self.signature: dict[str, str] | None = None
        self.floor = 0
        self.formed = False
        """It has the process group of the seat."""
        self.unreachable: dict[int, str] = {}
        """Ranks that it could not talk to in forming that, and why."""
        self.lease = CommitLease()
        self.ended: Ended | None = None
        self.left = False
        """Well: the others do not count it as lost."""
        self.over: str | None = None
        self.lost: dict[int, str] = {}
        self.promise: Promise | None = None
        self.stop_at: float = math.inf
        """A promise was made for this step."""
        self.notice: str | None = None
        """Why this member has asked to leave."""
        self.step: int | None = None
        self.stepped_at = 0.0
        self.longest_step_s = 0.0

    def end(self, error: Ended) -> None:
        """There is no way back. Under the lock."""
        if self.ended is None:
            self.ended = error
            self.over = self.over or str(error)
            self.changed.notify_all()

    def hello(self) -> m.Hello:
        """What to say first at a new connection."""
        with self.changed:
            return m.Hello(identity=self._identity, seated=self.seat.generation if self.seat else 0)

    def beat(self, doing: Doing | None = None) -> m.Beat:
        """The next beat, to be sent at once. Under the lock."""
        number = self.lease.beat(self._clock())
        return m.Beat(number=number, step=self.step, seconds=self.longest_step_s, doing=doing)

    def join(self, standing: Standing) -> m.Join:
        """What this member joins with. Under the lock."""
        after = self.seat.generation if self.seat else 0
        return m.Join(after=after, standing=standing, signature=self.signature, floor=self.floor)

    def may_commit(self) -> bool:
        """The lease holds, and this member has not ended, or has left well. Under the lock.

        A member that has left well may still have a checkpoint to finish: the others go on from what is in it.
        """
        return (self.ended is None or self.left) and self.lease.holds(self._clock())

    def give_up_lease(self) -> None:
        """This member is about to end its connection, for which the server will take it to be dead."""
        with self.changed:
            self.lease.give_up()

    def heard(self, message: m.FromServer) -> list[m.FromMember]:
        """Take it in; what to answer."""
        with self.changed:
            answers = self._take(message)
            self.changed.notify_all()
        return answers

    def cut(self) -> None:
        """The connection has ended."""
        with self.changed:
            if self.promise is not None and self.promise.undecided:
                self.promise.cut = True
                self.changed.notify_all()

    def _take(self, message: m.FromServer) -> list[m.FromMember]:
        seat, promise = self.seat, self.promise
        match message:
            case m.Welcome():
                return self._again()
            case m.Refusal():
                self.end(_VERDICTS[message.verdict](message.why))
            case m.Heard():
                self.lease.heard(message.number)
                self._on_heard()
            case m.AskSeat() if seat is not None:
                return [m.OwnSeat(seat=seat)]
            case m.Seating() if seat is None or message.generation > seat.generation:
                self.seat, self.handed_out, self.standing = message.seat_after(seat), False, None
                self.over, self.lost = None, {}
                self.promise, self.stop_at = None, math.inf
                self.formed, self.unreachable = False, {}
                self.step, self.longest_step_s = None, 0.0
            case m.LostPeers() if seat is not None and message.generation == seat.generation:
                for rank, why in message.ranks.items():
                    self.lost.setdefault(rank, why)
                    who = worker_name(seat.members[rank].identity)
                    self.over = self.over or f"rank {rank} ({who}) was lost: {why}"
            case m.Over() if seat is not None and message.generation == seat.generation:
                self.over = self.over or message.why
            case m.Proposal():
                return [self._vote(message)]
            case m.Confirm() if promise is not None and not promise.cut and promise.proposal.number == message.number:
                promise.confirmed = True
            case m.Cancel() if promise is not None and promise.undecided and promise.proposal.number == message.number:
                self.promise, self.stop_at = None, math.inf
        return []

    def _again(self) -> list[m.FromMember]:
        """What a server that knows nothing has to learn beside the seat."""
        said: list[m.FromMember] = [self.beat()]
        if self.seat is not None and self.formed:
            said.append(m.Formed(generation=self.seat.generation))
        elif self.seat is not None and self.unreachable:
            said.append(m.Unreachable(generation=self.seat.generation, ranks=self.unreachable))
        if self.standing is not None:
            said.append(self.join(self.standing))
        if self.notice is not None:
            said.append(m.Notice(reason=self.notice))
        return said

    def _vote(self, proposal: m.Proposal) -> m.Answer:
        seat, step = self.seat, self.step
        yes = (
            seat is not None
            and proposal.generation == seat.generation
            and self.standing is None
            and self.over is None
            and self.promise is None
            and step is not None
            and step < proposal.step
        )
        if yes:
            self.promise, self.stop_at = Promise(proposal), proposal.step
        return m.Answer(number=proposal.number, yes=yes, step=step)
