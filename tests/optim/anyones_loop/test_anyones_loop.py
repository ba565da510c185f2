"""Whatever people do to model or optimizer in training: it trains as torch's AdamW does, or an error says what to do.

Of each case one cell for each of its answers runs in `make test`, of every fourth case that is not about the step
itself; optimizers, times and overlap take turns. The rest is slow.
"""

import json
from functools import lru_cache

import pytest

from tests.comm.gloo_ranks import said, start
from tests.optim.anyones_loop.cases import Cell
from tests.optim.anyones_loop.every import CASES
from tests.optim.anyones_loop.measure import Trained, by_torch, by_us, faults
from tests.optim.anyones_loop.page import PAGE, tables
from tests.optim.anyones_loop.steps import STEPS
from thinwire.comm import run_threads

CELLS = {cell.name: cell for case in CASES for cell in case.cells()}


def usual():
    """Names of the cells that run always."""
    for number, case in enumerate(CASES):
        if not case.slow and (case.heading == STEPS or number % 4 == 0):
            cells = list(case.cells(("onebit_adam", "adam", "zero_one_adam")))
            first = 7 * number % len(cells)
            by_answer = {}
            for cell in cells[first:] + cells[:first]:
                by_answer.setdefault(cell.expected, cell)
            yield from (cell.name for cell in by_answer.values())


USUAL = set(usual())


def marks(cell):
    return pytest.mark.gpu if cell.case.gpu else () if cell.name in USUAL else pytest.mark.slow


@lru_cache(maxsize=64)
def measured(case, when, like):
    """torch's, on one rank; ranks hold the same."""
    return run_threads(2, lambda group: by_torch(Cell(case, when, like, overlap=False), group))[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=name, marks=marks(cell)) for name, cell in CELLS.items() if not cell.case.apart]
)
def test_it_trains_as_adamw_does_or_says_what_to_do(cell):
    with cell.case.around():
        found = run_threads(2, lambda group: by_us(cell, group), timeout_s=20)
        measure = None
        if all(isinstance(one, Trained) for one in found) and (cell.expected is None or cell.expected.perhaps):
            measure = measured(cell.case, cell.when, "sgd" if cell.optimizer.endswith("sgd") else "adam")
        assert run_threads(2, lambda group: faults(cell, found[group.rank], measure, group)) == [[], []]


PROGRAM = """
import json
from tests.optim.anyones_loop.test_anyones_loop import on_a_rank
join()
say("faults", json.dumps(on_a_rank(NAMES, TorchGroup())))
dist.destroy_process_group()
"""


def on_a_rank(names, group):
    """What is wrong with each of these cells."""
    found = {}
    for cell in (CELLS[name] for name in names):
        ours = by_us(cell, group)
        measure = by_torch(cell, group) if isinstance(ours, Trained) else None
        found[cell.name] = faults(cell, ours, measure, group)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("runs_always", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_over_processes_it_trains_as_adamw_does_or_says_what_to_do(tmp_path, runs_always):
    """Of all these cells in one pair of processes, so that imports are paid once."""
    names = [name for name, cell in CELLS.items() if cell.case.apart and (name in USUAL) is runs_always]
    ranks = start(PROGRAM.replace("NAMES", json.dumps(names)), 2, tmp_path, timeout_s=20)
    assert [rank.wait(timeout=280) for rank in ranks] == [0, 0]
    for rank in range(2):
        assert json.loads(said(tmp_path, rank, "faults")) == {name: [] for name in names}


def test_the_page_of_answers_is_what_the_cases_say():
    assert PAGE.read_text().endswith("\n\n" + tables()), "run: python -m tests.optim.anyones_loop.page"
