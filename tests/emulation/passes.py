"""Passes over memory: what a step of each optimizer reads and writes on a GPU, and how often it launches. A program.

    python -m tests.emulation.passes [--each] [--json] ["1-bit lamb, compressed" ...]

One rank of RANKS, whose peers echo it (benchmarks/gpu/echo.py). What kernels move the emulator has seen: each byte
counts once a launch that reads it, and once that writes it. torch's operations are counted by the sizes of their
tensors (pretend.py). The wire is what collectives copy, which is not the optimizer's. torch's fused Adam moves
FUSED_ADAM bytes a value. Time on a GPU is at least these bytes over its bandwidth; nothing here measures time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.echo import Echo
from tests.emulation import pretend
from tests.emulation.emulator import Emulator
from tests.optim.constructing import construct
from thinwire.comm.kernels import choose
from thinwire.optim import Adam, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.kernels import updates

RANKS, FUSED_ADAM = 8, 28
SHAPES = [(128, 512)] * 2
BUCKET, WIRE = 1 << 16, "wire"
"""Of each tensor a bucket, of whole blocks of 4096 values for each rank."""
MANY = 10**6


@dataclass(frozen=True)
class Step:
    """The step to look at, counted from 1, of this optimizer with options."""

    make: Callable[..., Any]
    number: int = 5
    options: dict[str, Any] = field(default_factory=dict)


def _zero_one(clipper: int) -> dict[str, Any]:
    clipped = {"local_step_scaler": 1, "local_step_clipper": clipper}
    return {"var_freeze_step": 1, "dense_steps": 1, **clipped}


STEPS = {
    "adam": Step(Adam),
    "adam, 8 bits": Step(Adam, options={"full_exchange": "int8"}),
    "lamb": Step(Lamb),
    "1-bit adam": Step(OneBitAdam, options={"warmup": 1}),
    "1-bit adam, bfloat16": Step(OneBitAdam, options={"warmup": 1, "narrow": ("variance", "error_memory")}),
    "1-bit adam, warm-up in 8 bits": Step(OneBitAdam, options={"warmup": MANY, "full_exchange": "int8"}),
    "1-bit lamb": Step(OneBitLamb, options={"warmup": 1}),
    "1-bit lamb, warm-up": Step(OneBitLamb, options={"warmup": MANY}),
    "1-bit lamb, warm-up in 8 bits": Step(OneBitLamb, options={"warmup": MANY, "full_exchange": "int8"}),
    "0/1 adam, a sync each step": Step(ZeroOneAdam, 4, _zero_one(1)),
    "0/1 adam, a sync that ends a round": Step(ZeroOneAdam, 10, _zero_one(4)),
    "0/1 adam, a local step": Step(ZeroOneAdam, 5, _zero_one(4)),
}


class _Wire(Echo):
    """What it copies is noted apart."""

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """As Echo."""
        with pretend.noted_as(WIRE):
            super().all_to_all(out_nB, in_nB)

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """As Echo."""
        with pretend.noted_as(WIRE):
            super().all_gather(out_nB, in_B)

    def sum_(self, x: Tensor) -> None:
        """As Echo."""
        with pretend.noted_as(WIRE):
            super().sum_(x)

    def second_communicator(self) -> _Wire:
        """As Echo."""
        if self._second is None:
            self._second = _Wire(self.size, first=self)
        found: _Wire = self._second  # type: ignore[assignment]
        return found


def counted(step: Step, device: torch.device, launchers: dict[str, Emulator]) -> dict[str, Any]:
    """Of that step: launches, and bytes a value of each kernel and each operation."""
    random = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=random).to(device)) for shape in SHAPES]
    optimizer: Any = construct(  # type: ignore[no-untyped-call]
        step.make, params, group=_Wire(RANKS), lr=1e-3, bucket_elements=BUCKET, **step.options
    )
    numel = optimizer.space.p_N.numel()
    for number in range(1, step.number + 1):
        for p in params:
            if p.grad is None:
                p.grad = torch.randn(p.shape, generator=random).to(device)
            else:  # where it lies: what a user's backward costs is not counted
                p.grad.copy_(torch.randn(p.shape, generator=random), non_blocking=True)
        if number == step.number:
            for one in launchers.values():
                one.launched.clear()
                one.moved.clear()
            pretend.passes.clear()
        optimizer.step()
    each: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for one in launchers.values():
        for kernel, moved in one.moved:
            each[kernel] += moved / numel
            launches[kernel] += 1
    kernels, ours = sum(each.values()), sum(launches.values())
    wire = sum(moved for purpose, _, moved in pretend.passes if purpose == WIRE)
    for purpose, name, moved in pretend.passes:
        if moved and purpose != WIRE:
            each[f"torch {name}"] += moved / numel
            launches[f"torch {name}"] += 1
    return {
        "launches": ours,
        "torch_launches": sum(launches.values()) - ours,
        "kernels": kernels,
        "torch": sum(each.values()) - kernels,
        "wire": wire / numel,
        "over_fused_adam": sum(each.values()) / FUSED_ADAM,
        "each": {name: [launches[name], moved] for name, moved in each.items()},
    }


def main() -> None:
    """Count the steps that are named, or all."""
    parser = argparse.ArgumentParser(description="what a step reads and writes on a GPU")
    parser.add_argument("names", nargs="*", metavar="step", help=", ".join(STEPS))
    parser.add_argument("--each", action="store_true", help="of each kernel and operation too")
    parser.add_argument("--json", action="store_true", help="all of it as JSON")
    given = parser.parse_args()
    launchers: dict[str, Emulator] = {}

    def launcher(device: torch.device, dtype: torch.dtype, source: str) -> Emulator | None:
        return launchers.setdefault(source, Emulator(source)) if dtype == torch.float32 else None

    choose.cuda_launcher = updates.cuda_launcher = launcher  # type: ignore[assignment,attr-defined]
    device = pretend.start()
    found = {name: counted(STEPS[name], device, launchers) for name in given.names or STEPS}
    if given.json:
        json.dump(found, sys.stdout)
        return
    print("| step | launches, torch's | bytes a value of kernels, of torch | together, over fused Adam | wire |")
    print("|---|---|---|---|---|")
    for name, one in found.items():
        moved = f"{one['kernels']:.2f}, {one['torch']:.2f}"
        both = f"{one['kernels'] + one['torch']:.1f}, {one['over_fused_adam']:.2f} x"
        print(f"| {name} | {one['launches']}, {one['torch_launches']} | {moved} | {both} | {one['wire']:.2f} |")
        if given.each:
            for what, (count, moved) in sorted(one["each"].items(), key=lambda item: -item[1][1]):
                print(f"|   {what} | {count} | {moved:.3f} | | |")


if __name__ == "__main__":
    main()
