"""A box of processes as one member: the first of them speaks to the membership, and tells the others.

A model is sharded over the processes of a box (docs/sharded.md), whose default process group is the box: it is formed
once, when its processes start, and FSDP's collectives live in it as long as they do. Of each generation every process
has a group with those of its rank in the other boxes: its lane.

    first process    a Member, in whose name the box joins; forms its lane as any worker does (group.py), and so has
                     proved that the two machines of each pair reach one another
    the others       form theirs over the store of the first lane

A death ends some lanes sooner than others, and a rank that goes to the next generation would leave its box waiting in a
collective of FSDP's. So the ranks of a box never part. What of the membership's word changes their course they hear at
one place, and a rank that has lost a peer says so at the next of these (`Processes.share`), before any of them begins
what needs all. In optimizer.step() the exchange itself asks (comm/exchange/exchange.py, `agree`), in regroup() its end.

A step thus counts in all lanes of a box or in none. Where it counts in one box and not in another, the next regroup
finds that box ahead in every lane, and the others finish the step in every lane.

A box whose process dies is lost, all of it: its first process says so and ends, and the others with it
(workers/companions.py).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.comm import PeerLost, SoloGroup, TorchGroup
from thinwire.comm.calls import NOWHERE, Calls, Place
from thinwire.comm.groups.distributed import all_gather_single
from thinwire.comm.groups.failure_detector import Lost
from thinwire.comm.protocol import Group
from thinwire.workers.forming.group import Attempt, ElasticRanks, close_lane, lane_group, reach_store
from thinwire.workers.membership.member import Member
from thinwire.workers.membership.seats import Change, Seat
from thinwire.workers.ranks import Box, OnWait, only_logged
from thinwire.workers.whereabouts import Whereabouts

logger = logging.getLogger(__name__)

FOREVER = timedelta(days=30)
"""The first process may wait for a seat as long as the job for its machines; a death is noticed without a time-out."""
LOOK_S = 1.0
FIRST = 0
"""The rank that speaks to the membership."""
_FINE, _LOST = 0, 1
_SEAT = TypeAdapter(Seat)


class BoxBroken(RuntimeError):
    """Another process of this box is gone, and so is the box."""


class Processes:
    """The processes of one box, formed already as torch.distributed's default group: a Box (workers/ranks.py).

    store: theirs, served by the first. Collective.
    """

    def __init__(self, store: Store) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = store
        self.has_parted = False
        """Has the last call said that a peer was lost? Then all of them know."""
        self._votes = dist.new_group(backend="gloo", timeout=FOREVER)

    def share(self, what: str, text: str = "") -> list[str]:
        """As Box.share. Raises BoxBroken too."""
        said = self._gather(f"{what}\n{text}")
        if said is None:
            raise PeerLost(f"a process of this box has lost a peer, as this one hears before {what}")
        words = [one.split("\n", 1) for one in said]
        if len({where for where, _ in words}) > 1:
            raise BoxBroken(
                f"the processes of this box are at different places of their course, {[where for where, _ in words]}: "
                "the script must do the same in all of them; else this is a defect of thinwire, please report it"
            )
        return [told for _, told in words]

    def part(self) -> None:
        """This process has lost a peer, or goes to the next generation: said in place of the next share()."""
        if not self.has_parted:
            self._gather(None)

    def _gather(self, text: str | None) -> list[str] | None:
        """None where that is what one of them gives. Two small collectives; the second where there is text."""
        data = b"" if text is None else text.encode()
        own = torch.tensor([_LOST if text is None else _FINE, len(data)], dtype=torch.int64, device="cpu")
        all_n = torch.empty(2 * self.size, dtype=own.dtype, device="cpu")
        try:
            all_gather_single(all_n, own, group=self._votes)
            self.has_parted = bool(all_n[::2].any())
            if self.has_parted:
                return None
            lengths = all_n[1::2].tolist()
            padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            rows = torch.empty(self.size * max(lengths), dtype=torch.uint8, device="cpu")
            all_gather_single(rows, padded, group=self._votes)
        except RuntimeError as error:
            raise BoxBroken(f"another process of this box is gone, and with it this one: {error}") from error
        parts = rows.view(self.size, -1)
        return [parts[rank, :length].numpy().tobytes().decode() for rank, length in enumerate(lengths)]


class News:
    """That a generation is over, in the store of a box: any of its processes may say it, and all may look."""

    def __init__(self, store: Store, generation: int) -> None:
        self._store, self._key = store, f"over-{generation}"

    def tell(self, why: str) -> None:
        """The first word stands."""
        self._store.compare_set(self._key, "", why or "it is over")

    @property
    def over(self) -> str | None:
        """Why; None while it is not."""
        return self._store.get(self._key).decode() if self._store.check([self._key]) else None


class LaneDetector:
    """What a process that is not its box's first hears of its peers: that the generation is over."""

    look_s = 0.05

    def __init__(self, news: News) -> None:
        self._news = news
        self.left: str | None = None
        self.calls = Calls()

    def leave(self, reason: str) -> None:
        """This process goes on with nobody: the box ends the generation."""
        self.left = reason
        self._news.tell(reason)

    def find_lost(self, answer_s: float, at: Place = NOWHERE) -> Lost:
        """Nobody by rank: the first process knows. Waits `answer_s` for its word."""
        until = time.monotonic() + answer_s
        while self._news.over is None and time.monotonic() < until:
            time.sleep(self.look_s)
        return Lost({}, f"The generation is over: {self._news.over or 'nobody has said why'}")

    def ended(self) -> dict[int, str]:
        """Nobody that the first process does not report."""
        return {}

    def watch(self, at: Place = NOWHERE) -> _Look:
        """Look at what it has said."""
        return _Look(self._news)


class _Look:
    def __init__(self, news: News) -> None:
        self._news = news

    @property
    def seen(self) -> bool:
        return self._news.over is not None

    def stop(self) -> None:
        """Nothing is left running."""


class BoxRanks:
    """The Ranks of one process of a box. first: those of the member, on its first process; None on the others.

    host: this process's own address, for its lane. timeout_s: of a collective there; the same on all processes, for
    one that gives up earlier takes the box out of a generation in which the others would have waited. settle: called
    on the first before it says that it has failed: it may have failed for the end of another (workers/companions.py).
    """

    elastic = True

    def __init__(
        self,
        processes: Processes,
        first: tuple[ElasticRanks, Member] | None,
        host: str,
        device: torch.device,
        timeout_s: float,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self.box: Box = processes
        self._settle = settle
        self._processes = processes
        self._first: ElasticRanks | None = None if first is None else first[0]
        self._member: Member | None = None if first is None else first[1]
        self._host, self._device, self._timeout_s = host, device, timeout_s
        self._on_wait: OnWait = only_logged
        self.where = Whereabouts() if self._first is None else self._first.where
        self.seat: Seat | None = None
        self.step = 0
        self._news: News | None = None
        self._lane: TorchGroup | None = None

    @property
    def on_wait(self) -> OnWait:
        """As Ranks.on_wait: of the first process."""
        return self._on_wait

    @on_wait.setter
    def on_wait(self, call: OnWait) -> None:
        self._on_wait = call
        if self._first is not None:
            self._first.on_wait = call

    def form(self, step: int, has_state: bool, signature: dict[str, str]) -> Group:
        """As Ranks.form. All processes of the box come here. Raises BoxBroken too."""
        self.step = step
        if self._news is not None:
            self._news.tell("a process of this box goes to the next generation")  # its others may wait in their lanes
        self._processes.part()
        self._let_go()
        group: Group | None = None
        told = ""
        if self._first is not None:
            group, told = self._seated(step, has_state, signature)
        meeting = json.loads(self._processes.share("the next generation", told)[FIRST])
        self.seat = seat = _SEAT.validate_python(meeting["seat"])
        self._news = News(self._processes.store, seat.generation)
        if self._first is not None:
            self._watch(seat, self._news)
        elif seat.size == 1:
            group = SoloGroup()
        else:
            group = self._form_lane(seat, meeting["host"], meeting["port"], self._news)
        assert group is not None
        self._processes.share(f"generation {seat.generation}")
        return group

    def at_boundary(self, step: int) -> Change | None:
        """As Ranks.at_boundary, alike on all processes of the box. Raises BoxBroken too."""
        self.step = step
        change = None if self._first is None else self._first.at_boundary(step)
        told = "" if change is None else json.dumps([change.step, change.leaving, change.reason])
        said = self._processes.share(f"the boundary after step {step}", told)[FIRST]
        return Change(*json.loads(said)) if said else None

    def look(self, step: int) -> None:
        """As Ranks.look, of this process alone."""
        if self._first is not None:
            self._first.look(step)
        if self._news is not None and (why := self._news.over) is not None:
            raise PeerLost(f"the generation is over, after step {step}: {why}")

    def may_commit(self) -> bool:
        """As Ranks.may_commit. What the others have made counts where the first process says so, at the boundary."""
        return True if self._first is None else self._first.may_commit()

    def leave(self) -> None:
        """As Ranks.leave. All processes of the box come here."""
        self._processes.share("the end")
        if self._first is not None:
            self._first.leave()
        self._let_go()

    def fail(self, reason: str) -> None:
        """As Ranks.fail. Of another process than the first the end of it says the same (workers/companions.py)."""
        if self._first is not None:
            if self._settle is not None:
                self._settle()
            self._first.fail(reason)
        elif self._news is not None:
            self._news.tell(reason)

    def _seated(self, step: int, has_state: bool, signature: dict[str, str]) -> tuple[Group, str]:
        """In the next generation that comes together, and what the others have to know of it."""
        assert self._first is not None
        while True:
            try:
                group = self._first.form(step, has_state, signature)
            except PeerLost as error:
                logger.warning("not_formed step=%d reason=%r", step, str(error))
                continue
            seat = self._first.seat
            assert seat is not None
            host, port = ("", 0) if isinstance(group, SoloGroup) else _served_at(group, seat)
            return group, json.dumps({"seat": _SEAT.dump_python(seat, mode="json"), "host": host, "port": port})

    def _form_lane(self, seat: Seat, host: str, port: int, news: News) -> TorchGroup:
        attempt = Attempt(seat.generation, self._host, lambda: news.over)
        try:
            store = PrefixStore(f"generation-{seat.generation}", reach_store(attempt, host, port))
            made = lane_group(attempt, store, seat, self._processes.rank, self._device, self._timeout_s)
        except (RuntimeError, OSError) as error:  # the membership's word, the store's and the transport's errors
            raise PeerLost(f"generation {seat.generation} did not come together: {error}") from error
        self._lane = TorchGroup(made, detector=LaneDetector(news))
        return self._lane

    def _watch(self, seat: Seat, news: News) -> None:
        """Pass on to the other processes that this generation is over, as soon as the membership says it."""
        member, ranks = self._member, self._first
        assert member is not None
        assert ranks is not None

        def run() -> None:
            while ranks.seat is seat and not member.has_ended:
                if (why := member.wait_over(LOOK_S)) is not None:
                    news.tell(why)
                    return

        threading.Thread(target=run, name="thinwire-box-news", daemon=True).start()

    def _let_go(self) -> None:
        close_lane(self._lane, self._timeout_s)
        self._lane = None


def _served_at(group: Group, seat: Seat) -> tuple[str, int]:
    """Where the store of a generation is."""
    assert isinstance(group, TorchGroup)
    store: Any = dist.distributed_c10d._get_process_group_store(group.process_group)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return seat.members[0].identity.host, int(store.port)
