"""One job in simulated time: its machines, server, workers and store, and who starts workers again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from tests.workers.membership.simulator.checkpoints import Checkpoint, Store
from tests.workers.membership.simulator.clockwork import Clockwork
from tests.workers.membership.simulator.faults import Faults
from tests.workers.membership.simulator.group import Group
from tests.workers.membership.simulator.laws import CALM_S, Broken, Laws
from tests.workers.membership.simulator.machines import Machine
from tests.workers.membership.simulator.network import Network
from tests.workers.membership.simulator.server import Server
from tests.workers.membership.simulator.worker import Worker
from thinwire.workers.membership.attendance import Happened, Keep, Timing
from thinwire.workers.membership.rules import Rules
from thinwire.workers.membership.seats import Identity, Limits, Seat

POLL_S = 3.0
"""How often the worker group looks whether a process is missing."""
LEAVE_S = 30.0
"""After so long a process that was counted out is ended, or, where it cannot be reached, replaced."""
NODE_S = 60.0
"""A node of Ray that cannot reach the cluster's head for so long ends what runs on it."""
SHOWN = {"seated", "lost", "fenced", "failed", "refused", "left", "adopted", "minority", "gave_up", "dismissed"}
OUT = {"lost", "fenced", "failed", "dismissed", "left"}


def by_generation(store: Store, worker: Worker, group: Group) -> int:
    """The token of a group's checkpoints."""
    return group.generation


def while_it_stands(worker: Worker, one: Checkpoint) -> bool:
    """May rank 0 write the manifest?"""
    return worker.may_commit() and worker.state.ended is None


@dataclass(frozen=True)
class Settings:
    """What is simulated. Other values than these put old rules back."""

    rules: Callable[..., Rules] = Rules
    timing: Timing = field(default_factory=Timing)
    leased: bool = True
    forming_listens: bool = True
    token: Callable[[Store, Worker, Group], int] = by_generation
    may_save: Callable[[Worker, Checkpoint], bool] = while_it_stands
    save_every: int = 3
    store_s: float | None = None
    """How long a write takes at most; drawn where it is None."""
    tick_s: float = 0.4
    """Of the real server's 0.05 s: the rules ask for several a second."""


class Job:
    """A run of one seed."""

    group_type: type[Group] = Group

    def __init__(self, seed: int, settings: Settings) -> None:
        self.settings = settings
        self.clockwork = Clockwork(seed)
        self.chance: random.Random = self.clockwork.chance
        self.network = Network(self.clockwork)
        self.timeline: list[tuple[float, str, str]] = []
        self.workers: dict[str, Worker] = {}
        self.touched: dict[str, float] = {}
        self.touched_pairs: dict[str, float] = {}
        self.head = self._machine("head")
        self.store = Store(self, settings.store_s or self.chance.choice([0.3, 1.0, 1.0, 5.0, 20.0]))
        self.laws = Laws(self)
        self.faults = Faults(self)
        self.server: Server | None = None
        self.next_dies_at_seat = self.next_is_impostor = False
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}
        self._places: dict[int, Machine] = {}
        self._coming: dict[int, bool] = {}
        self._out: dict[str, float] = {}
        self._cut_for_s: dict[str, float] = {}
        self._nodes_end = self.chance.random() < 0.5
        self.kept: Keep | None = None
        """What the key-value store has of the server."""
        most = self.chance.choice([1, 2, 2, 3, 3, 4, 4, 5])
        self.limits = Limits(self.chance.randint(1, most), most)
        self.signature = {"model": "gpt"}
        """What the job is to train."""

    def run(self) -> str | None:
        """To its end. The law that it has broken, in words; None where it has broken none."""
        self.say("job", f"{self.limits}")
        self.start_server()
        for slot in range(self.limits.max):
            self._start_worker(slot, self.chance.uniform(0.0, 5.0))
        self.faults.draw()
        self._supervise()
        try:
            self.clockwork.run(self._is_over)
        except Broken as broken:
            return str(broken)
        return None

    def say(self, who: str, what: str) -> None:
        """For the timeline."""
        self.timeline.append((self.clockwork.now, who, what))

    def touch(self, machines: Iterable[Machine], length_s: float) -> None:
        """A fault of so many seconds may cost whoever runs there its place."""
        for machine in machines:
            until = self.clockwork.now + length_s
            self.touched[machine.name] = max(self.touched.get(machine.name, 0.0), until)

    def touch_pair(self, machines: Iterable[Machine], length_s: float) -> None:
        """A fault of so many seconds may cost whoever runs there its place, if that is because some cannot talk."""
        for machine in machines:
            until = self.clockwork.now + length_s
            self.touched_pairs[machine.name] = max(self.touched_pairs.get(machine.name, 0.0), until)

    def machines(self) -> list[Machine]:
        """Those of workers."""
        return list({machine.name: machine for machine in self._places.values()}.values())

    def process(self, id: str) -> Worker:
        """The worker of this id."""
        return self.workers[id]

    def group(self, seat: Seat) -> Group:
        """That of a seat; all who have the same seats have the same."""
        key = (seat.generation, tuple(member.identity.id for member in seat.members))
        if key not in self._groups:
            group = self._groups[key] = self.group_type(self, seat)
            for other in self._groups.values():
                other.followed_by(group)
        return self._groups[key]

    def groups_of(self, worker: Worker) -> list[Group]:
        """In which it was seated."""
        return [group for group in self._groups.values() if worker.identity.id in group.ids]

    def start_server(self) -> None:
        """A new process, which knows what the key-value store has kept."""
        kept = self.kept
        timing = self.settings.timing
        timing = replace(timing, quiet_s=0.0 if kept is None or kept.vacant else timing.lease_s)
        self.server = Server(self, self.settings.rules, timing, kept.generation if kept else 0)
        self.server_since = self.clockwork.now
        self.say("server", "starts")

    def happened(self, event: Happened) -> None:
        """The server says so."""
        fields = event.fields
        if event.kind in SHOWN:
            words = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("slot", "host", "pid"))
            self.say("server", f"generation {event.generation}: {event.kind} {words}")
        id = fields.get("id")
        if isinstance(id, str) and event.kind in OUT:
            self._out[id] = self.clockwork.now
            self.laws.counted_out(id, str(fields.get("why")))
        elif isinstance(id, str) and event.kind == "connected":
            self._out.pop(id, None)

    def nobody_listens(self, asker: Worker, port: int) -> bool:
        """As owed.nobody_listens, of a worker by its port: only a system that is reached says that a process ended."""
        there = next(worker for worker in self.workers.values() if worker.identity.port == port)
        reached = there.machine.powered and self.network.both(asker.machine, there.machine)
        return reached and not there.alive

    def _machine(self, name: str) -> Machine:
        wall_s = self.chance.choice([0.0, 0.0, -30.0, 30.0, 3600.0])
        return Machine(self.clockwork, name, rate=self.chance.uniform(0.98, 1.02), wall_s=wall_s)

    def _start_worker(self, slot: int, after_s: float) -> None:
        self._coming[slot] = True
        self.clockwork.after(after_s, lambda: self._worker(slot))

    def _worker(self, slot: int) -> None:
        self._coming[slot] = False
        machine = self._places.get(slot)
        if machine is None or not machine.powered or not self.network.both(self.head, machine):
            number = sum(1 for place in self._machines_of(slot))
            machine = self._places[slot] = self._machine(f"m{slot}{'abcdefghijklmnopqrstuvwxyz'[number % 26]}")
        number = sum(worker.identity.slot == slot for worker in self.workers.values())
        id = f"w{slot}.{number}"
        signature = self.signature
        if self.next_is_impostor and any(one.alive and one.has_state for one in self.workers.values()):
            self.next_is_impostor, signature = False, {"model": "another"}
            self.touch([machine], 0.0)
        worker = Worker(self, machine, Identity(id, slot, machine.name, 1, port=len(self.workers) + 1), signature)
        worker.dies_at_seat, self.next_dies_at_seat = self.next_dies_at_seat and number > 0, False
        self.workers[id] = worker
        self.say(id, f"starts on {machine.name}")

    def _machines_of(self, slot: int) -> set[str]:
        return {worker.machine.name for worker in self.workers.values() if worker.identity.slot == slot}

    def _supervise(self) -> None:
        """As the worker group does: a slot whose process is gone is filled again."""
        now = self.clockwork.now
        for slot in range(self.limits.max):
            living = [worker for worker in self.workers.values() if worker.identity.slot == slot and worker.alive]
            for worker in living:
                cut = not self.network.both(self.head, worker.machine)
                if now - self._out.get(worker.identity.id, now) > LEAVE_S and not cut:
                    self.say("driver", f"ends {worker.name}, which was counted out")
                    worker.kill()
                self._cut_for_s[worker.name] = self._cut_for_s.get(worker.name, 0.0) + POLL_S if cut else 0.0
                if self._nodes_end and self._cut_for_s[worker.name] > NODE_S:
                    self.say("its node", f"ends {worker.name}: it has not reached the head for {NODE_S:g} s")
                    worker.kill()
            filled = any(now - self._out.get(worker.identity.id, now) <= LEAVE_S for worker in living if worker.alive)
            if not filled and not self._coming.get(slot):
                self._start_worker(slot, self.chance.uniform(4.0, 12.0))
        self.clockwork.after(POLL_S, self._supervise)

    def _is_over(self) -> bool:
        since_s = self.clockwork.now - self.faults.last_s
        if since_s < 5.0:
            return False
        wrong = self.laws.calm()
        if wrong is not None and since_s > CALM_S:
            self.laws.still_broken(wrong)
        return wrong is None
