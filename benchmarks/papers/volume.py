"""Bytes and rounds of the papers' own schedules, counted by the plans of our optimizers, and by our own rules.

Of a vector of N values a ring or two collectives carry 2 (P - 1) / P of its bytes, whatever their precision: ratios do
not depend on the number of GPUs P.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.comm.wire.network import one_bit_bytes
from thinwire.workers.plan import schedule
from thinwire.workers.plan.schedule import Kinds, RunSteps

BERT_LARGE = 336_226_108
"""Values of BERT-Large with its two heads for pre-training."""
HALF = 2
"""Bytes of a value in the papers' dense runs, fp16."""

ADAM_LARGE = RunSteps(
    152_000, "onebit_adam", lr_warmup_steps=12_500, floor=0.1, warmup=23_000, full_exchange="bf16", half=True
)
"""BERT-Large, sequence 128: 1-bit Adam dense for 23 k of 152 k steps (arXiv 2102.02888, section 7)."""
ADAM_BASE = replace(ADAM_LARGE, steps=118_000, warmup=16_000)
"""BERT-Base: 16 k of 118 k."""
SQUAD = replace(ADAM_LARGE, steps=1_848, warmup=400, lr_warmup_steps=184)
"""SQuAD fine-tuning: 400 of 1,848, batch 96, two epochs (DeepSpeed's configuration)."""
LAMB_LARGE = RunSteps(
    5_993, "onebit_lamb", lr_warmup_steps=1_000, floor=0.1, warmup=1_000, full_exchange="bf16", half=True
)
"""BERT-Large, batch 65,536: 1-bit LAMB dense for 1,000 of 5,993 steps (arXiv 2104.06069)."""
ZERO_ONE_LARGE = RunSteps(
    152_000,
    "zero_one_adam",
    lr_warmup_steps=12_500,
    floor=0.1,
    var_freeze_step=12_500,
    dense_steps=0,
    local_step_scaler=32_678,
    full_exchange="bf16",
    half=True,
    local_step_clipper=16,
)
"""0/1 Adam as DeepSpeed ships it for the paper's BERT-Large run (arXiv 2202.06009)."""


@dataclass(frozen=True, slots=True)
class Volume:
    """What a run sends. bits: a value and step, over the whole run; rounds: the part of its steps that send."""

    bits: float
    rounds: float

    @property
    def over_half(self) -> float:
        """How many times less than dense fp16."""
        return 8 * HALF / self.bits


def volume(run: RunSteps) -> Volume:
    """Of a run as `run` says it. Raises: ValueError for a method that sends no one-bit vectors after a warm-up."""
    kinds = _kinds(run)
    one_bit = 8 * one_bit_bytes(BERT_LARGE) / BERT_LARGE
    full = 8 * (1 if schedule.full_wire(run, _freeze(run)) == "int8" else HALF)
    bits = kinds.full * full + kinds.both * (full + one_bit) + kinds.compressed * one_bit
    return Volume(bits / run.steps, (kinds.warmup + kinds.compressed) / run.steps)


def by_our_rules(run: RunSteps) -> RunSteps:
    """The same run with what our optimizers choose where nothing is said: the warm-up by the variance, in 8 bits."""
    return RunSteps(run.steps, run.method, lr_warmup_steps=run.lr_warmup_steps, floor=run.floor)


def _freeze(run: RunSteps) -> int | None:
    return run.var_freeze_step if run.method == "zero_one_adam" else run.warmup


def _kinds(run: RunSteps) -> Kinds:
    if run.method == "zero_one_adam":
        return schedule.zero_one(run)
    if run.method in ("onebit_adam", "onebit_lamb"):
        return schedule.one_bit(run, lamb=run.method == "onebit_lamb")
    raise ValueError(f"{run.method}: only 1-bit Adam, 1-bit LAMB and 0/1 Adam are the papers'")
