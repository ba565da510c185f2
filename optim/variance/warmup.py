"""What 1-bit Adam, 1-bit LAMB and 0/1 Adam share: settings, scales, and a warm-up that ends with a frozen variance.

When it ends is in when_to_freeze.py, how the frozen variance stays up to date in refresh.py; that the warm-up begins
again after a large change of the global batch is here.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, Literal, Protocol, TypeVar, Unpack, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.kernels.bf16 import Noise, noise_of
from thinwire.comm.kernels.reference import Scale
from thinwire.comm.layout import BYTE, DEFAULT_BLOCK
from thinwire.comm.protocol import FullWire, Group, Reducer
from thinwire.optim import adam_math
from thinwire.optim.engine.hyperparameters import AdamHyper, refuse_no_count
from thinwire.optim.engine.optimizer import FlatOptimizer, State
from thinwire.optim.engine.options import Options
from thinwire.optim.engine.parameters import compute_dtype
from thinwire.optim.engine.scales import Scales, scaled_reducer
from thinwire.optim.engine.tensor_states import TensorState
from thinwire.optim.onebit_settings import OneBitSettings
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.variance.refresh import PART, checked_part, gap_after, weight_of
from thinwire.optim.variance.when_to_freeze import FEWEST_STEPS
from thinwire.optim.zero_one_settings import ZeroOneSettings

logger = logging.getLogger(__name__)

VARIANCE = 1 << 16
"""What numbers are drawn for here, beside those of comm.exchange.kept_sums."""
LARGE_CHANGE = 2
"""Of the global batch, up or down: the noise in v goes as one over it, so a frozen v is wrong by as much."""

Parity = Literal["deepspeed"]
"""Whose numbers are to be met, to rounding."""

Settings = TypeVar("Settings", OneBitSettings, ZeroOneSettings)


class HasVariance(Protocol):
    """A state with the variance that is going to be frozen."""

    v_N: Tensor


class CompressedOptions(Options, Generic[Settings], total=False):
    """The keywords of WarmupOptimizer, for the constructors that hand them on."""

    total_steps: int | None
    lr_warmup_steps: int | None
    parity: Parity | None
    settings: Settings | None
    bias_correction: bool
    refresh: float | None
    block: int
    scale: Scale


class WarmupOptimizer(FlatOptimizer[State], Generic[State, Settings]):
    """A FlatOptimizer whose warm-up ends with a frozen variance.

    1-bit Adam and 1-bit LAMB compress from there on, 0/1 Adam before it too (engine/schedule.py).

    total_steps, lr_warmup_steps: of the run, where known.
    parity: "deepspeed" gives the numbers of DeepSpeed 0.19.6. settings: where descriptions differ, one by one, in
    place of parity. bias_correction: False turns it off in any settings. ours, deepspeed: settings of the algorithm.
    refresh: the part of its age after which a frozen variance is brought up to date (refresh.py), above 0, at most 1.
    None: 1/16 where the optimizer finds the freeze by itself, and never where its step is given.
    block: values that share a scale, in our settings. scale: the norm that it keeps.
    options: as in FlatOptimizer.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        ours: Settings,
        deepspeed: Settings,
        total_steps: int | None = None,
        lr_warmup_steps: int | None = None,
        parity: Parity | None = None,
        settings: Settings | None = None,
        bias_correction: bool = True,
        refresh: float | None = None,
        block: int = DEFAULT_BLOCK,
        scale: Scale = "l2",
        **options: Unpack[Options],
    ) -> None:
        if parity not in (None, "deepspeed"):
            raise ValueError(f'parity = {parity!r}: must be "deepspeed" or None')
        if parity is not None and settings is not None:
            raise ValueError(
                f"parity = {parity!r} and settings = {settings}: give one of them; replace(...) of the settings that "
                "parity stands for changes a part"
            )
        chosen = settings or (ours if parity is None else deepspeed)
        self.settings: Settings = replace(chosen, bias_correction=chosen.bias_correction and bias_correction)
        self.refresh = checked_part(refresh)
        if refresh is not None and not chosen.refresh:
            raise ValueError(f"refresh = {refresh}: these settings (parity, or refresh=False) keep v as it was frozen")
        refuse_no_count("total_steps", total_steps, 1)
        refuse_no_count("lr_warmup_steps", lr_warmup_steps, 0)
        if type(block) is not int or block < BYTE or block % BYTE:
            raise ValueError(f"block = {block!r}: values that share a scale, a positive multiple of {BYTE}")
        self.total_steps = total_steps
        self.lr_warmup_steps = lr_warmup_steps
        self.block = block
        self.scale: Scale = scale
        super().__init__(params, defaults, **options)

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
    def can_begin_again(self) -> bool:
        """Does the algorithm, as it is set, have a way back to its warm-up?"""
        return True

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
        return self.settings.refresh and (self.refresh is not None or self.finds_freeze)

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

    @property
    def variance_noise(self) -> Noise:
        """What a frozen v in few bits is rounded by in this step: the same on every rank."""
        return noise_of(self.num_steps, VARIANCE)

    def keep_refreshed(self, step: int) -> Tensor:
        """Floor the v that `step` has brought up to date, and note it. Returns which elements were raised, bool[N]."""
        v_N, layout = cast(HasVariance, self.vectors).v_N, self.space.layout
        if self.settings.floor:
            raised_N = floor_variance_(v_N, layout.live, layout.blocks(self.block))
        else:
            raised_N = torch.zeros_like(v_N, dtype=torch.bool)
        self.evidence["floored_elements"] = int(raised_N.count_nonzero())
        self.evidence["variance_refreshes"] = self.evidence.get("variance_refreshes", 0) + 1
        self.saved["refreshed_at"] = step
        logger.info("variance_refreshed step=%d times=%d", step, self.evidence["variance_refreshes"])
        return raised_N

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
    def enough(self) -> int:
        """After so many updates a variance may be kept where the others have been frozen."""
        return FEWEST_STEPS

    def misfits(self) -> bool:
        """After the freeze: a tensor whose variance was not frozen with it."""
        return self.frozen_at is not None and any(age.unseen is not None for age in self.ages)

    def take_in(self) -> None:
        """After the freeze: a variance that has seen enough is kept now; where one has not, the warm-up begins again.

        Collective. Raises: PeerLost, NonFiniteInput, and then nothing has changed; ValueError where there is no way
        back.
        """
        seen = [None if age.unseen is None else self.num_updates - age.unseen for age in self.ages]
        self.keep({i: t for i, t in enumerate(seen) if t is not None and t >= self.enough})
        late = sum(age.unseen is not None for age in self.ages)
        if not late:
            return
        if not self.can_begin_again:
            raise ValueError(self._no_way_back("a parameter"))
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
        v_N, layout = cast(HasVariance, self.vectors).v_N, self.space.layout
        places = [slice(self.space.tensors[i].start, self.space.tensors[i].stop) for i in seen]
        if self.settings.bias_correction:
            for at, t in zip(places, seen.values(), strict=True):
                (group,) = [group for _, group in self.groups_in(at)]
                adam_math.unbias_variance_(v_N[at], group["betas"][1], t)
        raised_N = torch.zeros_like(v_N, dtype=torch.bool)
        if self.settings.floor and seen:
            floored_N = v_N.clone()
            floor_variance_(floored_N, layout.live, layout.blocks(self.block))
            for at in places:
                raised_N[at] = v_N[at] < floored_N[at]
                v_N[at] = floored_N[at]
        self.set_ages([replace(age, unseen=None) if i in seen else age for i, age in enumerate(self.ages)])
        return raised_N

    def refuse_arrivals(self, arrived: Mapping[str, TensorState | None]) -> None:
        """Raises: ValueError after the freeze, where there is no way back, for parameters without a variance."""
        if self.frozen_at is not None and not self.can_begin_again:
            for label, state in arrived.items():
                if state is None or (state.seen is not None and state.seen < self.enough):
                    raise ValueError(self._no_way_back(label))

    def _no_way_back(self, label: str) -> str:
        return (
            f"{label}: joins after step {self.frozen_at}, at which the variance was frozen, and has none. These "
            "settings have a gradient stage (DeepSpeed's), to which there is no way back: unfreeze or add it before "
            "that step, choose a later var_freeze_step, or leave out parity"
        )

    def make_reducer(self, group: Group | None, block: int) -> Reducer:
        """What exchanges the vectors, with scales as the settings say. Collective."""
        return scaled_reducer(
            self.settings.scales,
            group,
            self.space,
            self.param_groups,
            block,
            self.scale,
            self.bucket_elements,
            keeps=self.keeps,
            full=self.full_exchange,
            sums=self.sums,
            topology=self.topology_now,
        )

    def refuse_narrow(self) -> None:
        """As FlatOptimizer.refuse_narrow; in settings whose numbers are those of somebody else nothing is narrow."""
        super().refuse_narrow()
        if self.narrowed and self.settings.scales is not Scales.BLOCK:
            raise ValueError(
                f'{self.narrowed[0]} = "bf16": must be None with scales = {self.settings.scales.value!r}, which parity '
                "has: the numbers that are to be met are those of vectors in full"
            )
        if self.error_memory is not None and self.scale != "l2":
            raise ValueError(f'error_memory = "bf16": must be None with scale = {self.scale!r}')

    def choose_full_exchange(self, given: FullWire | None) -> FullWire:
        """As FlatOptimizer.choose_full_exchange; fp32 in settings whose numbers are those of somebody else.

        8 bits by default where the optimizer finds the freeze by itself: so its warm-up can be as long as v needs it.
        """
        if self.settings.scales is Scales.BLOCK:
            chosen = super().choose_full_exchange(given)
            may = self.finds_freeze and self.topology == "flat" and compute_dtype(self.param_groups) == torch.float32
            return "int8" if given is None and chosen == "fp32" and may else chosen
        if given not in (None, "fp32"):
            raise ValueError(
                f'full_exchange = {given!r}: must be "fp32" or None with scales = {self.settings.scales.value!r}, '
                "which parity has: the numbers that are to be met are those of means in full"
            )
        return "fp32"

    @torch.no_grad()
    def set_global_batch(self, size: int) -> bool:
        """Say how many samples a step has over all ranks, each time it changes. Every rank says the same.

        While the variance is frozen, a size LARGE_CHANGE times that of the freeze, or one over that, begins the warm-up
        again (begin_again). The first call, and those in warm-up, only note the size, as do all where there is no way
        back. Returns whether it began again. Collective where it does.
        Raises: ValueError; PeerLost, NonFiniteInput, and then nothing has changed.
        """
        if type(size) is not int or size < 1:
            raise ValueError(f"size = {size!r}: samples in a step over all ranks, a whole number, at least 1")
        before = self.saved.get("global_batch", size)
        fixed = self.frozen_at is None or not self.can_begin_again
        if fixed or max(size, before) < LARGE_CHANGE * min(size, before):
            if fixed or "global_batch" not in self.saved:
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
