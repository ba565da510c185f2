"""SGD whose momentum crosses in one bit, from the first step on: torch.optim.SGD under error feedback.

    z_i = mu m + (1 - d) (g_i + wd x)        d: dampening, 0 in the first step of a tensor; to maximise: -g_i
    m' <- compressed_mean_i(z_i)
    x  <- x - lr m'                          Nesterov's: x - lr ((1 + mu) m' - mu m)

The rule is linear in what crosses, so error feedback loses nothing: what one step leaves out a later one sends. There
is no variance that would have to be known first, and so no warm-up. What crosses is the momentum and not the gradient,
which is several times longer, and with it what one bit leaves out of it: at rates that SGD stands, SGD on a gradient in
one bit diverges (docs/algorithms.md). The rule is as linear in what any other codec leaves of it. By factors of
matrices (PowerSGD) the gradient crosses, and m' <- mu m + what was received.
Source: Tang et al. 2021, Alg. 1, its second phase with v = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.codecs import PowerSGD, codec_of
from thinwire.comm.codecs.low_rank import LowRank
from thinwire.comm.protocol import Codec, LinearCodec
from thinwire.contract import hyperparameters
from thinwire.contract.hyperparameters import DAMPENING, LR, MOMENTUM, RANK, WEIGHT_DECAY, CodecName
from thinwire.optim.engine.exchanges import Exchange, LeftGradients, formed_sum
from thinwire.optim.engine.hyperparameters import check_group
from thinwire.optim.engine.momentum import Momentum
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.options import Options
from thinwire.optim.engine.schedule import StepPlan, linear_plan
from thinwire.optim.engine.state import Replicated, Residual

SWITCHES = ("nesterov", "maximize")
PIECE = 1 << 18
"""Elements, of a CPU's passes."""


@dataclass(frozen=True, slots=True)
class MomentumHyper:
    """The hyperparameters of one parameter group, or of a run in it, and the slice of the flat vectors that it owns.

    gradient, decay: what g and x count in the momentum of this step.
    """

    span: slice
    lr: float
    momentum: float
    gradient: float
    decay: float
    nesterov: bool


@dataclass(slots=True)
class OneBitSgdState:
    """Momentum, and its error memory.

    An element in fp32 takes 8 bytes as parameter and gradient, 4 + 4 / ranks of error memory, and half a byte as rows
    of signs, which hold m; 4 more from a load or state_dict() to the end of the next step. By another codec m is in
    floats, 4 bytes, what is left out is kept until it counts, 4 more, and rows have their bytes four times. One rank
    has m twice, in floats, and no error memory.
    """

    momentum: Momentum
    momentum_error: Residual

    @property
    def m_N(self) -> Replicated:
        """The momentum of all ranks, decoded where it is in received rows."""
        return self.momentum.floats()

    def holder(self, name: str) -> Momentum | LowRank:
        """What holds a vector that is not a field: m."""
        return self.momentum


@dataclass(slots=True)
class LowRankSgdState(OneBitSgdState):
    """The same by factors of matrices: where the next step begins, too, as a vector when asked for."""

    factors: LowRank

    @property
    def q_N(self) -> Replicated:
        """Q of all matrices (comm.codecs.low_rank)."""
        return self.factors.floats()

    def holder(self, name: str) -> Momentum | LowRank:
        """What holds a vector that is not a field: m, Q."""
        return self.factors if name == "q_N" else self.momentum


class OneBitSGD(FlatOptimizer[OneBitSgdState]):
    """SGD with momentum as a torch.optim.Optimizer, at 1/32 of fp32's bytes on the wire, or by `codec`, in every step.

    params: parameters or groups, as torch.optim takes them. momentum, dampening, weight_decay (coupled), nesterov,
    maximize: as in torch.optim.SGD, each per group; a schedule may move lr and momentum.
    codec: how the momentum is written: "sign", one bit a value; "int8"; "int4"; "topk", the largest 64 of 4096 in 2
    bits each; "threshold", the largest hundredth in 16; "powersgd", matrices of the gradient as the product of two
    factors of `rank` columns, sent in full (PowerSGD of thinwire.comm.codecs); or a Codec, the same on every rank. One
    rank writes nothing. By another than signs topology
    is "flat". PowerSGD takes the vector as one: with overlap it is sent at the end of backward.
    group: the ranks (None: torch.distributed's default group, or this process alone). model, overlap, max_grad_norm,
    non_finite, topology: as in CheckedOptions (optim.engine.options). Nothing is exchanged in full, so full_exchange is
    refused; max_grad_norm shortens each rank's own gradient.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    shown: ClassVar[Mapping[str, str]] = {"m_N": "momentum_buffer"}
    sends_in_full: ClassVar[bool] = False

    @property
    def sends_gradient(self) -> bool:
        """Does the gradient cross, not the momentum, which factors would hold to their rank? Then m is in floats."""
        return isinstance(self.codec, PowerSGD)

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        momentum: float = MOMENTUM.default,
        *,
        dampening: float = DAMPENING.default,
        weight_decay: float = WEIGHT_DECAY.default,
        nesterov: bool = False,
        maximize: bool = False,
        codec: CodecName | Literal["powersgd"] | Codec | PowerSGD = "sign",
        rank: int = RANK.default,
        **options: Unpack[Options],
    ) -> None:
        if codec != "sign":  # those of the class, which may share scales otherwise
            self.codec = sgd_codec(codec, rank)
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "nesterov": nesterov, "maximize": maximize}, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters out of range. Raises: ValueError."""
        check_group(group, hyperparameters.ONEBIT_SGD, SWITCHES)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError(
                f"nesterov = True with momentum = {group['momentum']!r}, dampening = {group['dampening']!r}: it needs "
                "a momentum above 0 and no dampening"
            )

    def hyper(self, group: dict[str, Any], span: slice, seen: int | None = None) -> MomentumHyper:
        """The hyperparameters of a group, for this step, which is the first of its tensors where seen is 1."""
        momentum, nesterov = float(group["momentum"]), group["nesterov"]
        weight = 1.0 if seen == 1 or not momentum else self.gradient_weight(group)
        gradient, decay = -weight if group["maximize"] else weight, weight * float(group["weight_decay"])
        return MomentumHyper(span, float(group["lr"]), momentum, gradient, decay, nesterov)

    def gradient_weight(self, group: dict[str, Any]) -> float:
        """What a gradient counts in the momentum of this group: 1 - dampening."""
        return 1.0 - float(group["dampening"])

    def make_state(self) -> OneBitSgdState:
        """An empty vector and error memory."""
        memory = self.reduce.new_memory()
        momentum = Momentum(self.new_vector(), self.reduce, memory)
        if not isinstance(self.codec, PowerSGD):
            return OneBitSgdState(momentum, memory)
        factors = self.reduce.sums or self.codec.over(self.space.layout, self.space.p_N)  # one rank keeps them alone
        assert isinstance(factors, LowRank)
        return LowRankSgdState(momentum, memory, factors)

    def plan(self, step: int) -> StepPlan:
        """Every step exchanges the momentum."""
        return linear_plan()

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """The momentum, formed of each bucket's own gradients."""
        form = partial(self._formed, self.hypers(self.num_steps + 1))
        return formed_sum(self.reduce, self.vectors.momentum_error, form)

    def _formed(self, groups: Sequence[MomentumHyper], at: slice, runs: LeftGradients) -> Tensor:
        """z of these elements, new. Every product is rounded before it is added, so that slices change no bit."""
        p_N, g_N, momentum = self.space.p_N, self.space.g_N, self.vectors.momentum
        made = torch.empty_like(g_N[at])
        for h, part in self._pieces(groups, at):
            z, g = made[part.start - at.start : part.stop - at.start], g_N[part]
            z = z.zero_() if self.sends_gradient else momentum.decode_(z, part).mul_(h.momentum)
            z.add_(g if h.gradient == 1 else g * h.gradient)
            if h.decay:
                z.add_(p_N[part] * h.decay)
        return made

    def update(self, plan: StepPlan, groups: Sequence[MomentumHyper]) -> None:
        """Exchange the momentum, then descend along what was received."""
        self.exchange_(plan)
        s, p_N, result = self.vectors, self.space.p_N, self.reduce.result
        for h, part in self._pieces(groups, slice(0, len(p_N))):
            step = torch.empty_like(p_N[part])
            result.decode_(step, part.start, part.stop)
            if h.nesterov or self.sends_gradient:
                before = s.momentum.decode_(torch.empty_like(step), part).mul_(h.momentum)
            if self.sends_gradient:
                s.momentum.floats()[part] = step.add_(before)
            if h.nesterov:
                step.mul_(1 + h.momentum).sub_(before)
            p_N[part].sub_(step.mul_(h.lr))
        self.reduce.commit()
        if not self.sends_gradient:
            s.momentum.received()

    def _pieces(self, groups: Sequence[MomentumHyper], at: slice) -> Iterator[tuple[MomentumHyper, slice]]:
        """The elements `at` by run, in pieces: on a CPU such as its cache holds from operation to operation, else at
        least of the largest bucket.
        """
        spans = [] if self.space.p_N.device.type == "cpu" else self.reduce.buckets.spans
        most = max([PIECE, *(stop - start for start, stop in spans)])
        for h in groups:
            for start in range(max(at.start, h.span.start), min(at.stop, h.span.stop), most):
                yield h, slice(start, min(start + most, at.stop, h.span.stop))


def sgd_codec(given: str | Codec | PowerSGD, rank: int) -> Codec | LinearCodec:
    """As codec_of(), and "powersgd". Raises: ValueError."""
    RANK.check(rank)
    if given == "powersgd" or isinstance(given, PowerSGD):
        return PowerSGD(rank) if isinstance(given, str) else given
    try:
        return codec_of(given)
    except ValueError as error:
        raise ValueError(f'{error}, or "powersgd"') from None
