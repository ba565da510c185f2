"""The parameters of an optimizer change: some are frozen, unfrozen or added, on all ranks or by mistake on some.

What happens to the vectors when other parameters are trained is in relayout.py. Here is when, and that all ranks do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.calls import calls_of
from thinwire.comm.errors import CommError
from thinwire.comm.groups.texts import codec_text
from thinwire.comm.protocol import Group
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.buffers import Buffers
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.orphans import listed
from thinwire.optim.engine.parameters import compute_dtype, describe, is_trained, refuse_other_models, send_frozen_
from thinwire.optim.engine.protocol import OptimizerLike
from thinwire.optim.engine.relayout import lay_out_anew, trained_ids
from thinwire.optim.engine.replicas import settings
from thinwire.optim.engine.state import show_state


def is_laid_out(optimizer: OptimizerLike) -> bool:
    """Are the parameters that are trained now those that the flat vectors are of?"""
    return trained_ids(optimizer.param_groups) == optimizer.laid_out


def others(optimizer: OptimizerLike) -> list[Tensor]:
    """The parameters that are not in the flat vectors: frozen, or to join at the next step."""
    inside = {id(tensor.param) for tensor in optimizer.space.tensors}
    return [param for group in optimizer.param_groups for param in group["params"] if id(param) not in inside]


def send_frozen(optimizer: OptimizerLike, groups: Sequence[dict[str, Any]]) -> None:
    """The frozen parameters of these groups <- rank 0's. Collective."""
    for param in (param for group in groups for param in group["params"] if not is_trained(param)):
        send_frozen_(optimizer.group, param, optimizer.space.p_N.device)


def refuse_mismatch(optimizer: OptimizerLike, call: str, more: Sequence[str] = ()) -> None:
    """Compare over all ranks what is trained, and how. Collective. Raises: as parameters.refuse_other_models."""
    sizes = f"codec {codec_text(optimizer.codec)} and buckets of {optimizer.bucket_elements}"
    every = [param for group in optimizer.param_groups for param in group["params"]]
    changed = hasattr(optimizer, "space") and not is_laid_out(optimizer)
    lines = [
        f"{type(optimizer).__name__} with {sizes}",
        f"{len(optimizer.param_groups)} parameter groups",
        *more,
        *describe(optimizer.param_groups),
        *(["other parameters than in the step before"] if changed else []),
    ]
    if optimizer.model is not None:
        lines += ["model= was given", *Buffers(optimizer.model).lines()]
    device = next(filter(is_trained, every), every[0]).device
    refuse_other_models(optimizer.group, f"an optimizer's {call}", lines, device)


def lay_out(optimizer: OptimizerLike, call: str) -> None:
    """Space, exchange and state for the groups as they are. Collective. Raises before any parameter is touched."""
    for param_group in optimizer.param_groups:
        optimizer.check_group(param_group)
    compute_dtype(optimizer.param_groups)
    refuse_mismatch(optimizer, call, [f"{name} = {value}" for name, value in settings(optimizer).items()])
    optimizer.frozen_states = {}
    optimizer.space = FlatSpace(optimizer.param_groups)
    optimizer.ages = [Age()] * len(optimizer.space.tensors)
    optimizer.connect_space()
    show(optimizer)
    optimizer.reduce.broadcast_(optimizer.space.p_N)
    optimizer.space.write_back()
    send_frozen(optimizer, optimizer.param_groups)
    optimizer.equalise_buffers()


def add_group(optimizer: OptimizerLike, param_group: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
    """Lay out vectors and exchange anew, with one group more. add: torch.optim's. Collective.

    Raises: ValueError, PeerLost, WireMismatch; then the groups are as before.
    """
    optimizer.overlap.refuse_between("add_param_group")
    before = dict(vars(optimizer))
    add(param_group)
    optimizer.listed = listed(optimizer.param_groups)
    try:
        with optimizer.calling("add_param_group()"):
            if optimizer.num_steps:
                optimizer.check_group(optimizer.param_groups[-1])
                go_on_with_trained(optimizer, "add_param_group()")
                send_frozen(optimizer, optimizer.param_groups[-1:])
            else:
                lay_out(optimizer, "add_param_group()")
    except (ValueError, CommError):
        vars(optimizer).update(before)
        optimizer.param_groups.pop()
        raise


def connect(optimizer: OptimizerLike, group: Group, bucket_elements: int) -> None:
    """Exchange with other ranks from here on, with empty vectors: for optim.regroup, which fills them. Collective.

    Raises: PeerLost, WireMismatch; then everything is as before.
    """
    before = dict(vars(optimizer))
    optimizer.group, optimizer.calls = group, calls_of(group)
    optimizer.bucket_elements = bucket_elements
    try:
        refuse_mismatch(optimizer, "regroup()")
        optimizer.connect_space()
        show(optimizer)
    except BaseException:  # a signal's too, which is handled where others are waited for
        vars(optimizer).update(before)
        raise


@contextmanager
def awaiting_vectors(optimizer: OptimizerLike) -> Iterator[None]:
    """Inside, replicated vectors of a new state are to be replaced before they are written (new_vector)."""
    optimizer.awaits_vectors = True
    try:
        yield
    finally:
        optimizer.awaits_vectors = False


def go_on_with_trained(optimizer: OptimizerLike, call: str) -> None:
    """Go on with the parameters that are trained now. Collective. Raises: as relayout.lay_out_anew."""
    refuse_mismatch(optimizer, call)
    compute_dtype(optimizer.param_groups)
    lay_out_anew(optimizer)


def show(optimizer: OptimizerLike) -> None:
    """Let `state` show vectors and step counts as they are laid out now, and what was set aside."""
    steps = optimizer.num_steps
    optimizer.shown_steps = {
        missed: torch.tensor(float(steps - missed)) for missed in {age.missed for age in optimizer.ages}
    }
    counts = [optimizer.shown_steps[age.missed] for age in optimizer.ages]
    show_state(optimizer.state, optimizer.space, optimizer.vectors, optimizer.shown, counts)
    for param, state in optimizer.frozen_states.items():
        parts = {name: state.values[field].view(param.shape) for field, name in optimizer.shown.items()}
        optimizer.state[param] = {"step": torch.tensor(float(state.steps)), **parts}
