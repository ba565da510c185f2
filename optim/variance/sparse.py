"""The variance of 0/1 Adam: updated at each step of a dense start, then at few; corrected, floored, then frozen.

    d = sqrt(v_used) + eps;    v_used = floor(v / (1 - beta2^updates))

d divides steps, and is formed from v_used where it does. From the freeze on v is v_used. When that comes is in
when_to_freeze.py. The first update is used in its own step, for before it there is no v; one that leaves v zero
everywhere gives no scale and does not count, and until one counts v_used is infinite, so that nothing moves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.optim import adam_math
from thinwire.optim.engine.algorithm import State
from thinwire.optim.engine.hyperparameters import AdamHyper
from thinwire.optim.engine.schedule import StepPlan, Wire, ZeroOneSchedule
from thinwire.optim.variance.floor import floor_variance_
from thinwire.optim.variance.warmup import CompressedOptions, WarmupOptimizer
from thinwire.optim.variance.when_to_freeze import FEWEST_STEPS, WARMUP_PART, VarianceFreeze, rose

logger = logging.getLogger(__name__)


LEAST_RATE = 1e-30
"""One below it moves nothing, and counts as 0: float32 can hold neither its sums of momenta nor one over it."""
SETTINGS = {
    "fresh": "at_first",
    "bias_correction": True,
    "eps_outside": True,
    "floor": True,
    "as_momentum": True,
    "slowest_fall": 0.0,
    "longest_step": 4.0,
    "decay": "of_sum",
    "gradient_stage": False,
    "aligned": False,
    "negated": False,
    "scales": "block",
}
"""What a checkpoint of an earlier version says of a run as they all are now."""
OF_GRADIENTS = "errors_of_gradients"
"""Among the saved values while R is that of 8-bit gradients, in the dense start; else it is of sums."""


class SparseVarianceOptimizer(WarmupOptimizer[State]):
    """A WarmupOptimizer that divides by v as it was at the last update of it, and from the freeze on for good.

    var_freeze_step: as in VarianceFreeze. options: as in WarmupOptimizer. Its state has v_N, v as it is used (used_N,
    where it is not v itself) and the error memory of the sums (update_error).
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        var_freeze_step: int | None = None,
        schedule: ZeroOneSchedule,
        **options: Unpack[CompressedOptions],
    ) -> None:
        of_run = options.get("total_steps"), options.get("lr_warmup_steps")
        self.freeze = VarianceFreeze(defaults["betas"][1], var_freeze_step, *of_run)
        self.schedule = schedule
        super().__init__(params, defaults, **options)

    def compression_begins(self) -> tuple[int, int | None, str]:
        """As WarmupOptimizer.compression_begins: after the dense start, or after a freeze that comes before its end."""
        given, dense = self.freeze.var_freeze_step, self.dense_until
        return 1 + (dense if given is None else min(given, dense)), dense + 1, f"dense_steps={dense}"

    def begin(self) -> None:
        """Set what a fresh run begins with."""
        super().begin()
        self.freeze = replace(self.freeze, beta2=self.beta2, part=WARMUP_PART[self.full_exchange])
        self.saved |= {
            "variance_updates": 0,
            "last_lrs": [0.0] * len(self.param_groups),
            "lr_rose_at": 0,
        }
        if not self.awaits_vectors:  # then it is derived of what comes, in resumed()
            self.derive_used()

    def hypers(self, step: int) -> list[AdamHyper]:
        """Of every group: m is corrected nowhere, and what v has seen is looked at where d is derived."""
        return self._groups()

    def run_hypers(self, updates: int) -> list[AdamHyper]:
        """Of every run of tensors of equal age, after so many updates of v."""
        return super().hypers(updates)

    @property
    def num_updates(self) -> int:
        """Updates that v has had."""
        return int(self.saved.get("variance_updates", 0))

    @property
    def finds_freeze(self) -> bool:
        """Where var_freeze_step was not given."""
        return self.freeze.var_freeze_step is None

    def ends_warmup(self, step: int) -> bool:
        """Is `step`, under the rates of now, the last one that may update the variance, or a later one?"""
        if self.joined_at and step < self.freeze.second_end(self.joined_at):
            return False
        if self.warmup_from:
            return step >= self.freeze.second_end(self.warmup_from)
        return self.freeze.reason(step, self._rose_at(step), self.dense_until) is not None

    def begin_again(self) -> None:
        """End the round (prepare_to_save); v moves again at the steps of T_v, counted from here.

        It is frozen anew by VarianceFreeze.second_end. Until then it has the weight of FEWEST_STEPS updates, so that
        new gradients soon count; steps are divided by what they were. R waits in units of u, whatever v does.
        Collective. Raises: PeerLost, NonFiniteInput, and then nothing has changed.
        """
        self.prepare_to_save()
        groups = self._groups()
        for h in groups:
            self.vectors.v_N[h.span].mul_(1 - h.beta2**FEWEST_STEPS)
        self.frozen_at, self.saved["warmup_from"] = None, self.num_steps
        seen = [None if age.unseen is None else self.num_updates - age.unseen for age in self.ages]
        self.saved["variance_updates"] = FEWEST_STEPS
        unseen = [0 if t is None else FEWEST_STEPS - t for t in seen]
        self.set_ages([replace(age, unseen=late) for age, late in zip(self.ages, unseen, strict=True)])
        self.derive_used()

    @property
    def dense_until(self) -> int:
        """The last step of the dense start, counted from 1; the freeze may come before it. 0: there is none."""
        given = self.schedule.dense_steps
        steps = self.freeze.dense_steps if given is None else given
        return steps + self.joined_at if steps else 0  # tensors that join have one too

    def keep(self, seen: Mapping[int, int]) -> Tensor:
        """As WarmupOptimizer.keep; v_used is derived again."""
        raised_N = super().keep(seen)
        if seen:
            self.derive_used()
        return raised_N

    @property
    def joined_at(self) -> int:
        """The step after which tensors that had no variance joined, while it still moved; 0: none have."""
        return int(self.saved.get("joined_at", 0))

    @property
    def fewest_updates(self) -> int:
        """Updates of v that every tensor has had."""
        seen = [run.seen(self.num_updates) for run in self.runs]
        return min((t for t in seen if t is not None), default=self.num_updates)

    @property
    def updates_early(self) -> bool:
        """Is the next update of v used in its own step?"""
        return self.fewest_updates == 0

    def out_of_phase(self) -> bool:
        """A tensor whose v is not kept after the freeze, kept before, or without any update while others have some."""
        if self.frozen_at is not None:
            return super().out_of_phase()
        return any(age.unseen is None for age in self.ages) or self.fewest_updates == 0 < self.num_updates

    def bring_into_phase(self) -> None:
        """After the freeze the warm-up begins again. Before, T_v is counted anew, so that new tensors get a variance.

        One that was frozen with v kept goes on with the weight that begin_again gives. Collective after the freeze.
        Raises: PeerLost, NonFiniteInput, and then nothing has changed.
        """
        if self.frozen_at is not None:
            super().bring_into_phase()
            return
        for h in self.run_hypers(self.num_updates):
            if h.seen is None:
                self.vectors.v_N[h.span].mul_(1 - h.beta2**FEWEST_STEPS)
        kept = self.num_updates - FEWEST_STEPS
        self.set_ages([replace(age, unseen=kept) if age.unseen is None else age for age in self.ages])
        if self.fewest_updates == 0:
            self.saved["joined_at"] = self.num_steps
            logger.info("variance_counted_anew step=%d", self.num_steps)
        self.derive_used()

    def with_added_groups(self, saved: dict[str, Any]) -> dict[str, Any]:
        """As FlatOptimizer.with_added_groups; the rate of a new group has not risen."""
        before = saved["last_lrs"]
        return super().with_added_groups({**saved, "last_lrs": [*before, *self.rates()[len(before) :]]})

    @property
    def gradient_memory(self) -> ErrorMemory | None:
        """In the dense start the error memory of sums is that of gradients, in units of them.

        Not in one that begins again for tensors that join: the memory is of sums then.
        """
        first = self.num_steps < self.dense_until and not (self.joined_at or self.warmup_from or self.frozen_at)
        return self.vectors.update_error if first and self.full_exchange == "int8" else None

    def errors_of_gradients(self, loaded: Mapping[str, Any]) -> str | None:
        """As FlatOptimizer.errors_of_gradients."""
        return "update_error" if loaded["saved"].get(OF_GRADIENTS) else None

    def mean_gradient_(self) -> None:
        """As FlatOptimizer.mean_gradient_; R is of gradients from here on, where any is kept of them."""
        super().mean_gradient_()
        if self.gradient_memory is not None:
            self.saved[OF_GRADIENTS] = True

    def count_as_sum_(self, shortened_by: Tensor | None = None) -> None:
        """R, of gradients up to here, is of the sums that are sent from here on. Local.

        shortened_by: by what factor max_grad_norm has shortened the last of them, 0-dim; None: by none.
        """
        if self.saved.pop(OF_GRADIENTS, False):
            self.count_errors_as_sent_("update_error", shortened_by)

    def begin_sums(self) -> None:
        """Before a sum is sent: R is of sums, and replicas of server errors are up to date. Collective where not.

        R is of gradients yet where a run was loaded with a shorter dense start. Replicas do not follow its 8 bits.
        """
        self.count_as_sum_()
        memory = self.vectors.update_error
        if memory.is_behind:
            memory.restore(memory.residual())

    def update_variance(self, groups: Sequence[AdamHyper]) -> None:
        """v from the mean gradient in g; after the freeze with the weight of all steps since its last change."""
        v_N, now = self.vectors.v_N, self.num_steps + 1
        kept, seen_N = self.frozen_at is not None, self.seen_at_refresh()
        for h in groups:
            beta2 = (self.refreshing(h, now) if kept else h).beta2
            adam_math.variance_(v_N[h.span], (self.space.g_N if seen_N is None else seen_N)[h.span], beta2)
        if kept:
            self.keep_refreshed(now)
        else:
            self.count_update()
        self.derive_used()

    def count_update(self) -> None:
        """v has been updated."""
        self.saved["variance_updates"] += self._counts(self.vectors.v_N, self.saved["variance_updates"])

    def derive_used(self, coming_N: Tensor | None = None, step: int | None = None) -> None:
        """v_used, of v or before the freeze of v after an update by the gradient `coming`; v itself where it is that.

        In the dense start too, where v is used as Adam uses it, and nobody asks for this one. step: the one that is to
        read it; None: the next.
        """
        s, step = self.vectors, step or self.num_steps + 1
        if self.frozen_at is not None or self._is_adams(step):
            s.used_N = None
            return
        if s.used_N is None:
            s.used_N = torch.empty_like(s.v_N)
        s.used_N.copy_(s.v_N)
        updates = self.saved["variance_updates"]
        if coming_N is not None:
            for h in self.run_hypers(updates):
                adam_math.variance_(s.used_N[h.span], coming_N[h.span], h.beta2)
            updates += self._counts(s.used_N, updates)
        self.evidence["floored_elements"] = 0
        if updates:
            self._use_(s.used_N, updates)
        else:
            s.used_N.fill_(torch.inf)

    def _counts(self, v_N: Tensor, updates: int) -> bool:
        """Does an update that gave v count? Not while v is zero everywhere, in all shards."""
        if updates > 0:
            return True
        box, any_here = self.space.box, bool(v_N.any())
        return any_here if box is None else not box.least(int(not any_here))

    def _use_(self, v_N: Tensor, updates: int, *, freezes: bool = False) -> None:
        """v <- v_used, after so many updates. freezes: by the mean gradient, in g. Waits for the device."""
        layout, runs = self.space.layout, self.run_hypers(updates)
        for h in runs:
            if h.seen:  # 0: it is zero
                adam_math.unbias_variance_(v_N[h.span], h.beta2, h.seen)
        raised_N = floor_variance_(v_N, layout.live, layout.blocks(self.floor_block))
        self.evidence["floored_elements"] = int(raised_N.count_nonzero())
        if freezes:
            self.give_touches_(v_N, runs)

    def divisor(self, at: slice) -> Tensor | None:
        """d of these elements, new: what the next step divides by. None in the dense start, where that is Adam's."""
        if self.frozen_at is None and self._is_adams(self.num_steps + 1):
            return None
        found = torch.empty_like(self.vectors.v_N[at])
        for part, group in self.groups_in(at):
            d = adam_math.divisor(self.vectors.used[part], group["eps"])
            found[part.start - at.start : part.stop - at.start] = d
        return found

    def _is_adams(self, step: int) -> bool:
        """Is a step before the freeze one of the dense start?"""
        return step <= self.dense_until and not self.warmup_from

    def freeze_where_planned(self, plan: StepPlan) -> None:
        """After a step: note its rates; where the plan ends the warm-up keep the variance as it is used, for good.

        What steps are divided by stays the same.
        """
        now, updates = self.num_steps + 1, self.saved["variance_updates"]
        self.saved["lr_rose_at"], self.saved["last_lrs"] = self._rose_at(now), self.rates()
        if not (plan.freeze_variance and updates):
            return
        # A rank's own gradient, where this step sent none, is not the same on all.
        self._use_(self.vectors.v_N, updates, freezes=plan.gradient is Wire.FULL)
        self.frozen_at = now
        self.vectors.used_N = None
        self.set_ages([replace(age, unseen=None) for age in self.ages])
        if self.warmup_from:
            logger.info("warmup_ended step=%d began=%d variance_updates=%d", now, self.warmup_from, updates)
        elif reason := self.freeze.logged_reason(now, self.saved["lr_rose_at"], self.dense_until, updates):
            self.evidence["warmup_ended_by"] = str(reason)

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Refuse a run of settings that there are no more. Raises: ValueError."""
        super().check_saved(saved)
        theirs = saved.get("settings", SETTINGS)
        other = {name: theirs.get(name) for name, mine in SETTINGS.items() if theirs.get(name) != mine}
        if other:
            raise ValueError(
                f"state_dict is of a 0/1 Adam with {other}, which this version does not have: go on with the version "
                "that saved it, or load the model alone and begin the optimizer anew"
            )

    def resumed(self) -> None:
        """As FlatOptimizer.resumed; v_used is derived again."""
        super().resumed()
        for name in ("settings", "divisors"):  # of a version before
            self.saved.pop(name, None)
        if self.gradient_memory is not None and self.num_steps and OF_GRADIENTS not in self.saved:
            # The dense start was over where it was saved, and is not here.
            weight_of = lambda group: 1 / (self.gradient_weight(group) or 1.0)  # noqa: E731
            self.scale_errors_("update_error", self.space.spread(list(map(weight_of, self.param_groups))), weight_of)
            self.saved[OF_GRADIENTS] = True
        self.derive_used()

    def _groups(self) -> list[AdamHyper]:
        spans = self.space.spans  # without a group that is just being added
        found = [self.hyper(group, span) for group, span in zip(self.param_groups[: len(spans)], spans, strict=True)]
        return [replace(h, lr=0.0) if h.lr < LEAST_RATE else h for h in found]

    def _rose_at(self, step: int) -> int:
        """The last step, `step` with the rates of now included, at which a group's rate rose."""
        return step if rose(self.rates(), self.saved["last_lrs"]) else int(self.saved["lr_rose_at"])
