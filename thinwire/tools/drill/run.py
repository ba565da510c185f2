"""The drill: a job whose workers are killed, then the same job undisturbed up to the same step, on a Ray of its own.

A job is a run folder, and the driver that Ray Jobs would run. The worker that is killed next is any that trains, at
random, by SIGKILL to its process on this machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from thinwire.tools.drill.account import Kill, account, draw
from thinwire.tools.drill.asked import PICTURE_NAME, Account, Drill, DrillFailed, Say
from thinwire.tools.drill.job import GLOBAL_BATCH, JOB_LOOK_S, Job, made_by, own_ray, small_gpt

FIGURES_NAME = "drill.json"


def run(drill: Drill, say: Say) -> Account:
    """Run both jobs; figures, picture and run folders are in drill.out. Takes about twice drill.minutes.

    Raises: DrillFailed; OSError.
    """
    with own_ray(drill.workers) as address:
        spec = small_gpt(drill.workers, drill.optimizer, shadow=drill.shadow)
        killed = Job(drill.out / f"killed-{time.time_ns() // 10**6}", spec, address)
        killer = _disturb(drill, killed, say)
        samples = killed.samples()
        if not samples or samples[-1].step < 2:
            raise DrillFailed(
                f"all workers were dead at once, before there was a checkpoint, and the job has begun again: kill less "
                f"often than every {drill.kill_every_s:g} s, or give more than {drill.workers} workers"
            )
        with Job(drill.out / f"undisturbed-{time.time_ns() // 10**6}", spec, address) as other:
            other.until_step(samples[-1].step, say)
    undisturbed = other.samples()
    found = account(samples, killed.events(), killer.kills, undisturbed, drill.workers, GLOBAL_BATCH)
    kills = [asdict(kill) for kill in killer.kills]
    whole = {"drill": {**asdict(drill), "out": ""}, **made_by(), "figures": found.as_json(), "kills": kills}
    (drill.out / FIGURES_NAME).write_text(json.dumps(whole, indent=2) + "\n")
    draw(drill.out / PICTURE_NAME, samples, killer.kills, undisturbed, found)
    return found


def _disturb(drill: Drill, job: Job, say: Say) -> Killer:
    with job:
        job.until_all_train(drill.workers, say)
        killer = Killer(job.members, drill.kill_every_s, drill.seed)
        until = time.monotonic() + 60 * drill.minutes
        while (left_s := until - time.monotonic()) > 0:
            job.check()
            kill = killer.look()
            if kill is not None:
                say(f"killed worker {kill.slot} (rank {kill.rank})", 1 - left_s / (60 * drill.minutes))
            time.sleep(JOB_LOOK_S)
    return killer


class Killer:
    """Kills every `every_s` seconds, from `every_s` after it was made. snapshot: of the membership, None where away."""

    def __init__(self, snapshot: Callable[[], dict[str, Any] | None], every_s: float, seed: int) -> None:
        self.kills: list[Kill] = []
        self._snapshot, self._every_s, self._random = snapshot, every_s, random.Random(seed)
        self._next = time.monotonic() + every_s

    def look(self) -> Kill | None:
        """Kill one, if it is time and there is one. Returns it."""
        if time.monotonic() < self._next:
            return None
        known = self._snapshot() or {}
        members = known.get("members") or []
        if not members:
            return None
        chosen = self._random.choice(members)
        try:
            os.kill(chosen["pid"], signal.SIGKILL)
        except ProcessLookupError:  # it has just died of something else
            return None
        self._next = time.monotonic() + self._every_s
        kill = Kill(time.time(), chosen["slot"], chosen["rank"], known["last_step"])
        self.kills.append(kill)
        return kill
