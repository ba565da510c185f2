"""Who trains together, and since when: a rendezvous by generations that survives the death of any worker.

    MembershipServer   (server.py) one for a job; rules.py decides for it
    Member             (member.py) one for a worker process

Neither torch nor ray: a member speaks to the server over one TCP connection. Where its process dies, its system ends
that connection, and all others know at once.
"""

from thinwire.workers.membership.attendance import LEASE_END_S, Timing
from thinwire.workers.membership.commit_lease import LEASE_S
from thinwire.workers.membership.member import Member
from thinwire.workers.membership.seats import (
    Change,
    Doing,
    Identity,
    Limits,
    LostMember,
    MembershipEvent,
    Occupant,
    Seat,
    Seated,
    Snapshot,
    Standing,
)
from thinwire.workers.membership.server import MembershipServer
from thinwire.workers.membership.state import (
    Dismissed,
    Ended,
    Fenced,
    GenerationOver,
    JoinTimeout,
    MembershipError,
    NotSeated,
    Refused,
)

__all__ = [
    "LEASE_END_S",
    "LEASE_S",
    "Change",
    "Dismissed",
    "Doing",
    "Ended",
    "Fenced",
    "GenerationOver",
    "Identity",
    "JoinTimeout",
    "Limits",
    "LostMember",
    "Member",
    "MembershipError",
    "MembershipEvent",
    "MembershipServer",
    "NotSeated",
    "Occupant",
    "Refused",
    "Seat",
    "Seated",
    "Snapshot",
    "Standing",
    "Timing",
]
