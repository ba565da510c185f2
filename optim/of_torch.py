"""An optimizer of torch whose step is linear in what is exchanged, at one bit: torch.optim.SGD. All others are refused.

Error feedback sends later what one bit leaves out now. That makes up for it only where a step is a sum of what was
received: where a rule divides by, takes the sign of or orthogonalises what it receives, a part that comes late is not
the part that was left out. So each such class is told why, and which optimizer of ours is nearest.
"""

from __future__ import annotations

from typing import Any, NoReturn, Unpack

import torch
from torch.optim.optimizer import Optimizer

from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.options import Options
from thinwire.optim.onebit_sgd import OneBitSGD

OF_TORCH_ALONE = ("foreach", "differentiable", "fused")
"""Settings of torch.optim.SGD that say how it computes."""
IN_FULL = "average its gradients in full before it steps (docs/own-loop.md#a-second-optimizer)"
_VARIANCE = "divides by squares of the gradients that it receives, and in one bit all values of a block are of one size"
_SIGN = "takes the sign of what it receives, so that what one bit leaves out now and sends later is not made up for"
REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("adam", "adamw", "adamax", "nadam", "radam"), (_VARIANCE, "OneBitAdam or ZeroOneAdam")),
    **dict.fromkeys(("adagrad", "adadelta", "rmsprop", "adafactor"), (_VARIANCE, "OneBitAdam")),
    "sparseadam": (_VARIANCE, "SparseAdam"),
    "lamb": (_VARIANCE, "OneBitLamb"),
    **dict.fromkeys(("rprop", "lion", "signsgd", "signum"), (_SIGN, "OneBitAdam")),
    "muon": ("orthogonalises what it receives, and error feedback is exact only behind that", "OneBitMuon"),
    "lbfgs": ("compares gradients and losses with one another, and what one bit leaves out would be in each", ""),
    "asgd": (
        "keeps an average of parameters beside its step",
        "OneBitSGD, and torch.optim.swa_utils.AveragedModel beside it",
    ),
}
"""By the name of a class or of one that it is made of: why not, and which of ours is nearest; "": none is."""


def compressed(inner: Optimizer, **options: Unpack[Options]) -> OneBitSGD:
    """A torch.optim.SGD with its exchange in one bit:  optimizer = compressed(torch.optim.SGD(...), model=model).

    What is returned is stepped, saved and loaded in inner's place. It has inner's own groups, so that a scheduler that
    holds inner, made before or later, goes on. A momentum that inner has is gone on from, rank 0's;
    that of a parameter which is frozen then is not, and hooks that were registered on inner stay there.
    inner: from here on its step(), state_dict() and load_state_dict() raise RuntimeError. options: as in OneBitSGD.
    Collective, as constructors are. Raises: TypeError for any other class: why, and what to take in its place;
    RuntimeError where inner was given before; ValueError; PeerLost, WireMismatch. Then inner is as before.
    """
    _refuse_other(inner)
    if _refuse_use in inner._optimizer_step_pre_hooks.values():
        _refuse_use()
    aside = [{name: group.pop(name) for name in OF_TORCH_ALONE if name in group} for group in inner.param_groups]
    try:
        if any(one.get("differentiable") for one in aside):
            raise ValueError("differentiable = True: must be left out, a step is not differentiated through")
        optimizer = OneBitSGD(inner.param_groups, **_of_first(inner), **options)
        _go_on_from(optimizer, inner)
    except BaseException:
        for group, one in zip(inner.param_groups, aside, strict=True):
            group.update(one)
        raise
    inner.param_groups = optimizer.param_groups  # a group that is added to inner alone is found in the next step
    inner._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at before they warn
    inner.register_step_pre_hook(_refuse_use)
    inner.register_state_dict_pre_hook(_refuse_use)
    inner.register_load_state_dict_pre_hook(_refuse_use)
    return optimizer


def _refuse_use(*_: object) -> NoReturn:
    raise RuntimeError(
        "this torch.optim.SGD was given to compressed(), and what that returned is stepped, saved and loaded in its "
        "place: optimizer = compressed(sgd, ...); optimizer.step()"
    )


def _of_first(inner: Optimizer) -> dict[str, Any]:
    """Defaults of groups that are added later."""
    return {name: value for name, value in inner.defaults.items() if name not in OF_TORCH_ALONE}


@torch.no_grad()
def _go_on_from(optimizer: OneBitSGD, inner: Optimizer) -> None:
    """The momentum of inner on rank 0, on all. Collective."""
    m_N, tensors = optimizer.vectors.m_N, optimizer.space.tensors
    has_T = m_N.new_zeros(len(tensors))
    for i, tensor in enumerate(tensors):
        found = inner.state.get(tensor.param, {}).get("momentum_buffer")
        if found is not None and not optimizer.group.rank:
            m_N[tensor.start : tensor.stop] = found.reshape(-1)
            has_T[i] = 1
    optimizer.reduce.broadcast_(has_T)
    if has_T.any():
        optimizer.reduce.broadcast_(m_N)
        optimizer.set_ages([Age(unseen=None) if has else Age() for has in has_T.tolist()])  # not in their first step


def _refuse_other(inner: object) -> None:
    if type(inner) is torch.optim.SGD:
        return
    name = type(inner).__name__
    if not isinstance(inner, Optimizer):
        raise TypeError(f"compressed({name}): must be given a torch.optim.SGD, and the model as model=")
    if isinstance(inner, Algorithm):
        raise TypeError(
            f"compressed({name}): must be given a torch.optim.SGD; {name} is of thinwire.optim and does its exchange "
            "itself, so use it as it is (OneBitSGD in place of its dense SGD)"
        )
    lines = (REFUSED.get(kind.__name__.lower()) for kind in type(inner).__mro__)
    why, nearest = next(filter(None, lines), ("is not known to have a step that is linear in what it receives", ""))
    instead = f"use {nearest} of thinwire.optim, or {IN_FULL}" if nearest else IN_FULL
    raise TypeError(f"compressed({name}): must be given a torch.optim.SGD itself. {name} {why}: {instead}")
