"""The steps of a run, as a job file or a script's optimizer says them, and how many are of which kind, by method.

Nothing is measured. Plans and sizes of buckets follow from it.

    full        the gradient in full: a warm-up step, or any step of a dense optimizer
    both        0/1 Adam: a step that moves the variance sends the gradient in full, and syncs
    compressed  one bit a value
    local       0/1 Adam between two syncs, local steps in a round: nothing is sent

With warmup = auto nobody knows when the variance will be stable. The earliest step that the rule allows is assumed, and
the latest is given too (optim/variance/when_to_freeze.py). Steps that bring a frozen variance up to date are full,
or both (optim/variance/refresh.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from thinwire.comm.wire.network import NO_FULL_STEPS, Exchange, FullSteps, FullWire
from thinwire.contract.hyperparameters import EVERY, PARTS
from thinwire.optim.engine.schedule import counted_interval, longest_interval, rate_interval
from thinwire.optim.variance.refresh import PART, gap_after, refreshes_between
from thinwire.optim.variance.when_to_freeze import LAMB_WARMUP_PART, WARMUP_PART, VarianceFreeze, VarianceStability
from thinwire.workers.rates import risen_and_fallen


@dataclass(frozen=True, slots=True)
class RunSteps:
    """Of one run. method: as a job file names its optimizer; where that compresses nothing, what the others would do.

    warmup: steps in full before the freeze, of 1-bit Adam and LAMB; None: they find it, or there is none.
    var_freeze_step, dense_steps, var_update_scaler, local_step_scaler, local_step_clipper: of 0/1 Adam.
    refresh: of all that freeze a variance.
    inner, every, parts, late: of local steps; of other methods every is what local steps would have by default. late:
    does the exchange run beside the steps after it? codec: of local steps and 1-bit SGD. own: keywords that the
    method's exchange is made with.
    lr_warmup_steps: in which the learning rate rises; then it falls as a cosine to `floor` of its peak, 1: stays.
    full_exchange: None: half, flat: low-precision parameters, topology flat, from which it follows.
    Raises: ValueError where these cannot stand together.
    """

    steps: int
    method: str
    lr_warmup_steps: int = 1
    floor: float = 1.0
    beta2: float = 0.999
    warmup: int | None = None
    refresh: float | None = None
    full_exchange: FullWire | None = None
    half: bool = False
    flat: bool = True
    var_freeze_step: int | None = None
    dense_steps: int | None = None
    var_update_scaler: int = 16
    local_step_scaler: int | None = None
    local_step_clipper: int | None = None
    inner: str | None = None
    every: int = EVERY.default
    parts: int = PARTS.default
    codec: str = "sign"
    late: bool = False
    own: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, most in (
            ("warmup", self.steps - 1),
            ("var_freeze_step", max(self.steps - 1, 1)),
            ("lr_warmup_steps", self.steps),
        ):
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name} = {value} in a run of {self.steps} steps: at most {most} is possible")

    @property
    def family(self) -> str:
        """The method whose steps may stand in for this run's: of local steps the inner optimizer."""
        return self.inner or self.method

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 1), of its peak."""
        return risen_and_fallen(step, self.steps, self.lr_warmup_steps, self.floor)


EXCHANGES = {"bf16": Exchange.FLAT_16, "int8": Exchange.FLAT_8}
MOST_LOOKED_AT = 20_000
"""Steps of a long run at which the gap between syncs is looked at; in between it is taken to be in proportion."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Steps of a run by kind. latest_warmup: where the end of the warm-up is assumed, its latest step; else None.

    refreshes: those of full and both after the freeze.
    """

    full: float
    both: float = 0.0
    compressed: float = 0.0
    local: float = 0.0
    latest_warmup: int | None = None
    refreshes: int = 0

    @property
    def warmup(self) -> float:
        """Steps in which the gradient crosses the wire in full."""
        return self.full + self.both

    @property
    def later(self) -> float:
        """All the others."""
        return self.compressed + self.local


def dense(run: RunSteps) -> Kinds:
    """A run that compresses nothing."""
    return Kinds(full=run.steps)


def full_wire(run: RunSteps, freeze: int | None) -> FullWire:
    """How full exchanges are sent. freeze: the step of it, where given; who finds it by itself chooses 8 bits."""
    if run.full_exchange is not None:
        return run.full_exchange
    if run.half:
        return "bf16"
    return "int8" if freeze is None and run.flat else "fp32"


def full_steps(run: RunSteps) -> FullSteps:
    """The part of the run's own steps that send the gradient in few bits, for which buckets are made smaller.

    Where the rule ends the warm-up it is the latest step that it allows: short runs come to that. Steps in fp32 do not
    count: a ring sends each bucket in pieces anyway.
    """
    if run.method in ("onebit_sgd", "onebit_muon", "local_steps", "cada", "sketched_sgd"):
        return NO_FULL_STEPS
    freeze = run.warmup
    if run.method == "zero_one_adam":
        freeze, kinds = run.var_freeze_step, zero_one(run)
    elif run.method in ("onebit_adam", "onebit_lamb"):
        kinds = one_bit(run, lamb=run.method == "onebit_lamb")
    else:
        freeze, kinds = 0, dense(run)
    wire = full_wire(run, freeze)
    if wire == "fp32":
        return NO_FULL_STEPS
    warmup = max(kinds.warmup, (kinds.latest_warmup or 0) + kinds.refreshes)
    return FullSteps(EXCHANGES[wire], min(warmup / run.steps, 1.0))


def one_bit(run: RunSteps, *, lamb: bool = False) -> Kinds:
    """1-bit Adam, or 1-bit LAMB. Where the run has another optimizer, with warmup = auto."""
    part, beta2 = run.refresh, run.beta2
    if run.warmup is not None:
        refreshes = 0 if part is None else refreshes_between(run.warmup, run.steps, beta2, part)
        full = run.warmup + refreshes
        return Kinds(full=full, compressed=run.steps - full, refreshes=refreshes)
    most = (LAMB_WARMUP_PART if lamb else WARMUP_PART)[full_wire(run, None)]
    rule = VarianceStability(beta2, run.steps, min(run.lr_warmup_steps, run.steps), part=most)
    latest = min(rule.latest_end or run.steps, run.steps)
    first = min(rule.earliest_end, latest)
    refreshes = refreshes_between(first, run.steps, beta2, part or PART)
    full = first + refreshes
    return Kinds(full=full, compressed=run.steps - full, latest_warmup=latest, refreshes=refreshes)


def local_steps(run: RunSteps) -> Kinds:
    """Local steps: a compressed one sends one part.

    The end of the run ends a round too; those that a checkpoint ends early are not counted.
    """
    sent = min(-(-run.steps // run.every) * run.parts, run.steps)
    return Kinds(full=0, compressed=sent, local=run.steps - sent)


def zero_one(run: RunSteps) -> Kinds:
    """0/1 Adam. Where the run has another optimizer, with the defaults of 0/1 Adam."""
    if run.steps < 2:
        return Kinds(full=run.steps)
    rise, most = min(run.lr_warmup_steps, run.steps - 1), WARMUP_PART[full_wire(run, run.var_freeze_step)]
    freeze = VarianceFreeze(run.beta2, run.var_freeze_step, run.steps, rise, most)
    dense_steps = freeze.dense_steps if run.dense_steps is None else run.dense_steps
    end = _first(lambda step: freeze.reason(step, 0, dense_steps) is not None, run.steps)
    dense_steps = min(dense_steps, end)
    between = end - dense_steps
    both = variance_steps(between, run.var_update_scaler)
    syncs, refreshes = _syncs(replace(run, full_exchange=None, half=False, flat=True), end)  # which it does not ask
    compressed = between - both + syncs - refreshes
    local = run.steps - end - syncs
    return Kinds(full=dense_steps, both=both + refreshes, compressed=compressed, local=local, refreshes=refreshes)


def variance_steps(steps: int, scaler: int) -> int:
    """How many of steps 1 to `steps` are in T_v of 0/1 Adam."""
    found, at, gap, left = 0, 1, 1, scaler
    while at <= steps:
        found += 1
        at += gap
        left -= 1
        if left == 0:
            gap, left = 2 * gap, scaler
    return found


@lru_cache(maxsize=16)
def _syncs(run: RunSteps, frozen_at: int) -> tuple[float, int]:
    """Steps after the freeze at which the sum of the updates is exchanged, and at how many of them v is refreshed."""
    beta2, part = run.beta2, run.refresh or PART
    follows = run.refresh is not None or run.var_freeze_step is None

    def interval(step: int) -> int:
        if run.local_step_scaler is not None:
            return counted_interval(step, frozen_at, run.local_step_scaler, longest)
        peak = run.rate(min(step, run.lr_warmup_steps))  # so far
        return rate_interval(run.rate(step), peak, longest)

    longest = run.local_step_clipper or longest_interval(run.steps, counted=run.local_step_scaler is not None)
    left = run.steps - frozen_at
    if left <= MOST_LOOKED_AT:
        syncs, last, refreshes, refreshed = 0, frozen_at, 0, frozen_at
        for step in range(frozen_at + 1, run.steps + 1):
            if step - last >= interval(step):
                syncs, last = syncs + 1, step
                if follows and step >= refreshed + gap_after(refreshed, beta2, part):
                    refreshes, refreshed = refreshes + 1, step
        return syncs, refreshes
    looked_at = [frozen_at + 1 + i * left // MOST_LOOKED_AT for i in range(MOST_LOOKED_AT)]
    found = left * sum(1 / interval(step) for step in looked_at) / MOST_LOOKED_AT
    refreshes = refreshes_between(frozen_at, run.steps, beta2, part) if follows else 0  # gaps between syncs are shorter
    return found, refreshes


def _first(holds: Callable[[int], bool], last: int) -> int:
    """The first step from 1 on at which it holds, if it then holds for good; `last` where it never does."""
    low, high = 1, last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
