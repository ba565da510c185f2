"""The torch.optim.Optimizer that all algorithms share: flat vectors, groups, steps, saving. No algorithm here.

A step goes from the gradients that backward left to a state that all ranks share:

    changes followed    parameters frozen, unfrozen or added since the last step (changing.py)
    gradients gathered  into g_N, unscaled, and clipped where each rank's own is used
    beside              buffers and comparisons, in the same order on every rank
    update              the algorithm's: exchange, then modify; or nothing has changed

Hooks of backward may have begun to send what this step exchanges (exchanges.py).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, Unpack

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of dynamo at once
from torch.optim.optimizer import ParamsT

from thinwire.comm.calls import calls_of
from thinwire.comm.default import given_or_default, refuse_late_process_group
from thinwire.comm.errors import CommError, NonFiniteInput, PeerLost, Refused
from thinwire.comm.exchange.exchange import LOST
from thinwire.comm.groups.nodes import Topology
from thinwire.optim.engine import beside, changing, saving, shares
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.algorithm import Algorithm, State
from thinwire.optim.engine.buffers import Buffers
from thinwire.optim.engine.clipping import Clipping
from thinwire.optim.engine.exchanges import Exchange
from thinwire.optim.engine.first_step import FirstStep, refuse_apart
from thinwire.optim.engine.flat import shortening
from thinwire.optim.engine.loss_scaling import forget_scaler, is_scaled, tell_scaler, unscale_
from thinwire.optim.engine.options import (
    CheckedOptions,
    Gradients,
    Options,
    Saves,
    bucket_of,
    reader_of_gradients,
    refuse_join,
    refuse_reader,
    refuse_wrapped,
)
from thinwire.optim.engine.orphans import listed, refuse_copy, refuse_edited, refuse_orphans
from thinwire.optim.engine.overlap import Overlap
from thinwire.optim.engine.parameters import compute_dtype, digest, without_gradient
from thinwire.optim.engine.replicas import Replicas
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.engine.share import Loaded
from thinwire.optim.engine.state import TensorState, bytes_per_parameter, error_memories

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()
SAVE_EVERYWHERE = "call state_dict() on every rank and write what it returns on one, or rank_state_dict() on one alone"


class FlatOptimizer(torch.optim.Optimizer, Algorithm[State]):
    """An optimizer whose parameters, gradients and state are flat vectors.

    params: parameters, (name, parameter) pairs, or groups of either. float64, or float32 mixed with bfloat16 and
    float16, which get a master in float32 (optim.engine.flat). Those that require no gradient are frozen: they are left
    out of every step. Which do is looked at in each step() (optim.engine.changing).
    group, max_grad_norm, non_finite, overlap, model, full_exchange, topology: as in CheckedOptions
    (optim.engine.options).

    Attributes for readers: group (the ranks), space (FlatSpace), reduce (Reducer), vectors (the algorithm's state),
    num_steps, frozen_at, and the others that Algorithm names.
    """

    join_hook = staticmethod(refuse_join)  # called by torch.distributed.algorithms.Join
    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler: see optim/engine/loss_scaling.py

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        checked = CheckedOptions.of(self, options)
        super().__init__(params, defaults)
        self.bucket_elements = self.bucket_elements or bucket_of(p for g in self.param_groups for p in g["params"])
        self.overlaps = checked.overlap
        self.max_grad_norm = checked.max_grad_norm
        self.non_finite = checked.non_finite
        self.saves = "together"
        self.gradients = "own"
        self.model = checked.model
        self.topology: Topology = checked.topology
        if self.narrow and compute_dtype(self.param_groups) != torch.float32:
            raise ValueError(f"narrow = {self.narrow}: must be empty with parameters of float64")
        if self.narrow and self.topology != "flat":
            raise ValueError(f'narrow = {self.narrow}: must be empty with topology = "{self.topology}"')
        self.full_exchange = self.choose_full_exchange(checked.full_exchange)
        self.steps_skipped = self.steps_without_gradient = 0  # the latter in a row, on this rank
        self.scaled: bool | None = None  # does a GradScaler call step()? Not known before a step
        self.shown_steps: dict[int, Tensor] = {}  # the count that `state` shows, by the steps that a tensor was not in
        self.ages: list[Age] = []
        self.frozen_states: dict[Tensor, TensorState] = {}
        self.is_out_of_phase = self.awaits_vectors = self.begins = False
        self.num_steps = 0
        self.frozen_at: int | None = None
        self.handed_over: dict[str, Tensor] | None = None
        self.loaded: Loaded | None = None
        self.group = given_or_default(checked.group)
        self.calls = calls_of(self.group)
        if self.model is not None:
            refuse_wrapped(self.model, self.param_groups)
        self.reader = None if self.model is None else reader_of_gradients(self.model)  # trainers know of one, too
        self.first = FirstStep(self.group, self.param_groups)
        with self.calling("__init__()"):
            changing.lay_out(self, "__init__()")

    @classmethod
    def sized(cls, bucket_elements: int) -> type[Self]:
        """This optimizer where no more is sent at a time: OneBitAdam.sized(1 << 20)(model.parameters(), ...).

        Jobs find the size by measuring their network (comm.bucket_size). Raises: ValueError for no size.
        """
        if type(bucket_elements) is not int or bucket_elements < 1:
            raise ValueError(
                f"bucket_elements = {bucket_elements!r}: what is sent at a time, a whole number, at least 1"
            )
        return type(cls.__name__, (cls,), {"bucket_elements": bucket_elements, "__doc__": cls.__doc__})

    def resumed(self) -> None:
        """As Algorithm.resumed."""
        self.begins = False
        self.set_ages(self.ages)
        self.is_out_of_phase = self.out_of_phase()
        changing.show(self)

    def send_beside(self) -> None:
        """As Algorithm.send_beside."""
        self.equalise_buffers()
        if self.begins and self.group.size > 1:
            self.begins = False
            sums, others = digest(self.common_parameters), beside.digests(self)
            all_others = refuse_apart(self.calls, self.group, sums, others, self.space.p_N.device)
            self._replicas.say_beside(self, all_others)
        self._replicas.begin(self)
        if not self.steps_beside:
            self.end_beside()

    def end_beside(self) -> None:
        """As Algorithm.end_beside: the comparison of replicas."""
        self._replicas.end(self)

    def prepare_to_save(self) -> None:
        """As Algorithm.prepare_to_save."""
        self.note_evidence()
        self._agree_on_load()
        self.clipping.forget()

    def _agree_on_load(self) -> None:
        """As shares.agree_on_load(). Then all ranks have one step of the last sync, by which replicas are compared."""
        if self.loaded is not None:
            shares.agree_on_load(self)
            self._replicas.resumed(self)

    def mean_gradient_(self) -> None:
        """g <- the mean gradient of all ranks, shortened to max_grad_norm. Raises: PeerLost, NonFiniteInput.

        RuntimeError where this is the second step in a row without a gradient, here and as it seems on all ranks.
        """
        self.overlap.complete(self.begin_mean, self.send_due)
        if self.steps_without_gradient > 1 and not self.space.g_N.any():
            raise RuntimeError(without_gradient(self.num_steps + 1, "any rank"))
        self.first.look_at_mean(self.space.g_N)
        self.space.take_unlike()
        self.space.shorten_gradient(self.max_grad_norm)

    def exchange_(self, plan: StepPlan) -> None:
        """What this plan exchanges, all of it: reduce.result has it until commit. Raises: PeerLost, NonFiniteInput."""
        self.overlap.complete(lambda: self._opened(plan), self.send_due)
        self.space.take_unlike()

    def _opened(self, plan: StepPlan) -> Exchange:
        """What this plan exchanges; where gradients are shortened in time, bucket by bucket."""
        exchange = self.begin_exchange(plan)
        if self.max_grad_norm is None or not (self.clips_in_time(plan) and self.clipping.is_known):
            return exchange
        return self.clipping.over(exchange, self.max_grad_norm)

    def _shorten(self, plan: StepPlan) -> None:
        """Shorten this rank's own gradient, or find how long it is where each bucket is shortened when it is sent."""
        if self.max_grad_norm is None:
            return
        if not self.overlaps:
            self.space.shorten_gradient(self.max_grad_norm)
            return
        self.clipping.measure()
        if not (self.clips_in_time(plan) and self.clipping.is_known):
            self.clipping.shorten_others(self.max_grad_norm)

    def set_global_batch(self, size: int) -> bool:
        """Say how many samples a step has over all ranks. Returns whether a warm-up begins again; here none does."""
        return False

    @property
    def saves(self) -> Saves:
        """What state_dict() gives: "together", which every rank must call, or "rank", which is rank_state_dict().

        "rank" is for trainers that save on rank 0 alone. Raises: ValueError for another value.
        """
        return self._saves

    @saves.setter
    def saves(self, value: Saves) -> None:
        if value not in ("together", "rank"):
            raise ValueError(f'saves = {value!r}: must be "together" or "rank"')
        self._saves: Saves = value

    @property
    def gradients(self) -> Gradients:
        """What step() leaves in p.grad: "own", this rank's where it was not exchanged in full, or "mean", of all ranks.

        "mean" is for what reads it there, as DistributedDataParallel leaves it (AdaLoRA). It is exchanged in full,
        beside what else a step sends, wherever that is not the mean. Raises: ValueError for another value, or with
        overlap.
        """
        return self._gradients

    @gradients.setter
    def gradients(self, value: Gradients) -> None:
        if value not in ("own", "mean"):
            raise ValueError(f'gradients = {value!r}: must be "own" or "mean"')
        if value == "mean" and self.overlaps:
            raise ValueError(
                'gradients = "mean" with overlap=True, which sends gradients where backward left them: leave out one'
            )
        self._gradients: Gradients = value

    @_disable_dynamo  # torch.compile of a step runs this as it is: to trace it would take minutes, for nothing
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step, collective: every rank calls it. After a full exchange p.grad holds the mean gradient.

        Raises: PeerLost, and NonFiniteInput unless such steps are skipped, as they are under a torch.amp.GradScaler;
        alike on every rank. Parameters, state and step count are then as before the call, bit for bit, error memory to
        rounding; gradients are not. With overlap also RuntimeError, for gradients that were written after they had
        been sent. Ctrl-C raises when the step is over, or where others are waited for (comm.signals): then it is undone
        too, and this rank has left the group, so that the others raise PeerLost.
        """
        try:
            if closure is not None and is_scaled(self):
                raise RuntimeError(
                    "a GradScaler calls step() with a closure: it has looked for infinity before the closure makes the "
                    "gradients. Train in bfloat16 (torch.autocast), which needs no scaler; or, where a closure is not "
                    "needed, call backward() before scaler.step(optimizer)"
                )
            loss = self.compute(closure)
            with self._reports_undone():
                if self.lost is not None:
                    raise self.lost
                with self.calling(f"step() {self.num_steps + 1}"):
                    self._step()
                    self.after_step()
        except BaseException:  # not where it was reported: then step() returns, and the scaler removes what it has set
            forget_scaler(self)
            raise
        return loss

    def _step(self) -> None:
        """Raises: as step(), and then parameters, state and step count are as before the call."""
        refuse_late_process_group(self.group)
        refuse_edited(self.state, self.param_groups, self.listed, self.space)
        if self.reader is not None and self.gradients == "own" and self.group.size > 1:
            own = self.compresses or self.space.box is not None or self.space.master_bytes > 0
            refuse_reader(self.reader, compresses=own)
        with self._told_in_box():
            self._agree_on_load()
            changing.follow_changes(self)
        space, overlap, self.lost_gradient = self.space, self.overlap, None
        try:
            with self._told_in_box():
                changing.refuse_held_back(self)
            self._gather_gradients()
            plan = self.plan(self.num_steps + 1)
            self.reduce.draw = self.num_steps
            with self._told_in_box():
                self.begin_beside(plan)
            self.first.look(plan, space.g_N, self.mean_wire, has_sent=overlap.has_launched)
            left_N = self._gradient_to_leave(plan)
            if plan.gradient is Wire.LOCAL:
                self._shorten(plan)
            self.update(plan, self.hypers(self.num_steps + 1))
        except NonFiniteInput as error:
            overlap.abandon()
            self.clipping.reset()
            space.clear_dead()
            if isinstance(error, Refused):
                changing.refuse_mismatch(self, "step()")  # raises, for they have changed there and not here
            else:
                overlap.refuse_written_shards(self.group)
            if not self.skips_non_finite:
                raise
            self.steps_skipped += 1
            logger.warning("step_skipped step=%d ranks=%s", self.num_steps + 1, list(error.ranks))
            self._tell_scaler(left_out=True)
            return
        except BaseException as error:
            self.clipping.reset()
            overlap.undo(error, self.reduce, self.group)
            if self.reduce.needs_lost_input:  # whoever calls zero_grad() or backward() before regroup()
                self.lost_gradient = space.g_N.clone()
            raise
        overlap.abandon()  # of a local step: nothing of it was sent
        self.num_steps += 1
        self.clipping.taken()
        if self.at_sync:
            self.handed_over = None
        space.equalise_copies()
        space.write_back()
        if left_N is not None:
            space.leave_gradients(left_N)
        self._tell_scaler(left_out=False)

    def _told_in_box(self) -> AbstractContextManager[None]:
        """A peer that is lost inside is told to the ranks of this box, who ask about that in the exchange to come."""
        return _NOTHING if self.reduce.agree is None else self._telling()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except CommError:
            if self.reduce.agree is not None:
                self.reduce.agree(LOST)
            raise

    def _gather_gradients(self) -> None:
        """Bring together what step() is given. Raises: ValueError, RuntimeError."""
        self.before_gradients()
        space, overlap = self.space, self.overlap
        space.take_changes()
        space.look_at_values()
        self.scaled = scaled = is_scaled(self)
        if scaled and overlap.exchange is not None:
            raise RuntimeError(
                "a GradScaler calls step() for the first time after gradients have been sent as they were, scaled: "
                "this step is left out; call zero_grad() and go on, they will be sent in step() from here on"
            )
        if not scaled:
            overlap.refuse_written()
        self.steps_without_gradient = self.steps_without_gradient + 1 if space.is_untouched else 0
        if self.steps_without_gradient in (1, 10, 100):
            logger.warning("no_gradient %s", without_gradient(self.num_steps + 1, f"rank {self.group.rank}"))
        space.gather_gradients(overlap.taken, self.left_where_they_are())
        refuse_orphans([space.tensors[i] for i in (*overlap.quiet, *space.quiet)], self.state)
        unscale_(space.g_N, self, space.first)
        overlap.look_at_shards()

    def _gradient_to_leave(self, plan: StepPlan) -> Tensor | None:
        """What step() is to leave in p.grad, float[N]; None: what is there. Collective where this plan has no mean."""
        if self.gradients == "own":
            return None
        if plan.gradient is Wire.FULL:
            return self.space.g_N
        mean_N = changing.mean_or_refusal(self.group, self.space.g_N)
        if self.max_grad_norm is not None:
            mean_N.mul_(shortening(self.space.norm(mean_N), self.max_grad_norm))
        return mean_N

    def _tell_scaler(self, *, left_out: bool) -> None:
        """With what it is owed: between two steps all have found a gradient not to be finite, and no scaler knows."""
        if is_scaled(self):
            left_out, self.owes_scaler = left_out or self.owes_scaler, False
            tell_scaler(self, left_out=left_out)

    @contextmanager
    def _reports_undone(self) -> Iterator[None]:
        """A step that is undone inside, for want of a peer or of a finite gradient, is reported to self.undone.

        So a loop that outlives its peers (workers/session) has its body run to the end also where a step in it was
        lost. Raises: what is raised inside, where there is nobody to report to, and all other errors.
        """
        try:
            yield
        except (PeerLost, NonFiniteInput) as error:
            if self.undone is None:
                raise
            self.undone(error)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, a backward only adds to gradients: for all micro-steps but the last. Only overlap needs it."""
        return self.overlap.suspended()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the flat gradient. Gradients stay views of it, whatever `set_to_none` says: backward adds into them.

        Those of bfloat16 and float16 parameters are no views, and become None or zero, as in torch.optim. With overlap
        all become None where set_to_none: a hook takes each when backward has made it, into the flat gradient or, for
        a compressed step, where it is. So do those of local steps of torch's own optimizers on a CPU. And what a
        backward has sent that no step() followed is undone first: a collective that all ranks call. Parameters and
        state are as before that backward, error memory to rounding. Raises: PeerLost.
        """
        if self.overlap.exchange is not None:
            with self._reports_undone(), self.calling(f"zero_grad() after step {self.num_steps}"):
                self.overlap.abandon()
        else:
            self.overlap.abandon()
        self.clipping.reset()
        for param in changing.others(self):
            param.grad = None
        if set_to_none and (self.overlaps or self.steps_on_left):
            self.space.drop_gradients()
        else:
            self.space.zero_gradients(set_to_none)

    def refresh_master(self) -> None:
        """Take bfloat16 and float16 parameters that were written through `param.data` into their float32 masters.

        Needed where a few elements were written, once: other writes (model.load_state_dict, param.copy_, a whole tensor
        through `.data`) are seen by the next step without it, and by what saves. Local.
        """
        self.space.take_written()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: vectors and exchange are laid out anew. Collective, as the constructor.

        Its parameters begin at rank 0's values, with moments of zero that have seen no step. The others keep their
        state, and their error memory its R. After the freeze of a variance the warm-up begins again, for the new ones
        have none. Raises: ValueError, PeerLost, WireMismatch; then the groups are as before.
        """
        if not hasattr(self, "space"):  # torch's constructor is adding the groups that it was given
            super().add_param_group(param_group)
            self.listed = listed(self.param_groups)
            return
        changing.add_group(self, param_group, super().add_param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copy and pickle: the copy would step the same parameters. Raises: TypeError."""
        refuse_copy(self)

    def stats(self) -> dict[str, Any]:
        """Numbers for people and metrics: phase, steps, freeze, bytes sent by this rank's group, and held (memory)."""
        return {
            "phase": str(self.phase),
            "num_steps": self.num_steps,
            "frozen_at": self.frozen_at,
            "sent_bytes": self.reduce.stats.sent_bytes,
            "full_exchange": self.full_exchange,
            "topology": self.reduce.topology,
            "steps_skipped": self.steps_skipped,
            "bytes_per_parameter": bytes_per_parameter(self.space, self.reached()),
            **({"overlapped": self.overlap.report()} if self.overlaps else {}),
            **(self.error_lost or {}),
            **({} if self.model is None else {"buffer_bytes": self.buffers.given_bytes}),
            **self.evidence,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but the parameters, for any number of ranks. Collective: every rank calls it.

        Where `saves` is "rank" it is rank_state_dict(), not collective. Of low-precision parameters it has the masters.
        Error memory is saved as its residual R, and the live run goes on from R as a loaded run would: both are
        bit-equal from here. Hooks registered as torch.optim has them are called. Raises: PeerLost; then nothing has
        changed. CallMismatch where some ranks call it and others do not. RuntimeError where gradients are on their way
        (overlap).
        """
        if self.saves == "rank":
            return self.rank_state_dict()

        def prepare() -> None:
            if error_memories(self.vectors):  # else all of it is local
                self.refuse_to_be_alone()
            self.prepare_to_save()

        with self.calling(f"state_dict() after step {self.num_steps}", SAVE_EVERYWHERE):
            return self._saved("state_dict", prepare, saving.collect)

    def rank_state_dict(self) -> dict[str, Any]:
        """This rank's share of state_dict(), without a word to the others. Local: any rank may call it at any step.

        It is what state_dict() gives, but of the error memory only what this rank holds, and between syncs of 0/1 Adam
        what it has moved alone. The run goes on as if it had not been called, bit for bit.

        load_state_dict takes it on the same rank of as many ranks, and goes on bit-equal where every rank loads its
        own. thinwire.optim.saves.together makes a state_dict for any number of ranks of the shares of all. The share
        of rank 0 alone may be loaded by every rank of any number of them: whole but for R, which is said in the log.
        Raises: RuntimeError where gradients are on their way (overlap).
        """
        self.settle()
        return self._saved("rank_state_dict", self.note_evidence, saving.collect_share)

    def _saved(
        self, call: str, prepare: Callable[[], None], collect: Callable[[Algorithm[Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        self.overlap.refuse_between(call)
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self.space.refuse_changed()
        prepare()
        state_dict = collect(self)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict of the same optimizer and shapes, saved with any number of ranks. Local.

        Or from a rank_state_dict(): this rank's own, or that of rank 0. The next step then sees, once, whether all
        ranks have loaded what belongs together, and raises a ValueError on all of them where not.
        Raises: ValueError saying what differs; then nothing has changed. RuntimeError where gradients are on their way.
        """
        self.overlap.refuse_between("load_state_dict")
        self.settle()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self.loaded = saving.apply(self, state_dict)
        self.resumed()
        self._replicas.resumed(self)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def plain_state(self) -> dict[str, Any]:
        """All of state_dict() that is not a vector, as after synced_vectors(). Numbers, texts, lists and dicts."""
        return saving.plain(self)

    def connect_space(self) -> None:
        """As Algorithm.connect_space."""
        self.set_ages(self.ages)
        self.reduce = self.make_reducer(self.group)
        self.reduce.agree = None if self.space.box is None else self.space.box.least
        self.saved: dict[str, Any] = {}
        self.evidence: dict[str, Any] = {}
        self.owes_scaler = False
        if self.group.size > 1:
            beside.watch()
        self.buffers, self.beside_due, self._replicas = Buffers(self.model), False, Replicas()
        self.vectors: Any = self.make_state()
        self.begin()
        self.begun = copy.deepcopy(self.saved)
        self.laid_out = changing.laid_out_ids(self.param_groups, self.space)
        self.overlap = Overlap(self.space, self.reduce.buckets.spans, self._begin_early, hooks=self.overlaps)
        self.clipping = Clipping(self.space, self.overlap.num_buckets, self.overlap.first_buckets)

    def _begin_early(self) -> Exchange | str:
        """What hooks of the backward that begins now may send, or why they may not."""
        refuse_edited(self.state, self.param_groups, self.listed, self.space)
        if self.is_out_of_phase or not changing.is_laid_out(self):
            return "other parameters are trained than in the step before: step() lays them out anew"
        plan = self.plan(self.num_steps + 1)
        self.reduce.draw = self.num_steps
        self.clipping.reset()
        return self.waits_for(plan) or self._opened(plan)
