"""The tasks: three that a job file describes, two on which 0/1 Adam fell behind, four that move v late, six of others.

gpt, bert, resnet   0.14, 0.12 and 0.08 M parameters, as jobs: bytes of a text, masked bytes, handwritten digits
lstm, rows          a character LSTM, and embedding rows that are rarely touched
saddle              a deep narrow net with small initial weights: gradients grow by orders when it leaves the saddle
curriculum          labels that are noise for a third of the run, then say something
restarts            the LSTM under a cosine that begins again twice (SGDR)
finetune            the LSTM from a checkpoint trained on the same text in small letters, at a lower rate
steady, ratings     embedding rows in any order and factors of users and items, at a rate that never falls
fallingratings      these factors at a rate that falls
steadylstm          the LSTM at a rate that never falls
vit, contrast       a transformer on digits, and two views of a digit to be told from those of others
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import pairwise
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.defaults.problems import (
    CONTRAST,
    LSTM,
    RATINGS,
    ROWS,
    SHUFFLED,
    VIT,
    Batch,
    CharacterLstm,
    Problem,
    text,
    windows_of,
)
from benchmarks.provenance import TEXT
from thinwire.contract.spec import TrainSpec


class Metric(StrEnum):
    """What a task is judged by at the end."""

    LOSS = "loss"
    """Validation loss in nats, lower is better; differences are in per cent of the dense loss."""
    ACCURACY = "accuracy"
    """Share of validation samples, higher is better; differences are in points."""


Schedule = Callable[[int, int], float]
"""(step from 1, steps of the run) to the part of the peak rate."""

RISE = 0.1
"""Part of the run in which the rate rises; what the optimizers are given as lr_warmup_steps."""
FEATURES, CLASSES = 16, 4
NOISE_UNTIL = 0.35
RESTARTS = 3


@dataclass(frozen=True, slots=True)
class DefaultsTask:
    """problem: what is trained; or job, fields of a job file, and rates by dense method. start: trained weights.

    A rate that is not given is found by a pilot.
    """

    name: str
    title: str
    problem: Problem | None
    steps: int
    schedule: Schedule
    job: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    metric: Metric = Metric.LOSS
    start: Callable[[], dict[str, Tensor]] | None = None
    ranks: int = 2

    def spec(self, optimizer: Mapping[str, Any], seed: int, steps: int, ranks: int) -> TrainSpec:
        """The job, with this optimizer."""
        workers = {"min": ranks, "max": ranks, "device": "cpu"}
        given = {"name": self.name, "seed": seed, "steps": steps, "optimizer": dict(optimizer), "workers": workers}
        return TrainSpec.model_validate({**given, **self.job})


def once(step: int, steps: int) -> float:
    """A rate that rises for a tenth of the run and falls as a cosine to a tenth."""
    rise = round(RISE * steps)
    return step / rise if step <= rise else 0.55 + 0.45 * cos(pi * (step - rise) / (steps - rise))


def steady(step: int, steps: int) -> float:
    """The same rate from the first step to the last. Nothing hides steps that a variance makes too long."""
    return 1.0


def restarting(step: int, steps: int) -> float:
    """The same, but the cosine falls to a hundredth RESTARTS times, each time from the peak."""
    rise = round(RISE * steps)
    if step <= rise:
        return step / rise
    period = (steps - rise) / RESTARTS
    return 0.505 + 0.495 * cos(pi * ((step - rise) % period) / period)


def _net(sizes: list[int], gain: float) -> nn.Module:
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        linear = nn.Linear(wide, narrow)
        nn.init.normal_(linear.weight, std=gain * wide**-0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@cache
def _teacher() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return _net([FEATURES, 24, CLASSES], 1.5).requires_grad_(False)


def _taught(generator: torch.Generator, samples: int, part: str) -> Batch:
    """Normal features; the label is the teacher's, with noise in its logits."""
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, (3 * _teacher()(x) + 0.3 * torch.randn(samples, CLASSES, generator=generator)).argmax(1)


def _saddle() -> nn.Module:
    return _net([FEATURES, 48, 48, 48, 48, CLASSES], 0.35)


def _shallow() -> nn.Module:
    return _net([FEATURES, 64, 64, CLASSES], 1.0)


@dataclass(frozen=True, slots=True)
class Curriculum(Problem):
    """A problem whose training labels are noise until NOISE_UNTIL of the run."""

    def batch_of(self, seed: int, step: int) -> Batch:
        """As Problem.batch_of."""
        x, y = Problem.batch_of(self, seed, step)
        if step > NOISE_UNTIL * self.steps:
            return x, y
        return x, torch.randint(0, CLASSES, y.shape, generator=torch.Generator().manual_seed(9_000_011 * seed + step))


def _small_letters(generator: torch.Generator, samples: int, part: str) -> Batch:
    letters, characters = text()
    small = torch.tensor([characters.index(ord(chr(one).lower())) for one in characters])
    return windows_of(small[letters], generator, samples, part)


@cache
def _checkpoint() -> dict[str, Tensor]:
    """The LSTM after PRETRAINED steps of torch's Adam on small letters, the same for all seeds."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = CharacterLstm()
    first = Problem("small", "", CharacterLstm, _small_letters, 32, 256, PRETRAINED, 8e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=first.lr)
    for step in range(1, PRETRAINED + 1):
        optimizer.zero_grad()
        first.loss(model, first.batch_of(11, step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return copy.deepcopy(model.state_dict())


PRETRAINED = 400
LATE = "gradients grow late"
_SADDLE = Problem("saddle", LATE, _saddle, _taught, 128, 2048, 1000, 4e-3)
_CURRICULUM = Curriculum("curriculum", LATE, _shallow, _taught, 128, 2048, 1000, 8e-3)

_TEXT = {"source": "text-file", "path": str(TEXT)}
_GPT = {
    "global_batch": 32,
    "recipe": {"name": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 64},
    "data": _TEXT,
    "evaluation": {"windows": 512},
}
# Windows of 64 bytes in batches of 32 stayed on a plateau for 1000 steps, where every optimizer is the same. A rate
# that rises for 5 % of the steps instead of 20 % put the baselines' best rate next to one that fails.
_BERT = {
    "global_batch": 64,
    "recipe": {"name": "bert", "layers": 2, "width": 64, "heads": 4, "context": 32},
    "data": _TEXT,
    "lr_schedule": {"warmup": 0.2},
    "evaluation": {"windows": 512},
}
_RESNET = {
    "global_batch": 32,
    "recipe": {"name": "resnet", "widths": [16, 32, 64], "blocks": 1},
    "data": {"source": "digits"},
    "evaluation": {"windows": 1797},
}

DEFAULTS_TASKS = {
    task.name: task
    for task in (
        DefaultsTask("bert", "BERT, masked bytes", None, 1000, once, _BERT, {"adam": 4e-3, "lamb": 1e-2}),
        DefaultsTask("lstm", LSTM.title, LSTM, LSTM.steps, once),
        DefaultsTask("rows", ROWS.title, ROWS, ROWS.steps, once),
        DefaultsTask("saddle", "a deep net of small weights, 9 k: gradients grow late", _SADDLE, 1000, once),
        DefaultsTask("curriculum", "labels of noise, then of a teacher, 6 k", _CURRICULUM, 1000, once),
        DefaultsTask("restarts", "the LSTM, its rate begins again twice", LSTM, 2 * LSTM.steps, restarting),
        DefaultsTask(
            "finetune", "the LSTM, fine-tuned from small letters", LSTM, LSTM.steps, once, start=lambda: _checkpoint()
        ),
        DefaultsTask("gpt", "GPT, bytes", None, 1000, once, _GPT, {"adam": 2e-3, "lamb": 2e-2}),
        DefaultsTask(
            "resnet", "ResNet, digits", None, 1000, once, _RESNET, {"adam": 2e-3, "lamb": 1e-2}, Metric.ACCURACY
        ),
        DefaultsTask("steady", "the rows in any order, at a constant rate", SHUFFLED, SHUFFLED.steps, steady),
        DefaultsTask("ratings", f"{RATINGS.title}, at a constant rate", RATINGS, RATINGS.steps, steady),
        DefaultsTask("fallingratings", RATINGS.title, RATINGS, RATINGS.steps, once),
        DefaultsTask("contrast", CONTRAST.title, CONTRAST, CONTRAST.steps, once),
        DefaultsTask("vit", VIT.title, VIT, VIT.steps, once),
        DefaultsTask("steadylstm", "the LSTM at a constant rate", LSTM, LSTM.steps, steady),
        DefaultsTask("gpt8", "GPT, bytes, eight ranks of 4 windows", None, 400, once, _GPT, ranks=8),
    )
}
"""In the order in which they are run: first the task on which the automatic freeze is known to lose."""
MUON_TASKS = ("gpt", "bert", "resnet", "lstm", "vit", "gpt8")
