"""Where a job begins that names another one, and which jobs have yet to begin from what another one has saved.

The service knows that one's store, its run folder and its events.

In the job `start.checkpoints` then says where the checkpoints lie; which of them is the newest the workers find when
they begin. What is not there, or what the job's machines cannot reach, is refused at the submission. A job reads what
it begins with until it has saved a checkpoint of its own (contract/start.py): a restart before that begins from there
again, so that the other job cannot be deleted yet.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from thinwire.contract.jobs import JobState
from thinwire.contract.reports import EventKind
from thinwire.contract.run_folder import checkpoints_in
from thinwire.contract.spec import ScriptSpec, TextFile, TrainSpec
from thinwire.contract.start import Start
from thinwire.contract.stores import is_local, path_of
from thinwire.service.db import Database
from thinwire.service.errors import InvalidRequest
from thinwire.service.jobs.checkpoint_files import list_checkpoints
from thinwire.service.jobs.job_folder import RunFolders
from thinwire.service.jobs.repository import JobRepository, JobRow

MOST_EVENTS, MOST_EVENT_BYTES = 1000, 1 << 20
_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{12})")
_MANIFEST = "manifest.json"


class Saved(NamedTuple):
    """A whole checkpoint; the newest is the largest."""

    generation: int
    step: int


class Starts:
    """own_cluster: do the job's processes run on this machine? shared: folders of all machines, where they do not."""

    def __init__(self, db: Database, folders: RunFolders, *, own_cluster: bool, shared: Sequence[Path]) -> None:
        self._db, self._folders, self._own_cluster, self._shared = db, folders, own_cluster, shared

    def found(self, spec: TrainSpec | ScriptSpec, project: str) -> TrainSpec | ScriptSpec:
        """The same job, of this project, which says where the checkpoints lie. Raises: InvalidRequest, Unavailable."""
        start = spec.start
        if start is None:
            return spec
        if start.job is not None and start.checkpoints is None:
            start, whole = self._of_job(start, start.job, project)
            _check_whole(spec, start, whole, "start.job")
        else:
            path, place = start.place
            assert place is not None  # or the spec would have been refused
            self._refuse_unreachable(path, place, place)
            self._refuse_foreign(path, place, project)
            if self._own_cluster and is_local(place):
                if start.weights is not None:
                    _refuse_unreadable(path, place)
                else:
                    _check_whole(spec, start, _listed(path_of(place)), path)
        return spec.model_copy(update={"start": start})

    def refuse_foreign(self, spec: TrainSpec | ScriptSpec, project: str) -> None:
        """Nobody reads or writes in the folder of a job of another project. Before anything there is looked at.

        Raises: InvalidRequest.
        """
        for path, place in _places(spec):
            if "\0" in place:  # which leads nowhere, and is refused in other words
                continue
            self._refuse_foreign(path, place, project)

    def _refuse_foreign(self, path: str, place: str, project: str) -> None:
        """Nobody names a place with what a job of another project has saved, here or in its checkpoint.store.

        Raises: InvalidRequest.
        """
        named = {place, *place.split("::")}  # file:///a in simplecache::file:///a
        pieces = {_plain_place(one) for one in named}
        # a/.. of a link: the kernel goes to the folder above its target, libraries may strike both.
        pieces |= {os.path.realpath(one.partition("://")[2] or one) for one in named if is_local(one)}
        names = {name for one in pieces for name in one.split("/") if name}
        folders = {job_id for one in pieces if (job_id := self._folders.job_of(Path(one))) is not None}
        with self._db.read() as session:
            found = select(JobRow.id, JobRow.project, JobRow.spec).where(JobRow.id.in_(sorted(names | folders)))
            rows = session.execute(found).all()
        theirs = [row for row in rows if row.project != project]
        stores = [
            (row.id, store) for row in theirs if (store := row.spec.get("checkpoint", {}).get("store")) is not None
        ]
        saved = [_plain_place(checkpoints_in(store, job_id)) for job_id, store in stores]
        # Of a folder of nobody it is the same: nobody learns which jobs others have.
        is_foreign = bool(folders - {row.id for row in rows if row.project == project})
        if is_foreign or any(f"{one}/".startswith(f"{place_of}/") for one in pieces for place_of in saved):
            words = "must be the place of a job here: `thinwire jobs` lists them"
            if not path.startswith("start."):
                words = "must not be in the folder of a job, unless it is one here (`thinwire jobs` lists them)"
            raise InvalidRequest.at(path, place, words)

    def _of_job(self, start: Start, job_id: str, project: str) -> tuple[Start, list[Saved]]:
        """The start with the place of that job's checkpoints, and what is there as far as the service knows."""
        with self._db.read() as session:
            jobs = JobRepository(session)
            row = jobs.get(job_id)
            if row is None or row.project != project:
                raise InvalidRequest.at("start.job", job_id, "must be the ID of a job here: `thinwire jobs` lists them")
            store = row.spec.get("checkpoint", {}).get("store")
            events, _ = jobs.events(
                job_id, [EventKind.CHECKPOINT_SAVED], limit=MOST_EVENTS, most_bytes=MOST_EVENT_BYTES
            )
            saved = [event.fields for event in events]
        place = str(self._folders.of(job_id).checkpoints) if store is None else checkpoints_in(store, job_id)
        self._refuse_unreachable("start.job", job_id, place)
        # What lies elsewhere this machine need not see: then it knows what the job has reported.
        whole = _listed(path_of(place)) if is_local(place) and self._own_cluster else _named(saved)
        return start.model_copy(update={"checkpoints": place}), whole

    def _refuse_unreachable(self, path: str, value: str, place: str) -> None:
        words = None if self._own_cluster else unshared(place, self._shared)
        if words is not None:
            where = "" if value == place else f"the checkpoints of {value} lie in {place}, which "
            raise InvalidRequest.at(path, value, where + words)


def _places(spec: TrainSpec | ScriptSpec) -> Iterator[tuple[str, str]]:
    """Where the job reads its files and writes its checkpoints, beside its start: field and place."""
    if spec.checkpoint.store is not None:
        yield "checkpoint.store", spec.checkpoint.store
    if isinstance(spec, ScriptSpec):
        if spec.recipe.working_dir is not None:
            yield "recipe.working_dir", spec.recipe.working_dir
    elif isinstance(spec.data, TextFile):
        yield "data.path", spec.data.path


def _check_whole(spec: TrainSpec | ScriptSpec, start: Start, whole: Sequence[Saved], path: str) -> None:
    """Raises: InvalidRequest where there is nothing to start from, or nothing left to train."""
    name = start.job or start.checkpoints
    if not whole:
        raise InvalidRequest.at(
            path,
            name,
            "must have a whole checkpoint, and has none: a job saves one every checkpoint.every_steps steps, and at "
            "its end",
        )
    steps = sorted({one.step for one in whole})
    if start.step is not None and start.step not in steps:
        shown = ", ".join(map(str, steps[-20:]))
        raise InvalidRequest.at(
            "start.step", start.step, f"must be a step of which {name} has a whole checkpoint: {shown}"
        )
    step = max(whole).step if start.step is None else start.step
    if not start.only_weights and spec.steps is not None and spec.steps <= step:
        words = (
            f"must be more than {step}, the step of the checkpoint that the job goes on from; or say start.what = "
            "weights, which begins at step 0"
        )
        raise InvalidRequest.at("steps", spec.steps, words)


def _listed(folder: Path) -> list[Saved]:
    """The whole checkpoints in a folder of this machine. Raises: Unavailable."""
    return _named(
        [{"path": one.folder} for one in list_checkpoints(folder) if any(file.name == _MANIFEST for file in one.files)]
    )


def _named(events: Sequence[dict[str, object]]) -> list[Saved]:
    """What the paths of events say."""
    names = [str(fields.get("path", "")).rstrip("/").rpartition("/")[2] for fields in events]
    return [Saved(int(match[2], 16), int(match[1])) for match in map(_FOLDER.fullmatch, names) if match]


def _refuse_unreadable(path: str, place: str) -> None:
    """Raises: InvalidRequest where this machine, on which the workers run, cannot read the file."""
    file = path_of(place)
    try:
        found = os.stat(file)
    except OSError as error:
        words = f"must be a file that the workers can read: {error.strerror}"
    else:
        if stat.S_ISREG(found.st_mode) and os.access(file, os.R_OK):
            return
        words = "must be a file that the workers may read, such as FOLDER/model.safetensors"
    raise InvalidRequest.at(path, place, words)


def heirs_of(folder: Path, session: Session) -> list[str]:
    """Ids of the jobs that may yet read their beginning below this run folder, oldest first."""
    jobs = JobRepository(session)
    real = os.path.realpath(folder)
    return [
        row.id
        for row in jobs.unfinished()
        if row.state != JobState.CANCELLING
        and _begins_below(real, row)
        and not jobs.events(row.id, [EventKind.CHECKPOINT_SAVED], limit=1, most_bytes=0)[0]
    ]


def _begins_below(real: str, row: JobRow) -> bool:
    start = row.spec.get("start") or {}
    place = start.get("weights") or start.get("checkpoints")
    return place is not None and is_local(place) and Path(os.path.realpath(path_of(place))).is_relative_to(real)


def _plain_place(place: str) -> str:
    """As one of two spellings of a place is compared with the other: s3://a//b, s3a://a/b?region=x. Links followed."""
    if is_local(place):
        return os.path.realpath(path_of(place))
    return posixpath.normpath(place.partition("?")[0].rpartition("://")[2])


def unshared(place: str | None, shared: Sequence[Path]) -> str | None:
    """What it has to be, where not every machine of the cluster reaches it; None where it is that.

    place: None for a folder of this machine alone. shared: folders that all machines have.
    """
    if place is not None and (not is_local(place) or any(path_of(place).is_relative_to(one) for one in shared)):
        return None
    known = f"; shared here: {', '.join(map(str, shared))}" if shared else ""
    return (
        "must be a place that every machine of the cluster reaches, such as s3://bucket/folder, or a folder below one "
        f"of THINWIRE_SHARED_FOLDERS{known}: a worker that starts on another machine would not find it"
    )
