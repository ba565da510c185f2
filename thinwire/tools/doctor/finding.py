"""A finding: what is wrong with which box or link, and what to change; and what many bad pairs have in common.

One bad cable at one box makes a bad pair with every other box: that is one finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.contract.spec import ScriptSpec, TextFile, TrainSpec
from thinwire.tools.doctor.examination import Call, Examination
from thinwire.tools.doctor.facts import Frozen, Questions

Severity = Literal["fault", "warning", "note"]
"""fault: a job fails or hangs. warning: it will suffer. note: to be known."""


class Wishes(Frozen):
    """What a job, or who asks, wants of the boxes. interface: by which they are to speak. rate_mbit: of every link.

    workers: at least so many. device: as workers.device of a job.
    """

    interface: str | None = None
    rate_mbit: float | None = None
    workers: int = 0
    device: Literal["auto", "cpu", "gpu"] = "auto"


@dataclass(frozen=True)
class Finding:
    """kind: one of few words, for programs. boxes: their names. what: what is, with the value. change: what to do."""

    severity: Severity
    kind: str
    boxes: tuple[str, ...]
    what: str
    change: str


def names_of(seen: Examination) -> list[str]:
    """What to call each box: its host name where no other has it, else as it was named."""
    said = [box.facts.hostname if box.facts else box.where for box in seen.boxes]
    names = [
        name if Counter(said)[name] == 1 else host_of(box.where) for name, box in zip(said, seen.boxes, strict=True)
    ]
    if len(set(names)) < len(names):  # several doctors on one host
        names = [box.where for box in seen.boxes]
    return names


def host_of(where: str) -> str:
    """Of host:port, or of a host alone."""
    return where.rpartition(":")[0] or where


def between(seen: Examination) -> Iterator[Call]:
    """Calls between boxes that were both examined."""
    for call in seen.calls:
        if seen.boxes[call.source].facts is not None and seen.boxes[call.target].facts is not None:
            yield call


def asked_by(spec: TrainSpec | ScriptSpec) -> tuple[Questions, Wishes]:
    """What each box is to be asked for the job's sake, and what the boxes must have."""
    files = (spec.data.path,) if isinstance(spec, TrainSpec) and isinstance(spec.data, TextFile) else ()
    store = spec.checkpoint.store
    if store is not None and store.startswith("file://"):
        store = store.removeprefix("file://")
    questions = Questions(
        files=files,
        folders=(store,) if store is not None and "://" not in store else (),
        stores=(store,) if store is not None and "://" in store else (),
    )
    return questions, Wishes(interface=spec.network.interface, workers=spec.workers.min, device=spec.workers.device)


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


def boxes_of(names: Sequence[str], blame: Blame) -> tuple[str, ...]:
    """The names of those that are to be looked at."""
    if blame.box is not None:
        return (names[blame.box],)
    return tuple(dict.fromkeys(names[place] for pair in blame.pairs for place in pair))
