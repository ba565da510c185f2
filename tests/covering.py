"""Which cases of parameters run always: of a product a covering set. The rest is slow, for `make test-all`.

A law holds for every world size, dtype and so on by itself; that it breaks for one size with one dtype and one cut only
is what `make test-all` looks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest

Axes = Mapping[str, Iterable[Any]]
"""By name of a parameter (or "one, other", as in parametrize) its values."""


def every_value(axes: Axes, only: Iterable[int] | None = None) -> pytest.MarkDecorator:
    """Parametrize by the product of `axes`; so many cases run always that each value of each axis is in one.

    only: of those cases, by their places in the longest axis. Where several laws stand on the same code: each takes
    other sizes and optimizers, so that together they have them all.
    """
    values = [list(axis) for axis in axes.values()]
    diagonal = [tuple(k % len(axis) for axis in values) for k in range(max(map(len, values)))]
    return _parametrize(axes, values, set(diagonal if only is None else [diagonal[k] for k in only]))


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


def _parametrize(axes: Axes, values: list[list[Any]], always: set[tuple[int, ...]]) -> pytest.MarkDecorator:
    """One case for each place of the product: flat, as names such as "one, other" take two values."""
    width = [len(name.split(",")) for name in axes]
    cases = []
    for place in itertools.product(*(range(len(axis)) for axis in values)):
        flat: list[Any] = []
        told = []
        for name, axis, at, wide in zip(axes, values, place, width, strict=True):
            own = axis[at] if wide > 1 else [axis[at]]
            flat += own
            told += [_told(value, f"{name}{at}") for value in own]
        marks = () if place in always else pytest.mark.slow
        cases.append(pytest.param(*flat, marks=marks, id="-".join(told)))
    return pytest.mark.parametrize(", ".join(axes), cases)


def _told(value: Any, otherwise: str) -> str:
    """How a value is called in the name of a case."""
    plain = value is None or isinstance(value, str | int | float)
    if plain or type(value).__name__ == "dtype":
        return str(value)
    return getattr(value, "__name__", otherwise)
