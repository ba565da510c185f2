"""The command: sudo python -m benchmarks.across_hosts --json. What training across hosts with Thinwire is worth.

A lab of three hosts that share no folder, on links of 1 Gbit/s: a head and another box with one worker each, brought up
by `thinwire up`, and the service. A script (gpt_session.py) is submitted three times, one run after another:

    dense         thinwire.optim.Adam: full gradients in fp32
    cut           1-bit Adam. In mid-run the other box is cut off, without a word to anybody; and later brought back
    undisturbed   1-bit Adam, nothing is done to it

Every host has a second interface, by which it reaches the others as well, and which no run is to use: it is counted.
Nothing else should run on the machine meanwhile: its load before and after is kept with the figures.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.across_figures import WORKERS, Told, cut_of, figures_of, gone_back, redone_by, table
from benchmarks.lab_boxes import BEGUN, OVER, THINWIRE, Cluster, begun, other_interfaces_share
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import made_by
from benchmarks.wire.cases import LOADS, Load
from thinwire.cli.quantities import rate_mbit
from thinwire.tools.lab import Lab, LabSpec
from thinwire.tools.lab.network import INTERFACE

RESULTS = ROOT / "benchmarks" / "results" / "across-hosts"
CODE = ("comm", "optim", "workers", "service", "thinwire", "benchmarks", "tests/data", ":!benchmarks/results", ":!*.md")
TEXT = ROOT / "tests" / "data" / "tinyshakespeare.txt"
MODEL, STEPS, RATE = "gpt-25m", 600, "1gbit"
DENSE_PART = 15
"""Of so many steps of the 1-bit runs one is warm-up; the dense run has as many steps as that."""
LEAST_DENSE = 12
CUT_AFTER = 30
"""Compressed steps before a box is cut off."""
CUT_S = 30.0
"""It stays so for at least as long, and until the other one goes on."""
PATIENCE_S = 1800.0
SAY_S = 10.0

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Run:
    """One of the three."""

    name: str
    optimizer: str
    is_cut: bool = False


RUNS = (Run("dense", "adam"), Run("cut", "onebit_adam", is_cut=True), Run("undisturbed", "onebit_adam"))


class Progress:
    """Says on stderr what runs, how far it is, and how long it will take at its present speed."""

    def __init__(self, began: float) -> None:
        self._began, self._said_at = began, 0.0
        self._before: tuple[float, int] | None = None

    def say(self, what: str) -> None:
        """At once."""
        self._before, self._said_at = None, time.monotonic()
        self._print(what)

    def look(self, run: Run, job: dict[str, Any], steps: int) -> None:
        """Now and then."""
        now = time.monotonic()
        if now - self._said_at < SAY_S:
            return
        self._said_at = now
        step = (job["progress"] or {"step": 0})["step"]
        told = f"{run.name}: {job['state']}, step {step} of {steps}, {job['world_size'] or 0} workers"
        if self._before is not None and step > self._before[1]:
            seconds = (now - self._before[0]) / (step - self._before[1])
            told += f", {1 / seconds:.2f} steps/s, about {(steps - step) * seconds:.0f} s left of this run"
        self._before = now, step
        self._print(told)

    def _print(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {what}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run, and where."""

    cluster: Cluster
    load: Load
    steps: int
    progress: Progress

    @property
    def dense_steps(self) -> int:
        """Of the dense run; and of the warm-up of the others."""
        return max(LEAST_DENSE, self.steps // DENSE_PART)

    def of(self, run: Run) -> Told:
        """Submit it, do to it what is to be done, and wait for its end."""
        cluster, began = self.cluster, time.time()
        steps = self.steps if run.optimizer != "adam" else self.dense_steps
        self.progress.say(f"{run.name}: submitted, {steps} steps")
        job_id = cluster.submit(self._job(run, steps), {"text.txt": TEXT.read_text(), "train.py": _script()})

        def wait(true: Any, what: str) -> dict[str, Any]:
            def look(job: dict[str, Any]) -> Any:
                self.progress.look(run, job, steps)
                return true(job)

            return cluster.until(job_id, look, what, PATIENCE_S)

        times = self._disturb(job_id, wait) if run.is_cut else None
        job = wait(lambda job: job["state"] in OVER, "comes to its end")
        assert job["state"] == "SUCCEEDED", f"{job['reason']}\n{cluster.log(job_id)[-3000:]}"
        history = cluster.history(job_id)
        on_boxes = [begun(box, began) for box in cluster.boxes]
        cut = None if times is None else cut_of(*times, history["samples"], *on_boxes)
        redone = max(redone_by(history["events"]), gone_back(on_boxes[0]))
        return Told(job, history["samples"], history["events"], redone, cut)

    def _disturb(self, job_id: str, wait: Any) -> tuple[float, float]:
        """Cut the other box off, and bring it back. When either was, unix seconds."""
        cluster, at = self.cluster, self.dense_steps + CUT_AFTER
        wait(lambda job: job["progress"] and job["progress"]["step"] >= at, f"reaches step {at}")
        cluster.service.run(f"{THINWIRE} resize {job_id} --min 1")
        cluster.cut_off(cluster.other)
        cut_at = time.time()
        self.progress.say(f"cut: host {cluster.other.number} is cut off")
        wait(lambda job: job["world_size"] == 1 and time.time() > cut_at + CUT_S, "goes on without the box")
        cluster.bring_back(cluster.other)
        mended_at = time.time()
        self.progress.say(f"cut: host {cluster.other.number} is back")
        wait(lambda job: job["world_size"] == WORKERS, "is whole again before it ends, or more --steps are needed")
        self.progress.say("cut: both train again")
        return cut_at, mended_at

    def _job(self, run: Run, steps: int) -> dict[str, Any]:
        shape = self.load.recipe
        given = {
            "text": "text.txt", "optimizer": run.optimizer, "steps": steps, "warmup": self.dense_steps, "begun": BEGUN,
            "global-batch": WORKERS * self.load.sequences, "layers": shape.layers, "width": shape.width,
            "heads": shape.heads, "context": shape.context,
        }  # fmt: skip
        args = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return {
            "name": f"across-{run.name}",
            "recipe": {"name": "script", "entry": "train.py", "working_dir": ".", "args": args},
            "workers": {"min": WORKERS, "max": WORKERS, "device": "cpu"},
            "network": {"interface": INTERFACE},
            "checkpoint": {"every_steps": steps, "store": self.cluster.store},
        }


def _script() -> str:
    return Path(__file__).with_name("gpt_session.py").read_text()


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, in the last line.")] = False,
    steps: Annotated[int, typer.Option(min=60, help="Of each run of 1-bit Adam.")] = STEPS,
    rate: Annotated[str, typer.Option(help="Of each host's link, such as 100mbit.")] = RATE,
    model: Annotated[str, typer.Option(help="gpt-25m, or another load of benchmarks/wire/cases.py.")] = MODEL,
    only: Annotated[list[str] | None, typer.Option(help="dense, cut or undisturbed; repeat it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. A full set is kept without it.")] = None,
) -> None:
    """Three runs, about ten minutes on two quiet cores. Needs root, for the lab."""
    chosen = [run for run in RUNS if not only or run.name in only]
    unknown = set(only or ()) - {run.name for run in RUNS}
    if unknown or model not in LOADS or not LOADS[model].computes:
        raise typer.BadParameter(f"--only {sorted(unknown)}, --model {model}: see --help for what there is")
    mbit, load = rate_mbit(rate), LOADS[model]
    is_full = (steps, mbit, model, len(chosen)) == (STEPS, rate_mbit(RATE), MODEL, len(RUNS))
    made, before, began = provenance(CODE), os.getloadavg(), time.monotonic()
    progress = Progress(began)
    found: dict[str, Told] = {}
    with Lab(LabSpec(hosts=3, rate_mbit=mbit, second_network=True)) as lab:
        progress.say(f"{lab.spec.hosts} hosts at {mbit:g} Mbit/s: `thinwire up` on two, the service on the third")
        cluster = Cluster(lab)
        cluster.see_second_interface()
        counted = lab.interface_bytes()
        trial = Trial(cluster, load, steps, progress)
        for run in chosen:
            found[run.name] = trial.of(run)
        last = lab.interface_bytes()
    figures = figures_of(found, other_interfaces_share(counted, last), load.name, mbit, steps)
    hardware = {**made.hardware, "kernel": platform.release()}
    facts = {
        "command": " ".join(["python -m benchmarks.across_hosts", *sys.argv[1:]]),
        "commit": made.commit,
        "versions": {**made.versions, "ray": version("ray")},
        "hardware": hardware,
        "load_average": {"before": before, "after": os.getloadavg()},
        "wall_s": round(time.monotonic() - began, 1),
        "interface_bytes": {"before": counted, "after": last},
        "figures": figures,
    }
    if folder := out or (RESULTS if is_full else None):
        keep(folder, facts, found)
        progress.say(f"kept in {folder}")
    print(json.dumps(figures) if as_json else "\n".join(table(figures)))


def keep(folder: Path, facts: dict[str, Any], found: dict[str, Told]) -> None:
    """Write all of it: figures.json, a file a run with each step and event, and README.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name, told in found.items():
        lines = [json.dumps(one) for one in ({"summary": told.summary}, *told.events, *told.samples)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    load = facts["load_average"]
    head = [
        "# Across hosts",
        "",
        f"`{facts['command']}` {made_by(facts)}; load average {load['before'][0]:.1f} before, "
        f"{load['after'][0]:.1f} after; {facts['wall_s'] / 60:.0f} minutes. What is run: "
        "[benchmarks/across_hosts.py](../../across_hosts.py). `figures.json` has the figures and what each interface "
        "has counted; the other files each run's summary, events and steps, one JSON object a line.",
        "",
    ]
    (folder / "README.md").write_text("\n".join([*head, "```", *table(facts["figures"]), "```", ""]))


if __name__ == "__main__":
    app()
