"""The peer that is gone: ranks whose collective failed ask one another, through the store of their process group.

gloo's errors name an address, which ranks of one host share, and NCCL's name none. And only the neighbours of a dead
rank notice: with four ranks over gloo, the one that is not beside it in the ring waited for the whole time-out, as its
own neighbours were alive. So

    joining     a rank writes where it runs: host, process and when that began
    failing     it writes "I failed and am alive, at this place", and waits up to `answer_s` for the others to write so
    waiting     a rank that waits longer than `LOOK_S` in a collective looks whether somebody has failed, and then fails
                too; and for whom it waits, and whether the two are in different calls (waits.py)
    leaving     a rank that stops while its process lives writes so, and its peers fail at their next look
    ending      a rank whose program ends, or which destroys the process group, writes why, for those that fail by it

A rank is lost if its process has ended (which ranks of its host can see, and write down for the others), if it has
left, or if it does not answer. A rank that computes for longer than `answer_s` on another host does not answer either;
the message therefore says which of the three it was. Where ranks failed at one place in different collectives, nobody
is lost: they are in different calls.

Measured with torch 2.13: ProcessGroup.abort() and shutdown() do nothing over gloo (peers of a rank that called them
waited for the whole time-out, and its own next collective succeeded); dropping the last reference, which
destroy_process_group does, closes the connections, and peers fail in 10 ms. But it waits for collectives that run, and
it is not ours to destroy what the user made. Hence the note in the store.

Every question to the store is asked in a thread that is not waited for longer than a bound: a store whose host hangs
answers never. It is part of rank 0's process, or of its host's agent; where it is out of reach, rank 0 is the lost one.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.comm.calls import NOWHERE, Calls, Place, mismatch
from thinwire.comm.errors import CallMismatch, CommError, PeerLost
from thinwire.comm.groups.births import Birth, endings
from thinwire.comm.groups.waits import LOOK_S, Board, Lookout, Watch

T = TypeVar("T")
STORE_S = 2.0
"""How long the store may take for one question beyond the time that the question itself takes."""
_ANY = "thinwire/failed"
_MISMATCH = "thinwire/mismatch"
RESTART = (
    "The ranks that are left can go on: they make a process group and call regroup() (thinwire.optim.regroup). Or "
    "restart all from a checkpoint. The log of the rank that stopped first says why"
)
"""The advice to a loop of one's own about a lost peer."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The ranks that are gone, and what is known of each. advice: what to do.

    mismatch: nobody is gone, but ranks are in different calls; what to tell of them.
    """

    reasons: dict[int, str]
    advice: str = RESTART
    mismatch: str = ""

    def error(self, rank: int, size: int, collective: str, cause: object, calls: Calls | None = None) -> CommError:
        """The error to raise on `rank`. calls: what that rank was doing."""
        if self.mismatch:
            return CallMismatch(self.mismatch)
        who = "; ".join(f"rank {other} ({why})" for other, why in self.reasons.items())
        where = f"{collective} of {calls.now}" if calls is not None and calls.now else collective
        last = f" All ranks took part in {calls.last}." if calls is not None and calls.last else ""
        return PeerLost(
            f"rank {rank} of {size} lost {who or 'a peer (but all answered: the network failed, or the call)'} in "
            f"{where}: {str(cause).rstrip('. ')}.{last} {self.advice}",
            next(iter(self.reasons)) if len(self.reasons) == 1 else None,
            tuple(self.reasons),
        )


class Seen(Protocol):
    """Looks whether a peer has failed, until `stop`."""

    @property
    def seen(self) -> bool:
        """A peer has failed, or is in another call."""

    def stop(self) -> None:
        """Look no more. Does not wait."""


class FailureDetector(Protocol):
    """Who knows which ranks of a process group are gone: the group's store, or a membership (workers/forming/).

    look_s: how often a call that waits in a collective looks whether a peer has failed. calls: what this rank is doing.
    """

    look_s: float
    calls: Calls

    @property
    def left(self) -> str | None:
        """Why this rank left, once it has."""

    def leave(self, reason: str) -> None:
        """Tell the others that this rank stops."""

    def find_lost(self, answer_s: float, at: Place = NOWHERE) -> Lost:
        """Who is gone, after this rank's collective has failed. Others may take `answer_s` to answer."""

    def watch(self, at: Place = NOWHERE) -> Seen:
        """Look from now on whether a peer has failed, as this rank waits there."""

    def ended(self) -> dict[int, str]:
        """Ranks whose process has ended, well or not, as far as that is known at once, and how. Waits for nobody."""


class StoreDetector:
    """Who belongs to a process group, and who has failed. One for all TorchGroups of one process group.

    The store is torch's own for this process group: as fresh as torch needs it to be.
    """

    look_s = LOOK_S

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lock = threading.Lock()
        self._lost: Lost | None = None
        self._left: str | None = None
        self._birth = Birth.own()
        self.calls = Calls()
        self._known: dict[int, Birth] = {}
        """Of the others, once all of them have been read."""
        self._board = Board(store, rank, size, self.calls)
        _bounded(self._join, STORE_S)

    @property
    def left(self) -> str | None:
        """Why this rank left, once it has."""
        return self._left

    def leave(self, reason: str) -> None:
        """Tell the others that this rank stops. Takes at most STORE_S."""
        self._left = reason

        def tell() -> None:
            self._store.set(_note(self._rank), json.dumps({"left": reason}))
            self._store.set(_ANY, str(self._rank))

        _bounded(tell, STORE_S)

    def end(self, why: str) -> None:
        """The process group goes, with the program or before it: tell the peers that will fail by it. At most STORE_S.

        Nothing where this rank has failed or left: it has said so. The connections of a rank that goes are closed, so
        that its peers fail by themselves. But rank 0, with which the store may end, first ends the wait of those that
        wait for what will not come any more, and stays until all have asked.
        """
        if self._lost is not None or self._left is not None or self._birth != Birth.own():  # a child that was forked
            return

        def tell() -> None:
            if self._rank and not _is_served(self._store):
                return
            # Written, and nothing asked: of a question to a store that has just gone torch writes a page into the log.
            self._board.tell()  # what it has begun it has sent: nobody is to wait less for that
            self._store.set(_note(self._rank), json.dumps({"left": why}))
            if not self._rank and any(one.waits_beyond(self.calls.begun) for one in self._board.others().values()):
                self._store.set(_ANY, str(self._rank))
                self._outlast(set(self._others()), time.monotonic() + STORE_S)

        _bounded(tell, STORE_S)

    def find_lost(self, answer_s: float, at: Place = NOWHERE) -> Lost:
        """Say that this rank failed, wait for the others to say so, and return who did not. Asked once; then known.

        at: the collective that failed. Takes at most answer_s + STORE_S.
        """
        with self._lock:
            if self._lost is None:
                self._lost = _bounded(lambda: self._ask(answer_s, at), answer_s + STORE_S)
            if self._lost is None:
                why = "the store of the group, in its process or on its host, is out of reach"
                self._lost = Lost({0: why} if self._rank else {})
            self.calls.mismatch = self._lost.mismatch
            return self._lost

    def watch(self, at: Place = NOWHERE) -> Watch:
        """Look from now on, in a thread, whether a peer has failed or is in another call. End it with `stop`."""
        return Watch(Lookout(self._board, at, lambda: self._has(_ANY), self._births, self._prove))

    def ended(self) -> dict[int, str]:
        """As FailureDetector.ended. The first call reads where the others run from the store: STORE_S at most."""
        if len(self._known) < self._size - 1:
            self._known = _bounded(self._births, STORE_S) or {}
        return endings(self._known)

    def _join(self) -> None:
        self._store.set(_member(self._rank), self._birth.to_json())
        # Of a process group before this one, over the same store.
        common = [] if self._rank else [_ANY, _MISMATCH]
        for key in (_note(self._rank), _done(self._rank), *common):
            self._store.delete_key(key)
        self._board.tell()

    def _ask(self, answer_s: float, at: Place) -> Lost:
        births = self._births()
        reasons = endings(births)
        calls = self.calls
        recent = [*calls.recent, at]  # with what could not even be begun
        own = {"ended": reasons, "begun": recent, "call": calls.words(), "remedy": calls.remedy}
        if self._left is None:
            self._store.set(_note(self._rank), json.dumps(own))
            self._store.set(_ANY, str(self._rank))
        notes: dict[int, dict[str, Any]] = {self._rank: own}
        until = time.monotonic() + answer_s
        answered: set[int] = set()
        left: dict[int, str] = {}
        while True:
            for r in self._others():
                if r not in answered and self._has(_note(r)):
                    answered.add(r)
                    notes[r] = note = json.loads(self._store.get(_note(r)))
                    if "left" in note:
                        left[r] = f"it left: {note['left']}"
                    reasons = {int(other): why for other, why in note.get("ended", {}).items()} | reasons
                    self._compare(notes)
            silent = [r for r in self._others() if r not in answered and r not in reasons]
            text = self._store.get(_MISMATCH).decode() if self._has(_MISMATCH) else ""
            if text or not silent or time.monotonic() >= until:
                break
            time.sleep(0.02)
            reasons |= endings({r: births[r] for r in silent if r in births})
        self._store.set(_done(self._rank), "")
        if self._rank == 0:  # the store may end with this process, while others still ask it
            self._outlast(answered - left.keys(), until)
        if text:
            return Lost({}, mismatch=text)
        # Who answered and ended later is no cause but a consequence.
        reasons = {r: why for r, why in reasons.items() if r not in answered} | left
        for r in silent:
            known = (
                f": {births[r].words()}, but is busy or hangs" if r in births else ": it hangs, or cannot be reached"
            )
            reasons[r] = f"it did not answer within {answer_s:g} s{known}"
        return Lost(dict(sorted(reasons.items())))

    def _compare(self, notes: dict[int, dict[str, Any]]) -> None:
        """Ranks that failed and had begun different collectives at one place, as a transport may refuse: tell all."""
        seen: dict[tuple[int, int], tuple[Place, int]] = {}
        for rank, note in notes.items():
            for place in (Place(*one) for one in note.get("begun", ()) if one[1] > 0):
                other, who = seen.setdefault(place[:2], (place, rank))
                if who != rank and place.differs(other):
                    where = {who: f"{notes[who]['call']} ({other})", rank: f"{note['call']} ({place})"}
                    self._prove(str(mismatch(where, [notes[who]["remedy"], note["remedy"]])))
                    return

    def _prove(self, text: str) -> None:
        self._store.compare_set(_MISMATCH, "", text)  # the first one stands, so that all ranks say the same
        self._store.set(_ANY, str(self._rank))

    def _outlast(self, ranks: set[int], until: float) -> None:
        while time.monotonic() < until and not all(self._has(_done(r)) for r in ranks):
            time.sleep(0.02)

    def _births(self) -> dict[int, Birth]:
        return {r: Birth.from_json(self._store.get(_member(r))) for r in self._others() if self._has(_member(r))}

    def _others(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank]

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))


def _bounded(ask: Callable[[], T], limit_s: float) -> T | None:
    """What ask() returns; None where it raises the store's errors or takes longer than `limit_s`."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return  # the store's errors: time-out, closed connection. The caller says that it is out of reach

    thread = threading.Thread(target=run, name="thinwire-ask", daemon=True)
    thread.start()
    thread.join(limit_s)
    return answers[0] if answers else None


def _is_served(store: Store) -> bool:
    """Does anybody listen where a TCPStore is served? It goes with rank 0, or with the agent of its host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return True
    try:
        socket.create_connection((store.host, store.port), STORE_S / 2).close()
    except OSError:
        return False
    return True


def _member(rank: int) -> str:
    return f"thinwire/member/{rank}"


def _note(rank: int) -> str:
    return f"thinwire/note/{rank}"


def _done(rank: int) -> str:
    return f"thinwire/done/{rank}"
