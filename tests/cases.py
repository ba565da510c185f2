"""Cases of a test of which few are usual, and all others are run by `make test-all` alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def parametrize(
    names: str | tuple[str, ...],
    cases: Iterable[Any],
    *,
    usual: Collection[int],
    ids: Callable[[Any], object] | Iterable[str] | None = None,
) -> pytest.MarkDecorator:
    """As pytest.mark.parametrize, with the mark `slow` on all cases but those at the places `usual`.

    usual: places in `cases`; those below 0 count from the end.
    """
    several = not isinstance(names, str) or "," in names
    every = list(cases)
    always = {range(len(every))[place] for place in usual}
    made: list[Any] = []
    for place, case in enumerate(every):
        if place in always:
            made.append(case)
        elif isinstance(case, type(pytest.param())):
            made.append(pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id))
        else:
            made.append(pytest.param(*(case if several else [case]), marks=pytest.mark.slow))
    return pytest.mark.parametrize(names, made, ids=ids)
