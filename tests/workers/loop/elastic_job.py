"""A small job whose workers are real processes under a membership server of the test: killed, stopped, replaced.

Processes are forked (tests/forked.py), so that a worker is there in a moment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from tests.forked import FORKSERVER
from tests.tools.lab.inside import enter, inside
from tests.workers.small_job import SMALL, Recording
from thinwire.contract.files import write_whole
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import read_spec
from thinwire.workers.forming import pairs
from thinwire.workers.membership.attendance import LEASE_END_S, Timing
from thinwire.workers.membership.commit_lease import LEASE_S
from thinwire.workers.membership.member import Member
from thinwire.workers.membership.seats import Identity, Limits
from thinwire.workers.membership.server import MembershipServer
from thinwire.workers.membership.state import Dismissed

SECRET = "sixteen-characters-or-more"


class Telling(Recording):
    """Writes events and steps where the test can read them."""

    def __init__(self, run_dir: Path, slot: int, pause_s: float):
        super().__init__(run_dir)
        self._slot, self._pause_s, self._run_dir, self.rank = slot, pause_s, run_dir, None

    def seated(self, group, device):
        super().seated(group, device)
        self.rank = group.rank

    def steps(self, samples, num_samples, sent_bytes):
        super().steps(samples, num_samples, sent_bytes)
        self._tell(kind="steps", step=samples[-1].step)

    def event(self, kind, step, **fields):
        if self.rank == 0:
            self._tell(kind=kind, step=step, **fields)

    def _tell(self, **fields):
        with (self._run_dir / "events.jsonl").open("a") as file:
            told = {"slot": self._slot, "pid": os.getpid(), "rank": self.rank, "time": time.time(), **fields}
            file.write(json.dumps(told) + "\n")


@dataclass(frozen=True)
class Times:
    """Seconds of the rules, as in a job (workers/membership, workers/forming); `of` makes all of them shorter."""

    beat_s: float = 1.0
    beat_timeout_s: float = 10.0
    join_timeout_s: float = 10.0
    return_s: float = 5.0
    lease_s: float = LEASE_S
    collective_s: float = 60.0
    connect_s: float = 5.0
    answer_s: float = 20.0
    waited_s: float = 3.0
    unreachable_s: float = 10.0

    def of(self, share):
        return Times(**{name: share * seconds for name, seconds in asdict(self).items()})

    def server(self):
        names = ("beat_timeout_s", "join_timeout_s", "return_s")
        return {**{name: getattr(self, name) for name in names}, "lease_s": self.lease_s * LEASE_END_S / LEASE_S}

    def reach(self):
        share = self.unreachable_s / 10.0
        return pairs.Times(
            self.waited_s, self.unreachable_s, 5 * share, 3 * share, max(1, round(2 * share)), 0.25 * share
        )


LATE_S = 0.5
QUICK = Times(beat_s=0.2, collective_s=20.0)


@dataclass(frozen=True)
class Place:
    """Where a worker runs: its address, and the process that holds its host of a lab, where there is one."""

    address: str = "127.0.0.1"
    holder_pid: int | None = None


def _work(run_dir: Path, spec: dict, slot: int, address, pause_s: float, times: Times, place: Place, version):
    import torch

    import thinwire
    from thinwire.workers.checkpoints import CheckpointStore
    from thinwire.workers.elastic.worker_side import heed_sigterm, told_to_leave
    from thinwire.workers.forming.group import ElasticRanks
    from thinwire.workers.forming.pairs import Door, Patience
    from thinwire.workers.membership import state
    from thinwire.workers.membership.commit_lease import CommitLease
    from thinwire.workers.ranks import RunEnded
    from thinwire.workers.saving import floor_of
    from thinwire.workers.session.body import Bodies
    from thinwire.workers.session.course import Course
    from thinwire.workers.session.job import run_job
    from thinwire.workers.session.training import Run
    from thinwire.workers.worker import box_of, pass_on

    thinwire.__version__ = version or thinwire.__version__
    if place.holder_pid is not None:
        enter(place.holder_pid)
    torch.set_num_threads(1)
    os.setsid()
    log = (run_dir / f"log-{slot}-{os.getpid()}").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", force=True)
    opens = Bodies.open

    @contextmanager
    def slow(bodies, share):  # in the body: whoever dies here is missed in its own step
        if death is not None:
            death.end()
        with opens(bodies, share):
            time.sleep(pause_s)
            if (run_dir / f"late-{slot}").exists():
                time.sleep(LATE_S)
            while share.step > int((run_dir / "allowed").read_text() or 0):
                time.sleep(0.005)
            while (run_dir / f"hang-{slot}").exists() and member._state.ended is None:
                time.sleep(0.005)
            if (run_dir / f"nan-{slot}").exists():
                first = bodies._optimizers[0].param_groups[0]["params"][0]
                first.register_hook(lambda gradient: gradient * torch.nan)
            if (run_dir / f"full-{slot}").exists():
                raise OSError(28, "No space left on device")
            yield

    Bodies.open = slow
    deliver = CheckpointStore.deliver

    def held(store, snapshot):
        while (run_dir / f"hold-{slot}").exists():
            time.sleep(0.005)
        return deliver(store, snapshot)

    CheckpointStore.deliver = held
    if (run_dir / f"die-{slot}").exists():
        die_while_forming((run_dir / f"die-{slot}").read_text())
    death = None
    if (run_dir / f"line-{slot}").exists():
        death = DiesAtLine(int((run_dir / f"line-{slot}").read_text()), run_dir / f"died-{slot}")
    attend = Course.attend

    def told(course):
        attend(course)
        seat = course._ranks.seat
        commits.write(json.dumps([time.time(), seat.generation, course.step]) + "\n")

    Course.attend = told
    commits = (run_dir / f"commits-{slot}-{os.getpid()}").open("w", buffering=1)
    state.CommitLease = partial(CommitLease, times.lease_s)
    door = Door(place.address, SECRET)
    identity = Identity(uuid.uuid4().hex, slot, door.host, os.getpid(), port=door.port)
    member = Member(lambda: address, SECRET, identity, beat_s=times.beat_s)
    heed_sigterm(30.0, lambda: True)
    threading.Thread(target=pass_on, args=(told_to_leave, member), daemon=True).start()
    failure = run_dir / "failure.json"
    floor = partial(floor_of, run_dir, read_spec(spec).checkpoint)
    cpu, per_box = torch.device("cpu"), read_spec(spec).workers.per_box
    ranks = ElasticRanks(
        member,
        door,
        cpu,
        timeout_s=times.collective_s,
        patience=Patience(connect_s=times.connect_s, answer_s=times.answer_s),
        times=times.reach(),
        ended=failure.exists,
        floor=floor,
        beside=per_box > 1,
    )
    run, companions = Run(run_dir, time.time()), None
    if per_box > 1:
        (run_dir / f"job-{slot}.json").write_text(json.dumps({"spec": spec}))
        (run_dir / f"job-{slot}.json").replace(run_dir / "job.json")
        ranks, companions = box_of(ranks, member, per_box, [cpu] * per_box, door.host, run)
        (run_dir / f"box-{slot}").write_text(json.dumps([os.getpid(), *companions.pids]))
    look, may_commit, deaf = ranks.look, ranks.may_commit, run_dir / f"deaf-{slot}"
    ranks.look = lambda step: None if deaf.exists() else look(step)
    ranks.may_commit = lambda: deaf.exists() or may_commit()
    reporter = Telling(run_dir, slot, pause_s)
    status = 0
    try:
        summary = run_job(read_spec(spec), run, ranks, torch.device("cpu"), reporter)
        reporter._tell(kind="ended", step=-1)
        if summary is not None:
            write_whole(RunFolder(run_dir).summary, summary.as_text())  # its picture, which nobody sees, costs a second
    except (Dismissed, RunEnded) as reason:
        reporter._tell(kind="left", step=-1, reason=f"{type(reason).__name__}: {reason}")
    except BaseException as error:  # noqa: BLE001 - told to the test
        traceback.print_exc()
        reporter._tell(kind="failed", step=-1, error=f"{type(error).__name__}: {error}")
        status = 1
    if death is not None:
        death.end()
    if companions is not None:
        companions.stop()
    log.flush()
    os._exit(status)


class DiesAtLine:
    """Counts the lines of thinwire that the loop's thread runs from the boundary on at which the generation ends as
    planned, until its next step, or its end; at the at-th the process ends, as a power cut ends it.

    told: the file that has where it died, or how many lines there were.
    """

    def __init__(self, at: int, told: Path):
        self._at, self._told, self._lines, self._armed = at, told, 0, False
        plain = Member.at_boundary

        def at_boundary(member, step):
            if member._state.promise is not None and step >= member._state.stop_at and not self._armed:
                self._armed = True
                sys.settrace(self._call)
            return plain(member, step)

        Member.at_boundary = at_boundary

    def end(self):
        """Nothing is counted any more: the change is over."""
        if self._armed and sys.gettrace() is not None:
            sys.settrace(None)
            self._told.write_text(str(self._lines))

    def _call(self, frame, event, value):
        return self._line if "thinwire" in frame.f_globals.get("__name__", "") else None

    def _line(self, frame, event, value):
        if event == "line":
            self._lines += 1
            if self._lines == self._at:
                code = frame.f_code
                self._told.write_text(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
                os._exit(9)
        return self._line


def die_while_forming(point: str):
    """Kill this process, which is seated, at a point before it has its process group."""
    import torch.distributed as dist

    from thinwire.workers.forming import group
    from thinwire.workers.forming.pairs import Pairs

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def listens(store, rank, *rest):
        threading.Thread(target=gloo, args=(store, rank, *rest), daemon=True).start()
        while not store.check([f"0/{rank}"]):  # gloo's own key: where it listens, for those that it waits for
            time.sleep(0.001)
        die()

    gloo = dist.ProcessGroupGloo
    if point == "before the pairs":
        Pairs.prove = die
    elif point == "before the store":
        group._reach_store = die
    elif point == "before gloo":
        group._init = die
    elif point == "inside gloo":
        listens._Options, listens.create_device = gloo._Options, gloo.create_device
        dist.ProcessGroupGloo = listens


class ElasticJob:
    """The server, and the workers by slot. Ends all that it started.

    lab: where the server is on host 0, and the worker of slot k on host k + 1.
    """

    def __init__(
        self, run_dir: Path, limits: Limits, *, pause_s=0.02, timeout_s=20.0, server=None, times=None, lab=None, **spec
    ):
        self.run_dir, self._pause_s, self._lab = run_dir, pause_s, lab
        self._times = times or replace(QUICK, collective_s=timeout_s)
        run_dir.mkdir(parents=True, exist_ok=True)
        text = {"source": "text-file", "path": str(Path("tests/data/tinyshakespeare.txt").resolve())}
        self.spec = {**SMALL, "workers": {"min": 1, "max": 7}, "data": text, **spec}
        self.allow(self.spec["steps"])
        self.said = []
        timing = Timing(**{"start_wait_s": 60.0, **(times.server() if times else {}), **(server or {})})
        if lab is None:
            self.server = MembershipServer(limits, SECRET, timing, on_event=self.said.append)
        else:
            host = lab.addresses[0]
            self.server = inside(
                lab.host_pids()[0],
                lambda: MembershipServer(limits, SECRET, timing, host=host, on_event=self.said.append),
            )
        self.workers = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.workers.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self.server.close()

    def start(self, *slots, version=None, **changes):
        """changes: of the spec, for these workers alone. version: of thinwire, which they say that they are."""
        for slot in slots:
            spec = {**self.spec, **changes}
            place = Place()
            if self._lab is not None:
                place = Place(self._lab.addresses[slot + 1], self._lab.host_pids()[slot + 1])
            arguments = (self.run_dir, spec, slot, self.server.address, self._pause_s, self._times, place, version)
            process = FORKSERVER.Process(target=_work, args=arguments)
            process.start()
            self.workers[slot] = process
        return self

    def allow(self, step):
        """Steps after this one wait until they are allowed too."""
        partial = self.run_dir / "allowed.new"
        partial.write_text(str(step))
        partial.replace(self.run_dir / "allowed")

    def hang(self, slot):
        """Let the loop of this worker stand still, until it is released by being told that it has no place any more."""
        (self.run_dir / f"hang-{slot}").touch()

    def delay(self, slot):
        """Let each step of this worker take LATE_S longer."""
        (self.run_dir / f"late-{slot}").touch()

    def die_while_forming(self, slot, point):
        """Let the next worker of this slot die between its seat and its process group."""
        (self.run_dir / f"die-{slot}").write_text(point)

    def die_at_line(self, slot, number):
        """Let the next worker of this slot die at that line of the first planned change that it comes to; see lines."""
        (self.run_dir / f"line-{slot}").write_text(str(number))

    def lines(self, slot):
        """Where it has died, or how many lines there were."""
        return (self.run_dir / f"died-{slot}").read_text()

    def deafen(self, slot):
        """Let this worker hear nothing of the membership, and commit all the same, as one may for an instant."""
        (self.run_dir / f"deaf-{slot}").touch()

    def heal(self, slot):
        """Let it hear again."""
        (self.run_dir / f"deaf-{slot}").unlink()

    def hold(self, slot):
        """Let this worker deliver no part of a checkpoint any more."""
        (self.run_dir / f"hold-{slot}").touch()

    def damage(self, slot, kind):
        """From its next step on. kind: "nan": its gradient; "full": its disk, which the step writes to."""
        (self.run_dir / f"{kind}-{slot}").touch()

    def mend(self, slot, kind):
        """Whoever fills the slot next is not damaged."""
        (self.run_dir / f"{kind}-{slot}").unlink()

    def kill(self, slot, number=signal.SIGKILL):
        os.kill(self.workers[slot].pid, number)
        return time.time()

    def events(self, kind=None):
        file = self.run_dir / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        told = [json.loads(line) for line in lines]
        return [one for one in told if kind is None or one["kind"] == kind]

    def commits(self):
        """(time, slot, generation, step) of every step that a worker has committed, in the order of time."""
        found = []
        for file in self.run_dir.glob("commits-*"):
            whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for line in whole:
                at, generation, step = json.loads(line)
                found.append((at, int(file.name.split("-")[1]), generation, step))
        return sorted(found)

    def joined(self, slot):
        """How often the worker of this slot has asked for a seat."""
        return sum(one.kind == "joined" and one.fields.get("slot") == slot for one in list(self.said))

    def regroups(self):
        """The sizes of the generations after the first."""
        return [one["world_size"] for one in self.events("regrouped")]

    def step(self):
        return max((one["step"] for one in self.events("steps")), default=0)

    def until(self, holds, limit_s=60.0, tolerate="nothing"):
        end = time.monotonic() + limit_s
        while not holds():
            failed = [one for one in self.events("failed") if not one["error"].startswith(tolerate)]
            assert not failed, f"{failed}\n{self.logs()}"
            assert time.monotonic() < end, f"it did not come\n{self.server.snapshot()}\n{self.logs()}"
            time.sleep(0.01)

    def until_step(self, step, limit_s=60.0):
        self.until(lambda: self.step() >= step, limit_s)

    def wait(self, limit_s=120.0, tolerate="nothing"):
        """Until all workers that are alive have ended well."""
        self.until(lambda: not any(process.is_alive() for process in self.workers.values()), limit_s, tolerate)

    def logs(self):
        found = sorted(self.run_dir.glob("log-*"))
        return "\n".join(f"== {file.name}\n" + "\n".join(file.read_text().splitlines()[-25:]) for file in found)
