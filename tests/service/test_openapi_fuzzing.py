"""Requests made of the service's document, right and wrong, of known callers and strangers: no answer breaks it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.service.control_plane_harness import Service
from thinwire.service.launch.protocol import LaunchState
from thinwire.service.standby import HANDED_ON

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
PATIENCE_S = 300.0
"""For an answer: a machine may be busy with other tests."""
OPERATOR = "the operator's"
YES = frozenset({"true", "1", "on", "yes", "t", "y"})
TURN_EVERY = 50
"""Requests, after which the jobs go on."""


class Fuzzed:
    """A service with jobs in every state, and requests of all its operations."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.statuses: Counter[int] = Counter()
        self._count = itertools.count(1)
        self.known = [service.running(), service.submit()]
        over = service.running(workers={"max_restarts": 0})
        service.launcher.put(over, LaunchState.FAILED)
        cancelled = service.submit()
        service.client.post(f"/v1/jobs/{cancelled}/cancel")
        service.turn(2)
        self.known += [over, cancelled]
        service.post(self.known[0], samples=[{"step": 1, "phase": "warmup", "loss": 5.0, "time": 1.0}])
        schema = schemathesis.openapi.from_asgi("/openapi.json", service.app)
        self.operations = [found.ok() for found in schema.get_all_operations()]

    def requests(self) -> list[st.SearchStrategy[Any]]:
        """Cases of each operation, right in the document's sense; and wrong, where they can be."""
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        return [one.as_strategy(generation_mode=mode) for one in self.operations for mode in modes if _has(one, mode)]

    def send(self, case: Any, token: str | None, job_id: str | None) -> None:
        """Make the request and check the answer. job_id: in the place of one that was made up."""
        if job_id is not None and "job_id" in (case.path_parameters or {}):
            case.path_parameters["job_id"] = job_id
        if "follow" in case.operation.query and str((case.query or {}).get("follow", "true")).lower() in YES:
            case.query = {**(case.query or {}), "follow": "false"}  # a stream that goes on has no end
        # Hypothesis makes names of headers out of the code's own words. That of one service to another is 503 for
        # whoever has no seal, so that a client comes again: tests/service/test_standby.py holds that.
        case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != HANDED_ON}
        if token == OPERATOR:  # the one of now: a request may have made another
            token = (self.service.home / "token").read_text().strip()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        response = case.call(headers=headers, timeout=PATIENCE_S)
        self.statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if next(self._count) % TURN_EVERY == 0:
            self.service.turn()


def _has(operation: Any, mode: GenerationMode) -> bool:
    """Can a request of this operation be wrong at all?"""
    return mode is GenerationMode.POSITIVE or bool(list(operation.iter_parameters()) or operation.body)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    service = Service(tmp_path_factory.mktemp("fuzzed") / "home", changes_burst=100_000)
    yield Fuzzed(service)
    service.close()


def _fuzz(fuzzed: Fuzzed, cases: int) -> None:
    """So many cases, as many of each operation, of the operator more often than of others."""
    tokens = st.sampled_from([*[OPERATOR] * 6, None, "wrong", *_job_tokens(fuzzed)])
    jobs = st.sampled_from([*fuzzed.known, None])
    requests = fuzzed.requests()
    for one in requests:

        @settings(
            max_examples=cases // len(requests),
            deadline=None,
            database=None,
            derandomize=cases < 1000,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=one, token=tokens, job_id=jobs)
        def ask(case: Any, token: str | None, job_id: str | None) -> None:
            fuzzed.send(case, token, job_id)

        ask()
    print(dict(sorted(fuzzed.statuses.items())))


def _job_tokens(fuzzed: Fuzzed) -> list[str]:
    return [fuzzed.service.job_headers(job_id)["Authorization"].split()[1] for job_id in fuzzed.known[:2]]


def test_no_request_gets_an_answer_that_the_document_does_not_know(fuzzed: Fuzzed) -> None:
    _fuzz(fuzzed, 300)
    assert {200, 202, 204, 401, 403, 404, 422} <= set(fuzzed.statuses)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_request_of_10_000_gets_an_answer_that_the_document_does_not_know(fuzzed: Fuzzed) -> None:
    _fuzz(fuzzed, 10_000)
