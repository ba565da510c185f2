"""The call of its user that a rank is in: noted for the ranks that wait for it, and would else blame the network.

    optimizer    with calls.within("OneBitAdam.step() 41"): ...     an attribute; nothing is sent
    group        counts the collectives that each of its communicators has begun
    waiting      a rank that waits long writes both into the store of the group, for the others (comm/groups/waits.py)

All ranks make the same calls in the same order. So two ranks whose n-th collective on one communicator differs in kind
or size are in different calls, whatever their timing; one that has begun fewer is only late.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from thinwire.comm.errors import CallMismatch
from thinwire.comm.groups.texts import TextsCompared, in_words
from thinwire.comm.protocol import Group
from thinwire.comm.signals import deferred

ON_THE_WIRE = {"mean": "all_reduce", "sum": "all_reduce"}
"""Collectives that are another one on the wire: a rank in either can be answered by one in the other."""


class Place(NamedTuple):
    """A collective of a rank: the number-th (from 1) of a communicator, what it is, and its bytes there.

    number 0: it has no place in the order, as where only some ranks take part.
    """

    communicator: int
    number: int
    collective: str
    num_bytes: int

    def differs(self, other: Place) -> bool:
        """The same place in the order of the same communicator, but another collective."""
        return self.number > 0 and self[:2] == other[:2] and self[2:] != other[2:]

    def __str__(self) -> str:
        return f"{self.collective} of {self.num_bytes:,} bytes"


RECENT = 64
"""How many collectives a rank remembers: the source of a broadcast is done before its peers, and goes on."""
NOWHERE = Place(0, 0, "", 0)
COMMUNICATORS = 6
"""Two of the group, and of each kind of part of it (comm.groups.nodes)."""


class Calls:
    """What one rank is doing: of its user's calls, and of the collectives of its group and second communicator.

    now: the call it is in, "" between calls. remedy: what to do where other ranks are not in it. last: the last call
    that ended well, so that all ranks took part in it. begun: collectives begun on each communicator; recent: the last
    RECENT of them. waits: those that some thread of this rank has waited for longer than a look. mismatch: what was
    the text about ranks in different calls, once there were some: no collective begins after it. left: why this rank
    has left the group, once it has.
    """

    __slots__ = ("_turn", "begun", "last", "left", "mismatch", "now", "recent", "remedy", "waits")

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self.now = self.remedy = self.last = self.mismatch = self.left = ""
        self.begun = [0] * COMMUNICATORS
        self.recent: deque[Place] = deque(maxlen=RECENT)
        self.waits: set[Place] = set()

    def begin(self, at: Place) -> None:
        """A collective has been begun there."""
        self.begun[at.communicator] = at.number
        self.recent.append(at)

    @contextmanager
    def within(self, call: str, remedy: str = "") -> Iterator[None]:
        """Inside, this rank is in `call`. remedy: what its user is to do where other ranks are in another one.

        Signals are handled where it waits for others, or at the end (comm.signals).
        Raises: RuntimeError where another thread is in one: which comes first would be another on each rank.
        """
        with deferred():
            if not self._turn.acquire(blocking=False):
                raise RuntimeError(
                    f"{call}: another thread is in {self.now or 'a call'} on the same process group, and the exchanges "
                    "of two threads would be mixed, for they come in another order on each rank. Make these calls from "
                    "one thread, or give each optimizer a process group of its own, on every rank in the same order: "
                    "group=TorchGroup(torch.distributed.new_group()) (thinwire.comm)"
                )
            before, begun = (self.now, self.remedy), sum(self.begun)
            self.now, self.remedy = call, remedy
            try:
                yield
                if sum(self.begun) > begun:  # else it was this rank's own affair
                    self.last = call
            finally:
                self.now, self.remedy = before
                self._turn.release()

    def words(self) -> str:
        """Where this rank is, in words."""
        if self.now:
            return self.now
        return f"its own code after {self.last}" if self.last else "its own code"


@runtime_checkable
class Telling(Protocol):
    """A Group that keeps what its rank is doing."""

    @property
    def calls(self) -> Calls:
        """Of this rank, of both communicators."""


def interrupted(error: BaseException, calls: Calls) -> str:
    """Why a rank leaves where this was raised in it: what its peers read."""
    return f"{type(error).__name__} in {calls.words()}"


def calls_of(group: Group) -> Calls:
    """Those that the group tells its other ranks; of a group that tells nothing, ones that nobody reads."""
    return group.calls if isinstance(group, Telling) else Calls()


def mismatch(where: Mapping[int, str], remedies: Iterable[str] = ()) -> CallMismatch:
    """The error of ranks that are in different calls. where: of each rank, in words. remedies: what to do, if known."""
    sides: dict[str, list[int]] = {}
    for rank, call in sorted(where.items()):
        sides.setdefault(call, []).append(rank)
    who = "; ".join(f"{in_words(ranks, 'is', 'are')} in {call}" for call, ranks in sides.items())
    todo = "".join(f" {remedy[0].upper()}{remedy[1:]}." for remedy in dict.fromkeys(remedies) if remedy)
    return CallMismatch(
        f"{who}: every rank must make the same calls in the same order, and these wait for each other for ever.{todo} "
        "Nothing of these calls counts. Look for a call, a `break` or a `continue` that only some ranks reach"
    )


def refuse_other_calls(
    group: Group, call: str, device: torch.device, *, remedy: str = "", more: str = ""
) -> list[str] | None:
    """Compare, before anything is changed, in which call all ranks are. Collective: 16 bytes a rank.

    device: of the group's tensors. remedy: as in Calls.within. more: what else is compared. Returns it of all ranks,
    where it is not alike; None where it is.
    Raises: CallMismatch, alike on every rank; PeerLost.
    """
    return CallsCompared(group, call, device, remedy=remedy, more=more).differing()


class CallsCompared:
    """refuse_other_calls() in two halves: other work may lie between them. Collective, as differing() is."""

    def __init__(self, group: Group, call: str, device: torch.device, *, remedy: str = "", more: str = "") -> None:
        self._texts = TextsCompared(group, f"{call}\n{remedy}\n{more}", device)

    def differing(self) -> list[str] | None:
        """What else was compared, of all ranks, where it is not alike. Raises: CallMismatch, alike; PeerLost."""
        everyone = self._texts.differing()
        if everyone is None:
            return None
        calls, remedies, mores = zip(*(text.split("\n", 2) for text in everyone), strict=True)
        if len(set(calls)) > 1:
            raise mismatch(dict(enumerate(calls)), remedies)
        return list(mores)
