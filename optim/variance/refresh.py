"""When a frozen variance is brought up to date, and how much the gradient of that step counts.

A freeze that the optimizer finds by itself is a guess: gradients may grow after it. So in the compressed phase the mean
gradient is now and then exchanged in full, and v takes it in as Adam's v would have taken in all steps since the last
one. With a the age of v after its last change, in steps, g the steps since then, and p a part, by default 1/16:

    next after    gap = clip(p a, 10, max(64, min(4 p, 1) / (1 - beta2)))   steps
    then          w = min((1 - beta2^g) / (1 - beta2^(a + g)), p)
                  v <- (1 - w) v + w (mean_i g_i)^2,   floored

log(end / freeze) / log(1 + p) of them in a run that is not much longer than v's memory. In a long one a part of 1/250
of the steps, with p = 1/16 and beta2 = 0.999. w is at most p, so that by default v is of a dozen gradients at least.
0/1 Adam does it at syncs.

The growing gaps are those of T_v in 0/1 Adam (Lu et al. 2022), in proportion to the age in place of doublings; there
each update has the weight 1 - beta2. Measured: docs/algorithms.md.
"""

from __future__ import annotations

from thinwire.optim.variance.when_to_freeze import memory_steps

PART = 1 / 16
"""A gap is this part of v's age, and no gradient counts for more than this part of v, where nothing else is asked."""
SHORTEST_GAP = 10
"""Steps: so that a run of a hundred is compressed too."""
LONGEST_GAP = 64
"""Steps, or 4 p of what v remembers where that is more."""


def gap_after(age: int, beta2: float, part: float = PART) -> int:
    """Steps from a change of a frozen v to the next. age: of v then, in steps."""
    return min(max(int(age * part), SHORTEST_GAP), longest_gap(beta2, part))


def longest_gap(beta2: float, part: float = PART) -> int:
    """Steps."""
    return max(LONGEST_GAP, int(memory_steps(beta2) * min(4 * part, 1)))


def refreshes_between(age: int, last: int, beta2: float, part: float = PART) -> int:
    """How many there are after age `age`, that of the freeze, up to age `last`, where each comes when it is due."""
    found, longest = 0, longest_gap(beta2, part)
    while (gap := gap_after(age, beta2, part)) < longest and age + gap <= last:
        age, found = age + gap, found + 1
    return found + (max(last - age, 0) // longest if gap == longest else 0)


def weight_of(gap: int, age: int, beta2: float, part: float = PART) -> float:
    """w of a gradient that stands for `gap` steps, in a v that is `age` steps old with them. Both at least 1."""
    if beta2 >= 1:
        return 0.0
    return min((1 - beta2**gap) / (1 - beta2**age), part)
