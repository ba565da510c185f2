"""Which peer is gone? Ranks whose collective failed ask one another, through the store of their process group.

gloo's errors name an address, which ranks of one host share, and NCCL's name none. And only the neighbours of a dead
rank notice: with four ranks over gloo, the one that is not beside it in the ring waited for the whole time-out, as its
own neighbours were alive. So

    joining     a rank writes where it runs: host, process and when that began
    failing     it writes "I failed and am alive", and waits up to `answer_s` for the others to write the same
    waiting     whoever waits longer than `LOOK_S` in a collective looks whether somebody has failed, and then fails too
    leaving     a rank that stops while its process lives writes so, and its peers fail at their next look

A rank is lost if its process has ended (which ranks of its host can see, and write down for the others), if it has
left, or if it does not answer. A rank that computes for longer than `answer_s` on another host does not answer either;
the message therefore says which of the three it was.

Measured with torch 2.13: ProcessGroup.abort() and shutdown() do nothing over gloo (peers of a rank that called them
waited for the whole time-out, and its own next collective succeeded); dropping the last reference, which
destroy_process_group does, closes the connections, and peers fail in 10 ms. But it waits for collectives that run, and
it is not ours to destroy what the user made. Hence the note in the store.

Every question to the store is asked in a thread that is not waited for longer than a bound: a store whose host hangs
answers never. It is part of rank 0's process, or of its host's agent; where it is out of reach, rank 0 is the lost one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch.distributed.distributed_c10d import Store

from thinwire.comm.errors import PeerLost
from thinwire.comm.groups.births import Birth, endings

T = TypeVar("T")
LOOK_S = 0.25
STORE_S = 2.0
"""How long the store may take for one question beyond the time that the question itself takes."""
_ANY = "thinwire/failed"


@dataclass(frozen=True, slots=True)
class Lost:
    """The ranks that are gone, and what is known of each."""

    reasons: dict[int, str]

    def error(self, rank: int, size: int, collective: str, cause: object) -> PeerLost:
        """The error to raise on `rank`."""
        who = "; ".join(f"rank {other} ({why})" for other, why in self.reasons.items())
        return PeerLost(
            f"rank {rank} of {size} lost {who or 'a peer (but all answered: the network failed, or the call)'} in "
            f"{collective}: {cause}. Restart the group from its checkpoint; the logs of the rank that stopped first "
            "say why",
            next(iter(self.reasons)) if len(self.reasons) == 1 else None,
            tuple(self.reasons),
        )


class Seen(Protocol):
    """Looks whether a peer has failed, until `stop`."""

    @property
    def seen(self) -> bool:
        """A peer has failed."""

    def stop(self) -> None:
        """Look no more. Does not wait."""


class FailureDetector(Protocol):
    """Who knows which ranks of a process group are gone: the group's store, or a membership service (workers/ranks.py).

    look_s: how often whoever waits in a collective looks whether a peer has failed.
    """

    look_s: float

    @property
    def left(self) -> str | None:
        """Why this rank left, once it has."""

    def leave(self, reason: str) -> None:
        """Tell the others that this rank stops."""

    def find_lost(self, answer_s: float) -> Lost:
        """Who is gone, after this rank's collective has failed. Others may take `answer_s` to answer."""

    def watch(self) -> Seen:
        """Look from now on whether a peer has failed."""


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
        _bounded(lambda: store.set(_member(rank), Birth.own().to_json()), STORE_S)

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

    def find_lost(self, answer_s: float) -> Lost:
        """Say that this rank failed, wait for the others to say so, and return who did not. Asked once; then known.

        Takes at most answer_s + STORE_S.
        """
        with self._lock:
            if self._lost is None:
                self._lost = _bounded(lambda: self._ask(answer_s), answer_s + STORE_S)
            if self._lost is None:
                why = "the store of the group, in its process or on its host, is out of reach"
                self._lost = Lost({0: why} if self._rank else {})
            return self._lost

    def watch(self) -> Watch:
        """Look from now on, in a thread, whether a peer has failed. End it with `stop`."""
        return Watch(lambda: self._has(_ANY))

    def _ask(self, answer_s: float) -> Lost:
        births = {r: Birth.from_json(self._store.get(_member(r))) for r in self._others() if self._has(_member(r))}
        reasons = endings(births)
        if self._left is None:
            self._store.set(_note(self._rank), json.dumps({"ended": reasons}))
            self._store.set(_ANY, str(self._rank))
        until = time.monotonic() + answer_s
        answered: set[int] = set()
        left: dict[int, str] = {}
        while True:
            for r in self._others():
                if r not in answered and self._has(_note(r)):
                    answered.add(r)
                    note = json.loads(self._store.get(_note(r)))
                    if "left" in note:
                        left[r] = f"it left: {note['left']}"
                    reasons = {int(other): why for other, why in note.get("ended", {}).items()} | reasons
            silent = [r for r in self._others() if r not in answered and r not in reasons]
            if not silent or time.monotonic() >= until:
                break
            time.sleep(0.02)
            reasons |= endings({r: births[r] for r in silent if r in births})
        # Who answered and ended later is no cause but a consequence.
        reasons = {r: why for r, why in reasons.items() if r not in answered} | left
        reasons |= dict.fromkeys(silent, f"it did not answer within {answer_s:g} s: it hangs, or cannot be reached")
        self._store.set(_done(self._rank), "")
        if self._rank == 0:  # the store may end with this process, while others still ask it
            asking = answered - left.keys()
            while time.monotonic() < until and not all(self._has(_done(r)) for r in asking):
                time.sleep(0.02)
        return Lost(dict(sorted(reasons.items())))

    def _others(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank]

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))


class Watch:
    """Looks every LOOK_S, in a thread, until something is seen or `stop` is called."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._stop = threading.Event()
        self._seen = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-watch", daemon=True)
        self._thread.start()

    @property
    def seen(self) -> bool:
        """A peer has failed."""
        return self._seen.is_set()

    def stop(self) -> None:
        """Look no more. Does not wait."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._look():
                    self._seen.set()
                    return
            except RuntimeError:  # the store is gone, so its host is, or the group has ended
                if not self._stop.is_set():
                    self._seen.set()
                return
            self._stop.wait(LOOK_S)


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


def _member(rank: int) -> str:
    return f"thinwire/member/{rank}"


def _note(rank: int) -> str:
    return f"thinwire/note/{rank}"


def _done(rank: int) -> str:
    return f"thinwire/done/{rank}"
