"""The part of an optimizer that follows its parameters: which are laid out, how old each is, what a change asks for.

What happens when other parameters are trained is in relayout.py. Here is when, and what an algorithm may have to say
about tensors that join: whether they can, and what brings them to the phase that the run is in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from thinwire.comm.codecs import SignCodec
from thinwire.comm.errors import CommError, Refused
from thinwire.comm.protocol import FullWire, Group, Reducer
from thinwire.optim.engine.ages import Age, Run, runs_of
from thinwire.optim.engine.buffers import Buffers
from thinwire.optim.engine.exchanges import Refusal
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.loss_scaling import is_scaled
from thinwire.optim.engine.overlap import Overlap
from thinwire.optim.engine.parameters import compute_dtype, describe, is_trained, refuse_other_models, send_frozen_
from thinwire.optim.engine.relayout import lay_out_anew, trained_ids
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.engine.state import error_memories, is_field, put, show_state, sizes
from thinwire.optim.engine.states import TensorState

if TYPE_CHECKING:  # it imports this module
    from thinwire.optim.engine.optimizer import FlatOptimizer


class ChangingOptimizer(torch.optim.Optimizer):
    """What FlatOptimizer knows of its parameters.

    ages, runs: what the moments of each tensor have seen (optim.engine.ages). frozen_states: the state of frozen
    parameters that were trained before.
    """

    shown: ClassVar[Mapping[str, str]] = {"m_N": "exp_avg", "v_N": "exp_avg_sq"}
    """What torch.optim calls the vectors that `state` shows, by field."""

    undone: Callable[[CommError], None] | None = None
    """Who is told of a step that was lost, in place of the caller of step() and zero_grad() (optim.engine.undone)."""

    error_lost: dict[str, float] | None = None
    """What the last regroup() after a death has lost of the error memory (optim.regroup); None before one."""

    fresh: ClassVar[Mapping[str, float]] = {}
    """What a tensor that was never trained begins with, by field, where that is not 0."""

    space: FlatSpace
    vectors: Any
    reduce: Reducer
    overlap: Overlap
    buffers: Buffers
    saved: dict[str, Any]
    evidence: dict[str, Any]
    begun: dict[str, Any]
    handed_over: dict[str, Tensor] | None
    num_steps: int
    frozen_at: int | None
    ages: list[Age]
    runs: list[Run]
    codec: ClassVar[SignCodec]
    frozen_states: dict[Tensor, TensorState]
    bucket_elements: int
    model: torch.nn.Module | None
    _group: Group
    _steps: dict[int, Tensor]
    """The count that `state` shows, by the steps that a tensor was not in."""
    _laid_out: list[list[int]]
    _has_misfits: bool
    _awaits_vectors = False
    _scaled: bool | None

    @property
    def group(self) -> Group:
        """The ranks that it exchanges with."""
        return self._group

    @abstractmethod
    def plan(self, step: int) -> StepPlan:
        """What step `step` (from 1) does, from what a checkpoint holds, the settings and the learning rates."""

    @abstractmethod
    def prepare_to_save(self) -> None:
        """Bring rank-local state into one that can be saved. Collective."""

    @abstractmethod
    def connect_space(self) -> None:
        """The exchange with the ranks of the group, then empty vectors."""

    @abstractmethod
    def send_beside(self) -> None:
        """What all ranks send in each step that sends something. Collective."""

    @abstractmethod
    def _begin_beside(self, plan: StepPlan) -> None: ...

    @abstractmethod
    def _send_beside(self) -> None: ...

    @contextmanager
    def awaiting_vectors(self) -> Iterator[None]:
        """Inside, replicated vectors of a new state are to be replaced before they are written (new_vector)."""
        self._awaits_vectors = True
        try:
            yield
        finally:
            self._awaits_vectors = False

    def new_vector(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros, float[N], for a replicated vector; where another takes its place at once, in memory of one of them."""
        p_N = self.space.p_N
        made = p_N.new_zeros(1 if self._awaits_vectors else p_N.numel(), dtype=dtype)
        return made.expand_as(p_N) if self._awaits_vectors else made

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
    @abstractmethod
    def mean_wire(self) -> FullWire:
        """How the mean gradient of the next step is sent, where it is."""

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

    def prepare_to_hand_over(self) -> None:
        """As prepare_to_save(); gradients may be written. Collective. Raises: as prepare_to_save."""
        self.prepare_to_save()

    def resumed(self) -> None:
        """After vectors, ages and saved values were set from outside: derive what follows from them. Local."""
        self.set_ages(self.ages)
        self._has_misfits = self.misfits()
        self._show()

    def send_frozen(self, groups: Sequence[dict[str, Any]]) -> None:
        """The frozen parameters of these groups <- rank 0's. Collective."""
        for param in (param for group in groups for param in group["params"] if not is_trained(param)):
            send_frozen_(self._group, param, self.space.p_N.device)

    def _refuse_other_models(self, call: str, settings: Sequence[str] = ()) -> None:
        header = f"{type(self).__name__} with blocks of {self.codec.block} and buckets of {self.bucket_elements}"
        every = [param for param_group in self.param_groups for param in param_group["params"]]
        device = next(filter(is_trained, every), every[0]).device
        changed = hasattr(self, "space") and not self._is_laid_out
        told = ["other parameters than in the step before"] if changed else []
        count = f"{len(self.param_groups)} parameter groups"
        lines = [header, count, *settings, *describe(self.param_groups), *told]
        if self.model is not None:
            lines += ["model= was given", *Buffers(self.model).lines()]
        refuse_other_models(self._group, f"an optimizer's {call}", lines, device)

    def _lay_out_anew(self, call: str) -> None:
        """Go on with the parameters that are trained now. Collective. Raises: as relayout.lay_out_anew."""
        self._refuse_other_models(call)
        compute_dtype(self.param_groups)
        lay_out_anew(cast("FlatOptimizer[Any]", self))

    @property
    def common_parameters(self) -> Tensor:
        """The parameters of step common_steps, float[N], the same on every rank; not a copy."""
        return self.space.p_N

    @property
    def _is_laid_out(self) -> bool:
        """Are the parameters that are trained now those that the flat vectors are of?"""
        return trained_ids(self.param_groups) == self._laid_out

    def others(self) -> list[Tensor]:
        """The parameters that are not in the flat vectors: frozen, or to join at the next step."""
        inside = {id(tensor.param) for tensor in self.space.tensors}
        return [param for group in self.param_groups for param in group["params"] if id(param) not in inside]

    def _show(self) -> None:
        """Let `state` show vectors and step counts as they are laid out now, and what was set aside."""
        self._steps = {missed: torch.tensor(float(self.num_steps - missed)) for missed in {a.missed for a in self.ages}}
        steps = [self._steps[age.missed] for age in self.ages]
        show_state(self.state, self.space, self.vectors, self.shown, steps)
        for param, state in self.frozen_states.items():
            parts = {told: state.values[name].view(param.shape) for name, told in self.shown.items()}
            self.state[param] = {"step": torch.tensor(float(state.steps)), **parts}

    def _follow_changes(self) -> None:
        """Where other parameters are trained than in the step before, go on with those. Collective where they are.

        Raises: PeerLost; WireMismatch where they changed on some ranks only, or otherwise; ValueError.
        """
        if not self._is_laid_out and self.overlap.exchange is None:  # what has begun to send is a step of the old ones
            self.overlap.abandon()
            self._refuse_step(self.plan(self.num_steps + 1))
            self._lay_out_anew("step()")
        if self._has_misfits:
            self.take_in()
            self._has_misfits = False

    def _refuse_step(self, plan: StepPlan) -> None:
        """Take no part in what ranks that go on as before exchange in this step: they find out why, and all raise.

        In a step without communication they do so at the next sync, where this rank waits for them.
        """
        if self._group.size == 1:
            return
        self._scaled = is_scaled(self)
        memories = list(error_memories(self.vectors).values())
        compressed = plan.gradient is not Wire.FULL and memories
        self._begin_beside(plan)
        if plan.gradient is Wire.LOCAL and plan.momentum is Wire.LOCAL:
            self.send_beside()
        try:
            self.overlap.complete(
                lambda: Refusal(self.reduce, memories[0] if compressed else None, self.mean_wire), self._send_beside
            )
        except Refused:
            return
        raise RuntimeError("an exchange that this rank refused was finished: a defect of thinwire; please report it")
