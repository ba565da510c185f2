"""Where descriptions of 1-bit Adam and 1-bit LAMB differ, each by its name. Reasons: docs/algorithms.md.

OneBitAdam(params, parity="deepspeed")                                   DeepSpeed's
OneBitAdam(params, settings=LITERAL)                                     the paper's
OneBitAdam(params, settings=replace(OURS, bias_correction=False))        ours but for one thing
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from thinwire.optim.engine.scales import Scales


@dataclass(frozen=True, slots=True)
class OneBitSettings:
    """A 1-bit Adam or 1-bit LAMB. dataclasses.replace makes another: replace(OURS, floor=False).

    bias_correction: m and v (LAMB: c_avg too) are corrected in warm-up, the corrected v is kept.
    floor: under the v that is kept; LAMB's r is a maximum over what it did not raise. scales: what shares one.
    refresh: the v that is kept is brought up to date now and then, where the optimizer has found the freeze by itself
    or is asked to (optim.variance.refresh).
    LAMB alone. weigh_ratio: the decay's part of an update is not rescaled by r. skip_unit_coefficients: a trust ratio
    of exactly 1 does not enter c_avg. longest_step: the factor of a tensor's step is at most this times its trust ratio
    of now, so that a frozen v that has become too small cannot make steps of any length. follow_trust: where v is
    brought up to date the trust ratio is too (optim.lamb_math.lengthened), in place of c_avg r. sum_gradients: there,
    and where many gradients are zero, v takes in the sum of all since it was brought up to date last
    (optim.variance.sums).
    """

    bias_correction: bool = True
    floor: bool = True
    refresh: bool = True
    scales: Scales = Scales.BLOCK
    weigh_ratio: bool = True
    skip_unit_coefficients: bool = False
    longest_step: float = 4.0
    follow_trust: bool = True
    sum_gradients: bool = True


OURS = OneBitSettings()
LITERAL = OneBitSettings(
    bias_correction=False,
    floor=False,
    refresh=False,
    scales=Scales.WHOLE,
    weigh_ratio=False,
    longest_step=inf,
    follow_trust=False,
    sum_gradients=False,
)
"""Tang et al. 2021, Alg. 1, and Li et al. 2021. Weight decay, which the first does not have, is ours."""
DEEPSPEED_ADAM = OneBitSettings(
    bias_correction=False, floor=False, refresh=False, scales=Scales.TENSOR, follow_trust=False, sum_gradients=False
)
"""DeepSpeed 0.19.6 with parameters in fp32; under its fp16 wrapper scales are Scales.GROUP."""
DEEPSPEED_LAMB = OneBitSettings(
    bias_correction=False,
    floor=False,
    refresh=False,
    scales=Scales.FUSED,
    skip_unit_coefficients=True,
    longest_step=inf,
    follow_trust=False,
    sum_gradients=False,
)
"""DeepSpeed 0.19.6."""
