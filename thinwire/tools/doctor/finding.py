"""A finding: what is wrong with which box or link, and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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


class Finding(Frozen):
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
