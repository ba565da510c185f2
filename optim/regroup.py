"""A run goes on with other ranks: survivors keep what they have, newcomers are given it, and R stays as it was.

    planned      every old rank: hand_over(optimizer)         R of each error memory, exact, by the old ranks
                 then those that stay or come: regroup(...)
    unplanned    the survivors, after PeerLost, and those that come: regroup(...)

A resize is a checkpoint that is not written: replicated vectors of the most advanced rank, R of the error memories, and
the plain values, loaded by load_state_dict() over the new group. Nothing of the world size is in them.

    R      planned: handed over.  Unplanned: the sum of what the survivors hold (Reducer.share): the worker error of a
           dead rank is imputed, the mean of theirs in its place; its server error is lost. By FlatOptimizer.keeps both
           are estimated from rows of the last exchange, or the server error is the one that the rank after it keeps.
           What is lost all the same is reported.
    step   if any survivor has finished a step, it counts: the others were sent all that they needed for it, so that
           their error memory goes forward with it (Reducer.redone). Else it is undone on all, and run again.

Nothing changes before the last collective has succeeded. A rank on which it succeeds while another loses a peer holds R
until its next step, so that the next regroup() begins from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from thinwire.comm.calls import calls_of
from thinwire.comm.errors import CommError, PeerLost, WireMismatch
from thinwire.comm.exchange.exchange import LOST
from thinwire.comm.groups.texts import gather_texts
from thinwire.comm.protocol import Group
from thinwire.optim.engine import added, changing, saving
from thinwire.optim.engine.box import Box
from thinwire.optim.engine.giving import (
    GradientAsRoom,
    Room,
    begin_anew,
    described_rows,
    give,
    give_values,
    give_vectors,
    take,
)
from thinwire.optim.engine.keeping import as_laid_out
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.parameters import parts_of
from thinwire.optim.engine.schedule import Wire
from thinwire.optim.engine.state import error_memories
from thinwire.optim.engine.tensor_states import bring_together, of_peer


@dataclass(frozen=True, slots=True)
class Regrouped:
    """What a regroup did; the same on every rank.

    step: committed steps that all ranks hold now. source: whose replicated state it is; None: of nobody, a fresh start.
    received: ranks that were given it. rolled_forward: survivors that had not finished the step themselves.
    local_steps_lost: steps of 0/1 Adam or of LocalSteps that some rank, gone or not, has made alone, or not made, and
    that count for nothing.
    lost: ranks of the old group that are gone. server_lost: those whose server error has gone with them.
    rebuilt: those of whom an estimate stands in R, in place of what was lost.
    lost_norm: an estimate of the norm of what R has lost, from what the survivors hold; 0 where nothing is.
    unrebuilt_norm: the same without what was rebuilt.
    residual_norm: ||R|| of all error memories now.
    """

    step: int
    source: int | None
    received: tuple[int, ...] = ()
    rolled_forward: tuple[int, ...] = ()
    local_steps_lost: int = 0
    lost: tuple[int, ...] = ()
    server_lost: tuple[int, ...] = ()
    rebuilt: tuple[int, ...] = ()
    lost_norm: float = 0.0
    unrebuilt_norm: float = 0.0
    residual_norm: float = 0.0

    @classmethod
    def of(cls, changes: Sequence[Self]) -> Self:
        """What was done to any of several optimizers. step, source: of the first."""
        if len(changes) == 1:
            return changes[0]

        def ranks(name: str) -> tuple[int, ...]:
            return tuple(sorted({rank for one in changes for rank in getattr(one, name)}))

        def norm(name: str) -> float:
            return math.hypot(*(getattr(one, name) for one in changes))

        return cls(
            changes[0].step,
            changes[0].source,
            ranks("received"),
            ranks("rolled_forward"),
            sum(one.local_steps_lost for one in changes),
            ranks("lost"),
            ranks("server_lost"),
            ranks("rebuilt"),
            norm("lost_norm"),
            norm("unrebuilt_norm"),
            norm("residual_norm"),
        )


@dataclass(frozen=True, slots=True)
class _Loss:
    """What R has lost with ranks that are gone: the last fields of Regrouped."""

    lost: tuple[int, ...] = ()
    server_lost: tuple[int, ...] = ()
    rebuilt: tuple[int, ...] = ()
    lost_norm: float = 0.0
    unrebuilt_norm: float = 0.0
    residual_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class _Standing:
    """What a rank brings.

    common: the last step at which all held the same. seat: rank and size in the old group. keeps: ranks of that group
    whose server error is here. rebuilds: whether it has rows of the last exchange. narrow: what it keeps in bf16.
    layout: of its vectors. in_rows: of those that it holds in received rows, Momentum.described().
    of_others: what others keep in optimizer.state, as added.described().
    """

    has_state: bool
    num_steps: int
    common: int
    handed_over: bool
    seat: tuple[int, int]
    keeps: list[int]
    rebuilds: bool
    narrow: list[str]
    bucket_elements: int
    layout: int
    in_rows: dict[str, dict[str, Any]]
    of_others: added.Described
    plain: dict[str, Any]

    @classmethod
    def of(cls, optimizer: FlatOptimizer[Any], has_state: bool) -> _Standing:
        group, errors = optimizer.group, error_memories(optimizer.vectors).values()
        plain = optimizer.plain_state()
        return cls(
            has_state,
            optimizer.num_steps,
            optimizer.common_steps,
            optimizer.handed_over is not None,
            (group.rank, group.size),
            [rank for rank in range(group.size) if all(memory.kept_of(rank) for memory in errors)],
            bool(errors) and all(optimizer.reduce.rebuilds(memory) for memory in errors),
            list(optimizer.narrow),
            optimizer.bucket_elements,
            optimizer.space.layout.fingerprint(),
            described_rows(optimizer) if has_state else {},
            added.described(optimizer) if has_state else [],
            plain,
        )

    def to_text(self) -> bytes:
        return json.dumps([getattr(self, name) for name in self.__slots__], default=float).encode()

    @classmethod
    def from_text(cls, text: bytes) -> _Standing:
        return cls(*json.loads(text))


@torch.no_grad()
def hand_over(optimizer: FlatOptimizer[Any]) -> None:
    """Before a planned change: end the round of local steps, and take R of all error memories. Collective, old group.

    R is then held here, until the next step, in place of the worker errors; the server errors are R too (rule S).
    Gradients are worth nothing afterwards.
    Raises: PeerLost, and then nothing has changed; TypeError for an optimizer that is not handed over.
    """
    _refuse_others(optimizer, "hand_over")
    optimizer.overlap.refuse_between("hand_over")
    with optimizer.calling(f"hand_over() after step {optimizer.num_steps}"):
        if error_memories(optimizer.vectors):
            optimizer.refuse_to_be_alone()
        optimizer.prepare_to_hand_over()
        with GradientAsRoom(optimizer) as gradient:
            bring_together(optimizer, gradient.take)


@torch.no_grad()
def regroup(
    optimizer: FlatOptimizer[Any],
    group: Group,
    *,
    has_state: bool,
    bucket_elements: int | None = None,
    buffers: Iterable[Tensor] | None = None,
) -> Regrouped:
    """Go on with the ranks of `group`. Collective: all of them call it, newcomers with has_state False.

    A newcomer has made the same optimizer over a group of its own (SoloGroup). Where nobody has a state, parameters are
    those of rank 0, as in a constructor, and bucket_elements, where given, is the new size of buckets; else that of the
    source stays. Gradients may be anything; afterwards, also where it fails, they are worth
    nothing.
    buffers: what else belongs to the state, such as a model's running statistics, of any dtype, the same shapes on
    every rank; None: those of the optimizer's model=. They and frozen parameters are written in place where a rank is
    given the state, also where that fails on the way.
    Raises: PeerLost, WireMismatch: everything is as before; ValueError for states that cannot belong together. Where
    nobody has a state, a rank may stand in this group by then and have rank 0's parameters: the next regroup() goes on.
    TypeError for an optimizer that is not handed over, such as SparseAdam.
    """
    return regroup_all([optimizer], group, has_state=has_state, bucket_elements=bucket_elements, buffers=buffers)


@torch.no_grad()
def regroup_all(
    optimizers: Sequence[FlatOptimizer[Any]],
    group: Group,
    *,
    has_state: bool,
    bucket_elements: int | None = None,
    buffers: Iterable[Tensor] | None = None,
) -> Regrouped:
    """As regroup(), of optimizers that step in one loop, in the same order on every rank: of all of them, or of none.

    Where one of them fails, those before it are as they were too, so that this rank never holds a part of a change.
    Returns what was done to any of them; step is of the first one.
    """
    for optimizer in optimizers:
        _refuse_others(optimizer, "regroup")
    with calls_of(group).within("regroup()"), ExitStack() as stack:
        staged: list[_Staged] = []
        try:
            for optimizer in optimizers:
                stack.enter_context(as_laid_out(optimizer))
                gradient = stack.enter_context(GradientAsRoom(optimizer))
                together = stack.enter_context(_Together(optimizer.space.box))
                staged.append(_stage(optimizer, group, has_state, bucket_elements, buffers, gradient, together))
        except BaseException:
            for one in reversed(staged):
                one.undo()
            raise
        takes = [one.take for one in staged]
        staged.clear()  # and with it what undo() would need: error memory of before has gone when R gets memory anew
        return Regrouped.of([take() for take in takes])


def _refuse_others(optimizer: object, call: str) -> None:
    """Raises: TypeError for what cannot be carried over to other ranks, before anything is sent."""
    if not isinstance(optimizer, FlatOptimizer):
        raise TypeError(
            f"{call}() of {type(optimizer).__name__}: those of thinwire.optim but SparseAdam are handed over. "
            "SparseAdam: before a planned change call state_dict() on every old rank, make it over the new group, and "
            "load_state_dict() on every rank of that; after a PeerLost go on from what was saved (docs/own-loop.md)"
        )


class _Together:
    """The ranks of a box, which hold shards of the same tensors, go on with others together or not at all.

    Each regroups with ranks of its own. Were a step to count in one of these groups only, as where some rank of it was
    ahead, the next loss of a peer could leave shards of two steps in one box. Left by an error: says so to the box.
    """

    def __init__(self, box: Box | None) -> None:
        self._box = box

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        box, self._box = self._box, None
        if box is not None and isinstance(error, CommError | ValueError):
            box.least(LOST)
        elif box is not None and error is not None:  # such as a signal's, of this rank alone
            box.leave(f"{type(error).__name__} in regroup()")

    def agree(self) -> None:
        """All ranks of the box are through. Collective there, once. Raises: PeerLost where one has lost a peer."""
        box, self._box = self._box, None
        if box is not None and box.least(1) == LOST:
            raise PeerLost("a rank of this box, which regroups with others of its own, has lost a peer")


@dataclass(frozen=True, slots=True)
class _Staged:
    """A regroup whose collectives have all succeeded. take: the rest of it, local, which cannot fail for want of a

    peer. undo: the optimizer is as before, instead. One of the two is called, once.
    """

    take: Callable[[], Regrouped]
    undo: Callable[[], None]


def _stage(
    optimizer: FlatOptimizer[Any],
    group: Group,
    has_state: bool,
    bucket_elements: int | None,
    buffers: Iterable[Tensor] | None,
    gradient: GradientAsRoom,
    together: _Together,
) -> _Staged:
    optimizer.settle()
    optimizer.refresh_master()
    device = optimizer.space.p_N.device
    own = _Standing.of(optimizer, has_state)
    all_n = [_Standing.from_text(text) for text in gather_texts(group, own.to_text(), device)]
    holders = [rank for rank, one in enumerate(all_n) if one.has_state]
    if not holders:
        changing.connect(optimizer, group, bucket_elements or all_n[0].bucket_elements)
        optimizer.reduce.broadcast_(optimizer.space.p_N)
        optimizer.space.write_back()
        changing.send_frozen(optimizer, optimizer.param_groups)
        changing.send_all(optimizer, changing.not_given(optimizer).values())
        optimizer.equalise_buffers()
        together.agree()
        return _Staged(lambda: Regrouped(0, None), lambda: None)
    _refuse_other_frozen(all_n)
    common = max(all_n[rank].common for rank in holders)
    level = [rank for rank in holders if all_n[rank].common == common]
    source = max(level, key=lambda rank: (all_n[rank].num_steps, -rank))
    now = all_n[source].num_steps
    behind = tuple(rank for rank in holders if rank not in level)
    received = tuple(rank for rank, one in enumerate(all_n) if rank not in level or one.num_steps < now)

    takes_part = group.rank in level
    room = Room(optimizer.synced_vectors(group, taking_part=takes_part, num_ranks=len(level)))
    plain = all_n[source].plain
    if received:
        added.refuse_ungiven(all_n[source].of_others)
    of_others = added.rooms(optimizer, all_n[source].of_others if received else [], gives=group.rank == source)
    states = of_peer(optimizer, plain["entries"], {} if group.rank in received else optimizer.frozen_states)
    in_rows = all_n[source].in_rows
    if any(all_n[rank].layout != all_n[source].layout for rank in received):
        in_rows = {}  # connect() says what differs
    before, before_all = optimizer.vectors, dict(vars(optimizer))
    try:
        if group.rank in received:
            room = Room.made(optimizer, has_state, plain["frozen_at"], in_rows)
        if received:
            give_vectors(optimizer, room, group, (source, *received), in_rows)
            give_values(states.values(), group, (source, *received))
            kept = optimizer.buffers.all() if buffers is None else buffers
            beside = [*changing.others(optimizer), *changing.not_given(optimizer).values()]  # frozen ones too
            for buffer in filter(Tensor.numel, [*kept, *(part for one in beside for part in parts_of(one))]):
                passed = buffer.detach().to(device).contiguous()  # a copy only where it was not
                give(group, passed.view(-1).view(torch.uint8), (source, *received))
                if group.rank in received and passed.data_ptr() != buffer.data_ptr():
                    buffer.detach().copy_(passed)
            for value in (x for one in of_others.values() for x in one.values()):
                if isinstance(value, Tensor) and value.numel():
                    give(group, value.view(-1).view(torch.uint8), (source, *received))
        # The gradient of who is behind is of a step that counts; and something else may lie in it.
        is_free = group.rank not in behind and not room.holds(optimizer.space.g_N)
        residuals, loss = _residuals(
            optimizer,
            group,
            all_n,
            source,
            group.rank in behind,
            (plain, room.vectors),
            gradient.take if is_free else lambda: None,
        )
        with changing.awaiting_vectors(optimizer):
            changing.connect(optimizer, group, all_n[source].bucket_elements, together.agree)
    except BaseException:
        if not has_state:
            begin_anew(optimizer)
        raise

    def undo() -> None:
        vars(optimizer).update(before_all)
        if not has_state:
            begin_anew(optimizer)

    def take_all() -> Regrouped:
        nonlocal before, room
        take(optimizer, before, room)
        del before, room
        saving.go_on(optimizer, plain, states, residuals)
        if group.rank in received:
            added.replace(optimizer, of_others)
        optimizer.resumed()
        optimizer.loaded = optimizer.lost_gradient = None  # all of it has come from one rank
        gone = _gone([all_n[rank] for rank in holders])
        if loss.lost:
            optimizer.error_lost = {
                "error_lost_norm": loss.lost_norm,
                "error_lost_norm_unrebuilt": loss.unrebuilt_norm,
                "error_norm": loss.residual_norm,
            }
        losers = len(gone) + (len(behind) if optimizer.loses_what_is_behind else 0)
        lost_steps = sum(now - all_n[rank].num_steps for rank in level) + (now - common) * losers
        return Regrouped(now, source, received, behind, lost_steps, **asdict(loss))

    return _Staged(take_all, undo)


def _refuse_other_frozen(all_n: list[_Standing]) -> None:
    """All ranks have laid out the same parameters, and keep what goes with them alike. Raises: WireMismatch."""
    for rank, one in enumerate(all_n):
        mine, theirs = all_n[0].plain["frozen"], one.plain["frozen"]
        if mine != theirs:
            raise WireMismatch(
                f"rank 0 was made with, or last stepped with, parameters {mine} frozen (group and place in it), "
                f"rank {rank} with {theirs}: freeze the same ones in the model of a new rank before its optimizer is "
                "made; nothing was changed"
            )
        if one.narrow != all_n[0].narrow:
            raise WireMismatch(
                f"rank 0 keeps {all_n[0].narrow} in bfloat16, rank {rank} {one.narrow}: give the optimizers of all "
                "ranks the same narrow=; nothing was changed"
            )


def _residuals(
    optimizer: FlatOptimizer[Any],
    group: Group,
    all_n: list[_Standing],
    source: int,
    is_behind: bool,
    common: tuple[dict[str, Any], dict[str, Tensor]],
    spare: Callable[[], Tensor | None],
) -> tuple[dict[str, Tensor], _Loss]:
    """R of each error memory, bit-equal on every rank, and what it has lost.

    common: plain state and vectors of the source, the rank whose step counts. spare: memory for R, once; else None.
    """
    holders = [one for one in all_n if one.has_state]
    now = max(one.common for one in holders)
    whole = [rank for rank, one in enumerate(all_n) if one.handed_over and one.has_state and one.common == now]
    errors = error_memories(optimizer.vectors)
    residuals = {}
    if whole:
        for name in errors:
            mine = optimizer.handed_over[name] if optimizer.handed_over and group.rank in whole else None
            if mine is None:
                mine = torch.empty_like(optimizer.space.p_N) if (given := spare()) is None else given
            residuals[name] = mine
            group.broadcast_(residuals[name], whole[0])
        return residuals, _Loss(residual_norm=_norm(residuals))
    old_size = holders[0].seat[1]
    if any(one.seat[1] != old_size for one in holders):
        raise ValueError(
            f"survivors of groups of {[one.seat[1] for one in holders]} ranks: they were in different ones"
        )
    missing = _gone(holders)
    kept = {rank for one in holders for rank in one.keeps}
    servers_lost = tuple(rank for rank in missing if rank not in kept)
    has_state = all_n[group.rank].has_state
    rebuilt_by = all_n[source].seat[0] if missing and all(one.rebuilds for one in holders) else None
    # Sums over survivors of ||worker error||^2 and ||server error||^2; what rebuilding leaves of them; who knows that;
    # how many held a worker error.
    found = optimizer.space.p_N.new_zeros(6)
    with _lost_gradient(optimizer), optimizer.reduce.redone() if is_behind else nullcontext(False) as redone:
        # Where it has made as many steps it lacks a sync in full alone, of a save or a hand_over(), which writes none.
        if is_behind and not redone and optimizer.num_steps < now and _keeps_errors(optimizer):
            raise ValueError(
                f"rank {group.rank} stands at step {optimizer.num_steps} and others at {now}, but it has not done its "
                "part of that step: after PeerLost call regroup() before the next step(), which forgets what was sent; "
                "where nobody called step() in between, this is a defect of thinwire, please report it"
            )
        for name, memory in errors.items():
            if has_state:
                found[:2] += memory.squares()
                found[5] += memory.workers / len(errors)
                if rebuilt_by is not None and not is_behind:
                    found[2:4] += optimizer.reduce.left_squares(memory)
                part_N = optimizer.reduce.share(memory, len(holders), missing, rebuilt_by=rebuilt_by, out_N=spare())
                if is_behind:
                    optimizer.catch_up_(part_N, *common, len(holders))
            else:
                part_N = torch.zeros_like(optimizer.space.p_N)
            group.start_sum_(part_N).wait()
            residuals[name] = part_N
        if has_state and not is_behind:
            found[4] += 1
    group.start_sum_(found).wait()
    worker, server, server_left, worker_left, knowing, held_by = found.tolist()
    lost, unrebuilt = 0.0, 0.0
    if missing and held_by:
        # Of each dead rank: its server chunk, and 1/n of its worker error's distance from the others', about that of
        # two workers; with node first n is the number of boxes. From what the survivors hold, for nobody has the dead
        # rank's.
        lost = unrebuilt = (
            (len(servers_lost) * server + len(missing) * 2 * worker / (held_by / len(holders)) ** 2) / len(holders)
        ) ** 0.5
    if rebuilt_by is not None:  # never with node first
        lost = (len(missing) * (server_left + worker_left / old_size**2) / knowing) ** 0.5
    rebuilt = missing if rebuilt_by is not None else ()
    return residuals, _Loss(missing, servers_lost, rebuilt, lost, unrebuilt, _norm(residuals))


@contextmanager
def _lost_gradient(optimizer: FlatOptimizer[Any]) -> Iterator[None]:
    """Inside, the flat gradient is that of the step that was lost, where that may count."""
    lost_N, g_N = optimizer.lost_gradient, optimizer.space.g_N
    if lost_N is None or not optimizer.reduce.needs_lost_input:
        yield
        return
    now_N = g_N.clone()
    g_N.copy_(lost_N)
    try:
        yield
    finally:
        g_N.copy_(now_N)


def _keeps_errors(optimizer: FlatOptimizer[Any]) -> bool:
    """Does the step that this rank has not finished write error memory?"""
    plan = optimizer.plan(optimizer.num_steps + 1)
    if plan.momentum is Wire.COMPRESSED:
        return bool(error_memories(optimizer.vectors))
    return plan.gradient is Wire.FULL and optimizer.gradient_memory is not None


def _gone(holders: list[_Standing]) -> tuple[int, ...]:
    """Ranks of the group that the holders were in last that are not among them, whether they died or left.

    Holders of several groups: a change failed half way, before any step, so that nobody is missing that mattered.
    """
    sizes = {one.seat[1] for one in holders}
    return tuple(sorted(set(range(sizes.pop())) - {one.seat[0] for one in holders})) if len(sizes) == 1 else ()


def _norm(residuals: dict[str, Tensor]) -> float:
    return float(sum(float(torch.linalg.vector_norm(r_N)) ** 2 for r_N in residuals.values()) ** 0.5)
