"""What can go wrong between a worker and the membership of its job.

MembershipError
|-- JoinTimeout      no generation closed in the time that join() was given; join() may be called again
|-- GenerationOver   a member was lost while this one waited for something of the present generation
|-- StoreTimeout     rank 0 has not said in time where its store is
|-- NotSeated        a call that needs a seat came before join() gave one
`-- Ended            there is no way back for this member: its process must end
    |-- Fenced       the others have gone on without it; a new process may come as a newcomer
    |-- Dismissed    it was asked to leave, or the job has finished
    `-- Refused      the server does not take it: wrong secret, or its id or slot is filled
"""

from __future__ import annotations


class MembershipError(RuntimeError):
    """The membership did not give what was asked."""


class JoinTimeout(MembershipError):
    """No generation closed in time. This member still waits at the server; call join() again, or end the process."""


class GenerationOver(MembershipError):
    """A member was lost meanwhile: call join() for the next generation."""


class StoreTimeout(MembershipError):
    """Rank 0 did not announce its store in time."""


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
