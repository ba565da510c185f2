"""The torch.optim.Optimizer shell that all algorithms share: flat vectors, groups, steps, saving. No algorithm here.

An algorithm gives three things: its state (`make_state`), what a step does (`plan`) and the step (`update`).
"""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Self, TypeVar, Unpack

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of dynamo at once
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from thinwire.comm.calls import calls_of, refuse_other_calls
from thinwire.comm.default import given_or_default, refuse_late_process_group
from thinwire.comm.errors import CommError, NonFiniteInput, Refused
from thinwire.comm.keeps import Keeps
from thinwire.comm.layout import default_bucket
from thinwire.comm.protocol import Group
from thinwire.optim.engine import saving, shares
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.buffers import Buffers
from thinwire.optim.engine.claims import refuse_wrapped
from thinwire.optim.engine.exchanges import Exchange
from thinwire.optim.engine.first_step import FirstStep
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.hyperparameters import AdamHyper, check_adam_group
from thinwire.optim.engine.loss_scaling import forget_scaler, is_scaled, tell_scaler, unscale_
from thinwire.optim.engine.memory import bytes_per_parameter
from thinwire.optim.engine.options import CheckedOptions, Options, Saves
from thinwire.optim.engine.orphans import listed, refuse_edited, refuse_orphans
from thinwire.optim.engine.overlap import Overlap
from thinwire.optim.engine.parameters import compute_dtype, without_gradient
from thinwire.optim.engine.relayout import laid_out_ids
from thinwire.optim.engine.replicas import Replicas, settings
from thinwire.optim.engine.schedule import Phase, StepPlan, Wire
from thinwire.optim.engine.sending import SendingOptimizer
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.engine.undone import heeded

logger = logging.getLogger(__name__)

LOAD_EVERYWHERE = "call load_state_dict() on every rank, of the model and then of the optimizer, before the first step"
SAVE_EVERYWHERE = "call state_dict() on every rank and write what it returns on one, or rank_state_dict() on one alone"

State = TypeVar("State")
"""An algorithm's vectors: a dataclass whose fields declare their Kind."""


class FlatOptimizer(SendingOptimizer, Generic[State]):
    """An optimizer whose parameters, gradients and state are flat vectors.

    params: parameters, (name, parameter) pairs, or groups of either. float64, or float32 mixed with bfloat16 and
    float16, which get a master in float32 (optim.engine.flat). Those that require no gradient are frozen: they are left
    out of every step. Which do is looked at in each step() (optim.engine.relayout).
    group, max_grad_norm, non_finite, overlap, model, full_exchange, topology: as in CheckedOptions
    (optim.engine.options).

    Attributes for readers: space (FlatSpace), reduce (Reducer), vectors (the algorithm's state), num_steps, frozen_at,
    ages and runs (what the moments of each tensor have seen, optim.engine.ages), frozen_states (optim.engine.states),
    saved (the algorithm's own small values: plain numbers and lists, part of the state_dict), evidence (what it found,
    such as elements floored at the freeze; saved, and shown in stats()), begun (what `saved` was at first), handed_over
    (R of each error memory by name, from when it was taken to the next step at which all hold the same).
    """

    bucket_elements: int = 0
    """The most that is sent at a time; 0: 4 Mi values, on a GPU an eighth of them all, from 4 Mi to 64 Mi. See sized().
    """

    keeps: Keeps = Keeps.NOTHING
    """From the next regroup() on: what each rank keeps of the others, so that the death of one takes less of the error
    memory away. The same on every rank."""

    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler: see optim/engine/loss_scaling.py

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        checked = CheckedOptions.of(self, options)
        super().__init__(params, defaults)
        self.bucket_elements = self.bucket_elements or _bucket_of(p for g in self.param_groups for p in g["params"])
        self.overlaps = checked.overlap
        self.max_grad_norm = checked.max_grad_norm
        self.non_finite = checked.non_finite
        self.saves = "together"
        self.model = checked.model
        self.take_exchange(checked)
        self.steps_skipped = self._steps_without_gradient = 0  # the latter in a row, on this rank
        self._scaled: bool | None = None  # not known before a step
        self._steps: dict[int, Tensor] = {}  # the count that `state` shows, by the steps that a tensor was not in
        self.ages, self.frozen_states = [], {}
        self._has_misfits = False
        self.num_steps = 0
        self.frozen_at: int | None = None
        self.handed_over: dict[str, Tensor] | None = None
        self._loaded: shares.Loaded | None = None
        self._group = given_or_default(checked.group)
        self._calls = calls_of(self._group)
        if self.model is not None:
            refuse_wrapped(self.model, self.param_groups)
        self._first = FirstStep(self)
        with self.calling("__init__()"):
            self._lay_out("__init__()")

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

    @abstractmethod
    def make_state(self) -> State:
        """The algorithm's vectors, a dataclass whose fields declare their Kind."""

    def begin(self) -> None:
        """Set what a fresh run begins with in `saved` and `evidence`; space, reduce and vectors are new."""

    @abstractmethod
    def plan(self, step: int) -> StepPlan:
        """What step `step` (from 1) does, from what a checkpoint holds, the settings and the learning rates."""

    @abstractmethod
    def update(self, plan: StepPlan, groups: Sequence[Any]) -> None:
        """Do it: modify parameters and vectors, or raise a CommError and leave them as they were.

        num_steps is still that of the step before. The gradient is this rank's own; where the plan has Wire.FULL the
        algorithm calls mean_gradient_ for the common one.
        """

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters out of range. Raises: ValueError naming the field, its value and what is allowed."""
        check_adam_group(group)

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Refuse loaded values that the algorithm cannot go on from. Raises: ValueError."""

    def hyper(self, group: dict[str, Any], span: slice, seen: int | None = None) -> Any:
        """The hyperparameters of a group as they are now, with a slice that it owns and what that has seen."""
        beta1, beta2 = group["betas"]
        return AdamHyper(span, float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], seen)

    def hypers(self, step: int) -> list[Any]:
        """The hyperparameters of now in step `step`, of every run of tensors of equal age; what `update` is given."""
        return [self.hyper(self.param_groups[run.group], run.span, run.seen(step)) for run in self.runs]

    def note_evidence(self) -> None:
        """Put what is kept elsewhere among the saved values. Local. Nothing to do for most algorithms."""

    def send_beside(self) -> None:
        """First in a step that sends: buffers, at times what ranks hold. Collective. Raises: as equalise_buffers."""
        self.equalise_buffers()
        self._replicas.compare(self)

    def prepare_to_save(self) -> None:
        """Bring rank-local state into one that can be saved. Collective. Raises: PeerLost.

        ValueError where ranks have loaded shares that do not belong together (rank_state_dict).
        """
        self.note_evidence()
        self.agree_on_load()

    def own_state(self) -> dict[str, Any]:
        """What this rank alone holds since the last sync, as rank_state_dict() saves it: copies. For most nothing."""
        return {}

    def check_own(self, own: dict[str, Any]) -> None:
        """Refuse what own_state() cannot have given. Raises: ValueError."""
        if own:
            raise ValueError(f"state_dict has own {sorted(own)}, and this optimizer has nothing of one rank alone")

    def go_on_from(self, own: dict[str, Any], *, in_round: bool) -> None:
        """Hold what own_state() gave; where it is not in_round, as if the round had ended there. Local."""

    def common_vectors(self) -> dict[str, Tensor]:
        """What all ranks hold alike now, the parameters among it; not copies."""
        return {"parameters": self.space.p_N, **replicated(self.vectors)}

    def end_round_as(self, src: int) -> None:
        """End a round that not all ranks can go on with: all hold what `src` does. Collective. Raises: PeerLost."""

    def trust_load(self) -> None:
        """All ranks are known to have loaded the same: there is nothing to agree on. Local, on every rank."""
        self._loaded = None

    def agree_on_load(self) -> None:
        """Once after a load, see that all ranks have loaded what belongs together. Collective, a few bytes.

        Raises: ValueError, alike on every rank, where they do not; PeerLost.
        """
        if self._loaded is not None:
            self.space.take_changes()
            with self.calling(f"load_state_dict() of step {self.num_steps}", LOAD_EVERYWHERE):
                shares.agree(self, self._loaded)
            self._loaded = None

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """What this plan exchanges, opened; the mean gradient for most algorithms."""
        return self.begin_mean()

    def waits_for(self, plan: StepPlan) -> str | None:
        """Why nothing of this plan's exchange can be sent before step(); None where it can. The same on every rank."""
        if self._group.size == 1:
            return "one rank sends nothing"
        if self._loaded is not None:
            return "the first step after a load finds out whether the ranks have loaded what belongs together"
        if self._scaled is None:
            return "the first step finds out whether a GradScaler calls it"
        if self._scaled:
            return "a GradScaler's gradients are divided by their scale in step()"
        if plan.gradient is Wire.LOCAL and self.max_grad_norm is not None:
            return "max_grad_norm needs the whole gradient before the first bucket can be encoded"
        return None

    def mean_gradient_(self) -> None:
        """g <- the mean gradient of all ranks, shortened to max_grad_norm. Raises: PeerLost, NonFiniteInput.

        RuntimeError where this is the second step in a row without a gradient, here and as it seems on all ranks.
        """
        self.overlap.complete(self.begin_mean, self._send_beside)
        if self._steps_without_gradient > 1 and not self.space.g_N.any():
            raise RuntimeError(without_gradient(self.num_steps + 1, "any rank"))
        self._first.look_at_mean(self.space.g_N)
        self.space.shorten_gradient(self.max_grad_norm)

    def exchange_(self, plan: StepPlan) -> None:
        """What this plan exchanges, all of it: reduce.result has it until commit. Raises: PeerLost, NonFiniteInput."""
        self.overlap.complete(lambda: self.begin_exchange(plan), self._send_beside)

    @property
    def num_steps(self) -> int:
        """Steps taken, those that were left out not counted; state[p]["step"] is the same number as a tensor."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        for missed, count in self._steps.items():
            count.fill_(value - missed)

    def set_global_batch(self, size: int) -> bool:
        """Say how many samples a step has over all ranks. Returns whether a warm-up begins again; here none does."""
        return False

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return self.plan(self.num_steps + 1).phase

    @property
    def skips_non_finite(self) -> bool:
        """Is a step with a gradient that is not finite left out? By choice, or because a GradScaler called the last."""
        return self.non_finite == "skip" or bool(self._scaled)

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
    def at_sync(self) -> bool:
        """Do all ranks hold the same parameters now? A loop evaluates where they do, which then costs no byte."""
        return self.num_steps == self.common_steps

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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with heeded(self):
            try:
                with self.calling(f"step() {self.num_steps + 1}"):
                    self._step_once()
            except BaseException:
                forget_scaler(self)
                raise
        return loss

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, a backward only adds to gradients: for all micro-steps but the last. Only overlap needs it."""
        return self.overlap.suspended()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the flat gradient. Gradients stay views of it, whatever `set_to_none` says: backward adds into them.

        Those of bfloat16 and float16 parameters are no views, and become None or zero, as in torch.optim. With overlap
        all become None where set_to_none: a hook takes each when backward has made it, into the flat gradient or, for
        a compressed step, where it is. And what a backward has sent that no step() followed is undone first: a
        collective that all ranks call. Parameters and state are as before that backward, error memory to rounding.
        Raises: PeerLost.
        """
        if self.overlap.exchange is not None:
            with heeded(self), self.calling(f"zero_grad() after step {self.num_steps}"):
                self.overlap.abandon()
        else:
            self.overlap.abandon()
        for param in self.others():
            param.grad = None
        if self.overlaps and set_to_none:
            self.space.drop_gradients()
        else:
            self.space.zero_gradients(set_to_none)

    def equalise_buffers(self) -> None:
        """Buffers of model= <- rank 0's. Collective where there are any; every step that sends something does it.

        Raises: PeerLost, WireMismatch, ValueError where they are others than rank 0's; then none is written.
        """
        self.buffers.equalise_(self._group, self.space.p_N.device)

    def refresh_master(self) -> None:
        """Take bfloat16 and float16 parameters that were written through `param.data` into their float32 masters.

        Other ways to change them (model.load_state_dict, param.copy_) are seen by the next step without it. Local.
        """
        self.space.doubt_parameters()
        self.space.take_changes()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: vectors and exchange are laid out anew. Collective, as the constructor.

        Its parameters begin at rank 0's values, with moments of zero that have seen no step. The others keep their
        state, and their error memory its R. After the freeze of a variance the warm-up begins again, for the new ones
        have none. Raises: ValueError, PeerLost, WireMismatch; then the groups are as before.
        """
        if not hasattr(self, "space"):  # torch's constructor is adding the groups that it was given
            super().add_param_group(param_group)
            self._listed = listed(self.param_groups)
            return
        self.overlap.refuse_between("add_param_group")
        before = dict(self.__dict__)
        super().add_param_group(param_group)
        self._listed = listed(self.param_groups)
        try:
            with self.calling("add_param_group()"):
                if self.num_steps:
                    self.check_group(self.param_groups[-1])
                    self._lay_out_anew("add_param_group()")
                    self.send_frozen(self.param_groups[-1:])
                else:
                    self._lay_out("add_param_group()")
        except (ValueError, CommError):
            self.__dict__.update(before)
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copy and pickle: the copy would step the same parameters. Raises: TypeError."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it holds the model's own parameters and a group of "
            "ranks. Keep state_dict(), and load it into an optimizer made for the other model"
        )

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
            "bytes_per_parameter": bytes_per_parameter(self),
            **({"overlapped": self.overlap.told()} if self.overlaps else {}),
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
        with self.calling(f"state_dict() after step {self.num_steps}", SAVE_EVERYWHERE):
            return self._saved_by("state_dict", self._prepare_together, saving.collect)

    def rank_state_dict(self) -> dict[str, Any]:
        """This rank's share of state_dict(), without a word to the others. Local: any rank may call it at any step.

        It is what state_dict() gives, but of the error memory only what this rank holds, and between syncs of 0/1 Adam
        what it has moved alone. The run goes on as if it had not been called, bit for bit.

        load_state_dict takes it on the same rank of as many ranks, and goes on bit-equal where every rank loads its
        own. thinwire.optim.saves.together makes a state_dict for any number of ranks of the shares of all. The share
        of rank 0 alone may be loaded by every rank of any number of them: whole but for R, which is said in the log.
        Raises: RuntimeError where gradients are on their way (overlap).
        """
        return self._saved_by("rank_state_dict", self.note_evidence, saving.collect_share)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict of the same optimizer and shapes, saved with any number of ranks. Local.

        Or from a rank_state_dict(): this rank's own, or that of rank 0. The next step then sees, once, whether all
        ranks have loaded what belongs together, and raises a ValueError on all of them where not.
        Raises: ValueError saying what differs; then nothing has changed. RuntimeError where gradients are on their way.
        """
        self.overlap.refuse_between("load_state_dict")
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        self._loaded = saving.apply(self, state_dict)
        self.resumed()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @property
    def common_steps(self) -> int:
        """The last step at which all ranks held the same parameters."""
        return self.num_steps

    def calling(self, call: str, remedy: str = "") -> AbstractContextManager[None]:
        """Inside, this rank is in `call`, which ranks that wait for it are told. remedy: as in comm.calls."""
        return self._calls.within(f"{type(self).__name__}.{call}", remedy)

    def refuse_to_be_alone(self) -> None:
        """Compare, before anything is changed, that all ranks are in the call that this one is in. Collective.

        For calls that could else be taken for a part of a step(), whose collectives are as long. Raises: CallMismatch,
        alike on every rank; PeerLost.
        """
        calls = self._calls
        refuse_other_calls(self._group, calls.now, self.space.p_N.device, remedy=calls.remedy)

    def settled(self, group: Group, *, taking_part: bool, num_ranks: int) -> dict[str, Tensor]:
        """Of parameters (parameters_N) and replicated vectors those that a sync in full of the ranks that take part

        would change here; new, nothing is modified. group: in which these num_ranks are, and perhaps others, who give
        nothing. Collective where ranks hold something of their own. Raises: PeerLost.
        """
        return {}

    def plain_state(self) -> dict[str, Any]:
        """All of state_dict() that is not a vector, as after settled(). Numbers, texts, lists and dicts."""
        return saving.plain(self)

    def connect(self, group: Group, bucket_elements: int) -> None:
        """Exchange with other ranks from here on, with empty vectors: for optim.regroup, which fills them. Collective.

        Raises: PeerLost, WireMismatch; then everything is as before.
        """
        before = dict(self.__dict__)
        self._group, self._calls, self.bucket_elements = group, calls_of(group), bucket_elements
        try:
            self._refuse_other_models("regroup()")
            self.connect_space()
            self._show()
        except BaseException:  # a signal's too, which is handled where others are waited for
            self.__dict__.update(before)
            raise

    def _lay_out(self, call: str) -> None:
        """Space, exchange and state for the groups as they are. Raises before any parameter is touched."""
        for param_group in self.param_groups:
            self.check_group(param_group)
        compute_dtype(self.param_groups)
        self._refuse_other_models(call, [f"{name} = {value}" for name, value in settings(self).items()])
        self.frozen_states = {}
        self.space = FlatSpace(self.param_groups)
        self.ages = [Age()] * len(self.space.tensors)
        self.connect_space()
        self._show()
        self.reduce.broadcast_(self.space.p_N)
        self.space.write_back()
        self.send_frozen(self.param_groups)
        self.equalise_buffers()

    def connect_space(self) -> None:
        """The exchange with the ranks of the group, then empty vectors. Raises before anything has changed."""
        self.set_ages(self.ages)
        self.reduce = self.make_reducer(self._group)
        self.saved, self.evidence, self.owes_scaler = {}, {}, False
        self.buffers, self._beside_due, self._replicas = Buffers(self.model), False, Replicas()
        self.vectors = self.make_state()
        self.begin()
        self.begun = copy.deepcopy(self.saved)
        self._laid_out = laid_out_ids(self.param_groups, self.space)
        self.overlap = Overlap(self.space, self.reduce.buckets.spans, self._begin_early, hooks=self.overlaps)

    def _saved_by(
        self, call: str, prepare: Callable[[], None], collect: Callable[[FlatOptimizer[State]], dict[str, Any]]
    ) -> dict[str, Any]:
        self.overlap.refuse_between(call)
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self.space.take_changes()
        prepare()
        self.space.write_back()
        state_dict = collect(self)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def _prepare_together(self) -> None:
        if error_memories(self.vectors):  # else all of it is local
            self.refuse_to_be_alone()
        self.prepare_to_save()

    def _begin_early(self) -> Exchange | str:
        """What hooks of the backward that begins now may send, or why they may not."""
        refuse_edited(self.state, self.param_groups, self._listed)
        if self._has_misfits or not self._is_laid_out:
            return "other parameters are trained than in the step before: step() lays them out anew"
        plan = self.plan(self.num_steps + 1)
        self.reduce.draw = self.num_steps
        return self.waits_for(plan) or self.begin_exchange(plan)

    def _step_once(self) -> None:
        refuse_late_process_group(self._group)
        refuse_edited(self.state, self.param_groups, self._listed)
        self.agree_on_load()
        self._follow_changes()
        try:
            self._prepare_gradients()
            plan = self.plan(self.num_steps + 1)
            self.reduce.draw = self.num_steps
            self._begin_beside(plan)
            self._first.look(self, plan)
            if plan.gradient is Wire.LOCAL:
                self.space.shorten_gradient(self.max_grad_norm)
            self.update(plan, self.hypers(self.num_steps + 1))
        except NonFiniteInput as error:
            self.overlap.abandon()
            self.space.clear_dead()
            if isinstance(error, Refused):
                self._refuse_other_models("step()")  # raises, for they have changed there and not here
            if not self.skips_non_finite:
                raise
            self.steps_skipped += 1
            logger.warning("step_skipped step=%d ranks=%s", self.num_steps + 1, list(error.ranks))
            tell_scaler(self, left_out=True)
            return
        except BaseException as error:
            self.overlap.undo(error, self.reduce, self._group)
            raise
        self.overlap.abandon()  # of a local step: nothing of it was sent
        self.num_steps += 1
        if self.at_sync:
            self.handed_over = None
        self.space.write_back()
        tell_scaler(self, left_out=False)

    def _begin_beside(self, plan: StepPlan) -> None:
        """Send what goes beside before anything else; where hooks may have sent buckets already, after the last bucket.

        So that on the group all ranks have one order, however many buckets the hooks of each have launched.
        """
        self._beside_due = plan.gradient is not Wire.LOCAL or plan.momentum is Wire.COMPRESSED
        if not self.overlaps or self.waits_for(plan) is not None:
            self._send_beside()

    def _send_beside(self) -> None:
        if self._beside_due:
            self._beside_due = False
            self.send_beside()

    def _prepare_gradients(self) -> None:
        """Bring together what step() is given. Raises: ValueError, RuntimeError."""
        self.space.take_changes()
        self._scaled = scaled = is_scaled(self)
        if scaled and self.overlap.exchange is not None:
            raise RuntimeError(
                "a GradScaler calls step() for the first time after gradients have been sent as they were, scaled: "
                "this step is left out; call zero_grad() and go on, they will be sent in step() from here on"
            )
        if not scaled:
            self.overlap.refuse_written()
        self._steps_without_gradient = self._steps_without_gradient + 1 if self.space.is_untouched else 0
        if self._steps_without_gradient in (1, 10, 100):
            logger.warning("no_gradient %s", without_gradient(self.num_steps + 1, f"rank {self._group.rank}"))
        self.space.gather_gradients(self.overlap.taken)
        refuse_orphans([self.space.tensors[i] for i in self.space.quiet], self)
        unscale_(self.space.g_N, self)


def _bucket_of(params: Iterable[Tensor]) -> int:
    """Elements of a bucket for these parameters, where none were asked for."""
    known = [param for param in params if not is_lazy(param)]  # those are refused where vectors are laid out
    return default_bucket(sum(param.numel() for param in known), any(param.device.type == "cuda" for param in known))
