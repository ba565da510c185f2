"""The exchange of papers.py: a mean over workers through one bit, with both error memories, in the open.

    worker i   a_i = z_i + d_i;             q_i = C(a_i);   d_i <- a_i - q_i
    servers    b   = (1/n) sum_i q_i + E;   out = C(b);     E   <- b - out
    C(a) = ||a||_2 / sqrt(number of values) * sgn(a),  sgn(0) = +1,  unit by unit: values that share a scale
           scale="l1": the mean of |a| instead of the root of the mean of a^2

There are no ranks here: a worker is an entry of a list, and the n servers, each with its chunk of E, are one vector.
What differs between the paper, our wire and DeepSpeed is only which values share a scale: two lists of spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from thinwire.comm.kernels.reference import Scale
from thinwire.comm.layout import DEFAULT_BLOCK, Partition, Span, VectorLayout

Vectors = list[Tensor]
"""One tensor a parameter."""
Floor = Callable[[Vectors], Vectors]
"""A frozen variance -> the one to divide by."""
Exchange = Callable[[list[Tensor], str], Tensor]
"""exchange(zs, memory): the mean of one vector a worker, or what stands for it. memory: which error memory is meant."""


@dataclass(slots=True)
class Errors:
    """The error memory of one exchanged vector: d_i of every worker, and E of all servers, end to end."""

    workers: list[Tensor]
    server: Tensor

    @classmethod
    def zeros(cls, like: list[Tensor]) -> Errors:
        """Nothing left out yet."""
        return cls([torch.zeros_like(z) for z in like], torch.zeros_like(like[0]))

    def residual(self) -> Tensor:
        """R = mean_i d_i + E: all that a step can see of the errors of earlier ones."""
        return mean(self.workers) + self.server


def mean(tensors: Sequence[Tensor]) -> Tensor:
    """The mean over a list, summed in its order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


def compress(a: Tensor, units: Sequence[Span], scale: Scale = "l2") -> Tensor:
    """C(a), unit by unit; the scale keeps the 2-norm, or the 1-norm.

    units: cover a, without gaps. a is not modified. Source: Tang et al. 2021, and the scale of DeepSpeed's nccl.py.
    """
    out = torch.empty_like(a)
    for start, stop in units:
        piece = a[start:stop]
        size = piece.abs().mean() if scale == "l1" else torch.linalg.vector_norm(piece) / sqrt(stop - start)
        out[start:stop] = torch.where(piece >= 0, size, -size)
    return out


def compressed_mean(
    zs: list[Tensor],
    errors: Errors,
    worker_units: Sequence[Span],
    server_units: Sequence[Span] | None = None,
    scale: Scale = "l2",
) -> Tensor:
    """out with out + R' = mean_i z_i + R. The two-phase exchange of n vectors of equal length.

    worker_units, server_units: spans that share a scale on the way to the servers and back (None: the same spans).
    zs are not modified; errors are. Source: Tang et al. 2021, Alg. 1; line by line as at the top of this file.
    """
    sent = []
    for z, d in zip(zs, errors.workers, strict=True):
        a = z + d
        q = compress(a, worker_units, scale)
        d.copy_(a - q)
        sent.append(q)
    b = mean(sent) + errors.server
    out = compress(b, worker_units if server_units is None else server_units, scale)
    errors.server.copy_(b - out)
    return out


class TwoPhase:
    """compressed_mean as an Exchange: remembers one Errors a memory, made at its first use.

    worker_units, server_units: as in compressed_mean; worker_units None: one scale for the whole vector, the paper's.
    """

    def __init__(
        self,
        worker_units: Sequence[Span] | None = None,
        server_units: Sequence[Span] | None = None,
        scale: Scale = "l2",
    ) -> None:
        self.worker_units = worker_units
        self.server_units = server_units
        self.scale: Scale = scale
        self.errors: dict[str, Errors] = {}

    def __call__(self, zs: list[Tensor], memory: str) -> Tensor:
        """The compressed mean of zs; modifies the memory's errors."""
        errors = self.errors.setdefault(memory, Errors.zeros(zs))
        whole = [(0, zs[0].numel())]
        return compressed_mean(zs, errors, self.worker_units or whole, self.server_units, self.scale)

    def residual(self, memory: str) -> Tensor | None:
        """R of a memory; None before its first use, when it is zero."""
        return self.errors[memory].residual() if memory in self.errors else None


def exact_mean(zs: list[Tensor], memory: str) -> Tensor:
    """The exchange that leaves nothing out: also what a group of one does."""
    return mean(zs)


def tensor_units(tensors: Sequence[Tensor]) -> list[Span]:
    """One scale a tensor, of tensors laid end to end."""
    units, at = [], 0
    for tensor in tensors:
        units.append((at, at + tensor.numel()))
        at += tensor.numel()
    return units


def block_units(
    layout: VectorLayout, num_workers: int, block: int = DEFAULT_BLOCK, buckets: Sequence[Span] = ()
) -> list[Span]:
    """The scale units of our wire: blocks of comm.layout, cut where a server's chunk ends, as spans of live values.

    The reference lays tensors end to end without padding, so dead elements are counted out. num_workers = 1 gives
    the blocks that know of no server. buckets: spans that are cut into chunks by themselves; one by default.
    """
    blocks = []
    for start, stop in sorted(buckets) or [(0, layout.numel)]:
        chunks = [Partition(stop - start, num_workers).bounds(rank) for rank in range(num_workers)]
        blocks += [span for low, high in chunks for span in layout.blocks(block, start + low, start + high)]

    def live_before(position: int) -> int:
        return sum(max(0, min(stop, position) - start) for start, stop in layout.live)

    units = [(live_before(start), live_before(stop)) for start, stop in blocks]
    return [(start, stop) for start, stop in units if start < stop]


def floor_of(units: Sequence[Span], relative: float = 1e-2, negligible: float = 1e-10) -> Floor:
    """Our floor: v >= relative x mean of the non-zero v of the tensor, or of the unit around it if that is larger.

    Where that mean is below negligible x the whole model's, the model's takes its place. units: spans of the tensors
    laid end to end: block_units(layout, 1).
    """

    def nonzero_mean(v: Tensor) -> Tensor:
        return v[v > 0].mean() if (v > 0).any() else torch.zeros_like(v.sum())

    def floor(vs: Vectors) -> Vectors:
        v = laid_end_to_end(vs)
        around = torch.zeros_like(v)
        for start, stop in [*units, *tensor_units(vs)]:
            around[start:stop] = torch.maximum(around[start:stop], nonzero_mean(v[start:stop]))
        model = nonzero_mean(v)
        around = torch.where(around < negligible * model, model, around)
        return split_like(torch.maximum(v, relative * around), vs)

    return floor


def laid_end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of all elements, a copy."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def split_like(vector: Tensor, tensors: Sequence[Tensor]) -> Vectors:
    """laid_end_to_end undone, in the shapes of `tensors`."""
    pieces = zip(tensor_units(tensors), tensors, strict=True)
    return [vector[start:stop].view(tensor.shape).clone() for (start, stop), tensor in pieces]
