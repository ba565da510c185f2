"""The command: python -m benchmarks.head_loss. What does the loss of a cluster's head cost a job that runs on it?

A lab of three hosts that share no file: a head and another box, with one worker each, and the service. While both
train, every process of Ray on the head is killed by SIGKILL, its worker and the job's driver with them; the supervisor
of `thinwire up` stays, and starts Ray again. The script writes down each step that it begins, on the box where it runs.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import ROOT
from benchmarks.lab_boxes import BEGUN, Cluster, begun
from thinwire.tools.lab import Lab, LabSpec

RESULTS = ROOT / "benchmarks" / "results" / "head-loss"
CODE = ("comm", "optim", "workers", "service", "thinwire", "benchmarks", ":!benchmarks/results", ":!*.md")
STEPS_A_LOSS = 400
"""As many steps of the job for each loss, so that it is not over before the last one."""
SAVE_EVERY = 20
TRAIN_FIRST = 30
"""Steps of both workers before a head is lost."""
LIMIT_S = 600.0
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from thinwire.optim import OneBitAdam
from thinwire.train import session

steps = int(sys.argv[1])
torch.manual_seed(0)
with session() as run:
    net = torch.nn.Linear(64, 64)
    optimizer = OneBitAdam(net.parameters(), lr=1e-2, warmup=20, total_steps=steps, group=run.group)
    run.register(model=net, optimizer=optimizer)
    for x in run.batches(torch.randn(256, 64), global_batch=8, steps=steps):
        with open(sys.argv[2], "a") as begun:
            print(time.time(), os.getpid(), run.step_number, run.world_size, file=begun)
        if not Path("/tmp/fast").exists():
            time.sleep(0.1)
        run.step((net(x) ** 2).mean())
"""
KILL = """
import os, signal, time
from pathlib import Path
from thinwire.boxes.box import BoxFolder, temp_dir_of
from thinwire.service.launch import processes
from thinwire.service.launch.ray_head import Head

box = Path(os.environ["HOME"]) / ".local/share/thinwire/box"
keeper = Head.model_validate_json((box / "head.json").read_bytes()).pid
started, killed = time.time(), 0
os.kill(keeper, signal.SIGKILL)
while left := processes.belonging(temp_dir_of(box), keeper):
    for one in left:
        try:
            os.kill(one.pid, signal.SIGKILL)
            killed += 1
        except ProcessLookupError:
            pass
    time.sleep(0.01)
print(started, killed)
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss of the head. Seconds from the SIGKILL: until Ray is up again, the next attempt is submitted, both train.

    begun_alone: steps that the other box's worker began before a worker of the head was there again; the one that was
    running, begun again, is one. two_at_once: did two workers of one box take steps after both trained?
    """

    processes: int
    up_s: float
    attempt_s: float
    training_s: float
    step_at_loss: int
    newest_checkpoint: int
    resumed_at: int
    begun_alone: int
    adopted: bool
    two_at_once: bool
    reason: str | None

    @property
    def after_return_s(self) -> float:
        """From the head's return to training."""
        return self.training_s - self.up_s


class Trial:
    """A cluster, and a job that trains on both of its boxes."""

    def __init__(self, lab: Lab, num_losses: int) -> None:
        self.cluster = Cluster(lab)
        self.head, self.other = self.cluster.boxes
        self.steps = STEPS_A_LOSS * num_losses
        job = {
            "name": "head-loss",
            "recipe": {"name": "script", "entry": "train.py", "working_dir": ".", "args": [str(self.steps), BEGUN]},
            "workers": {"min": 2, "max": 2, "device": "cpu", "max_restarts": num_losses + 5},
            "checkpoint": {"every_steps": SAVE_EVERY, "store": self.cluster.store},
        }
        self.job_id = self.cluster.submit(job, {"train.py": SCRIPT})

    def job(self) -> dict[str, Any]:
        """As the service shows it; fails where it is over."""
        shown = self.cluster.job(self.job_id)
        assert shown["state"] not in ("FAILED", "CANCELLED"), shown["reason"]
        return shown

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The job's events of a kind, oldest first."""
        return [one for one in self.cluster.history(self.job_id)["events"] if one["kind"] == kind]

    def lose(self) -> Loss:
        """Kill the head while both train, and wait until they do again."""
        since = time.time()

        def both() -> bool:
            self.job()
            of_both = [[one.step for one in begun(host, since)] for host in (self.head, self.other)]
            return min(map(len, of_both)) >= TRAIN_FIRST

        self.head.until(both, "both train", LIMIT_S)
        before = self.job()
        starts = self._state()["starts"]
        said = self.head.run(f"{sys.executable} -c {shlex.quote(KILL)}").split()
        killed_at, num_killed = float(said[0]), int(said[1])
        last = max(one.step for one in begun(self.other, since) if one.time < killed_at)
        self.head.until(lambda: self._state()["up"] and self._state()["starts"] > starts, "Ray is up", LIMIT_S)
        up_at = time.time()
        attempt = self.head.until(
            lambda: (job := self.job())["attempt"] > before["attempt"] and job, "the next attempt", LIMIT_S
        )
        attempt_at = time.time()
        self.head.until(lambda: begun(self.head, up_at), "the head trains", LIMIT_S)
        first = begun(self.head, up_at)[0]
        self.head.until(lambda: len(begun(self.other, first.time)) > 5, "both train again", LIMIT_S)
        after = begun(self.other, killed_at)
        together = [one for one in after if one.time >= first.time]
        trained = {one.pid for one in begun(self.other, since) if one.time < killed_at}
        saved = [one["step"] for one in self.events("checkpoint_saved") if one["time"] < killed_at]
        return Loss(
            processes=num_killed,
            up_s=up_at - killed_at,
            attempt_s=attempt_at - killed_at,
            training_s=max(first.time, together[0].time) - killed_at,
            step_at_loss=last,
            newest_checkpoint=max(saved, default=0),
            resumed_at=first.step,
            begun_alone=len([one for one in after if one.time < first.time and one.pid in trained]),
            adopted=together[0].pid in trained,
            two_at_once=len({one.pid for one in together}) > 1,
            reason=attempt["reason"],
        )

    def finish(self) -> dict[str, Any]:
        """Let the job come to its end. Fails where replicas differ or its history lacks a step."""
        for host in (self.head, self.other):
            host.run("touch /tmp/fast")
        job: dict[str, Any] = self.head.until(
            lambda: (shown := self.job())["state"] == "SUCCEEDED" and shown, "the job is over", LIMIT_S
        )
        history = self.cluster.history(self.job_id)["samples"]
        return {
            "attempts": job["attempt"],
            "replicas_bit_equal": job["summary"]["replicas_bit_equal"],
            "steps": self.steps,
            "last_sample": history[-1]["step"] if history else None,
        }

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.head.run(f"cat {self.head.box}/state.json"))
        return found


@app.command()
def main(
    losses: Annotated[int, typer.Option(min=1, help="How often the head is killed.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Kill the head again and again: about two minutes a time. Needs root, for the lab."""
    made_by = provenance(CODE)
    out.mkdir(parents=True, exist_ok=True)
    found: list[Loss] = []
    made = {"command": "python -m benchmarks.head_loss", **asdict(made_by)}
    with Lab(LabSpec(hosts=3, rate_mbit=1000)) as lab:
        trial = Trial(lab, losses)
        for number in range(losses):
            loss = trial.lose()
            found.append(loss)
            typer.echo(f"{number + 1}: {loss}")
            _write(out, made, found, None)
        over = trial.finish()
        _write(out, made, found, over)
        typer.echo(str(over))
        trial.cluster.end()


def _write(out: Path, made: dict[str, Any], found: list[Loss], over: dict[str, Any] | None) -> None:
    facts = {**made, "load": os.getloadavg(), "losses": [asdict(one) for one in found], "end": over}
    (out / "losses.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "table.txt").write_text("\n".join(table(found)) + "\n")


def table(found: list[Loss]) -> list[str]:
    """A line a figure: median and worst."""
    figures = {
        "Ray is up again, s": [one.up_s for one in found],
        "next attempt submitted, s": [one.attempt_s for one in found],
        "both train again, s": [one.training_s for one in found],
        "... after the head's return, s": [one.after_return_s for one in found],
        "steps lost": [max(one.step_at_loss - one.resumed_at, 0) for one in found],
        "steps begun without the head": [one.begun_alone for one in found],
    }
    lines = [f"{'seconds from the SIGKILL':34} {'median':>8} {'worst':>8}   of {len(found)} losses"]
    lines += [f"{name:34} {median(values):8.1f} {max(values):8.1f}" for name, values in figures.items()]
    counts = {
        "the other box's worker went on": [one.adopted for one in found],
        "went on without losing a step": [one.resumed_at >= one.step_at_loss for one in found],
        "went on before the newest checkpoint": [one.resumed_at < one.newest_checkpoint for one in found],
        "two workers of one box at once": [one.two_at_once for one in found],
    }
    lines += [f"{name}: {sum(values)} of {len(found)}" for name, values in counts.items()]
    return lines


if __name__ == "__main__":
    app()
