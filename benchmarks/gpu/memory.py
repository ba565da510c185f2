"""Bytes of memory a parameter, by the device's allocator: what one of eight ranks holds, and the most in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.clock import Measured
from benchmarks.gpu.echo import Echo
from benchmarks.gpu.steps import RANKS, parameters
from thinwire.comm import SoloGroup
from thinwire.optim import OneBitAdam, OneBitLamb, ZeroOneAdam, ZeroOneSchedule

_NARROW = {"warmup": 3, "narrow": ("variance", "error_memory")}
_ZERO = {"var_freeze_step": 1, "schedule": ZeroOneSchedule(dense_steps=1, local_step_scaler=1, local_step_clipper=1)}
_ALL: tuple[tuple[str, Callable[..., Any], dict[str, Any], bool], ...] = (
    ("1-bit Adam", OneBitAdam, {"warmup": 3}, False),
    ("1-bit Adam, variance and error memory in bf16", OneBitAdam, _NARROW, False),
    ("1-bit Adam, warm-up in 8 bits", OneBitAdam, {"warmup": 3, "full_exchange": "int8"}, False),
    ("1-bit LAMB", OneBitLamb, {"warmup": 3}, False),
    ("0/1 Adam, a sync each step", ZeroOneAdam, _ZERO, False),
    ("1-bit Adam, one rank", OneBitAdam, {"warmup": 3}, True),
)
"""Name, class, options; is it alone?"""
STEPS = 6


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes a parameter, without parameters and gradients: held after the step, and the most within it."""

    held: float
    most: float


def measured(device: Measured, numel: int) -> Iterator[dict[str, Any]]:
    """A row for each optimizer: what torch's fused Adam takes, and ours in the largest step and in the last one."""
    yield {"values": numel, "optimizer": "torch's fused Adam", **_fused(device, numel)}
    for name, make, options, alone in _ALL:
        yield {"values": numel, "optimizer": name, **_ours(device, numel, make, options, alone)}


def _ours(
    device: Measured, numel: int, make: Callable[..., Any], options: dict[str, Any], alone: bool
) -> dict[str, Any]:
    before = device.held_bytes()
    model = torch.nn.ParameterList(parameters(numel, device.device))
    own = device.held_bytes() - before
    group = SoloGroup() if alone else Echo(RANKS)
    optimizer = make(model.parameters(), lr=1e-6, group=group, **options)
    taken = [_taken(device, optimizer.step, before + own, numel) for _ in range(STEPS)]
    told = optimizer.stats()["bytes_per_parameter"]["state"]
    return {**_row(taken), "told_bytes": told, "ranks": group.size}


def _fused(device: Measured, numel: int) -> dict[str, Any]:
    before = device.held_bytes()
    made = parameters(numel, device.device)
    own = device.held_bytes() - before
    optimizer = torch.optim.AdamW(made, lr=1e-6, fused=True)
    return {
        **_row([_taken(device, optimizer.step, before + own, numel) for _ in range(3)]),
        "told_bytes": None,
        "ranks": 1,
    }


def _taken(device: Measured, step: Callable[[], object], before: int, numel: int) -> Taken:
    most = device.most_bytes(step)
    return Taken((device.held_bytes() - before) / numel, (most - before) / numel)


def _row(taken: list[Taken]) -> dict[str, Any]:
    return {
        "held_bytes": taken[-1].held,
        "most_bytes": taken[-1].most,
        "most_bytes_of_any_step": max(one.most for one in taken),
    }
