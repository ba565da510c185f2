"""When may the variance be frozen? The automatic end of warm-up, with its evidence.

    N_t = || v_t / (1 - beta2^t) ||_1           the bias-corrected norm, over all tensors
    r_t = min(N_t, N_{t-W}) / max(N_t, N_{t-W})
    freeze when r_t >= 0.96 in PASSES tests in a row, tested from lr_warmup_end + W on

The rule of Tang et al. 2021 (sec. 7.1) with three amendments: the corrected norm, for the raw one moves by more than
4 % for 3.8 / (1 - beta2) steps even under stationary gradients; the ratio both ways, for the norm may also rise; and,
where the length of the run is known, a window that fits into it and a cap. Reasons and measurements:
docs/algorithms.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

STABLE_RATIO = 0.96
PASSES = 5
"""Tests in a row that must hold: one alone may be a turning point."""
EARLIEST_FRACTION = 0.10
LATEST_FRACTION = 0.25
"""Of the run, where its length is known. Beyond it warm-up costs more bytes than it saves in loss."""
SHOWN = 200
"""Ratios kept as evidence; older ones are thinned out, every second one."""


class Verdict(StrEnum):
    """Why the variance was frozen."""

    RULE = "rule"
    CAP = "cap"


@dataclass(slots=True)
class VarianceStability:
    """The rule over one run. All its fields are plain values, saved with the optimizer.

    total_steps, lr_warmup_steps: of the run, where known. Without total_steps there is no cap and the window is
    1 / (1 - beta2); without lr_warmup_steps the warm-up of the rate ends at the last step at which a rate rose.
    """

    beta2: float
    total_steps: int | None = None
    lr_warmup_steps: int | None = None
    norms: list[float] = field(default_factory=list)
    """N_t of the last W + 1 steps, newest last."""
    passes: int = 0
    last_lrs: list[float] = field(default_factory=list)
    lr_rose_at: int = 0
    evidence: list[tuple[int, float]] = field(default_factory=list)
    """(step, r) of the tests so far, thinned."""
    stride: int = 1
    """Every so many tests one is kept as evidence."""

    @property
    def window(self) -> int:
        """W, in steps."""
        longest = max(1, round(1 / (1 - self.beta2)))
        return longest if self.total_steps is None else min(max(self.total_steps // 20, 10), longest)

    @property
    def lr_warmup_end(self) -> int:
        """The step at which the warm-up of the learning rate ends, as far as is known."""
        return self.lr_rose_at if self.lr_warmup_steps is None else self.lr_warmup_steps

    def observe(self, step: int, norm: float, lrs: list[float]) -> Verdict | None:
        """Take N_t of step `step` (from 1) and the groups' rates; the reason to freeze after it, or None.

        The same on every rank, for v and the rates are. Modifies the fields.
        """
        if any(now > before for now, before in zip(lrs, self.last_lrs or [0.0] * len(lrs), strict=True)):
            self.lr_rose_at = step
        self.last_lrs = list(lrs)
        self.norms.append(norm)
        del self.norms[: -(self.window + 1)]
        ratio = self._ratio()
        if ratio is not None and step >= self.lr_warmup_end + self.window:
            self.passes = self.passes + 1 if ratio >= STABLE_RATIO else 0
            self._keep(step, ratio)
        else:
            self.passes = 0
        if self.total_steps is not None and step >= max(1, round(LATEST_FRACTION * self.total_steps)):
            return Verdict.RULE if self._may_freeze(step) else Verdict.CAP
        return Verdict.RULE if self._may_freeze(step) else None

    def _may_freeze(self, step: int) -> bool:
        earliest = round(EARLIEST_FRACTION * self.total_steps) if self.total_steps is not None else 0
        return self.passes >= PASSES and step >= max(self.lr_warmup_end, earliest)

    def _ratio(self) -> float | None:
        if len(self.norms) <= self.window:
            return None
        old, new = self.norms[0], self.norms[-1]
        return min(old, new) / max(old, new) if max(old, new) > 0 else None

    def _keep(self, step: int, ratio: float) -> None:
        if step % self.stride == 0:
            self.evidence.append((step, ratio))
        if len(self.evidence) > SHOWN:
            self.stride *= 2
            self.evidence = [(s, r) for s, r in self.evidence if s % self.stride == 0]
