# ruff: noqa: D102 -- what each does is said once, where it is defined in optimizer.py
"""What the functions of this folder need of an optimizer; optimizer.py says what each is.

They take an OptimizerLike, so that they stand below the class that calls them and none imports it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from thinwire.comm.calls import Calls
from thinwire.comm.errors import CommError
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.groups.nodes import Topology
from thinwire.comm.protocol import Codec, FullWire, Group
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.buffers import Buffers
from thinwire.optim.engine.exchanges import Exchange
from thinwire.optim.engine.first_step import FirstStep
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.options import NonFinite
from thinwire.optim.engine.overlap import Overlap
from thinwire.optim.engine.schedule import StepPlan
from thinwire.optim.engine.share import Loaded
from thinwire.optim.engine.state import TensorState


class OptimizerLike(Protocol):
    """A FlatOptimizer, as far as laying out, stepping, saving and loading are concerned."""

    # torch.optim's
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    defaults: dict[str, Any]
    _optimizer_state_dict_pre_hooks: OrderedDict[int, Callable[..., Any]]
    _optimizer_state_dict_post_hooks: OrderedDict[int, Callable[..., Any]]
    _optimizer_load_state_dict_pre_hooks: OrderedDict[int, Callable[..., Any]]
    _optimizer_load_state_dict_post_hooks: OrderedDict[int, Callable[..., Any]]

    # settings
    codec: ClassVar[Codec]
    shown: ClassVar[Mapping[str, str]]
    fresh: ClassVar[Mapping[str, float]]
    narrow: tuple[str, ...]
    bucket_elements: int
    overlaps: bool
    max_grad_norm: float | None
    non_finite: NonFinite
    topology: Topology
    full_exchange: FullWire
    model: nn.Module | None
    undone: Callable[[CommError], None] | None

    # whom it exchanges with, and what
    group: Group
    calls: Calls
    space: FlatSpace
    reduce: Reducer
    vectors: Any
    overlap: Overlap
    buffers: Buffers
    first: FirstStep

    # where the run is
    num_steps: int
    frozen_at: int | None
    ages: list[Age]
    frozen_states: dict[Tensor, TensorState]
    saved: dict[str, Any]
    evidence: dict[str, Any]
    begun: dict[str, Any]
    handed_over: dict[str, Tensor] | None
    loaded: Loaded | None
    steps_skipped: int
    steps_without_gradient: int
    scaled: bool | None
    owes_scaler: bool
    beside_due: bool
    has_misfits: bool
    awaits_vectors: bool
    listed: list[int]
    laid_out: list[list[int]]
    shown_steps: dict[int, Tensor]

    @property
    def num_updates(self) -> int: ...
    @property
    def common_steps(self) -> int: ...
    @property
    def common_parameters(self) -> Tensor: ...
    @property
    def mean_wire(self) -> FullWire: ...
    @property
    def skips_non_finite(self) -> bool: ...
    @property
    def at_sync(self) -> bool: ...

    def plan(self, step: int) -> StepPlan: ...
    def update(self, plan: StepPlan, groups: Sequence[Any]) -> None: ...
    def hypers(self, step: int) -> list[Any]: ...
    def check_group(self, group: dict[str, Any]) -> None: ...
    def check_saved(self, saved: dict[str, Any]) -> None: ...
    def check_own(self, own: dict[str, Any]) -> None: ...
    def own_state(self) -> dict[str, Any]: ...
    def go_on_from(self, own: dict[str, Any], *, in_round: bool) -> None: ...
    def grown(self, saved: dict[str, Any]) -> dict[str, Any]: ...
    def gradient_weight(self, group: dict[str, Any]) -> float: ...
    def errors_of_gradients(self, loaded: Mapping[str, Any]) -> str | None: ...
    def common_vectors(self) -> dict[str, Tensor]: ...
    def fit_vectors(self) -> None: ...
    def note_evidence(self) -> None: ...
    def connect_space(self) -> None: ...
    def relaid(self, residuals: dict[str, Tensor]) -> None: ...
    def resumed(self) -> None: ...
    def take_in(self) -> None: ...
    def end_round_as(self, src: int) -> None: ...
    def prepare_to_save(self) -> None: ...
    def equalise_buffers(self) -> None: ...
    def before_gradients(self) -> None: ...
    def send_beside(self) -> None: ...
    def after_step(self) -> None: ...
    def waits_for(self, plan: StepPlan) -> str | None: ...
    def begin_exchange(self, plan: StepPlan) -> Exchange: ...
    def calling(self, call: str, remedy: str = "") -> AbstractContextManager[None]: ...
