"""What 1-bit Adam and 1-bit LAMB share: a dense warm-up that ends by count or by the automatic rule, and the freeze."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from math import inf
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.protocol import FullWire
from thinwire.optim import adam_math
from thinwire.optim.engine.algorithm import State
from thinwire.optim.engine.exchanges import Exchange, fused_momentum
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.schedule import StepPlan, Wire, onebit_adam_plan
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.variance.warmup import CompressedOptions, WarmupOptimizer, exchanged_scale
from thinwire.optim.variance.when_to_freeze import WARMUP_PART, FrozenBy, VarianceStability, memory_steps

logger = logging.getLogger(__name__)

HELD_OFF_AT = "held_off_at"
"""Among the saved values: the step at which the warm-up would have ended, and did not."""


class OneBitOptions(CompressedOptions, total=False):
    """The keywords of FreezingOptimizer, for the constructors that hand them on."""

    warmup: int | Literal["auto"]


class FreezingOptimizer(WarmupOptimizer[State]):
    """A WarmupOptimizer whose variance is frozen, corrected and floored, at the end of its warm-up.

    Its state has the momentum, which is exchanged from then on, and the error memory of that: momentum, m_N, v_N,
    momentum_error.

    warmup: uncompressed steps, at least 1; the step after them is the first compressed one. "auto" ends the warm-up
    when the variance has become stable (when_to_freeze.py); total_steps and lr_warmup_steps of the run sharpen it.
    After a large change of the global batch (set_global_batch) the warm-up begins again.
    options: as in WarmupOptimizer.
    """

    warmup_part: ClassVar[Mapping[FullWire, float]] = WARMUP_PART
    """Of a run that is shorter than what v remembers, by how full exchanges are sent."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        warmup: int | Literal["auto"] = "auto",
        **options: Unpack[CompressedOptions],
    ) -> None:
        self.warmup = _checked_warmup(warmup, options.get("total_steps"))
        self.stability: VarianceStability | None = None
        super().__init__(params, defaults, **options)

    def compression_begins(self) -> tuple[int, int | None, str]:
        """As WarmupOptimizer.compression_begins."""
        by, rule = f"warmup={self.warmup}", self.stability
        if rule is not None:
            return rule.earliest_end + 1, None if rule.latest_end is None else rule.latest_end + 1, by
        assert self.warmup != "auto"
        return self.warmup + 1, self.warmup + 1, by

    def begin(self) -> None:
        """Set what a fresh run begins with."""
        super().begin()
        if self.warmup == "auto":
            part = self.warmup_part[self.full_exchange]
            self.stability = VarianceStability(self.beta2, self.total_steps, self.lr_warmup_steps, part=part)

    @abstractmethod
    def advance(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step of the algorithm: modify parameters and vectors, or raise a CommError and change nothing."""

    def on_freeze(self, floored_N: Tensor, seen: Sequence[int | None]) -> None:
        """The variance has just been frozen. floored_N: bool[N], the elements that were raised.

        seen: the updates that each tensor's has had; None: it was kept as it is used already.
        """

    def holds_off(self) -> str | None:
        """Why not to compress now, though the rule would: in words. None: nothing speaks against it. Local.

        Asked where the rule ends the warm-up, and then every window of it.
        """
        return None

    @property
    def finds_freeze(self) -> bool:
        """With the automatic rule."""
        return self.warmup == "auto"

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """The mean gradient in warm-up; then the momentum, from what was received last where that is what m is."""
        s, g_N, reduce = self.vectors, self.space.g_N, self.reduce
        if plan.momentum is not Wire.COMPRESSED:
            return super().begin_exchange(plan)
        s.momentum.refuse_written()
        m_N = None if s.momentum.is_last_result else s.momentum.floats()
        # No bucket reaches across the ends of groups.
        beta1_K = [self.groups_in(slice(*span))[0][1]["betas"][0] for span in reduce.buckets.spans]
        return fused_momentum(reduce, s.momentum_error, g_N, beta1_K, m_N, self.exchanged_per_m)

    def plan(self, step: int) -> StepPlan:
        """The plan of step `step`, counted from 1."""
        return onebit_adam_plan(step, self._warmup_end(), self.frozen_at, refresh=self.is_refresh_due(step))

    def update(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step; where it ends the warm-up, the variance is corrected, floored and kept from here on."""
        now = self.num_steps + 1
        if self.frozen_at is not None and plan.update_variance:
            self.advance(plan, [self.refreshing(h, now) for h in groups])
            self.keep_refreshed(now)
            self.reduce.release_means()  # it is long until the next
            return
        if plan.momentum is Wire.COMPRESSED and (memory := self.vectors.momentum_error).is_behind:
            memory.restore(memory.residual())  # replicas that did not follow the warm-up's 8 bits
        self.advance(plan, groups)
        self.outlook.count(plan)
        if not (plan.freeze_variance or self._is_stable(plan, groups, now)):
            return
        self.reduce.release_means()  # it is long until the next, and what follows takes memory of its own
        v_N, layout = self.vectors.v_N, self.space.layout
        for h in groups:
            if h.seen is not None:
                adam_math.unbias_variance_(v_N[h.span], h.beta2, h.seen)
        floored_N = floor_variance_(v_N, layout.live, layout.blocks(self.floor_block))
        self.evidence["floored_elements"] = int(floored_N.count_nonzero())
        self.frozen_at = now
        self.on_freeze(floored_N, [None if age.unseen is None else now - age.unseen for age in self.ages])
        self.set_ages([replace(age, unseen=None) for age in self.ages])
        self._fit_variance()
        if self.full_exchange == "int8":
            self.count_errors_as_sent_("momentum_error", self.space.shortened_by)

    def dtype_of(self, name: str, frozen_at: int | None) -> torch.dtype:
        """As FlatOptimizer.dtype_of. In a warm-up v moves a little in each step, which few bits would not take."""
        narrow = name == "v_N" and "variance" in self.narrow and frozen_at is not None
        return torch.bfloat16 if narrow else super().dtype_of(name, frozen_at)

    def _fit_variance(self) -> None:
        """v in the type that it has from now on, to the nearest."""
        self.vectors.v_N = self.vectors.v_N.to(self.dtype_of("v_N", self.frozen_at))

    def waits_for(self, plan: StepPlan) -> str | None:
        """As FlatOptimizer.waits_for."""
        if plan.momentum is Wire.COMPRESSED and self.vectors.momentum_error.is_behind:
            return "the first compressed step brings the replicas of server errors up to date"
        return super().waits_for(plan)

    @property
    def gradient_memory(self) -> ErrorMemory | None:
        """In the warm-up the error memory of the momentum is that of the gradient, in units of it."""
        return self.vectors.momentum_error if self.full_exchange == "int8" and self.frozen_at is None else None

    def errors_of_gradients(self, loaded: Mapping[str, Any]) -> str | None:
        """As FlatOptimizer.errors_of_gradients."""
        return "momentum_error" if loaded["frozen_at"] is None else None

    def as_momentum_(self, residual_N: Tensor) -> None:
        """residual <- what it is in units of m, in place."""
        if (factor_T := self.exchanged_per_m) is not None:
            residual_N.div_(spread(factor_T, self.space.layout))

    def begin_again(self) -> None:
        """m <- m + R, R <- 0, so that nothing is lost; v goes on from the frozen one, uncorrected.

        It is frozen anew by the automatic rule from here on, or after min(warmup, 1 / (1 - beta2)) steps.
        Collective. Raises: PeerLost, and then nothing has changed.
        """
        self.overlap.refuse_between("set_global_batch")
        self._give_out(self.vectors.momentum_error.residual())
        for state in self.frozen_states.values():
            residual = state.values["momentum_error"]
            state.values["m_N"] = state.values["m_N"] + residual / exchanged_scale(state)
            residual.zero_()
        self.frozen_at = None
        self._fit_variance()
        if self.stability is not None:
            self.stability = self.stability.restarted(self.num_steps)

    def note_evidence(self) -> None:
        """Put the evidence of the automatic rule among the saved values."""
        if self.stability is not None:
            self.stability.read_norms()
            self.saved["stability"] = asdict(self.stability)

    def plain_state(self) -> dict[str, Any]:
        """As FlatOptimizer.plain_state, with the evidence of the automatic rule."""
        self.note_evidence()
        return super().plain_state()

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Refuse evidence that the automatic rule cannot go on from. Raises: ValueError."""
        super().check_saved(saved)
        evidence, known = saved.get("stability", {"beta2": 0.0}), {field.name for field in fields(VarianceStability)}
        if not isinstance(evidence, dict) or "beta2" not in evidence or not set(evidence) <= known:
            raise ValueError(f"state_dict has saved['stability'] = {evidence!r}, the rule needs {sorted(known)}")

    def with_added_groups(self, saved: dict[str, Any]) -> dict[str, Any]:
        """As FlatOptimizer.with_added_groups; the automatic rule looks at the norm of what is trained now."""
        rule = self.stability
        if rule is not None:
            rates = [*rule.last_lrs, *self.rates()[len(rule.last_lrs) :]]
            saved = {**saved, "stability": asdict(replace(rule, beta2=self.beta2, norms=[], passes=0, last_lrs=rates))}
        return super().with_added_groups(saved)

    @property
    def fewest_to_keep(self) -> int:
        """As many steps as the warm-up had, or as v remembers."""
        return min((self.frozen_at or 0) - self.warmup_from, memory_steps(self.beta2))

    def relaid(self, residuals: dict[str, Tensor]) -> None:
        """In a warm-up in full precision what comes back with R has it put into the momentum, as begin_again."""
        super().relaid(residuals)
        if self.frozen_at is None and self.full_exchange != "int8":
            self._give_out(residuals["momentum_error"].clone())

    def resumed(self) -> None:
        """As FlatOptimizer.resumed; the automatic rule goes on from its saved evidence."""
        super().resumed()
        if self.stability is not None and "stability" in self.saved:
            self.stability = VarianceStability(**self.saved["stability"])

    def stats(self) -> dict[str, Any]:
        """As FlatOptimizer.stats; with the automatic rule also its ratios as [step, ratio] and why it ended warm-up."""
        ratios = [] if self.stability is None else [list(pair) for pair in self.stability.evidence]
        return {**super().stats(), **({"variance_ratios": ratios} if ratios else {})}

    def _give_out(self, residual_N: Tensor) -> None:
        """m <- m + R, R <- 0. residual: R of the momentum, modified."""
        s = self.vectors
        m_N = s.m_N
        s.momentum_error.restore(torch.zeros_like(residual_N))
        self.handed_over = None  # what was handed over is in m from here on
        self.as_momentum_(residual_N)
        m_N.add_(residual_N)

    def _warmup_end(self) -> int | None:
        """The last step of the warm-up; None where the automatic rule finds it. Late tensors have one of their own."""
        if self.warmup == "auto":
            return None
        fewest = min(self.warmup, memory_steps(self.beta2))
        end = self.warmup_from + fewest if self.warmup_from else self.warmup
        return max([end, *(run.unseen + fewest for run in self.runs if run.unseen)])

    def _sums(self, x_N: Tensor, span: slice) -> Tensor:
        """Of each tensor in the span, float[t]."""
        inside = [tensor for tensor in self.space.tensors if span.start <= tensor.start < span.stop]
        return torch.stack([x_N[tensor.start : tensor.stop].sum() for tensor in inside])

    def _is_stable(self, plan: StepPlan, groups: Sequence[AdamHyper], now: int) -> bool:
        """Whether the automatic rule ends the warm-up after this step. Where it tests, it reads from the device."""
        if self.stability is None or not plan.update_variance:
            return False
        v_N = self.vectors.v_N
        corrections = [1.0 if h.seen is None else 1 - h.beta2**h.seen for h in groups]
        if self.space.box is None:
            norm = sum(v_N[h.span].sum() / of for h, of in zip(groups, corrections, strict=True))
        else:  # of whole tensors: the ranks of a box freeze at the same step
            parts = zip(groups, corrections, strict=True)
            norm = self.space.box.total(torch.cat([self._sums(v_N, h.span) / of for h, of in parts]))
        if now < self.saved.get(HELD_OFF_AT, -inf) + self.stability.window:
            self.stability.note(now, norm, self.rates())
            return False
        verdict = self.stability.observe(now, norm, self.rates())
        if verdict is None or any(run.unseen and now - run.unseen < self.stability.window for run in self.runs):
            return False
        if (why := self.holds_off()) is not None:
            self.saved[HELD_OFF_AT] = now
            if "compression_held_off" not in self.evidence:
                logger.warning("compression_held_off step=%d wire=%s reason=%s", now, self.full_exchange, why)
            self.evidence["compression_held_off"] = why
            return False
        self.evidence["warmup_ended_by"] = str(verdict)
        ratio = self.stability.evidence[-1][1] if self.stability.evidence else None
        level = logging.WARNING if verdict is FrozenBy.CAP else logging.INFO
        logger.log(level, "warmup_ended step=%d by=%s ratio=%s window=%d", now, verdict, ratio, self.stability.window)
        return True


def _checked_warmup(warmup: int | str, total_steps: int | None) -> int | Literal["auto"]:
    if warmup == "auto":
        return "auto"
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
        raise ValueError(f'warmup = {warmup!r}: the number of uncompressed steps, at least 1, or "auto"')
    if total_steps is not None and warmup >= total_steps:
        raise ValueError(f"warmup = {warmup}: must be less than total_steps = {total_steps}, or nothing is compressed")
    return warmup
