"""What people are told of the membership: one word, one line, and who is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.workers.membership import roster
from thinwire.workers.membership.register import Present
from thinwire.workers.membership.roster import Worker
from thinwire.workers.membership.seats import Limits, Snapshot, Status


@dataclass(frozen=True, slots=True)
class Seen:
    """What the rules know, beside the workers. num_awaited: members that a restarted server has not seen yet."""

    limits: Limits
    present: Present
    num_awaited: int
    finished: bool


def snapshot(seen: Seen, workers: Sequence[Worker], events: int) -> Snapshot:
    """All of it. events: how many there have been."""
    present = roster.members(workers)
    waiting = [w for w in workers if w.rank is None]
    joined = len(roster.seating(workers))
    status, text = _status(seen, present, joined)
    steps = [w.step for w in present] or [seated.standing.step for seated in seen.present.seats]
    return Snapshot(
        generation=seen.present.generation,
        status=status,
        status_text=text,
        limits=seen.limits,
        members=tuple(w.occupant() for w in present),
        waiting=tuple(w.occupant() for w in sorted(waiting, key=lambda w: w.identity.slot)),
        joined=joined,
        last_step=max(steps, default=0),
        events=events,
    )


def _status(seen: Seen, present: list[Worker], num_joined: int) -> tuple[Status, str]:
    if seen.finished:
        return "finished", f"finished in generation {seen.present.generation}"
    if seen.num_awaited:
        return (
            "regrouping",
            f"restarted; waiting for {seen.num_awaited} of {len(seen.present.seats)} workers to come back",
        )
    if present and seen.present.regroup_since is None:
        return "training", f"training with {len(present)} workers in generation {seen.present.generation}"
    coming = sum(w.standing is None for w in present)
    if coming:
        return (
            "regrouping",
            f"regrouping after generation {seen.present.generation}: waiting for {coming} of {len(present)}",
        )
    if num_joined < seen.limits.min:
        return "waiting for workers", f"waiting for workers: {num_joined} of {seen.limits.min}"
    return "forming", f"forming: {num_joined} of at most {seen.limits.max} workers have come"
