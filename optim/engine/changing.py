"""The parameters of an optimizer change: some are frozen, unfrozen or added, on all ranks or by mistake on some.

    requires_grad_(False), requires_grad_(True), add_param_group      seen at the next step(), on every rank
    all ranks:   refuse the exchange of this step, for a rank that has seen no change waits in it
                 compare what is to be trained; WireMismatch where ranks differ, and nothing has changed
                 R of the error memory, brought together as for a checkpoint
                 new flat vectors and a new exchange, for those that are trained
    each:        all states are taken out of the old vectors and put into the new (tensor_states.py)

So a frozen parameter is in no exchange, no momentum and no decay, as in torch.optim, where it has no gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.calls import calls_of
from thinwire.comm.errors import CommError, Refused
from thinwire.comm.groups.texts import codec_text
from thinwire.comm.protocol import Group
from thinwire.optim.engine import added, tensor_states
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.algorithm import Algorithm
from thinwire.optim.engine.box import refuse_other_mesh
from thinwire.optim.engine.buffers import Buffers, excepted_of
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.local import local, named_parameters
from thinwire.optim.engine.loss_scaling import is_scaled
from thinwire.optim.engine.orphans import listed
from thinwire.optim.engine.parameters import (
    HELD_BACK,
    REDUCED,
    compute_dtype,
    describe,
    is_trained,
    named_as_trained,
    names_of,
    refuse_other_models,
    refuse_other_order,
    send_values_,
)
from thinwire.optim.engine.replicas import settings
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.engine.state import Shown, count, error_memories, show_state

logger = logging.getLogger(__name__)

_REQUIRES = attrgetter("requires_grad")
"""is_trained, for what each step asks of every parameter."""


def trained_ids(param_groups: list[dict[str, Any]]) -> list[list[int]]:
    """The parameters that are trained now, group by group: compared at each step with those that are laid out."""
    return [list(map(id, filter(_REQUIRES, group["params"]))) for group in param_groups]


def laid_out_ids(param_groups: list[dict[str, Any]], space: FlatSpace) -> list[list[int]]:
    """The parameters that are laid out, group by group: those of trained_ids() when the space was made."""
    inside = {id(tensor.param) for tensor in space.tensors}
    return [[id(param) for param in group["params"] if id(param) in inside] for group in param_groups]


def is_laid_out(optimizer: Algorithm[Any]) -> bool:
    """Are the parameters that are trained now those that the flat vectors are of?"""
    return trained_ids(optimizer.param_groups) == optimizer.laid_out


def others(optimizer: Algorithm[Any]) -> list[Tensor]:
    """The parameters that are not in the flat vectors: frozen, or to join at the next step."""
    if sum(map(len, optimizer.laid_out)) == sum(len(group["params"]) for group in optimizer.param_groups):
        return []
    inside = {id(tensor.param) for tensor in optimizer.space.tensors}
    return [param for group in optimizer.param_groups for param in group["params"] if id(param) not in inside]


def not_given(optimizer: Algorithm[Any]) -> dict[str, Tensor]:
    """The parameters of model= that are in no group, by name: frozen ones, and those that something else trains."""
    if optimizer.model is None:
        return {}
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    excepted = excepted_of(optimizer.model)
    named = named_parameters(optimizer.model).items()
    return {name: param for name, param in named if id(param) not in given and name not in excepted}


def send_frozen(optimizer: Algorithm[Any], groups: Sequence[dict[str, Any]]) -> None:
    """The frozen parameters of these groups <- rank 0's. Collective."""
    send_all(optimizer, [param for group in groups for param in group["params"] if not is_trained(param)])


def send_all(optimizer: Algorithm[Any], tensors: Iterable[Tensor]) -> None:
    """These <- rank 0's. Collective."""
    for tensor in tensors:
        send_values_(optimizer.group, tensor, optimizer.space.p_N.device)


def refuse_mismatch(optimizer: Algorithm[Any], call: str, more: Sequence[str] = ()) -> None:
    """Compare over all ranks what is trained, and how. Collective. Raises: as parameters.refuse_other_models."""
    sizes = f"codec {codec_text(optimizer.codec)} and buckets of {optimizer.bucket_elements}"
    changed = hasattr(optimizer, "space") and not is_laid_out(optimizer)
    held = (_held_back(optimizer) or "no parameter") if hasattr(optimizer, "space") else "no parameter"
    lines = [
        f"{type(optimizer).__name__} with {sizes}",
        f"the gradient of {held} {HELD_BACK}",
        f"{len(optimizer.param_groups)} parameter groups",
        *more,
        *(["model= was given"] if optimizer.model is not None else []),
        *describe(optimizer.param_groups, optimizer.model),
        *(["other parameters than in the step before"] if changed else []),
    ]
    if optimizer.model is not None:
        lines += Buffers(optimizer.model).lines()
        for name, param in not_given(optimizer).items():
            lines.append(f"{named_as_trained(name)}, not given to the optimizer: {param.dtype} {tuple(param.shape)}")
    refuse_other_models(optimizer.group, f"an optimizer's {call}", lines, _device(optimizer.param_groups))


def _device(param_groups: Sequence[dict[str, Any]]) -> torch.device:
    """Of what is exchanged, before there are vectors."""
    every: list[Tensor] = [param for group in param_groups for param in group["params"]]
    return next(filter(is_trained, every), every[0]).device


def lay_out(optimizer: Algorithm[Any], call: str) -> None:
    """Space, exchange and state for the groups as they are. Collective. Raises before any parameter is touched."""
    for param_group in optimizer.param_groups:
        optimizer.check_group(param_group)
    compute_dtype(optimizer.param_groups)
    refuse_other_mesh(optimizer.group, optimizer.param_groups)
    refuse_mismatch(optimizer, call, [f"{name} = {value}" for name, value in settings(optimizer).items()])
    if optimizer.group.size > 1 and None in names_of(optimizer.param_groups, optimizer.model):
        refuse_other_order(optimizer.group, optimizer.param_groups, _device(optimizer.param_groups))
    optimizer.frozen_states = {}
    optimizer.space = optimizer.make_space()
    optimizer.ages = [Age()] * len(optimizer.space.tensors)
    optimizer.connect_space()
    show(optimizer)
    optimizer.reduce.broadcast_(optimizer.space.p_N)
    optimizer.space.write_back()
    send_frozen(optimizer, optimizer.param_groups)
    send_all(optimizer, not_given(optimizer).values())
    optimizer.equalise_buffers()
    optimizer.begins = True


def add_group(optimizer: Algorithm[Any], param_group: dict[str, Any], add: Callable[[dict[str, Any]], None]) -> None:
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


def connect(
    optimizer: Algorithm[Any], group: Group, bucket_elements: int, agree: Callable[[], None] = lambda: None
) -> None:
    """Exchange with other ranks from here on, with empty vectors: for optim.regroup, which fills them. Collective.

    agree: called last; it may raise. Raises: PeerLost, WireMismatch; then everything is as before.
    """
    before = dict(vars(optimizer))
    optimizer.group, optimizer.calls = group, calls_of(group)
    optimizer.bucket_elements = bucket_elements
    try:
        refuse_mismatch(optimizer, "regroup()")
        optimizer.connect_space()
        show(optimizer)
        agree()
    except BaseException:  # a signal's too, which is handled where others are waited for
        vars(optimizer).update(before)
        raise


@contextmanager
def awaiting_vectors(optimizer: Algorithm[Any]) -> Iterator[None]:
    """Inside, replicated vectors of a new state are to be replaced before they are written (new_vector)."""
    optimizer.awaits_vectors = True
    try:
        yield
    finally:
        optimizer.awaits_vectors = False


def follow_changes(optimizer: Algorithm[Any]) -> None:
    """Where other parameters are trained than in the step before, go on with those. Collective where they are.

    Raises: PeerLost; WireMismatch where they changed on some ranks only, or otherwise; ValueError.
    """
    # What has begun to be sent is a step of the old ones.
    if not is_laid_out(optimizer) and optimizer.overlap.exchange is None:
        optimizer.overlap.abandon()
        optimizer.settle()
        exchange = optimizer.next_exchange
        with optimizer.calling(f"step() {exchange}"):  # where the others are that have changed nothing
            _refuse_step(optimizer, optimizer.plan(optimizer.num_steps + 1))
        with optimizer.calling(f"step() {exchange + optimizer.steps_beside}"):  # where they hear of it
            go_on_with_trained(optimizer, "step()")
    if optimizer.is_out_of_phase:
        optimizer.bring_into_phase()
        optimizer.is_out_of_phase = False


def refuse_held_back(optimizer: Algorithm[Any]) -> None:
    """See that FSDP has reduced all of the gradients that this step is given. Collective where it has not.

    Raises: RuntimeError where ranks have gradients held back; WireMismatch where some box has and another has not.
    """
    held = _held_back(optimizer)
    if held is None:
        return
    if optimizer.overlap.exchange is None:
        _refuse_step(optimizer, optimizer.plan(optimizer.num_steps + 1))
        refuse_mismatch(optimizer, "step()")
    raise RuntimeError(
        f"step {optimizer.num_steps + 1}: FSDP holds back the gradient of {held}, whose backward ran under "
        f"set_requires_gradient_sync(False): {REDUCED}; nothing was changed, and FSDP adds what it holds to the next "
        "gradient"
    )


def _held_back(optimizer: Algorithm[Any]) -> str | None:
    """A parameter of whose gradient FSDP has not reduced all."""
    space = optimizer.space
    held = None if space.box is None else space.box.held_back(space.is_untouched)
    return next((tensor.label for tensor in space.tensors if tensor.param is held), None)


def _refuse_step(optimizer: Algorithm[Any], plan: StepPlan) -> None:
    """Take no part in what ranks that go on as before exchange in this step: they find out why, and all raise.

    In a step without communication they do so at the next sync, where this rank waits for them.
    """
    if optimizer.group.size == 1:
        return
    optimizer.scaled = is_scaled(optimizer)
    optimizer.begin_beside(plan)
    if optimizer.gradients == "mean" and plan.gradient is not Wire.FULL:
        with suppress(Refused):
            mean_or_refusal(optimizer.group, optimizer.space.g_N, refuses=1.0)
        return
    if plan.gradient is Wire.LOCAL and plan.momentum is Wire.LOCAL and not optimizer.beside_due:
        optimizer.send_beside()
    try:
        optimizer.overlap.complete(lambda: optimizer.refuse_exchange(plan), optimizer.send_due)
    except Refused:
        optimizer.end_beside()
        return
    raise RuntimeError("an exchange that this rank refused was finished: a defect of thinwire; please report it")


def mean_or_refusal(group: Group, g_N: Tensor, refuses: float = 0.0) -> Tensor:
    """The mean of g of all ranks, float[N]; refuses: 1.0 on a rank that takes no part. Collective.

    Raises: Refused, alike on every rank, where some rank refuses.
    """
    mean_N1 = torch.cat([g_N, g_N.new_full((1,), refuses)])
    group.mean_(mean_N1)
    if mean_N1[-1] > 0.0:
        raise Refused("some rank took no part in the exchange; nothing was changed")
    return mean_N1[:-1]


def go_on_with_trained(optimizer: Algorithm[Any], call: str) -> None:
    """Go on with the parameters that are trained now. Collective. Raises: as _lay_out_anew."""
    refuse_mismatch(optimizer, call)
    compute_dtype(optimizer.param_groups)
    refuse_other_mesh(optimizer.group, optimizer.param_groups)
    _lay_out_anew(optimizer)


@torch.no_grad()
def _lay_out_anew(optimizer: Algorithm[Any]) -> None:
    """Vectors and exchange for the parameters that are trained now, with the state that each has. Collective.

    All ranks have agreed on them. Values of those that join are rank 0's.
    Raises: PeerLost, WireMismatch, ValueError; then parameters, state and R are as before the call, but that 0/1 Adam
    has ended its round.
    """
    old = optimizer.space
    old.take_changes()
    laid_out = {tensor.param for tensor in old.tensors}
    trained = [param for group in optimizer.param_groups for param in group["params"] if is_trained(param)]
    joining = [param for param in trained if param not in laid_out]
    optimizer.prepare_to_save()
    found = tensor_states.live(optimizer, {name: m.residual() for name, m in error_memories(optimizer.vectors).items()})
    saved, evidence, overlap, buffers = optimizer.saved, optimizer.evidence, optimizer.overlap, optimizer.buffers
    before = dict(vars(optimizer))
    try:
        optimizer.space = optimizer.make_space()
        optimizer.ages = [Age()] * len(optimizer.space.tensors)
        space = optimizer.space
        for tensor, view in zip(space.tensors, space.views(space.p_N), strict=True):
            if tensor.param not in laid_out:
                optimizer.group.broadcast_(view)
        optimizer.connect_space()
    except (CommError, ValueError):
        vars(optimizer).update(before)
        old.take_changes()
        old.gather_gradients()
        raise

    # From here on nothing can fail for want of a peer.
    overlap.close()
    optimizer.saved, optimizer.evidence, optimizer.buffers = optimizer.with_added_groups(saved), evidence, buffers
    residuals = tensor_states.put_(optimizer, found)
    space.write_back()  # those that join have rank 0's values
    space.load_masters(tensor_states.masters_of(found))
    now = {tensor.param for tensor in space.tensors}
    leaving = [i for i, tensor in enumerate(old.tensors) if tensor.param not in now]
    for i in leaving:
        old.release(i)
    optimizer.resumed()
    optimizer.relaid(residuals)
    logger.info(
        "laid_out_anew step=%d frozen=%d joined=%d trained=%d elements=%d",
        optimizer.num_steps + 1,
        len(leaving),
        len(joining),
        len(space.tensors),
        space.layout.num_live,
    )


def show(optimizer: Algorithm[Any]) -> None:
    """Let `state` show vectors and step counts as they are laid out now, and what was set aside."""
    steps = optimizer.num_steps
    optimizer.shown_steps = {missed: count(steps - missed) for missed in {age.missed for age in optimizer.ages}}
    counts = [optimizer.shown_steps[age.missed] for age in optimizer.ages]
    of_others = added.kept(optimizer.state)
    show_state(optimizer.state, optimizer.space, optimizer.vectors, optimizer.shown, counts)
    for param, state in optimizer.frozen_states.items():
        parts = {name: state.values[field].view(local(param).shape) for field, name in optimizer.shown.items()}
        optimizer.state[param] = Shown({"step": count(state.steps), **parts} if parts else {}, {})
    added.put_back(optimizer.state, of_others)
