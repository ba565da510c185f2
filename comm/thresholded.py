"""Activations between model-parallel parts on different ranks: of each sample those above a threshold cross.

    rank i      x_i: [samples, d_i], what its part makes of the samples of all ranks, those of rank 0 first
    forward     of each sample the K_i = ceil(share d_i) largest |x| go to its rank, with their places; others are 0
    rank j      y: [samples / n, d_0 + ... + d_(n-1)], all parts' activations of its own samples
    backward    dy at these places goes back, and nothing else: dx_i is 0 where nothing was sent

Each row begins with the call that it is of, so that a rank that is in another one does not take it for its own.

It is the all-to-all of a model whose parts lie on different ranks while each rank has samples of its own, such as
DLRM: embedding tables on one rank or spread over several, the dense part on all. What is not sent is lost: activations
are of one step, and there is no memory of them. With share = 1 it is the dense all-to-all, bit for bit; so is a group
of one, which sends nothing.

The threshold of a sample is its K-th largest |x|, found anew in every step (comm/codecs/threshold.py says why).
[Gupta et al. 2020, arXiv 2010.08899 (DCT, model parallel), with L = 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thinwire.comm.calls import calls_of, mismatch
from thinwire.comm.default import GivenGroup, given_or_default
from thinwire.comm.groups.texts import gather_texts, refuse_differing
from thinwire.comm.layout import BYTE, round_up
from thinwire.comm.protocol import Group, Stats, Uneven


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank's part sends to a rank. width: d_i. keep: K_i. num: samples of a rank."""

    width: int
    keep: int
    num: int
    itemsize: int

    @property
    def place_type(self) -> torch.dtype:
        """A place's: as short as it can be. Of 16 bits the sign is not read."""
        return torch.uint8 if self.width <= 1 << 8 else torch.int16 if self.width <= 1 << 16 else torch.int32

    @property
    def value_bytes(self) -> int:
        """Of a row backward, and of the values of a row forward."""
        return round_up(self.num * self.keep * self.itemsize, BYTE)

    @property
    def place_bytes(self) -> int:
        """0 where all is sent."""
        all_sent = self.keep == self.width
        return 0 if all_sent else round_up(self.num * self.keep * self.place_type.itemsize, BYTE)


class Thresholded:
    """The exchange of one place of a model: y = exchange(x), differentiable. One object for each such place.

        exchange = Thresholded(share=0.05)
        embedded = exchange(torch.cat([table(ids) for table, ids in zip(tables, ids_of_all_ranks)], 1))

    share: of the values of each sample that cross, above 0; 1: all. group: the ranks (None: torch.distributed's default
    group, or this process alone). Every rank calls it with as many samples, of the same dtype, in the same order among
    other calls; a rank without a part gives x of width 0. A sample may have several rows, as many on every rank, each
    with a threshold of its own: one for each embedding table, say, or those with small values send nothing.

    Each call's backward is collective too: the loss of every rank must depend on y, or the others wait for it. The
    gradient of x is the sum over the ranks' losses, not their mean: where each loss is a mean over samples of its own,
    divide the gradients of the part by the number of ranks.

    stats: of the group: what crosses here is of the kind "all_to_all_v". A value that is not finite is the largest, and
    crosses. The first call of each shape compares widths and settings. Raises: ValueError for what this rank was given;
    WireMismatch, alike on all ranks, where they were given what does not fit together; PeerLost, CallMismatch, in
    backward too.
    """

    def __init__(self, *, share: float, group: GivenGroup | None = None) -> None:
        given: Any = share
        if not isinstance(given, Real) or isinstance(given, bool) or not 0 < share <= 1:
            raise ValueError(
                f"share = {share!r}: must be above 0, which would send nothing and teach the other part nothing, and "
                "at most 1, which sends all"
            )
        self.share = float(share)
        self._group: Group = given_or_default(group)
        if not isinstance(self._group, Uneven):
            raise TypeError(f"group = {type(self._group).__name__}: must be Uneven (thinwire.comm.protocol)")
        self._calls = 0
        self._known: dict[tuple[int, int, torch.dtype], list[_Part]] = {}

    @property
    def stats(self) -> Stats:
        """Of the group. An optimizer that was given the same Group counts in it too."""
        return self._group.stats

    def __call__(self, x_bd: Tensor) -> Tensor:
        """What has come for this rank's samples: float[samples / n, sum of widths]; of one rank x itself.

        x: float[samples, d_i]. Raises: as the class.
        """
        size = self._group.size
        if not isinstance(x_bd, Tensor):
            raise TypeError(f"x is {type(x_bd).__name__}: must be a tensor, floats of [samples of all ranks, width]")
        if x_bd.dim() != 2 or not x_bd.is_floating_point() or not len(x_bd) or len(x_bd) % size:
            raise ValueError(
                f"x is {x_bd.dtype}{list(x_bd.shape)}: must be floats of [samples of all ranks, width], with as many "
                f"samples for each of {size} ranks"
            )
        if size == 1:
            return x_bd
        # Where no parameter of this rank is behind x, backward must come here all the same: the others wait for it.
        anchor = x_bd.new_zeros((), requires_grad=torch.is_grad_enabled())
        self._calls += 1
        with calls_of(self._group).within("Thresholded()"):
            y: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
                x_bd, anchor, self._group, self._parts(x_bd), self._calls
            )
        return y

    def _parts(self, x_bd: Tensor) -> list[_Part]:
        """Of all ranks. Collective where this rank has not seen the shape before."""
        key = (*x_bd.shape, x_bd.dtype)
        if key not in self._known:
            facts = {"samples": len(x_bd), "share": self.share, "dtype": str(x_bd.dtype).removeprefix("torch.")}
            own = [f"{name}={value}" for name, value in facts.items()]
            texts = gather_texts(self._group, "\n".join([str(x_bd.shape[1]), *own]).encode(), x_bd.device)
            lines = [text.decode().split("\n") for text in texts]
            refuse_differing([dict(line.split("=") for line in of_rank[1:]) for of_rank in lines])
            widths = [int(of_rank[0]) for of_rank in lines]
            if not any(widths):
                raise ValueError("x has width 0 on every rank: one at least must have a part that is to be sent")
            num, keeps = len(x_bd) // self._group.size, [ceil(self.share * width) for width in widths]
            self._known[key] = [
                _Part(width, keep, num, x_bd.element_size()) for width, keep in zip(widths, keeps, strict=True)
            ]
        return self._known[key]


class _Exchange(torch.autograd.Function):
    """Forward and backward of one call. anchor: a scalar that needs a gradient, so that backward runs on every rank."""

    @staticmethod
    def forward(ctx: Any, x_bd: Tensor, anchor: Tensor, group: Group, parts: list[_Part], call: int) -> Tensor:
        """As the module's docstring, on ranks i and j. Raises: PeerLost, CallMismatch."""
        own = parts[group.rank]
        sent_bk: Tensor | None = None
        value_bk = x_bd
        if own.keep < own.width:
            sent_bk = x_bd.abs().topk(own.keep, sorted=False).indices
            value_bk = x_bd.gather(1, sent_bk)
        rows = []
        for of_rank in (slice(i * own.num, (i + 1) * own.num) for i in range(group.size)):
            row = _bytes(value_bk[of_rank], own.value_bytes)
            if sent_bk is not None:
                row = torch.cat([row, _bytes(sent_bk[of_rank].to(own.place_type), own.place_bytes)])
            rows.append(row)
        lengths = [part.value_bytes + part.place_bytes for part in parts]
        came = _swap(group, rows, lengths, group.size * sum(lengths), call)
        y_bd, places = x_bd.new_zeros(own.num, sum(part.width for part in parts)), []
        for part, of_part_bd, row_B in zip(parts, _of_parts(y_bd, parts), came, strict=True):
            values_bk = _values(row_B, part, x_bd.dtype)
            place_bk = None
            if part.keep == part.width:
                of_part_bd.copy_(values_bk)
            else:
                signed_bk = _values(row_B[part.value_bytes :], part, part.place_type)
                place_bk = signed_bk.long() & (1 << 8 * part.place_type.itemsize) - 1
                of_part_bd.scatter_(1, place_bk, values_bk)
            places.append(place_bk)
        ctx.group, ctx.parts, ctx.call = group, parts, call
        ctx.save_for_backward(sent_bk, *places)
        return y_bd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_bd: Tensor) -> tuple[Tensor | None, ...]:
        """As the module's docstring. Raises: PeerLost, CallMismatch."""
        group, parts = ctx.group, ctx.parts
        own, (sent_bk, *places) = parts[group.rank], ctx.saved_tensors
        rows = []
        for part, of_part_bd, place_bk in zip(parts, _of_parts(dy_bd, parts), places, strict=True):
            rows.append(_bytes(of_part_bd if place_bk is None else of_part_bd.gather(1, place_bk), part.value_bytes))
        with calls_of(group).within("backward of Thresholded()"):
            whole = group.size * sum(part.value_bytes for part in parts)
            came = _swap(group, rows, [own.value_bytes] * group.size, whole, -ctx.call)
        dx_bd = torch.cat([_values(row_B, own, dy_bd.dtype) for row_B in came])
        if sent_bk is not None:
            dx_bd = dx_bd.new_zeros(len(dx_bd), own.width).scatter_(1, sent_bk, dx_bd)
        return dx_bd, None, None, None, None


def _swap(group: Group, rows: Sequence[Tensor], lengths: Sequence[int], num_bytes: int, call: int) -> list[Tensor]:
    """Give rows, one to each rank. Returns those that came from each, of these lengths. num_bytes: of all ranks.

    call: its number, with a minus that of one whose backward this is. Raises: PeerLost; CallMismatch, alike on every
    rank, where some are in another one: where forward and backward send as many bytes nothing else would show it.
    """
    assert isinstance(group, Uneven)
    head_B = torch.tensor([call], dtype=torch.int64, device=rows[0].device).view(torch.uint8)
    given_B = torch.cat([part for row in rows for part in (head_B, row)])
    of, to = [BYTE + length for length in lengths], [BYTE + len(row) for row in rows]
    came_B = given_B.new_empty(sum(of))
    group.start_all_to_all_v(came_B, given_B, of, to, num_bytes + BYTE * group.size**2).wait()
    came = torch.split(came_B, of)
    calls = torch.stack([row_B[:BYTE] for row_B in came]).view(torch.int64).view(-1).tolist()
    if any(other != call for other in calls):
        where = [
            f"call {one} of Thresholded()" if one > 0 else f"backward of call {-one} of Thresholded()" for one in calls
        ]
        raise mismatch(dict(enumerate(where)), ["let the loss of every rank depend on what it returns"])
    return [row_B[BYTE:] for row_B in came]


def _of_parts(y_bd: Tensor, parts: Sequence[_Part]) -> Sequence[Tensor]:
    """The columns of each part, views."""
    return torch.split(y_bd, [part.width for part in parts], 1)


def _values(row_B: Tensor, part: _Part, dtype: torch.dtype) -> Tensor:
    """What a row begins with, as [samples, K] of this type: a view."""
    return row_B[: part.num * part.keep * dtype.itemsize].view(dtype).view(part.num, part.keep)


def _bytes(x: Tensor, length: int) -> Tensor:
    """x as uint8[length], padded with zeros."""
    flat_B = x.contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat_B, (0, length - len(flat_B)))
