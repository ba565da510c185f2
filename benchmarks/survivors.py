"""The command: python -m benchmarks.survivors. Does a worker grow that lives through many regroups?

Three workers without Ray, two of which stay while the third is killed, or leaves as planned, and comes anew, again and
again. Each stayer writes down what it holds (tests/workers/loop/growth.py) while three train: its threads, its open
files, its memory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import ROOT
from tests.workers.loop import elastic_job
from tests.workers.loop.elastic_job import ElasticJob
from tests.workers.loop.growth import look, watched_work
from tests.workers.loop.test_elastic_loop import OPTIMIZERS
from thinwire.workers.membership import Limits

RESULTS = ROOT / "benchmarks" / "results" / "survivors"
STAY, GOES = (0, 1), 2
BY_LOOK, WAIT_S = 5, 300.0
"""Goings and comings from one look to the next; for whatever is to come, in seconds."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    goings: Annotated[int, typer.Option(help="How often the third worker goes; each is two regroups.")] = 100,
    leaves: Annotated[bool, typer.Option(help="It leaves as planned; else it is killed.")] = False,
    width: Annotated[int, typer.Option(help="Of the model.")] = 32,
) -> None:
    """Train, let the third worker go and come, and print what a stayer holds every five goings."""
    elastic_job._work = watched_work
    looks: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="thinwire-survivors-") as folder:
        run_dir = Path(folder)
        recipe = {"layers": 2, "width": width, "heads": 2, "context": 32}
        spec = {"optimizer": OPTIMIZERS["1-bit Adam"], "checkpoint": {"every_steps": 50}, "recipe": recipe}
        with ElasticJob(run_dir, Limits(1, 3), steps=10**6, pause_s=0.01, **spec) as job:
            job.start(*STAY, GOES)
            _wait_size(job, 3, 0)
            for number in range(goings + 1):
                if number % BY_LOOK == 0:
                    looks.append({"goings": number, "of": look(job, STAY, number)})
                    typer.echo(_line(looks[-1]))
                if number < goings:
                    _one_going(job, leaves=leaves)
    how = "leaves" if leaves else "killed"
    told = {
        "command": "python -m benchmarks.survivors" + (" --leaves" if leaves else "") + f" --width {width}",
        **asdict(provenance()),
        "load_at_end": os.getloadavg()[0],
        "looks": looks,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{how}-width-{width}.json").write_text(json.dumps(told, indent=1) + "\n")


def _one_going(job: ElasticJob, *, leaves: bool) -> None:
    generation = job.server.snapshot().generation
    if leaves:
        job.server.dismiss(GOES, "it is to come anew")
    else:
        job.kill(GOES)
    job.workers[GOES].join(120.0)
    generation = _wait_size(job, 2, generation)
    job.start(GOES)
    _wait_size(job, 3, generation)


def _wait_size(job: ElasticJob, size: int, after: int) -> int:
    """Until so many train in a later generation than that, and have made a step in it. Its number."""

    def there() -> bool:
        now = job.server.snapshot()
        stepped = now.members and all(one.step > 0 for one in now.members)
        return bool(now.generation > after and len(now.members) == size and now.status == "training" and stepped)

    _until(there)
    return job.server.snapshot().generation


def _until(there: Callable[[], bool]) -> None:
    """Raises: TimeoutError."""
    end = time.monotonic() + WAIT_S
    while not there():
        if time.monotonic() > end:
            raise TimeoutError(f"it did not come in {WAIT_S:g} s: see the logs of the workers")
        time.sleep(0.05)


def _line(look: dict[str, Any]) -> str:
    parts = [f"{look['goings']:4} goings"]
    for slot, one in look["of"].items():
        threads, files = sum(one["threads"].values()), sum(one["files"].values())
        mib = " ".join(
            f"{name.removeprefix('malloc_')} {one[name] / 2**20:.1f}"
            for name in ("resident", "malloc_in_use", "malloc_free", "tensor_bytes")
        )
        parts.append(
            f"slot {slot}: threads {threads} files {files} tensors {one['tensors']} collections {one['collections']} "
            f"MiB: {mib}"
        )
    return "\n      ".join(parts)


if __name__ == "__main__":
    app()
