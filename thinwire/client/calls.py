"""Every call of the REST API, as the requests that it takes; see `asking`. All of them raise ClientError.

Each returns what contract/ says of its answer. A list comes whole, page after page, as long as nothing else is asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import JsonValue, TypeAdapter, ValidationError

from thinwire.client.asking import Ask, Steps, Upload, answered, path_of_job, quoted, scoped
from thinwire.client.errors import AmbiguousId, BadAnswer, ClientError, NotFound, Unreachable, error_body
from thinwire.client.streams import Params, Parser
from thinwire.contract.jobs import (
    CheckpointList,
    Draft,
    History,
    Job,
    JobItem,
    JobList,
    JobState,
    Logs,
    TargetGroup,
)
from thinwire.contract.packages import Package, PackageList
from thinwire.contract.people import (
    AuditLine,
    AuditList,
    IssuerPerson,
    IssuerPersonList,
    MadeToken,
    NewToken,
    RotatedToken,
    SignedIn,
    SignOn,
    TokenItem,
    TokenList,
)
from thinwire.contract.projects import NewProject, Project, ProjectList, Quota, QuotaList
from thinwire.contract.reports import Event
from thinwire.contract.spec import JobSpec
from thinwire.contract.streams import Told

MOST = 1000
"""In one page."""
LOOK_S = 10.0
"""Where a stream says when something has happened: it says nothing of leases that run out, or of the queue."""
_BEYOND_ALL_STEPS = 10**9
_LONGEST_NAME_ASKED = 64
"""Characters of the filter by name, with its asterisk."""
_LONGEST_ID = 80
_UPLOAD_TIMEOUT_S = 120.0
"""Between two parts of a package, and until the service has looked at it."""
_TARGETS = TypeAdapter(list[TargetGroup])
_List = TypeVar("_List", PackageList, TokenList, IssuerPersonList, ProjectList)
_One = TypeVar("_One")
_States = JobState | str | Iterable[JobState | str]


# jobs


def submit(
    spec: Mapping[str, JsonValue] | JobSpec, idempotency_key: str | None = None, *, project: str | None = None
) -> Steps[Job]:
    """Create a job; the same key and spec again finds the first. project: whose, by default the token's; see `scoped`.

    Raises Rejected for a wrong spec.
    """
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    ask = Ask("POST", "/v1/jobs", body=_body(spec), headers=headers, params=scoped(project))
    return (yield from answered(Job, ask))


def validate(spec: Mapping[str, JsonValue] | JobSpec, *, project: str | None = None) -> Steps[Draft]:
    """What would become of a submission: the spec with all defaults, and whether it would start now. It makes no job.

    Raises Rejected for a wrong spec, as `submit` does.
    """
    ask = Ask("POST", "/v1/jobs:validate", body=_body(spec), params=scoped(project))
    return (yield from answered(Draft, ask))


def clone(
    job_id: str, changes: Mapping[str, JsonValue] | None = None, idempotency_key: str | None = None
) -> Steps[Job]:
    """A new job of another one's spec, with these changes: a JSON merge patch, where None stands for a default.

    Raises NotFound, Rejected.
    """
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    ask = Ask("POST", path_of_job(job_id, "clone"), body=changes or {}, headers=headers)
    return (yield from answered(Job, ask))


def jobs(
    limit: int | None = 100,
    *,
    state: _States = (),
    labels: Mapping[str, str] | None = None,
    name: str | None = None,
    person: str | None = None,
    text: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    project: str | None = None,
) -> Steps[list[JobItem]]:
    """The newest jobs that are all of this, newest first, as many as `limit`; None: all.

    state: one of these. labels: all of them. name: the whole name, or with * at its end what it begins with. person:
    who has submitted it. text: somewhere in its ID, that person's name or a label. created_after, created_before: with
    a time zone.
    """
    asked = filters(
        state=state,
        labels=labels,
        name=name,
        person=person,
        text=text,
        created_after=created_after,
        created_before=created_before,
        project=project,
    )
    found: list[JobItem] = []
    before: str | None = None
    while limit is None or len(found) < limit:  # an answer holds as many as fit
        page = yield from jobs_page(asked, MOST if limit is None else min(MOST, limit - len(found)), before)
        found += page.jobs
        before = page.next
        if before is None:
            break
    return found


def jobs_page(asked: Params | None = None, limit: int = 100, before: str | None = None) -> Steps[JobList]:
    """One page of that. asked: `filters(...)`. before: `next` of the page before."""
    params = {**(asked or {}), "limit": str(limit), **({} if before is None else {"before": before})}
    return (yield from answered(JobList, Ask("GET", "/v1/jobs", params=params)))


def filters(
    *,
    state: _States = (),
    labels: Mapping[str, str] | None = None,
    name: str | None = None,
    person: str | None = None,
    text: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    project: str | None = None,
) -> dict[str, str | list[str]]:
    """What a list of jobs is asked for, as parameters of its query."""
    states = [state] if isinstance(state, str) else list(state)
    times = {"created_after": created_after, "created_before": created_before}
    asked: dict[str, str | list[str] | None] = {
        "state": [str(one) for one in states],
        "label": [f"{key}={value}" for key, value in (labels or {}).items()],
        "name": name,
        "person": person,
        "text": text,
        **scoped(project),
        **{parameter: None if at is None else at.isoformat() for parameter, at in times.items()},
    }
    return {parameter: value for parameter, value in asked.items() if value not in (None, [])}


def job(job_id: str) -> Steps[Job]:
    """One job, by its full ID. Raises NotFound."""
    return (yield from answered(Job, Ask("GET", path_of_job(job_id))))


def resolve(prefix: str) -> Steps[Job]:
    """The job whose ID is, or alone begins with, `prefix`. Raises NotFound, AmbiguousId."""
    if not prefix:
        raise NotFound(404, "not_found", "the ID is empty: `thinwire jobs` lists the IDs", [])
    try:
        return (yield from job(prefix))
    except NotFound:
        pass  # it may be the beginning of an ID
    found = yield from beginning(prefix, MOST)
    if not found:
        raise NotFound(404, "not_found", f"no job has an ID that begins with {prefix!r}: see `thinwire jobs`", [])
    if len(found) > 1:
        ids = ", ".join(one.id for one in found[:5])
        raise AmbiguousId(f"{len(found)} jobs have an ID that begins with {prefix!r}: {ids}; give more of it")
    return (yield from job(found[0].id))  # a list says less of a job


def beginning(prefix: str, limit: int = 100) -> Steps[list[JobItem]]:
    """The newest jobs whose IDs begin so, as many as `limit`; those with more of it in their names come first.

    An ID is the job's name, a dash, and a word without one: so it is asked for by the name. A filter by text finds
    people and labels too, and an ID may be behind more of those than any limit.
    """
    if not (prefix.isascii() and prefix.isprintable() and len(prefix) <= _LONGEST_ID):
        return []
    found: list[JobItem] = []
    if len(prefix) < _LONGEST_NAME_ASKED:
        found += yield from jobs(limit, name=f"{prefix}*")
    name, dash, _ = prefix.rpartition("-")
    before: str | None = None
    while name and dash and len(name) <= _LONGEST_NAME_ASKED and len(found) < limit:
        page = yield from jobs_page(filters(name=name), MOST, before)
        found += [one for one in page.jobs if one.id.startswith(prefix)]
        before = page.next
        if before is None:
            break
    return found[:limit]


def resize(job_id: str, *, least: int | None = None, most: int | None = None) -> Steps[Job]:
    """Ask for other limits on the number of workers; what is None stays. The same again changes nothing.

    Raises: NotFound, Rejected, and ApiError (409) where the job is over or being cancelled.
    """
    limits = {"min": least, "max": most}
    given: dict[str, JsonValue] = {name: value for name, value in limits.items() if value is not None}
    return (yield from answered(Job, Ask("PATCH", path_of_job(job_id), body={"workers": given})))


def label(job_id: str, labels: Mapping[str, str | None]) -> Steps[Job]:
    """Set labels of a job, which may be over; None takes one away, and the others stay. Raises NotFound, Rejected."""
    return (yield from answered(Job, Ask("PATCH", path_of_job(job_id), body={"labels": dict(labels)})))


def cancel(job_id: str) -> Steps[Job]:
    """Ask for the job's end; answers at once. Raises NotFound, and ApiError (409) where it is over."""
    return (yield from answered(Job, Ask("POST", path_of_job(job_id, "cancel"))))


def delete(job_id: str) -> Steps[None]:
    """Remove a job that is over, with its folder. Raises NotFound, ApiError."""
    yield Ask("DELETE", path_of_job(job_id))


def wait(
    job_ids: Sequence[str],
    timeout_s: float | None = None,
    *,
    poll_s: float = 1.0,
    on_ended: Callable[[Job], None] = lambda job: None,
) -> Steps[dict[str, Job]]:
    """The jobs as they have ended, by full ID; at the end of `timeout_s` those that have by then.

    It looks when a stream says that one is over, and every LOOK_S: a stream does not tell of everything. A service that
    cannot be reached is waited for. poll_s: seconds between two looks where there is no stream, as of an older service.
    on_ended: called with each, as it has ended. Raises: NotFound, where one is deleted meanwhile; Unreachable, where
    nobody answers at the end of the time.
    """
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    left = dict.fromkeys(job_ids)
    ended: dict[str, Job] = {}
    pause_s, of = 0.0, tuple[str, ...]()
    while True:
        for job_id in list(left):
            ask = Ask("GET", path_of_job(job_id), after_s=pause_s, ends_of=of, poll_s=poll_s)
            try:
                found = yield from answered(Job, ask)
            except Unreachable:
                if time.monotonic() >= until:
                    raise
                pause_s, of = poll_s, ()
                continue
            pause_s, of = 0.0, ()
            if found.state.terminal:
                del left[job_id]
                ended[job_id] = found
                on_ended(found)
        left_s = until - time.monotonic()
        if not left or left_s <= 0.0:
            return ended
        pause_s, of = min(LOOK_S, left_s), tuple(left)


# what a job has said


def logs(job_id: str, offset: int = 0, limit: int | None = None) -> Steps[Logs]:
    """The next part of the job's log from `offset` on: 0, or `next_offset` of the part before. limit: bytes."""
    params = {"offset": str(offset), **({} if limit is None else {"limit": str(limit)})}
    return (yield from answered(Logs, Ask("GET", path_of_job(job_id, "logs"), params=params)))


def history(
    job_id: str, *, after_step: int = -1, before_step: int | None = None, points: int | None = None
) -> Steps[History]:
    """Every sample, and event, of the job that the service keeps.

    after_step, before_step: only the samples of the steps between these two. points: of those about so many (2 to 2000)
    that show the curve's shape. Raises NotFound, Rejected.
    """
    first = page = yield from history_page(job_id, after_step, before_step=before_step, points=points)
    samples, events, unreadable = list(first.samples), list(first.events), first.unreadable
    while page.next_after_step is not None:
        # No event is of this kind: only samples are wanted.
        page = yield from history_page(
            job_id, page.next_after_step, kinds=["none"], before_step=before_step, points=points
        )
        samples += page.samples
        unreadable += page.unreadable
    page = first
    while page.next_before_event is not None:
        page = yield from history_page(job_id, _BEYOND_ALL_STEPS, before_event=page.next_before_event)
        events[:0] = page.events
    return History(job_id=job_id, samples=samples, events=events, unreadable=unreadable)


def history_page(
    job_id: str,
    after_step: int = -1,
    *,
    kinds: Sequence[str] = (),
    before_event: int | None = None,
    before_step: int | None = None,
    points: int | None = None,
) -> Steps[History]:
    """The samples after a step, and the newest events, of these kinds alone where some are named: one answer.

    before_step, points: as of `history`; `points` is then the most.
    """
    numbers = {"before_event": before_event, "before_step": before_step, "points": points}
    params: dict[str, str | list[str]] = {name: str(one) for name, one in numbers.items() if one is not None}
    if after_step != -1:
        params["after_step"] = str(after_step)
    if kinds:
        params["event_kind"] = list(kinds)
    return (yield from answered(History, Ask("GET", path_of_job(job_id, "metrics"), params=params)))


def events(job_id: str, kinds: Sequence[str]) -> Steps[list[Event]]:
    """The job's newest events of these kinds, in order of time: as many as one answer holds."""
    page = yield from history_page(job_id, _BEYOND_ALL_STEPS, kinds=kinds)
    return page.events


def told(after: int = 0) -> Steps[list[Told]]:
    """States and events of all jobs after an id, as far as they have been told; `streams.follow` goes on."""
    params = {"after": str(after), "follow": "false", **scoped(None)}
    return Parser().of((yield Ask("GET", "/v1/events", params=params)).content)


def told_of_job(job_id: str, after: int = 0) -> Steps[list[Told]]:
    """The same of one job, with its newest sample, and its end. Raises NotFound."""
    params = {"after": str(after), "follow": "false"}
    return Parser().of((yield Ask("GET", path_of_job(job_id, "events"), params=params)).content)


def log_told(job_id: str, offset: int = 0) -> Steps[list[Told]]:
    """Its log from an offset on, as far as it is written. Raises NotFound."""
    params = {"offset": str(offset), "follow": "false"}
    return Parser().of((yield Ask("GET", path_of_job(job_id, "logs", "stream"), params=params)).content)


def checkpoints(job_id: str) -> Steps[CheckpointList]:
    """The checkpoints in the job's own folder, in order of step, or where they are instead. Raises NotFound."""
    path = path_of_job(job_id, "checkpoints")
    page = yield from answered(CheckpointList, Ask("GET", path))
    found = list(page.checkpoints)
    while page.next is not None:
        page = yield from answered(CheckpointList, Ask("GET", path, params={"before": page.next}))
        found[:0] = page.checkpoints
    return CheckpointList(store=page.store, checkpoints=found)


def checkpoint_file(job_id: str, folder: str, file: str, target: Path) -> Steps[None]:
    """Download one file of a checkpoint; its folder is made. Raises: NotFound; OSError of the own disk."""
    yield Ask("GET", path_of_job(job_id, "checkpoints", quoted(folder), quoted(file)), into=target)


def targets() -> Steps[list[TargetGroup]]:
    """The workers that can be scraped now, as Prometheus asks for them."""
    response = yield Ask("GET", "/v1/metrics/targets", params=scoped(None))
    try:
        return _TARGETS.validate_json(response.content)
    except ValidationError as error:
        raise BadAnswer(f"GET {response.url} answered what this version cannot read") from error


# packages


def package(sha256: str, *, project: str | None = None) -> Steps[Package]:
    """The package of this hash. Raises NotFound."""
    return (yield from answered(Package, Ask("GET", f"/v1/packages/{quoted(sha256)}", params=scoped(project))))


def has_package(sha256: str, *, project: str | None = None) -> Steps[bool]:
    """Whether the service keeps a package of this hash."""
    try:
        found = yield from package(sha256, project=project)
    except NotFound:
        return False
    return found.sha256 == sha256


def packages() -> Steps[list[Package]]:
    """All packages that the service keeps, in order of their hashes."""
    return (yield from _all_pages(PackageList, "/v1/packages", lambda page: page.packages, scoped(None)))


def put_package(
    sha256: str,
    file: BinaryIO,
    size: int,
    progress: Callable[[int], None] = lambda size: None,
    *,
    project: str | None = None,
) -> Steps[None]:
    """Give a package to the service, from where the file stands. progress: called with how many more were sent.

    Raises: Rejected for a zip that may not be unpacked; ApiError (413) for one that is too large, (507) where the
    service has no room.
    """
    sent = Upload(file, size, progress, _UPLOAD_TIMEOUT_S)
    try:
        yield Ask("PUT", f"/v1/packages/{quoted(sha256)}", upload=sent, params=scoped(project))
    except Unreachable as error:
        raise Unreachable(
            f"the package of {size} bytes could not be sent: {error}. Try again; nothing is left of what was sent"
        ) from error


# people


def me() -> Steps[SignedIn]:
    """Whose token this is, and what they may do."""
    return (yield from answered(SignedIn, Ask("GET", "/v1/session")))


def create_token(asked: NewToken) -> Steps[MadeToken]:
    """A token for somebody else, with its text. Raises Rejected, and ApiError (409) where the name has one."""
    body = asked.model_dump(mode="json", exclude_none=True)
    params = scoped(None) if asked.project is None else {}
    return (yield from answered(MadeToken, Ask("POST", "/v1/tokens", body=body, params=params)))


def tokens() -> Steps[list[TokenItem]]:
    """Everybody's tokens, by name, without their texts."""
    return (yield from _all_pages(TokenList, "/v1/tokens", lambda page: page.tokens, scoped(None)))


def move_token(name: str, project: str) -> Steps[TokenItem]:
    """Let a token be for another project from now on; "*": for all. Raises NotFound."""
    ask = Ask("PATCH", f"/v1/tokens/{quoted(name)}", body={"project": project})
    return (yield from answered(TokenItem, ask))


def projects() -> Steps[list[Project]]:
    """The projects that one is of, by name."""
    return (yield from _all_pages(ProjectList, "/v1/projects", lambda page: page.projects))


def create_project(asked: NewProject) -> Steps[Project]:
    """Another project. Raises Rejected, and ApiError (409) where the name is taken."""
    body = asked.model_dump(mode="json", exclude_defaults=True)
    return (yield from answered(Project, Ask("POST", "/v1/projects", body=body)))


def change_project(name: str, changes: Mapping[str, JsonValue]) -> Steps[Project]:
    """What is said of a project, with these changes: a JSON merge patch, where None stands for what a new one has.

    Raises: NotFound, Rejected.
    """
    return (yield from answered(Project, Ask("PATCH", f"/v1/projects/{quoted(name)}", body=changes)))


def delete_project(name: str) -> Steps[None]:
    """Remove a project of which nothing is any more. Raises NotFound, and ApiError (409) where something is."""
    yield Ask("DELETE", f"/v1/projects/{quoted(name)}")


def quotas(project: str | None = None, person: str | None = None) -> Steps[list[Quota]]:
    """What each project that one is of uses of what it may, and one person in it, oneself where none is named.

    Raises NotFound.
    """
    params: Params = {**scoped(project), **({} if person is None else {"person": person})}
    found = yield from answered(QuotaList, Ask("GET", "/v1/quotas", params=params))
    return found.quotas


def revoke_token(name: str) -> Steps[None]:
    """Refuse the token of this name from now on. Raises NotFound."""
    yield Ask("DELETE", f"/v1/tokens/{quoted(name)}", params=scoped(None))


def rotate_token() -> Steps[str]:
    """Another operator's token in the place of the one in the service's home."""
    made = yield from answered(RotatedToken, Ask("POST", "/v1/tokens/operator/rotate"))
    return made.token


def sign_on_offered() -> Steps[SignOn]:
    """By which issuer of OpenID Connect people may sign on, if by any. It takes no token."""
    return (yield from answered(SignOn, Ask("GET", "/v1/sign-on", is_open=True)))


def people() -> Steps[list[IssuerPerson]]:
    """Who has come by the issuer, by name."""
    return (yield from _all_pages(IssuerPersonList, "/v1/people", lambda page: page.people))


def block_person(name: str) -> Steps[None]:
    """Refuse somebody of the issuer from now on, whether they have come yet or not."""
    yield Ask("PUT", f"/v1/people/{quoted(name)}/block")


def unblock_person(name: str) -> Steps[None]:
    """Take them again. Raises NotFound."""
    yield Ask("DELETE", f"/v1/people/{quoted(name)}/block")


def release_person(name: str) -> Steps[None]:
    """Let the name be that of the next who comes with it. Raises NotFound."""
    yield Ask("DELETE", f"/v1/people/{quoted(name)}")


def audit(limit: int | None = 100, *, who: str | None = None, job_id: str | None = None) -> Steps[list[AuditLine]]:
    """The newest changes, newest first; of one person, of one job where given. limit: None: all that are kept."""
    asked = {"who": who, "job_id": job_id}
    params: dict[str, str | list[str]] = {name: value for name, value in asked.items() if value is not None}
    params |= scoped(None)
    found: list[AuditLine] = []
    while limit is None or len(found) < limit:
        params["limit"] = str(MOST if limit is None else min(MOST, limit - len(found)))
        page = yield from answered(AuditList, Ask("GET", "/v1/audit", params=params))
        found += page.lines
        if page.next is None:
            break
        params["before"] = str(page.next)
    return found


# the service


def not_ready() -> Steps[str | None]:
    """None when the service takes jobs, else its reason. Raises Unreachable where nobody answers at all."""
    response = yield Ask("GET", "/readyz", is_open=True, any_status=True)
    return None if response.is_success else error_body(response).message


def alive() -> Steps[bool]:
    """True where the service that is found answers /healthz; nothing is raised."""
    try:
        response = yield Ask("GET", "/healthz", is_open=True, any_status=True)
    except ClientError:
        return False
    return response.is_success


def metrics() -> Steps[str]:
    """The service's own metrics, as Prometheus reads them."""
    response = yield Ask("GET", "/metrics")
    return response.text


def _all_pages(
    answer: type[_List], path: str, of: Callable[[_List], list[_One]], asked: Params | None = None
) -> Steps[list[_One]]:
    """What is on all pages of a list, in its order. of: what is on one. asked: the rest of the query."""
    found: list[_One] = []
    after: Params = {}
    while True:
        page = yield from answered(answer, Ask("GET", path, params={**(asked or {}), **after}))
        found += of(page)
        if page.next is None:
            return found
        after = {"after": page.next}


def _body(spec: Mapping[str, JsonValue] | JobSpec) -> Mapping[str, JsonValue]:
    """A spec that was read as a model says what was written, and no default: those of the service hold."""
    return spec.model_dump(mode="json", exclude_unset=True) if isinstance(spec, JobSpec) else spec
