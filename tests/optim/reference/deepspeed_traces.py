"""What DeepSpeed 0.19.6's own optimizers did in float64, step by step: the problem, and the loader of the record.

    trace = load_trace("onebit_adam", 2)            # or "onebit_lamb", "zero_one_adam"; n = 1..4 (0/1 Adam: 2..4)
    trace.start[tensor]                             # x before the first update; float64, like every tensor here
    trace.gradients[step][rank][tensor]             # the local gradient of update `step` = 1..trace.steps
    trace.lrs[step]                                 # the learning rate of all tensors at that update
    trace.weight_decays[tensor]                     # the last two tensors have none: a parameter group of their own
    trace.param_groups(parameters)                  # that as torch.optim takes it, order of tensors kept
    trace.settings                                  # betas, eps and the rest, under DeepSpeed's names
    trace.warmup                                    # uncompressed updates: freeze_step - 1 (None for 0/1 Adam)
    trace.recorded                                  # the updates whose state was kept: not all, all turning points
    trace.x[step][rank][tensor], trace.m[...], trace.v[...]    # the state after update `step`, of every rank
    trace.deviation(step, rank, x, m, v)            # largest difference of an element from these; lists of tensors
    trace.lamb["lamb_coeff_freeze"][step][tensor]   # LAMB, after every update; "scaling_coeff" (1 in warm-up),
                                                    # "last_factor" and "lamb_coeff" too. Empty for the others
    trace.v_fresh[tensor]                           # LAMB's after the last update. Empty for the others

Layout: one tensor a parameter (DeepSpeed's fp32 mode: one worker scale a tensor, one server scale a chunk), in LAMB one
fused buffer of all. DeepSpeed's step() was called once with zero gradients before update 1, as its fp16 wrapper does,
so its counter is t + 1 at update t. Gradients do not depend on x. They come from integers alone, so they are the same
bits everywhere; a digest in the file says so. How the record was made: tests/data/deepspeed-0.19.6/README.md.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

OPTIMIZERS = ("onebit_adam", "onebit_lamb", "zero_one_adam")
CASES = tuple((o, n) for o in OPTIMIZERS for n in (1, 2, 3, 4) if (o, n) != ("zero_one_adam", 1))

DATA = Path(__file__).parents[2] / "data" / "deepspeed-0.19.6"
SHAPES = ((13, 7), (5,), (3, 3), (1,))
WEIGHT_DECAYS = (0.05, 0.05, 0.0, 0.0)
STEPS = 48

_START_SCALES = (1.0, 0.0, 0.125, 2**-10)  # a zero-initialised tensor; one so small that LAMB's coefficient is clipped
_GRADIENT_SCALES = (1.0, 0.25, 4.0, 1.0)
_CHANGE_AT = 24  # from this update on gradients are larger or smaller: LAMB's factor goes both ways
_CHANGES = (0.25, 1.0, 4.0, 0.5)


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of one optimizer on n ranks; see the top of this file."""

    optimizer: str
    num_workers: int
    steps: int
    settings: dict[str, Any]
    weight_decays: tuple[float, ...]
    start: list[Tensor]
    gradients: dict[int, list[list[Tensor]]]
    lrs: dict[int, float]
    recorded: tuple[int, ...]
    x: dict[int, list[list[Tensor]]]
    m: dict[int, list[list[Tensor]]]
    v: dict[int, list[list[Tensor]]]
    lamb: dict[str, dict[int, list[float]]]
    v_fresh: list[Tensor]

    @property
    def warmup(self) -> int | None:
        return self.settings["freeze_step"] - 1 if "freeze_step" in self.settings else None

    def param_groups(self, parameters: list[Tensor]) -> list[dict[str, Any]]:
        decays = list(dict.fromkeys(self.weight_decays))
        pairs = list(zip(parameters, self.weight_decays, strict=True))
        return [{"params": [p for p, own in pairs if own == decay], "weight_decay": decay} for decay in decays]

    def deviation(self, step: int, rank: int, x: list[Tensor], m: list[Tensor], v: list[Tensor]) -> float:
        pairs = zip(x + m + v, self.x[step][rank] + self.m[step][rank] + self.v[step][rank], strict=True)
        return max(float((ours.detach() - theirs).abs().max()) for ours, theirs in pairs)


def load_trace(optimizer: str, num_workers: int) -> Trace:
    path = DATA / f"{optimizer}-n{num_workers}.npz"
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    about = json.loads(str(arrays.pop("about")))
    gradients = problem_gradients(num_workers)
    if about["digest"] != digest(gradients):
        raise ValueError(f"{path}: made from other gradients than this module's; run make_traces.py of that folder")
    recorded = tuple(about["recorded"])
    states = {name: _by_step(recorded, num_workers, arrays.pop(name)) for name in ("x", "m", "v")}
    return Trace(
        optimizer=optimizer,
        num_workers=num_workers,
        steps=STEPS,
        settings={**about["settings"], "betas": tuple(about["settings"]["betas"])},
        weight_decays=WEIGHT_DECAYS,
        start=problem_start(),
        gradients=gradients,
        lrs=problem_lrs(),
        recorded=recorded,
        **states,
        v_fresh=_split(arrays.pop("v_fresh")) if "v_fresh" in arrays else [],
        lamb={name: {at + 1: row.tolist() for at, row in enumerate(rows)} for name, rows in arrays.items()},
    )


def problem_start() -> list[Tensor]:
    return [scale * _uniform(shape, 0, 0, at) for at, (shape, scale) in _tensors(_START_SCALES)]


def problem_gradients(num_workers: int) -> dict[int, list[list[Tensor]]]:
    """A part that all share for ever, and as much noise again of the step and the rank."""
    common = [_uniform(shape, 1, 0, at) for at, shape in enumerate(SHAPES)]

    def one(step: int, rank: int) -> list[Tensor]:
        change = _CHANGES if step >= _CHANGE_AT else (1.0, 1.0, 1.0, 1.0)
        return [
            scale * change[at] * (0.5 * common[at] + _uniform(shape, 1 + step, rank, at))
            for at, (shape, scale) in _tensors(_GRADIENT_SCALES)
        ]

    return {step: [one(step, rank) for rank in range(num_workers)] for step in range(1, STEPS + 1)}


def problem_lrs() -> dict[int, float]:
    """Up for eight updates, then down."""
    return {step: 0.01 * min(step, 8) / 8 * (1 - step / 64) for step in range(1, STEPS + 1)}


def digest(gradients: dict[int, list[list[Tensor]]]) -> str:
    sha = hashlib.sha256()
    for step in sorted(gradients):
        for tensors in gradients[step]:
            for tensor in tensors:
                sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def laid_end_to_end(tensors: list[Tensor]) -> np.ndarray:
    return np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors])


def _tensors(scales: tuple[float, ...]) -> list[tuple[int, tuple[tuple[int, ...], float]]]:
    return list(enumerate(zip(SHAPES, scales, strict=True)))


def _uniform(shape: tuple[int, ...], step: int, rank: int, at: int) -> Tensor:
    """Multiples of 2^-31 in [-1, 1), the same bits everywhere: splitmix64 of where the element stands."""
    numel = int(np.prod(shape))
    z = np.arange(numel, dtype=np.uint64) + np.uint64(((step * 16 + rank) * 16 + at) * 65536 + 1)
    z = z * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    high = (z ^ (z >> np.uint64(31))) >> np.uint64(32)
    return torch.from_numpy(high.astype(np.float64) / 2**31 - 1).reshape(shape)


def _by_step(recorded: tuple[int, ...], num_workers: int, states: np.ndarray) -> dict[int, list[list[Tensor]]]:
    """states: [recorded update, rank, elements]; one rank stands for all where they agreed to the bit."""
    by_step = {}
    for step, ranks in zip(recorded, states, strict=True):
        rows = ranks if len(ranks) == num_workers else np.repeat(ranks, num_workers, axis=0)
        by_step[step] = [_split(row) for row in rows]
    return by_step


def _split(row: np.ndarray) -> list[Tensor]:
    pieces = torch.from_numpy(row.copy()).split([int(np.prod(shape)) for shape in SHAPES])
    return [piece.reshape(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]
