"""What a drill is asked to do, and what it reports: what the command line needs of this room, without torch and Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

PICTURE_NAME = "drill.png"

Say = Callable[[str, float], None]
"""What is going on, and how much of it is done, 0 to 1."""


class DrillFailed(Exception):
    """A job ended before its time; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Drill:
    """What is to be done. optimizer, shadow: as in a job file. seed: of who is killed."""

    workers: int
    kill_every_s: float
    minutes: float
    out: Path
    optimizer: str = "onebit_adam"
    seed: int = 0
    shadow: str = "rows"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and worst of some seconds; None where there are none."""

    median: float | None
    worst: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Of these."""
        return cls(round(median(seconds), 3), round(max(seconds), 3)) if seconds else cls(None, None)


@dataclass(frozen=True, slots=True)
class Account:
    """What the kills have cost.

    goodput: time inside committed steps / wall time from the first step to the last, at whatever world size.
    steps_lost: committed steps that were run again. From a kill, regroup_s: to the survivors going on; next_step_s: to
    the end of their next step; readmit_s: to all workers training again. error_lost: of ||R||, the share that each
    death has lost, as estimated. outside_s: where the rest of the wall time went: regrouping, and all else between
    steps.
    """

    goodput: float
    kills: int
    steps: int
    steps_lost: int
    local_steps_lost: int
    restarts: int
    regroup_s: Spread
    next_step_s: Spread
    readmit_s: Spread
    mean_world_size: float
    samples_per_second: float
    undisturbed_samples_per_second: float
    undisturbed_goodput: float
    error_lost: Spread
    final_loss: float | None
    undisturbed_loss: float | None
    outside_s: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """For a machine: the medians under the short names."""
        whole = asdict(self)
        return {
            **whole,
            "regroup_s": self.regroup_s.median,
            "regroup_worst_s": self.regroup_s.worst,
            "next_step_s": self.next_step_s.median,
            "next_step_worst_s": self.next_step_s.worst,
            "readmit_s": self.readmit_s.median,
            "readmit_worst_s": self.readmit_s.worst,
            "error_lost": self.error_lost.median,
            "error_lost_worst": self.error_lost.worst,
        }


Drilling = Callable[[Drill, Say], Account]
"""Who does it. Raises: DrillFailed; OSError."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """What `thinwire drill --chaos` is to do. seed: of all faults. kill_all: now and then every worker at once.

    beside: the folder of an earlier drill of the same job, whose undisturbed run is compared with; None: trains one.
    """

    workers: int
    minutes: float
    out: Path
    optimizer: str = "onebit_adam"
    seed: int = 0
    shadow: str = "rows"
    kill_all: bool = False
    beside: Path | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the traces of a run prove or refute. redone and all after it are to be 0; violations: each one, in words.

    committed: the last step. compared: steps whose samples the undisturbed run has too. redone: steps run again
    although a holder of them lived. holders_lost: processes that no fault has touched and that ended all the same.
    not_made: what is no violation, steps between two exchanges that a rank has not made because a fault has reached it.
    """

    committed: int
    compared: int
    redone: int
    commits_by_two: int
    samples_wrong: int
    replicas_differ: int
    holders_lost: int
    not_made: int
    violations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found(Verdict):
    """What a chaos drill has found. faults: by kind. resumes: from a checkpoint. local_steps_lost: those that ranks
    had made since the last exchange when they died.

    grown: what of the survivors' threads, files and memory has grown, in words. without_cuts: why the network was not
    cut; None where it was.
    """

    minutes: float
    faults: dict[str, int]
    resumes: int
    local_steps_lost: int
    loss: float | None
    loss_undisturbed: float | None
    grown: tuple[str, ...]
    without_cuts: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For a machine: faults as their number, and by kind beside it."""
        whole = asdict(self)
        return {**whole, "faults": sum(self.faults.values()), "faults_by_kind": self.faults}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Found:
        """Of asdict()'s fields, which have crossed a pipe as JSON."""
        return cls(**{**fields, "grown": tuple(fields["grown"]), "violations": tuple(fields["violations"])})


ChaosDrilling = Callable[[Chaos, Say], Found]
"""Who does it. Raises: DrillFailed; OSError."""
