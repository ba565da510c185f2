"""One run: a task, a method, a seed, a rate. Two ranks as threads on one core, and no setting but the defaults.

The optimizers are given what a job gives them: the length of the run and of the rate's rise.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.defaults.others import OTHERS
from benchmarks.defaults.problems import Problem
from benchmarks.defaults.tasks import RISE, DefaultsTask, Metric, steady
from benchmarks.turns import Turns, run_in_turns
from tests.workers.by_hand import accuracy, build, evaluate, train_step
from thinwire.comm import NonFiniteInput
from thinwire.contract.spec import TrainSpec
from thinwire.optim import Adam, FlatOptimizer, Lamb, Muon, OneBitAdam, OneBitLamb, OneBitMuon, ZeroOneAdam
from thinwire.workers.telemetry.meter import Meter

CURVE = 10
"""Values of the metric in a run, at equal distances."""
DECAY = 0.1
"""The weight decay that people train with AdamW and Muon at, and OneBitMuon's default."""
MAKE: dict[str, Any] = {
    "adam": Adam,
    "adamw": Adam,
    "onebit_adam": OneBitAdam,
    "zero_one_adam": ZeroOneAdam,
    "lamb": Lamb,
    "onebit_lamb": OneBitLamb,
    "muon": Muon,
    "onebit_muon": OneBitMuon,
    **OTHERS,
}
MUONS = ("adamw", "muon", "onebit_muon")
"""Muon, and what it is compared with."""
SETTINGS: dict[str, dict[str, Any]] = {name: {"weight_decay": DECAY} for name in (*MUONS, *OTHERS)}
"""What is not left at its default."""
_OWN = ("adam", "onebit_adam", "zero_one_adam", "lamb", "onebit_lamb", "sgd", "onebit_sgd")
OF_SGD: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD, top-k": ("onebit_sgd", {"codec": "topk"}),
    "SGD, PowerSGD 1": ("onebit_sgd", {"codec": "powersgd", "rank": 1}),
    "SGD, PowerSGD 2": ("onebit_sgd", {"codec": "powersgd", "rank": 2}),
    "SGD, PowerSGD 4": ("onebit_sgd", {"codec": "powersgd", "rank": 4}),
    "sketched SGD": ("sketched_sgd", {}),
}
"""By other codecs than signs, and by a count-sketch: names in a job file, and what it says."""
SETTINGS |= {name: told for name, (_, told) in OF_SGD.items()}
JOBS = {name: name for name in _OWN} | {"adamw": "adam"} | {name: job for name, (job, _) in OF_SGD.items()}
"""Their names in a job file; the others are made in the place of Adam, of a job's model."""
BASELINES = {
    "onebit_adam": "adam",
    "zero_one_adam": "adam",
    "onebit_lamb": "lamb",
    "muon": "adamw",
    "onebit_muon": "adamw",
    **dict.fromkeys(OTHERS, "adamw"),
}
"""What each method is compared with."""
UNCOMPRESSED = {"onebit_muon": "muon", **dict.fromkeys(OTHERS, "muon")}
"""Of methods whose baseline is another algorithm, the same one without compression."""
FREEZING = ("onebit_adam", "zero_one_adam", "onebit_lamb")
"""Those that are told how long the run is."""
IN_FULL = ("mean", "sum")
"""Kinds of collectives that send values in full; all others send rows of signs, or next to nothing."""


@dataclass(frozen=True, slots=True)
class Run:
    """At its end. curve: values of the metric; the last is of what a checkpoint would hold. Bytes: rank 0's, of steps.

    full_bytes: those of sent_bytes that exchanges in full have sent. fp32_bytes: of a ring all-reduce in each step.
    evidence: what the optimizer found, such as variance_refreshes.
    """

    task: str
    method: str
    seed: int
    lr: float
    steps: int
    curve: list[float]
    diverged: str | None
    sent_bytes: int
    full_bytes: int
    fp32_bytes: int
    frozen_at: int | None
    evidence: dict[str, Any]
    cpu_s: float


@dataclass(slots=True)
class Seen:
    """What one rank saw. sent: bytes of training steps, by kind of collective."""

    curve: list[float]
    sent: Counter[str]
    numel: int = 0
    diverged: str | None = None
    frozen_at: int | None = None
    evidence: dict[str, Any] | None = None

    def end(self, optimizer: FlatOptimizer[Any]) -> None:
        """Note what the optimizer has found."""
        self.numel = optimizer.space.layout.num_live
        self.frozen_at, self.evidence = optimizer.frozen_at, dict(optimizer.evidence)

    def fp32_bytes(self, ranks: int, steps: int) -> int:
        """Of a ring all-reduce in fp32 in each step."""
        return round(2 * (ranks - 1) / ranks * 4 * self.numel * steps)


def run(task: DefaultsTask, method: str, seed: int, lr: float, steps: int | None = None) -> Run:
    """Train it. steps: in place of the task's, to see that it runs. Sets torch's threads to one."""
    torch.set_num_threads(1)
    steps = steps or task.steps
    began, told = time.process_time(), SETTINGS.get(method, {})
    if task.problem is None:
        spec = task.spec({"name": JOBS.get(method, "adam"), "lr": lr, **told}, seed, steps, task.ranks)
        make = None if method in JOBS else partial(MAKE[method], lr=lr, **told)
        seen = run_in_turns(task.ranks, lambda group: train_job(spec, group, steps, task.metric, make))[0]
    else:
        seen = _of_problem(task, task.problem, method, seed, lr, steps)
    return Run(
        task.name,
        method,
        seed,
        lr,
        steps,
        [round(value, 5) for value in seen.curve],
        seen.diverged,
        sum(seen.sent.values()),
        sum(seen.sent[kind] for kind in IN_FULL),
        seen.fp32_bytes(task.ranks, steps),
        seen.frozen_at,
        seen.evidence or {},
        round(time.process_time() - began, 1),
    )


def train_job(
    spec: TrainSpec,
    group: Turns,
    every: int,
    metric: Metric = Metric.LOSS,
    make: Callable[..., Any] | None = None,
) -> Seen:
    """Train a job from its first step to its last. every: steps from one value of the curve to the next.

    make: of (parameters, group, model) the optimizer, where it is not the job's.
    """
    meter = Meter(group.stats)
    training = build(spec, group, torch.device("cpu"))
    if make is not None:
        model = training.model
        training = replace(training, optimizer=make(model.parameters(), group=group, model=model))
    seen = Seen([], Counter())
    try:
        for step in range(1, spec.steps + 1):
            before = group.stats.bytes_by_kind.copy()
            train_step(training, step, meter)
            seen.sent += group.stats.bytes_by_kind - before
            if step == spec.steps:
                training.optimizer.prepare_to_save()
            if step % every == 0:
                loss = evaluate(training, meter)
                seen.curve.append(accuracy(training) if metric is Metric.ACCURACY else loss)
    except NonFiniteInput as error:  # alike on every rank
        seen.diverged = f"step {training.optimizer.num_steps + 1}: {error}"
    seen.end(training.optimizer)
    if (counted := getattr(training.optimizer, "sent_bytes", None)) is not None:
        seen.sent = Counter(counted=round(counted))
    return seen


def _of_problem(task: DefaultsTask, problem: Problem, method: str, seed: int, lr: float, steps: int) -> Seen:
    told = dict(SETTINGS.get(method, {}))
    if method in FREEZING:
        told["total_steps"] = steps
    if method in FREEZING and task.schedule is not steady:
        told["lr_warmup_steps"] = round(RISE * steps)
    make = partial(MAKE[method], lr=lr, **told)
    torch.manual_seed(seed)
    models = [problem.make() for _ in range(task.ranks)]
    if task.start is not None:
        for model in models:
            model.load_state_dict(task.start())
    validation = problem.validation_batch()

    def work(group: Turns) -> Seen:
        model, seen = models[group.rank], Seen([], Counter())
        optimizer = make(model.parameters(), group=group, model=model)

        def validate() -> None:
            with torch.no_grad():
                seen.curve.append(float(problem.loss(model, validation)) if group.rank == 0 else 0.0)

        try:
            for step in range(1, steps + 1):
                for param_group in optimizer.param_groups:
                    param_group["lr"] = lr * task.schedule(step, steps)
                batch = problem.batch_of(seed, step)
                optimizer.zero_grad()
                mine = tuple(part.tensor_split(group.size)[group.rank] for part in batch)
                problem.loss(model, (mine[0], mine[1])).backward()  # type: ignore[no-untyped-call]
                before = group.stats.bytes_by_kind.copy()
                optimizer.step()
                seen.sent += group.stats.bytes_by_kind - before
                if step % (steps // CURVE) == 0 and step < steps:
                    validate()
            optimizer.prepare_to_save()
            validate()
        except NonFiniteInput as error:  # alike on every rank
            seen.diverged = f"step {optimizer.num_steps + 1}: {error}"
        seen.end(optimizer)
        return seen

    return run_in_turns(task.ranks, work)[0]
