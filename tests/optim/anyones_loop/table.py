"""docs/what-you-may-do.md, written from the list of deeds: `python -m tests.optim.anyones_loop.table`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.optim.anyones_loop import deeds
from tests.optim.anyones_loop.deed import DEEDS, OPEN, OPTIMIZERS, Cell, Deed, When
from tests.optim.reference.written_out import CLASSES

PAGE = Path(__file__).parents[3] / "docs" / "what-you-may-do.md"
HEAD = """\
# What you may do to a model and an optimizer

People do more to a model than train it: they move it, copy it, freeze it, average its weights. This page lists what was
tried, and the answer. There are two: training goes on as torch's AdamW under DistributedDataParallel does, or an error
says what to do. Each line is a test, over two ranks, with every optimizer, with and without
[overlap](own-loop.md#overlap-with-backward). *Syncs* are the steps in which `ZeroOneAdam` sends. *Trains* means:

* `Adam` and `SGD` have torch's parameters, to rounding.
* The others lower the loss about as AdamW does, and every tensor moves about as far as AdamW's.
* All ranks hold the same bits.
* What was trained is the model that you hold.

Three things cannot be noticed when they are done, as nothing tells of a write through `.data`, or of values that
differ between ranks. (Parameters that do are said within a hundred steps:
[own-loop.md](own-loop.md#what-the-first-step-says).)

* `p.grad.data` written between backward and `step()` with overlap, when the gradient may have been sent.
* `p.data` written in place, for bfloat16 and float16 parameters (call `optimizer.refresh_master()`), and with
  `ZeroOneAdam` between two syncs: the next sync undoes it.
* Weights that you copied, averaged or saved between two syncs of `ZeroOneAdam` are each rank's own. Take them where
  `optimizer.at_sync`, or after `optimizer.prepare_to_save()` on every rank.

The tests are in [tests/optim/anyones_loop/](../tests/optim/anyones_loop). They write this page:
`python -m tests.optim.anyones_loop.table`.
"""


def page() -> str:
    """The document."""
    assert deeds
    sections = [HEAD]
    for heading, listed in DEEDS.items():
        lines = [f"## {heading}", "", "| what you do | when | the answer |", "|---|---|---|"]
        lines += [row for deed in listed for row in _rows(deed)]
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def _rows(deed: Deed) -> Iterator[str]:
    """One row for all times that have the same answer."""
    by_answer: dict[str, list[When]] = {}
    for when in deed.when:
        by_answer.setdefault(_answer(deed, [cell for cell in deed.cells() if cell.when is when]), []).append(when)
    for answer, times in by_answer.items():
        told = "at any time" if tuple(times) == tuple(When) else "any time after" if len(times) == 3 else None
        yield f"| {deed.told} | {told or ', '.join(times)} | {answer} |"


def _answer(deed: Deed, cells: Iterable[Cell]) -> str:
    if deed.name in OPEN:
        return f"not held yet: {OPEN[deed.name]}"
    trains = f"trains; {deed.differs}" if deed.differs else "trains"
    by_answer: dict[str, set[tuple[str, bool]]] = {}
    for cell in cells:
        error = cell.expected
        answer = trains if error is None else f'raises "{error.words} ... {error.way}"'
        if error is not None and error.perhaps:
            answer = f"trains, or {answer}"
        by_answer.setdefault(answer, set()).add((cell.optimizer, cell.overlap))
    if len(by_answer) == 1:
        return next(iter(by_answer))
    return "; ".join(f"{_where(where)}: {answer}" for answer, where in by_answer.items())


def _where(where: set[tuple[str, bool]]) -> str:
    """Which cells of one deed and time: by overlap, and by optimizer where that matters."""
    names = {overlap: [name for name in OPTIMIZERS if (name, overlap) in where] for overlap in (False, True)}
    if names[False] == names[True]:
        return _names(names[False])
    told = []
    for overlap, words in ((False, "without overlap"), (True, "with overlap")):
        if names[overlap]:
            told.append(words if len(names[overlap]) == len(OPTIMIZERS) else f"{words}, {_names(names[overlap])}")
    return ", and ".join(told)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{CLASSES[name].__name__}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page())
