"""Per-tensor norms and factors on flat vectors, for algorithms that treat each tensor as a layer (LAMB).

Legend: N elements of the flat vectors, t tensors of one parameter group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.comm.layout import Span
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.kernels import updates
from thinwire.optim.kernels.updates import Tiles


@dataclass(frozen=True, slots=True)
class TensorSegments:
    """The tensors of one parameter group. `span`, `tensors`: the group's slice of the elements and of all tensors."""

    span: slice
    tensors: slice
    live: tuple[Span, ...]
    lengths_t: Tensor
    """int64[t]: elements from one tensor's start to the next one's, the dead ones between them included."""
    tiles: Tiles | None
    """The same elements for the loops of optim.kernels, where those fit."""

    def norms(self, x_N: Tensor) -> Tensor:
        """||x_l||_2 of each tensor, float[t]."""
        return torch.stack(list(torch._foreach_norm(self._views(x_N))))

    def rms(self, x_N: Tensor) -> Tensor:
        """||x_l||_2 / sqrt(elements), float[t]."""
        counts = torch.tensor([stop - start for start, stop in self.live], dtype=x_N.dtype, device=x_N.device)
        return self.norms(x_N).div_(counts.sqrt_())

    def maxima(self, x_N: Tensor) -> Tensor:
        """The largest live element of each tensor, float[t]."""
        return torch.stack(list(torch._foreach_max(self._views(x_N))))

    def expand(self, values_t: Tensor) -> Tensor:
        """Each tensor's value at each of its elements: float[span]."""
        return torch.repeat_interleave(values_t, self.lengths_t, output_size=self.span.stop - self.span.start)

    def _views(self, x_N: Tensor) -> list[Tensor]:
        return [x_N[start:stop] for start, stop in self.live]


def tensor_segments(space: FlatSpace) -> list[TensorSegments]:
    """One TensorSegments a parameter group, in order."""
    found = []
    for span in space.spans:
        inside = [i for i, tensor in enumerate(space.tensors) if span.start <= tensor.start < span.stop]
        members = [space.tensors[i] for i in inside]
        live = tuple((tensor.start, tensor.stop) for tensor in members)
        starts = [tensor.start for tensor in members]
        lengths = [after - start for start, after in zip(starts, [*starts[1:], span.stop], strict=True)]
        found.append(
            TensorSegments(
                span=span,
                tensors=slice(inside[0], inside[-1] + 1),
                live=live,
                lengths_t=torch.tensor(lengths, dtype=torch.int64, device=space.p_N.device),
                tiles=Tiles.of(live, space.p_N) if updates.fits(space.p_N) else None,
            )
        )
    return found
