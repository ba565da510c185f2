"""A process that measures steps of one checkout on a played GPU. It reads what to measure, line by line, as JSON:

in   {"case": name, "buckets": 8, "steps": 50}
out  {"seconds": [...], "calls": {...}}
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

EARLY = 10**6
SHAPES = [(24, 8), (64,), (24,), (16, 8), (8,), (32, 8), (32,), (16, 8), (8,), (16,), (16,), (24,)] * 12
SHAPES = [(40, 16), *SHAPES, (40, 16), (16,), (16,)]
"""As many tensors as GPT-2 small has, 148, and small ones."""


@dataclass(frozen=True)
class Case:
    """An optimizer's class by name, its options, and steps before the first that counts."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    begin: int = 3
    overlap: bool = False


def cases() -> dict[str, Case]:
    """By name."""
    from thinwire.optim import ZeroOneSchedule

    def frozen(clipper: int) -> dict[str, Any]:
        schedule = ZeroOneSchedule(dense_steps=1, local_step_scaler=1, local_step_clipper=clipper)
        return {"var_freeze_step": 1, "schedule": schedule}

    return {
        "1-bit Adam": Case("OneBitAdam", {"warmup": 1}),
        "1-bit Adam, overlap": Case("OneBitAdam", {"warmup": 1}, overlap=True),
        "1-bit LAMB": Case("OneBitLamb", {"warmup": 1}),
        "0/1 Adam, sync": Case("ZeroOneAdam", frozen(1)),
        "0/1 Adam, local": Case("ZeroOneAdam", frozen(1 << 20), begin=24),
        "1-bit Muon": Case("OneBitMuon"),
        "1-bit SGD": Case("OneBitSGD", {"lr": 1e-3, "momentum": 0.9}),
        "warm-up in 8 bits": Case("OneBitAdam", {"warmup": EARLY, "full_exchange": "int8"}),
        "dense warm-up": Case("OneBitAdam", {"warmup": EARLY}),
    }


class Turn:
    """Steps of one case, after those that come before."""

    def __init__(self, case: Case, buckets: int, ranks: Callable[[int], Any]) -> None:
        import thinwire.optim as optim

        self.params = [torch.nn.Parameter(torch.full(shape, 0.1)) for shape in SHAPES]
        self.ones = [torch.full_like(param, 1e-3) for param in self.params]
        kind = getattr(optim, case.kind).sized(-(-sum(param.numel() for param in self.params) // buckets))
        self.optimizer = kind(self.params, group=ranks(2), overlap=case.overlap, **case.options)
        self.times_backward = case.overlap
        self.twins = [torch.nn.Parameter(param.detach().clone()) for param in self.params]
        for _ in range(case.begin):
            self.step()
        if not buckets <= (found := len(self.optimizer.reduce.buckets)) <= buckets + 2:
            raise RuntimeError(f"{found} buckets where {buckets} were asked for")

    def step(self) -> float:
        """CPU seconds of this thread in zero_grad() and step(); with overlap also in backward's hooks: what it takes

        beyond the same backward without any.
        """
        began = time.thread_time()
        self.optimizer.zero_grad()
        cleared = time.thread_time()
        torch.autograd.backward(self.params, self.ones)  # a gradient of its own for each, and nothing else
        ready = time.thread_time()
        self.optimizer.step()
        ended = time.thread_time()
        if not self.times_backward:
            return ended - ready + cleared - began
        for twin in self.twins:
            twin.grad = None
        bare = time.thread_time()
        torch.autograd.backward(self.twins, self.ones)
        return ended - began - (time.thread_time() - bare)


def main() -> None:
    """Answer until the input ends."""
    path = Path(__file__).with_name("played.py")
    spec = importlib.util.spec_from_file_location("played", path)
    assert spec is not None
    assert spec.loader is not None
    played: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(played)
    torch.set_num_threads(1)
    played.start()
    every, known = cases(), {}
    for line in sys.stdin:
        asked = json.loads(line)
        key = asked["case"], asked["buckets"]
        if key not in known:
            known[key] = Turn(every[asked["case"]], asked["buckets"], played.Ranks)
        print(json.dumps(measured(known[key], asked["steps"], played)), flush=True)


def measured(turn: Turn, steps: int, played: Any) -> dict[str, Any]:
    """Seconds of so many steps; and what one more asks of the driver and of torch, backward's own among it."""
    seconds = [turn.step() for _ in range(steps)]
    played.CALLS.take()
    with played.Operations():
        turn.step()
    return {"seconds": seconds, "calls": played.CALLS.take()}


if __name__ == "__main__":
    main()
