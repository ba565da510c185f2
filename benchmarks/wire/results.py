"""What a case leaves: one JSON file with raw times, written whole or not at all. What follows from it: figures.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.wire.cases import Case
from thinwire.contract.files import write_whole

VERSION = 1


class ResultError(Exception):
    """A result that is there cannot be used; the message says which, why and what to do."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(_Frozen):
    """One turn of a method: `steps` steps on every rank.

    rank_s: seconds of the turn on each rank. step_s: of each step, on the rank that took longest. phases: seconds by
    phase, mean over ranks. sent_bytes: payload by rank. frame_bytes: by host, what the kernel counted; None in rounds
    in which it was not asked.
    """

    round: int
    steps: int
    rank_s: list[float]
    step_s: list[float]
    phases: dict[str, float]
    sent_bytes: list[int]
    frame_bytes: list[int] | None = None


class Measured(_Frozen):
    """A method in one sitting. overlap: did it exchange during backward in its last step; None: nothing to exchange.

    replicas_equal: all ranks held the same bits after the last turn; finite: and no NaN. None: it failed before.
    """

    overlap: bool | None
    turns: list[Turn]
    bucket_elements: int | None = None
    """The most that was sent at a time; None: the method's own default."""
    replicas_equal: bool | None = None
    finite: bool | None = None


class Sitting(_Frozen):
    """Methods that lay in memory together and took turns; the baseline is in each sitting. failed: why, by method."""

    measured: dict[str, Measured]
    failed: dict[str, str]


class Result(_Frozen):
    """One finished case. copy_bytes_s: read and written bytes a second with all cores copying, before the case."""

    version: int = VERSION
    load: str
    hosts: int
    rate_mbit: int | None
    settings: dict[str, Any]
    parameters: int
    sittings: list[Sitting]
    net: dict[str, Any]
    copy_bytes_s: float
    load_average: list[float]
    """Of the machine when the case began: above its ranks' own work it says that others were running."""
    stolen_share: float | None = None
    """Of the cores' time: what the hypervisor gave to other machines meanwhile. None: nobody looked."""
    command: str
    commit: str
    versions: dict[str, str]
    hardware: dict[str, str]
    started_at: str
    wall_s: float

    @property
    def name(self) -> str:
        """As Case.name."""
        from benchmarks.wire.cases import Network

        return f"{self.load}/{Network(self.hosts, self.rate_mbit).name}"


def settings_of(case: Case) -> dict[str, Any]:
    """What must be equal for a result to stand for a case."""
    return {
        "recipe": case.load.recipe.model_dump(mode="json"),
        "sequences": case.load.sequences,
        "computes": case.load.computes,
        "methods": list(case.methods),
        "budget_s": case.budget_s,
        "fewest_rounds": case.fewest_rounds,
        "most_rounds": case.most_rounds,
    }


def path_of(out: Path, case: Case) -> Path:
    """Where the result of a case lies."""
    return out / f"{case.name}.json"


def write(out: Path, case: Case, result: Result) -> Path:
    """Write it, whole or not at all."""
    path = path_of(out, case)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, result.model_dump_json(indent=1))
    return path


def read(path: Path) -> Result:
    """Raises: ResultError for a file that is no result, OSError."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ResultError(f"{path} is not a result of this version: {error}; move it away or give --fresh") from error


def finished(out: Path, cases: Iterable[Case]) -> dict[str, Result]:
    """The results that are there, by name of case. Raises: ResultError, naming all that are of other settings."""
    found: dict[str, Result] = {}
    problems: list[str] = []
    for case in cases:
        path = path_of(out, case)
        if not path.exists():
            continue
        result, wanted = read(path), settings_of(case)
        others = [name for name in wanted if name != "methods" and result.settings.get(name) != wanted[name]]
        if not {*wanted["methods"]} <= {*result.settings["methods"]}:  # one of more methods stands for it too
            others.append("methods")
        if others:
            problems.append(f"{path}: differs in {', '.join(others)}")
        found[case.name] = result
    if problems:
        raise ResultError(
            "results are not of the cases that were asked for:\n  "
            + "\n  ".join(problems)
            + "\nGive --fresh to run those cases again and replace the files, or --out for another folder."
        )
    return found
