"""Ray's Jobs REST API over plain HTTP: submit, ask, stop. Ray itself is never imported here.

Facts of Ray 2.60 that shape this file: a submission id that is taken is refused with 500 and a traceback, an unknown
one is 404, stopping what has ended is 200 with {"stopped": false}. A log comes as one whole text, so it is read from
where it was written instead, and asked for once at most, at the end. A job whose node is lost with its head is RUNNING
for ever: what watches jobs there begins with the next submission. So dead nodes are asked for, too. Anybody who has the
token sees entrypoint, metadata and runtime_env of every job, so no secret may be in them.

A head may be broken, or somebody else's: every answer has a limit of bytes, and a time in which all of it must have
come. httpx bounds the time between two parts alone, so its calls are made in an event loop, in a thread, and end there.

Of a job that has never begun its owner hears why in one or two lines, out of the pages that Ray says of it. What Ray
could not make, its runtime environment (contract/environment_words.py), or could not start, the driver's Python, failed
before any process of ours could say why. Each case is known by what Ray or the shell writes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
from pydantic import BaseModel, ValidationError

from thinwire.contract.environment_words import last_line, shortened, why_no_environment
from thinwire.contract.places import Room
from thinwire.service.launch.protocol import OF_RAY, Code, LauncherError, LaunchState, LaunchStatus

_log = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 15.0
"""For a whole answer."""
SUBMIT_TIMEOUT_S: Final = 60.0
LOG_TIMEOUT_S: Final = 120.0
UPLOAD_TIMEOUT_S: Final = 120.0
"""Until Ray has stored a package, and a second more for each MiB of it."""
AGENT_TRIES: Final = 5
"""A young head on a loaded machine answers before its agent is there; Ray waits 10 s for it at every submit."""
MESSAGE_CHARS: Final = 2000
"""Ray puts up to 20,000 characters of log into the message of a failed job; more than this is cut in the middle."""

MOST_LOG_BYTES: Final = 64 << 20
"""Of an answer that holds a log."""
MOST_NODES_BYTES: Final = 16 << 20
"""Of one with the nodes of a cluster."""
MOST_ANSWER_BYTES: Final = 1 << 20
"""Of any other."""

NODES_S: Final = 5.0
"""So long the nodes of one answer are those of now."""
OTHERS_S: Final = 15.0
"""What others hold is what they have held for so long: Ray counts what is taken every 5 s, and our jobs' too."""

_NODES: Final = "/api/v0/nodes?limit=10000"
_GROUPS: Final = (
    "/api/v0/placement_groups?filter_keys=state&filter_predicates=%3D&filter_values=CREATED&detail=1&limit=10000"
)
_USAGE: Final = "/api/cluster_status"
_NOT_AS_SEEN: Final = (ValueError, LookupError, TypeError, AttributeError)
"""What reading an answer raises that is not as Ray 2.60 was seen to give it."""
_NO_AGENT: Final = "No available agent to submit job"


class _Job(BaseModel):
    status: str
    message: str | None = None
    driver_node_id: str | None = None
    error_type: str | None = None
    driver_exit_code: int | None = None


class _Log(BaseModel):
    logs: str


class TooLong(httpx.HTTPError):
    """The answer has more bytes than it may."""


class RayJobs:
    """A client of one Ray head. Threads may share it."""

    def __init__(self, url: str, token: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`url` is the dashboard's, without a slash at the end; `token` "" where it asks for none.

        `transport` is for tests.
        """
        self.url = url
        self._dead: frozenset[str] = frozenset()
        self._room: Room | None = None
        self._nodes_asked = -math.inf
        self._others: deque[tuple[float, int, int]] = deque()
        """When seen, CPUs, GPUs."""
        self._lock = threading.Lock()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        identity = {"Accept-Encoding": "identity"}  # what is unpacked is longer than what has come
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={**identity, "Authorization": f"Bearer {token}"} if token else identity,
            timeout=ASK_TIMEOUT_S,
            transport=transport,
            trust_env=False,  # a proxy set for the internet must not see, or break, calls to this machine
        )

    def close(self) -> None:
        """Drop the connections; calls that are under way find them lost. Safe to call twice."""
        with self._lock:
            closed, self._closed, loop = self._closed, True, self._loop
        if loop is not None and not closed:
            asyncio.run_coroutine_threadsafe(self._drop(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    async def _drop(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._http.aclose()

    def unready(self) -> str | None:
        """None when the Jobs API answers and takes our token, else the reason in one sentence."""
        try:
            answer = self._send("GET", "/api/version")
        except httpx.HTTPError as error:
            return f"Ray's dashboard at {self.url} does not answer ({_words(error)})"
        if answer.status_code != httpx.codes.OK:
            return f"Ray's dashboard at {self.url} answered {answer.status_code}: {_last_line(answer.text)}"
        return None

    def submit(
        self, submission_id: str, entrypoint: str, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        """Start `entrypoint` (a shell command line) under our id, in the folder of `code`. An id that Ray knows is a
        success.

        Raises: LauncherError where Ray neither took it nor knows it, as far as can be seen.
        """
        if self.status(submission_id).state not in (LaunchState.ABSENT, LaunchState.UNKNOWN):
            return
        body: dict[str, Any] = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "metadata": dict(metadata),
        }
        if code is not None:
            body["runtime_env"] = self._environment(code)
        refusal: str | None = None
        for attempt in range(1, AGENT_TRIES + 1):
            try:
                answer = self._send("POST", "/api/jobs/", json=body, within_s=SUBMIT_TIMEOUT_S)
                refusal = None if answer.is_success else f"{answer.status_code}: {_last_line(answer.text)}"
            except httpx.HTTPError as error:
                refusal = _words(error)
            if refusal is None or _NO_AGENT not in refusal:
                break
            _log.info("ray_agent_awaited submission_id=%s attempt=%d of=%d", submission_id, attempt, AGENT_TRIES)
        # A refusal may mean that the id is taken, a lost answer that the job was recorded: ask, rather than guess.
        if refusal is not None and self.status(submission_id).state in (LaunchState.ABSENT, LaunchState.UNKNOWN):
            raise LauncherError(f"Ray at {self.url} did not take job {submission_id} ({refusal}); try again")

    def status(self, submission_id: str) -> LaunchStatus:
        """What Ray says of it: ABSENT for 404 and where its driver's node is dead, UNKNOWN where Ray does not answer
        properly. Never raises."""
        try:
            answer = self._send("GET", f"/api/jobs/{submission_id}")
        except httpx.HTTPError as error:
            return LaunchStatus(LaunchState.UNKNOWN, f"Ray at {self.url} does not answer ({_words(error)})")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return LaunchStatus(LaunchState.ABSENT)
        if not answer.is_success:
            why = f"Ray at {self.url} answered {answer.status_code}: {_last_line(answer.text)}"
            return LaunchStatus(LaunchState.UNKNOWN, why)
        try:
            job = _Job.model_validate_json(answer.content)
        except ValidationError as error:
            return LaunchStatus(LaunchState.UNKNOWN, f"Ray at {self.url} answered what is not a job: {error}")
        state = OF_RAY.get(job.status)
        if state is None:
            return LaunchStatus(
                LaunchState.UNKNOWN, f"Ray at {self.url} reported the unknown job status {job.status!r}"
            )
        if state is LaunchState.RUNNING and job.driver_node_id is not None and job.driver_node_id in self._dead_nodes():
            return LaunchStatus(LaunchState.ABSENT, f"the node {job.driver_node_id} of its driver is dead")
        if state is LaunchState.FAILED:
            never = why_never_begun(job.error_type, job.driver_exit_code, job.message or "")
            if never is not None:
                _log.warning("job_never_began submission_id=%s ray_says=%r", submission_id, job.message)
                return LaunchStatus(state, never, began=False)
        return LaunchStatus(state, _shortened(job.message or ""))

    def room(self, ours: str | None = None) -> Room:
        """What the living nodes have. ours: how the placement groups of our jobs begin, where others may hold some of
        it. Raises LauncherError where Ray does not say so now.
        """
        self._ask_nodes()
        if self._room is None:
            raise LauncherError(f"Ray at {self.url} has named no node with a CPU yet; it is asked again")
        if ours is None:
            return self._room
        try:
            cpus, gpus = self._held_by_others(ours)
        except (httpx.HTTPError, *_NOT_AS_SEEN) as error:
            raise LauncherError(
                f"Ray at {self.url} does not say what is taken ({error!r}); it is asked again"
            ) from error
        return replace(self._room, others_cpus=cpus, others_gpus=gpus)

    def _held_by_others(self, ours: str) -> tuple[int, int]:
        """CPUs and GPUs that have been held for OTHERS_S by what is no placement group of ours."""
        now = time.monotonic()
        if not self._others or now >= self._others[-1][0] + NODES_S:
            status = self._json(_USAGE)["data"].get("clusterStatus")  # none with the second version of its autoscaler
            taken = None if status is None else status["loadMetricsReport"]["usage"]
            groups = [group for group in self._json(_GROUPS)["data"]["result"]["result"] if group["state"] == "CREATED"]

            def held(kind: str) -> int:
                mine, theirs = (
                    sum(
                        bundle["unit_resources"].get(kind, 0)
                        for group in groups
                        if group["name"].startswith(ours) is own
                        for bundle in group["bundles"]
                    )
                    for own in (True, False)
                )
                return max(0, math.ceil(float(theirs if taken is None else taken.get(kind, (0, 0))[0] - mine)))

            self._others.append((now, held("CPU"), held("GPU")))
            while len(self._others) > 1 and self._others[1][0] <= now - OTHERS_S:
                self._others.popleft()
        return min(cpus for _, cpus, _ in self._others), min(gpus for _, _, gpus in self._others)

    def _dead_nodes(self) -> frozenset[str]:
        """As Ray has lately said; the last answer, where it says nothing now. A dead node stays dead."""
        self._ask_nodes()
        return self._dead

    def _ask_nodes(self) -> None:
        if time.monotonic() < self._nodes_asked + NODES_S:
            return
        self._nodes_asked = time.monotonic()
        try:
            nodes = self._json(_NODES)["data"]["result"]["result"]
            self._dead = frozenset(str(node["node_id"]) for node in nodes if node["state"] == "DEAD")
            living = [node["resources_total"] for node in nodes if node["state"] == "ALIVE"]
            cpus = [int(has.get("CPU", 0)) for has in living]
            gpus = [min(int(has.get("GPU", 0)), one) for has, one in zip(living, cpus, strict=True)]
            self._room = Room(cpus=sum(cpus), gpus=sum(gpus)) if any(cpus) else None  # a young head has no node yet
        except (httpx.HTTPError, *_NOT_AS_SEEN) as error:
            _log.warning(
                "nodes_unknown url=%s reason=%s", self.url, (str(error) or type(error).__name__).splitlines()[0]
            )

    def _json(self, path: str) -> Any:
        answer = self._send("GET", path, most_bytes=MOST_NODES_BYTES)
        answer.raise_for_status()
        return answer.json()

    def stop(self, submission_id: str) -> None:
        """Ask for its end; over or absent is a success. Raises LauncherError."""
        answer = self._ask("POST", f"/api/jobs/{submission_id}/stop", f"stop job {submission_id}")
        if not answer.is_success and answer.status_code != httpx.codes.NOT_FOUND:
            raise LauncherError(
                f"Ray at {self.url} did not stop job {submission_id} "
                f"({answer.status_code}: {_last_line(answer.text)}); try again"
            )

    def _environment(self, code: Code) -> dict[str, Any]:
        """What Ray makes on each machine, its package being there. Raises LauncherError."""
        found = code.environment()
        if code.package is not None:
            name = f"_ray_pkg_{code.sha256}.zip"
            self._put_package(name, code.package)
            found["working_dir"] = f"gcs://{name}"
        return found

    def _put_package(self, name: str, zipped: Path) -> None:
        """Let Ray have the package. Asking for it also keeps it for ten minutes. Raises LauncherError."""
        path = f"/api/packages/gcs/{name}"
        what = f"take the package {name}"
        if self._ask("GET", path, what).is_success:
            return
        size = zipped.stat().st_size
        try:
            answer = self._send(
                "PUT",
                path,
                content=_parts(zipped),
                headers={"Content-Length": str(size), "Content-Type": "application/octet-stream"},
                within_s=UPLOAD_TIMEOUT_S + size / (1 << 20),
            )
        except httpx.HTTPError as error:
            raise LauncherError(f"Ray at {self.url} could not {what} ({_words(error)}); try again") from error
        if not answer.is_success:
            raise LauncherError(
                f"Ray at {self.url} did not {what} of {size} bytes ({answer.status_code}: {_last_line(answer.text)})"
            )
        _log.info("package_given_to_ray name=%s bytes=%d", name, size)

    def log(self, submission_id: str) -> str | None:
        """All that the driver has written; None where Ray knows no such submission.

        Raises: LauncherError, also where it is longer than MOST_LOG_BYTES.
        """
        path = f"/api/jobs/{submission_id}/logs"
        try:
            answer = self._send("GET", path, within_s=LOG_TIMEOUT_S, most_bytes=MOST_LOG_BYTES)
        except TooLong as error:
            raise LauncherError(
                f"the log of {submission_id} is longer than {MOST_LOG_BYTES >> 20} MiB: read it on the head"
            ) from error
        except httpx.HTTPError as error:
            raise LauncherError(
                f"Ray at {self.url} gave no log of {submission_id} ({_words(error)}); try again"
            ) from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        if not answer.is_success:
            why = f"{answer.status_code}: {_last_line(answer.text)}"
            raise LauncherError(f"Ray at {self.url} gave no log of {submission_id} ({why}); try again")
        try:
            return _Log.model_validate_json(answer.content).logs
        except ValidationError as error:
            raise LauncherError(f"Ray at {self.url} answered what is not a log: {error}") from error

    def _ask(self, method: str, path: str, what: str) -> httpx.Response:
        try:
            return self._send(method, path)
        except httpx.HTTPError as error:
            raise LauncherError(f"Ray at {self.url} could not {what} ({_words(error)}); try again") from error

    def _send(
        self,
        method: str,
        path: str,
        *,
        within_s: float = ASK_TIMEOUT_S,
        most_bytes: int = MOST_ANSWER_BYTES,
        **request: Any,
    ) -> httpx.Response:
        """The whole answer. Raises httpx.HTTPError, also where it has not come in time; TooLong."""
        with self._lock:
            if self._closed:
                raise _lost()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="thinwire-ray", daemon=True).start()
            call = self._whole(method, path, within_s, most_bytes, request)
            answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return answer.result()
        except CancelledError as error:  # another thread found the head dead and closed us
            raise _lost() from error

    async def _whole(
        self, method: str, path: str, within_s: float, most_bytes: int, request: Mapping[str, Any]
    ) -> httpx.Response:
        held = bytearray()
        try:
            async with (
                asyncio.timeout(within_s),
                self._http.stream(method, path, timeout=within_s, **request) as answer,
            ):
                if "content-encoding" in answer.headers:
                    raise TooLong("its answer is packed, and nobody has asked for that")
                async for part in answer.aiter_bytes():
                    held += part
                    if len(held) > most_bytes:
                        raise TooLong(f"its answer has more than {most_bytes} bytes")
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"its answer had not come after {within_s:g} s") from error
        return httpx.Response(answer.status_code, content=bytes(held), request=answer.request)


def _lost() -> httpx.NetworkError:
    return httpx.NetworkError("the connection was closed because the head ended")


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _parts(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            yield part


def _words(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _last_line(text: str) -> str:
    """The line of a Python traceback that says something; Ray answers errors with whole tracebacks."""
    lines = [line for line in text.splitlines() if line.strip(" .")]
    return lines[-1].strip() if lines else "(empty answer)"


def _shortened(text: str) -> str:
    if len(text) <= MESSAGE_CHARS:
        return text
    half = MESSAGE_CHARS // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


_ENVIRONMENT: Final = "RUNTIME_ENV_SETUP_FAILURE"
_ENTRYPOINT: Final = "JOB_ENTRYPOINT_COMMAND_ERROR"
_CANNOT_START: Final = (126, 127)
"""Exit codes of a shell: it may not run the command, or finds none."""

_NO_MODULE = re.compile(r"No module named '?([\w.]+)'?")


def why_never_begun(error_type: str | None, exit_code: int | None, message: str) -> str | None:
    """In at most LONGEST characters; None where the driver has begun, as far as can be seen.

    error_type, exit_code, message: error_type, driver_exit_code and message of a failed job of Ray's Jobs API.
    """
    if error_type == _ENVIRONMENT:
        return why_no_environment(message)
    if error_type != _ENTRYPOINT:
        return None
    if exit_code in _CANNOT_START:
        line = next((line for line in message.splitlines() if line.startswith("/bin/sh: ")), last_line(message))
        return shortened(
            f"the cluster cannot start its Python: {line.removeprefix('/bin/sh: ').strip()}. Where Ray is started, "
            "THINWIRE_PYTHON names it; `thinwire up` does that"
        )
    missing = _NO_MODULE.search(last_line(message))
    if missing is not None:
        return shortened(
            f"the Python that the cluster starts has no module {missing[1]!r}: install thinwire[worker] there, of the "
            "service's version, or let THINWIRE_PYTHON name another Python where Ray is started"
        )
    return None
