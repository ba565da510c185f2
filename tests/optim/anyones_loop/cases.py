"""What people do to a model or an optimizer that is in training, and what is to come of it: one declaration a case.

A case is a function of the loop (loop.py) and is done to ours and to torch's AdamW alike. Its answer is that training
goes on as AdamW's does, or an error of ours whose words are declared here. There is no third answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.optim.anyones_loop.loop import Loop, Net


class When(StrEnum):
    """When it is done. What it sets up for every step goes on from there."""

    UNMADE = "before the optimizer is made"
    MADE = "before the first step"
    WARMUP = "in the warm-up"
    COMPRESSED = "in the compressed phase"


OPTIMIZERS = ("adam", "lamb", "sgd", "onebit_adam", "onebit_lamb", "onebit_sgd", "zero_one_adam", "onebit_muon")
Do = Callable[[Loop], object]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a case."""

    case: Case
    when: When
    optimizer: str
    overlap: bool

    @property
    def name(self) -> str:
        return "-".join((self.case.told, self.when.name, self.optimizer, "overlap" if self.overlap else "plain"))

    @property
    def expected(self) -> Raises | None:
        """The error that it ends with; None where it trains."""
        return next((error for error in self.case.raises if error.fits(self)), None)


@dataclass(frozen=True, slots=True)
class Raises:
    """An error, and the cells that end with it; None: whatever they have there.

    words, way: the message holds them: what is wrong, and what to do. perhaps: or it trains, by how backward goes.
    """

    words: str
    way: str
    overlap: bool | None = None
    when: tuple[When, ...] = tuple(When)
    optimizers: tuple[str, ...] = OPTIMIZERS
    perhaps: bool = False

    def fits(self, cell: Cell) -> bool:
        return self.overlap in (None, cell.overlap) and cell.when in self.when and cell.optimizer in self.optimizers


BETWEEN_SYNCS = Raises(
    "between two syncs, where ranks hold different parameters",
    "Call optimizer.prepare_to_save() on every rank before you write parameters",
    when=(When.COMPRESSED,),
    optimizers=("zero_one_adam",),
)


@dataclass(frozen=True, slots=True)
class Case:
    """told: what the page says, in Markdown. differs: how training goes on otherwise than under DDP, where it does.

    net: the model that it is done to. around: what surrounds the run of all ranks, for settings of the process.
    apart: done in processes, because the ranks cannot be threads of one. slow: in `make test-all` only. none_is_zero:
    held against AdamW with zeros for gradients that are None. idles: AdamW leaves some of the model untrained too.
    overlaps: whether it is done with overlap, without, or both.
    """

    heading: str
    told: str
    do: Do
    raises: tuple[Raises, ...]
    when: tuple[When, ...] = (When.MADE, When.WARMUP, When.COMPRESSED)
    differs: str = ""
    net: Callable[[], Net] = Net
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    apart: bool = False
    slow: bool = False
    none_is_zero: bool = False
    idles: bool = False
    gpu: bool = False
    overlaps: tuple[bool, ...] = (False, True)

    def cells(self, optimizers: tuple[str, ...] = OPTIMIZERS) -> Iterator[Cell]:
        for when, optimizer, overlap in itertools.product(self.when, optimizers, self.overlaps):
            yield Cell(self, when, optimizer, overlap)


CASES: list[Case] = []
"""All of them, in the order of the page."""


def case(heading: str, told: str, *raises: Raises, **how: Any) -> Callable[[Do], Do]:
    """Put a function on the list."""

    def listed(do: Do) -> Do:
        CASES.append(Case(heading, told, do, raises, **how))
        return do

    return listed


def each_step(once: Do) -> Do:
    """From there on every step of the loop is this function."""

    def do(loop: Loop) -> None:
        loop.iterate = once

    return do


def each_gradient(act: Callable[[Any], object], only: str = "") -> Do:
    """From there on this is done to every parameter with a gradient, or to one, between backward and step."""

    def do(loop: Loop) -> None:
        def between() -> None:
            for name, param in loop.net.named_parameters():
                if param.grad is not None and only in ("", name):
                    act(param)

        loop.between.append(between)

    return do
