"""What 1-bit Adam, 1-bit LAMB and 0/1 Adam share: a warm-up that ends with a frozen variance.

When it ends is in when_to_freeze.py, how the frozen variance stays up to date in refresh.py; that the warm-up begins
again after a large change of the global batch is here.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.codecs import SignCodec
from thinwire.comm.kernels.bf16 import Noise, noise_of
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.layout import DEFAULT_BLOCK
from thinwire.comm.protocol import FullWire
from thinwire.contract.hyperparameters import LR_WARMUP_STEPS, REFRESH, TOTAL_STEPS
from thinwire.optim import adam_math
from thinwire.optim.engine.algorithm import State
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.options import Options
from thinwire.optim.engine.parameters import compute_dtype
from thinwire.optim.engine.saving import SHORTENED
from thinwire.optim.engine.schedule import StepPlan, Wire
from thinwire.optim.engine.state import TensorState
from thinwire.optim.variance import rare
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.variance.refresh import PART, gap_after, weight_of
from thinwire.optim.variance.when_to_freeze import FEWEST_STEPS

logger = logging.getLogger(__name__)

VARIANCE = 1 << 16
"""What numbers are drawn for here, beside those of comm.exchange.memory."""
LARGE_CHANGE = 2
"""Of the global batch, up or down: the noise in v goes as one over it, so a frozen v is wrong by as much."""
MOST_NAMED = 8
"""Tensors in one line of the log."""
RARE_ROWS = (
    "rare_rows step=%d tensors=%d: %s: so much of their gradient is zero in a step, and the variance of most rows is "
    "kept as few gradients have left it. Where the learning rate does not fall that has cost 1 %% of the loss; let it "
    "fall before the end, or take Adam (docs/algorithms.md, Rows that are rarely met)"
)
TRIAL = 20
"""A run of fewer steps is not worth a word: it is a trial."""


class CompressedOptions(Options, total=False):
    """The keywords of WarmupOptimizer, for the constructors that hand them on."""

    total_steps: int | None
    lr_warmup_steps: int | None
    refresh: float | None


@dataclass(slots=True)
class Outlook:
    """When compression can begin, and whether it did: logged at construction, and where a run ends before it did.

    What is known of one run; kept up to date by its optimizer, and read when that is gone. Nobody tells an
    optimizer that a run has ended: it is taken to have when the optimizer goes, or the process ends. Nothing is said of
    an end by an exception, of a handful of steps, nor where total_steps was known, for then compression does begin.

    begins: the first step that may be compressed. certain: will it begin in any run of the length that was given?
    steps: taken by this optimizer. compressed: has the variance been frozen?
    """

    begins: int = 0
    certain: bool = False
    steps: int = 0
    compressed: bool = False
    _process: int = field(default_factory=os.getpid)

    def count(self, plan: StepPlan) -> None:
        """A step more, of this plan."""
        self.steps += 1
        self.compressed |= Wire.COMPRESSED in (plan.momentum, plan.gradient)

    def warn_at_end_of(self, optimizer: object) -> None:
        """Say it when the optimizer goes or the process ends."""
        weakref.finalize(optimizer, _end, self)


class WarmupOptimizer(FlatOptimizer[State]):
    """A FlatOptimizer whose warm-up ends with a frozen variance.

    1-bit Adam and 1-bit LAMB compress from there on, 0/1 Adam before it too (engine/schedule.py). Its state has the
    variance, v_N.

    total_steps, lr_warmup_steps: of the run, where known.
    refresh: the part of its age after which a frozen variance is brought up to date (refresh.py), above 0, at most 1.
    None: 1/16 where the optimizer finds the freeze by itself, and never where its step is given.
    options: as in FlatOptimizer.
    """

    exchanged_times: ClassVar[str | None] = None
    """The field of the state, float[tensors], that the momentum is exchanged times; None: as it is."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        total_steps: int | None = None,
        lr_warmup_steps: int | None = None,
        refresh: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        for number, value in ((REFRESH, refresh), (TOTAL_STEPS, total_steps), (LR_WARMUP_STEPS, lr_warmup_steps)):
            number.check(value)
        self.refresh = refresh
        self._rates_before: list[float] = []
        self.total_steps = total_steps
        self.lr_warmup_steps = lr_warmup_steps
        super().__init__(params, defaults, **options)
        earliest, latest, by = self.compression_begins()
        self.outlook = Outlook(begins=earliest, certain=total_steps is not None)
        if self.group.rank == 0 and self.group.size > 1:
            log = "compression_begins earliest_step=%s latest_step=%s %s total_steps=%s"
            logger.info(log, earliest, latest, by, total_steps)
            self.outlook.warn_at_end_of(self)

    @abstractmethod
    def compression_begins(self) -> tuple[int, int | None, str]:
        """The first step that may be compressed, the last step that may be the first, if known; by what, in words."""

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Refuse steps that are none. Raises: ValueError."""
        for name in ("refreshed_at", "warmup_from"):
            step = saved.get(name, 0)
            if type(step) is not int or step < 0:
                raise ValueError(f"state_dict has saved[{name!r}] = {step!r}: must be a step, a whole number; damaged")

    def begin(self) -> None:
        """Set what a fresh run begins with."""
        self.evidence["floored_elements"] = 0

    @abstractmethod
    def begin_again(self) -> None:
        """Undo the freeze: v moves again after this step, and frozen_at is None. Collective.

        Raises: PeerLost, NonFiniteInput, and then nothing has changed.
        """

    @property
    @abstractmethod
    def finds_freeze(self) -> bool:
        """Does the optimizer find the step of the freeze by itself? Else v stays as it was, unless refresh is given."""

    @property
    def refreshed_at(self) -> int:
        """The step after which the frozen v was changed last: by the freeze, or brought up to date since."""
        return max(self.frozen_at or 0, int(self.saved.get("refreshed_at", 0)))

    @property
    def refreshes(self) -> bool:
        """Is the frozen v brought up to date at all?"""
        return self.refresh is not None or self.finds_freeze

    def is_refresh_due(self, step: int) -> bool:
        """Is the frozen v to be brought up to date in `step`? Where that sends nothing, it is in the next that does."""
        if self.frozen_at is None or not self.refreshes:
            return False
        last = self.refreshed_at
        return step >= last + gap_after(last - self.warmup_from, self.beta2, self.refresh or PART)

    def refreshing(self, h: AdamHyper, step: int) -> AdamHyper:
        """h with a beta2 that gives the gradient of `step` the weight of all steps since v was changed last."""
        age = step - self.warmup_from
        return replace(h, beta2=1 - weight_of(step - self.refreshed_at, age, h.beta2, self.refresh or PART))

    def seen_at_refresh(self) -> Tensor | None:
        """What v takes in the square of, float[N], where that is not the mean gradient g: in a refresh (rare.py)."""
        if self.frozen_at is None:
            return None
        return rare.seen_at_refresh(self.vectors.v_N, self.space.g_N, self.space.layout.live)

    def after_step(self) -> None:
        """As FlatOptimizer.after_step; the rates of this step are known at the freeze."""
        self._rates_before = self.rates()

    def give_touches_(self, v_N: Tensor, groups: Sequence[AdamHyper]) -> None:
        """At the freeze, v of rows that are rarely met (rare.py), in place; and say of which tensors, on rank 0.

        A warning where the rate does not fall just then: such rows take steps that are too long, which nothing makes up
        for. groups: as in rare.give_touches_.
        """
        given = {at.start: z for at, z in rare.give_touches_(v_N, self.space.g_N, self.space.layout.live, groups)}
        if not given:
            return
        found = [f"{t.label} ({given[t.start]:.0%})" for t in self.space.tensors if t.start in given]
        self.evidence["rare_rows"] = found
        falls = any(now < before for now, before in zip(self.rates(), self._rates_before, strict=False))
        if self.group.rank == 0:
            level = logging.INFO if falls else logging.WARNING
            logger.log(level, RARE_ROWS, self.num_steps + 1, len(found), ", ".join(found[:MOST_NAMED]))

    @property
    def variance_noise(self) -> Noise:
        """What a frozen v in few bits is rounded by in this step: the same on every rank."""
        return noise_of(self.num_steps, VARIANCE)

    def keep_refreshed(self, step: int) -> None:
        """Floor the v that `step` has brought up to date, and note it."""
        v_N, layout = self.vectors.v_N, self.space.layout
        raised_N = floor_variance_(v_N, layout.live, layout.blocks(self.floor_block))
        self.evidence["floored_elements"] = int(raised_N.count_nonzero())
        self.evidence["variance_refreshes"] = self.evidence.get("variance_refreshes", 0) + 1
        self.saved["refreshed_at"] = step
        logger.info("variance_refreshed step=%d times=%d", step, self.evidence["variance_refreshes"])

    @property
    def floor_block(self) -> int:
        """Values that have one floor under their variance: those that share a scale of signs."""
        return self.codec.block if isinstance(self.codec, SignCodec) else DEFAULT_BLOCK

    @property
    def beta2(self) -> float:
        """The largest of the groups: how long the variance remembers."""
        return max(float(group["betas"][1]) for group in self.param_groups)

    @property
    def warmup_from(self) -> int:
        """The step after which the present warm-up, or the one that the variance was frozen by, began."""
        return int(self.saved.get("warmup_from", 0))

    def rates(self) -> list[float]:
        """The learning rates of the groups, as they are now."""
        return [float(group["lr"]) for group in self.param_groups]

    @property
    def fewest_to_keep(self) -> int:
        """After so many updates a variance may be kept where the others have been frozen."""
        return FEWEST_STEPS

    def out_of_phase(self) -> bool:
        """After the freeze: a tensor whose variance was not frozen with it."""
        return self.frozen_at is not None and any(age.unseen is not None for age in self.ages)

    def bring_into_phase(self) -> None:
        """After the freeze: a variance that has seen enough is kept now; where one has not, the warm-up begins again.

        Collective. Raises: PeerLost, NonFiniteInput, and then nothing has changed.
        """
        seen = [None if age.unseen is None else self.num_updates - age.unseen for age in self.ages]
        self.keep({i: t for i, t in enumerate(seen) if t is not None and t >= self.fewest_to_keep})
        late = sum(age.unseen is not None for age in self.ages)
        if not late:
            return
        self.begin_again()
        now = self.num_steps
        self.saved["warmup_from"] = now
        self.evidence.setdefault("rearmed_for_late_tensors", []).append([now, late])
        self.evidence.pop("warmup_ended_by", None)
        logger.info("warmup_rearmed step=%d late_tensors=%d of=%d", now, late, len(self.ages))

    def keep(self, seen: Mapping[int, int]) -> Tensor:
        """Keep the variance of these tensors as it is used, from here on. Returns which elements were raised, bool[N].

        seen: the updates that each has had, by its number.
        """
        v_N, layout = self.vectors.v_N, self.space.layout
        places = [slice(self.space.tensors[i].start, self.space.tensors[i].stop) for i in seen]
        for at, t in zip(places, seen.values(), strict=True):
            (group,) = [group for _, group in self.groups_in(at)]
            adam_math.unbias_variance_(v_N[at], group["betas"][1], t)
        raised_N = torch.zeros_like(v_N, dtype=torch.bool)
        if seen:
            floored_N = v_N.clone()
            floor_variance_(floored_N, layout.live, layout.blocks(self.floor_block))
            for at in places:
                raised_N[at] = v_N[at] < floored_N[at]
                v_N[at] = floored_N[at]
        self.set_ages([replace(age, unseen=None) if i in seen else age for i, age in enumerate(self.ages)])
        return raised_N

    @property
    def exchanged_per_m(self) -> Tensor | None:
        """What the momentum is exchanged times, float[tensors]; None: as it is."""
        return None if self.exchanged_times is None else getattr(self.vectors, self.exchanged_times)

    def count_errors_as_sent_(self, name: str, shortened_by: Tensor | None) -> None:
        """R of this error memory, which is of gradients, is of what is sent from here on. Local.

        A gradient g is (1 - beta1) g of a momentum, and less where max_grad_norm has shortened it: as much as the last
        one. shortened_by: by what factor, 0-dim; None: by none. What is exchanged may be in another scale than m.
        """
        factor = self.saved[SHORTENED] = 1.0 if shortened_by is None else float(shortened_by)
        weight_N = self._as_sent(factor, self.exchanged_per_m)
        self.scale_errors_(name, weight_N, lambda group: self.gradient_weight(group) * factor)

    def scale_errors_(self, name: str, weight_N: Tensor, weight_of: Callable[[dict[str, Any]], float]) -> None:
        """R <- weight R, also what was handed over, and of frozen parameters by the weight of their group. Local."""
        getattr(self.vectors, name).scale_(weight_N)
        if self.handed_over is not None:  # not in place: a state_dict() that somebody keeps has the same tensors
            self.handed_over = {key: residual_N * weight_N for key, residual_N in self.handed_over.items()}
        of_param = {param: group for group in self.param_groups for param in group["params"]}
        for param, state in self.frozen_states.items():
            state.values[name] = state.values[name] * (exchanged_scale(state) * weight_of(of_param[param]))

    def catch_up_(self, part_N: Tensor, plain: dict[str, Any], vectors: dict[str, Tensor], holders: int) -> None:
        """As FlatOptimizer.catch_up_: what the others send is no gradient any more since the step that is missing."""
        if self.gradient_memory is not None and self.errors_of_gradients(plain) is None:
            per_m_T = None if self.exchanged_times is None else vectors[self.exchanged_times]
            part_N.mul_(self._as_sent(plain["saved"].get(SHORTENED, 1.0), per_m_T))

    def _as_sent(self, factor: float, per_m_T: Tensor | None) -> Tensor:
        """What a gradient, shortened by this factor, counts in what is sent: float[N]."""
        weight_N = self.gradient_weights().mul_(factor)
        return weight_N if per_m_T is None else weight_N.mul_(spread(per_m_T, self.space.layout))

    def choose_full_exchange(self, given: FullWire | None) -> FullWire:
        """As FlatOptimizer.choose_full_exchange.

        8 bits by default where the optimizer finds the freeze by itself: so its warm-up can be as long as v needs it.
        """
        chosen = super().choose_full_exchange(given)
        may = self.finds_freeze and self.topology == "flat" and compute_dtype(self.param_groups) == torch.float32
        return "int8" if given is None and chosen == "fp32" and may else chosen

    @torch.no_grad()
    def set_global_batch(self, size: int) -> bool:
        """Say how many samples a step has over all ranks, each time it changes. Every rank says the same.

        While the variance is frozen, a size LARGE_CHANGE times that of the freeze, or one over that, begins the warm-up
        again (begin_again). The first call, and those in warm-up, only note the size. Returns whether it began again.
        Collective where it does.
        Raises: ValueError; PeerLost, NonFiniteInput, and then nothing has changed.
        """
        if type(size) is not int or size < 1:
            raise ValueError(f"size = {size!r}: samples in a step over all ranks, a whole number, at least 1")
        before = self.saved.get("global_batch", size)
        moves = self.frozen_at is None
        if moves or max(size, before) < LARGE_CHANGE * min(size, before):
            if moves or "global_batch" not in self.saved:
                self.saved["global_batch"] = size
            return False
        with self.calling(f"set_global_batch() after step {self.num_steps}"):
            self.begin_again()
        now = self.num_steps
        self.saved.update(global_batch=size, warmup_from=now)
        self.evidence.setdefault("rearmed", []).append([now, before, size])
        self.evidence.pop("warmup_ended_by", None)
        logger.info("warmup_rearmed step=%d global_batch=%d was=%d", now, size, before)
        return True


def exchanged_scale(state: TensorState) -> float:
    """In which the momentum of a parameter that is not laid out is exchanged: k of LAMB."""
    return float(state.values.get("scaling_T", 1.0))


def _end(outlook: Outlook) -> None:
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if outlook.compressed or outlook.certain or outlook.steps < TRIAL:
        return
    if failed is not None or outlook._process != os.getpid():
        return
    logger.warning(
        "never_compressed steps=%d begins=%d: this run ended before compression could begin, so all of its steps sent "
        "gradients in full: give the optimizer total_steps, the length of the run, or a shorter warmup (0/1 Adam: "
        "fewer dense_steps)",
        outlook.steps,
        outlook.begins,
    )
