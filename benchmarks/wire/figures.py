"""What follows from a result's raw times: a row for each method, a model of a faster link, and crossing points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from statistics import median

from benchmarks.wire.cases import LOADS, MODELLED_MBIT, rate_text
from benchmarks.wire.limits import cpu_limit_s, wire_limit_s
from benchmarks.wire.methods import BASELINE, COMPUTE, METHODS
from benchmarks.wire.phases import BACKWARD, PHASES, WIRE
from benchmarks.wire.results import Measured, Result


@dataclass(frozen=True, slots=True)
class Row:
    """A method in a case; times in seconds a step, medians over turns. ratio: steps/s over the baseline's.

    phases: by phase; of DDP what its backward takes longer than backward alone is `wire`, its hooks' own work too.
    frame_bytes: a step and host, None where nothing counted. payload_bytes: a step and rank, the largest.
    wire_limit_s, cpu_limit_s: None where not known. noise: middle half of the turns over their median.
    """

    method: str
    step_s: float
    ratio: float
    phases: dict[str, float]
    frame_bytes: float | None
    payload_bytes: float
    wire_limit_s: float | None
    cpu_limit_s: float | None
    turns: int
    noise: float
    overlap: bool | None
    replicas_equal: bool | None

    @property
    def limit_s(self) -> float | None:
        """The limit of this case for this method."""
        if self.cpu_limit_s is None:
            return None
        return max(self.wire_limit_s or 0.0, self.cpu_limit_s)

    @property
    def share(self) -> float | None:
        """Of the limit that is reached."""
        return None if self.limit_s is None else self.limit_s / self.step_s


def rows(result: Result) -> list[Row]:
    """One for each method that has times, in the order of METHODS; the baseline of the first sitting."""
    found: dict[str, Row] = {}
    for sitting in result.sittings:
        base = sitting.measured.get(BASELINE)
        if base is None:
            continue
        alone = sitting.measured.get(COMPUTE)
        for name, measured in sitting.measured.items():
            if name != COMPUTE and name not in found:
                found[name] = _row(result, name, measured, step_seconds(base), alone)
    return [found[name] for name in METHODS if name in found]


def failures(result: Result) -> dict[str, str]:
    """Why, by method."""
    return {name: why for sitting in result.sittings for name, why in sitting.failed.items() if name != COMPUTE}


def step_seconds(measured: Measured) -> float:
    """Median over turns of the seconds a step takes until the last rank is done."""
    return median(max(turn.rank_s) / turn.steps for turn in measured.turns)


def phase_seconds(measured: Measured) -> dict[str, float]:
    """Medians over turns, a step."""
    return {phase: median(turn.phases[phase] / turn.steps for turn in measured.turns) for phase in PHASES}


def compute_seconds(result: Result) -> float:
    """Forward and backward alone, the fastest turn, for it is part of a limit; 0 where no model computes."""
    turns = [turn for one in result.sittings if COMPUTE in one.measured for turn in one.measured[COMPUTE].turns]
    if not turns or not LOADS[result.load].computes:
        return 0.0
    return min(max(turn.rank_s) / turn.steps for turn in turns)


def _row(result: Result, name: str, measured: Measured, base_s: float, alone: Measured | None) -> Row:
    step_s, turns = step_seconds(measured), measured.turns
    payload = median(max(turn.sent_bytes) / turn.steps for turn in turns)
    counted = [turn for turn in turns if turn.frame_bytes]
    frames = median(max(turn.frame_bytes or [0]) / turn.steps for turn in counted) if counted else None
    phases = phase_seconds(measured)
    if not METHODS[name].ours and alone is not None:
        backward = min(phases[BACKWARD], phase_seconds(alone)[BACKWARD])
        phases |= {WIRE: phases[BACKWARD] - backward, BACKWARD: backward}
    return Row(
        method=name,
        step_s=step_s,
        ratio=base_s / step_s,
        phases=phases,
        frame_bytes=frames,
        payload_bytes=payload,
        wire_limit_s=None if result.rate_mbit is None else wire_limit_s(payload, result.rate_mbit),
        cpu_limit_s=cpu_limit_s(name, result.hosts, result.parameters, result.copy_bytes_s, compute_seconds(result)),
        turns=len(turns),
        noise=_spread([max(turn.rank_s) / turn.steps for turn in turns]) / step_s,
        overlap=measured.overlap,
        replicas_equal=measured.replicas_equal,
    )


def _spread(values: Sequence[float]) -> float:
    """From the first to the third quartile, by nearest rank."""
    ordered = sorted(values)
    return ordered[(3 * len(ordered) - 1) // 4] - ordered[(len(ordered) - 1) // 4]


@dataclass(frozen=True, slots=True)
class Point:
    """A step of a method at one rate; modelled: not measured."""

    rate_mbit: float
    step_s: float
    modelled: bool = False


def modelled(result: Result, row: Row, rate_mbit: float) -> Point:
    """The step at a faster rate, if all but waiting for the wire stays as measured, and that shrinks with the rate.

    Kind to those who wait most: part of that waiting is work of processors, which a faster link does not shorten.
    Raises: ValueError for a result without a rate.
    """
    if result.rate_mbit is None:
        raise ValueError(f"{result.name} has no rate: it ran over the loopback")
    waiting = min(row.phases[WIRE], row.step_s)
    return Point(rate_mbit, row.step_s - waiting * (1 - result.rate_mbit / rate_mbit), modelled=True)


def curves(results: Iterable[Result], load: str, hosts: int) -> dict[str, list[Point]]:
    """By method the points of a load on so many hosts, slow links first; the last is modelled from the fastest."""
    mine = [result for result in results if (result.load, result.hosts) == (load, hosts) and result.rate_mbit]
    mine.sort(key=lambda result: result.rate_mbit or 0)
    found: dict[str, list[Point]] = {}
    for result in mine:
        for row in rows(result):
            found.setdefault(row.method, []).append(Point(float(result.rate_mbit or 0), row.step_s))
    if mine and len(mine) > 1:
        for row in rows(mine[-1]):
            found[row.method].append(modelled(mine[-1], row, MODELLED_MBIT))
    return found


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where one method stops being faster than another as links get faster. modelled: beyond what was measured."""

    rate_mbit: float
    modelled: bool


def crossings(one: Sequence[Point], other: Sequence[Point]) -> list[Crossing]:
    """Rates at which `one` and `other` take equally long: straight lines between points, in log rate and log ratio."""
    others = {point.rate_mbit: point for point in other}
    ratios = [
        (point.rate_mbit, log(others[point.rate_mbit].step_s / point.step_s), point.modelled)
        for point in one
        if point.rate_mbit in others
    ]
    found = []
    for (low, below, _), (high, above, model) in pairwise(ratios):
        if (below > 0) != (above > 0):
            part = below / (below - above)
            found.append(Crossing(exp(log(low) + part * (log(high) - log(low))), model))
    return found


def pays(one: Sequence[Point], other: Sequence[Point]) -> str:
    """In words: up to which rate `one` is faster than `other`."""
    others = {point.rate_mbit: point for point in other}
    shared = [point for point in one if point.rate_mbit in others]
    if not shared:
        return "not measured"
    faster = [point.step_s < others[point.rate_mbit].step_s for point in shared]
    span = f"{rate_text(shared[0].rate_mbit)} to {rate_text(shared[-1].rate_mbit)}"
    if shared[-1].modelled:
        span += " (the last from the model)"
    if len(shared) == 1:
        span = f"the one rate measured, {rate_text(shared[0].rate_mbit)}"
    if all(faster):
        return f"faster at {span}"
    if not any(faster):
        return f"slower at {span}"
    points = crossings(one, other)
    told = ", ".join(f"{rate_text(_round(at.rate_mbit))}{' (model)' if at.modelled else ''}" for at in points)
    if faster[0] and len(points) == 1:
        return f"faster up to about {told}"
    if len(points) == 1:
        return f"faster from about {told} on"
    return f"{'faster' if faster[0] else 'slower'} at first, and they cross at about {told}"


def _round(rate_mbit: float) -> float:
    """Two digits: more would say more than was measured."""
    return float(f"{rate_mbit:.2g}")
