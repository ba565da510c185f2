"""Muon, whose update crosses the wire in one bit a value from the first step on.

    rank i   m_i <- beta m_i + (1 - beta) g_i;   w_i = beta m_i + (1 - beta) g_i (Nesterov), or m_i
             u_i = the update that the rule of its tensor makes of w_i (muon_math): orthogonalised, for a matrix
    all      U <- compressed_mean_i(u_i);        x <- x - lr (U + wd x)

Orthogonalising is not linear. What is compressed before it comes out as another matrix, whatever error memory adds
later; behind it the step is linear in what crosses, so that nothing is lost: applied + R' = mean of u_i + R. There is
no variance, so nothing has to be warmed up. m_i is a rank's own at all times, and parameters are common at every step.
A save pulls the momenta to their mean. The dense Muon beside it makes u of the momentum of the mean gradient.

[Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982]
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.exchange.alone import Results
from thinwire.comm.kernels.peak import witness
from thinwire.contract import hyperparameters
from thinwire.contract.hyperparameters import LR, MUON_DECAY, MUON_MOMENTUM
from thinwire.optim.dense import DenseOptimizer
from thinwire.optim.engine.ages import Age
from thinwire.optim.engine.algorithm import Algorithm, State
from thinwire.optim.engine.exchanges import Exchange, LeftGradients, LeftInPlace, formed_sum
from thinwire.optim.engine.hyperparameters import check_group
from thinwire.optim.engine.local import part_of, whole
from thinwire.optim.engine.options import Options, checked_narrow
from thinwire.optim.engine.own_momentum import OwnMomentum
from thinwire.optim.engine.schedule import StepPlan, linear_plan
from thinwire.optim.engine.state import Replicated, Residual
from thinwire.optim.muon_math import RULES, Tensors, vectors
from thinwire.optim.muon_rules import check_rule, refuse_vectors, rules_of

logger = logging.getLogger(__name__)

Narrow = Literal["momentum", "error_memory"]
"""What may be kept in bfloat16."""
Batch = list[tuple[int, slice]]
"""Tensors: number and place of each."""
PIECE = 1 << 20
"""Elements for which there is scratch where a result is read, or updates of vectors are made together."""


@dataclass(frozen=True, slots=True)
class MuonHyper:
    """The hyperparameters of one parameter group, or of a run in it, and the slice of the flat vectors that it owns."""

    span: slice
    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    rule: str | None


@dataclass(slots=True)
class MuonState:
    """Momentum, and with full_exchange="int8" what 8 bits have left out of gradients."""

    m_N: Replicated
    gradient_error: Residual | None = None


@dataclass(slots=True)
class OneBitMuonState:
    """m: of this rank; of all after a save. update_error: what signs have left out of updates.

    An element in fp32 takes 8 bytes as parameter and gradient, 4 as m, 4 + 4 / ranks of error memory, and 3/8 of a byte
    as rows of signs; in bfloat16 m and error memory take half of that. While a step sends, the update of a tensor that
    spans buckets is there too, until its last bucket.
    """

    m_N: Replicated
    update_error: Residual


class Orthogonalising(Algorithm[State]):
    """What both have: groups with a rule, and a tensor's update out of its momentum."""

    shown: ClassVar = {"m_N": "momentum_buffer"}

    _rules: list[str]
    """Of each tensor that is laid out, where its group says none. By number: a dict of parameters would hold them
    (engine/orphans.py)."""

    @property
    def rules(self) -> dict[Tensor, str]:
        """By parameter the name of its rule, as it was said or found; new."""
        return rules_of(self.param_groups, self.model)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters out of range, and groups that hold nothing but vectors. Raises: ValueError."""
        check_group(group, hyperparameters.MUON, ("nesterov",))
        check_rule(group["rule"], group["params"])
        refuse_vectors(self.param_groups, rules_of(self.param_groups, self.model))

    def hyper(self, group: dict[str, Any], span: slice, seen: int | None = None) -> MuonHyper:
        """The hyperparameters of a group, for this step. Its momentum takes no correction: no rule asks its size.

        Raises: ValueError for a rule that was written into the group since, and that its parameters cannot have.
        """
        check_rule(group["rule"], group["params"])
        lr, names = float(group["lr"]), ("momentum", "weight_decay", "nesterov", "rule")
        return MuonHyper(span, lr, *(group[name] for name in names))

    def gradient_weight(self, group: dict[str, Any]) -> float:
        """What a gradient counts in the momentum."""
        return 1 - float(group["momentum"])

    def set_ages(self, ages: Sequence[Age]) -> None:
        """As FlatOptimizer.set_ages; and find the rules of what is laid out."""
        super().set_ages(ages)
        self._batches: dict[tuple[int, int, str | None], list[Batch]] = {}
        rules = rules_of([{**group, "rule": None} for group in self.param_groups], self.model)
        found = [rules[tensor.param] for tensor in self.space.tensors]
        if found != getattr(self, "_rules", None):
            self._rules = found
            if self.group.rank == 0:
                logger.info("rules %s", " ".join(f"{rule}={count}" for rule, count in self.count_rules().items()))

    def count_rules(self) -> dict[str, int]:
        """Elements that each rule moves."""
        counts = dict.fromkeys(RULES, 0)
        for param, rule in self.rules.items():
            counts[rule] += param.numel()
        return {rule: count for rule, count in counts.items() if count}

    def batches(self, h: MuonHyper, span: slice) -> list[Batch]:
        """The tensors that have elements in a span, as tensors_in() gives them: vectors together, and the others.

        So many small tensors take a few calls. What is made of a batch at a time, a few copies of it, is bounded: it
        has at most PIECE elements, or is one tensor.
        """
        key = span.start, span.stop, h.rule
        if key not in self._batches:
            own = list(tensors_in(self, span))
            of_kind = ([one for one in own if (self._rule(one[0], h) == "vector") == kind] for kind in (False, True))
            self._batches[key] = [batch for kind in of_kind for batch in _bounded(kind)]
        return self._batches[key]

    def updates_of(self, batch: Sequence[int], m: Tensors, g: Tensors, h: MuonHyper) -> list[Tensor]:
        """u of these tensors, of a batch, new, of momenta as they are with these gradients. All are float[elements].

        Of a shard its part of the whole tensor's, of which each rank of the box makes all: collective there, but for
        vectors, where each entry is by itself.
        """
        of_w = torch._foreach_lerp(g, m, h.momentum) if h.nesterov else m
        if self._rule(batch[0], h) == "vector":
            return vectors(of_w)
        found = []
        for i, w in zip(batch, of_w, strict=True):
            tensor = self.space.tensors[i]
            u = RULES[self._rule(i, h)](whole(w.view(tensor.shape), tensor.param))
            found.append(part_of(u, tensor.param).reshape(-1))
        return found

    def _rule(self, i: int, h: MuonHyper) -> str:
        return h.rule or self._rules[i]


def defaults(lr: float, momentum: float, weight_decay: float, nesterov: bool) -> dict[str, Any]:
    """The per-group hyperparameters, under the names of torch.optim.Muon; rule: None where it is found."""
    return {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "rule": None}


class Muon(DenseOptimizer[MuonState], Orthogonalising[MuonState]):
    """Muon on the mean gradient, with Moonlight's scale; embeddings, output heads and vectors by rules of their own.

    params: parameters or groups, as torch.optim takes them, all of a model: which are which is found from model=, the
    names that they were given with and their shapes (optim.muon_rules), shown as `rules`, and can be said by a group's
    `rule`: {"params": ..., "rule": "matrix"}. momentum, nesterov, weight_decay (decoupled): as in torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw", where AdamW's rates are to begin with.
    group, model, max_grad_norm, non_finite, overlap, full_exchange, topology: as in CheckedOptions.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        momentum: float = MUON_MOMENTUM.default,
        weight_decay: float = MUON_DECAY.default,
        *,
        nesterov: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, defaults(lr, momentum, weight_decay, nesterov), **options)

    def make_state(self) -> MuonState:
        """An empty vector."""
        return MuonState(self.new_vector(), self.new_gradient_memory())

    def update(self, plan: StepPlan, groups: Sequence[MuonHyper]) -> None:
        """Average the gradients, then Muon."""
        space, m_N = self.space, self.vectors.m_N
        self.mean_gradient_()
        for h in groups:
            for batch in self.batches(h, h.span):
                m, g, p = (parts_of(x_N, [at for _, at in batch]) for x_N in (m_N, space.g_N, space.p_N))
                torch._foreach_lerp_(m, g, 1 - h.momentum)
                u = self.updates_of([i for i, _ in batch], m, g, h)
                torch._foreach_mul_(p, 1 - h.lr * h.weight_decay)
                torch._foreach_sub_(p, u, alpha=h.lr)

    def stats(self) -> dict[str, Any]:
        """As for all optimizers; rules: elements that each moves."""
        return {**super().stats(), "rules": self.count_rules()}


class Step:
    """x <- x - lr (U + wd x), as U is read. A Reader. p: float[N], modified."""

    def __init__(self, p_N: Tensor, h: MuonHyper) -> None:
        self._p_N, self._lr, self._keep = p_N, h.lr, 1 - h.lr * h.weight_decay

    def values(self, at: slice, values: Tensor) -> None:
        """U as floats, 0 where dead."""
        self._p_N[at].mul_(self._keep).sub_(values, alpha=self._lr)


class OneBitMuon(OwnMomentum[OneBitMuonState], Orthogonalising[OneBitMuonState]):
    """Muon as a torch.optim.Optimizer whose updates are exchanged in one bit a value, from the first step on.

    params, lr, momentum, weight_decay, nesterov, and which parameters get which rule: as in Muon. Every rank makes the
    updates of its own momentum, and their mean is what moves the parameters.
    max_grad_norm: each rank shortens its own gradient before the momentum takes it in. An update has one size however
    long the gradient is, so that this bounds what one bad batch counts among those before it, not the step.
    narrow: which of "momentum" and "error_memory" take half of float32's memory, in bfloat16; with topology "flat".
    group, model, non_finite, overlap, topology: as in CheckedOptions. Nothing is exchanged in full, so full_exchange is
    refused.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    results: ClassVar[Results] = "read"
    sends_in_full: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        momentum: float = MUON_MOMENTUM.default,
        weight_decay: float = MUON_DECAY.default,
        *,
        nesterov: bool = True,
        narrow: Collection[Narrow] = (),
        **options: Unpack[Options],
    ) -> None:
        self.narrow = checked_narrow(narrow, get_args(Narrow))
        super().__init__(params, defaults(lr, momentum, weight_decay, nesterov), **options)

    def dtype_of(self, name: str, frozen_at: int | None) -> torch.dtype:
        """As FlatOptimizer.dtype_of: a momentum in bfloat16 where that was asked for."""
        narrow = name == "m_N" and "momentum" in self.narrow
        return torch.bfloat16 if narrow else super().dtype_of(name, frozen_at)

    def begin(self) -> None:
        """Set what a fresh run begins with."""
        super().begin()
        self._sent: dict[int, tuple[Tensor, int]] = {}
        """Updates of tensors that span buckets, and how many of their elements are still to be sent."""
        self._of_box: dict[int, Tensor] = {}
        """Updates of this step, where tensors are cut over a box."""
        self._where: LeftInPlace | None = None

    def make_state(self) -> OneBitMuonState:
        """An empty vector and error memory."""
        return OneBitMuonState(self.new_vector(self.dtype_of("m_N", None)), self.reduce.new_memory())

    def plan(self, step: int) -> StepPlan:
        """Every step is compressed."""
        return linear_plan()

    def may_overlap(self, plan: StepPlan) -> bool:
        """As FlatOptimizer.may_overlap."""
        return self.space.box is None

    def waits_for(self, plan: StepPlan) -> str | None:
        """As FlatOptimizer.waits_for."""
        if self.space.box is not None:
            return "updates of tensors that are cut over a box are made by all of its ranks in one order"
        return super().waits_for(plan)

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """This rank's update, made tensor by tensor when a bucket has the first elements of it."""
        self._sent.clear()
        m_N, g_N = self.vectors.m_N, self.space.g_N
        if self.space.box is not None:  # in one order, whatever buckets each rank of the box has
            for h in self.hypers(self.num_steps + 1):
                for batch in self.batches(h, h.span):
                    self._of_box.update(self._made(batch, (), h))
        self._where = LeftInPlace(self.reduce.buckets.layout, g_N)
        # One rank looks at the gradient alone, where the momentum is known to be finite: else updates are made twice.
        known = g_N if self.group.size == 1 and bool(torch.isfinite(witness(m_N))) else None
        form = partial(self._formed, self.hypers(self.num_steps + 1))  # undone by what it was formed with
        return formed_sum(self.reduce, self.vectors.update_error, form, self._where, known)

    def _formed(self, groups: Sequence[MuonHyper], at: slice, runs: LeftGradients) -> Tensor:
        """These elements of this rank's update, new."""
        u_b = self.space.g_N.new_zeros(at.stop - at.start)
        made: list[tuple[slice, Tensor]] = []
        for h in groups:
            for batch in self.batches(h, slice(max(at.start, h.span.start), min(at.stop, h.span.stop))):
                fresh = [] if self._of_box else [one for one in batch if one[0] not in self._sent]
                if fresh:
                    self._sent.update((i, (u, u.numel())) for i, u in self._made(fresh, runs, h).items())
                for i, own in batch:
                    low, high = max(at.start, own.start), min(at.stop, own.stop)
                    u, left = (self._of_box[i], 0) if self._of_box else self._sent.pop(i)
                    part = u if (low, high) == (own.start, own.stop) else u[low - own.start : high - own.start]
                    made.append((slice(low - at.start, high - at.start), part))
                    if left > high - low:
                        self._sent[i] = u, left - (high - low)
        if made:
            made.sort(key=lambda one: one[0].start)
            torch._foreach_copy_(parts_of(u_b, [into for into, _ in made]), [part for _, part in made])
        return u_b

    def _made(self, batch: Batch, runs: LeftGradients, h: MuonHyper) -> dict[int, Tensor]:
        """Of each tensor of a batch its update, new, of its momentum with this step's gradient in it."""
        which, g = [i for i, _ in batch], self._gradients_of(batch, runs)
        before = parts_of(self.vectors.m_N, [at for _, at in batch])
        if "momentum" in self.narrow:
            before = [m.to(self.space.g_N.dtype) for m in before]
        u = self.updates_of(which, torch._foreach_lerp(before, g, 1 - h.momentum), g, h)
        return dict(zip(which, u, strict=True))

    def _take_in(self, h: MuonHyper, runs: LeftGradients) -> None:
        """m <- m with this step's gradient in it, as updates were made of it.

        In bfloat16 it is rounded to the nearest: a step moves it by a twentieth of g - m, and not by less than it has
        digits for unless g is m to a few hundredths. Then each is widened by itself.
        """
        own = list(tensors_in(self, h.span))
        m, g = parts_of(self.vectors.m_N, [at for _, at in own]), self._gradients_of(own, runs)
        if "momentum" not in self.narrow:
            torch._foreach_lerp_(m, g, 1 - h.momentum)
            return
        for narrow, one in zip(m, g, strict=True):
            narrow.copy_(torch.lerp(narrow.to(one.dtype), one, 1 - h.momentum))

    def _gradients_of(self, batch: Batch, runs: LeftGradients) -> list[Tensor]:
        """Of these tensors, where they are."""
        flat = parts_of(self.space.g_N, [at for _, at in batch])
        if not runs:
            return flat
        left = [runs[i] for i, _ in batch]
        return [x if run is None else run for x, run in zip(flat, left, strict=True)]

    def update(self, plan: StepPlan, groups: Sequence[MuonHyper]) -> None:
        """One step on this rank.

        Raises: as OwnMomentum.exchange_.
        """
        self.exchange_(plan)
        result, runs = self.reduce.result, () if self._where is None else self._where.runs
        self.reduce.commit()  # first: where it is interrupted, nothing has moved
        for h in groups:
            reader = Step(self.space.p_N, h)
            for low in range(h.span.start, h.span.stop, PIECE):
                result.read(reader, low, min(low + PIECE, h.span.stop))
        for h in groups:
            self._take_in(h, runs)
        self._sent.clear()
        self._of_box.clear()
        self._where = None
        if self.group.size == 1:
            self.saved["last_sync"] = self.num_steps + 1

    def stats(self) -> dict[str, Any]:
        """As for all optimizers; rules: elements that each moves."""
        return {**super().stats(), "rules": self.count_rules()}


def _bounded(own: Batch) -> list[Batch]:
    """The same in batches of at most PIECE elements, or of one tensor."""
    found: list[Batch] = []
    room = 0
    for i, at in own:
        room -= at.stop - at.start
        if room < 0 or not found:
            found.append([])
            room = PIECE - (at.stop - at.start)
        found[-1].append((i, at))
    return found


def parts_of(x_N: Tensor, places: Sequence[slice]) -> list[Tensor]:
    """x_N[at] of each of these, which ascend and are disjoint: views, made in one call."""
    sizes: list[int] = []
    numbers, end = [], 0
    for at in places:
        if at.start > end:
            sizes.append(at.start - end)
        numbers.append(len(sizes))
        sizes.append(at.stop - at.start)
        end = at.stop
    cut = x_N[:end].split_with_sizes(sizes)
    return [cut[number] for number in numbers]


def tensors_in(optimizer: Algorithm[Any], span: slice) -> Iterator[tuple[int, slice]]:
    """The tensors that have elements in a span of the flat vectors: number and place of each, whole."""
    tensors = optimizer.space.tensors
    first = bisect_left(tensors, span.start, key=attrgetter("start"))  # one without elements, of a box, too
    first -= first > 0 and tensors[first - 1].stop > span.start
    for i in range(first, len(tensors)):
        if tensors[i].start >= span.stop:
            return
        yield i, slice(tensors[i].start, tensors[i].stop)
