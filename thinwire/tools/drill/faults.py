"""What is done to a job in a chaos drill, and when: a seeded schedule of faults, on processes of this machine.

    kill             one that trains                        pair          two at once
    in a regroup     one, and another while the rest come together
    giver            the rank that gives the state to a newcomer, as it does
    newcomer         one that waits for its first seat, or has just been given it
    in a save        one, while a checkpoint is being written
    stop             one does not run for 3, 15 or 40 s, and wakes
    terminate        SIGTERM: it is to hand over and go
    resize           the job is asked for another number of workers
    membership       the membership's process is killed
    cuts             of the network (cuts.py), where workers have hosts of their own
    all              with `kill_all`: every worker at once

One that trains is spared in each of them (but for "all"), so that the state lives. Each fault names the processes
that it has reached, and how long their end may be its work: the verdict excuses no other.
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.contract.files import write_whole
from thinwire.contract.reports import WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.tools.drill.cuts import Cuts, Later
from thinwire.tools.drill.job import Job
from thinwire.tools.drill.survivors import lives
from thinwire.tools.drill.verdict import Touch

STOPS_S = (3.0, 15.0, 40.0)
PAUSE_S = (4.0, 14.0)
"""From one fault to the next, uniformly: at least four a minute, with what the faults themselves take."""
WAIT_S = 4.0
"""How long a fault waits for the moment that it is meant for. Then it comes anyway."""
TICK_S = 0.02
AFTERMATH_S = 120.0
"""How long after a fault is over somebody may still end of it: a lease of 45 s, and a collective's 60 s."""
CUTS = 4
"""How many times as likely as any other kind a cut is: there are so many kinds of them."""

Member = dict[str, Any]


class Faults:
    """The schedule of one job. Call `look` often."""

    def __init__(
        self, job: Job, workers: int, seed: int, later: Later, cuts: Cuts | None = None, *, kill_all: bool
    ) -> None:
        self.touches: list[Touch] = []
        self.done: list[tuple[float, str]] = []
        self.counts: Counter[str] = Counter()
        self._job, self._workers, self._random = job, workers, random.Random(seed)
        self._later, self._cuts = later, cuts
        self._kinds: dict[str, Callable[[list[Member]], str | None]] = {
            "kill": self._kill_one,
            "pair": self._kill_pair,
            "in a regroup": self._kill_in_regroup,
            "giver": self._kill_giver,
            "newcomer": self._kill_newcomer,
            "in a save": self._kill_in_save,
            "stop": self._stop,
            "terminate": self._terminate,
            "resize": self._resize,
            "membership": self._kill_membership,
        }
        if kill_all:
            self._kinds["all"] = self._kill_all
        if cuts is not None:
            self._kinds["cuts"] = self._cut
        self._lots = [kind for kind in self._kinds for _ in range(CUTS if kind == "cuts" else 1)]
        self._asleep: set[int] = set()
        self._leaving: set[int] = set()
        self._at_cut: list[Member] = []
        self._old: set[int] = set()
        """Who has been seen to train: no newcomer, though a membership that was started again may say so."""
        self._revision = 0
        self._next = time.monotonic() + self._random.uniform(*PAUSE_S)

    def look(self) -> str | None:
        """A fault, if it is time. What was done, in words."""
        self._later.check()
        self._excuse()
        if time.monotonic() < self._next:
            return None
        all_members = (self._job.members() or {}).get("members", [])
        self._old |= {one["pid"] for one in all_members}
        members = [one for one in all_members if self._reachable(one)]
        kind = self._random.choice(self._lots)
        done = self._kinds[kind](members)
        if done is None:  # there is nobody whom it could reach: another one, soon
            self._next = time.monotonic() + 0.5
            return None
        self.counts[kind] += 1
        self.done.append((time.monotonic(), f"{kind}: {done}"))
        self._next = time.monotonic() + self._random.uniform(*PAUSE_S)
        return f"{kind}: {done}"

    def end(self) -> None:
        """Wake all that sleep, mend what is cut."""
        self._later.all_now()
        self._excuse()

    def _reachable(self, member: Member) -> bool:
        """Neither stopped nor cut off nor asked to go, and alive, which a membership that is cut off cannot know."""
        if self._cuts is not None and self._cuts.host_of(member["host"]) in self._cuts.off:
            return False
        return member["pid"] not in self._asleep | self._leaving and lives(member["pid"])

    # Each takes those that train and could be reached; None where there are too few.

    def _kill_one(self, members: list[Member]) -> str | None:
        return self._kill(self._some(members, 1))

    def _kill_pair(self, members: list[Member]) -> str | None:
        return self._kill(self._some(members, 2))

    def _kill_in_regroup(self, members: list[Member]) -> str | None:
        both = self._some(members, 2)
        first = self._kill(both[:1])
        if first is None:
            return None
        self._until(lambda known: known["status"] != "training")
        time.sleep(self._random.uniform(0, 0.4))
        return f"{first}, then {self._kill(both[1:])}"

    def _kill_giver(self, members: list[Member]) -> str | None:
        if len(members) < 2:
            return None
        before = self._generation()
        self._until(lambda known: known["generation"] > before and known["status"] == "training", limit_s=15.0)
        now = (self._job.members() or {}).get("members", [])
        others = [one for one in now if one["rank"] != 0 and one["pid"] in {m["pid"] for m in members}]
        return self._kill(now[:1]) if others else None

    def _kill_newcomer(self, members: list[Member]) -> str | None:
        first = None
        if not members:  # the membership has just begun again: who comes to it is no newcomer
            return None
        if len(members) == self._workers and (first := self._kill(self._some(members, 1))) is None:
            return None  # nobody is coming, and nobody can be made to
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            seen = self._job.members() or {}
            new = [one for one in (*seen.get("waiting", []), *seen.get("members", [])) if one["pid"] not in self._old]
            if new:
                time.sleep(self._random.choice([0.0, 0.05, 0.2, 0.5]))
                return ", then ".join(filter(None, (first, self._kill(new[:1]))))
            time.sleep(TICK_S)
        return first

    def _kill_in_save(self, members: list[Member]) -> str | None:
        chosen = self._some(members, 1)
        if not chosen:
            return None
        checkpoints = RunFolder(self._job.run_dir).checkpoints
        before = _entries(checkpoints)
        until = time.monotonic() + 15.0
        while _entries(checkpoints) <= before and time.monotonic() < until:
            time.sleep(TICK_S)
        # Who was to be spared may have left meanwhile.
        others = [one for one in (self._job.members() or {}).get("members", []) if one["pid"] != chosen[0]["pid"]]
        return self._kill(chosen) if any(one["step"] > 0 and self._reachable(one) for one in others) else None

    def _stop(self, members: list[Member]) -> str | None:
        chosen = self._some(members, 1)
        if not chosen:
            return None
        seconds = self._random.choice(STOPS_S)
        pid = chosen[0]["pid"]
        if not _signal(pid, signal.SIGSTOP):
            return None
        self._asleep.add(pid)
        self._touch(pid, seconds)
        self._later.do(seconds, lambda: self._wake(pid))
        return f"{_name(chosen[0])} for {seconds:g} s"

    def _wake(self, pid: int) -> None:
        _signal(pid, signal.SIGCONT)
        self._asleep.discard(pid)

    def _terminate(self, members: list[Member]) -> str | None:
        chosen = self._some(members, 1)
        if not chosen:
            return None
        self._touch(chosen[0]["pid"], 0.0)
        self._leaving.add(chosen[0]["pid"])
        return _name(chosen[0]) if _signal(chosen[0]["pid"], signal.SIGTERM) else None

    def _resize(self, members: list[Member]) -> str | None:
        most = self._random.randint(2, self._workers)
        self.want(most)
        return f"at most {most}"

    def want(self, most: int) -> None:
        """Ask the job for so many workers."""
        self._revision += 1
        wanted = WantedWorkers(min=1, max=most, revision=self._revision)
        write_whole(RunFolder(self._job.run_dir).workers, wanted.model_dump_json())

    def _kill_membership(self, members: list[Member]) -> str | None:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        actor = self._job.membership()
        if actor is None:
            return None
        try:
            pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=5.0)
        except (RayActorError, GetTimeoutError):
            return None
        return f"process {pid}" if _signal(pid, signal.SIGKILL) else None

    def _kill_all(self, members: list[Member]) -> str | None:
        return self._kill(members)

    def _cut(self, members: list[Member]) -> str | None:
        if self._cuts is None or not self._cuts.ready:
            return None
        host_of = self._cuts.host_of
        self._at_cut = self._all()
        return self._cuts.begin(
            self._random,
            [host_of(one["host"]) for one in members],
            lambda number: [host_of(one["host"]) for one in self._some(members, number)],
        )

    def _excuse(self) -> None:
        """The workers of hosts that were cut off long enough, those that came meanwhile too."""
        if self._cuts is None:
            return
        for mended in self._cuts.mended():
            for pid in {
                one["pid"] for one in (*self._at_cut, *self._all()) if self._cuts.host_of(one["host"]) in mended.excuses
            }:
                self.touches.append(Touch(pid, mended.began, mended.ended + AFTERMATH_S))

    def _all(self) -> list[Member]:
        known = self._job.members() or {}
        return [*known.get("members", []), *known.get("waiting", [])]

    # What they are made of.

    def _some(self, members: list[Member], number: int) -> list[Member]:
        """So many at random, but for one that is spared and holds the state; none where there are too few."""
        holders = [one for one in members if one["step"] > 0]
        if not holders or len(members) <= number:
            return []
        spared = self._random.choice(holders)
        return self._random.sample([one for one in members if one is not spared], number)

    def _kill(self, members: list[Member]) -> str | None:
        done = []
        for one in members:
            self._touch(one["pid"], math.inf)
            if _signal(one["pid"], signal.SIGKILL):
                done.append(_name(one))
        return ", ".join(done) or None

    def _touch(self, pid: int, seconds: float) -> None:
        now = time.monotonic()
        self.touches.append(Touch(pid, now, now + seconds + AFTERMATH_S))

    def _generation(self) -> int:
        return int((self._job.members() or {}).get("generation", 0))

    def _until(self, holds: Callable[[dict[str, Any]], bool], limit_s: float = WAIT_S) -> None:
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            known = self._job.members()
            if known is not None and holds(known):
                return
            time.sleep(TICK_S)


def _signal(pid: int, number: signal.Signals) -> bool:
    """False where the process has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _name(member: Member) -> str:
    return f"worker {member['slot']} (rank {member['rank']}, process {member['pid']})"


def _entries(folder: Path) -> int:
    return len(list(folder.iterdir())) if folder.is_dir() else 0
