"""What is compared: tasks, methods, pairs, and the TrainSpec of each case. Nothing is computed here.

A pair shares everything but the optimizer: data, initial values, batches, steps, learning rate. The rates were chosen
by a pilot of the dense baselines alone (`--pilot`); the compressed side of a pair takes what its baseline got.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from thinwire.contract.spec import TrainSpec

ROOT = Path(__file__).resolve().parents[2]
TEXT = Path("tests/data/tinyshakespeare.txt")
"""Relative to ROOT, so that a result does not tell where the repository lay."""

NUM_WORKERS = 4
STEPS = 1000
SEEDS = 8
PILOT_SEED = 1000
"""Far from the study's seeds, so that no rate was chosen on a run that is then compared."""


class Metric(StrEnum):
    """What a task is judged by at the end."""

    LOSS = "loss"
    """Validation loss in nats, lower is better; differences are told in per cent of the dense loss."""
    ACCURACY = "accuracy"
    """Share of validation samples, higher is better; differences are told in points."""


@dataclass(frozen=True, slots=True)
class Task:
    """A recipe with its data. settings: fields of TrainSpec. seconds_a_step: core-seconds, for the estimate only.

    freeze: the part of the run after which the variance is kept; None: where the optimizer finds it.
    """

    name: str
    title: str
    metric: Metric
    settings: dict[str, Any]
    seconds_a_step: float
    freeze: float | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """An optimizer as the study runs it. baseline: the dense method that it is compared with, None for a baseline.

    optimizer: fields of the spec's optimizer but the learning rate; settings: other fields of TrainSpec. tasks: those
    that are run with it, None for all. num_workers: one of them exchanges nothing and so compresses nothing.
    """

    name: str
    title: str
    optimizer: dict[str, Any]
    baseline: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] | None = None
    num_workers: int = NUM_WORKERS


@dataclass(frozen=True, slots=True)
class Case:
    """One run: what is trained, how, from which seed. The spec has TEXT as its data path, relative to ROOT."""

    task: str
    method: str
    seed: int
    spec: TrainSpec

    @property
    def name(self) -> str:
        """How it is told to people, and its file without the suffix."""
        return f"{self.task}/{self.method}-{self.seed}"


TASKS = {
    task.name: task
    for task in (
        Task(
            "gpt",
            "GPT, 0.14 M parameters, bytes of tinyshakespeare",
            Metric.LOSS,
            {
                "global_batch": 32,
                "recipe": {"name": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 64},
                "data": {"source": "text-file", "path": str(TEXT)},
                "evaluation": {"every_steps": 50, "windows": 512},
            },
            0.050,
        ),
        # Windows of 64 bytes in batches of 32 stayed on a plateau for 1000 steps, where every optimizer is the same. A
        # rate that rises for 5 % of the steps instead of 20 % put the baselines' best rate next to one that fails:
        # results/convergence-short-warmup.
        Task(
            "bert",
            "BERT, 0.12 M parameters, masked bytes of tinyshakespeare",
            Metric.LOSS,
            {
                "global_batch": 64,
                "recipe": {"name": "bert", "layers": 2, "width": 64, "heads": 4, "context": 32},
                "data": {"source": "text-file", "path": str(TEXT)},
                "lr_schedule": {"warmup": 0.2},
                "evaluation": {"every_steps": 50, "windows": 512},
            },
            0.050,
            # Left to themselves they freeze at 20 to 25 %, where the model has only begun to use the context and
            # gradients still grow: results/convergence-early-freeze.
            freeze=0.5,
        ),
        Task(
            "resnet",
            "ResNet, 0.08 M parameters, handwritten digits of scikit-learn",
            Metric.ACCURACY,
            {
                "global_batch": 32,
                "recipe": {"name": "resnet", "widths": [16, 32, 64], "blocks": 1},
                "data": {"source": "digits"},
                "evaluation": {"every_steps": 50, "windows": 1797},
            },
            0.050,
        ),
    )
}

_BF16 = {"precision": "bfloat16"}

METHODS = {
    method.name: method
    for method in (
        Method("adam", "Adam", {"name": "adam"}),
        Method("onebit_adam", "1-bit Adam", {"name": "onebit_adam"}, baseline="adam"),
        Method("zero_one_adam", "0/1 Adam", {"name": "zero_one_adam"}, baseline="adam"),
        Method("lamb", "LAMB", {"name": "lamb"}),
        Method("onebit_lamb", "1-bit LAMB", {"name": "onebit_lamb"}, baseline="lamb"),
        Method("adam_bf16", "Adam, bf16", {"name": "adam"}, settings=_BF16),
        Method("onebit_adam_bf16", "1-bit Adam, bf16", {"name": "onebit_adam"}, baseline="adam_bf16", settings=_BF16),
        # Controls: the same algorithm on one worker, so what is left of the difference is not the compression's.
        Method(
            "onebit_adam_alone",
            "1-bit Adam on one worker, not compressed",
            {"name": "onebit_adam"},
            baseline="adam",
            tasks=("gpt", "bert"),
            num_workers=1,
        ),
        Method(
            "onebit_lamb_alone",
            "1-bit LAMB on one worker, not compressed",
            {"name": "onebit_lamb"},
            baseline="lamb",
            tasks=("gpt", "bert"),
            num_workers=1,
        ),
    )
}

RATES: dict[str, dict[str, float]] = {
    "gpt": {"adam": 2e-3, "lamb": 2e-2, "adam_bf16": 2e-3},
    "bert": {"adam": 4e-3, "lamb": 1e-2},
    "resnet": {"adam": 2e-3, "lamb": 1e-2},
}
"""Learning rate by task and dense method, out of PILOT_RATES; a compressed method takes that of its baseline."""

PILOT_RATES: dict[str, tuple[float, ...]] = {
    "adam": (1e-3, 2e-3, 4e-3, 8e-3),
    "lamb": (5e-3, 1e-2, 2e-2, 4e-2),
}


def study(
    tasks: Iterable[str] | None = None,
    methods: Iterable[str] | None = None,
    seeds: int = SEEDS,
    steps: int = STEPS,
    rate_factor: float = 1.0,
) -> list[Case]:
    """The cases, seed after seed, so that an interrupted run has whole pairs. None: all tasks, all methods.

    rate_factor: times the rate of every pair, to see how much hangs on it.

    Raises: ValueError for a task or a method that does not exist, or for a choice that no task has.
    """
    chosen_tasks = _chosen("task", tasks, TASKS)
    chosen_methods = _chosen("method", methods, METHODS)
    cases = [
        case(task, method, seed, steps, rate_factor * RATES[task][_baseline(method)])
        for seed in range(seeds)
        for task in chosen_tasks
        for method in chosen_methods
        if method in methods_of(task)
    ]
    if not cases:
        raise ValueError(f"nothing to run: of {chosen_tasks} none has any of {chosen_methods}; see --help")
    return cases


def pilot(tasks: Iterable[str] | None = None, steps: int = STEPS) -> list[Case]:
    """The dense baselines at each rate of PILOT_RATES, from one seed. The rate is part of the case's method."""
    return [
        case(task, method, PILOT_SEED, steps, rate, label=f"{method}-lr{rate:g}")
        for task in _chosen("task", tasks, TASKS)
        for method in RATES[task]
        if not METHODS[method].settings  # another precision takes the rate of its method
        for rate in PILOT_RATES[method]
    ]


def methods_of(task: str) -> list[str]:
    """The methods that a task is run with: those whose baseline has a rate there, less those of other tasks."""
    return [
        name
        for name, method in METHODS.items()
        if _baseline(name) in RATES[task] and (method.tasks is None or task in method.tasks)
    ]


def pairs_of(task: str) -> list[tuple[str, str]]:
    """(dense, compressed) names."""
    return [(METHODS[name].baseline or "", name) for name in methods_of(task) if METHODS[name].baseline]


def case(task: str, method: str, seed: int, steps: int, rate: float, label: str | None = None) -> Case:
    """One case. label: how the method is called where its name alone does not tell cases apart."""
    settings = {**TASKS[task].settings, **METHODS[method].settings}
    evaluation = settings["evaluation"]
    evaluation = {**evaluation, "every_steps": max(1, min(evaluation["every_steps"], steps // 10))}
    spec = TrainSpec.model_validate(
        {
            "name": f"{task}-{method}".replace("_", "-"),
            "seed": seed,
            "steps": steps,
            "optimizer": {**METHODS[method].optimizer, **_freeze(task, method), "lr": rate},
            "workers": {
                "min": METHODS[method].num_workers,
                "max": METHODS[method].num_workers,
                "device": "cpu",
            },
            **settings,
            "evaluation": evaluation,
        }
    )
    return Case(task, label or method, seed, spec)


def _freeze(task: str, method: str) -> dict[str, float]:
    part, name = TASKS[task].freeze, METHODS[method].optimizer["name"]
    if part is None or METHODS[method].baseline is None:
        return {}
    return {"var_freeze" if name == "zero_one_adam" else "warmup": part}


def _baseline(method: str) -> str:
    return METHODS[method].baseline or method


def _chosen(kind: str, names: Iterable[str] | None, known: dict[str, Any]) -> list[str]:
    chosen = list(known) if names is None else list(names)
    for name in chosen:
        if name not in known:
            raise ValueError(f"{kind} {name!r} does not exist; there are {', '.join(known)}")
    return [name for name in known if name in chosen]
