"""0/1 Adam: local steps under a stale variance; now and then the sum of the updates crosses the wire in one bit.

    [Lu et al. 2022, arXiv 2202.06009, Alg. 1]   a = lr wd,  d = sqrt(v) + eps,  x_s = x at the last sync

    worker i, each step   m_i <- beta1 m_i + (1 - beta1) g_i
                          x_i <- (1 - a) x_i - lr m_i / d;   u_i <- (1 - a) u_i + lr m_i;   S <- (1 - a) S + lr
    a step in T_u         u <- r compressed_mean_i(u_i / r);  m_i <- u / S;  x_i <- K x_s - u / d;  x_s <- x_i;
                          u_i, S <- 0;   r: the mean rate of the round, S over its steps
    a step in T_v         v <- beta2 v + (1 - beta2) (mean_i g_i)^2

K is the product of (1 - a) since the last sync. Steps outside T_u send nothing: the "0" of the name.

Weight decay. Unrolled, a round of local steps is  x_i = K x_s - sum_t [prod_(t' > t) (1 - a_t')] lr_t m_i,t / d. The
sum is u_i / d where u_i decays as x_i does, so x_i = K x_s - u_i / d at every step, a sync only replaces u_i by its
mean, and the mean of x decays exactly once. a x itself never enters u; S decays alike, so u / S is a mean of momenta.

The first steps are Adam's on the mean gradient, dense_steps of them: signs of a momentum that has hardly begun, under
a variance of a few gradients, cost more loss than they save bytes (benchmarks/results/zero-one).
The error memory R is of momenta, and r / d comes after the exchange: a new v or rate leaves R as it is. A sync leaves
y = mean_i x_i - r R / d unchanged. Deviations from the paper, with their reasons: docs/algorithms.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.errors import CommError, NonFiniteInput, Refused
from thinwire.comm.exchange.alone import Results
from thinwire.comm.kernels.added import Advanced
from thinwire.comm.layout import BYTE, round_up
from thinwire.comm.protocol import Group, Result
from thinwire.contract.hyperparameters import BETAS, EPS, LR, WEIGHT_DECAY
from thinwire.optim import adam_math
from thinwire.optim.engine import schedule as plans
from thinwire.optim.engine.exchanges import Exchange, LeftGradients, LeftInPlace, formed_sum, whole_sum
from thinwire.optim.engine.hyperparameters import AdamHyper, adam_defaults
from thinwire.optim.engine.schedule import BY_DEFAULT, StepPlan, Wire, ZeroOneSchedule
from thinwire.optim.kernels import updates
from thinwire.optim.variance.sparse import SparseVarianceOptimizer
from thinwire.optim.variance.warmup import CompressedOptions
from thinwire.optim.zero_one_round import (
    SMALL_PIECE,
    OwnReceipt,
    Receipt,
    Round,
    ZeroOneAdamState,
    agree_,
    begun,
    local_step,
    mark_lost_,
    propose_,
    proposed,
    units_of,
)

logger = logging.getLogger(__name__)

PREPARE_EVERYWHERE = "call prepare_to_save() on every rank, or evaluate where optimizer.at_sync is true"
RATES_MOVE = (
    "a learning rate or another number was changed between backward and step(), and a sync sends sums that it is in: "
    "set it before backward"
)
WRITTEN_BETWEEN_SYNCS = (
    "step {step}, between two syncs, where ranks hold different parameters; the next sync would undo it. Call "
    "optimizer.prepare_to_save() on every rank before you write parameters, or write them where optimizer.at_sync"
)
"""How an error ends that begins with the name of a parameter, and that it was written after ..."""
OWN_VECTORS = ("parameters", "u_N", "x_s_N", "m_N")
"""What a rank alone holds between two syncs, as it saves them."""


class ZeroOneAdam(SparseVarianceOptimizer[ZeroOneAdamState]):
    """0/1 Adam as a torch.optim.Optimizer: one bit a parameter at some steps, nothing at the others.

    params: parameters or groups, as torch.optim takes them. betas, eps, weight_decay (decoupled): as in AdamW.
    var_freeze_step: the variance is updated up to this step, at least 1, and then kept; syncs are at every step until
    then. None: up to the end of the learning rate's warm-up, lr_warmup_steps of the run if that is given, else found by
    the rates that come, and of the dense start; total_steps of the run sharpens it (optim.variance.when_to_freeze).
    schedule: dense_steps, var_update_scaler, local_step_scaler, local_step_clipper (ZeroOneSchedule): how long it
    begins dense, how often the variance is updated, and how far syncs are apart.
    group: the ranks (None: torch.distributed's default group, or this process alone).
    max_grad_norm: each rank shortens its own gradient to this 2-norm, at every step but the dense ones, and v is of the
    mean of what they shortened; the mean of all is as short. In dense steps it is the mean that is shortened, as in
    CheckedOptions.
    refresh: as in OneBitAdam. non_finite, model, full_exchange, topology: as in CheckedOptions (optim.engine.options);
    buffers go at syncs. overlap: as there; the sum at a sync is formed of each bucket when backward has made its
    gradients, with the rates of that moment. Where one is changed before step(), what was sent is undone, and later
    syncs wait for step().

    Between syncs ranks hold different parameters: evaluate where at_sync, or after state_dict() or prepare_to_save(),
    which cost two exchanges in full. The constructor is collective: it sends rank 0's parameters to all.
    Raises: ValueError; PeerLost, WireMismatch.
    """

    results: ClassVar[Results] = "read"
    longest_step: ClassVar[float] = 4.0
    """Of what a sync gives out, an element moves x by at most this times S; the rest is cut off."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS.default,
        weight_decay: float = WEIGHT_DECAY.default,
        *,
        var_freeze_step: int | None = None,
        schedule: ZeroOneSchedule = BY_DEFAULT,
        **options: Unpack[CompressedOptions],
    ) -> None:
        self._rates_move = False
        defaults = adam_defaults(lr, betas, eps, weight_decay)
        super().__init__(params, defaults, var_freeze_step=var_freeze_step, schedule=schedule, **options)
        longest = plans.longest_interval(self.total_steps, counted=schedule.local_step_scaler is not None)
        self.local_step_clipper = schedule.local_step_clipper or longest

    def begin(self) -> None:
        """Set what a fresh run begins with."""
        super().begin()
        self.saved |= {
            "peak_lr": 0.0,
            "last_sync": 0,
            "num_syncs": 0,
            "rounds_skipped": 0,
        }
        self._rounds = [Round()] * len(self.param_groups)
        self._sent_at: Sequence[AdamHyper] | None = None
        """What a sum was formed with that hooks have begun to send."""
        self._marks: tuple[int, list[tuple[int, int]] | None] = (0, None)

    def make_state(self) -> ZeroOneAdamState:
        """Empty vectors and error memory."""
        return ZeroOneAdamState(
            m_N=self.new_vector(),
            v_N=self.new_vector(),
            update_error=self.reduce.new_memory(),
            lost=torch.zeros((), dtype=torch.bool, device=self.space.p_N.device),
        )

    def after_step(self) -> None:
        """As FlatOptimizer.after_step: between syncs parameters are to stay as they are now."""
        super().after_step()
        self._marks = (self.num_steps, None if self.at_sync else self.space.marks())

    def _refuse_written(self) -> None:
        """Raises: RuntimeError where parameters were written between syncs, as far as that can be seen."""
        step, marks = self._marks
        if marks is not None and step == self.num_steps and not self.at_sync:
            self.space.refuse_written(marks, WRITTEN_BETWEEN_SYNCS.format(step=step))

    def _refuse_unlike(self) -> None:
        """Raises: RuntimeError where low-precision parameters were written through `.data` between syncs."""
        if self._marks[0] == self.num_steps:  # else they were loaded since
            self.space.refuse_unlike(WRITTEN_BETWEEN_SYNCS.format(step=self.num_steps))

    def before_gradients(self) -> None:
        """As FlatOptimizer.before_gradients: parameters are as the last step left them, and rates as they were sent."""
        self._refuse_written()
        self._heed_rates()

    def _heed_rates(self) -> None:
        """Undo what hooks have sent, where that was of other rates than those of now: it is sent anew in step()."""
        if self._sent_at is not None and self.overlap.exchange is not None and self._sent_at != self._groups():
            self._rates_move = True
            self.overlap.abandon()
        self._sent_at = None

    def may_overlap(self, plan: StepPlan) -> bool:
        """As FlatOptimizer.may_overlap: in a sync alone, of one sum that is not empty."""
        sends = plan.gradient is Wire.LOCAL and any(done.weight for done in self._rounds_after(self._groups()))
        return plan.momentum is not Wire.COMPRESSED or sends

    def waits_for(self, plan: StepPlan) -> str | None:
        """As FlatOptimizer.waits_for."""
        if plan.gradient is Wire.LOCAL and plan.momentum is Wire.LOCAL:
            return "a step between two syncs sends nothing"
        if plan.momentum is Wire.COMPRESSED:
            if plan.gradient is Wire.FULL:
                return "a sync that moves the variance exchanges the mean gradient first, in place of this rank's own"
            if self._rates_move:
                return RATES_MOVE
            if self.vectors.update_error.is_behind:
                return "the first sync brings the replicas of server errors up to date"
            if not any(done.weight for done in self._rounds_after(self._groups())):
                return "a round whose learning rates are all 0 sends nothing"
        return super().waits_for(plan)

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """The mean gradient in the dense start; then the sum of the round, formed of each bucket's own gradients."""
        self._sent_at = None
        if plan.momentum is not Wire.COMPRESSED:
            return super().begin_exchange(plan)
        self.count_as_sum_()
        self._sent_at = groups = self._groups()
        return self._sum_of_round(groups)

    def _formed(self, groups: Sequence[AdamHyper], rounds: Sequence[Round], at: slice, runs: LeftGradients) -> Tensor:
        """These elements of what this rank gives to a sync, new."""
        s, z_b = self.vectors, self.space.g_N.new_empty(at.stop - at.start)
        units = self._units(self._rounds_after(groups))
        for h, done, unit in zip(groups, rounds, units, strict=True):
            for part, g in self._gradients_in(at, h.span, runs):
                z = z_b[part.start - at.start : part.stop - at.start]
                propose_(z, g, s, part, h, done, unit)
        mark_lost_(z_b, s)
        return z_b

    def _added(self, groups: Sequence[AdamHyper], rounds: Sequence[Round], at: slice) -> Advanced | None:
        """What _formed gives, for kernels that form it as they encode; None where several groups have a part of it."""
        for h, done, unit in zip(groups, rounds, self._units(self._rounds_after(groups)), strict=True):
            if h.span.start <= at.start and at.stop <= h.span.stop:
                return proposed(self.space.g_N[at], self.vectors, at, h, done, unit)
        return None

    def _gradients_in(self, at: slice, span: slice, runs: LeftGradients) -> Iterator[tuple[slice, Tensor]]:
        """The parts of the elements `at` that a group owns, each with its gradients, where those are."""
        low, high = max(at.start, span.start), min(at.stop, span.stop)
        for run, tensor in zip(runs, self.space.tensors, strict=bool(runs)):
            start, stop = max(low, tensor.start), min(high, round_up(tensor.stop, BYTE))
            if run is None or start >= stop:
                continue
            if low < start:
                yield slice(low, start), self.space.g_N[low:start]
            yield slice(start, stop), run[start - tensor.start : stop - tensor.start]
            low = stop
        if low < high:
            yield slice(low, high), self.space.g_N[low:high]

    def plan(self, step: int) -> StepPlan:
        """The plan of step `step`, counted from 1, under the learning rates of now."""
        return plans.zero_one_adam_plan(
            step,
            freeze=self.ends_warmup(step),
            var_update_scaler=self.schedule.var_update_scaler,
            variance_updates=self.fewest_updates,
            frozen_at=self.frozen_at,
            last_sync=self.saved["last_sync"],
            interval=self._interval(step),
            warmup_from=self._counted_from,
            dense_until=self.dense_until,
            refresh=self.is_refresh_due(step),
        )

    def update(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """One step of the algorithm.

        Raises: NonFiniteInput where something is exchanged, for the gradient of that step or of a local one since the
        last sync: that one has counted as zero on its rank, and nothing else is lost: the next call is a sync again.
        """
        rounds = self._rounds_after(groups)
        if plan.momentum is Wire.COMPRESSED:
            self._sync_step(plan, groups, rounds)
        elif plan.gradient is not Wire.LOCAL:
            self._dense_step(plan)
        else:
            self.vectors.begin_round(keeps_start=self._keeps_start)
            local_step(self.space.p_N, self.space.g_N, self.vectors, groups, self._rounds)
            self._rounds = rounds
            self.saved["rounds_skipped"] += 1
        self.outlook.count(plan)
        self.saved["peak_lr"] = max(self.saved["peak_lr"], *self.rates())
        self.freeze_where_planned(plan)

    @property
    def common_steps(self) -> int:
        """The step of the last sync. Between syncs ranks hold different parameters; the same answer on every rank."""
        return int(self.saved["last_sync"])

    def synced_vectors(self, group: Group, *, taking_part: bool, num_ranks: int) -> dict[str, Tensor]:
        """As FlatOptimizer.synced_vectors: x = K x_s - mean u / d and the mean of m, over those of the same round.

        The steps that a rank which is gone has made alone since the last sync are lost, and no others: the mean is over
        those that are left. A gradient that was not finite has counted as zero.
        """
        found = super().synced_vectors(group, taking_part=taking_part, num_ranks=num_ranks)
        in_round = self.space.p_N.new_tensor([0.0 if self.at_sync or not taking_part else 1.0])
        group.start_sum_(in_round).wait()
        if not int(in_round):
            return found
        s, p_N = self.vectors, self.space.g_N  # of who takes part, the gradient is worth nothing
        p_N = torch.empty_like(p_N) if self.reduce.needs_lost_input else p_N  # but where its lost step may count yet
        m_N = s.m_N / num_ranks if taking_part else torch.zeros_like(s.m_N)
        if not taking_part:
            p_N = torch.zeros_like(m_N)
        elif self.at_sync:
            p_N.zero_()
        else:
            torch.div(s.of_round()[0], num_ranks, out=p_N)
        group.start_sum_(p_N).wait()
        group.start_sum_(m_N).wait()
        if not taking_part or self.at_sync:
            return found
        self._agree_(p_N, p_N)
        return {**found, "parameters_N": p_N, "m_N": m_N}

    def _agree_(self, p_N: Tensor, u_N: Tensor) -> None:
        """p <- K x_s - u / d, bit-equal on every rank; u may be p."""
        for h, done in zip(self._groups(), self._rounds, strict=True):
            for low in range(h.span.start, h.span.stop, SMALL_PIECE):
                at = slice(low, min(low + SMALL_PIECE, h.span.stop))
                divisor = adam_math.divisor(self.vectors.used[at], h.eps)
                agree_(p_N[at], begun(self.space.p_N[at], self.vectors, at, h, done), u_N[at], divisor, done.kept)

    def plain_state(self) -> dict[str, Any]:
        """As FlatOptimizer.plain_state, at a sync."""
        found = super().plain_state()
        found["saved"]["last_sync"] = self.num_steps
        return found

    def prepare_to_save(self) -> None:
        """End the round with a sync in full precision: x and m become their means, bit-equal on every rank. Collective.

        In full, because S of a round cut short is small against the error memory, which would be blown up in u / S; the
        error memory is not touched. Right after a sync nothing is sent; a loop that evaluates often waits for at_sync.
        Raises: PeerLost; NonFiniteInput for a gradient lost since the last sync, unless such steps are skipped. Then
        nothing else has changed.
        """
        super().prepare_to_save()
        self._end_in_full("prepare_to_save()")

    def prepare_to_hand_over(self) -> None:
        """As prepare_to_save(), with the gradient's memory for the mean of u: a regroup is to take little more."""
        super().prepare_to_save()
        if not self.at_sync:
            self._end_in_full("hand_over()", self.space.g_N)
            self.space.g_N.zero_()

    def _end_in_full(self, call: str, u_N: Tensor | None = None) -> None:
        """A sync in full precision, where the round has not ended. u: for its mean; None: new."""
        if self.at_sync:
            return
        self._refuse_written()
        self._refuse_unlike()
        self.space.take_moved()  # the same values in other memory, which the sync is to reach
        with self.calling(f"{call} after step {self.num_steps}", PREPARE_EVERYWHERE):
            self._sync_in_full(torch.empty_like(self.space.p_N) if u_N is None else u_N)

    def _sync_in_full(self, u_N: Tensor) -> None:
        self.refuse_to_be_alone()
        s = self.vectors
        try:
            m_N = self._round_means(u_N)
        except NonFiniteInput as error:
            lost = self._lost_gradients(error, self.num_steps)  # forgets the lost gradients, on every rank
            if not self.skips_non_finite:
                raise lost from error
            logger.warning("gradient_left_out step=%d reason=%s", self.num_steps, lost)
            self.owes_scaler = True
            m_N = self._round_means(u_N)
        self.equalise_buffers()
        self._agree_(self.space.p_N, u_N)
        s.m_N.copy_(m_N)
        self.saved["last_sync"] = self.num_steps
        self._end_round()
        self.space.equalise_copies()
        self.space.write_back()

    def own_state(self) -> dict[str, Any]:
        """Between syncs x, u, x_s, m, whether a gradient was lost, and K and S."""
        if self.at_sync:
            return {}
        self._refuse_unlike()
        s = self.vectors
        assert s.u_N is not None
        return {
            "parameters": self.space.p_N.clone(),
            "u_N": s.u_N.clone(),
            "x_s_N": self.common_parameters.clone(),
            "m_N": s.m_N.clone(),
            "lost": bool(s.lost),
            "rounds": [[done.kept, done.weight] for done in self._rounds],
        }

    def check_own(self, own: dict[str, Any]) -> None:
        """Refuse what own_state() cannot have given. Raises: ValueError."""
        if not own:
            return
        missing = [key for key in (*OWN_VECTORS, "lost", "rounds") if key not in own]
        if missing:
            raise ValueError(f"state_dict has own without {missing}: it is not whole; load another file")
        for key in OWN_VECTORS:
            found, shape = own[key], self.space.p_N.shape
            if not isinstance(found, Tensor) or not found.dtype.is_floating_point or found.shape != shape:
                what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(f"state_dict has own[{key!r}] = {what}, this optimizer needs {list(shape)}")
        rounds = own["rounds"]
        if not isinstance(rounds, list) or len(rounds) != len(self._rounds) or any(len(row) != 2 for row in rounds):
            raise ValueError(
                f"state_dict has own['rounds'] = {rounds!r}, this optimizer needs {len(self._rounds)} pairs"
            )

    def go_on_from(self, own: dict[str, Any], *, in_round: bool) -> None:
        """Hold what own_state() gave. Not in_round: x is where that rank had moved it, as if that had been a sync."""
        s = self.vectors
        self._marks = (self.num_steps, None)
        self._end_round()
        if not own:
            return
        self.space.p_N.copy_(own["parameters"])
        self.space.write_back()
        s.m_N.copy_(own["m_N"])
        if in_round:
            s.begin_round(keeps_start=self._keeps_start)
            for held, given in zip(s.of_round(), ("u_N", "x_s_N"), strict=False):
                held.copy_(own[given])
            s.lost.fill_(own["lost"])
            self._rounds = [Round(*row) for row in own["rounds"]]
        else:
            self.saved["last_sync"] = self.num_steps

    @property
    def common_parameters(self) -> Tensor:
        """As FlatOptimizer.common_parameters: those of the last sync; where they are not kept a copy."""
        s, p_N = self.vectors, self.space.p_N
        found_N: Tensor = p_N if self.at_sync else s.x_s_N
        if found_N is not None:
            return found_N
        found_N = torch.zeros_like(p_N)
        for h, done in zip(self._groups(), self._rounds, strict=True):
            found_N[h.span] = begun(p_N[h.span], s, h.span, h, done)
        return found_N

    @property
    def _keeps_start(self) -> bool:
        """Is x_s kept? On one rank nobody has to have it bit for bit, and a sync that has a loop needs it not."""
        return self.group.size > 1 or not updates.fits(self.space.p_N)

    def common_vectors(self) -> dict[str, Tensor]:
        """As FlatOptimizer.common_vectors; between syncs the parameters and m are each rank's own."""
        return super().common_vectors() if self.at_sync else {"x_s": self.common_parameters, "v_N": self.vectors.v_N}

    def end_round_as(self, src: int) -> None:
        """x and m <- those of rank `src`, as if it had synced alone. Collective. Raises: PeerLost."""
        self.reduce.broadcast_(self.space.p_N, src)
        self.reduce.broadcast_(self.vectors.m_N, src)
        self._end_round()
        self.saved["last_sync"] = self.num_steps
        self.space.write_back()

    def stats(self) -> dict[str, Any]:
        """As for all optimizers; num_syncs: exchanges of the sum; rounds_skipped: steps that have sent nothing."""
        return {**super().stats(), **{name: self.saved[name] for name in ("num_syncs", "rounds_skipped")}}

    def _end_round(self) -> None:
        """Where it ended otherwise than by a sync: u and x_s are let go of."""
        self.vectors.u_N = self.vectors.x_s_N = None
        self.vectors.lost.zero_()
        self._rounds = [Round()] * len(self.param_groups)

    def _rounds_after(self, groups: Sequence[AdamHyper]) -> list[Round]:
        """Of each group, the round with this step."""
        return [done.after(h) for done, h in zip(self._rounds, groups, strict=True)]

    def _units(self, rounds: Sequence[Round]) -> list[float]:
        """As units_of, in the next step."""
        return units_of(rounds, self.num_steps + 1 - self.saved["last_sync"])

    @property
    def _counted_from(self) -> int:
        """The step from which T_v is counted, where that is not the end of a dense start."""
        if self.dense_until and not self.warmup_from:
            return 0
        return max(self.warmup_from, self.joined_at)

    def _interval(self, step: int) -> int:
        if self.frozen_at is None:
            return 1
        if self.schedule.local_step_scaler is not None:
            scaler = self.schedule.local_step_scaler
            return plans.counted_interval(step, self.frozen_at, scaler, self.local_step_clipper)
        return plans.rate_interval(max(self.rates()), self.saved["peak_lr"], self.local_step_clipper)

    def _round_means(self, u_N: Tensor) -> Tensor:
        """The mean of m_i in full; u <- that of u_i. Raises: PeerLost; NonFiniteInput where a rank lost a gradient."""
        s = self.vectors
        mark_lost_(u_N.copy_(s.of_round()[0]), s)
        self.reduce.full_(u_N)
        m_N: Tensor = s.m_N.clone()
        self.reduce.full_(m_N)
        return m_N

    def _sync_step(self, plan: StepPlan, groups: Sequence[AdamHyper], rounds: Sequence[Round]) -> None:
        """A step that ends a round. All communication comes before the first lasting change."""
        step = self.num_steps + 1
        self.begin_sums()
        exchange = any(done.weight for done in rounds)  # after a whole round of lr = 0 there is nothing to send
        early = plan.update_variance and self.updates_early
        try:
            if plan.gradient is Wire.FULL:
                self._exchange_both(groups, exchange=exchange, early=early)
            elif exchange:
                self.exchange_(plan)
        except CommError as error:
            if early:
                self.derive_used()
            if isinstance(error, NonFiniteInput) and not isinstance(error, Refused):
                raise self._lost_gradients(error, step) from error
            raise
        if early:
            self.update_variance(groups)
        if exchange:
            result = self.reduce.result  # there until the next exchange, after the commit too
            self.reduce.commit()  # first: where it is interrupted, nothing has moved
            self._receive(groups, rounds, result)
            self.saved["num_syncs"] += 1
        elif plan.gradient is Wire.LOCAL:
            self.saved["rounds_skipped"] += 1
        self.saved["last_sync"] = step
        self._rounds = [Round()] * len(self.param_groups)
        if plan.update_variance and not early:
            self.update_variance(groups)
        if plan.gradient is Wire.FULL:
            self.reduce.release_means()  # it is long until the next

    def _exchange_both(self, groups: Sequence[AdamHyper], *, exchange: bool, early: bool) -> None:
        """The mean gradient, into g, and the sum, which is formed of this rank's own before that, and so kept here."""
        s, g_N, reduce = self.vectors, self.space.g_N, self.reduce
        # A rank's own, as in local steps: v is of the mean of what the momenta take in.
        self.space.shorten_gradient(self.max_grad_norm)
        z_N = None
        if self.group.size > 1:  # the mean takes the place of what z is of
            z_N = torch.empty_like(g_N)
            units = self._units(self._rounds_after(groups))
            for h, done, unit in zip(groups, self._rounds, units, strict=True):
                propose_(z_N[h.span], g_N[h.span], s, h.span, h, done, unit)
        # Not mean_gradient_: it would shorten once more.
        reduce.full_(g_N, self.mean_wire)
        self.first.look_at_mean(g_N)
        if early:
            self.derive_used(g_N)
        if exchange:
            kept = self._sum_of_round(groups) if z_N is None else whole_sum(reduce, s.update_error, mark_lost_(z_N, s))
            for k in range(len(reduce.buckets)):
                kept.launch(k)
            kept.finish()

    def _sum_of_round(self, groups: Sequence[AdamHyper]) -> Exchange:
        """What this rank gives to a sync, formed of each bucket's own gradients."""
        s, g_N = self.vectors, self.space.g_N
        # Without the loops a gradient is read several times: better in one place.
        where = LeftInPlace(self.reduce.buckets.layout, g_N) if updates.fits(g_N) else None
        # On a CPU it is known at once whether this rank has a gradient to report that was lost.
        known = g_N if g_N.device.type == "cpu" and not bool(s.lost) else None
        form = partial(self._formed, groups, self._rounds)
        added = partial(self._added, groups, self._rounds) if where is None else None
        return formed_sum(self.reduce, s.update_error, form, where, known, added)

    def _receive(self, groups: Sequence[AdamHyper], rounds: Sequence[Round], result: Result) -> None:
        """All groups take the sum that was received."""
        s, p_N = self.vectors, self.space.p_N
        for h, done, unit, before in zip(groups, rounds, self._units(rounds), self._rounds, strict=True):
            kind = OwnReceipt if h.lr and updates.fits(p_N) else Receipt
            # differs from Alg. 1: cut, for gradients may outgrow the v that is kept
            receipt = kind(p_N, s, h, done.weight, unit, self.longest_step * done.weight, done.kept, before)
            for start, stop in receipt.parts():
                result.read(receipt, start, stop)

    def _dense_step(self, plan: StepPlan) -> None:
        """A step of Adam on the mean gradient. Error memory, if a resumed run has any, waits for the first sync."""
        s, p_N, g_N, step = self.vectors, self.space.p_N, self.space.g_N, self.num_steps + 1
        self.mean_gradient_()
        for h in self.run_hypers(self.num_updates + 1):
            p, g, m, v = (x[h.span] for x in (p_N, g_N, s.m_N, s.v_N))
            adam_math.step_(p, g, m, v, h, plan.bias_of(h.seen))
        self.count_update()
        if step >= self.dense_until or plan.freeze_variance:
            self.reduce.release_means()  # what follows takes memory of its own
            self.derive_used(step=step + 1)
            self.count_as_sum_(self.space.shortened_by)
        self.saved["last_sync"] = step

    def _lost_gradients(self, error: NonFiniteInput, step: int) -> NonFiniteInput:
        """All know of the lost gradients now: forget them, and say where to look."""
        self.vectors.lost.zero_()
        whose = f"of rank {', '.join(map(str, error.ranks))}" if error.ranks else "of some rank"
        return NonFiniteInput(
            f"a gradient {whose} in steps {self.saved['last_sync'] + 1} to {step} holds NaN or infinity; a step "
            "without communication has taken it as zero, parameters and state are as before the call. Look at the loss",
            error.ranks,
        )
