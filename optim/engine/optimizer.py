"""The torch.optim.Optimizer shell that all algorithms share: flat vectors, groups, steps, saving. No algorithm here.

An algorithm gives three things: its state (`make_state`), what a step does (`plan`) and the step (`update`).
"""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Generic, Self, TypeVar, Unpack

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of dynamo at once
from torch.optim.optimizer import ParamsT

from thinwire.comm.calls import calls_of
from thinwire.comm.codecs import SignCodec
from thinwire.comm.default import default_reducer, given_or_default
from thinwire.comm.errors import CommError
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.groups.nodes import Topology
from thinwire.comm.keeps import Keeps
from thinwire.comm.protocol import Codec, FullWire, Group
from thinwire.contract.hyperparameters import ADAM
from thinwire.optim.engine import changing, saving, state_dicts, stepping
from thinwire.optim.engine.ages import Age, runs_of
from thinwire.optim.engine.buffers import Buffers
from thinwire.optim.engine.exchanges import Exchange, mean_gradient
from thinwire.optim.engine.first_step import FirstStep
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.hyperparameters import AdamHyper, check_group
from thinwire.optim.engine.loss_scaling import forget_scaler
from thinwire.optim.engine.options import CheckedOptions, Options, Saves, bucket_of, refuse_wrapped
from thinwire.optim.engine.orphans import listed
from thinwire.optim.engine.overlap import Overlap
from thinwire.optim.engine.parameters import without_gradient
from thinwire.optim.engine.relayout import laid_out_ids
from thinwire.optim.engine.replicas import Replicas
from thinwire.optim.engine.schedule import Phase, StepPlan, Wire
from thinwire.optim.engine.share import Loaded
from thinwire.optim.engine.state import TensorState, bytes_per_parameter, is_field, put, replicated, sizes

logger = logging.getLogger(__name__)

State = TypeVar("State")
"""An algorithm's vectors: a dataclass whose fields declare their Kind."""


class FlatOptimizer(torch.optim.Optimizer, Generic[State]):
    """An optimizer whose parameters, gradients and state are flat vectors.

    params: parameters, (name, parameter) pairs, or groups of either. float64, or float32 mixed with bfloat16 and
    float16, which get a master in float32 (optim.engine.flat). Those that require no gradient are frozen: they are left
    out of every step. Which do is looked at in each step() (optim.engine.relayout).
    group, max_grad_norm, non_finite, overlap, model, full_exchange, topology: as in CheckedOptions
    (optim.engine.options).

    Attributes for readers: group (the ranks), space (FlatSpace), reduce (Reducer), vectors (the algorithm's state),
    num_steps, frozen_at, ages and runs (what the moments of each tensor have seen), frozen_states (of those frozen),
    saved (the algorithm's own small values: plain numbers and lists, part of the state_dict), evidence (what it found,
    such as elements floored at the freeze; saved, and shown in stats()), begun (what `saved` was at first), handed_over
    (R of each error memory by name, from when it was taken to the next step at which all hold the same).
    """

    space: FlatSpace

    bucket_elements: int = 0
    """The most that is sent at a time; 0: 4 Mi values, on a GPU an eighth of all, from 4 Mi to 64 Mi. See sized()."""

    codec: ClassVar[Codec] = SignCodec()
    """How what is compressed is written."""

    narrow: tuple[str, ...] = ()
    """Which of "variance" and "error_memory" are kept in bfloat16: 1-bit Adam's argument."""

    shown: ClassVar[Mapping[str, str]] = {"m_N": "exp_avg", "v_N": "exp_avg_sq"}
    """What torch.optim calls the vectors that `state` shows, by field."""

    fresh: ClassVar[Mapping[str, float]] = {}
    """What a tensor that was never trained begins with, by field, where that is not 0."""

    undone: Callable[[CommError], None] | None = None
    """Who is told of a step that was lost, in place of the caller of step() and zero_grad() (stepping.heeded)."""

    error_lost: dict[str, float] | None = None
    """What the last regroup() after a death has lost of the error memory; None before one."""

    keeps: Keeps = Keeps.NOTHING
    """From the next regroup() on: what each rank keeps of the others, so that the death of one takes less of the error
    memory away. The same on every rank."""

    _step_supports_amp_scaling = True  # read by torch.amp.GradScaler: see optim/engine/loss_scaling.py

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **options: Unpack[Options]) -> None:
        checked = CheckedOptions.of(self, options)
        super().__init__(params, defaults)
        self.bucket_elements = self.bucket_elements or bucket_of(p for g in self.param_groups for p in g["params"])
        self.overlaps = checked.overlap
        self.max_grad_norm = checked.max_grad_norm
        self.non_finite = checked.non_finite
        self.saves = "together"
        self.model = checked.model
        self.topology: Topology = checked.topology
        self.full_exchange = self.choose_full_exchange(checked.full_exchange)
        self.steps_skipped = self.steps_without_gradient = 0  # the latter in a row, on this rank
        self.scaled: bool | None = None  # does a GradScaler call step()? Not known before a step
        self.shown_steps: dict[int, Tensor] = {}  # the count that `state` shows, by the steps that a tensor was not in
        self.ages: list[Age] = []
        self.frozen_states: dict[Tensor, TensorState] = {}
        self.has_misfits = self.awaits_vectors = False
        self.num_steps = 0
        self.frozen_at: int | None = None
        self.handed_over: dict[str, Tensor] | None = None
        self.loaded: Loaded | None = None
        self.group = given_or_default(checked.group)
        self.calls = calls_of(self.group)
        if self.model is not None:
            refuse_wrapped(self.model, self.param_groups)
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
        check_group(group, ADAM)

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

    def new_vector(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros, float[N], for a replicated vector; where another takes its place at once, in memory of one of them."""
        p_N = self.space.p_N
        made = p_N.new_zeros(1 if self.awaits_vectors else p_N.numel(), dtype=dtype)
        return made.expand_as(p_N) if self.awaits_vectors else made

    def dtype_of(self, name: str, frozen_at: int | None) -> torch.dtype:
        """Of a replicated vector, by field, where the variance was frozen then. That of the parameters for most."""
        return self.space.p_N.dtype

    def fit_vectors(self) -> None:
        """Have replicated vectors of the type that they are in now, where `frozen_at` was set from outside: zeros."""
        for name in sizes(self.vectors, 0):
            if is_field(self.vectors, name):
                vector, dtype = getattr(self.vectors, name), self.dtype_of(name, self.frozen_at)
                if vector.dtype != dtype:
                    put(self.vectors, name, torch.zeros_like(vector, dtype=dtype))

    @property
    def num_updates(self) -> int:
        """Updates that the variance has had: what Age.unseen is counted in."""
        return self.num_steps

    def set_ages(self, ages: Sequence[Age]) -> None:
        """Keep the age of each tensor, and find the runs of equal ones."""
        self.ages = list(ages)
        self.runs = runs_of(self.space.tensors, self.space.spans, self.ages)

    def misfits(self) -> bool:
        """Is there a tensor whose moments are not those of the phase that the run is in? The same on every rank."""
        return False

    def take_in(self) -> None:
        """Bring tensors that do not fit to the phase of the run, before its next step. Collective.

        Raises: PeerLost, and then nothing has changed.
        """

    def relaid(self, residuals: dict[str, Tensor]) -> None:
        """After the vectors were laid out anew: what to do with R of each error memory, which holds it. Local."""
        self.handed_over = residuals

    def grown(self, saved: dict[str, Any]) -> dict[str, Any]:
        """`saved` as it goes on after groups were added: lists with a value a group are as long as at a beginning."""
        longer = {k: v for k, v in self.begun.items() if isinstance(v, list) and len(v) > len(saved.get(k, v))}
        return {**saved, **{key: [*saved[key], *value[len(saved[key]) :]] for key, value in longer.items()}}

    def resumed(self) -> None:
        """After vectors, ages and saved values were set from outside: derive what follows from them. Local."""
        self.set_ages(self.ages)
        self.has_misfits = self.misfits()
        changing.show(self)

    def choose_full_exchange(self, given: FullWire | None) -> FullWire:
        """How the mean gradient is sent. Raises: ValueError where it cannot be sent as was asked."""
        every = [param for group in self.param_groups for param in group["params"]]
        return given or ("bf16" if all(param.dtype == torch.bfloat16 for param in every) else "fp32")

    def make_reducer(self, group: Group) -> Reducer:
        """What exchanges the vectors of self.space. Collective."""
        return default_reducer(
            group,
            self.space.layout,
            self.space.p_N,
            codec=self.codec,
            bucket_elements=self.bucket_elements,
            cuts=self.space.cuts,
            keeps=self.kept_of_others,
            full=self.full_exchange,
            # Where ranks have come or gone boxes may differ.
            topology="auto" if self.topology == "node_first" and hasattr(self, "reduce") else self.topology,
            sums=torch.bfloat16 if "error_memory" in self.narrow else None,
        )

    @property
    def kept_of_others(self) -> Keeps:
        """What ranks keep of each other's error memory: nothing where there is none, or it is of gradients."""
        return Keeps.NOTHING

    @property
    def gradient_memory(self) -> ErrorMemory | None:
        """What 8 bits leave out of the next mean gradient, in units of it; None where nothing is kept."""
        return None

    @property
    def mean_wire(self) -> FullWire:
        """How the mean gradient of the next step is sent, where it is.

        In place of 8 bits 16 where no error memory is of gradients: what is exchanged then goes into a variance that is
        seldom updated. That wants the size of small values too, and would find an error of long ago in a memory.
        """
        return "bf16" if self.full_exchange == "int8" and self.gradient_memory is None else self.full_exchange

    def errors_of_gradients(self, loaded: Mapping[str, Any]) -> str | None:
        """The name of the error memory whose R in this state_dict is that of gradients; None where there is none."""
        return None

    def groups_in(self, at: slice) -> list[tuple[slice, dict[str, Any]]]:
        """The parts of these elements of the flat vectors, each with the parameter group that owns it."""
        spans = zip(self.param_groups, self.space.spans, strict=True)
        parts = [(slice(max(at.start, span.start), min(at.stop, span.stop)), group) for group, span in spans]
        return [(part, group) for part, group in parts if part.start < part.stop]

    def gradient_weight(self, group: dict[str, Any]) -> float:
        """What a gradient counts in the momentum of this group: 1 - beta1."""
        return float(1 - group["betas"][0])

    def gradient_weights(self) -> Tensor:
        """The same of every element: float[N], 0 where none is."""
        return self.space.spread([self.gradient_weight(group) for group in self.param_groups])

    def catch_up_(self, part_N: Tensor, plain: dict[str, Any], vectors: dict[str, Tensor]) -> None:
        """part <- this rank's part of R in the unit of ranks that have made a step more, which it is given. Local.

        plain, vectors: their plain_state() and replicated vectors. For most algorithms the unit is the same.
        """

    def before_gradients(self) -> None:
        """First in a step that gathers gradients: look at what must not have changed since the last. Local."""

    def after_step(self) -> None:
        """Last in a step that was taken, or left out. Local."""

    def send_beside(self) -> None:
        """First in a step that sends: buffers, at times what ranks hold. Collective. Raises: as equalise_buffers."""
        self.equalise_buffers()
        self._replicas.compare(self)

    def prepare_to_save(self) -> None:
        """Bring rank-local state into one that can be saved. Collective. Raises: PeerLost.

        ValueError where ranks have loaded shares that do not belong together (rank_state_dict).
        """
        self.note_evidence()
        state_dicts.agree_on_load(self)

    def prepare_to_hand_over(self) -> None:
        """As prepare_to_save(); gradients may be written. Collective. Raises: as prepare_to_save."""
        self.prepare_to_save()

    def own_state(self) -> dict[str, Any]:
        """What this rank alone holds since the last sync, as rank_state_dict() saves it: copies. For most nothing."""
        return {}

    def check_own(self, own: dict[str, Any]) -> None:
        """Refuse what own_state() cannot have given. Raises: ValueError."""
        if own:
            raise ValueError(f"state_dict has own {sorted(own)}, and this optimizer has nothing of one rank alone")

    def go_on_from(self, own: dict[str, Any], *, in_round: bool) -> None:
        """Hold what own_state() gave; where it is not in_round, as if the round had ended there. Local."""

    @property
    def common_parameters(self) -> Tensor:
        """The parameters of step common_steps, float[N], the same on every rank; not a copy."""
        return self.space.p_N

    def common_vectors(self) -> dict[str, Tensor]:
        """What all ranks hold alike now, the parameters among it; not copies."""
        return {"parameters": self.space.p_N, **replicated(self.vectors)}

    def end_round_as(self, src: int) -> None:
        """End a round that not all ranks can go on with: all hold what `src` does. Collective. Raises: PeerLost."""

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """What this plan exchanges, opened; the mean gradient for most algorithms."""
        return self.begin_mean()

    def begin_mean(self) -> Exchange:
        """The mean gradient, opened."""
        return mean_gradient(self.reduce, self.space.g_N, self.gradient_memory, self.mean_wire)

    def waits_for(self, plan: StepPlan) -> str | None:
        """Why nothing of this plan's exchange can be sent before step(); None where it can. The same on every rank."""
        if self.group.size == 1:
            return "one rank sends nothing"
        if self.loaded is not None:
            return "the first step after a load finds out whether the ranks have loaded what belongs together"
        if self.scaled is None:
            return "the first step finds out whether a GradScaler calls it"
        if self.scaled:
            return "a GradScaler's gradients are divided by their scale in step()"
        if plan.gradient is Wire.LOCAL and self.max_grad_norm is not None:
            return "max_grad_norm needs the whole gradient before the first bucket can be encoded"
        return None

    def mean_gradient_(self) -> None:
        """g <- the mean gradient of all ranks, shortened to max_grad_norm. Raises: PeerLost, NonFiniteInput.

        RuntimeError where this is the second step in a row without a gradient, here and as it seems on all ranks.
        """
        self.overlap.complete(self.begin_mean, partial(stepping.send_due, self))
        if self.steps_without_gradient > 1 and not self.space.g_N.any():
            raise RuntimeError(without_gradient(self.num_steps + 1, "any rank"))
        self.first.look_at_mean(self.space.g_N)
        self.space.shorten_gradient(self.max_grad_norm)

    def exchange_(self, plan: StepPlan) -> None:
        """What this plan exchanges, all of it: reduce.result has it until commit. Raises: PeerLost, NonFiniteInput."""
        self.overlap.complete(lambda: self.begin_exchange(plan), partial(stepping.send_due, self))

    @property
    def num_steps(self) -> int:
        """Steps taken, those that were left out not counted; state[p]["step"] is the same number as a tensor."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        for missed, count in self.shown_steps.items():
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
        return self.non_finite == "skip" or bool(self.scaled)

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
        with stepping.heeded(self):
            try:
                with self.calling(f"step() {self.num_steps + 1}"):
                    stepping.step(self)
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
        stepping.clear_gradients(self, set_to_none)

    def equalise_buffers(self) -> None:
        """Buffers of model= <- rank 0's. Collective where there are any; every step that sends something does it.

        Raises: PeerLost, WireMismatch, ValueError where they are others than rank 0's; then none is written.
        """
        self.buffers.equalise_(self.group, self.space.p_N.device)

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
            self.listed = listed(self.param_groups)
            return
        changing.add_group(self, param_group, super().add_param_group)

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
            "bytes_per_parameter": bytes_per_parameter(
                self.space, [self.vectors, self.reduce, self.handed_over, list(self.frozen_states.values())]
            ),
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
        return state_dicts.together(self)

    def rank_state_dict(self) -> dict[str, Any]:
        """This rank's share of state_dict(), without a word to the others. Local: any rank may call it at any step.

        It is what state_dict() gives, but of the error memory only what this rank holds, and between syncs of 0/1 Adam
        what it has moved alone. The run goes on as if it had not been called, bit for bit.

        load_state_dict takes it on the same rank of as many ranks, and goes on bit-equal where every rank loads its
        own. thinwire.optim.saves.together makes a state_dict for any number of ranks of the shares of all. The share
        of rank 0 alone may be loaded by every rank of any number of them: whole but for R, which is said in the log.
        Raises: RuntimeError where gradients are on their way (overlap).
        """
        return state_dicts.of_rank(self)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict of the same optimizer and shapes, saved with any number of ranks. Local.

        Or from a rank_state_dict(): this rank's own, or that of rank 0. The next step then sees, once, whether all
        ranks have loaded what belongs together, and raises a ValueError on all of them where not.
        Raises: ValueError saying what differs; then nothing has changed. RuntimeError where gradients are on their way.
        """
        state_dicts.load(self, state_dict)

    @property
    def common_steps(self) -> int:
        """The last step at which all ranks held the same parameters."""
        return self.num_steps

    def calling(self, call: str, remedy: str = "") -> AbstractContextManager[None]:
        """Inside, this rank is in `call`, which ranks that wait for it are told. remedy: as in comm.calls."""
        return self.calls.within(f"{type(self).__name__}.{call}", remedy)

    def settled(self, group: Group, *, taking_part: bool, num_ranks: int) -> dict[str, Tensor]:
        """Of parameters (parameters_N) and replicated vectors those that a sync in full of the ranks that take part

        would change here; new, nothing is modified. group: in which these num_ranks are, and perhaps others, who give
        nothing. Collective where ranks hold something of their own. Raises: PeerLost.
        """
        return {}

    def plain_state(self) -> dict[str, Any]:
        """All of state_dict() that is not a vector, as after settled(). Numbers, texts, lists and dicts."""
        return saving.plain(self)

    def connect_space(self) -> None:
        """The exchange with the ranks of the group, then empty vectors. Raises before anything has changed."""
        self.set_ages(self.ages)
        self.reduce = self.make_reducer(self.group)
        self.saved: dict[str, Any] = {}
        self.evidence: dict[str, Any] = {}
        self.owes_scaler = False
        self.buffers, self.beside_due, self._replicas = Buffers(self.model), False, Replicas()
        self.vectors: Any = self.make_state()
        self.begin()
        self.begun = copy.deepcopy(self.saved)
        self.laid_out = laid_out_ids(self.param_groups, self.space)
        self.overlap = Overlap(self.space, self.reduce.buckets.spans, self._begin_early, hooks=self.overlaps)

    def _begin_early(self) -> Exchange | str:
        return stepping.begin_early(self)
