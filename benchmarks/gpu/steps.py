"""Whole steps: ours as one of eight ranks has them, torch's fused Adam, DeepSpeed's chain; each in turns with Adam."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import chain
from benchmarks.gpu.clock import Call, Launched, Measured
from benchmarks.gpu.echo import Echo
from thinwire.comm.codecs import SignCodec
from thinwire.comm.errors import PeerLost
from thinwire.comm.exchange.reducer import Reducer, flat_reducer
from thinwire.comm.groups.threads import ThreadGroup, run_threads
from thinwire.comm.protocol import Group
from thinwire.optim import OneBitAdam, OneBitLamb, ZeroOneAdam, ZeroOneSchedule

RANKS = 8
TURNS = 12
PIECE = 1 << 24
"""Values of a parameter, at most: a large layer has about so many."""
ADAM_BYTES = 16
SPARE = 0.9
"""Of the free memory is used."""
ROUND = 16
"""Steps from one sync of 0/1 Adam to the next."""


def parameters(numel: int, device: torch.device) -> list[torch.nn.Parameter]:
    """Of so many values together, with gradients."""
    sizes = [PIECE] * (numel // PIECE) + ([numel % PIECE] if numel % PIECE else [])
    made = [torch.nn.Parameter(torch.randn(size, device=device)) for size in sizes]
    for param in made:
        param.grad = torch.randn_like(param).mul_(1e-3)
    return made


def fused_adam(numel: int, device: torch.device) -> Call:
    """A step of torch's own, one kernel for all parameters."""
    optimizer = torch.optim.AdamW(parameters(numel, device), lr=1e-6, fused=True)
    return optimizer.step


class OverAnyGroup:
    """Mixin: the exchange in buckets also where there is one rank, which else exchanges nothing."""

    def make_reducer(self, group: Group) -> Reducer:
        """As the optimizer would over several ranks."""
        space = self.space  # type: ignore[attr-defined]
        most, cuts = self.bucket_elements, space.cuts  # type: ignore[attr-defined]
        return flat_reducer(group, space.layout, SignCodec(), space.p_N, bucket_elements=most, cuts=cuts)


class Adam1(OverAnyGroup, OneBitAdam):
    """1-bit Adam."""


class Lamb1(OverAnyGroup, OneBitLamb):
    """1-bit LAMB."""


class Adam01(OverAnyGroup, ZeroOneAdam):
    """0/1 Adam."""


@dataclass(frozen=True, slots=True)
class Ours:
    """One of ours, in its compressed phase. bytes_a_value: the most that it takes. steps: of one turn."""

    name: str
    make: Callable[..., Any]
    options: dict[str, Any]
    bytes_a_value: int
    begin: int = 2
    steps: int = 1

    def call(self, numel: int, device: torch.device, group: Group, begin: int | None = None) -> Call:
        """A turn, after the steps that come before the compressed phase. begin: other than as many as are needed."""
        model = torch.nn.ParameterList(parameters(numel, device))
        optimizer = self.make(model.parameters(), group=group, lr=1e-6, **self.options)

        def turn(steps: int = self.steps) -> torch.nn.Module:
            for _ in range(steps):
                optimizer.step()
            return model  # which nobody else holds

        turn(self.begin if begin is None else begin)
        return turn


def _frozen(clipper: int) -> dict[str, Any]:
    schedule = ZeroOneSchedule(dense_steps=1, local_step_scaler=1, local_step_clipper=clipper)
    return {"var_freeze_step": 1, "schedule": schedule}


OURS = (
    Ours("1-bit Adam", Adam1, {"warmup": 1}, 28),
    Ours("1-bit LAMB", Lamb1, {"warmup": 1}, 60),
    Ours("0/1 Adam, a sync each step", Adam01, _frozen(1), 36),
    Ours(f"0/1 Adam, a sync in {ROUND}", Adam01, _frozen(ROUND), 36, 3 * ROUND, ROUND),
)


ALSO = (
    Ours("1-bit Adam, buckets of 64 Mi", Adam1.sized(1 << 26), {"warmup": 1}, 28),
    Ours("1-bit Adam, buckets of 4 Mi", Adam1.sized(1 << 22), {"warmup": 1}, 28),
    Ours("1-bit Adam's warm-up in 8 bits", OneBitAdam, {"warmup": 10**6, "full_exchange": "int8"}, 32),
)
"""Measured with echoed peers alone."""


def measured(device: Measured, numel: int, one: Ours, group: Group | None = None) -> dict[str, Any]:
    """One of ours beside torch's fused Adam. group: None for one of RANKS ranks whose peers echo it."""
    over: Group = Echo(RANKS) if group is None else group
    begin = 2 if device.rehearsal else None
    given = one.name, lambda: one.call(numel, device.device, over, begin), one.steps, one.bytes_a_value
    return {**_row(device, numel, *given), "ranks": over.size}


def measured_chain(device: Measured, numel: int) -> dict[str, Any]:
    """DeepSpeed's chain, likewise."""
    given = "DeepSpeed's chain", lambda: chain.DeepSpeedStep(numel, RANKS, device.device).step, 1, chain.BYTES_A_VALUE
    return {**_row(device, numel, *given), "ranks": RANKS}


def _row(
    device: Measured, numel: int, name: str, make: Callable[[], Call], steps: int, bytes_a_value: int
) -> dict[str, Any]:
    """In turns with Adam where memory holds both, else one after the other."""
    in_turns = (bytes_a_value + ADAM_BYTES) * numel <= SPARE * device.free_bytes()
    began = time.perf_counter()
    call = make()
    device.wait()
    begun = time.perf_counter() - began
    adam = fused_adam(numel, device.device) if in_turns else None
    times, *beside = device.turns([call] if adam is None else [call, adam], TURNS)
    launched = device.launched(call)
    if adam is None:
        del call
        device.free_bytes()  # gives the memory back
        adam = fused_adam(numel, device.device)
        beside = device.turns([adam], TURNS)
    (adams,) = beside
    a_step = [s / steps for s in times.device_s]
    ratios = [ours / theirs for ours, theirs in zip(a_step, adams.device_s, strict=True)]
    return {
        "values": numel,
        "step": name,
        "in_turns_with_adam": in_turns,
        "seconds_to_begin": begun,
        "seconds": a_step,
        "host_seconds": [s / steps for s in times.host_s],
        "adam_seconds": adams.device_s,
        "adam_host_seconds": adams.host_s,
        "over_adam": median(ratios),
        "launches": sum(one.count for one in launched.values()) / steps,
        "adam_launches": sum(one.count for one in device.launched(adam).values()),
        "kernels": {
            name: {"launches": one.count / steps, "seconds": one.seconds / steps} for name, one in _longest(launched)
        },
    }


def _longest(launched: dict[str, Launched]) -> list[tuple[str, Launched]]:
    return sorted(launched.items(), key=lambda named: -named[1].seconds)


def measured_threads(device: Measured, numel: int, ranks: int) -> dict[str, Any]:
    """1-bit Adam on several ranks that are threads on one device, all of their work, by the wall clock.

    Raises: what a rank raises; RuntimeError where replicas differ in the end.
    """
    turns = 1 if device.rehearsal else TURNS
    meet, seconds = threading.Barrier(ranks, timeout=120), []

    def work(group: ThreadGroup) -> torch.Tensor:
        try:
            return trained(group)
        except BaseException:
            meet.abort()
            raise

    def trained(group: ThreadGroup) -> torch.Tensor:
        torch.manual_seed(group.rank)
        model = torch.nn.ParameterList(parameters(numel, device.device))
        optimizer = OneBitAdam(model.parameters(), group=group, lr=1e-6, warmup=1)
        for turn in range(2 + turns):
            with _together(meet, device):
                began = time.perf_counter()
            optimizer.step()
            with _together(meet, device):
                if group.rank == 0 and turn >= 2:
                    seconds.append(time.perf_counter() - began)
        return optimizer.space.p_N

    first, *others = run_threads(ranks, work, timeout_s=120)
    if any(not torch.equal(first, other) for other in others):
        raise RuntimeError(f"replicas of {ranks} ranks differ after {2 + turns} steps")
    return {"values": numel, "step": f"1-bit Adam, {ranks} ranks as threads", "ranks": ranks, "wall_seconds": seconds}


@contextmanager
def _together(meet: threading.Barrier, device: Measured) -> Iterator[None]:
    """All ranks are here, and the device has done what they told it."""
    device.wait()
    try:
        meet.wait()
    except threading.BrokenBarrierError as error:
        raise PeerLost("another rank did not come") from error
    yield
