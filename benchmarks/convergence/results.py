"""What a case leaves: one JSON file, written whole or not at all, and read back only if it is of the same spec."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.convergence.study import Case
from thinwire.contract.files import write_whole
from thinwire.contract.spec import TrainSpec


class ResultError(Exception):
    """A result that is there cannot be used; the message says which, why and what to do."""


class Point(BaseModel):
    """The model after `step` steps on the validation data. sent_bytes: payload of rank 0 in the steps up to there."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    step: int
    loss: float
    accuracy: float | None = None
    sent_bytes: int


class Result(BaseModel):
    """One finished case. Bytes are payload sent by rank 0 in training steps, as the transport counted them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    task: str
    method: str
    seed: int
    spec: dict[str, Any]
    commit: str
    versions: dict[str, str]
    hardware: dict[str, str]
    finished_at: str
    parameters: int
    diverged: str | None
    """Why the run stopped early with values that are not finite; None for one that went to its end."""
    training_losses: list[tuple[int, float]]
    """(last step, mean over that step and the nine before it)."""
    validation: list[Point]
    """Of the parameters that a checkpoint would hold: between the syncs of 0/1 Adam, the mean over ranks."""
    steps_by_phase: dict[str, int]
    bytes_by_phase: dict[str, int]
    final_sync_bytes: int
    """Sent after the last step to make all ranks hold the same parameters (0/1 Adam); in no other figure."""
    collectives: int
    rounds: int
    """Steps in which anything was sent."""
    rounds_skipped: int
    frozen_at: int | None
    warmup_ended_by: str | None
    """rule, cap, or None where the number of steps was given or nothing is frozen."""
    floored_elements: int | None
    replicas_bit_equal: bool
    wall_s: float
    cpu_s: float

    @property
    def final(self) -> Point:
        """The last validation. Raises: ValueError for a run that diverged."""
        if self.diverged is not None:
            raise ValueError(f"{self.task}/{self.method}-{self.seed} has no final loss: {self.diverged}")
        return self.validation[-1]


def path_of(out: Path, case: Case) -> Path:
    """Where the result of a case lies."""
    return out / f"{case.name}.json"


def write(out: Path, case: Case, result: Result) -> None:
    """Write it, whole or not at all."""
    path = path_of(out, case)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _as_json(result))


def read(path: Path) -> Result:
    """Raises: ResultError for a file that is no result, OSError."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ResultError(f"{path} is not a result of this version: {error}; move it away or give --fresh") from error


def finished(out: Path, cases: Iterable[Case], *, ignoring_others: bool = False) -> dict[str, Result]:
    """The results that are there, by name of case.

    A result of another spec is refused, all of them at once; `ignoring_others` leaves it out, to be run again.
    Raises: ResultError.
    """
    found: dict[str, Result] = {}
    problems: list[str] = []
    for case in cases:
        path = path_of(out, case)
        if not path.exists():
            continue
        try:
            result = read(path)
            differences = differing(result.spec, case.spec)
        except ResultError as error:
            differences = [str(error)]
        if not differences:
            found[case.name] = result
        else:
            problems.append(f"{path}: {'; '.join(differences)}")
    if problems and not ignoring_others:
        shown = "\n  ".join(problems[:5] + ([f"and {len(problems) - 5} more"] if len(problems) > 5 else []))
        raise ResultError(
            f"{len(problems)} results are not of the study that was asked for:\n  {shown}\n"
            "Give --fresh to run those again and replace them, or --out for another folder."
        )
    return found


def differing(stored: dict[str, Any], wanted: TrainSpec) -> list[str]:
    """The fields in which a stored spec differs, as 'path = stored, now wanted'; those new since then have defaults."""
    try:
        parsed = TrainSpec.model_validate(stored)
    except ValidationError as error:
        return [f"its spec is refused now: {error.errors()[0]['msg']}"]
    mine, theirs = _flat(wanted.model_dump(mode="json")), _flat(parsed.model_dump(mode="json"))
    return [
        f"{key} = {theirs.get(key)!r}, now {mine.get(key)!r}"
        for key in sorted({*mine, *theirs})
        if mine.get(key) != theirs.get(key)
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{prefix}.{key}" if prefix else key).items()}


def _as_json(result: Result) -> str:
    """One field a line: the curves stay short, and a difference between two runs is readable."""
    dumped = result.model_dump(mode="json")
    lines = [f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in dumped.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
