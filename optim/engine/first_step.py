"""What the first step can see and construction could not: checked once.

    gradients left over     the model had some when the optimizer was made, and the first backward added to them
    equal gradients         before the exchange those of all ranks are already their mean
    other parameters        those of the ranks, which the constructor has made equal, are not any more

The first two are logged on rank 0, and nothing is sent for them: equal gradients are seen by rank 0's being what the
first exchange in full gives. The last is refused: no step has been made that could have rounded otherwise on another
machine, so somebody has written parameters otherwise on each rank.
"""

from __future__ import annotations

import json
import logging
import weakref
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.calls import Calls, refuse_other_calls
from thinwire.comm.codecs.int8 import DEFAULT_RUN as RUN
from thinwire.comm.errors import WireMismatch
from thinwire.comm.kernels.int8_reference import LEVELS
from thinwire.comm.kernels.peak import peak
from thinwire.comm.protocol import FullWire, Group
from thinwire.optim.engine.local import local
from thinwire.optim.engine.schedule import StepPlan, Wire

logger = logging.getLogger(__name__)

Beside = dict[str, dict[str, list[int]]]
"""As beside.digests: by whom, in words, then by name, the digest of a parameter."""
SAMPLED = 1 << 16
"""Elements of the gradient that are compared, evenly spread."""


class FirstStep:
    """What is looked at once, of one optimizer that is not laid out yet: its gradients are as they were found."""

    def __init__(self, group: Group, param_groups: list[dict[str, Any]]) -> None:
        self._looks, self._size = group.rank == 0, group.size
        self._compares = False
        """Is the gradient of each step compared with its mean, until one has a mean? A step may be left out."""
        self._own: tuple[Tensor, Tensor] | None = None
        """Elements of this rank's gradient, and how far the mean of the same from all ranks may be from each."""
        if self._looks:
            _watch_left_gradients(param_groups)

    def look(self, plan: StepPlan, g_N: Tensor, wire: FullWire, *, has_sent: bool) -> None:
        """Before the exchange of a step: keep a part of this rank's gradient, where it is the first. Local.

        wire: how the mean is sent. has_sent: has backward sent a part of the gradient already?
        """
        if self._looks:
            self._looks = False
            self._compares = plan.gradient is Wire.FULL and self._size > 1
        self._own = None
        # What backward has sent lies in g as the mean already. The first step never overlaps; one after it, where that
        # was left out, may.
        self._compares = self._compares and not has_sent
        if self._compares and plan.gradient is Wire.FULL:
            self._own = _sample(g_N).clone(), _rounding(g_N, wire)

    def look_at_mean(self, g_N: Tensor) -> None:
        """After the exchange in full of that step, before the mean is shortened: is it what this rank had? Local."""
        found, self._own = self._own, None
        if found is None:
            return
        self._compares = False
        own_k, rounding_k = found
        alike = ((_sample(g_N) - own_k).abs() <= rounding_k).all()
        if bool(alike.logical_and_(own_k.any())):  # waits for the device, this once
            logger.warning(
                "gradients_equal: before the exchange this rank's gradient was already the mean of all ranks: leave "
                "`DistributedDataParallel(model)`, or an all_reduce of gradients, out of the loop, for they cross the "
                "wire twice; in transformers.Trainer and Accelerate say with_thinwire(...) (docs/integrations.md), and "
                "where another trainer insists on DDP thinwire.integrations.ddp.keep_gradients_local(model). Where all "
                "ranks read the same data, give each its own (torch.utils.data.DistributedSampler)"
            )


def refuse_apart(calls: Calls, group: Group, sums: list[int], more: Beside, device: torch.device) -> list[Beside]:
    """sums: of this rank's parameters. Collective, 16 bytes a rank. Raises: WireMismatch, alike on every rank.

    more: of what is trained beside them. Returns it of all ranks where it is not alike, else nothing.
    A rank that has loaded a checkpoint alone is in another call there: CallMismatch, with what to do.
    """
    texts = refuse_other_calls(group, calls.now, device, remedy=calls.remedy, more=json.dumps([sums, more]))
    if texts is None:
        return []
    of_ranks, beside = zip(*map(json.loads, texts), strict=True)
    others = [rank for rank, of_one in enumerate(of_ranks) if of_one != of_ranks[0]]
    if others:
        raise WireMismatch(
            f"before the first step the parameters of ranks {others} are not those of rank 0, which the constructor "
            "has sent to all: they have been written since, otherwise on each rank. A perturbation that is taken back "
            "by subtraction (SAM: p.add_(e), then p.sub_(e)) leaves each rank's own rounding: keep "
            "old = p.detach().clone() and put it back by p.copy_(old) under torch.no_grad(). Load and initialise "
            "weights alike on every rank, or before the optimizer is made. Nothing was changed"
        )
    return list(beside)


def _sample(x_N: Tensor) -> Tensor:
    return x_N[:: _stride(x_N)]


def _stride(x_N: Tensor) -> int:
    return max(1, x_N.numel() // SAMPLED)


def _rounding(g_N: Tensor, wire: FullWire) -> Tensor:
    """Of the elements that are compared: how far what is sent of each may be from it, and a little more."""
    if wire != "int8":
        return _sample(g_N).abs() * (1e-5 if wire == "fp32" else 2**-8)
    # A run of values that share a scale may begin anywhere: it lies in an element's own run of the vector and the two
    # beside it.
    runs = len(g_N) // RUN
    largest_R = g_N.new_zeros(runs + 3)
    whole_Rk = g_N[: runs * RUN].view(runs, RUN)
    if runs:  # both ends: on a CPU torch's norm, and aminmax of rows, take ten times as long
        largest_R[1 : runs + 1] = torch.maximum(whole_Rk.amax(1), whole_Rk.amin(1).neg_())
    if len(g_N) % RUN:
        largest_R[runs + 1] = peak(g_N[runs * RUN :])
    near_R = largest_R.unfold(0, 3, 1).amax(1)
    every_k = torch.arange(0, len(g_N), _stride(g_N), dtype=torch.int64, device=g_N.device)
    return near_R[every_k.div_(RUN, rounding_mode="floor")] * (0.51 / LEVELS)


def _watch_left_gradients(param_groups: list[dict[str, Any]]) -> None:
    """Where there are gradients already: look, when backward first reaches one, whether they were cleared before."""
    for group in param_groups:
        for param in group["params"]:
            grad = param.grad
            if param.requires_grad and grad is not None and grad.layout == torch.strided and bool(local(grad).any()):
                _watch(param)
                return


def _watch(param: Tensor) -> None:
    seen = weakref.ref(param)

    def look(_: Tensor) -> None:
        handle.remove()
        left = seen()
        if left is not None and left.grad is not None and bool(local(left.grad).any()):
            logger.warning(
                "gradients_left: the model had gradients when the optimizer was made, and backward adds to them: call "
                "optimizer.zero_grad() before the first backward"
            )

    handle = param.register_hook(look)  # type: ignore[no-untyped-call]
