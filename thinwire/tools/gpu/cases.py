"""What is measured, and in which order: the most valuable rows first, for the minutes may end before the list does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.tools.lab.spec import MAX_RATE_MBIT

UNSHAPED_MBIT = MAX_RATE_MBIT
"""A link so fast that it holds nobody up: the sockets of one machine carry less."""
RATES_MBIT = (10_000.0, 1_000.0, UNSHAPED_MBIT, 2_700.0, 25_000.0)
NOTHING = "none"
"""Not a method: the same step without any exchange, at the begin of every pass."""
DEEPSPEED = "0.19.6"
"""The version of DeepSpeed whose step was read (docs/gpu.md)."""

TITLES = {
    NOTHING: "no exchange at all, AdamW",
    "onebit_adam": "1-bit Adam",
    "ddp_bf16": "DDP, its bf16 hook, AdamW",
    "ddp_fp32": "DDP, fp32, AdamW",
    "deepspeed": f"DeepSpeed {DEEPSPEED}'s OneBitAdam",
    "onebit_adam_clipped": "1-bit Adam, max_grad_norm",
    "adam_int8": "1-bit Adam's warm-up in 8 bits",
    "onebit_lamb": "1-bit LAMB",
    "zero_one_adam": "0/1 Adam, a sync each step",
    "zero_one_adam_4": "0/1 Adam, a sync in 4",
    "onebit_muon": "1-bit Muon",
    "onebit_sgd": "1-bit SGD",
    "powersgd": "DDP, PowerSGD of rank 2, AdamW",
    "sharded_onebit_adam": "1-bit Adam over FSDP2's shards",
    "adam_fp32": "1-bit Adam's warm-up in fp32, which is Adam",
    "muon": "Muon, fp32",
    "lamb": "LAMB, fp32",
    "sgd": "SGD, fp32",
    "onebit_adam_node_first": "1-bit Adam, node first",
    "adam_node_first": "Adam in fp32, node first",
    "hsdp": "FSDP2's own replication (HSDP), AdamW",
}
"""Each method as tables call it."""
FIRST = ("onebit_adam", "ddp_bf16", "ddp_fp32", "deepspeed", "onebit_adam_clipped", "adam_int8", "onebit_lamb")
THEN = (
    *("zero_one_adam", "onebit_muon", "powersgd", "sharded_onebit_adam", "zero_one_adam_4", "onebit_sgd"),
    *("adam_fp32", "muon", "lamb", "sgd"),
)
IN_BOXES = (
    *("onebit_adam_node_first", "onebit_adam", "ddp_bf16", "sharded_onebit_adam", "hsdp", "adam_node_first"),
    "onebit_lamb",
)
BOXES, BOX_RANKS = 2, 2


@dataclass(frozen=True, slots=True)
class Pass:
    """One start of the ranks: methods, one after another, over links of one rate."""

    hosts: int
    ranks_per_host: int
    rate_mbit: float
    methods: tuple[str, ...]

    @property
    def rate(self) -> str:
        """As tables call it."""
        return "unshaped" if self.rate_mbit == UNSHAPED_MBIT else f"{self.rate_mbit / 1e3:g} Gbit/s"

    def words(self) -> str:
        """Its hosts and its rate."""
        ranks = f"{self.hosts} hosts" + (f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else "")
        return f"{ranks}, {self.rate}"


def passes(hosts: int, rates_mbit: Sequence[float], only: Sequence[str] | None = None) -> list[Pass]:
    """All passes. rates_mbit: the most wanted first. only: of these methods; a pass without one is left out."""
    some, boxed = (hosts, 1), (BOXES, BOX_RANKS)
    best, *others = rates_mbit
    second, *rest = others or (None,)
    found = [Pass(*some, best, (*FIRST, *THEN))]
    if second is not None:
        found.append(Pass(*some, second, FIRST))
    found.append(Pass(*boxed, best, IN_BOXES))
    found += [Pass(*some, rate, FIRST) for rate in rest]
    if second is not None:
        found += [Pass(*some, second, THEN), Pass(*boxed, second, IN_BOXES)]
    found += [Pass(*some, rate, THEN) for rate in rest]
    found += [Pass(*boxed, rate, IN_BOXES) for rate in rest]
    if only is None:
        return found
    chosen = [replace(one, methods=tuple(name for name in one.methods if name in only)) for one in found]
    return [one for one in chosen if one.methods]
