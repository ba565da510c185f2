"""The methods that are compared, in the order in which they are printed, and the families that make them.

A family has one model and one optimizer, and is made once in a process; its methods are settings of it (three hooks of
one DDP, three intervals of one 0/1 Adam), because all methods lie in memory side by side and take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.wire.cases import Load
from benchmarks.wire.loads import Inputs
from benchmarks.wire.phases import PhaseClock
from thinwire.comm.protocol import Stats


@dataclass(frozen=True, slots=True)
class Setting:
    """What a family is made from. process_group: its own, so that a method that fails takes no other along."""

    load: Load
    process_group: dist.ProcessGroup
    clock: PhaseClock


class Family(Protocol):
    """A model with its optimizer on one rank; every rank calls alike."""

    @property
    def overlap(self) -> bool | None:
        """Does it exchange while backward runs? None: it exchanges nothing. Asked after the last step."""

    def settle(self, inputs: Inputs) -> None:
        """The steps that its methods need first, before any `use`; all ranks have the same inputs in them."""

    def use(self, variant: str) -> int:
        """From here on be this method. Returns the steps of one turn of it."""

    def step(self, arguments: tuple[Any, ...]) -> None:
        """Forward, backward, exchange, update."""

    def sent_bytes(self) -> int:
        """Payload that this rank has sent so far."""

    def parameters(self) -> Sequence[Tensor]:
        """Its parameters; equal on all ranks after a turn."""


@dataclass(frozen=True, slots=True)
class Method:
    """vectors: memory it needs on a rank, in float32 vectors as long as the model; of its family where it has more.

    ours: it compresses by itself, so that its phases are known. title: as tables call it. by_name: runs only where
    --methods names it.
    """

    name: str
    title: str
    family: str
    variant: str
    vectors: float
    ours: bool = False
    by_name: bool = False


BASELINE = "ddp_fp32"
COMPUTE = "compute"
"""Not a method: forward and backward without any exchange, in turns with the others."""
ZERO_ONE_INTERVALS = (1, 4, 16)
POWERSGD_RANKS = (1, 2, 4)

METHODS = {
    method.name: method
    for method in (
        Method(BASELINE, "DDP fp32", "ddp", "", 5),
        Method("ddp_bf16", "DDP + bf16 hook", "ddp_cast", "bf16", 5.5),
        Method("ddp_fp16", "DDP + fp16 hook", "ddp_cast", "fp16", 5.5),
        *(
            Method(f"powersgd_{rank}", f"DDP + PowerSGD rank {rank}", "powersgd", str(rank), 10.5)
            for rank in POWERSGD_RANKS
        ),
        Method("chain_flat", "1-bit Adam, torch chain, flat", "chain_flat", "", 10, ours=True),
        Method("adam", "Adam, our engine", "adam", "", 6, ours=True),
        Method("adam_int8", "Adam, our engine, 8 bits", "adam_int8", "", 8.5, ours=True, by_name=True),
        Method("onebit_adam", "1-bit Adam", "onebit_adam", "", 8, ours=True),
        Method(
            "onebit_adam_shadow",
            "1-bit Adam, server error kept twice",
            "onebit_adam_shadow",
            "",
            9,
            ours=True,
            by_name=True,
        ),
        Method("onebit_adam_rows", "1-bit Adam, rows kept", "onebit_adam_rows", "", 8.25, ours=True, by_name=True),
        Method("onebit_lamb", "1-bit LAMB", "onebit_lamb", "", 9, ours=True),
        *(
            Method(f"zero_one_adam_{k}", f"0/1 Adam, interval {k}", "zero_one_adam", str(k), 11, ours=True)
            for k in ZERO_ONE_INTERVALS
        ),
    )
}
STANDARD = [method.name for method in METHODS.values() if not method.by_name]
"""What runs where nobody asks for others."""
COMPUTE_METHOD = Method(COMPUTE, "forward + backward alone", COMPUTE, "", 2.5)
HANDED_VECTORS = 2.0
"""Gradients of exchange-only loads: those that are kept, and the copies that a step is given."""


_MAKERS = {
    COMPUTE: ("benchmarks.wire.ddp", "ComputeAlone"),
    "ddp": ("benchmarks.wire.ddp", "PlainDdp"),
    "ddp_cast": ("benchmarks.wire.ddp", "CastDdp"),
    "powersgd": ("benchmarks.wire.ddp", "PowerSgdDdp"),
    "chain_flat": ("benchmarks.wire.chain", "ChainFlat"),
    "adam": ("benchmarks.wire.ours", "DenseAdam"),
    "adam_int8": ("benchmarks.wire.ours", "DenseAdamInt8"),
    "onebit_adam": ("benchmarks.wire.ours", "OneBit"),
    "onebit_adam_shadow": ("benchmarks.wire.ours", "OneBitKeptTwice"),
    "onebit_adam_rows": ("benchmarks.wire.ours", "OneBitKeptRows"),
    "onebit_lamb": ("benchmarks.wire.ours", "OneBitLambFamily"),
    "zero_one_adam": ("benchmarks.wire.ours", "ZeroOne"),
}
"""Module and class of each family, imported when it is made: what cannot be imported fails alone."""


def known(name: str) -> Method:
    """Raises: ValueError naming those there are."""
    if name == COMPUTE:
        return COMPUTE_METHOD
    if name not in METHODS:
        raise ValueError(f"method {name!r}: there are {', '.join(METHODS)}")
    return METHODS[name]


def add_method(method: Method, module: str, maker_name: str) -> None:
    """For plugins: one more method, of a family that `maker_name` in `module` makes."""
    METHODS[method.name] = method
    _MAKERS[method.family] = (module, maker_name)


def maker(family: str) -> Callable[[Setting], Family]:
    """What makes a family. Raises: KeyError."""
    module, name = _MAKERS[family]
    found: Callable[[Setting], Family] = getattr(import_module(module), name)
    return found


def forward_backward(
    model: nn.Module, arguments: tuple[Any, ...], clock: PhaseClock, stats: Stats | None = None
) -> None:
    """Gradients of one step, counted. stats: of what is exchanged meanwhile."""
    with clock.phase("forward"):
        loss = model(*arguments)
    with clock.phase("backward", stats):
        loss.backward()
