"""Parameters and gradients of a model as two flat vectors; the model's tensors become views into them.

    p_N  |group 0: matrices, one after another | its vectors |group 1: ...|     every tensor starts at a multiple of 8

Inside a group the matrices come first and the vectors (biases, norms: fewer than two dimensions) last, so that small
tensors of one kind are neighbours and share scales; a matrix is a segment of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.layout import BYTE, VectorLayout, round_up


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One parameter and its place: elements [start, stop) of the flat vectors."""

    param: Tensor
    start: int
    stop: int


class FlatSpace:
    """Flat parameters p_N and gradients g_N of parameter groups. Dead elements are zero and stay so.

    Modifies the parameters: `param.data` and `param.grad` become views of the flat vectors.
    Raises: ValueError, naming the parameter, before anything is modified.
    """

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        groups = [list(group["params"]) for group in param_groups]
        first = _validated(groups)
        self.tensors: list[FlatTensor] = []
        self.spans: list[slice] = []
        segments: list[tuple[int, int]] = []
        at = 0
        for params in groups:
            group_start = at
            vectors_start = None
            for param in sorted(params, key=lambda p: p.dim() < 2):  # stable: matrices, then vectors
                if param.dim() < 2 and vectors_start is None:
                    vectors_start = at
                self.tensors.append(FlatTensor(param, at, at + param.numel()))
                stop = round_up(at + param.numel(), BYTE)
                if param.dim() >= 2:
                    segments.append((at, stop))
                at = stop
            if vectors_start is not None:
                segments.append((vectors_start, at))
            self.spans.append(slice(group_start, at))
        live = tuple((tensor.start, tensor.stop) for tensor in self.tensors)
        self.layout = VectorLayout(at, live, tuple(segments))
        self.p_N = torch.zeros(at, dtype=first.dtype, device=first.device)
        self.g_N = torch.zeros_like(self.p_N)
        with torch.no_grad():
            for tensor in self.tensors:
                view = self._view(self.p_N, tensor)
                view.copy_(tensor.param)
                tensor.param.data = view
        self.gather_gradients()

    def gather_gradients(self) -> None:
        """Bring every gradient into g_N: a foreign tensor is copied in, a missing one counts as zero."""
        for tensor in self.tensors:
            view = self._view(self.g_N, tensor)
            grad = tensor.param.grad
            if grad is None:
                view.zero_()
            elif grad.is_sparse:
                raise ValueError(
                    f"sparse gradient of a parameter of {tuple(tensor.param.shape)}: use a layer with sparse=False"
                )
            elif grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
            tensor.param.grad = view

    def zero_gradients(self) -> None:
        """g_N <- 0, and every gradient is a view of it again."""
        self.g_N.zero_()
        for tensor in self.tensors:
            tensor.param.grad = self._view(self.g_N, tensor)

    def shapes(self) -> list[list[int]]:
        """Shapes of the parameters in flat order: what a saved vector must have been made with."""
        return [list(tensor.param.shape) for tensor in self.tensors]

    @staticmethod
    def _view(vector_N: Tensor, tensor: FlatTensor) -> Tensor:
        return vector_N[tensor.start : tensor.stop].view(tensor.param.shape)


def _validated(groups: Iterable[list[Tensor]]) -> Tensor:
    """The first parameter, when all can live in one flat vector. Raises: ValueError."""
    first: Tensor | None = None
    for group_index, params in enumerate(groups):
        for index, param in enumerate(params):
            name = f"parameter {index} of group {group_index}, shape {tuple(param.shape)}"
            if not param.requires_grad:
                raise ValueError(f"{name}: requires_grad is False; pass only parameters that are trained")
            if param.numel() == 0:
                raise ValueError(f"{name}: has no elements; leave it out")
            if param.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{name}: dtype {param.dtype}; supported are torch.float32 and torch.float64")
            first = param if first is None else first
            if param.dtype != first.dtype or param.device != first.device:
                raise ValueError(
                    f"{name}: {param.dtype} on {param.device}, but the first parameter is {first.dtype} on "
                    f"{first.device}; all must agree"
                )
    if first is None:
        raise ValueError("no parameters: pass model.parameters()")
    return first
