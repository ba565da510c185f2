"""A cluster is examined by a job in it: submitted, waited for, and read back from its log. Here of Ray's own Jobs API.

Nodes of Kubernetes: pods.py, with the same program and the same way to wait and to read.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from thinwire.service.launch.driver import PYTHON
from thinwire.service.launch.protocol import LauncherError, LaunchState
from thinwire.service.launch.ray_jobs import RayJobs
from thinwire.tools.doctor.examination import LOG_MARK, Examination, Say
from thinwire.tools.doctor.facts import Questions

POLL_S = 1.0
GOING = (LaunchState.PENDING, LaunchState.RUNNING, LaunchState.UNKNOWN)


class NotExamined(Exception):
    """No examination came back; the message says why, and what to do."""


@dataclass(frozen=True)
class Order:
    """What is asked of every node. seconds: for each speed. limit_s: for all of it. sleep: for tests."""

    questions: Questions
    ports: Sequence[int]
    seconds: float
    limit_s: float
    say: Say
    sleep: Callable[[float], None] = time.sleep

    def program(self, python: str = PYTHON) -> str:
        """What runs in the cluster, as a shell takes it. python: with thinwire."""
        asked = ["--questions", self.questions.model_dump_json(), "--seconds", f"{self.seconds:g}"]
        asked += ["--ports", ",".join(map(str, self.ports))]
        return f"{python} -m thinwire.tools.doctor.on_ray {shlex.join(asked)}"

    def wait(self, look: Callable[[], tuple[LaunchState, str | None]], what: str) -> LaunchState:
        """The state in which it ends. look: its state, and what it waits for. Raises: NotExamined, when time is up."""
        until = time.monotonic() + self.limit_s
        while True:
            state, reason = look()
            if state not in GOING:
                self.say("", 1.0)
                return state
            left_s = until - time.monotonic()
            if left_s <= 0:
                why = f" ({reason})" if reason else ""
                raise NotExamined(f"{what} of the doctor is {state} after {self.limit_s:.0f} s{why}")
            done = max(0.0, 1.0 - left_s / self.limit_s)
            self.say(f"{what} is {state}" + (f": {reason}" if reason else ""), done)
            self.sleep(POLL_S)


def read(log: str, state: LaunchState, what: str, hint: str) -> Examination:
    """The examination in the log of a job that has ended. hint: what to do where there is none. Raises: NotExamined."""
    marked = [line for line in log.splitlines() if line.startswith(LOG_MARK)]
    if state is not LaunchState.SUCCEEDED or not marked:
        last = "\n".join(log.splitlines()[-5:])
        raise NotExamined(f"{what} of the doctor ended as {state}{hint} The end of its output:\n{last}")
    return Examination.model_validate_json(marked[-1].removeprefix(LOG_MARK))


def examine_cluster(
    address: str, token: str, order: Order, python: str | None = None, transport: httpx.AsyncBaseTransport | None = None
) -> Examination:
    """Run the doctor on every node. python: the head's, with thinwire; None: that on its path. transport: for tests.

    Raises: NotExamined.
    """
    jobs = RayJobs(address.rstrip("/"), token, transport)
    try:
        reason = jobs.unready()
        if reason is not None:
            raise NotExamined(f"{reason}; see --address and --token-file")
        submission = f"thinwire-doctor-{secrets.token_hex(4)}"
        what = f"the job {submission}"
        jobs.submit(submission, order.program() if python is None else order.program(shlex.quote(python)), {})
        try:
            state = order.wait(lambda: (jobs.status(submission).state, None), what)
        except BaseException:  # the time is up, or the person's patience
            jobs.stop(submission)
            raise
        return read(jobs.log(submission) or "", state, what, ". thinwire must be installed on every node.")
    except LauncherError as error:
        raise NotExamined(str(error)) from error
    finally:
        jobs.close()
