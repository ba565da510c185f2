"""Local steps of any optimizer; every so many, what the parameters have moved by crosses the wire in one bit.

    rank i, each step     x_i <- a step of the inner optimizer, alone
    every H steps         d_i = x_s - x_i;   D <- compressed_mean_i(d_i)         x_s: where the round began
                          b <- mu b + D;   x_s <- x_s - lr (D + mu b);   x_i <- x_s     Nesterov's; else b for D + mu b

[Douillard et al. 2023, arXiv 2311.08105 (DiLoCo); Yang et al. 2021, arXiv 2106.07155 (CFedAvg): lr 1, mu 0]

The outer step is linear in what crosses, so that nothing is lost: given out + R' = mean of d_i + R, whatever the codec
leaves out. d_i has all steps of its round in it: a rank may make fewer than the others (sync), and the mean counts what
each has moved.

A round ends early in two ways. Where all ranks are there, as for a save or a planned change, by an exchange like every
other. Where a rank is gone, each puts its d_i into its error memory and goes back to x_s: R has it, and what comes next
sends it. So a death costs its own rank's round, and no other; a rank that comes begins at x_s.

With overlap=True the exchange of a round runs while the steps of the next are made:

    x_i = x_s - d_i - d_i'          d_i: the round that is under way, d_i' the steps since; D_k may come at any time
    D is there                      x_s <- x_s - lr (D + mu b);   at the end of the round x_i <- x_s - d_i'

So a rank goes on from its own parameters, and its own move of a round is replaced by that of all one round later.
What crosses at the end of a round is x_s - x_i: nothing is counted twice, nothing is lost.
[Kale et al. 2025, arXiv 2502.12996 (eager updates); Sun et al. 2024, arXiv 2401.16265 (CO2)]

With parts=P the vector is in P parts, each with rounds of its own, of which one ends every H / P steps (the picture is
in local_round.py). So a P-th of the bytes crosses at a time. With overlap it has H / P steps to do so, and then counts:
x_s and x are as above, of the part that was under way.  [Douillard et al. 2025, arXiv 2501.18512, sec. 3]

A step stands, however the exchange after it ends: where a peer is lost in it, parameters, inner state and step count
are those after this rank's step, the round is open, and the next step ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from thinwire.comm.codecs import codec_of
from thinwire.comm.default import GivenGroup
from thinwire.comm.errors import CommError, NonFiniteInput, PeerLost, Refused
from thinwire.comm.exchange.alone import Results
from thinwire.comm.exchange.exchange import gather_flags
from thinwire.comm.kernels.peak import witness
from thinwire.comm.protocol import Codec, Group
from thinwire.comm.signals import deferred
from thinwire.contract.hyperparameters import EVERY, PARTS, TOTAL_STEPS, CodecName
from thinwire.optim.engine import changing
from thinwire.optim.engine.exchanges import Exchange, LeftGradients, LeftInPlace, formed_sum, refusal
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.local import is_dtensor
from thinwire.optim.engine.options import NonFinite
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.inner import Inner
from thinwire.optim.inner_mean import equalise_inner
from thinwire.optim.local_round import InRounds, LocalStepsState, Parts, Turn
from thinwire.optim.outer import MEAN, OuterSGD, Outward

logger = logging.getLogger(__name__)

SYNC_EVERYWHERE = "call sync() on every rank first, or save where optimizer.at_sync is true"
PIECE = 1 << 20
"""Elements for which there is scratch where a result is read."""


class LocalSteps(InRounds):
    """Any optimizer, stepped on each rank alone; every `every` steps ranks exchange what they have moved by.

        optimizer = LocalSteps(torch.optim.AdamW(model.parameters(), lr=1e-3), every=32, model=model)

    inner: an optimizer of torch.optim, or written like one, or a dense one of ours that was made with
    group=SoloGroup(). Its groups are those of LocalSteps: a schedule may hold either. It is stepped, saved and loaded
    by LocalSteps alone. every: H, the same on every rank. outer: the outer step (OuterSGD). codec: "sign", one bit a
    value; "int8"; "int4"; "topk", the largest 64 of 4096 in 2 bits each; "threshold", the largest hundredth in 16; or a
    Codec. total_steps: of the run, where it is known: a round that would not end in it is refused.
    group: the ranks (None: torch.distributed's default group, or this process alone). model, max_grad_norm (each rank
    shortens its own gradient): as in CheckedOptions. non_finite: a gradient that is not finite counts as zero on its
    rank; "raise": every rank raises NonFiniteInput at the end of that round, which the next step ends; "skip": only the
    log says so.
    overlap: the exchange of a round runs beside the next one's steps and is applied at the end of that: nobody waits
    where it takes less time than a round. Replicas are equal after prepare_to_save(), which waits for all of it.
    parts: of the model, each exchanged every H steps, and one of them every H / parts; the same on every rank. With
    overlap it is applied when the next one is sent. With more than one no step is at_sync.

    In a round ranks hold different parameters: evaluate where at_sync, or after prepare_to_save(), which ends it. The
    constructor is collective: it sends rank 0's parameters to all. Raises: TypeError, ValueError; PeerLost,
    WireMismatch.
    """

    results: ClassVar[Results] = "read"
    sends_in_full: ClassVar[bool] = False
    loses_what_is_behind: ClassVar[bool] = False
    shown: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        inner: Optimizer,
        *,
        every: int,
        outer: OuterSGD = MEAN,
        codec: CodecName | Codec = "sign",
        total_steps: int | None = None,
        group: GivenGroup | None = None,
        model: nn.Module | None = None,
        max_grad_norm: float | None = None,
        non_finite: NonFinite = "raise",
        overlap: bool = False,
        parts: int = PARTS.default,
    ) -> None:
        EVERY.check(every)
        PARTS.check(parts)
        if parts > every:
            raise ValueError(f"parts = {parts}, every = {every}: must be at most one part a step, of those of a round")
        TOTAL_STEPS.check(total_steps)
        if total_steps is not None and every > total_steps:
            raise ValueError(
                f"every = {every}, total_steps = {total_steps}: the ranks would never exchange anything; must be at "
                "most the steps of the run"
            )
        if not isinstance(outer, OuterSGD):
            raise ValueError(f"outer = {outer!r}: must be an OuterSGD(lr=, momentum=, nesterov=)")
        self.codec = codec_of(codec)
        if not isinstance(overlap, bool):
            raise ValueError(f"overlap = {overlap!r}: must be True or False")
        self._runs_beside = overlap
        self._turn = self._under_way = None
        self._failed: CommError | None = None
        """How it ended, where it did not count and nobody has been told."""
        self._left: LeftInPlace | None = None
        """Of the gradients of this step, those that are where backward made them."""
        self._has_arrived = False
        self.inner = Inner(inner)
        self.inside = inner
        if any(is_dtensor(param) for one in inner.param_groups for param in one["params"]):
            raise ValueError(
                "inner has DTensors among its parameters, of which local steps are not held by a test: use OneBitAdam "
                "or OneBitMuon for sharded boxes (docs/sharded.md)"
            )
        self.every, self.parts, self.outer = every, parts, outer
        super().__init__(
            inner.param_groups,
            inner.defaults,
            group=group,
            model=model,
            max_grad_norm=max_grad_norm,
            non_finite=non_finite,
        )
        for i in self.space.quiet if self.steps_on_left else ():  # so the flat gradient takes no memory
            self.space.tensors[i].param.grad = None

    def check_group(self, group: dict[str, Any]) -> None:
        """Hyperparameters are the inner optimizer's."""
        if self.inner.ours is not None:
            self.inner.ours.check_group(group)

    def hypers(self, step: int) -> list[Any]:
        """None that this one reads."""
        return []

    def own_settings(self) -> dict[str, Any]:
        """As Algorithm.own_settings."""
        inner = type(self.inner.optimizer).__name__
        overlap = {"overlap": self._runs_beside, "parts": self.parts}
        return {"every": self.every, "outer": repr(self.outer), "inner": inner, **overlap}

    def make_space(self) -> FlatSpace:
        """As Algorithm.make_space: that of an inner optimizer of ours. Raises: ValueError for too many parts."""
        if self.inner.ours is not None:
            changing.follow_changes(self.inner.ours)
        space = super().make_space() if self.inner.ours is None else self.inner.ours.space
        Parts(space.p_N.numel(), self.parts)
        return space

    def begin(self) -> None:
        """Set what a fresh run begins with."""
        inner = type(self.inner.optimizer).__name__
        self.saved |= {"last_sync": 0, "num_rounds": 0, "same_inner": -1, "inner": inner}
        self.inner.share(self.param_groups, self.state)
        self._turn, self._made, self._at = None, 0, slice(0, self.space.p_N.numel())
        self._rooms: dict[str, Tensor] = {}

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Refuse the state of another inner optimizer, which would begin anew unseen. Raises: ValueError."""
        mine, theirs = type(self.inner.optimizer).__name__, saved["inner"]
        if mine != theirs:
            raise ValueError(f"state_dict has inner = {theirs!r}, and this is a LocalSteps over {mine}: load another")

    def note_evidence(self) -> None:
        """Before anything is saved. Raises: ValueError for what an inner optimizer keeps of no parameter."""
        if others := [key for key in self.state if not isinstance(key, Tensor)]:
            raise ValueError(
                f"the inner optimizer {type(self.inner.optimizer).__name__} keeps state[{others[0]!r}], which is of no "
                "parameter and would be lost in what is saved: have it keep that in its groups, or by parameter"
            )

    def make_state(self) -> LocalStepsState:
        """Empty vectors and error memory."""
        lost = torch.zeros((), dtype=torch.bool, device=self.space.p_N.device)
        return LocalStepsState(self.new_vector(), self.reduce.new_memory(), lost)

    def begin_beside(self, plan: StepPlan) -> None:
        """As FlatOptimizer.begin_beside: after the step that ends a round, with the exchange."""
        self.beside_due = True

    def reached(self) -> list[object]:
        """As Algorithm.reached, with what the inner optimizer keeps."""
        ours = self.inner.ours
        return [*super().reached(), self.state, self._rooms, *([] if ours is None else ours.reached())]

    def kept_beside(self, param: Tensor) -> dict[Any, Any]:
        """As Algorithm.kept_beside: the inner optimizer's among it."""
        return {**super().kept_beside(param), **self.inner.entries(param)}

    def keep_beside(self, param: Tensor, entries: dict[Any, Any]) -> None:
        """As Algorithm.keep_beside."""
        self.inner.take(param, entries)
        mine = self.inner.entries(param)
        super().keep_beside(param, {name: x for name, x in entries.items() if name not in mine})

    # a round

    def update(self, plan: StepPlan, groups: Sequence[Any]) -> None:
        """A step of the inner optimizer, and at the end of a round the exchange. Raises: as step(); the step stands."""
        self._step_inner()
        if plan.momentum is Wire.COMPRESSED:
            try:
                self._end_round(plan)
            except BaseException:
                self.num_steps += 1
                raise
            self._has_ended(self.num_steps + 1)

    def _has_ended(self, step: int, *, whole: bool = False) -> None:
        if self._under_way is None:
            self._is_applied(self._turn_now, step, whole=whole)
        else:
            self._under_way = self._under_way[0], step

    def _step_inner(self) -> None:
        space, s = self.space, self.vectors
        if s.start_N is None:
            s.start_N = self._copied("start", space.p_N)
            self.handed_over = None  # R is to be found anew, where a rank is gone before the next exchange
        left, self._left = self._left, None  # or what zero_grad() drops would stay while backward makes the next ones
        read = [space.g_N] if left is None else left.read(space.views(space.g_N))
        finite = torch.isfinite(witness(*read))
        s.lost.logical_or_(~finite)
        if space.g_N.device.type != "cpu":
            space.g_N.masked_fill_(~finite, 0.0)
        elif not finite:
            torch._foreach_zero_(read)
        del left, read
        space.leave_gradients(space.g_N)
        self.inner.step(self.state)
        self._made = self.num_steps + 1
        space.take_written()  # of low precision through .data, too, as many optimizers write

    @property
    def steps_on_left(self) -> bool:
        """As Algorithm.steps_on_left: where who steps reads p.grad, and the host may ask whether it is finite."""
        plain = self.gradients == "own" and self.max_grad_norm is None and self.inner.ours is None
        return plain and self.space.g_N.device.type == "cpu"

    def left_where_they_are(self) -> Callable[[int, Tensor], bool] | None:
        """As Algorithm.left_where_they_are: zeroing and adding in the flat gradient would cross memory thrice more."""
        reads = self.steps_on_left and not self.scaled
        self._left = LeftInPlace(self.reduce.buckets.layout, self.space.g_N) if reads else None
        return None if self._left is None else self._left.take

    def _tell_scaler(self, *, left_out: bool) -> None:
        """A GradScaler goes by what it has found itself: this rank's gradient alone is left out."""

    def _end_round(self, plan: StepPlan, *, whole: bool = False) -> None:
        """Exchange what ranks have moved by, and take the outer step; with overlap, unless whole, begin to. Collective.

        Raises: PeerLost, NonFiniteInput; RuntimeError, alike on every rank, where some rank's parameters are not finite
        themselves. Then parameters and round are as before.
        """
        s, p_N = self.vectors, self.space.p_N
        self.beside_due = True
        if self._runs_beside and not whole:
            self._end_beside(plan)
            return
        self._at = slice(0, p_N.numel()) if whole else self._parts[self._turn_now.part]
        try:
            self.exchange_(plan)
        except NonFiniteInput as error:
            if not isinstance(error, Refused):
                raise self._said(error) from error
            raise
        self._take_result(p_N, p_N if s.start_N is None else s.start_N)
        if whole or self.parts == 1:
            self._begin_round()
        else:
            s.start_N = self._copied("start", p_N) if s.start_N is None else s.start_N
            s.start_N[self._at] = p_N[self._at]
            s.lost.zero_()

    def _take_result(self, p_N: Tensor, start_N: Tensor) -> None:
        """p <- start - the outer step, of the part that was exchanged. p: modified; it may be start."""
        result = self.reduce.result
        self.reduce.commit()  # first: where it is interrupted, nothing has moved
        reader = Outward(p_N, start_N, self.vectors.outer_N, self.outer)
        for low in range(self._at.start, self._at.stop, PIECE):
            result.read(reader, low, min(low + PIECE, self._at.stop))
        self.saved["num_rounds"] += 1

    def _end_beside(self, plan: StepPlan) -> None:
        """Apply the exchange that is under way, and launch that of this round. Collective. Raises: as _end_round."""
        self._catch_up()
        s, turn = self.vectors, self._turn_now
        self._at = self._parts[turn.part]
        s.start_N = self._copied("start", self.space.p_N) if s.start_N is None else s.start_N
        s.base_b = self._copied("base", self.space.p_N[self._at])
        self.overlap.launch_all(self.begin_exchange(plan), self.send_due)
        self._under_way = turn, self.num_steps
        s.lost = torch.zeros_like(s.lost)  # the flag of what is under way is read again where that is undone

    def _copied(self, name: str, x: Tensor) -> Tensor:
        """x, in the memory of the last of this name: on a CPU fresh memory takes longer than the copy."""
        room = self._rooms.get(name)
        if room is None or room.shape != x.shape:
            room = self._rooms[name] = torch.empty_like(x)
        return room.copy_(x)

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the exchange that is under way, and take its outer step; x stays, until the next one is sent.

        As Algorithm.settle: how it failed is raised there.
        """
        if self._under_way is None:
            return
        (turn, after), self._under_way = self._under_way, None
        start_N = self.vectors.start_N
        assert start_N is not None
        if not self.reduce.is_open:
            self._failed = PeerLost("the exchange of the last round was broken off, by an error in a step since")
            return
        try:
            self.reduce.finish()
        except CommError as error:
            self._failed = error
            return
        self._take_result(start_N, start_N)
        self._has_arrived = True
        self._is_applied(turn, after)

    def _catch_up(self) -> None:
        """Put x where it is with what all have moved by in the place of its own. Collective. Raises: as _end_round."""
        failed = self._replace_own_move()
        if not isinstance(failed, PeerLost):
            self.end_beside()
        if isinstance(failed, NonFiniteInput) and not isinstance(failed, Refused):
            raise self._said(failed) from failed
        if failed is not None:
            raise failed

    def _replace_own_move(self) -> CommError | None:
        """Settle, and move x, in low precision too. Returns how the exchange failed. Local."""
        self.settle()
        s, failed, self._failed = self.vectors, self._failed, None
        if self._has_arrived:
            assert s.start_N is not None
            assert s.base_b is not None
            x_b = self.space.p_N[self._at]
            with deferred():  # base is written on the way
                torch.sub(s.base_b, x_b, out=s.base_b)  # in place: new memory costs more than the sum
                torch.sub(s.start_N[self._at], s.base_b, out=x_b)
                self._has_arrived = False
            self.space.write_back()
        if s.start_N is not None and self._under_way is None:
            s.base_b = None
        return failed

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """What this rank has moved by, of the elements `_at`."""
        s, at = self.vectors, self._at
        if self.skips_non_finite and bool(s.lost):
            logger.warning("gradient_left_out rank=%d steps=%d-%d", self.group.rank, *self._steps_of_round())
            s.lost.zero_()
        end_b = self.space.p_N[at] if s.base_b is None else s.base_b
        form = partial(self._formed, s.start_N, end_b, at.start, s.lost)
        return formed_sum(self.reduce, s.move_error, form, at=self.reduce.buckets.inside(at.start, at.stop))

    def refuse_exchange(self, plan: StepPlan) -> Exchange:
        """As Algorithm.refuse_exchange, of the part whose turn it is."""
        at = self._parts[self._turn_now.part]
        buckets = self.reduce.buckets.inside(at.start, at.stop)
        return refusal(self.reduce, self.vectors.move_error, self.mean_wire, buckets)

    @staticmethod
    def _formed(
        start_N: Tensor | None, end_b: Tensor, first: int, lost: Tensor, at: slice, runs: LeftGradients
    ) -> Tensor:
        """d of these elements, new; NaN where this rank has lost a gradient, for all to learn. first: of end."""
        end = end_b[at.start - first : at.stop - first]
        moved = torch.zeros_like(end) if start_N is None else start_N[at] - end
        if lost.device.type == "cpu" and not lost:
            return moved  # without a pass more; a GPU is not asked, for the host would wait
        return moved.masked_fill_(lost, torch.nan)

    def _said(self, error: NonFiniteInput) -> Exception:
        """What all ranks are told in place of the error of the exchange. Collective."""
        s, p_N = self.vectors, self.space.p_N
        finite = torch.isfinite(witness(p_N))
        broken = [rank for rank, flag in enumerate(gather_flags(self.group, finite).tolist()) if not flag]
        first, last = self._steps_of_round()
        if broken:
            return RuntimeError(
                f"in steps {first} to {last} the inner optimizer of rank {', '.join(map(str, broken))} has moved "
                "parameters to NaN or infinity, so that this round cannot end: load a checkpoint of before on every "
                "rank, with a lower learning rate; nothing was sent"
            )
        s.lost.zero_()
        whose = f"of rank {', '.join(map(str, error.ranks))}" if error.ranks else "of some rank"
        return NonFiniteInput(
            f"a gradient {whose} in steps {first} to {last} holds NaN or infinity; its step has taken it as zero, and "
            "the round goes on: the next step ends it. Look at the loss",
            error.ranks,
        )

    def _steps_of_round(self) -> tuple[int, int]:
        return self._last_sent + 1, max(self.num_steps, self._made, self._last_sent + 1)

    def _begin_round(self) -> None:
        """x is where all begin. What is under way has been settled."""
        self.vectors.start_N = self.vectors.base_b = self._failed = self._turn = None
        self._has_arrived, self._made = False, 0
        self.vectors.lost.zero_()

    @torch.no_grad()
    def sync(self) -> None:
        """End the round now, with the steps that this rank has made. Collective: another's step or sync() ends it too.

        With parts, that of the part whose turn it is, of which a rank makes at most about every / parts steps.
        For ranks of different speed: each makes the steps that it can, at most `every`, and what it has moved by counts
        in a plain mean. Steps that it has not made count as made: num_steps is that of the end of the round, on every
        rank; one that has made none gives 0. Raises: as step(). After NonFiniteInput the count is as where another
        rank's step raised it, which stands: there the next step or sync() ends the round.
        """
        end = self.next_exchange
        with self._reports_undone(), self.calling(f"step() {end}"):
            self._agree_on_load()
            changing.follow_changes(self)
            try:
                self._end_early(end)
            except NonFiniteInput as error:
                if isinstance(error, Refused):
                    changing.refuse_mismatch(self, "step()")
                self.num_steps = end
                raise

    def _end_early(self, end: int, *, whole: bool = False) -> None:
        self.overlap.abandon()
        self.space.take_changes()
        self.reduce.draw = self.num_steps
        try:
            self._end_round(self.plan(self.next_exchange), whole=whole)
        except BaseException as error:
            self.overlap.undo(error, self.reduce, self.group)
            raise
        self.num_steps = end
        self._has_ended(end, whole=whole)
        self.handed_over = None
        self.space.equalise_copies()
        self.space.write_back()

    # what is saved, and given to others

    @property
    def at_sync(self) -> bool:
        """As Algorithm.at_sync."""
        return super().at_sync and self.vectors.start_N is None

    @property
    def common_parameters(self) -> Tensor:
        """As FlatOptimizer.common_parameters: where the round began."""
        start_N = self.vectors.start_N
        return self.space.p_N if start_N is None else start_N

    def common_vectors(self) -> dict[str, Tensor]:
        """As FlatOptimizer.common_vectors."""
        return {**super().common_vectors(), "parameters": self.common_parameters}

    def prepare_to_save(self) -> None:
        """End the round, and bring the moments of the inner optimizers to their mean, in full. Collective.

        What has no mean, such as a count of steps or what an inner optimizer writes into its groups, becomes rank 0's.
        Then a run that is loaded equals the one that goes on. rank_state_dict() sends nothing and ends no round.
        Raises: PeerLost; NonFiniteInput; RuntimeError for moments that are not finite; ValueError where ranks keep
        different ones, or lists of some. Then nothing else has changed.
        """
        super().prepare_to_save()
        with self.calling(f"prepare_to_save() after step {self.num_steps}", SYNC_EVERYWHERE):
            self._end_for_all()
            if self.saved["same_inner"] < self.num_steps:
                equalise_inner(self)
                self.saved["same_inner"] = self.num_steps

    def catch_up_(self, part_N: Tensor, plain: dict[str, Any], vectors: dict[str, Tensor], holders: int) -> None:
        """As Algorithm.catch_up_: what this rank has moved by since the exchange that the others have is in R.

        Of the part that was in it since it was sent, of all others since their own rounds began.
        """
        s, p_N, at = self.vectors, self.space.p_N, self._at
        if s.start_N is None or not torch.isfinite(witness(p_N)):
            return
        moved_N = s.start_N - p_N
        moved_N[at] = 0.0 if s.base_b is None else s.base_b - p_N[at]
        part_N.add_(moved_N, alpha=1 / holders)

    def end_round(self) -> None:
        """As Algorithm.end_round, at any step; with overlap it waits for what is under way, too."""
        with self.calling(f"end_round() after step {self.num_steps}", SYNC_EVERYWHERE):
            self._agree_on_load()
            self._end_for_all()

    def prepare_to_hand_over(self) -> None:
        """As prepare_to_save(), but that inner moments stay each rank's own; one that comes is given those of one."""
        super().prepare_to_save()
        with self.calling(f"hand_over() after step {self.num_steps}", SYNC_EVERYWHERE):
            self._end_for_all()

    def _end_for_all(self) -> None:
        if self.at_sync:
            return
        self.refuse_to_be_alone()
        self._catch_up()
        if self.num_steps > self.common_steps or self.parts > 1:
            self._end_early(self.num_steps, whole=True)
        else:  # no step since the last exchange
            self._begin_round()
            self.space.equalise_copies()
            self.space.write_back()

    def plain_state(self) -> dict[str, Any]:
        """As FlatOptimizer.plain_state, at the end of a round, of ranks with inner moments of their own."""
        found = super().plain_state()
        found["saved"] |= {"last_sync": self.num_steps, "same_inner": -1}
        return found

    def synced_vectors(self, group: Group, *, taking_part: bool, num_ranks: int) -> dict[str, Tensor]:
        """As FlatOptimizer.synced_vectors: nothing is sent. What this rank has moved by is in R from here on."""
        s = self.vectors
        if taking_part and s.start_N is not None:
            self._replace_own_move()  # how it failed: a peer is gone, as all here know
            broken = ~torch.isfinite(witness(self.space.p_N))  # where the inner optimizer has diverged on this rank
            s.move_error.add_((s.start_N - self.space.p_N).masked_fill_(broken, 0.0))
            self.space.p_N.copy_(s.start_N)
            self.space.write_back()
            self._begin_round()
        return super().synced_vectors(group, taking_part=taking_part, num_ranks=num_ranks)

    def go_on_from(self, own: dict[str, Any], *, in_round: bool) -> None:
        """Hold what own_state() gave. Not in_round: x is where that rank had moved it, as if the round had ended."""
        self._begin_round()
        if not own:
            return
        s = self.vectors
        self.space.p_N.copy_(own["parameters"])
        self.space.write_back()
        if in_round:
            s.start_N = self._copied("start", own["start_N"].to(self.space.p_N))
            s.lost.fill_(own["lost"])
            parts, part, since = own.get("turn", (1, 0, self.saved["last_sync"]))
            self._at = slice(0, self.space.p_N.numel())
            if parts == self.parts:  # else all of them begin a cycle here
                self._turn = Turn(part, since)
                self._at = self._parts[(part - 1) % parts]
            if "base_N" in own:
                base_b = own["base_N"][self._at].to(self.space.p_N)
                s.base_b, self._has_arrived = self._copied("base", base_b), True
        else:
            self.saved["last_sync"] = self.num_steps

    def end_round_as(self, src: int) -> None:
        """x <- that of rank `src`, as if the round had ended. Collective. Raises: PeerLost."""
        self.reduce.broadcast_(self.space.p_N, src)
        self._begin_round()
        self.saved["last_sync"] = self.num_steps
        self.space.write_back()

    def stats(self) -> dict[str, Any]:
        """As for all optimizers; every: steps of a round; parts; num_rounds: exchanges."""
        rounds = {"every": self.every, "parts": self.parts}
        return {**super().stats(), **rounds, "num_rounds": self.saved["num_rounds"]}
