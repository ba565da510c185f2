"""How often jobs report, as the service asks them to."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.service.control_plane_harness import Service, sample
from thinwire.contract.reports import HEARTBEAT_S, LEASE_S, MOST_HEARTBEAT_S, MOST_REPORT_S, NEXT_HEADER, REPORT_S
from thinwire.service.jobs import pace as pace_module
from thinwire.service.jobs.pace import A_SECOND, LOOKED_S, Pace


class Elapsed:
    """A clock of seconds that stands."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_more_jobs_report_the_more_seldom_each_does() -> None:
    elapsed = Elapsed()
    pace = Pace(elapsed=elapsed)
    asked = [pace.reported(f"job-{number}") for number in range(3000)]
    assert asked == sorted(asked)
    assert (asked[0], asked[49], asked[499], asked[-1]) == (REPORT_S, REPORT_S, 10.0, MOST_REPORT_S)
    assert pace.reported("job-7") == MOST_REPORT_S, "the same job again is no other one"
    elapsed.now = 3 * MOST_REPORT_S
    assert pace.reported("job-7") == REPORT_S, "the others have fallen silent"


def test_who_looks_at_a_job_among_many_has_it_live() -> None:
    elapsed, streamed = Elapsed(), set[str]()
    pace = Pace(streamed.__contains__, elapsed)
    for number in range(3000):
        pace.reported(f"job-{number}")
    pace.looked("job-1")
    streamed.add("job-2")
    assert [pace.reported(f"job-{number}") for number in (1, 2, 3)] == [REPORT_S, REPORT_S, MOST_REPORT_S]
    streamed.clear()
    assert pace.reported("job-2") == MOST_REPORT_S
    elapsed.now = LOOKED_S / 2
    for number in range(3000):
        pace.reported(f"job-{number}")
    assert pace.reported("job-1") == REPORT_S
    elapsed.now = LOOKED_S
    assert pace.reported("job-1") == MOST_REPORT_S


def test_those_that_somebody_looks_at_are_live_as_far_as_one_service_bears_it() -> None:
    """A script that waits for each of 400 jobs looks at all of them."""
    pace = Pace(lambda job_id: True, Elapsed())
    assert [pace.reported(f"job-{number}") for number in range(400)][-1] == 400 / A_SECOND


def test_registrations_follow_the_number_of_workers() -> None:
    pace = Pace(elapsed=Elapsed())
    asked = [pace.registered("job", rank) for rank in range(int(A_SECOND * MOST_HEARTBEAT_S) + 1)]
    assert (asked[0], asked[1999], asked[-1]) == (HEARTBEAT_S, 40.0, MOST_HEARTBEAT_S)


def test_answers_say_how_long_until_the_next_and_a_lease_lasts_as_much_longer(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = service.running()
    assert float(service.post(job_id, samples=[sample(1)]).headers[NEXT_HEADER]) == REPORT_S
    assert float(service.register(job_id, 0).headers[NEXT_HEADER]) == HEARTBEAT_S
    monkeypatch.setattr(service.plane.pace, "_elapsed", lambda: time.monotonic() + LOOKED_S)
    monkeypatch.setattr(pace_module, "A_SECOND", 0.05)
    assert float(service.post(job_id, samples=[sample(2)]).headers[NEXT_HEADER]) == MOST_REPORT_S
    assert float(service.register(job_id, 0).headers[NEXT_HEADER]) == 20.0
    service.clock.pass_(LEASE_S + 9.0)
    assert service.client.get("/v1/metrics/targets").json(), "it was to be silent for 10 s longer than others are"
    service.clock.pass_(1.0)
    assert service.client.get("/v1/metrics/targets").json() == []


def test_who_asks_for_a_job_makes_it_live(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, elapsed = service.running(), Elapsed()
    elapsed.now = time.monotonic()
    monkeypatch.setattr(service.plane.pace, "_elapsed", elapsed)

    def later() -> None:
        elapsed.now += LOOKED_S
        for number in range(1000):  # nobody looks at these
            service.plane.pace.reported(f"other-{number}")

    for path in ("", "/metrics", "/logs", "/logs/stream?follow=false"):
        later()
        assert float(service.post(job_id, samples=[sample(1)]).headers[NEXT_HEADER]) == MOST_REPORT_S, path
        service.client.get(f"/v1/jobs/{job_id}{path}").raise_for_status()
        assert float(service.post(job_id, samples=[sample(2)]).headers[NEXT_HEADER]) == REPORT_S, path
    later()
    assert service.client.get(f"/v1/jobs/{job_id}x").status_code == 404
    assert service.client.get(f"/v1/jobs/{job_id}/events?follow=false").is_success
    assert float(service.post(job_id, samples=[sample(3)]).headers[NEXT_HEADER]) == MOST_REPORT_S, (
        "it was read, and left"
    )


def test_a_job_is_streamed_while_somebody_is_in_the_hub(service: Service) -> None:
    hub = service.plane.hub

    async def run() -> None:
        async with hub.joined("job-1"), hub.joined("job-1"):
            async with hub.joined(None, samples_of=frozenset({"job-2"})), hub.joined(None):
                assert [hub.streamed(f"job-{number}") for number in (1, 2, 3)] == [True, True, False]
            assert [hub.streamed(f"job-{number}") for number in (1, 2)] == [True, False]
        assert not hub.streamed("job-1")

    asyncio.run(run())
