"""What an algorithm consists of: what it holds, and what it may do in its own way.

An algorithm gives three things: its state (`make_state`), what a step does (`plan`) and the step (`update`). All else
has a default here. FlatOptimizer (optimizer.py) makes an optimizer of it. The functions of this folder that lay out,
step, save and load take an Algorithm, so that they stand below the class that calls them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from thinwire.comm.calls import Calls, refuse_other_calls
from thinwire.comm.codecs import SignCodec
from thinwire.comm.default import default_reducer
from thinwire.comm.errors import CommError
from thinwire.comm.exchange.alone import Results
from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.groups.nodes import Topology
from thinwire.comm.keeps import Keeps
from thinwire.comm.protocol import Codec, FullWire, Group, LinearCodec
from thinwire.contract.hyperparameters import ADAM
from thinwire.optim.engine.ages import Age, Run, runs_of
from thinwire.optim.engine.buffers import Buffers
from thinwire.optim.engine.clipping import Clipping
from thinwire.optim.engine.exchanges import Exchange, mean_gradient, refusal
from thinwire.optim.engine.first_step import FirstStep
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.hyperparameters import AdamHyper, check_group
from thinwire.optim.engine.options import Gradients, NonFinite
from thinwire.optim.engine.overlap import Overlap
from thinwire.optim.engine.schedule import Phase, StepPlan, Wire
from thinwire.optim.engine.share import Loaded
from thinwire.optim.engine.state import (
    Shown,
    TensorState,
    entries_of,
    error_memories,
    is_field,
    put,
    replicated,
    sizes,
)

State = TypeVar("State")
"""An algorithm's vectors: a dataclass whose fields declare their Kind."""


class Algorithm(Generic[State]):
    """What functions of this folder know of a FlatOptimizer, and what an algorithm overrides."""

    # torch.optim's
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    defaults: dict[str, Any]

    gradients: Gradients

    # as in CheckedOptions
    overlaps: bool
    max_grad_norm: float | None
    non_finite: NonFinite
    topology: Topology
    full_exchange: FullWire
    model: nn.Module | None

    bucket_elements: int = 0
    """The most that is sent at a time; 0: 4 Mi values, on a GPU an eighth of all, from 4 Mi to 64 Mi. See sized()."""

    codec: Codec | LinearCodec = SignCodec()
    """How what is compressed is written."""

    results: ClassVar[Results] = "kept"
    """Does an exchange begin from the result of the one before? What one rank keeps follows from it."""

    narrow: tuple[str, ...] = ()
    """Which of "variance", "momentum" and "error_memory" are kept in bfloat16: an argument of 1-bit Adam and Muon."""

    shown: ClassVar[Mapping[str, str]] = {"m_N": "exp_avg", "v_N": "exp_avg_sq"}
    """What torch.optim calls the vectors that `state` shows, by field."""

    fresh: ClassVar[Mapping[str, float]] = {}
    """What a tensor that was never trained begins with, by field, where that is not 0."""

    lost_of_others: ClassVar[str] = (
        "what the other ranks moved their parameters since the last sync is missing; rank 0's move counts"
    )
    """What is said of their own_state() where the share of rank 0 alone is loaded."""

    sends_in_full: ClassVar[bool] = True
    """Does some step exchange the mean gradient in full?"""

    takes_closure: ClassVar[bool] = False
    """Does step() need a closure?"""

    undone: Callable[[CommError], None] | None = None
    """Called with the error of a lost step, which step() and zero_grad() then do not raise (workers/session).

    num_steps says whether the step stands: it counts one that does by then, as LocalSteps do, and no other."""

    lost: CommError | None = None
    """Why each step() is lost at once, unsent: what another optimizer of the same loop has lost with this batch."""

    lost_gradient: Tensor | None = None
    """The flat gradient of the step that lost a peer last, where that may have to be done again (Exchange.redone)."""

    error_lost: dict[str, float] | None = None
    """What the last regroup() after a death has lost of the error memory; None before one."""

    keeps: Keeps = Keeps.NOTHING
    """From the next regroup() on: what each rank keeps of the others, so that the death of one takes less of the error
    memory away. The same on every rank."""

    loses_what_is_behind: ClassVar[bool] = True
    """Is lost, where others have an exchange that this rank has not finished, what it has done since?"""

    inside: Optimizer | None = None
    """An optimizer whose steps are a part of this one's."""

    # what it exchanges, and with which ranks
    group: Group
    calls: Calls
    space: FlatSpace
    reduce: Reducer
    vectors: Any
    """Of the type that make_state() gives."""
    overlap: Overlap
    clipping: Clipping
    buffers: Buffers
    first: FirstStep
    scaled: bool | None
    """Does a GradScaler call step()? Not known before a step."""
    owes_scaler: bool
    beside_due: bool
    awaits_vectors: bool
    begins: bool
    """Have the ranks been made equal, and no step has been sent since?"""

    # where the run is
    frozen_at: int | None
    ages: list[Age]
    """What the moments of each tensor have seen."""
    runs: list[Run]
    """Neighbours of equal age."""
    frozen_states: dict[Tensor, TensorState]
    """Of the parameters that are not laid out."""
    is_out_of_phase: bool
    saved: dict[str, Any]
    """The algorithm's own small values: plain numbers and lists, part of the state_dict."""
    evidence: dict[str, Any]
    """What it found, such as elements floored at the freeze; saved, and shown in stats()."""
    begun: dict[str, Any]
    """What `saved` was at first."""
    handed_over: dict[str, Tensor] | None
    """R of each error memory by name, from when it was taken to the next step at which all hold the same."""
    loaded: Loaded | None
    steps_skipped: int
    steps_without_gradient: int
    """In a row, on this rank."""
    listed: list[int]
    laid_out: list[list[int]]
    shown_steps: dict[int, Tensor]
    """The count that `state` shows, by the steps that a tensor was not in."""

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

    def out_of_phase(self) -> bool:
        """Is there a tensor whose moments are not those of the phase that the run is in? The same on every rank."""
        return False

    def bring_into_phase(self) -> None:
        """Bring tensors that do not fit to the phase of the run, before its next step. Collective.

        Raises: PeerLost, and then nothing has changed.
        """

    def relaid(self, residuals: dict[str, Tensor]) -> None:
        """After the vectors were laid out anew: what to do with R of each error memory, which holds it. Local."""
        self.handed_over = residuals

    def with_added_groups(self, saved: dict[str, Any]) -> dict[str, Any]:
        """`saved` as it goes on after groups were added: lists with a value a group are as long as at a beginning."""
        longer = {k: v for k, v in self.begun.items() if isinstance(v, list) and len(v) > len(saved.get(k, v))}
        return {**saved, **{key: [*saved[key], *value[len(saved[key]) :]] for key, value in longer.items()}}

    def make_space(self) -> FlatSpace:
        """Flat vectors for the groups as they are, in which parameters and gradients lie from here on. Local."""
        return FlatSpace(self.param_groups)

    def own_settings(self) -> dict[str, Any]:
        """What every rank must have alike beside the hyperparameters of groups, by name: plain numbers and texts."""
        return {}

    def reached(self) -> list[object]:
        """What the vectors of this rank are reached from, beside parameters and gradient: what `stats` counts."""
        return [self.vectors, self.reduce, self.handed_over, list(self.frozen_states.values())]

    def kept_beside(self, param: Tensor) -> dict[Any, Any]:
        """What others keep of a parameter, such as an optimizer inside of this one; saved and handed on (added.py)."""
        return entries_of(self.state.get(param))

    def keep_beside(self, param: Tensor, entries: dict[Any, Any]) -> None:
        """Hold these in the place of kept_beside()."""
        before = self.state.get(param)
        if isinstance(before, Shown):
            for key in before.added():
                del before[key]
            before.update(entries)
        elif entries or before is not None:
            self.state[param] = entries

    def choose_full_exchange(self, given: FullWire | None) -> FullWire:
        """How the mean gradient is sent. Raises: ValueError where it cannot be sent as was asked."""
        if given is not None and not self.sends_in_full:
            mine = type(self).__name__
            raise ValueError(f"full_exchange = {given!r}: must be left out of {mine}, which exchanges nothing in full")
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
            cuts=self.cuts,
            keeps=self.kept_of_others,
            full=self.full_exchange,
            # Where ranks have come or gone boxes may differ.
            topology="auto" if self.topology == "node_first" and hasattr(self, "reduce") else self.topology,
            sums=torch.bfloat16 if "error_memory" in self.narrow else None,
            results=self.results,
        )

    @property
    def cuts(self) -> list[int]:
        """Positions that no bucket reaches across, in any order: the ends of parameter groups, for most."""
        return list(self.space.cuts)

    @property
    def kept_of_others(self) -> Keeps:
        """What ranks keep of each other's error memory: what is asked for, where signs are what is compressed."""
        return self.keeps if self.compresses and isinstance(self.codec, SignCodec) else Keeps.NOTHING

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

    def catch_up_(self, part_N: Tensor, plain: dict[str, Any], vectors: dict[str, Tensor], holders: int) -> None:
        """part <- this rank's part of R in the unit of ranks that have made a step more, which it is given. Local.

        plain, vectors: their plain_state() and replicated vectors. holders: ranks that hold a part. For most algorithms
        the unit is the same.
        """

    def compute(self, closure: Callable[[], float] | None) -> float | None:
        """First in step(): the gradients, by the user's closure where one was given. Returns the loss."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    @property
    def steps_on_left(self) -> bool:
        """Are gradients read where backward leaves them, and none is sent? Then zero_grad() drops them."""
        return False

    def left_where_they_are(self) -> Callable[[int, Tensor], bool] | None:
        """Of a step that gathers gradients: which of them stay where they are (FlatSpace.take_gradients). Local."""
        return None

    def before_gradients(self) -> None:
        """First in a step that gathers gradients: look at what must not have changed since the last. Local."""

    def after_step(self) -> None:
        """Last in a step that was taken, or left out. Local."""

    @abstractmethod
    def connect_space(self) -> None:
        """The exchange with the ranks of the group, then empty vectors. Raises before anything has changed."""

    @abstractmethod
    def resumed(self) -> None:
        """After vectors, ages and saved values were set from outside: derive what follows from them. Local."""

    @abstractmethod
    def send_beside(self) -> None:
        """First in a step that sends: buffers, at times what ranks hold. Collective. Raises: as equalise_buffers."""

    def begin_beside(self, plan: StepPlan) -> None:
        """Send what goes beside before anything else; where there are hooks of backward, after the last bucket.

        So that on the group all ranks have one order, however many buckets the hooks of each have launched. One that
        came with a regroup launches none in its first step.
        """
        self.beside_due = plan.gradient is not Wire.LOCAL or plan.momentum is Wire.COMPRESSED
        if not (self.overlaps and self.may_overlap(plan)):
            self.send_due()

    def may_overlap(self, plan: StepPlan) -> bool:
        """May hooks of some rank send a part of what this plan exchanges? The same on every rank."""
        return True

    def end_beside(self) -> None:
        """End what send_beside() has begun and not ended. Collective where it has. Raises: as send_beside()."""

    def send_due(self) -> None:
        """send_beside(), where this step has not done so yet. Collective."""
        if self.beside_due:
            self.beside_due = False
            self.send_beside()

    @abstractmethod
    def prepare_to_save(self) -> None:
        """Bring rank-local state into one that can be saved. Collective. Raises: PeerLost.

        ValueError where ranks have loaded shares that do not belong together (rank_state_dict).
        """

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

    @property
    def compresses(self) -> bool:
        """Does some step exchange another thing than the mean gradient?"""
        return type(self).begin_exchange is not Algorithm.begin_exchange

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """What this plan exchanges, opened; the mean gradient for most algorithms."""
        return self.begin_mean()

    def refuse_exchange(self, plan: StepPlan) -> Exchange:
        """In the place of begin_exchange(), or of the mean: this rank takes no part, and finish() raises Refused.

        Where ranks tell each other something before they exchange, it may be raised at once.
        """
        memories = list(error_memories(self.vectors).values())
        memory = memories[0] if plan.gradient is not Wire.FULL and memories else None
        return refusal(self.reduce, memory, self.mean_wire)

    def begin_mean(self) -> Exchange:
        """The mean gradient, opened."""
        return mean_gradient(self.reduce, self.space.g_N, self.gradient_memory, self.mean_wire)

    def clips_in_time(self, plan: StepPlan) -> bool:
        """Does this rank shorten its own gradient bucket by bucket, as hooks may send it? The same on every rank."""
        if self.max_grad_norm is None or not self.overlaps or self.scaled or self.group.size == 1:
            return False
        return plan.gradient is Wire.LOCAL and plan.momentum is Wire.COMPRESSED and self.may_overlap(plan)

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
        if self.clips_in_time(plan) and not self.clipping.is_known:
            return "max_grad_norm waits for a first norm: at first, and after a save or a change of ranks"
        return None

    @property
    def num_steps(self) -> int:
        """Steps taken, those that were left out not counted; state[p]["step"] is the same number as a tensor."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self._num_steps = value
        for missed, count in self.shown_steps.items():
            count.fill_(value - missed)

    @property
    def phase(self) -> Phase:
        """The phase of the next step."""
        return self.plan(self.num_steps + 1).phase

    @property
    def skips_non_finite(self) -> bool:
        """Is a step with a gradient that is not finite left out? By choice, or because a GradScaler called the last."""
        return self.non_finite == "skip" or bool(self.scaled)

    @property
    def at_sync(self) -> bool:
        """Do all ranks hold the same parameters now? A loop evaluates where they do, which then costs no byte."""
        return self.num_steps == self.common_steps

    @property
    def next_exchange(self) -> int:
        """The step in which ranks meet next, where nothing ends the round before."""
        return self.num_steps + 1

    @property
    def steps_beside(self) -> int:
        """Steps that are made while an exchange is under way; 0: each is waited for in the step that sends it."""
        return 0

    @property
    def at_round_end(self) -> bool:
        """Has a round ended with the last step, on all ranks, so that end_round() cuts none short?"""
        return self.at_sync

    @property
    def has_sent(self) -> bool:
        """Has the last step begun an exchange? What goes out beside others is of that one."""
        return self.at_round_end

    def end_round(self) -> None:
        """End a round of local steps now by its exchange: all ranks hold the same parameters. Collective.

        For most there is none to end so, and nothing is done. Raises: PeerLost, NonFiniteInput.
        """

    def settle(self) -> None:
        """Wait for an exchange that is under way between two steps. What it raises is raised by the next of them."""

    def equalise_buffers(self) -> None:
        """Buffers of model= <- rank 0's. Collective where there are any; every step that sends something does it.

        Raises: PeerLost, WireMismatch, ValueError where they are others than rank 0's; then none is written.
        """
        self.buffers.equalise_(self.group, self.space.p_N.device)

    @property
    def common_steps(self) -> int:
        """The last step at which all ranks held the same parameters."""
        return self.num_steps

    @contextmanager
    def calling(self, call: str, remedy: str = "") -> Iterator[None]:
        """Inside, this rank is in `call`, which ranks that wait for it learn. remedy: as in comm.calls.

        Where it leaves its group in there, as by Ctrl-C, it leaves its box too, whose ranks would wait for its word.
        """
        with self.calls.within(f"{type(self).__name__}.{call}", remedy):
            try:
                yield
            except BaseException:
                space: FlatSpace | None = getattr(self, "space", None)  # none yet in the constructor
                if self.calls.left and space is not None and space.box is not None:
                    space.box.leave(self.calls.left)
                raise

    def synced_vectors(self, group: Group, *, taking_part: bool, num_ranks: int) -> dict[str, Tensor]:
        """Of parameters (parameters_N) and replicated vectors those that a sync in full of the ranks that take part

        would change here; new, nothing is modified. group: in which these num_ranks are, and perhaps others, who give
        nothing. Collective where ranks hold something of their own. Raises: PeerLost.
        """
        return {}

    def refuse_to_be_alone(self) -> None:
        """Compare, before anything is changed, that all ranks are in the call that this one is in. Collective.

        For calls that could else be taken for a part of a step(), whose collectives are as long. Raises: CallMismatch,
        alike on every rank; PeerLost.
        """
        refuse_other_calls(self.group, self.calls.now, self.space.p_N.device, remedy=self.calls.remedy)
