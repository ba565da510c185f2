"""The tables of docs/what-you-may-do.md: `python -m tests.optim.anyones_loop.page` writes them by the list of cases."""

import itertools
from pathlib import Path

from tests.optim.anyones_loop.cases import OPTIMIZERS
from tests.optim.anyones_loop.every import CASES
from tests.optim.reference.written_out import CLASSES

PAGE = Path(__file__).parents[3] / "docs" / "what-you-may-do.md"


def tables():
    found = []
    for heading, listed in itertools.groupby(CASES, key=lambda case: case.heading):
        lines = [f"## {heading}", "", "| what you do | when | the answer |", "|---|---|---|"]
        found.append("\n".join(lines + [row for case in listed for row in _rows(case)]) + "\n")
    return "\n".join(found)


def _rows(case):
    """One row for all times that have the same answer."""
    by_answer = {}
    for when in case.when:
        by_answer.setdefault(_answer(case, when), []).append(when)
    for answer, times in by_answer.items():
        told = {4: "at any time", 3: "any time after"}.get(len(times), ", ".join(times))
        yield f"| {case.told} | {told} | {answer} |"


def _answer(case, when):
    """By optimizer and overlap where that matters."""
    trains = f"trains; {case.differs}" if case.differs else "trains"
    by_answer = {}
    for cell in case.cells():
        if cell.when is when:
            error = cell.expected
            answer = trains if error is None else f'raises "{error.words} ... {error.way}"'
            answer = f"trains, or {answer}" if error is not None and error.perhaps else answer
            by_answer.setdefault(answer, set()).add((cell.optimizer, cell.overlap))
    if len(by_answer) == 1:
        return next(iter(by_answer))
    return "; ".join(f"{_where(where)}: {answer}" for answer, where in by_answer.items())


def _where(where):
    plain, overlapped = ([name for name in OPTIMIZERS if (name, overlap) in where] for overlap in (False, True))
    if plain == overlapped:
        return _names(plain)
    told = ((plain, "without overlap"), (overlapped, "with overlap"))
    return ", and ".join(
        words if len(names) == len(OPTIMIZERS) else f"{words}, {_names(names)}" for names, words in told if names
    )


def _names(names):
    return ", ".join(f"`{CLASSES[name].__name__}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition("\n## ")[0] + "\n" + tables())
