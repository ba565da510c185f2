"""Whole steps of every optimizer on the pretended device: where would the host wait? A program; prints JSON.

    python -m tests.emulation.whole_steps "adam, overlap" "sgd in 8 bits"

One rank of two (benchmarks/gpu/echo.py): collectives are copies, and nothing waits for anybody, as NCCL has it.
Kernels are the emulator's. Each case is an optimizer with options; of each step is told what it did, and what waited.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.echo import Echo
from tests.emulation import pretend
from tests.emulation.emulator import Emulator
from tests.optim.constructing import construct
from thinwire.comm.kernels import choose
from thinwire.optim import SGD, Adam, Lamb, OneBitAdam, OneBitLamb, OneBitMuon, ZeroOneAdam
from thinwire.optim.engine.schedule import Wire
from thinwire.optim.kernels import updates


@dataclass(frozen=True)
class Case:
    """Steps with this optimizer, made of parameters and a group. seldom: not run in make test.

    scaled: under a GradScaler. dtype: of the parameters. buffers: of a model that has some.
    """

    make: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    seldom: bool = False
    scaled: bool = False
    dtype: torch.dtype = torch.float32
    buffers: bool = False


def cases() -> dict[str, Case]:
    """By name: each optimizer in each phase, with each option that it has."""
    clip = {"max_grad_norm": 1.0}
    narrow = {"narrow": ("variance", "error_memory")}
    auto = {"warmup": "auto", "total_steps": 40, "betas": (0.5, 0.6)}
    zero = {"dense_steps": 2, "var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 3}
    bf16 = torch.bfloat16
    found = {
        "adam, overlap": Case(Adam, {"overlap": True, **clip}),
        "sgd in 8 bits": Case(SGD, {"lr": 1e-3, "full_exchange": "int8"}),
        "lamb of bfloat16": Case(Lamb, clip, dtype=bf16),  # torch scales no gradients of bfloat16 on a GPU
        "lamb, scaled": Case(Lamb, clip, scaled=True),
        "1-bit adam, auto, 8 bits, overlap": Case(OneBitAdam, {**auto, "full_exchange": "int8", "overlap": True}, 11),
        "1-bit lamb, auto": Case(OneBitLamb, {**auto, **clip}, 20),
        "1-bit adam in bfloat16, scaled": Case(OneBitAdam, {"warmup": 2, **narrow}, 5, scaled=True),
        "0/1 adam in 8 bits": Case(ZeroOneAdam, {**zero, "full_exchange": "int8", **clip}, 8),
        "0/1 adam, refresh, overlap": Case(ZeroOneAdam, {**zero, "refresh": 0.5, "overlap": True}, 17, seldom=True),
        "adam, buffers": Case(Adam, buffers=True),
        "1-bit muon, overlap": Case(OneBitMuon, {"overlap": True}),
        "1-bit muon in bfloat16, scaled": Case(
            OneBitMuon, {"narrow": ("momentum", "error_memory"), **clip}, seldom=True, scaled=True
        ),
        "1-bit lamb, overlap": Case(OneBitLamb, {"warmup": 2, "overlap": True}, 5, seldom=True),
        "0/1 adam, scaled": Case(ZeroOneAdam, zero, 12, seldom=True, scaled=True),
        "0/1 adam of bfloat16": Case(ZeroOneAdam, {**zero, **clip}, 12, seldom=True, dtype=bf16),
    }
    for name, make in (("adam", Adam), ("lamb", Lamb), ("sgd", SGD)):
        for wire in ("fp32", "bf16", "int8"):
            found[f"{name}, {wire}"] = Case(make, {"lr": 1e-3, "full_exchange": wire, **clip}, seldom=True)
    for name, make in (("1-bit adam", OneBitAdam), ("1-bit lamb", OneBitLamb)):
        for wire in ("fp32", "bf16", "int8"):
            found[f"{name}, {wire}"] = Case(make, {"warmup": 2, "full_exchange": wire, **clip}, 5, seldom=True)
        found[f"{name} of bfloat16"] = Case(make, {"warmup": 2, **clip}, 5, seldom=True, dtype=bf16)
    return found


PLANTED = {
    "x.sum().item()": True,
    "x.cpu()": True,
    "x.tolist()": True,
    "bool(x.any())": True,
    "float(x[0])": True,
    "int(x[0])": True,
    "x.nonzero()": True,
    "torch.equal(x, x)": True,
    "torch.allclose(x, x)": True,
    "x[x > 0]": True,
    "x[x > 0] = 1.0": True,
    "torch.where(x > 0)": True,
    "x.masked_fill_(x > 0, x.sum())": True,
    "torch.tensor([1.0, 2.0], device=x.device)": True,
    "x.new_tensor(3.0)": True,
    "x[[1, 2]]": True,
    "torch.repeat_interleave(x, (x > -9).long())": True,
    "x.unique()": True,
    "x.copy_(torch.ones(8))": True,
    "x.masked_fill_(x > 0, 1.0)": False,
    "torch.where(x > 0, x, 0.0)": False,
    "x.new_full((), 3.0)": False,
    "torch.ones(8).to(x.device, non_blocking=True)": False,
    "x.clone().mul_(2).add_(torch.tensor(1.0))": False,
    "torch.repeat_interleave(x, (x > -9).long(), output_size=8)": False,
}
"""What the product might do, and whether the host waits for it."""


def planted(device: torch.device) -> dict[str, bool]:
    """Whether each is seen."""
    found = {}
    for line in PLANTED:
        names = {"__name__": f"{pretend.PRODUCT}planted", "torch": torch, "x": torch.arange(8.0).to(device)}
        with pretend.noted() as waits:
            exec(compile(f"def planted():\n    {line}\nplanted()", "planted", "exec"), names)
            found[line] = bool(waits)
    return found


class Trained(torch.nn.Module):
    """Some parameters, and a buffer that moves."""

    def __init__(self, case: Case, device: torch.device, random: torch.Generator) -> None:
        super().__init__()
        for at, shape in enumerate(((40, 13), (7,), (33, 9))):
            values = torch.randn(shape, generator=random).to(case.dtype).to(device)
            self.register_parameter(f"p{at}", torch.nn.Parameter(values))
        if case.buffers:
            self.register_buffer("mean", torch.zeros(5).to(device))

    def loss(self, random: torch.Generator) -> Tensor:
        for buffer in self.buffers():
            buffer.add_(1)
        off = [p - torch.randn(p.shape, generator=random).to(p.dtype).to(p.device) for p in self.parameters()]
        return torch.stack([one.float().square().sum() for one in off]).sum()


Watch = Callable[[int], AbstractContextManager[Mapping[str, int]]]
"""Of a step: what is around it, which gives what waited in it."""


def run(case: Case, device: torch.device, watch: Watch) -> list[dict[str, Any]]:
    """Of each step: what it did, and what the host waited for, with how often."""
    random = torch.Generator().manual_seed(1)
    model = Trained(case, device, random)
    options = {**case.options, **({"model": model} if case.buffers else {})}
    optimizer = construct(case.make, model.parameters(), group=Echo(), bucket_elements=256, **options)
    scaler = torch.amp.GradScaler(device.type) if case.scaled else None
    told = []
    for step in range(1, case.steps + 1):
        plan, compared = optimizer.plan(step), optimizer._replicas._mark
        loss = model.loss(random) if scaler is None else scaler.scale(model.loss(random))
        with watch(step) as waits:
            optimizer.zero_grad()
            loss.backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
            found = dict(waits)
        if scaler is not None:
            scaler.update()
        said = {"phase": str(plan.phase), "full": plan.gradient is Wire.FULL, "bits": plan.momentum is Wire.COMPRESSED}
        frozen = optimizer.frozen_at == step
        said["compares"] = step == 1 or optimizer._replicas._mark != compared
        told.append({"step": step, **said, "moves_variance": plan.update_variance, "freezes": frozen, "waits": found})
    return told


def main(names: list[str]) -> None:
    """Run the cases of these names."""
    launchers: dict[str, Emulator] = {}

    def launcher(device: torch.device, dtype: torch.dtype, source: str) -> Emulator | None:
        return launchers.setdefault(source, Emulator(source)) if dtype == torch.float32 else None

    choose.cuda_launcher = updates.cuda_launcher = launcher  # type: ignore[assignment]
    device, every = pretend.start(), cases()
    json.dump(
        {
            "planted": planted(device),
            **{name: run(every[name], device, lambda step: pretend.noted()) for name in names},
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
