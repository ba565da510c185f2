"""Turns of every algorithm at every size, between the ranks of a group; and the line that is fitted to them.

All algorithms take turns at one size, so that a disturbance hits all alike. Ranks begin a call together; the slowest
counts. A line, T = r alpha + b / B with the rounds r and bytes b of algorithms.py, is fitted to every other size and
the largest (comm/bucket_size.py: least squares of relative errors); the others show how well it predicts.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.comm import bucket_size
from thinwire.comm.errors import CommError
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.wire.link_classes import exchange_boxes, this_box
from thinwire.comm.wire.network import Cost, Network
from thinwire.contract.collectives import Algorithm, Timing, World
from thinwire.tools.collectives.algorithms import Call, call_of, cost_of
from thinwire.tools.collectives.asked import Asked, BenchFailed, Say, size_text
from thinwire.tools.hardware import hardware

Seconds = Mapping[int, Sequence[float]]
"""Of each turn, by bytes of the vector."""
FAR = 256
"""Pieces of a chain of which its line is told."""


def characterise(group: TorchGroup, asked: Asked, device: torch.device, backend: str, say: Say) -> World:
    """Measure, and fit. Collective; alike on all ranks. Raises: PeerLost, BenchFailed."""
    boxes = tuple(box.id for box in exchange_boxes(group, this_box(), device).of_rank)
    on_each = Counter(boxes)
    if len(set(on_each.values())) > 1:
        raise BenchFailed(
            f"machines have {', '.join(map(str, on_each.values()))} ranks: start as many on each, for a line is of "
            "machines that are alike"
        )
    per_machine = on_each[boxes[0]]
    clock = _Clock(group, device)
    seconds: dict[str, dict[int, Sequence[float]]] = {name: {} for name in asked.algorithms}
    began, left_out = time.perf_counter(), asked.sizes[:0]
    for at, size in enumerate(asked.sizes):
        if at >= 2:
            expected_s = sum(
                (1 + asked.turns) * _predicted(name, group.size, per_machine, asked.piece_bytes, done, size)
                for name, done in seconds.items()
            )
            if not clock.rank_zero_says(time.perf_counter() - began + expected_s < asked.seconds):
                left_out = asked.sizes[at:]
                break
        say(f"{group.size} ranks, {size_text(size)}", at / len(asked.sizes))
        calls = {name: call_of(name, group, size, asked.piece_bytes, device) for name in asked.algorithms}
        for name, one in clock.turns(calls, asked.turns).items():
            seconds[name][size] = one
    return World(
        ranks=group.size,
        per_machine=per_machine,
        device=device.type,
        backend=backend,
        boxes=boxes,
        measured=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        made_by=hardware() | {"torch": torch.__version__, "python": platform.python_version()},
        piece_bytes=asked.piece_bytes,
        left_out=left_out,
        algorithms={
            name: fitted(name, group.size, per_machine, asked.piece_bytes, done) for name, done in seconds.items()
        },
    )


def fitted(name: str, ranks: int, per_machine: int, piece_bytes: int, seconds: Seconds) -> Algorithm:
    """The line of one algorithm. Raises: ValueError where the sizes cannot tell latency from bandwidth."""
    sizes = sorted(seconds)
    chosen = set(sizes) if len(sizes) < 4 else {*sizes[::2], sizes[-1]}

    def cost(size: float) -> Cost:
        return cost_of(name, ranks, int(size), per_machine, piece_bytes)

    medians = {size: Timing(size, tuple(seconds[size]), 0.0, fitted=True).median_s for size in sizes}
    latency_s, bytes_per_s = bucket_size.fit([bucket_size.Timing(cost(size), medians[size]) for size in sorted(chosen)])
    network = Network(ranks, latency_s, bytes_per_s)
    one, two = FAR * piece_bytes, 2 * FAR * piece_bytes
    beta_s = (network.seconds(cost(two)) - network.seconds(cost(one))) / (two - one)
    return Algorithm(
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        alpha_s=max(0.0, network.seconds(cost(one)) - beta_s * one),
        beta_s=beta_s,
        timings=tuple(
            Timing(size, tuple(seconds[size]), network.seconds(cost(size)), fitted=size in chosen) for size in sizes
        ),
    )


def _predicted(name: str, ranks: int, per_machine: int, piece_bytes: int, done: Seconds, size: int) -> float:
    line = fitted(name, ranks, per_machine, piece_bytes, done)
    return Network(ranks, line.latency_s, line.bytes_per_s).seconds(
        cost_of(name, ranks, size, per_machine, piece_bytes)
    )


class _Clock:
    """Times calls that all ranks begin together."""

    def __init__(self, group: TorchGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def turns(self, calls: Mapping[str, Call], turns: int) -> dict[str, tuple[float, ...]]:
        """Seconds of the slowest rank, of each turn of each, after one that is not counted. Raises: PeerLost."""
        own = [[self._once(call) for call in calls.values()] for _ in range(1 + turns)][1:]
        slowest = self._all(torch.tensor(own, dtype=torch.float64, device="cpu")).amax(0)
        return {name: tuple(slowest[:, at].tolist()) for at, name in enumerate(calls)}

    def rank_zero_says(self, own: bool) -> bool:
        """What it says there."""
        return bool(self._all(torch.tensor([float(own)], dtype=torch.float64, device="cpu"))[0, 0])

    def _once(self, call: Call) -> float:
        self._all(torch.zeros(1, dtype=torch.float64, device="cpu"))
        began = time.perf_counter()
        try:
            call()
        except CommError:
            raise
        except RuntimeError:
            self._all(torch.zeros(1, dtype=torch.float64, device="cpu"))  # says who is gone, which send and recv do not
            raise
        self._wait()
        return max(time.perf_counter() - began, 1e-7)

    def _all(self, own: Tensor) -> Tensor:
        """Those of all ranks: [ranks, ...]. A barrier too."""
        row_B = own.reshape(-1).view(torch.uint8).to(self._device)
        all_nB = torch.zeros((self._group.size, row_B.numel()), dtype=torch.uint8, device=self._device)
        self._group.all_gather(all_nB, row_B)
        self._wait()
        return all_nB.cpu().view(torch.float64).view(self._group.size, *own.shape)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
