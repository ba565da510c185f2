"""The uncompressed baselines, on the same shell: the same buffers, exchange and bookkeeping, nothing compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

from torch.optim.optimizer import ParamsT

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.contract import hyperparameters
from thinwire.contract.hyperparameters import BETAS, EPS, LR, MOMENTUM, WEIGHT_DECAY
from thinwire.optim import adam_math, lamb_math
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.algorithm import State
from thinwire.optim.engine.hyperparameters import AdamHyper, adam_defaults, check_group
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.options import Options
from thinwire.optim.engine.saving import GRADIENT_ERROR
from thinwire.optim.engine.schedule import StepPlan, dense_plan
from thinwire.optim.engine.state import Replicated, Residual
from thinwire.optim.lamb_math import BOUNDS, LambBounds, tensor_segments


@dataclass(slots=True)
class AdamState:
    """Momentum and variance, and with full_exchange="int8" what 8 bits have left out of gradients."""

    m_N: Replicated
    v_N: Replicated
    gradient_error: Residual | None = None


class DenseOptimizer(FlatOptimizer[State]):
    """A FlatOptimizer that exchanges the gradient at every step, and nothing else."""

    @property
    def gradient_memory(self) -> ErrorMemory | None:
        """As FlatOptimizer.gradient_memory."""
        found: ErrorMemory | None = self.vectors.gradient_error
        return found

    def errors_of_gradients(self, loaded: Mapping[str, Any]) -> str | None:
        """As FlatOptimizer.errors_of_gradients."""
        return GRADIENT_ERROR

    def new_gradient_memory(self) -> ErrorMemory | None:
        """Empty, where 8 bits are sent."""
        return self.reduce.new_memory() if self.full_exchange == "int8" else None

    def plan(self, step: int) -> StepPlan:
        """Every step is dense."""
        return dense_plan(step)


class Adam(DenseOptimizer[AdamState]):
    """Adam with decoupled weight decay on the mean gradient: torch.optim.AdamW under data parallelism.

    params, lr, betas, eps, weight_decay: as in torch.optim.AdamW.
    group: the ranks (None: torch.distributed's default group, or this process alone). model, overlap, max_grad_norm,
    non_finite, full_exchange, topology: as in CheckedOptions (optim.engine.options).
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS.default,
        weight_decay: float = WEIGHT_DECAY.default,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay), **options)

    def make_state(self) -> AdamState:
        """Empty vectors."""
        return AdamState(self.new_vector(), self.new_vector(), self.new_gradient_memory())

    def update(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """Average the gradients, then Adam."""
        s, space = self.vectors, self.space
        self.mean_gradient_()
        for h in groups:
            p, g, m, v = (x[h.span] for x in (space.p_N, space.g_N, s.m_N, s.v_N))
            adam_math.step_(p, g, m, v, h, plan.bias_of(h.seen))


class Lamb(DenseOptimizer[AdamState]):
    """LAMB on the mean gradient: Adam's direction, scaled by ||x|| / ||u|| of each tensor.  [You et al. 2020, Alg. 2]

    bounds: max_coeff and min_coeff of that ratio (LambBounds); it is 1 for a tensor with a norm of 0.
    params, lr, betas, eps, weight_decay, group, max_grad_norm, non_finite, overlap, model, full_exchange, topology: as
    in Adam.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS.default,
        weight_decay: float = WEIGHT_DECAY.default,
        *,
        bounds: LambBounds = BOUNDS,
        **options: Unpack[Options],
    ) -> None:
        self.bounds = bounds
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay), **options)

    def make_state(self) -> AdamState:
        """Empty vectors."""
        return AdamState(self.new_vector(), self.new_vector(), self.new_gradient_memory())

    def set_ages(self, ages: Sequence[Age]) -> None:
        """As FlatOptimizer.set_ages, with the tensors of each run."""
        super().set_ages(ages)
        self.segments = tensor_segments(self.space, self.runs)

    def update(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """Average the gradients, then LAMB."""
        s, space = self.vectors, self.space
        self.mean_gradient_()
        for h, parts in zip(groups, self.segments, strict=True):
            lamb_math.step_(space.p_N, space.g_N, s.m_N, s.v_N, h, parts, self.bounds, plan.bias_of(h.seen))


@dataclass(frozen=True, slots=True)
class SgdHyper:
    """The hyperparameters of one parameter group, and the slice of the flat vectors that it owns."""

    span: slice
    lr: float
    momentum: float
    weight_decay: float


@dataclass(slots=True)
class SgdState:
    """Momentum, and with full_exchange="int8" what 8 bits have left out of gradients."""

    m_N: Replicated
    gradient_error: Residual | None = None


class SGD(DenseOptimizer[SgdState]):
    """SGD with momentum on the mean gradient, torch.optim.SGD under data parallelism: m <- mu m + g;  x <- x - lr m.

    momentum: mu, per group. weight_decay: coupled, added to the gradient, as torch.optim.SGD has it.
    params, lr, group, max_grad_norm, non_finite, overlap, model, full_exchange, topology: as in Adam.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    shown: ClassVar[Mapping[str, str]] = {"m_N": "momentum_buffer"}

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        momentum: float = MOMENTUM.default,
        weight_decay: float = WEIGHT_DECAY.default,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters out of range. Raises: ValueError."""
        check_group(group, hyperparameters.SGD)

    def hyper(self, group: dict[str, Any], span: slice, seen: int | None = None) -> SgdHyper:
        """The hyperparameters of a group, for this step. Its momentum takes no correction."""
        return SgdHyper(span, float(group["lr"]), group["momentum"], group["weight_decay"])

    def make_state(self) -> SgdState:
        """An empty vector."""
        return SgdState(self.new_vector(), self.new_gradient_memory())

    def gradient_weight(self, group: dict[str, Any]) -> float:
        """A gradient is added to the momentum as it is."""
        return 1.0

    def update(self, plan: StepPlan, groups: Sequence[SgdHyper]) -> None:
        """Average the gradients, then SGD."""
        m_N, space = self.vectors.m_N, self.space
        self.mean_gradient_()
        for h in groups:
            m_N[h.span].mul_(h.momentum).add_(space.g_N[h.span]).add_(space.p_N[h.span], alpha=h.weight_decay)
            space.p_N[h.span].add_(m_N[h.span], alpha=-h.lr)
