"""0/1 Adam: local steps under a stale variance; now and then the sum of the updates crosses the wire in one bit.

    [Lu et al. 2022, arXiv 2202.06009, Alg. 1]   a = lr wd,  d = sqrt(v) + eps,  x_s = x at the last sync

    worker i, each step   m_i <- beta1 m_i + (1 - beta1) g_i
                          x_i <- (1 - a) x_i - lr m_i / d;   u_i <- (1 - a) u_i + lr m_i;   S <- (1 - a) S + lr
    a step in T_u         u <- compressed_mean_i(u_i);  m_i <- u / S;  x_i <- K x_s - u / d;  x_s <- x_i;  u_i, S <- 0
    a step in T_v         v <- beta2 v + (1 - beta2) (mean_i g_i)^2

K is the product of (1 - a) since the last sync. Steps outside T_u send nothing: the "0" of the name.

Weight decay. Unrolled, a round of local steps is  x_i = K x_s - sum_t [prod_(t' > t) (1 - a_t')] lr_t m_i,t / d. The
sum is u_i / d where u_i decays as x_i does, so x_i = K x_s - u_i / d at every step, a sync only replaces u_i by its
mean, and the mean of x decays exactly once. a x itself never enters u; S decays alike, so u / S is a mean of momenta.

The error memory R is in units of u, and d divides after the exchange: a new v leaves it as it is. A sync leaves
y = mean_i x_i - R / d unchanged. Deviations from the paper, with their reasons: docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.errors import NonFiniteInput
from thinwire.comm.layout import DEFAULT_BLOCK
from thinwire.comm.protocol import Group
from thinwire.optim import adam_math
from thinwire.optim.adam_math import AdamHyper
from thinwire.optim.local_steps import Round, ZeroOneAdamState, agree_, local_step, propose_
from thinwire.optim.optimizer import FlatOptimizer, NonFinite, adam_defaults
from thinwire.optim.schedule import StepPlan, Wire, counted_interval, rate_interval, zero_one_adam_plan
from thinwire.optim.variance_floor import floor_variance_

SLOWEST_FALL = 0.95
"""S of a sync is at least this part of the one before: error memory empties no faster. See docs/algorithms.md."""


class ZeroOneAdam(FlatOptimizer[ZeroOneAdamState]):
    """0/1 Adam as a torch.optim.Optimizer: one bit a parameter at some steps, nothing at the others.

    params: parameters or groups, as torch.optim takes them. betas, eps, weight_decay (decoupled): as in AdamW.
    var_freeze_step: the variance is updated up to this step, at least 1, and then kept; syncs are at every step until
    then. The end of the learning rate's warm-up is a good choice.
    var_update_scaler: updates of the variance until the gap between them doubles.
    local_step_scaler: None: the interval between syncs is 2^k when the learning rate (the largest of the groups) has
    fallen to 1/2^k of its peak. A number: it doubles every so many steps after var_freeze_step instead.
    local_step_clipper: the longest interval, steps.
    bias_correction: of the variance, by the number of its updates.
    group: the ranks (None: torch.distributed's default group, or this process alone).
    block: values that share a scale. max_grad_norm, non_finite: as in FlatOptimizer.

    Between syncs ranks hold different parameters: evaluate or save weights after state_dict() or prepare_to_save().
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        var_freeze_step: int,
        var_update_scaler: int = 16,
        local_step_scaler: int | None = None,
        local_step_clipper: int = 16,
        bias_correction: bool = True,
        group: Group | None = None,
        block: int = DEFAULT_BLOCK,
        max_grad_norm: float | None = None,
        non_finite: NonFinite = "raise",
    ) -> None:
        for name, value in (
            ("var_freeze_step", var_freeze_step),
            ("var_update_scaler", var_update_scaler),
            ("local_step_scaler", 1 if local_step_scaler is None else local_step_scaler),
            ("local_step_clipper", local_step_clipper),
        ):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        self.bias_correction = bias_correction
        super().__init__(
            params,
            adam_defaults(lr, betas, eps, weight_decay),
            group=group,
            block=block,
            max_grad_norm=max_grad_norm,
            non_finite=non_finite,
        )
        self.saved = {
            "peak_lr": 0.0,
            "last_sync": 0,
            "num_syncs": 0,
            "variance_updates": 0,
            "divisors": [0.0] * len(self.param_groups),
        }
        self.evidence["floored_elements"] = 0
        self._rounds = [Round()] * len(self.param_groups)
        self._derive_divisor()

    def make_state(self) -> ZeroOneAdamState:
        """Empty vectors and error memory."""
        p_N = self.space.p_N
        return ZeroOneAdamState(
            m_N=torch.zeros_like(p_N),
            v_N=torch.zeros_like(p_N),
            update_error=self.reduce.new_slot(),
            u_N=torch.zeros_like(p_N),
            x_s_N=torch.zeros_like(p_N),
            lost=torch.zeros((), dtype=torch.bool, device=p_N.device),
            divisor_N=torch.zeros_like(p_N),
            z_N=torch.zeros_like(p_N),
        )

    def plan(self, step: int) -> StepPlan:
        """The plan of step `step`, counted from 1, under the learning rates of now."""
        return zero_one_adam_plan(
            step,
            var_freeze_step=self.var_freeze_step,
            var_update_scaler=self.var_update_scaler,
            variance_updates=self.saved["variance_updates"],
            frozen_at=self.frozen_at,
            last_sync=self.saved["last_sync"],
            interval=self._interval(step),
        )

    def update(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step of the algorithm.

        Raises: NonFiniteInput at a sync only, for the gradient of that step or of a local one since the last sync: that
        one has counted as zero on its rank, and nothing else is lost: the next call is a sync again.
        """
        rounds = [done.after(h) for done, h in zip(self._rounds, groups, strict=True)]
        if plan.momentum is Wire.COMPRESSED:
            self._sync_step(plan, groups, rounds)
        else:
            if self.num_steps == self.saved["last_sync"]:
                self.vectors.x_s_N.copy_(self.space.p_N)
            local_step(self.space.p_N, self.space.g_N, self.vectors, groups)
            self._rounds = rounds
        self.saved["peak_lr"] = max(self.saved["peak_lr"], self._rate())
        if plan.freeze_variance and self.saved["variance_updates"]:
            self._freeze()

    @property
    def at_sync(self) -> bool:
        """Was the last step a sync? Between syncs ranks hold different parameters; the same answer on every rank."""
        return bool(self.num_steps == self.saved["last_sync"])

    def prepare_to_save(self) -> None:
        """End the round with a sync in full precision: x and m become their means, bit-equal on every rank. Collective.

        In full, because S of a round cut short is small against the error memory, which would be blown up in u / S; the
        error memory is not touched. Without local steps since the last sync nothing is sent.
        Raises: PeerLost; NonFiniteInput for a gradient lost since the last sync. Then nothing else has changed.
        """
        if self.num_steps == self.saved["last_sync"]:
            return
        s = self.vectors
        u_N, m_N = s.u_N.masked_fill(s.lost, torch.nan), s.m_N.clone()
        try:
            self.reduce.full_(u_N)
            self.reduce.full_(m_N)
        except NonFiniteInput as error:
            raise self._told(error, self.num_steps) from error
        agree_(self.space.p_N, s.x_s_N, u_N, s, self.space.spans, [done.kept for done in self._rounds])
        s.m_N.copy_(m_N)
        self.saved["last_sync"] = self.num_steps
        self._rounds = [Round()] * len(self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict of the same optimizer and shapes, saved with any number of ranks. Local.

        Raises: ValueError saying what differs; then nothing has changed.
        """
        super().load_state_dict(state_dict)
        self.vectors.u_N.zero_()
        self.vectors.lost.zero_()
        self._rounds = [Round()] * len(self.param_groups)
        self._derive_divisor()

    def stats(self) -> dict[str, Any]:
        """As for all optimizers, and the number of syncs so far: num_steps - num_syncs steps have sent nothing."""
        return {**super().stats(), "num_syncs": self.saved["num_syncs"]}

    def _rate(self) -> float:
        return max(float(group["lr"]) for group in self.param_groups)

    def _interval(self, step: int) -> int:
        if self.frozen_at is None:
            return 1
        if self.local_step_scaler is not None:
            return counted_interval(step, self.frozen_at, self.local_step_scaler, self.local_step_clipper)
        return rate_interval(self._rate(), self.saved["peak_lr"], self.local_step_clipper)

    def _sync_step(self, plan: StepPlan, groups: Sequence[AdamHyper], rounds: Sequence[Round]) -> None:
        """A step that ends a round. All communication comes before the first lasting change."""
        s, p_N, g_N, step = self.vectors, self.space.p_N, self.space.g_N, self.num_steps + 1
        exchange = any(done.weight for done in rounds)  # after a whole round of lr = 0 there is nothing to send
        propose_(g_N, s, groups)
        try:
            if plan.gradient is Wire.FULL:
                self.mean_gradient_()
            if exchange:
                self.reduce.compressed_(s.z_N, s.update_error)
        except NonFiniteInput as error:
            raise self._told(error, step) from error
        no_scale_yet = self.saved["variance_updates"] == 0
        if plan.update_variance and no_scale_yet:  # differs from Alg. 1: the first v is used at once, there is no other
            self._update_variance(groups)
        if exchange:
            start_N = p_N if self.num_steps == self.saved["last_sync"] else s.x_s_N
            agree_(p_N, start_N, s.z_N, s, self.space.spans, [done.kept for done in rounds])
            for at, (h, done) in enumerate(zip(groups, rounds, strict=True)):
                if done.weight:
                    # differs from Alg. 1: bounded, for error memory of a higher learning rate would blow m up
                    divisor = max(done.weight, SLOWEST_FALL * self.saved["divisors"][at])
                    torch.div(s.z_N[h.span], divisor, out=s.m_N[h.span])
                    self.saved["divisors"][at] = divisor
            self.saved["num_syncs"] += 1
        self.saved["last_sync"] = step
        self._rounds = [Round()] * len(self.param_groups)
        if plan.update_variance and not no_scale_yet:
            self._update_variance(groups)

    def _update_variance(self, groups: Sequence[AdamHyper]) -> None:
        """V from the mean gradient in g. One that is zero everywhere gives no scale and does not count."""
        v_N = self.vectors.v_N
        for h in groups:
            adam_math.variance_(v_N[h.span], self.space.g_N[h.span], h.beta2)
        if self.saved["variance_updates"] or bool(v_N.any()):
            self.saved["variance_updates"] += 1
            self._derive_divisor()

    def _freeze(self) -> None:
        """Keep the variance, corrected and floored, for good. What steps are divided by stays the same."""
        self.vectors.v_N.copy_(self._used_variance(self.vectors.z_N))
        self.frozen_at = self.num_steps + 1

    def _used_variance(self, out_N: Tensor) -> Tensor:
        """V as it is used: corrected and floored. In `out`."""
        out_N.copy_(self.vectors.v_N)
        if self.frozen_at is not None:
            return out_N
        if self.bias_correction:
            for group, span in zip(self.param_groups, self.space.spans, strict=True):
                adam_math.unbias_variance_(out_N[span], group["betas"][1], self.saved["variance_updates"])
        layout = self.space.layout
        floored_N = floor_variance_(out_N, layout.live, layout.blocks(self.block))
        self.evidence["floored_elements"] = int(floored_N.sum())
        return out_N

    def _derive_divisor(self) -> None:
        """D <- sqrt(v) + eps, of the v that is used; infinite before there is any, so that nothing moves."""
        divisor_N = self.vectors.divisor_N
        if self.saved["variance_updates"] == 0:
            divisor_N.fill_(torch.inf)
            return
        self._used_variance(divisor_N).sqrt_()
        for group, span in zip(self.param_groups, self.space.spans, strict=True):
            divisor_N[span].add_(group["eps"])

    def _told(self, error: NonFiniteInput, step: int) -> NonFiniteInput:
        """All know of the lost gradients now: forget them, and say where to look."""
        self.vectors.lost.zero_()
        whose = f"of rank {', '.join(map(str, error.ranks))}" if error.ranks else "of some rank"
        return NonFiniteInput(
            f"a gradient {whose} in steps {self.saved['last_sync'] + 1} to {step} holds NaN or infinity; a step "
            "without communication has taken it as zero, parameters and state are as before the call. Look at the loss",
            error.ranks,
        )
