"""Cells whose ranks are processes over gloo: all of them in one pair, so that imports are paid once.

Also a program: `python -m tests.optim.anyones_loop.apart` is not meant; a test starts `work` on each rank.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.comm.gloo_ranks import said, start
from tests.optim.anyones_loop import deeds
from tests.optim.anyones_loop.cells import Trained, by_torch, by_us, faults
from tests.optim.anyones_loop.deed import Cell, every_cell
from thinwire.comm.protocol import Group

PROGRAM = """
import json
from tests.optim.anyones_loop.apart import work
join()
say("faults", json.dumps(work(NAMES, TorchGroup())))
dist.destroy_process_group()
"""


def work(names: list[str], group: Group) -> dict[str, list[str]]:
    """On one rank: what is wrong with each of these cells."""
    assert deeds
    cells = {cell.name: cell for cell in every_cell()}
    found = {}
    for name in names:
        cell = cells[name]
        with cell.deed.around():
            ours = by_us(cell, group)
            measure = by_torch(cell, group) if isinstance(ours, Trained) else None
            found[name] = faults(cell, ours, measure, group)
    return found


def in_processes(cells: list[Cell], folder: Path, timeout_s: float) -> dict[str, list[str]]:
    """What is wrong with each of them, by name, on any of two ranks."""
    program = PROGRAM.replace("NAMES", json.dumps([cell.name for cell in cells]))
    ranks = start(program, 2, folder, timeout_s=20)
    assert [rank.wait(timeout=timeout_s) for rank in ranks] == [0, 0]
    first, second = (json.loads(said(folder, rank, "faults")) for rank in range(2))
    return {name: first[name] + second[name] for name in first}
