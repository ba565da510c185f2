"""What people do to a model or an optimizer that is in training, and what is to come of it: one declaration a deed.

A deed is a function of the loop (loop.py) and is done to ours and to torch's AdamW alike. Its answer is that training
goes on as AdamW's does, or an error of ours whose words are declared here. There is no third answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum

from tests.optim.anyones_loop.loop import Loop, Net


class When(StrEnum):
    """When the deed is done. What it sets up for every step goes on from there."""

    UNMADE = "before the optimizer is made"
    MADE = "before the first step"
    WARMUP = "in the warm-up"
    COMPRESSED = "in the compressed phase"


AFTER = (When.MADE, When.WARMUP, When.COMPRESSED)
OPTIMIZERS = ("adam", "lamb", "sgd", "onebit_adam", "onebit_lamb", "zero_one_adam")


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of the matrix."""

    deed: Deed
    when: When
    optimizer: str
    overlap: bool

    @property
    def name(self) -> str:
        """For the names of tests."""
        return "-".join((self.deed.name, self.when.name, self.optimizer, "overlap" if self.overlap else "plain"))

    @property
    def expected(self) -> Raises | None:
        """The error that this cell ends with; None where it trains."""
        return next((error for error in self.deed.raises if error.fits(self)), None)


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
        """Is this the answer of the cell?"""
        return self.overlap in (None, cell.overlap) and cell.when in self.when and cell.optimizer in self.optimizers


BETWEEN_SYNCS = Raises(
    "between two syncs, where ranks hold different parameters",
    "Call optimizer.prepare_to_save() on every rank before you write parameters",
    when=(When.COMPRESSED,),
    optimizers=("zero_one_adam",),
)


@dataclass(frozen=True, slots=True)
class Deed:
    """told: what the table says, in Markdown. differs: how training goes on otherwise than under DDP, where it does.

    net: the model that it is done to. around: what surrounds the run of all ranks, for settings of the process.
    apart: done in processes, because the ranks cannot be threads of one. slow: in `make test-all` only. none_is_zero:
    held against AdamW with zeros for gradients that are None. idles: AdamW leaves some of the model untrained too.
    overlaps: whether it is done with overlap, without, or both.
    """

    do: Callable[[Loop], None]
    told: str
    when: tuple[When, ...]
    raises: tuple[Raises, ...]
    differs: str
    net: Callable[[], Net]
    around: Callable[[], AbstractContextManager[object]]
    apart: bool
    slow: bool
    none_is_zero: bool
    idles: bool
    gpu: bool
    overlaps: tuple[bool, ...]

    @property
    def name(self) -> str:
        """That of the function."""
        return self.do.__name__

    def cells(self, optimizers: tuple[str, ...] = OPTIMIZERS) -> Iterator[Cell]:
        """All of its cases."""
        for when in self.when:
            for optimizer in optimizers:
                for overlap in self.overlaps:
                    yield Cell(self, when, optimizer, overlap)


DEEDS: dict[str, list[Deed]] = {}
"""All of them, by the heading under which the table has them."""


OPEN: dict[str, str] = {}
"""By the name of a deed that has neither answer yet: what is missing."""


def deed(
    heading: str,
    told: str,
    *raises: Raises,
    when: tuple[When, ...] = AFTER,
    differs: str = "",
    net: Callable[[], Net] = Net,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    apart: bool = False,
    slow: bool = False,
    none_is_zero: bool = False,
    idles: bool = False,
    gpu: bool = False,
    overlaps: tuple[bool, ...] = (False, True),
) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """Put a function on the list."""

    def listed(do: Callable[[Loop], None]) -> Callable[[Loop], None]:
        DEEDS.setdefault(heading, []).append(
            Deed(do, told, when, raises, differs, net, around, apart, slow, none_is_zero, idles, gpu, overlaps)
        )
        return do

    return listed


def every_cell(optimizers: tuple[str, ...] = OPTIMIZERS) -> Iterator[Cell]:
    """The matrix."""
    for listed in DEEDS.values():
        for one in listed:
            yield from one.cells(optimizers)
