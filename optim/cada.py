"""CADA: AMSGrad, where a rank sends its gradient only when that differs enough from what it sent last.

    g_i  = gradient of this rank's batch b at x            o_i = the same of the same batch at an older point
    sent_i: g_i of the step in which rank i last sent;  G = mean_i sent_i, on every rank

    send where  |d_i|^2 >= c / H * sum of |G|^2 over the last H steps,  or sent_i is D steps old
        rule 2    o_i at the x at which rank i last sent;         d_i = g_i - o_i
        rule 1    o_i at an x that all renew every D steps;       d_i = (g_i - o_i) - (g_i - o_i when rank i last sent)

    G <- G + mean_i (g_i - sent_i of those that send, 0 of the others);   sent_i <- g_i
    m <- beta1 m + (1 - beta1) G;   v <- beta2 v + (1 - beta2) G^2;   w <- max(w, v)
    x <- x - lr (m / (1 - beta1^t) / (sqrt(w / (1 - beta2^t)) + eps) + weight_decay x)

[Chen et al. 2020, arXiv 2012.15469, Alg. 1, eq. 7 and 10; Reddi et al. 2018 as torch.optim.AdamW(amsgrad=True) has it]

In eq. 7 and 10 d_i is compared with moves of x. The authors' code takes lr G for a move, with a factor of 1 / (n lr)^2,
and gradients that are divided by n: as above, where c has no unit. Moves of Adam are of a size of their own, whatever
that of the gradients: compared with them no c fits two models.

Both gradients are of one batch, so that its noise cancels in d: step() takes a closure, and calls it twice where there
is something to compare. A rank that does not send gives nothing, and where nobody does, a byte from each rank is all
that crosses. Where all send, what crosses is g itself, and G is its mean.

G and x are alike on all ranks; what a rank has sent last only it knows. After a save, a load or a change of ranks
nobody goes by it: all send in the next step, so that a loaded run equals the one that goes on, on any number of ranks.
So too where one rank alone has forgotten it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.exchange.exchange import REFUSED, gather_flags, non_finite
from thinwire.comm.kernels.peak import witness
from thinwire.comm.protocol import Uneven
from thinwire.contract.hyperparameters import BETAS, CADA_LR, CADA_RULES, EPS, HORIZON, MAX_AGE, THRESHOLD, WEIGHT_DECAY
from thinwire.optim.engine.exchanges import Exchange
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.hyperparameters import AdamHyper, adam_defaults
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.options import Options
from thinwire.optim.engine.schedule import StepPlan, uploads_plan
from thinwire.optim.engine.state import Local, Replicated

NOT_FINITE, STAYS, SENDS, SENDS_ALL = 0, 1, 3, 4
"""What a rank tells the others in a step, beside REFUSED: its gradient is not finite; it does not send; it sends what
has changed; it sends its gradient, and so must all, for it does not know what it sent last."""
PIECE = 1 << 18
"""Elements of a CPU's passes."""
SERIAL = 1 << 15
"""Elements whose squares torch adds up in one thread: the same bits on ranks with other numbers of threads."""


@dataclass(slots=True, kw_only=True)
class CadaState:
    """Moments, w = the largest v so far, G, and what this rank sent last; None: it does not know.

    age: steps since then, the next one included. An element in fp32 takes 8 bytes as parameter and gradient, 12 as
    moments, 4 each as G and what was sent, and 4 or 8 for what is compared; in a step up to 12 more for a while.
    """

    m_N: Replicated
    v_N: Replicated
    peak_N: Replicated
    mean_N: Replicated
    sent_N: Local | None = None
    age: int = 0


@dataclass(slots=True, kw_only=True)
class OneState(CadaState):
    """start: the common older x. change: g - o of the step in which this rank last sent; None: 0."""

    start_N: Replicated
    change_N: Local | None = None


@dataclass(slots=True, kw_only=True)
class TwoState(CadaState):
    """at: x in the step in which this rank last sent."""

    at_N: Local | None = None


class CADA(FlatOptimizer[CadaState]):
    """AMSGrad that sends gradients only where they have changed: CADA1 and CADA2.

        loss = optimizer.step(closure)       # closure: computes the loss of this step's batch, calls backward on it

    step() sets gradients to zero and calls the closure, twice where it compares; the second time at the parameters of
    this step. Both times it must compute the loss of the same batch: random numbers of torch are the same in both, and
    buffers of model= are put back in between.
    rule: 1 or 2, as above. max_age: D; 0 and 1: every step sends, which is AMSGrad, by one call of the closure.
    horizon: H. threshold: c; larger: fewer uploads, and a longer way from AMSGrad. All the same on every rank.
    params, lr, betas, eps, weight_decay (decoupled): as in torch.optim.AdamW, each per group.
    group: the ranks (None: torch.distributed's default group, or this process alone). model, max_grad_norm (each rank
    shortens its own gradient, and the rule compares those that are not shortened), non_finite: as in CheckedOptions
    (optim.engine.options). What a rank sends is known after backward alone, and crosses in full: overlap, full_exchange
    and another topology than "flat" are refused.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError, TypeError; PeerLost,
    WireMismatch.
    """

    shown: ClassVar[Mapping[str, str]] = {"m_N": "exp_avg", "v_N": "exp_avg_sq", "peak_N": "max_exp_avg_sq"}
    sends_in_full: ClassVar[bool] = False
    takes_closure: ClassVar[bool] = True
    lost_of_others: ClassVar[str] = "what the other ranks sent last is not there; all send in the next step"

    def __init__(
        self,
        params: ParamsT,
        lr: float = CADA_LR.default,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS.default,
        weight_decay: float = WEIGHT_DECAY.default,
        *,
        rule: int = 2,
        max_age: int = MAX_AGE.default,
        horizon: int = HORIZON.default,
        threshold: float = THRESHOLD.default,
        **options: Unpack[Options],
    ) -> None:
        if rule not in CADA_RULES or isinstance(rule, bool):
            raise ValueError(f"rule = {rule!r}: must be 1 (a common older point) or 2 (each rank's own)")
        for number, value in ((MAX_AGE, max_age), (HORIZON, horizon), (THRESHOLD, threshold)):
            number.check(value)
        if options.get("overlap"):
            raise ValueError(
                "overlap = True: must be left out of CADA: only after both backward passes is it known which ranks send"
            )
        if options.get("topology", "flat") != "flat":
            raise ValueError(
                f"topology = {options.get('topology')!r}: must be left out of CADA: a rank of a box cannot send alone"
            )
        self.rule, self.max_age, self.horizon, self.threshold = rule, max_age, horizon, float(threshold)
        self._old: tuple[FlatSpace, Tensor] | None = None
        """The gradient at the older point, and of which layout it is."""
        self._tells = STAYS
        self._change_N: Tensor | None = None
        self._given: tuple[Tensor, Sequence[int] | None] | None = None
        super().__init__(params, adam_defaults(lr, betas, eps, weight_decay), **options)
        if self.group.size > 1 and not isinstance(self.group, Uneven):
            raise TypeError(f"group = {type(self.group).__name__}: must be Uneven (thinwire.comm.protocol)")
        if self.space.box is not None:
            raise ValueError(
                "params has DTensors, of which uploads are not held by a test: use OneBitAdam or OneBitMuon for "
                "sharded boxes (docs/sharded.md)"
            )

    def own_settings(self) -> dict[str, Any]:
        """As Algorithm.own_settings."""
        names = ("rule", "max_age", "horizon", "threshold")
        return {name: getattr(self, name) for name in names}

    def begin(self) -> None:
        """Set what a fresh run begins with. lengths: the last squared lengths of G, newest last; None: none yet."""
        self.saved |= {"lengths": None, "num_uploads": 0, "possible_uploads": 0}

    def check_saved(self, saved: dict[str, Any]) -> None:
        """Refuse what are no squares of lengths. Raises: ValueError."""
        row = saved.get("lengths")
        if row is not None and not (isinstance(row, list) and all(isinstance(x, float) and x >= 0 for x in row)):
            raise ValueError(f"state_dict has saved['lengths'] = {row!r}: must be numbers, at least 0")

    def make_state(self) -> CadaState:
        """Empty vectors."""
        m_N, v_N, peak_N, mean_N = (self.new_vector() for _ in range(4))
        if self.rule == 1:
            return OneState(m_N=m_N, v_N=v_N, peak_N=peak_N, mean_N=mean_N, start_N=self.new_vector())
        return TwoState(m_N=m_N, v_N=v_N, peak_N=peak_N, mean_N=mean_N)

    def plan(self, step: int) -> StepPlan:
        """Every step is of one kind; who sends is found in it."""
        return uploads_plan(step)

    def begin_beside(self, plan: StepPlan) -> None:
        """As FlatOptimizer.begin_beside: with the exchange, where there is one."""
        self.beside_due = True

    # the two gradients

    def compute(self, closure: Callable[[], float] | None) -> float | None:
        """The gradient at the older point, where it is compared, then that of now. Returns the loss of now.

        Raises: TypeError without a closure; what the closure raises. Parameters and buffers are as before then.
        """
        if closure is None:
            raise TypeError(
                "step() of CADA without a closure: it compares gradients of one batch at two points. Give a function "
                "that computes the loss of this step's batch, calls backward() on it and returns it: "
                "optimizer.step(closure)"
            )
        at_N = self._older_point()
        self._old = None if at_N is None else (self.space, self._gradient_at(at_N, closure))
        self.zero_grad()
        return super().compute(closure)

    def _older_point(self) -> Tensor | None:
        """Where the gradient is to be taken too; None: there is nothing to compare, or it is the point of now."""
        s = self.vectors
        if isinstance(s, OneState):
            return None if self.max_age < 2 or self._renews else s.start_N
        assert isinstance(s, TwoState)
        return s.at_N if s.sent_N is not None and s.age < self.max_age else None

    @property
    def _renews(self) -> bool:
        """Is the common older point the x of the next step?"""
        return self.num_steps % self.max_age == 0

    def _gradient_at(self, at_N: Tensor, closure: Callable[[], float]) -> Tensor:
        """New. Parameters are there in between, and buffers and random numbers as before it afterwards."""
        space = self.space
        space.take_written()  # of low precision: what is put back are the masters
        here_N, buffers = space.p_N.clone(), [(one, one.detach().clone()) for one in self.buffers.all()]
        devices = [space.p_N.device] if space.p_N.device.type == "cuda" else []
        try:
            space.p_N.copy_(at_N)
            space.write_back()
            self.zero_grad()
            with torch.random.fork_rng(devices):
                super().compute(closure)
            space.gather_gradients()
            return space.g_N.clone()
        finally:
            space.p_N.copy_(here_N)
            space.write_back()
            for one, before in buffers:
                one.detach().copy_(before)

    # who sends

    def _gather_gradients(self) -> None:
        super()._gather_gradients()
        old, self._old = self._old, None
        g_N = self.space.g_N
        # After other parameters were laid out it is of another layout; nobody knows what he sent then, either.
        change_N = g_N - old[1] if old is not None and old[0] is self.space else None
        self._tells, self._change_N = self._told(g_N, change_N), change_N

    def _told(self, g_N: Tensor, change_N: Tensor | None) -> int:
        """What this rank tells the others. change: g - o; None: 0, or not known."""
        s = self.vectors
        if not torch.isfinite(witness(g_N)):
            return NOT_FINITE
        if s.sent_N is None:
            return SENDS_ALL
        if s.age >= self.max_age:
            return SENDS
        before_N = s.change_N if isinstance(s, OneState) else None
        if change_N is None or before_N is None:
            d_N = before_N if change_N is None else change_N
        else:
            d_N = change_N - before_N
        found = 0.0 if d_N is None else float(torch.linalg.vector_norm(d_N)) ** 2
        return STAYS if found < self._allowed else SENDS  # where it overflows it sends

    @property
    def _lengths(self) -> list[float]:
        """Of the last H steps; none where a run was saved before they were kept, whose ranks then send at first."""
        return list(self.saved.get("lengths") or ())[-self.horizon :]

    @property
    def _allowed(self) -> float:
        """How large |d|^2 may be, at most, of a rank that does not send; 0, so that all send, where that overflows."""
        allowed = float(self.threshold * sum(self._lengths) / self.horizon)
        return allowed if isfinite(allowed) else 0.0

    def _agreed(self) -> list[int]:
        """The ranks that send in this step, in order. Collective, a byte from each rank.

        Raises: PeerLost; NonFiniteInput, Refused, alike on every rank.
        """
        began = time.perf_counter()
        tells = torch.tensor(self._tells, dtype=torch.uint8, device=self.space.p_N.device)
        flags_n = gather_flags(self.group, tells)
        told = flags_n.tolist()
        self.reduce.stats.waited_s += time.perf_counter() - began
        if NOT_FINITE in told or REFUSED in told:
            raise non_finite(flags_n)
        return [rank for rank, flag in enumerate(told) if flag != STAYS or SENDS_ALL in told]

    def refuse_exchange(self, plan: StepPlan) -> Exchange:
        """As Algorithm.refuse_exchange: said where ranks say who sends."""
        self._tells = REFUSED
        self._agreed()
        raise RuntimeError("a step that this rank refused was made: a defect of thinwire; please report it")

    # the step

    def update(self, plan: StepPlan, groups: Sequence[AdamHyper]) -> None:
        """Hear who sends, let G follow, and take AMSGrad's step on it."""
        s, g_N, p_N = self.vectors, self.space.g_N, self.space.p_N
        givers = self._agreed()
        all_send, mine = len(givers) == self.group.size, self.group.rank in givers
        if givers:
            given_N = g_N.clone() if mine else torch.zeros_like(g_N)
            if mine and not all_send:
                given_N.sub_(s.sent_N)
            self._given = given_N, None if all_send else givers
            try:
                self.exchange_(plan)
            finally:
                self._given = None
            if all_send:
                s.mean_N = given_N
            else:
                s.mean_N.add_(given_N)
        self._note(mine=mine)
        length = p_N.new_zeros(())
        for h in groups:
            length += self._descend(h, plan.bias_of(h.seen))
        self.saved["lengths"] = [*self._lengths, float(length)][-self.horizon :]
        self.saved["num_uploads"] += len(givers)
        self.saved["possible_uploads"] += self.group.size

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """The mean of what is given, in its place, over all ranks."""
        assert self._given is not None
        given_N, givers = self._given
        means = self.reduce.means("fp32")
        means.begin(givers=givers)
        return Exchange(means, lambda k: means.launch(k, given_N))

    def _note(self, *, mine: bool) -> None:
        """What this rank has sent, and what is to be compared with it. Parameters are still those of g."""
        s, p_N, g_N = self.vectors, self.space.p_N, self.space.g_N
        if isinstance(s, OneState) and self.max_age > 1 and self._renews:
            s.start_N.copy_(p_N)
        s.age = 1 if mine else s.age + 1
        if not mine:
            return
        s.sent_N = g_N.clone() if s.sent_N is None else s.sent_N.copy_(g_N)
        if isinstance(s, OneState):
            s.change_N = self._change_N
        elif isinstance(s, TwoState) and self.max_age > 1:
            s.at_N = p_N.clone() if s.at_N is None else s.at_N.copy_(p_N)

    def _descend(self, h: AdamHyper, t: int | None) -> Tensor:
        """AMSGrad's step of one run, along G. Returns the squared length of that, 0-dim."""
        s, p_N = self.vectors, self.space.p_N
        size = PIECE if p_N.device.type == "cpu" else max(h.span.stop - h.span.start, 1)
        correction1 = 1.0 if t is None else 1 - h.beta1**t
        correction2 = 1.0 if t is None else 1 - h.beta2**t
        length = p_N.new_zeros(())
        vectors = (x[h.span] for x in (p_N, s.mean_N, s.m_N, s.v_N, s.peak_N))
        for p, g, m, v, peak in zip(*(torch.split(x, size) for x in vectors), strict=True):
            m.lerp_(g, 1 - h.beta1)
            v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
            torch.maximum(peak, v, out=peak)
            step = torch.sqrt(peak).div_(correction2**0.5).add_(h.eps)
            torch.div(m, step, out=step).mul_(h.lr / correction1)
            if h.weight_decay:
                step.add_(p, alpha=h.lr * h.weight_decay)
            p.sub_(step)
            for part in torch.split(g, SERIAL if p_N.device.type == "cpu" else size):
                length += part.square().sum()
        return length

    def divisor(self, at: slice) -> Tensor:
        """What m is divided by, for optim.engine.health. at: elements of one run."""
        run = next(run for run in self.runs if run.span.start <= at.start < run.span.stop)
        h = self.hyper(self.param_groups[run.group], run.span)
        seen = run.seen(self.num_updates)
        correction = 1.0 if seen is None else 1 - h.beta2**seen
        divided: Tensor = torch.sqrt(self.vectors.peak_N[at] / correction).add_(h.eps)
        return divided

    # what is saved, and given to others

    def _forget(self) -> None:
        """What this rank sent last is not known any more: the next step sends all."""
        s = self.vectors
        s.sent_N, s.age = None, 0
        if isinstance(s, OneState):
            s.change_N = None
        elif isinstance(s, TwoState):
            s.at_N = None

    def prepare_to_save(self) -> None:
        """As FlatOptimizer.prepare_to_save: all send in the next step, here and in what is loaded."""
        super().prepare_to_save()
        self._forget()

    def own_state(self) -> dict[str, Any]:
        """What this rank sent last, how long ago, and what is compared with it."""
        s = self.vectors
        if s.sent_N is None:
            return {}
        compared = s.change_N if isinstance(s, OneState) else s.at_N if isinstance(s, TwoState) else None
        more = {} if compared is None else {"compared_N": compared.clone()}
        return {"sent_N": s.sent_N.clone(), "age": s.age, **more}

    def check_own(self, own: dict[str, Any]) -> None:
        """Refuse what own_state() cannot have given. Raises: ValueError."""
        if not own:
            return
        age = own.get("age")
        if own.keys() - {"compared_N"} != {"sent_N", "age"} or type(age) is not int or age < 1:
            raise ValueError(f"state_dict has own {sorted(own)}, age = {age!r}: it is damaged, or of another optimizer")
        for name in own.keys() - {"age"}:
            found, shape = own[name], self.space.p_N.shape
            if not isinstance(found, Tensor) or found.shape != shape:
                raise ValueError(f"state_dict has own[{name!r}] = {found!r}, this optimizer needs {list(shape)}")

    def go_on_from(self, own: dict[str, Any], *, in_round: bool) -> None:
        """Hold what own_state() gave; where that is of another rank all send in the next step."""
        self._forget()
        if not own or not in_round:
            return
        s, like = self.vectors, self.space.p_N
        compared = own["compared_N"].to(like, copy=True) if "compared_N" in own else None
        s.sent_N, s.age = own["sent_N"].to(like, copy=True), own["age"]
        if isinstance(s, OneState):
            s.change_N = compared
        elif isinstance(s, TwoState):
            s.at_N = compared

    def end_round_as(self, src: int) -> None:
        """All send in the next step. Local."""
        self._forget()

    def stats(self) -> dict[str, Any]:
        """As for all optimizers; num_uploads: gradients sent, of all ranks, of possible_uploads."""
        return {**super().stats(), **{name: self.saved[name] for name in ("num_uploads", "possible_uploads")}}
