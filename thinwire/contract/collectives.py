"""What `thinwire bench collectives` keeps of a network: what each algorithm took, and T = alpha + beta n fitted to it.

A file is of one network, and has a world for each number of ranks that were tried: {"link": ..., "worlds": [...]}.
`thinwire plan --collectives FILE` predicts by it. What was measured on the network at hand goes to default_file(),
where a job with the same ranks on the same boxes finds it (comm/bucket_size.py). Standard library only.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.contract.files import data_folder, read_plain, write_whole

RING, ROWS, TREE, BROADCAST, CHAIN = "ring", "rows", "tree", "broadcast", "chain"
TITLES = {
    RING: "mean: ring all-reduce",
    ROWS: "mean: all-to-all, all-gather",
    TREE: "mean: binomial tree, to a root and back",
    BROADCAST: "copy: binomial tree",
    CHAIN: "copy: pipelined chain",
}
"""Three that give all ranks the mean of their vectors, and two that give all of them one rank's."""
AT_HAND = "the network at hand"
MOST_BYTES = 16 << 20
"""Of a file: far more than any has."""


class CollectivesError(ValueError):
    """A file is not what `thinwire bench collectives` writes, or of another network; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One size. seconds: of each turn, of the slowest rank. fitted: it is one of those that the line was fitted to."""

    vector_bytes: int
    seconds: tuple[float, ...]
    predicted_s: float
    fitted: bool

    @property
    def median_s(self) -> float:
        """Over the turns."""
        return statistics.median(self.seconds)

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.median_s - 1


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What one algorithm takes.

    latency_s, bytes_per_s: of a round, and of a box's link, by the rounds and bytes of comm/wire/network.py.
    alpha_s, beta_s: the same as T = alpha + beta n seconds for a vector of n bytes; of a chain, from one piece on.
    """

    latency_s: float
    bytes_per_s: float
    alpha_s: float
    beta_s: float
    timings: tuple[Timing, ...]

    @property
    def worst(self) -> Timing | None:
        """Of the sizes that the line was not fitted to, that which it misses most; None where there are none."""
        return max((one for one in self.timings if not one.fitted), key=lambda one: abs(one.error), default=None)


@dataclass(frozen=True, slots=True)
class World:
    """So many ranks, per_machine of them on each box. boxes: of each rank, as comm/wire/link_classes.py names them.

    piece_bytes: that a chain passes on at a time. left_out: sizes that would have taken longer than was allowed.
    """

    ranks: int
    per_machine: int
    device: str
    backend: str
    boxes: tuple[str, ...]
    measured: str
    made_by: dict[str, str]
    piece_bytes: int
    left_out: tuple[int, ...]
    algorithms: dict[str, Algorithm]

    @property
    def kind(self) -> tuple[int, int, str]:
        """A file has one world of each kind."""
        return self.ranks, self.per_machine, self.device


@dataclass(frozen=True, slots=True)
class Collectives:
    """A file. link: which network, in words."""

    link: str
    worlds: tuple[World, ...]

    def world(self, ranks: int, per_machine: int, file: Path) -> World:
        """That of so many ranks, with what a plan needs. Raises: CollectivesError."""
        found = [one for one in self.worlds if (one.ranks, one.per_machine) == (ranks, per_machine)]
        if not found:
            there = ", ".join(_layout(one.ranks, one.per_machine) for one in self.worlds) or "nothing"
            raise CollectivesError(
                f"{file} has {there}, not {_layout(ranks, per_machine)}: run `thinwire bench collectives` with those, "
                "or plan for these"
            )
        missing = {RING, ROWS} - found[-1].algorithms.keys()
        if missing:
            raise CollectivesError(
                f"{file}: {_layout(ranks, per_machine)} without {' and '.join(sorted(missing))}, by which gradients "
                "are sent: run `thinwire bench collectives` without --algorithms"
            )
        return found[-1]


def default_file() -> Path:
    """Where a network at hand is kept and looked for."""
    return data_folder() / "collectives.json"


def world_of(plain: dict[str, Any]) -> World:
    """From JSON. Raises: TypeError, KeyError, ValueError where it is something else."""
    algorithms = {
        str(name): Algorithm(
            **{**one, "timings": tuple(Timing(**{**t, "seconds": tuple(t["seconds"])}) for t in one["timings"])}
        )
        for name, one in plain["algorithms"].items()
    }
    for one in algorithms.values():
        if not one.latency_s >= 0 or not one.bytes_per_s > 0:
            raise ValueError(f"latency_s = {one.latency_s}, bytes_per_s = {one.bytes_per_s}: need >= 0 and > 0")
    lists = {name: tuple(plain[name]) for name in ("boxes", "left_out")}
    return World(**{**plain, **lists, "algorithms": algorithms})


def read(file: Path) -> Collectives:
    """Raises: OSError; CollectivesError where it is something else."""
    content = read_plain(file, MOST_BYTES)
    try:
        plain = json.loads(content)
        return Collectives(str(plain["link"]), tuple(world_of(one) for one in plain["worlds"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CollectivesError(
            f"{file} is not what `thinwire bench collectives` keeps ({type(error).__name__}: {error}): give another "
            "file, or remove it and run that again"
        ) from error


def room_for(file: Path, link: str) -> Collectives:
    """What is there already, to which a world of this link may be added. Raises: OSError, CollectivesError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        return Collectives(link, ())
    found = read(file)
    if found.link != link:
        raise CollectivesError(f"{file} is of {found.link}, and this is {link}: give another --out, or remove it")
    return found


def keep(file: Path, link: str, world: World) -> None:
    """Add a world to the file, in the place of one of its kind. Raises: OSError, CollectivesError."""
    others = [one for one in room_for(file, link).worlds if one.kind != world.kind]
    kept = asdict(Collectives(link, tuple(sorted((*others, world), key=lambda one: one.kind))))
    write_whole(file, json.dumps(kept, indent=1) + "\n")


def _layout(ranks: int, per_machine: int) -> str:
    beside = f", {per_machine} on a machine" if per_machine > 1 else ""
    return f"{ranks} ranks{beside}"
