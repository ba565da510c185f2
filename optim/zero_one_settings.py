"""Where descriptions of 0/1 Adam differ, each by its name. Reasons: docs/algorithms.md.

ZeroOneAdam(params, parity="deepspeed", var_freeze_step=...)             DeepSpeed's
ZeroOneAdam(params, settings=LITERAL)                                    the paper's
ZeroOneAdam(params, settings=replace(OURS, floor=False))                 ours but for one thing
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from math import inf

from thinwire.optim.engine.scales import Scales


class Fresh(StrEnum):
    """When 0/1 Adam updates v before using it: never as in the paper, at the first update only (ours), DeepSpeed's."""

    NEVER = "never"
    AT_FIRST = "at_first"
    ALWAYS = "always"


class Decay(StrEnum):
    """What weight decay shrinks beside x_i: u_i, S and x_s alike; or nothing, lr wd d x being a part of u_i."""

    OF_SUM = "of_sum"
    IN_SUM = "in_sum"


@dataclass(frozen=True, slots=True)
class ZeroOneSettings:
    """A 0/1 Adam. dataclasses.replace makes another: replace(OURS, floor=False).

    fresh: when v is updated before its use. NEVER divides by the eps alone until the first update.
    bias_correction: v is divided by 1 - beta2^(its updates). eps_outside: d = sqrt(v) + eps, else sqrt(v + eps).
    floor: under the v of every step. refresh: after the freeze v is brought up to date at some syncs, where the
    optimizer has found the freeze by itself or is asked to (optim.variance.refresh).
    as_momentum: what is exchanged is u over the mean rate of its steps, as many momenta, and so is what compression
    leaves out; else u.
    slowest_fall: S of a sync is at least this part of the divisor before.
    longest_step: of what a sync gives out, an element moves x by at most this times that divisor; the rest is cut off.
    decay: where weight decay goes; IN_SUM brings it into m too.
    dense_start: the first steps are Adam's, dense_steps of them (optim.variance.when_to_freeze), where none are given.
    gradient_stage: until the freeze there are no local steps; the gradient is exchanged, in full where v is updated,
    in one bit elsewhere, and m and x are Adam's. deliver_errors: its error memory goes into the gradient of its last
    step; else it is dropped.
    aligned: steps of T_v and T_u are those whose number + 1 is a multiple of the interval, not an interval after the
    last. negated: what is exchanged is -u; of a sum that is 0 both send the sign +.
    scales: what shares one; the block length is an argument of the optimizer.
    """

    fresh: Fresh = Fresh.AT_FIRST
    bias_correction: bool = True
    eps_outside: bool = True
    floor: bool = True
    refresh: bool = True
    as_momentum: bool = True
    slowest_fall: float = 0.0
    longest_step: float = 4.0
    decay: Decay = Decay.OF_SUM
    dense_start: bool = True
    gradient_stage: bool = False
    deliver_errors: bool = True
    aligned: bool = False
    negated: bool = False
    scales: Scales = Scales.BLOCK

    def eps_of(self, eps: float) -> tuple[float, float]:
        """d = sqrt(v + inside) + outside: the two, for an eps."""
        return (0.0, eps) if self.eps_outside else (eps, 0.0)

    def plain(self) -> dict[str, str | float | bool]:
        """As a checkpoint holds it."""
        return {name: str(value) if isinstance(value, StrEnum) else value for name, value in asdict(self).items()}


OURS = ZeroOneSettings()
LITERAL = ZeroOneSettings(
    fresh=Fresh.NEVER,
    bias_correction=False,
    eps_outside=False,
    floor=False,
    refresh=False,
    as_momentum=False,
    longest_step=inf,
    dense_start=False,
    scales=Scales.WHOLE,
)
"""Lu et al. 2022, Alg. 1. Weight decay, which it does not have, is ours."""
DEEPSPEED = ZeroOneSettings(
    fresh=Fresh.ALWAYS,
    bias_correction=False,
    floor=False,
    refresh=False,
    as_momentum=False,
    longest_step=inf,
    decay=Decay.IN_SUM,
    dense_start=False,
    gradient_stage=True,
    deliver_errors=False,
    aligned=True,
    negated=True,
    scales=Scales.TENSOR,
)
"""DeepSpeed 0.19.6, but for its world size of 1, where it leaves gradients out."""

DEEPSPEEDS_SCALER = 32678
"""local_step_scaler of DeepSpeed, where none is given: it has no other schedule."""
WRITTEN_BETWEEN_SYNCS = (
    "step {step}, between two syncs, where ranks hold different parameters; the next sync would undo it. Call "
    "optimizer.prepare_to_save() on every rank before you write parameters, or write them where optimizer.at_sync"
)
"""How an error ends that begins with the name of a parameter, and that it was written after ..."""
