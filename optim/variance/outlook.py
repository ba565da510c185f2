"""When can compression begin, and did it? Said in the log at construction, and again where a run ends before it did.

A run's end is not told to an optimizer: it is taken to be when the optimizer goes, or the process ends. Nothing is said
of an end by an exception, of a handful of steps, nor where total_steps was known, for then compression does begin.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from dataclasses import dataclass, field

from thinwire.optim.engine.schedule import StepPlan, Wire

logger = logging.getLogger(__name__)

FEWEST_STEPS = 20
"""Of a run that is worth a word: fewer are a trial."""


@dataclass(slots=True)
class Outlook:
    """What is known of one run; kept up to date by its optimizer, and read when that is gone.

    begins: the first step that may be compressed. certain: will it begin in any run of the length that was given?
    steps: taken by this optimizer. compressed: has the variance been frozen?
    """

    begins: int = 0
    certain: bool = False
    steps: int = 0
    compressed: bool = False
    _process: int = field(default_factory=os.getpid)

    def count(self, plan: StepPlan) -> None:
        """A step more, of this plan."""
        self.steps += 1
        self.compressed |= Wire.COMPRESSED in (plan.momentum, plan.gradient)

    def told_at_the_end_of(self, optimizer: object) -> None:
        """Say it when the optimizer goes or the process ends."""
        weakref.finalize(optimizer, _end, self)


def _end(outlook: Outlook) -> None:
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if outlook.compressed or outlook.certain or outlook.steps < FEWEST_STEPS:
        return
    if failed is not None or outlook._process != os.getpid():
        return
    logger.warning(
        "never_compressed steps=%d begins=%d: this run ended before compression could begin, so all of its steps sent "
        "gradients in full: give the optimizer total_steps, the length of the run, or a shorter warmup (0/1 Adam: "
        "fewer dense_steps)",
        outlook.steps,
        outlook.begins,
    )
