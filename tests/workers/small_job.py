"""A job small enough for tests: the whole loop in a second or two, on threads."""

import time
from pathlib import Path

import torch

from thinwire.comm import run_threads
from thinwire.contract.reports import EventKind
from thinwire.contract.spec import TrainSpec
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.job import run_job
from thinwire.workers.session.training import Run
from thinwire.workers.telemetry.history import RunFiles
from thinwire.workers.telemetry.reporter import Reporter

SMALL = {
    "name": "small",
    "steps": 24,
    "global_batch": 7,  # divides by nothing
    "recipe": {"layers": 1, "width": 32, "heads": 2, "context": 32},
    "optimizer": {"name": "onebit_adam", "lr": 4e-3, "betas": [0.9, 0.99], "warmup": 6},
    "lr_schedule": {"warmup": 2},
    "workers": {"min": 1, "max": 3},
    "checkpoint": {"every_steps": 8},
    "evaluation": {"every_steps": 12, "windows": 9},
}


def small_spec(**changes) -> TrainSpec:
    return TrainSpec.model_validate({**SMALL, **changes})


class Recording(Reporter):
    """Keeps what this rank has to say, and rank 0's history in a run folder where there is one."""

    def __init__(self, run_dir: Path | None = None):
        super().__init__(None if run_dir is None else RunFiles(run_dir))
        if run_dir is not None:
            run_dir.mkdir(parents=True, exist_ok=True)
        self.samples, self.events = [], []

    def went_back(self, step):
        super().went_back(step)
        self.samples = [sample for sample in self.samples if sample.step <= step]

    def resumed(self, step):
        super().resumed(step)
        if not step:  # a fresh start is no event otherwise
            self.event(EventKind.RESUMED, step)

    def steps(self, samples, num_samples, sent_bytes):
        super().steps(samples, num_samples, sent_bytes)
        self.samples.extend(samples)

    def event(self, kind, step, **fields):
        self.events.append((kind, step))


def run_small(run_dir: Path, spec: TrainSpec, size: int, wrap=lambda group: group):
    """[(summary, samples, events)] by rank, of a run on `size` threads; `wrap` may replace a rank's group."""

    def work(group):
        reporter = Recording(run_dir)
        summary = run_job(spec, Run(run_dir, time.time()), FixedRanks(wrap(group)), torch.device("cpu"), reporter)
        return summary and summary.as_json(), reporter.samples, reporter.events

    return run_threads(size, work)
