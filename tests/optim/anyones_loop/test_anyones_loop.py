"""Whatever people do to model or optimizer in training: it trains as torch's AdamW does, or an error says what to do.

Here stands which cells of the matrix run in `make test`: of each way to write a step, and of every fourth deed of
another kind, one for each of its answers, so that one optimizer of each kind, both ways to send and all times occur.
The rest is slow. OPEN has what is not mended yet; a deed that is mended fails there.
"""

from functools import lru_cache

import pytest

from tests.optim.anyones_loop import deeds, table
from tests.optim.anyones_loop.apart import in_processes
from tests.optim.anyones_loop.cells import Trained, by_torch, by_us, faults
from tests.optim.anyones_loop.deed import DEEDS, OPEN, Cell, every_cell
from tests.optim.anyones_loop.deeds.steps import STEPS
from thinwire.comm import run_threads

assert deeds
CELLS = list(every_cell())
NAMES = [deed.name for listed in DEEDS.values() for deed in listed]
OFTEN = {deed.name for deed in DEEDS[STEPS]}.union(NAMES[::4])


@lru_cache
def chosen(deed):
    """One cell for each answer that the deed has. Which one: optimizers, times, and what is overlapped, take turns."""
    cells = list(deed.cells(("onebit_adam", "adam", "zero_one_adam")))
    first = 7 * NAMES.index(deed.name) % len(cells)
    by_answer = {}
    for cell in cells[first:] + cells[:first]:
        by_answer.setdefault(cell.expected, cell)
    return [*by_answer.values()]


def always(cell):
    return not cell.deed.slow and cell.deed.name in OFTEN and cell in chosen(cell.deed)


def cases(cells):
    def marks(cell):
        slow = [] if always(cell) else [pytest.mark.slow]
        return [pytest.mark.gpu] if cell.deed.gpu else slow

    return [pytest.param(cell, id=cell.name, marks=marks(cell)) for cell in cells]


@lru_cache(maxsize=64)
def measured(deed, when, like):
    """torch's, on one rank; ranks hold the same."""
    cell = Cell(deed, when, like, overlap=False)
    return run_threads(2, lambda group: by_torch(cell, group))[0]


def faults_of(cell):
    like = "sgd" if cell.optimizer == "sgd" else "adam"
    with cell.deed.around():
        found = run_threads(2, lambda group: by_us(cell, group), timeout_s=20)
        trained = all(isinstance(one, Trained) for one in found)
        measure = (
            measured(cell.deed, cell.when, like)
            if trained and (cell.expected is None or cell.expected.perhaps)
            else None
        )
        told = run_threads(2, lambda group: faults(cell, found[group.rank], measure, group))
    return [words for rank in told for words in rank]


@pytest.mark.parametrize("cell", cases(cell for cell in CELLS if not cell.deed.apart))
def test_it_trains_as_adamw_does_or_says_what_to_do(cell):
    told = faults_of(cell)
    if told and cell.deed.name in OPEN:
        pytest.xfail(OPEN[cell.deed.name])
    assert not told


APART = [cell for cell in CELLS if cell.deed.apart]


def test_over_processes_it_trains_as_adamw_does_or_says_what_to_do(tmp_path):
    told = in_processes([cell for cell in APART if always(cell)], tmp_path, timeout_s=120)
    assert not {name: words for name, words in told.items() if words}


@pytest.mark.slow
def test_over_processes_each_cell_that_needs_them(tmp_path):
    told = in_processes([cell for cell in APART if not always(cell)], tmp_path, timeout_s=280)
    assert not {name: words for name, words in told.items() if words}


def test_the_page_of_answers_is_what_the_deeds_say():
    assert table.PAGE.read_text() == table.page(), "run: python -m tests.optim.anyones_loop.table"
