"""The routes of the jobs domain: what comes in and what goes out. Decisions are in service and worker_reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import AwareDatetime, BaseModel, JsonValue
from pydantic_core import PydanticSerializationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, StreamingResponse

from thinwire.contract.jobs import (
    CheckpointList,
    Draft,
    History,
    Job,
    JobChange,
    JobList,
    JobState,
    Logs,
    TargetGroup,
)
from thinwire.contract.labels import MOST_LABELS, label_of
from thinwire.contract.projects import DEFAULT
from thinwire.contract.remote_run import Claim, Claimed, KeptFile, LogKept, RunNow
from thinwire.contract.reports import NEXT_HEADER, Telemetry, WorkerRegistration
from thinwire.contract.spec import LARGEST_STEP, MOST_WORKERS, AnySpec
from thinwire.service.auth import InProject, job_or_person, person, ticket_holder
from thinwire.service.cursors import LONGEST
from thinwire.service.errors import (
    BodyTooLarge,
    CheckpointNotFound,
    FileNotKept,
    Forbidden,
    IdempotencyKeyReused,
    InsufficientStorage,
    InvalidRequest,
    JobFull,
    JobNeeded,
    JobNotFound,
    JobNotOver,
    JobOver,
    LogGone,
    QuotaReached,
    ShowableJSON,
    StaleAttempt,
    TooMuch,
    UnsupportedMediaType,
    documented,
)
from thinwire.service.jobs.listing import Filter
from thinwire.service.jobs.pace import Pace
from thinwire.service.jobs.service import JobService
from thinwire.service.jobs.thinning import LEAST, MOST
from thinwire.service.jobs.worker_reports import WorkerReports
from thinwire.service.large_answers import PART_BYTES, large_answer
from thinwire.service.launch.protocol import LOG_PART_BYTES
from thinwire.service.people.audit import Change, change_of
from thinwire.service.requests import (
    ALWAYS,
    GIVES_BYTES,
    PLAIN_BYTES,
    TAKES_BYTES,
    json_body,
    known_query,
    of_plane,
    plain_bytes,
    read_in_thread,
    takes,
)

LARGEST_OFFSET = 2**53 - 1
LARGEST_EVENT = 2**53 - 1
LARGE = [Depends(large_answer)]


async def _one_key(request: Request) -> None:
    """Dependency: at most one Idempotency-Key. Raises InvalidRequest."""
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise InvalidRequest.at("idempotency-key", None, f"is given {len(keys)} times: give it once")


operators = APIRouter(
    prefix="/v1", dependencies=[Depends(person), Depends(known_query)], responses=ALWAYS, tags=["jobs"]
)
workers = APIRouter(
    prefix="/v1/jobs",
    dependencies=[Depends(job_or_person), Depends(known_query)],
    responses={**ALWAYS, **documented(JobOver)},
    tags=["reports"],
)

claims = APIRouter(
    prefix="/v1/jobs",
    dependencies=[Depends(ticket_holder), Depends(known_query)],
    responses=ALWAYS,
    tags=["remote runs"],
)


Jobs = Annotated[JobService, of_plane("jobs")]
Reports = Annotated[WorkerReports, of_plane("reports")]
ThePace = Annotated[Pace, of_plane("pace")]
Asked = Annotated[Change, Depends(change_of)]
Attempt = Annotated[int, Query(ge=1, le=LARGEST_STEP, description="which submission of the job says it")]
Rank = Annotated[
    int,
    Path(
        ge=0,
        lt=MOST_WORKERS,
        description="which worker: its slot where workers are replaced one by one, so that a replacement has the same; "
        "else its rank",
    ),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern=r"^[\x20-\x7e]+$",
        description="makes the request safe to repeat: of one person, the same key and spec give the same job",
    ),
]


def _json(found: BaseModel) -> Response:
    """Made in the thread of a route, not in the loop of the server, and without a second copy in Python's objects."""
    try:
        return Response(found.model_dump_json(), media_type="application/json")
    except PydanticSerializationError:  # half of a surrogate pair, which a version before has taken
        return ShowableJSON(found.model_dump(mode="json"))


@operators.post(
    "/jobs",
    status_code=202,
    dependencies=[Depends(json_body), Depends(_one_key)],
    responses=documented(IdempotencyKeyReused, QuotaReached, BodyTooLarge, UnsupportedMediaType, InsufficientStorage),
)
def submit(
    spec: AnySpec,
    jobs: Jobs,
    change: Asked,
    project: InProject,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Job:
    """Accept a training job. It is written down before the answer, and started soon after.

    It is of the project that is asked for, else of the token's, or `default` where that is for all.
    """
    job = jobs.submit(spec, idempotency_key, change, project or DEFAULT)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


@operators.post(
    "/jobs:validate",
    dependencies=[Depends(json_body)],
    responses=documented(QuotaReached, BodyTooLarge, UnsupportedMediaType),
)
def validate(spec: AnySpec, jobs: Jobs, request: Request, project: InProject) -> Draft:
    """Say what would become of a submission, and make no job: the spec with its defaults, and whether it would start.

    What a submission would be refused for, this is refused for, in the same words. It takes the role that a submission
    takes, since it says whether files of the service's machine are there.
    """
    return jobs.validate(spec, request.state.caller.person.name, project or DEFAULT)


@operators.post(
    "/jobs/{job_id}/clone",
    status_code=202,
    dependencies=[Depends(json_body), Depends(_one_key)],
    responses=documented(
        JobNotFound, IdempotencyKeyReused, QuotaReached, BodyTooLarge, UnsupportedMediaType, InsufficientStorage
    ),
)
def clone(
    job_id: str,
    changes: dict[str, JsonValue],
    jobs: Jobs,
    change: Asked,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Job:
    """Submit a job's spec again, with changes: a JSON merge patch of it, where null stands for a default.

    The labels are those that the job has now, and the project is the same. Of somebody else's job a secret value is not
    taken along: name it anew.
    """
    job = jobs.clone(job_id, changes, idempotency_key, change)
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return job


@operators.get("/jobs", dependencies=LARGE)
def list_jobs(
    jobs: Jobs,
    project: InProject,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    state: Annotated[list[JobState] | None, Query(max_length=20, description="one of these states")] = None,
    label: Annotated[
        list[str] | None,
        Query(max_length=MOST_LABELS, description="KEY=VALUE, such as team=vision; of several, all"),
    ] = None,
    name: Annotated[
        str | None,
        Query(min_length=1, max_length=64, description="the whole name, or with * at its end what it begins with"),
    ] = None,
    person: Annotated[str | None, Query(min_length=1, max_length=63, description="who has submitted it")] = None,
    text: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=200,
            description="somewhere in its ID, in who has submitted it or in a label, KEY=VALUE, in capitals or not",
        ),
    ] = None,
    created_after: Annotated[
        AwareDatetime | None, Query(description="created then or later; with its offset to UTC")
    ] = None,
    created_before: Annotated[AwareDatetime | None, Query(description="created before; with its offset to UTC")] = None,
    before: Annotated[str | None, Query(max_length=LONGEST, description="`next` of an earlier answer")] = None,
) -> JobList:
    """The newest jobs that are all of what is asked for, newest first, as many as one answer holds.

    Ask again with `before` for older ones: no job that is there all the time is left out or comes twice, whatever is
    submitted or deleted meanwhile.
    """
    wanted = Filter(
        states=state or (),
        labels=_labels(label or ()),
        name=name,
        person=person,
        text=text,
        since=None if created_after is None else created_after.timestamp(),
        until=None if created_before is None else created_before.timestamp(),
        project=project,
    )
    return jobs.list(limit, wanted, before)


def _labels(given: Sequence[str]) -> dict[str, str]:
    """Raises InvalidRequest."""
    found: dict[str, str] = {}
    for one in given:
        try:
            key, value = label_of(one)
        except ValueError as error:
            raise InvalidRequest.at("label", one[:200], str(error)) from error
        if found.setdefault(key, value) != value:
            raise InvalidRequest.at("label", one[:200], f"no job has two values of {key[:200]}: give it once")
    return found


@operators.get("/jobs/{job_id}", response_model=Job, responses=documented(JobNotFound))
async def show(
    job_id: str, jobs: Jobs, making: Annotated[asyncio.Semaphore, of_plane("making")], pace: ThePace
) -> Response:
    """One job: its state, its progress, how it ended."""
    async with making:
        found = await run_in_threadpool(lambda: _json(jobs.get(job_id)))
    pace.looked(job_id)
    return found


@operators.patch(
    "/jobs/{job_id}",
    dependencies=[Depends(json_body)],
    responses=documented(JobNotFound, JobOver, BodyTooLarge, UnsupportedMediaType),
)
def change(job_id: str, wanted: JobChange, jobs: Jobs, change: Asked) -> Job:
    """Change how many workers a job may have, or its labels. Asking for the same again changes nothing.

    Workers: it is written down before the answer, and the run follows it; of a job that is over or being cancelled it
    is a conflict. Labels: of any job, whether it is over or not. If one of both is refused, neither is changed.
    """
    return jobs.change(job_id, wanted, change)


@operators.post("/jobs/{job_id}/cancel", status_code=202, responses=documented(JobNotFound, JobOver))
def cancel(job_id: str, jobs: Jobs, change: Asked) -> Job:
    """Ask for the job's end. Asking again is fine; a job that has succeeded or failed is a conflict."""
    return jobs.cancel(job_id, change)


@operators.delete("/jobs/{job_id}", status_code=204, responses=documented(JobNotFound, JobNotOver, JobNeeded))
def delete(job_id: str, jobs: Jobs, change: Asked) -> None:
    """Remove a job that is over, with its run folder: checkpoints, history, logs. A store elsewhere stays.

    A job from which others are still to begin is a conflict.
    """
    jobs.delete(job_id, change)


@operators.get("/jobs/{job_id}/logs", dependencies=LARGE, responses=documented(JobNotFound, LogGone))
def logs(
    job_id: str,
    jobs: Jobs,
    pace: ThePace,
    offset: Annotated[int, Query(ge=0, le=LARGEST_OFFSET)] = 0,
    limit: Annotated[int, Query(ge=4, le=4 << 20, description="bytes, at most")] = LOG_PART_BYTES,
) -> Logs:
    """A part of the log, from byte `offset` on. Ask again from `next_offset` until `complete`."""
    found = jobs.logs(job_id, offset, limit)
    pace.looked(job_id)
    return found


@workers.get(
    "/{job_id}/metrics",
    response_model=History,
    dependencies=LARGE,
    responses=documented(JobNotFound),
    tags=["jobs"],
)
def history(
    job_id: str,
    jobs: Jobs,
    pace: ThePace,
    request: Request,
    after_step: Annotated[int, Query(ge=-1, le=LARGEST_STEP, description="only the samples of later steps")] = -1,
    before_step: Annotated[
        int, Query(ge=0, le=LARGEST_STEP + 1, description="only the samples of earlier steps")
    ] = LARGEST_STEP + 1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    event_kind: Annotated[list[str] | None, Query(max_length=20)] = None,
    before_event: Annotated[
        int | None, Query(ge=1, le=LARGEST_EVENT, description="`next_before_event` of an earlier answer")
    ] = None,
    points: Annotated[
        int | None, Query(ge=LEAST, le=MOST, description="of all samples so many that show their shape, at most")
    ] = None,
) -> Response:
    """The samples that the job has posted, in order of step; ask again from `next_after_step` for later ones.

    Its newest events too, in order of time; only those of a kind where `event_kind` names some. Ask again from
    `next_before_event` for older ones. An answer holds up to 2 MiB of samples, and 1 MiB or 5000 of the events.

    With `points`: of those between `after_step` and `before_step` the first and the last, those with a validation loss,
    and of each range of steps those with the smallest and the largest loss.
    """
    found = _json(jobs.history(job_id, range(after_step + 1, before_step), limit, event_kind, before_event, points))
    if request.state.caller.person is not None:
        pace.looked(job_id)
    return found


@operators.get("/jobs/{job_id}/checkpoints", dependencies=LARGE, responses=documented(JobNotFound))
def checkpoints(
    job_id: str,
    jobs: Jobs,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    before: Annotated[str | None, Query(max_length=LONGEST, description="`next` of an earlier answer")] = None,
) -> CheckpointList:
    """The newest checkpoints in the job's own folder, in order of step; where it names a checkpoint.store, that."""
    return jobs.checkpoints(job_id, limit, before)


@operators.get(
    "/jobs/{job_id}/checkpoints/{folder}/{file}",
    response_class=Response,
    responses={**documented(JobNotFound, CheckpointNotFound), **GIVES_BYTES},
)
def checkpoint_file(job_id: str, folder: str, file: str, jobs: Jobs) -> StreamingResponse:
    """One file of a checkpoint."""
    opened, size = jobs.checkpoint_file(job_id, folder, file)

    def parts() -> Iterator[bytes]:
        with opened:
            while part := opened.read(PART_BYTES):
                yield part

    return StreamingResponse(parts(), media_type=PLAIN_BYTES, headers={"Content-Length": str(size)})


@operators.get("/metrics/targets", tags=["metrics"])
def targets(reports: Reports, project: InProject) -> list[TargetGroup]:
    """The workers that can be scraped now, for Prometheus `http_sd_configs`."""
    return reports.targets(project)


@workers.put(
    "/{job_id}/workers/{rank}", status_code=204, responses=documented(JobNotFound, JobOver, StaleAttempt, BodyTooLarge)
)
def register(
    job_id: str, rank: Rank, worker: WorkerRegistration, reports: Reports, request: Request, response: Response
) -> None:
    """Say where a worker can be scraped, on the host that says it. Repeat it: the registration runs out."""
    if request.state.caller.person is not None:
        raise Forbidden("a worker registers itself, with its job's token: Prometheus would ask what a person names")
    next_s = reports.register(job_id, rank, worker, request.client.host if request.client else "")
    response.headers[NEXT_HEADER] = f"{next_s:.1f}"


@workers.delete("/{job_id}/workers/{rank}", status_code=204, responses=documented(JobNotFound))
def leave(
    job_id: str, rank: Rank, reports: Reports, attempt: Annotated[int | None, Query(ge=1, le=LARGEST_STEP)] = None
) -> None:
    """Say that a worker is gone. Repeating it is fine; with `attempt`, a later attempt's worker is left alone."""
    reports.leave(job_id, rank, attempt)


@workers.post(
    "/{job_id}/telemetry",
    status_code=204,
    dependencies=[Depends(json_body)],
    responses=documented(JobNotFound, JobOver, StaleAttempt, BodyTooLarge, UnsupportedMediaType, JobFull, TooMuch),
    openapi_extra=takes(Telemetry),
)
def telemetry(
    job_id: str,
    batch: Annotated[Telemetry, Depends(read_in_thread(Telemetry))],
    reports: Reports,
    response: Response,
) -> None:
    """Post samples, events, and how the run ended. Repeating a batch changes nothing.

    A job of which too much is kept is `job_full`: then the progress, a summary and a failure are taken, and no more.
    After the job's end what is missing may come for some minutes, and nothing that is there is replaced.
    """
    response.headers[NEXT_HEADER] = f"{reports.post(job_id, batch):.1f}"


@claims.post(
    "/{job_id}/claim",
    dependencies=[Depends(json_body)],
    responses=documented(JobNotFound, JobOver, StaleAttempt, BodyTooLarge, UnsupportedMediaType),
)
def claim(job_id: str, claim: Claim, reports: Reports) -> Claimed:
    """Exchange an attempt's ticket for what its driver needs, once; the same claimant may ask again."""
    return reports.claim(job_id, claim)


@workers.get("/{job_id}/run", responses=documented(JobNotFound), tags=["remote runs"])
def run_now(job_id: str, reports: Reports) -> RunNow:
    """What the processes of a run have to know of it: the workers that are wanted now, and whether it is over."""
    return reports.now(job_id)


@workers.put(
    "/{job_id}/files/{name}",
    status_code=204,
    dependencies=[Depends(plain_bytes)],
    responses=documented(JobNotFound, JobOver, StaleAttempt, BodyTooLarge, UnsupportedMediaType, TooMuch),
    openapi_extra=TAKES_BYTES,
    tags=["remote runs"],
)
async def put_file(job_id: str, name: KeptFile, attempt: Attempt, reports: Reports, request: Request) -> None:
    """Leave a file with the service, in the place of the one before."""
    await run_in_threadpool(reports.put_file, job_id, name, attempt, await request.body())


@workers.get(
    "/{job_id}/files/{name}",
    dependencies=LARGE,
    responses={**documented(JobNotFound, FileNotKept), **GIVES_BYTES},
    response_class=Response,
    tags=["remote runs"],
)
def get_file(job_id: str, name: KeptFile, reports: Reports) -> Response:
    """A file that the run has left."""
    return Response(reports.get_file(job_id, name), media_type=PLAIN_BYTES)


@workers.get(
    "/{job_id}/package",
    responses={**documented(JobNotFound, FileNotKept), **GIVES_BYTES},
    response_class=FileResponse,
    tags=["remote runs"],
)
def get_package(job_id: str, reports: Reports) -> FileResponse:
    """The zip of the job's script, for a driver whose cluster does not have it."""
    return FileResponse(reports.package(job_id), media_type=PLAIN_BYTES)


@workers.post(
    "/{job_id}/log",
    dependencies=[Depends(plain_bytes)],
    responses=documented(JobNotFound, JobOver, StaleAttempt, BodyTooLarge, UnsupportedMediaType, TooMuch),
    openapi_extra=TAKES_BYTES,
    tags=["remote runs"],
)
async def add_log(
    job_id: str,
    attempt: Attempt,
    offset: Annotated[int, Query(ge=0, le=LARGEST_OFFSET, description="of the first byte that is sent")],
    reports: Reports,
    request: Request,
) -> LogKept:
    """Add a part of the driver's log. The answer says from where to go on; what is there stays as it is."""
    return await run_in_threadpool(reports.add_log, job_id, attempt, offset, await request.body())
