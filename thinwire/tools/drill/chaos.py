"""The chaos drill: whatever may happen to a job happens, and each step of it is checked against an undisturbed run.

The job is traced (workers/telemetry/trace.py), disturbed by a seeded schedule (faults.py), then run again undisturbed
up to the same step; the verdict is made from both traces (verdict.py).

With root each worker has a host of its own, and the network between them is cut too (hosts.py). The drill runs inside
the lab then, on host 0:

    python -m thinwire.tools.drill.chaos WHAT       WHAT: the fields of Chaos, and all addresses
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thinwire.contract.reports import EventKind, Sample
from thinwire.tools.drill import hosts
from thinwire.tools.drill.asked import Chaos, DrillFailed, Found, Say, Verdict
from thinwire.tools.drill.cuts import HEAD, Cuts, Later, Network
from thinwire.tools.drill.faults import TICK_S, Faults
from thinwire.tools.drill.job import START_S, Job, Left, made_by, own_ray, small_gpt
from thinwire.tools.drill.survivors import Survivors, has_committed, lives
from thinwire.tools.drill.verdict import judge, read
from thinwire.workers.telemetry.trace import FOLDER

logger = logging.getLogger(__name__)

FIGURES_NAME = "chaos.json"
SETTLE_S = 120.0
"""After the last fault: so long at most until the next step. More than a lease, which all may have to wait for."""
STEPS_AFTER = 20
OFTEN = {"overlap": True, "checkpoint": {"every_steps": 50}, "evaluation": {"every_steps": 100, "windows": 64}}
"""Beside what every drill's job is: a short run, too, is to be disturbed in saves, and to go on from one."""


def run(chaos: Chaos, say: Say) -> Found:
    """Run both jobs; figures and run folders are in chaos.out. Takes about twice chaos.minutes, or with `beside` once.

    Raises: DrillFailed where the job ended, or makes no step any more; OSError.
    """
    without = hosts.why_not()
    if without is None:
        found, words = hosts.run(chaos, say)
    else:
        with own_ray(chaos.workers) as address:
            found, words = disturb_and_judge(chaos, say, address)
    found = replace(found, without_cuts=without)
    whole = {
        "chaos": {**asdict(chaos), "out": "", "beside": chaos.beside and chaos.beside.name},
        **made_by(),
        "figures": found.as_json(),
        "faults": words,
    }
    (chaos.out / FIGURES_NAME).write_text(json.dumps(whole, indent=2) + "\n")
    return found


def disturb_and_judge(chaos: Chaos, say: Say, address: str, network: Network | None = None) -> tuple[Found, list[str]]:
    """On the Ray at that address. What was found, and each fault in words with its second. Raises: as run()."""
    spec = small_gpt(chaos.workers, chaos.optimizer, shadow=chaos.shadow) | OFTEN
    other = None if chaos.beside is None else undisturbed_in(chaos.beside, spec)
    job = _traced(Job(chaos.out / f"chaos-{time.time_ns() // 10**6}", spec, address))
    later = Later()
    cuts = None if network is None else Cuts(network, range(chaos.workers + 1), later)
    faults = Faults(job, chaos.workers, chaos.seed, later, cuts, kill_all=chaos.kill_all)
    survivors = Survivors()
    with job:
        living = _disturb(chaos, job, faults, survivors, say)
    traces = read(job.run_dir / FOLDER)
    last = max((one["step"] for process in traces for one in process.commits), default=0)
    if other is None:
        with _traced(Job(chaos.out / f"undisturbed-{time.time_ns() // 10**6}", spec, address)) as other:
            other.until_step(last, say)
    verdict = judge(traces, read(other.run_dir / FOLDER), faults.touches, living)
    found = _found(chaos, job, other, faults, survivors, verdict)
    return found, [f"{at - faults.done[0][0]:.1f} s: {words}" for at, words in faults.done]


def undisturbed_in(folder: Path, spec: dict[str, Any]) -> Left:
    """The longest undisturbed run there of the same job; whether replicas of server errors are kept changes nothing.

    Raises: DrillFailed where there is none.
    """
    found = [Left(file.parent) for file in sorted(folder.glob(f"undisturbed-*/{FOLDER}/"))]
    same = []
    for run in found:
        try:
            if _without_shadow(run.spec) == _without_shadow(spec):
                same.append(run)
        except (OSError, ValueError) as error:
            logger.warning("undisturbed_unreadable path=%s reason=%s", run.run_dir, error)
    if not same:
        raise DrillFailed(
            f"{folder} holds no undisturbed run of this job ({len(found)} of others): name the --out of an earlier "
            "--chaos with the same --workers and --optimizer, or leave --beside out to train one"
        )
    return max(same, key=lambda run: max((sample.step for sample in run.samples()), default=0))


def _without_shadow(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "workers": {**spec["workers"], "shadow": None}}


def _traced(job: Job) -> Job:
    (job.run_dir / FOLDER).mkdir()
    return job


def _disturb(chaos: Chaos, job: Job, faults: Faults, survivors: Survivors, say: Say) -> list[int]:
    """Returns the pids that are alive at the end."""
    job.until_all_train(chaos.workers, say)
    began = time.monotonic()
    until = began + 60 * chaos.minutes
    try:
        while (now := time.monotonic()) < until:
            job.check()
            if (done := faults.look()) is not None:
                logger.info("fault %s", done)
                say(done, (now - began) / (60 * chaos.minutes))
            survivors.look(lambda: _training(job))
            time.sleep(TICK_S)
    finally:
        faults.end()
    _goes_on(job, faults, say)
    return _alive(job)


def _goes_on(job: Job, faults: Faults, say: Say) -> None:
    """Raises: DrillFailed where no step is made after the last fault: the job has come to a standstill."""
    before = seen = _last_step(job)
    until = time.monotonic() + SETTLE_S
    while seen < before + STEPS_AFTER:
        job.check()
        if (now := _last_step(job)) != seen:  # fewer, where it has begun again from a checkpoint
            seen, until = now, time.monotonic() + SETTLE_S
        if time.monotonic() > until:
            last = faults.done[-1][1] if faults.done else "none"
            raise DrillFailed(
                f"the job stands still: no step in {SETTLE_S:g} s after the last fault ({last}), or after step {seen}; "
                f"the membership says {job.members()}"
            )
        say("after the last fault", 1.0)
        time.sleep(0.5)


def _last_step(job: Job) -> int:
    samples = job.samples()
    return samples[-1].step if samples else 0


def _alive(job: Job) -> list[int]:
    """The processes of the trace that have not ended."""
    pids = [int(file.stem) for file in (job.run_dir / FOLDER).glob("*.jsonl")]
    return [pid for pid in pids if lives(pid)]


def _training(job: Job) -> list[int]:
    """Those of them that have committed a step: before that, a process grows by what it still loads and connects."""
    return [pid for pid in _alive(job) if has_committed(job.run_dir / FOLDER / f"{pid}.jsonl")]


def _found(chaos: Chaos, job: Job, other: Left, faults: Faults, survivors: Survivors, verdict: Verdict) -> Found:
    ours, theirs = _losses(job.samples()), _losses(other.samples())
    last = max(set(ours) & set(theirs), default=None)
    violations = tuple(f"seed {chaos.seed}: {words}" for words in verdict.violations)
    return Found(
        **(asdict(verdict) | {"violations": violations}),
        minutes=chaos.minutes,
        faults=dict(sorted(faults.counts.items())),
        resumes=sum(event.kind == EventKind.RESUMED for event in job.events()),
        loss=None if last is None else ours[last],
        loss_undisturbed=None if last is None else theirs[last],
        grown=survivors.grown(),
    )


def _losses(samples: list[Sample]) -> dict[int, float]:
    return {one.step: one.validation_loss for one in samples if one.validation_loss is not None and one.step > 0}


def main() -> None:
    """The drill inside the lab, on the head's host. What is printed otherwise goes to stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    fields = json.loads(sys.argv[1])
    addresses = fields.pop("addresses")
    paths = {name: Path(fields[name]) for name in ("out", "beside") if fields[name] is not None}
    chaos = Chaos(**{**fields, **paths})
    outside = hosts.Outside(os.fdopen(os.dup(1), "w"), sys.stdin, addresses)
    os.dup2(2, 1)
    try:
        with own_ray(0, addresses[HEAD]) as address:
            for host in range(HEAD + 1, len(addresses)):  # one by one: each takes all of a core to start
                outside.send(join=host, head=address)
                _wait_for_nodes(host + 1)
            found, faults = disturb_and_judge(chaos, outside.say, address, outside)
    except DrillFailed as error:
        outside.send(failed=str(error))
    else:
        outside.send(found=asdict(found), faults=faults)


def _wait_for_nodes(number: int) -> None:
    import ray

    until = time.monotonic() + START_S
    while sum(node["Alive"] for node in ray.nodes()) < number:
        if time.monotonic() > until:
            raise DrillFailed(
                f"fewer than {number} nodes of Ray in {START_S:g} s: see hosts/*.log in the drill's folder"
            )
        time.sleep(0.2)


if __name__ == "__main__":
    main()
