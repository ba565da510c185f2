"""Why a job never began, in one or two lines: of what Ray 2.60 was seen to say (tests/data/ray-2.60)."""

import json
from pathlib import Path

import httpx
import pytest

from thinwire.contract.environment_words import LONGEST
from thinwire.contract.jobs import JobState
from thinwire.service.jobs.decide import Fail, JobView, Retry, decide
from thinwire.service.launch.ray_jobs import RayJobs, why_never_begun

SEEN = json.loads((Path(__file__).parents[1] / "data" / "ray-2.60" / "failed_jobs.json").read_text())
WORDS = {
    "pip-none": [
        "pip could not install nosuchpackage-of-thinwire==1 on the box 127.0.0.1: "
        "No matching distribution found for nosuchpackage-of-thinwire==1",
        "recipe.pip",
        "pip.conf",
    ],
    "dir-local": ["recipe.working_dir = '/no/such/folder' is not on the box 127.0.0.1", "packs a relative one"],
    "dir-gcs": ["lost the job's package gcs://_ray_pkg_0123456789abcdef.zip", "submit the job again"],
    "python-none": ["cannot start its Python: 1: /no/such/python: not found", "THINWIRE_PYTHON"],
    "python-other": ["no module 'pydantic'", "install thinwire[worker]"],
}


def asked(name):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=SEEN[name]))
    return RayJobs("http://127.0.0.1:1", "", transport).status("any")


@pytest.mark.parametrize("name", SEEN)
def test_what_ray_says_of_a_job_that_never_began_is_told_short_and_the_whole_is_logged(name, caplog):
    status = asked(name)
    assert not status.began
    for word in WORDS[name]:
        assert word in status.message
    assert len(status.message) <= LONGEST
    assert status.message.count("\n") <= 1
    assert repr(SEEN[name]["message"]) in caplog.text


def test_a_first_attempt_that_never_began_fails_and_a_later_one_is_tried_again():
    view = {"id": "a", "state": JobState.PENDING, "max_attempts": 4, "max_restarts": 3}
    status = asked("pip-none")
    first, later = (decide(JobView(attempt=attempt, **view), status) for attempt in (1, 2))
    assert isinstance(first, Fail)
    assert first.reason.startswith("the job could not begin: pip could not install nosuchpackage-of-thinwire==1")
    assert first.reason.endswith("Full log: thinwire logs a")
    assert later == Retry("attempt 2 could not begin; attempt 3 resumes from the newest checkpoint")


PIP = "Run cmd[3] failed.\nCommand '['python', '-m', 'pip', 'install', '-r', 'x']' returned 1\n"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (PIP + "    ERROR: Invalid requirement: 'a b': Expected end", "install a b on a box: Invalid requirement"),
        (PIP + "    ERROR: Cannot install a==1 and a==2 because these conflict", "install a==1 and a==2 on a box"),
        (PIP + "    ERROR: Failed building wheel for slow" + "x" * 5000, "install slowx"),
        (PIP + "[Errno 28] No space left on device", "what recipe.pip names on a box: [Errno 28] No space left"),
        (
            "Traceback\nRuntimeError: it is broken " + "x" * 5000,
            "make the job's environment on a box: RuntimeError: it",
        ),
        ("", "it does not say why"),
    ],
)
def test_other_failures_of_an_environment_are_told_by_their_last_line(message, words):
    told = why_never_begun("RUNTIME_ENV_SETUP_FAILURE", None, message)
    assert words in told
    assert len(told) <= LONGEST


@pytest.mark.parametrize(
    ("error_type", "code", "message"),
    [
        (None, None, "killed"),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", 1, "ValueError: No luck"),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", -9, "No module named 'a'\nmuch later"),
        ("JOB_SUPERVISOR_ACTOR_START_FAILURE", None, "ERROR: x"),
    ],
)
def test_a_driver_that_has_begun_speaks_for_itself(error_type, code, message):
    assert why_never_begun(error_type, code, message) is None
