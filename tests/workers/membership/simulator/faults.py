"""What goes wrong in one run: drawn from its seed, applied at its time, and healed.

`touch` says which machines a fault may cost their place, `touch_pair` those of which one may lose it because it cannot
talk to another (law 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.workers.membership.simulator.machines import Machine
from thinwire.workers.membership.seats import Limits

if TYPE_CHECKING:
    from tests.workers.membership.simulator.job import Job
    from tests.workers.membership.simulator.worker import Worker

FAULTS_S = 100.0
"""No fault begins later."""
Line = tuple[Machine | None, Machine | None]
LENGTHS_S = [(0.3, 3.0), (3.0, 9.0), (8.0, 14.0), (14.0, 40.0), (40.0, 60.0), (50.0, 90.0)]


class Faults:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.last_s = 0.0
        """When the last of them is healed."""

    def draw(self) -> None:
        """Make a schedule."""
        chance = self._job.chance
        kinds: list[tuple[float, Callable[[float], None]]] = [
            (3, self._kill),
            (1, self._power_off),
            (3, self._stop),
            (1, self._suspend),
            (2, self._cut_pair),
            (3, self._cut_from_server),
            (3, self._isolate_server),
            (2, self._isolate_worker),
            (3, self._partition),
            (1, self._flap),
            (2, self._reset),
            (2, self._kill_server),
            (1, self._stop_server),
            (1, self._clock_jump),
            (1, self._resize),
            (1, self._dismiss),
            (1, self._notice),
            (1, self._die_at_seat),
            (1, self._impostor),
            (1, self._slow_network),
            (1, self._slow_store),
        ]
        weights = [weight for weight, _ in kinds]
        count = 1
        while count < 12 and chance.random() < 0.8:
            count += 1
        at = chance.uniform(0.0, 30.0)
        for _ in range(count):
            (low, high) = chance.choice(LENGTHS_S)
            length_s = chance.uniform(low, high)
            ((_, fault),) = chance.choices(kinds, weights)
            self._job.clockwork.after(at, lambda fault=fault, length_s=length_s: fault(length_s))
            self.last_s = max(self.last_s, at + length_s)
            # Often one comes while the one before still holds.
            at += chance.choice([chance.uniform(0.0, 3.0), chance.uniform(0.0, 15.0), length_s])
            if at > FAULTS_S:
                break

    def _for(self, length_s: float, heal: Callable[[], None], *touched: Machine) -> None:
        """It holds for so long."""
        job = self._job
        job.touch(touched, length_s)
        job.clockwork.after(length_s, heal)

    def _say(self, what: str) -> None:
        self._job.say("FAULT", what)

    def _living(self) -> list[Worker]:
        return [worker for worker in self._job.workers.values() if worker.alive]

    def _one(self) -> Worker | None:
        living = self._living()
        return self._job.chance.choice(living) if living else None

    def _kill(self, length_s: float) -> None:
        if worker := self._one():
            self._say(f"{worker.name} is killed")
            self._job.touch([worker.machine], 0.0)
            worker.kill()

    def _power_off(self, length_s: float) -> None:
        if worker := self._one():
            machine = worker.machine
            self._say(f"machine {machine.name} loses power for {length_s:.1f} s")
            machine.powered = False
            for other in self._living():
                if other.machine is machine:
                    other.kill()

            def again() -> None:
                machine.powered = True
                self._say(f"machine {machine.name} has power again")
                self._job.network.changed()

            self._for(length_s, again, machine)

    def _stop(self, length_s: float) -> None:
        if worker := self._one():
            self._say(f"{worker.name} is stopped for {length_s:.1f} s")
            worker.stop()

            def wake() -> None:
                self._say(f"{worker.name} is woken")
                worker.wake()

            self._for(length_s, wake, worker.machine)

    def _suspend(self, length_s: float) -> None:
        if (worker := self._one()) and not worker.machine.asleep:
            machine = worker.machine
            there = [one for one in self._living() if one.machine is machine]
            self._say(f"machine {machine.name} is suspended for {length_s:.1f} s")
            machine.sleep()
            for one in there:
                one.stop()

            def resume() -> None:
                self._say(f"machine {machine.name} resumes")
                machine.resume()
                self._job.network.changed()
                for one in there:
                    one.wake()

            self._for(length_s, resume, machine)

    def _cut_pair(self, length_s: float) -> None:
        machines = self._job.machines()
        if len(machines) > 1:
            one, other = self._job.chance.sample(machines, 2)
            self._job.touch_pair([one, other], length_s)
            self._cut([(one, other), (other, one)], f"{one.name} and {other.name}", length_s)

    def _cut_from_server(self, length_s: float) -> None:
        if worker := self._one():
            head, machine = self._job.head, worker.machine
            self._cut([(head, machine), (machine, head)], f"the server and {machine.name}", length_s, machine)

    def _isolate_server(self, length_s: float) -> None:
        head, way = self._job.head, self._job.chance.choice(["both", "both", "in", "out"])
        lines: list[Line] = [(None, head)] * (way != "out") + [(head, None)] * (way != "in")
        if way != "both":
            self._job.touch([one.machine for one in self._living() if one.link.connection is None], length_s)
        self._cut(lines, f"the server's machine and all others ({way})", length_s, whole=True)

    def _isolate_worker(self, length_s: float) -> None:
        if worker := self._one():
            here = worker.machine
            others = [machine for machine in [self._job.head, *self._job.machines()] if machine is not here]
            lines = [line for other in others for line in ((here, other), (other, here))]
            self._job.touch_pair(others, length_s)
            self._cut(lines, f"{here.name} and all others", length_s, here, whole=True)

    def _partition(self, length_s: float) -> None:
        chance, machines = self._job.chance, [self._job.head, *self._job.machines()]
        side = [machine for machine in machines if chance.random() < 0.5]
        rest = [machine for machine in machines if machine not in side]
        lines: list[Line] = [line for one in side for other in rest for line in ((one, other), (other, one))]
        names = " ".join(machine.name for machine in side) or "nobody"
        away, near = (rest, side) if machines[0] in side else (side, rest)
        if near == machines[:1]:
            self._isolate_server(length_s)
            return
        self._job.touch_pair(machines, length_s)
        self._cut(lines, f"{names} and the rest", length_s, *away, whole=True)

    def _cut(self, lines: list[Line], what: str, length_s: float, *touched: Machine, whole: bool = False) -> None:
        network = self._job.network
        if not whole and self._job.chance.random() < 0.4:
            lines = lines[:1]
            ((source, target),) = lines
            what += f" (only from {source.name if source else 'all'} to {target.name if target else 'all'})"
        self._say(f"cut between {what} for {length_s:.1f} s")
        for source, target in lines:
            network.cut(source, target)

        def heal() -> None:
            self._say(f"healed: {what}")
            for source, target in lines:
                network.heal(source, target)

        self._for(length_s, heal, *touched)

    def _flap(self, length_s: float) -> None:
        if worker := self._one():
            head, machine, pause_s = self._job.head, worker.machine, self._job.chance.uniform(0.3, 6.0)
            until = self._job.clockwork.now + length_s
            self._say(
                f"the link between the server and {machine.name} flaps for {length_s:.1f} s, each {pause_s:.1f} s"
            )
            self._job.touch([machine], length_s)

            def down() -> None:
                if self._job.clockwork.now < until:
                    self._job.network.cut(head, machine)
                    self._job.network.cut(machine, head)
                    self._job.clockwork.after(pause_s, up)

            def up() -> None:
                self._job.network.heal(head, machine)
                self._job.network.heal(machine, head)
                self._job.clockwork.after(pause_s, down)

            self.last_s = max(self.last_s, until + 2 * pause_s)
            down()

    def _reset(self, length_s: float) -> None:
        if worker := self._one():
            self._say(f"the connection of {worker.name} to the server is reset")
            self._job.touch([worker.machine], 0.0)
            worker.link.reset()

    def _kill_server(self, length_s: float) -> None:
        server = self._job.server
        if server is not None and server.alive:
            pause_s = min(length_s, 20.0)
            self._say(f"the server is killed; another comes after {pause_s:.1f} s")
            server.kill()
            self._job.clockwork.after(pause_s, self._job.start_server)

    def _stop_server(self, length_s: float) -> None:
        server = self._job.server
        if server is not None and server.alive:
            self._say(f"the server is stopped for {length_s:.1f} s")
            server.stop()
            self._for(length_s, server.wake)

    def _clock_jump(self, length_s: float) -> None:
        if worker := self._one():
            worker.machine.wall_s += self._job.chance.choice([-3600.0, -30.0, 30.0, 3600.0])
            self._say(f"the clock of {worker.machine.name} jumps; it is wrong by {worker.machine.wall_s:g} s")

    def _resize(self, length_s: float) -> None:
        job, server = self._job, self._job.server
        most = job.chance.randint(max(1, job.limits.max - 1), 5)
        job.limits = Limits(min(job.limits.min, most), most)
        self._say(f"the job is resized to {job.limits}")
        if server is not None and server.alive:
            server.do("read", lambda: (server.rules.set_limits(job.limits, server.now()), server.do_effects()))

    def _dismiss(self, length_s: float) -> None:
        server, worker = self._job.server, self._one()
        if server is not None and server.alive and worker:
            slot = worker.identity.slot
            self._say(f"whoever fills slot {slot} is dismissed")
            server.do("read", lambda: (server.rules.dismiss(slot, "asked to", server.now()), server.do_effects()))

    def _notice(self, length_s: float) -> None:
        if worker := self._one():
            self._say(f"{worker.name} is told to go")
            worker.do("notice", lambda: worker.leave("told to go"))

    def _die_at_seat(self, length_s: float) -> None:
        self._say("the next newcomer dies between its seat and its group")
        self._job.next_dies_at_seat = True

    def _impostor(self, length_s: float) -> None:
        self._say("the next newcomer brings a wrong signature")
        self._job.next_is_impostor = True

    def _slow_network(self, length_s: float) -> None:
        network = self._job.network
        self._say(f"packets take up to 1 s for {length_s:.1f} s")
        network.delay_s = 1.0
        self._for(length_s, lambda: setattr(network, "delay_s", 0.02))

    def _slow_store(self, length_s: float) -> None:
        store = self._job.store
        self._say(f"writes to the store take up to 20 s for {length_s:.1f} s")
        usual_s, store.delay_s = store.delay_s, 20.0
        self._for(length_s, lambda: setattr(store, "delay_s", min(usual_s, 5.0)))
