"""Which samples of a long history are kept where few are asked for: those that show its shape. Out of SQL alone.

The first and the last. Of those with a validation loss the last of each of at most (points - 2) / 2 equal ranges of
steps: all of them, where there are no more. Of the others those with the smallest and with the largest loss of each
range, of as many ranges as there are points left for; of several alike the first. So a peak or a hole of one step
stays, and a curve through what is kept has the envelope of the whole.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Select, cast, func, select
from sqlalchemy.orm import Session

from thinwire.service.jobs.repository import SampleRow

LEAST, MOST = 2, 2000
"""Points that may be asked for."""


def kept_steps(session: Session, job_id: str, steps: range, points: int) -> list[int]:
    """Of these steps those whose samples are kept, in their order, at most so many.

    The database reads all samples of these steps once or twice, this process only the numbers that come of it.
    """
    mine = (SampleRow.job_id == job_id) & (SampleRow.step >= steps.start) & (SampleRow.step < steps.stop)
    count, first, last = session.execute(
        select(func.count(), func.min(SampleRow.step), func.max(SampleRow.step)).where(mine)
    ).one()
    if count <= points:
        return list(session.scalars(select(SampleRow.step).where(mine).order_by(SampleRow.step)))
    kept = {int(first), int(last)}
    inner = mine & (SampleRow.step > first) & (SampleRow.step < last)
    validation = SampleRow.sample["validation_loss"].as_float()
    kept |= _of_ranges(session, inner & validation.is_not(None), first, last, (points - 2) // 2, SampleRow.step.desc())
    loss = SampleRow.sample["loss"].as_float()
    kept |= _of_ranges(session, inner & loss.is_not(None), first, last, (points - len(kept)) // 2, loss, loss.desc())
    return sorted(kept)


def _of_ranges(
    session: Session, which: ColumnElement[bool], first: int, last: int, ranges: int, *orders: ColumnElement[Any]
) -> set[int]:
    """Of each of so many ranges of steps the step that is first in each of the orders; all, where they are no more."""
    if ranges < 1:
        return set()
    few: Select[int] = select(SampleRow.step).where(which).order_by(SampleRow.step).limit(ranges * len(orders) + 1)
    if len(found := set(session.scalars(few))) <= ranges * len(orders):
        return found
    of = cast(SampleRow.step - first, BigInteger) * ranges // (last - first + 1)
    ranks = [
        func.row_number().over(partition_by=of, order_by=(order, SampleRow.step)).label(f"place{number}")
        for number, order in enumerate(orders)
    ]
    ranked = select(SampleRow.step, *ranks).where(which).subquery()
    places = [ranked.c[f"place{number}"] == 1 for number in range(len(orders))]
    chosen = places[0] if len(places) == 1 else places[0] | places[1]
    return {int(step) for step in session.scalars(select(ranked.c.step).where(chosen))}
