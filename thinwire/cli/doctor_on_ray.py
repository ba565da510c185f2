"""A Ray cluster is examined by a job in it: submitted, waited for, and read back from its log."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Sequence

import httpx

from thinwire.service.launch.driver import PYTHON
from thinwire.service.launch.protocol import LauncherError, LaunchState
from thinwire.service.launch.ray_jobs import RayJobs
from thinwire.tools.doctor.examination import LOG_MARK, Examination, Say
from thinwire.tools.doctor.facts import Questions

POLL_S = 1.0


class ClusterNotExamined(Exception):
    """No examination came back; the message says why, and what to do."""


def examine_cluster(
    address: str,
    token: str,
    questions: Questions,
    *,
    ports: Sequence[int],
    seconds: float,
    limit_s: float,
    say: Say,
    python: str | None = None,
    transport: httpx.BaseTransport | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Examination:
    """Run the doctor on every node. limit_s: for all of it. python: the head's, with thinwire; None: that on its path.

    transport, sleep: for tests. Raises: ClusterNotExamined.
    """
    jobs = RayJobs(address.rstrip("/"), token, transport)
    try:
        reason = jobs.unready()
        if reason is not None:
            raise ClusterNotExamined(f"{reason}; see --address and --token-file")
        submission = f"thinwire-doctor-{secrets.token_hex(4)}"
        asked = ["--questions", questions.model_dump_json(), "--seconds", f"{seconds:g}"]
        asked += ["--ports", ",".join(map(str, ports))]
        try:
            program = PYTHON if python is None else shlex.quote(python)
            jobs.submit(submission, f"{program} -m thinwire.tools.doctor.on_ray {shlex.join(asked)}", {})
            state = _end(jobs, submission, limit_s, say, sleep)
            log = jobs.log(submission) or ""
        except LauncherError as error:
            raise ClusterNotExamined(str(error)) from error
    finally:
        jobs.close()
    said = [line for line in log.splitlines() if line.startswith(LOG_MARK)]
    if state is not LaunchState.SUCCEEDED or not said:
        last = "\n".join(log.splitlines()[-5:])
        raise ClusterNotExamined(
            f"the job {submission} of the doctor ended as {state}. thinwire must be installed on every node. The end "
            f"of its log:\n{last}"
        )
    return Examination.model_validate_json(said[-1].removeprefix(LOG_MARK))


def _end(jobs: RayJobs, submission: str, limit_s: float, say: Say, sleep: Callable[[float], None]) -> LaunchState:
    """Wait for the job's end; stop it where the time is up, or the person's patience."""
    until = time.monotonic() + limit_s
    try:
        while (found := jobs.status(submission)).state in (
            LaunchState.PENDING,
            LaunchState.RUNNING,
            LaunchState.UNKNOWN,
        ):
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise LauncherError(f"the job {submission} of the doctor is {found.state} after {limit_s:.0f} s")
            say(f"the cluster's job {submission} is {found.state}", max(0.0, 1.0 - left_s / limit_s))
            sleep(POLL_S)
    except BaseException:
        jobs.stop(submission)
        raise
    say("", 1.0)
    return found.state
