"""The queue in the database: which jobs have places (queue.py), who waits for what, and what is told to people.

A job's places stand in its row, `granted`, so that a service that starts again knows them, and its run is told to take
no more (worker_numbers.limits_now). Where the launcher names no room there is no queue, and every job is handed over
at once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from thinwire.contract.jobs import JobState, Starts
from thinwire.contract.places import Room, never_fits, uses_gpus
from thinwire.contract.reports import Sample
from thinwire.contract.spec import LARGEST_STEP
from thinwire.service.db import Database
from thinwire.service.jobs.job_folder import RunFolders
from thinwire.service.jobs.queue import MOST_HOLDERS, PATIENCE_S, Claim, Grants, Served, Share, Waits, grant
from thinwire.service.jobs.repository import JobRepository, JobRow, transition_all
from thinwire.service.jobs.views import sample_view
from thinwire.service.jobs.worker_numbers import (
    membership_now,
    submitted_workers,
    takes_effect,
    wanted_workers,
    write_wanted,
)
from thinwire.service.launch.protocol import Launcher, LauncherError
from thinwire.service.people.project_rows import ProjectRow, settings_of

logger = logging.getLogger(__name__)

A_TRANSACTION = 100
"""Jobs that are written in one: requests that write wait for it."""
PACE_STEPS = (200, 20)
"""So many steps ago is where a job's speed is measured from: as many as there are of them."""
UNSURE_S, UNSURE = 60.0, 0.1
"""By less, and less than this share of the time that is left, an estimate is not corrected: it would be written anew,
for everybody who waits, in every turn."""
LONGEST_S = 1e8
"""Three years: nobody waits for longer, and a clock that is told may say no more."""
ENDLESS = Room(cpus=10**9, gpus=10**9)
"""A cluster in which nobody waits for a place."""
NEW = (JobState.SUBMITTING.value, JobState.QUEUED.value)
"""States of a job that is to be handed to the launcher."""


class Admission:
    """Says which jobs may be handed to the launcher. `look` may block; `turn` asks the database alone."""

    def __init__(self, db: Database, launcher: Launcher, folders: RunFolders, clock: Callable[[], float]) -> None:
        self._db, self._launcher, self._folders, self._clock = db, launcher, folders, clock
        self._unknown: str | None = "it has not said yet what its cluster has"
        self.room: Room | None = None
        """As of the last look that said it; None where there is no queue, or nothing is known yet."""

    def look(self) -> None:
        """Ask the launcher what its cluster has."""
        try:
            self.room, self._unknown = self._launcher.room(), None
        except LauncherError as error:
            self._unknown = str(error)

    def turn(self, rows: Sequence[JobRow]) -> tuple[list[JobRow], str | None]:
        """Of these jobs, all that are not over, those that the launcher may be asked about, or be given, now; and why
        the others wait that are not QUEUED. The rows are as they then are.
        """
        if self._unknown is not None:
            return [row for row in rows if row.state not in NEW or row.granted is not None], self._unknown
        if self.room is None:
            return self._without_queue(rows), None
        now = self._clock()
        with self._db.read() as session:
            claims, found = _grants(session, self.room, rows, now)
        by_id, claimed = {row.id: row for row in rows}, {claim.id for claim in claims}
        waiting = {one.claim.id: (place, one) for place, one in enumerate(found.waiting, 1)}
        holders = _Held(found, by_id)
        notes: dict[JobRow, dict[str, Any]] = {}
        moves: list[tuple[JobRow, JobState, str | None]] = []
        for row in rows:
            if found.back is not None and found.back.id == row.id:
                words = (
                    f"attempt {row.attempt} has had fewer workers than its minimum for {PATIENCE_S:.0f} s, since the "
                    "cluster has fewer places than its jobs, and others wait for those that it holds"
                )
                notes[row] = {"queue": {RECALLED: words}}
                logger.warning("places_recalled job_id=%s places=%s", row.id, row.granted)
            elif recalled(row) or row.id not in claimed:
                continue
            elif row.id not in waiting:
                if row.granted != found.places.get(row.id) or row.queue is not None:
                    notes[row] = {"granted": found.places.get(row.id), "queue": None}
                    if row.state == JobState.QUEUED.value:
                        notes[row]["reason"] = None
            elif (one := waiting[row.id][1]).never and self._launcher.own_cluster:  # it has what it has
                moves.append((row, JobState.FAILED, self._too_large(row)))
            else:
                queue = _queue(one, waiting[row.id][0], len(waiting), holders, self.room, now, row.project)
                queue["starts_at"] = _estimate(queue["starts_at"], (row.queue or {}).get("starts_at"), now)
                if queue != row.queue:
                    notes[row] = {"queue": queue, "reason": _words(queue, self._too_large(row) if one.never else None)}
                if row.state != JobState.QUEUED.value:
                    moves.append((row, JobState.QUEUED, notes[row]["reason"] if row in notes else row.reason))
        changed = [*dict.fromkeys([*notes, *(row for row, _, _ in moves)])]
        lost: set[str] = set()
        for first in range(0, len(changed), A_TRANSACTION):
            some = set(changed[first : first + A_TRANSACTION])
            written = {row: notes[row] for row in some & notes.keys()}
            started = {row.project for row, new in written.items() if row.granted is None and new.get("granted")}
            served = {name: found.served[name] for name in started & found.served.keys()}
            lost |= self._write(written, [m for m in moves if m[0] in some], served)
        out = waiting.keys() | lost | {row.id for row in rows if row.id not in claimed}
        return [row for row in rows if row.id not in out or row.state not in NEW], None

    def _without_queue(self, rows: Sequence[JobRow]) -> list[JobRow]:
        """Those that the launcher may be given, or asked about: all but those that are held."""
        no_places = {"granted": None, "queue": None}
        held = self._held(rows)
        words = {row: f"{why}: it starts when one of them is over" for row, why in held.items()}
        notes: dict[JobRow, dict[str, Any]] = {
            row: no_places for row in rows if row.granted is not None or row.queue is not None
        }
        notes |= {row: {**notes.get(row, {}), "reason": why} for row, why in words.items() if row.reason != why}
        moves: list[tuple[JobRow, JobState, str | None]] = [
            (row, JobState.QUEUED, why) for row, why in words.items() if row.state != JobState.QUEUED.value
        ]
        left = self._write(notes, moves) if notes or moves else set()
        return [row for row in rows if row.id not in left and row not in held]

    def _held(self, rows: Sequence[JobRow]) -> dict[JobRow, str]:
        """Without a queue: which jobs may not start, for their projects or people have as many as may run; and why."""
        with self._db.read() as session:
            said = shares(session)
            if all(one.running is None and one.running_of_one is None for one in said.values()):
                return {}
            _, found = _grants(session, ENDLESS, rows, self._clock())
        why = {one.claim.id: one.held for one in found.waiting if one.held is not None}
        return {row: reason for row in rows if (reason := why.get(row.id)) is not None}

    def would(self, row: JobRow) -> tuple[Starts, str | None, dict[str, Any] | None]:
        """Would this job, which there is not yet, start now? Else why not, and what its row would say of the queue."""
        if self._unknown is not None:
            return "unknown", self._unknown, None
        if self.room is None:
            with self._db.read() as session:
                rows = [*JobRepository(session).unfinished(), row]
            held = self._held(rows).get(row)
            return ("handed_over", None, None) if held is None else ("queued", held, None)
        now = self._clock()
        with self._db.read() as session:
            rows = [*JobRepository(session).unfinished(), row]
            _, found = _grants(session, self.room, rows, now)
        for place, one in enumerate(found.waiting, 1):
            if one.claim.id == row.id:
                holders = _Held(found, {row.id: row for row in rows})
                queue = _queue(one, place, len(found.waiting), holders, self.room, now, row.project)
                return "queued", _words(queue, self._too_large(row) if one.never else None), queue
        return "now", None, None

    def _too_large(self, row: JobRow) -> str:
        assert self.room is not None
        wanted = wanted_workers(row)
        workers = submitted_workers(row).model_copy(update={"min": wanted.min, "max": wanted.max})
        path, value, allowed = never_fits(workers, self.room) or ("workers.min", wanted.min, "less")
        return f"{path} = {value} must be {allowed}"

    def _write(
        self,
        notes: dict[JobRow, dict[str, Any]],
        moves: list[tuple[JobRow, JobState, str | None]],
        served: Mapping[str, Served] = MappingProxyType({}),
    ) -> set[str]:
        """Write what has changed of rows and of projects, and bring some jobs to other states. The ids of those that
        have moved meanwhile: nothing is written of them.
        """
        with self._db.write() as session:
            jobs = JobRepository(session)
            rows = {*notes, *(row for row, _, _ in moves)}
            now = jobs.lock_all([row.id for row in rows])
            left = {row.id for row in rows if row.id not in now or now[row.id].version != row.version}
            for row, values in notes.items():
                if row.id not in left:
                    jobs.note([row.id], **values)
            for name, last in served.items():
                turns = {"served_at": last.at, "turn": last.turn, "next_turn": last.next_turn}
                session.execute(update(ProjectRow).where(ProjectRow.name == name).values(**turns))
            unmoved = [move for move in moves if move[0].id not in left]
            transition_all(session, [(now[row.id], state, reason) for row, state, reason in unmoved], self._clock())
        for row, values in notes.items():
            if row.id in left:
                continue
            for name, value in values.items():
                setattr(row, name, value)
            if "granted" in values:
                logger.info("places_granted job_id=%s places=%s", row.id, values["granted"])
                self._tell(row.id)
        for row, state, reason in unmoved:
            logger.info("job_moved job_id=%s from=%s to=%s reason=%r", row.id, row.state, state, reason)
        return left

    def _tell(self, job_id: str) -> None:
        try:
            write_wanted(self._db, self._folders, job_id)
        except OSError:  # the reconciler writes it again, and submits no job whose file is older than its row
            logger.exception("wanted_workers_not_written job_id=%s", job_id)


def _grants(session: Session, room: Room, rows: Sequence[JobRow], now: float) -> tuple[list[Claim], Grants]:
    """What each of these jobs, all that are not over, asks for, and what it may have."""
    jobs = JobRepository(session)
    living = jobs.count_live_leases([row.id for row in rows if row.state not in NEW], now)
    holding = [row for row in rows if row.granted is not None and row.state == JobState.RUNNING.value]
    waits = any(row.granted is None and row.state in NEW for row in rows)
    ends = _ends(jobs, holding, now) if waits else {}
    claims = [claim for row in rows if (claim := _claim(row, room, living.get(row.id, 0))) is not None]
    claims = [replace(claim, over_at=ends.get(claim.id)) for claim in claims]
    return claims, grant(room, claims, now, shares(session))


def shares(session: Session) -> dict[str, Share]:
    """What is said of each project, as the queue goes by it."""
    found: dict[str, Share] = {}
    for row in session.scalars(select(ProjectRow)):
        said = settings_of(row)
        running, of_one = said.limits.running_jobs, said.person_limits.running_jobs
        found[row.name] = Share(said.weight, Served(row.served_at, row.turn, row.next_turn), running, of_one)
    return found


RECALLED = "recalled"
"""In a row's `queue`, of a job that has been started: why its run is ended, so that it gives its places back."""


def recalled(row: JobRow) -> str | None:
    """Why the job's run is to give its places back; None where it keeps them."""
    is_started = row.state in (JobState.PENDING.value, JobState.RUNNING.value)
    return row.queue.get(RECALLED) if is_started and row.queue is not None else None


def _claim(row: JobRow, room: Room, living: int) -> Claim | None:
    """None where the row cannot be read, which is logged."""
    try:
        return _read_claim(row, room, living)
    except (ValueError, LookupError, TypeError):
        logger.exception("reconcile_failed job_id=%s", row.id)
        return None


def _read_claim(row: JobRow, room: Room, living: int) -> Claim:
    wanted, workers = wanted_workers(row), submitted_workers(row)
    granted, goes_on = row.granted, row.state != JobState.CANCELLING.value and not recalled(row)
    said = row.newest_membership  # by the service's clock; an earlier version kept the worker's alone
    if granted is None and row.state in (JobState.PENDING.value, JobState.RUNNING.value):
        granted = min(wanted.max, max(wanted.min, living))  # a version without a queue has started it
    return Claim(
        id=row.id,
        least=wanted.min,
        most=wanted.max,
        priority=int(row.spec.get("priority", 0)),
        project=row.project,
        person=row.submitted_by,
        arrival=row.arrival,
        created_at=row.created_at,
        gpus=uses_gpus(workers.model_copy(update={"min": wanted.min, "max": wanted.max}), room.gpus),
        each=workers.per_box,
        granted=granted,
        living=living,
        grows=goes_on and takes_effect(row) != "at_restart",
        queued_at=None if row.queue is None else row.queue.get("since"),
        stalled_at=said.get("at") or said["time"] if said is not None and membership_now(row)[1] is not None else None,
        waits=goes_on,
    )


class _Held:
    """Who has places, of each project. largest: a contract.jobs.Holder each. places: of all its jobs."""

    def __init__(self, found: Grants, rows: Mapping[str, JobRow]) -> None:
        self.largest: dict[str, list[dict[str, Any]]] = {}
        self.places: Counter[str] = Counter()
        for job, places in sorted(found.places.items(), key=lambda held: (-held[1], held[0])):
            row = rows[job]
            self.places[row.project] += places
            shown = self.largest.setdefault(row.project, [])
            if len(shown) < MOST_HOLDERS:
                shown.append({"job": job, "workers": places, "min": min(places, wanted_workers(row).min)})


def _queue(
    one: Waits,
    position: int,
    of: int,
    holders: _Held,
    room: Room,
    now: float,
    project: str,
) -> dict[str, Any]:
    """What is kept of one who waits: a contract.jobs.Queued, with its time in unix seconds. No job of another project
    is named.
    """
    return {
        "position": position,
        "of": of,
        "since": now if one.claim.queued_at is None else min(now, one.claim.queued_at),  # a clock may go back
        "needs": one.claim.least,
        "free": one.free,
        "total": one.total,
        "holders": holders.largest.get(project, []),
        "other_projects": holders.places.total() - holders.places[project],
        "others": room.others_gpus if one.claim.gpus else room.others_cpus,
        "starts_at": one.starts_at,
        "held": one.held,
    }


def _words(queue: dict[str, Any], never: str | None) -> str:
    """The same for a person."""
    where = f"position {queue['position']} of {queue['of']} in the queue"
    if never is not None:
        return f"{where}: {never}"
    if queue["held"] is not None:
        return f"{where}: {queue['held']}; it starts when one of them is over"
    held = [f"{one['job']} has {one['workers']}" for one in queue["holders"]]
    held += [f"other projects have {queue['other_projects']}"] if queue["other_projects"] else []
    held += [f"others than this service have {queue['others']}"] if queue["others"] else []
    free = f"it needs {queue['needs']} places at once, and {queue['free']} of {queue['total']} are free"
    when = "when it starts is not known"
    if queue["starts_at"] is not None:
        at = datetime.fromtimestamp(queue["starts_at"], UTC)
        when = f"it may start at {at:%Y-%m-%d %H:%M} UTC, as the steps of those before it go"
    return f"{where}: {free}" + (f" ({', '.join(held)})" if held else "") + f"; {when}"


def _ends(jobs: JobRepository, rows: Sequence[JobRow], now: float) -> dict[str, float]:
    """When these jobs have made their last step, by id, at the speed of their last steps: evaluations, checkpoints and
    waits among these count. Without those of which the number of steps or the speed is not known, or that stand still.
    """
    newest: dict[str, tuple[JobRow, Sample]] = {}
    for row in rows:
        try:
            is_known = row.newest_sample is not None and row.newest_sample["attempt"] == row.attempt
            if is_known and row.newest_sample is not None and membership_now(row)[1] is None:
                newest[row.id] = row, Sample.model_validate(row.newest_sample["sample"])
        except (ValueError, LookupError, TypeError):
            continue  # of another version: views.py says so
    steps = {(name, one.step - ago) for name, (_, one) in newest.items() for ago in PACE_STEPS if one.step > ago}
    samples = jobs.samples_at(steps)
    views = {key: sample_view(one) for key, one in samples.items() if one.attempt == newest[one.job_id][0].attempt}
    earlier = {key: one.time for key, one in views.items() if one is not None}
    ends = {name: _end(row, one, earlier, now) for name, (row, one) in newest.items()}
    return {name: end for name, end in ends.items() if end is not None}


def _end(row: JobRow, newest: Sample, earlier: Mapping[tuple[str, int], float], now: float) -> float | None:
    """earlier: times of its samples, by job and step. All of it a job has said, which may say anything."""
    last = row.spec.get("steps") or newest.last_step
    if last is None:
        return None
    for ago in PACE_STEPS:
        before = earlier.get((row.id, newest.step - ago))
        if before is None:
            continue
        pace_s = (newest.time - before) / ago
        end = newest.time + pace_s * max(0, min(int(last), LARGEST_STEP) - newest.step)
        # Who has been silent for so long stands still, or is slower than it was.
        is_going_on = pace_s > 0.0 and abs(now - newest.time) < max(UNSURE_S, 10 * pace_s)
        return end if is_going_on and end - now < LONGEST_S else None
    return None


def _estimate(starts_at: float | None, before: float | None, now: float) -> float | None:
    """As it was said before, where it is about the same."""
    if starts_at is None or before is None or before < now:
        return starts_at
    return before if abs(starts_at - before) < max(UNSURE_S, UNSURE * (starts_at - now)) else starts_at
