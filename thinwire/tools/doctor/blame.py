"""What many bad pairs have in common: one bad cable at one box makes a bad pair with every other box."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Pair = tuple[int, int]
"""Source and target."""


@dataclass(frozen=True, slots=True)
class Blame:
    """What a set of bad pairs has in common. box: None where it is all pairs, or single ones.

    what: "all" pairs there are; all "out" of a box, all "into" it, "box": both; a "pair" one way, or "both" ways.
    """

    what: Literal["all", "box", "out", "into", "both", "pair"]
    box: int | None
    pairs: tuple[Pair, ...]


def blamed(bad: Collection[Pair], measured: Collection[Pair]) -> list[Blame]:
    """Each bad pair is in one Blame. A box is blamed where all its pairs of that direction are bad, two at least."""
    left = set(bad)
    if len(left) > 2 and left == set(measured):
        return [Blame("all", None, tuple(sorted(left)))]
    found = []
    places = sorted({place for pair in left for place in pair})
    wholly = {
        side: {place for place in places if _all_bad([pair for pair in measured if pair[index] == place], left)}
        for index, side in enumerate(("out", "into"))
    }
    for place in places:
        out, into = place in wholly["out"], place in wholly["into"]
        mine = {pair for pair in left if (out and pair[0] == place) or (into and pair[1] == place)}
        if mine:
            found.append(Blame("box" if out and into else "out" if out else "into", place, tuple(sorted(mine))))
            left -= mine
    for pair in sorted(left):
        if pair in left:
            mine = {pair, pair[::-1]} & left
            found.append(Blame("both" if len(mine) == 2 else "pair", None, tuple(sorted(mine))))
            left -= mine
    return found


def _all_bad(pairs: Collection[Pair], bad: Collection[Pair]) -> bool:
    return len(pairs) >= 2 and all(pair in bad for pair in pairs)
