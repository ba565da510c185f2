"""Which link is a plan for? One that is given in words, or the slowest that `thinwire doctor` has measured."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import TypeAdapter, ValidationError

from thinwire.cli.quantities import rate_mbit, time_ms
from thinwire.contract.plan import Link
from thinwire.tools.doctor.examination import Examination
from thinwire.tools.doctor.probe import Visit

GOODPUT = 0.957
"""The most payload that frames of 1500 bytes leave of a link's rate."""
DEFAULT_LATENCY = "0.1ms"
LEAST_MBIT, MOST_MBIT, MOST_MS = 1e-3, 1e8, 60_000.0
"""Beyond these somebody has mistaken the unit."""
_EXAMINATION = TypeAdapter(Examination)


def link_of(rate: str | None, latency: str | None, doctor: Path | None) -> Link | None:
    """The link that these options name; None where they name none. Raises: typer.BadParameter."""
    if doctor is not None:
        if rate is not None or latency is not None:
            raise typer.BadParameter("says what --rate and --latency say; give one of both", param_hint="--doctor")
        return _examined(doctor)
    if rate is None:
        if latency is not None:
            raise typer.BadParameter("is of a link that is given: it needs --rate", param_hint="--latency")
        return None
    try:
        megabits, milliseconds = rate_mbit(rate), time_ms(latency or DEFAULT_LATENCY)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate, --latency") from error
    if not LEAST_MBIT <= megabits <= MOST_MBIT:
        raise typer.BadParameter(f"{rate}: must be a link's, from 1kbit to 100000gbit", param_hint="--rate")
    if milliseconds > MOST_MS:
        raise typer.BadParameter(f"{latency}: must be at most 60s, one way", param_hint="--latency")
    return Link(1e-3 * milliseconds, GOODPUT * megabits * 1e6 / 8, f"given: {rate}, {latency or DEFAULT_LATENCY}")


def _examined(file: Path) -> Link:
    """The slowest direction of any link, with both busy as in an exchange, and the longest way of a small message."""
    try:
        seen = _EXAMINATION.validate_json(file.read_bytes())
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="--doctor") from error
    except ValidationError as error:
        raise typer.BadParameter(
            f"{file} is not what `thinwire doctor --json` prints: {error.errors()[0]['msg']}", param_hint="--doctor"
        ) from error
    visits = [call.visit for call in seen.calls]
    rates = [rate for visit in visits for rate in _rates_mbit(visit)]
    round_trips = [visit.round_trip_ms for visit in visits if visit.round_trip_ms is not None]
    if not rates or not round_trips:
        raise typer.BadParameter(
            f"{file} has no link that was measured: run `thinwire doctor --peers ... --json`, with --seconds above 0",
            param_hint="--doctor",
        )
    return Link(1e-3 * max(round_trips) / 2, min(rates) * 1e6 / 8, f"the slowest of {len(visits)} in {file}")


def _rates_mbit(visit: Visit) -> list[float]:
    told = (visit.there_mbit, visit.back_mbit, visit.both_there_mbit, visit.both_back_mbit)
    return [rate for rate in told if rate]
