"""What dashboards and rules ask has an answer: a real Prometheus, the service, and two workers that train.

The workers are threads: the training loop and the telemetry are the real ones, Ray is left out (tests/e2e has it).
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.conftest import missing
from tests.deploy.queries import OF_SCRIPTS_ALONE, WIRE_INTERFACE, of_dashboards, of_rules
from tests.deploy.real_prometheus import Prometheus
from tests.service.control_plane_harness import wait_until
from tests.service.live_service import Listening
from tests.workers.small_job import SMALL, small_spec
from thinwire.comm import PeerLost, run_threads
from thinwire.contract.metric_names import most_series
from thinwire.service.config import Settings
from thinwire.service.jobs.job_folder import ServiceAt
from thinwire.service.launch.fake import FakeLauncher
from thinwire.service.main import create_app
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.run_place import Place
from thinwire.workers.session.job import run_job
from thinwire.workers.session.training import Run
from thinwire.workers.telemetry.reporter import Reporter

pytestmark = pytest.mark.timeout(600)
LONG = 1_000_000
"""Steps: it is ended when all has been asked."""
WITHIN_S = 240.0


@dataclass
class Watched:
    """What was not answered while the job ran, its series then, and whether any were left soon after its end."""

    unanswered: dict[str, str]
    series: int
    gone: bool


@dataclass
class Workers:
    """Two, on threads, of one job."""

    run_dir: Path
    job_id: str
    groups: list = field(default_factory=list)

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """As a loss of all: the run stops where it is."""
        for group in self.groups:
            group.leave("all has been asked")
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with suppress(PeerLost):
            run_threads(2, self._work)

    def _work(self, group) -> None:
        self.groups.append(group)
        reporter = Reporter.in_place(Place(self.run_dir), group.rank)
        reporter.serve(self.job_id, group.rank, "127.0.0.1")
        reporter.regrouped(0, generation=2, seconds=0.5, lost_norm=0.0)  # ranks on threads are never others
        try:
            spec = small_spec(steps=LONG, checkpoint={"every_steps": 50})
            run_job(spec, Run(self.run_dir, time.time()), FixedRanks(group), torch.device("cpu"), reporter)
        finally:
            reporter.close(timeout_s=5.0)


class WithRay(Listening):
    """The service by the clock, its reconciler running, and what a home has of a Ray that nobody asks here."""

    def __init__(self, home: Path) -> None:
        self.home = home
        app = create_app(Settings(home=home, launcher="fake"), FakeLauncher(), service_url="http://127.0.0.1:1")
        super().__init__(app, lifespan="on", timeout_graceful_shutdown=1)
        app.state.plane.jobs._folders.service = ServiceAt(self.url)
        (home / "ray").mkdir()
        (home / "ray" / "auth_token").write_text("of no Ray")

    def ray(self) -> str:
        return "127.0.0.1:1"

    def submit(self, job: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {(self.home / 'token').read_text().strip()}"}
        answer = httpx.post(f"{self.url}/v1/jobs", json=job, headers=headers, trust_env=False, timeout=60)
        made: dict[str, Any] = answer.raise_for_status().json()
        wait_until(lambda: (Path(made["run_dir"]) / "job.json").exists(), "the run folder")
        return made


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    program = shutil.which("prometheus")
    if program is None:
        missing("prometheus is not installed: apt install prometheus")
    folder = tmp_path_factory.mktemp("watched")
    server = WithRay(folder / "home")
    job = server.submit({**SMALL, "steps": LONG, "workers": {"min": 2, "max": 3}})
    prometheus = Prometheus(program, folder, server)
    workers = Workers(Path(job["run_dir"]), job["id"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("THINWIRE_WIRE_INTERFACE", WIRE_INTERFACE)
        try:
            prometheus.begin()
            workers.begin()
            until_s = time.monotonic() + WITHIN_S
            while time.monotonic() < until_s and set(prometheus.unanswered) - OF_SCRIPTS_ALONE:
                prometheus.ask_all(job["id"])
                time.sleep(0.5)
            own = f'{{__name__=~"thinwire_.+", job_id="{job["id"]}", rank!=""}}'  # and not what rules have recorded
            (counted,) = prometheus.ask(f"count({own})")
            workers.end()
            while time.monotonic() < until_s + 60 and prometheus.ask(own):
                time.sleep(0.5)
            yield Watched(prometheus.unanswered, int(counted["value"][1]), not prometheus.ask(own))
        finally:
            for group in workers.groups:
                group.leave("the test is over")
            prometheus.close()
            server.stop()


@pytest.mark.slow
def test_every_query_has_an_answer_series_are_as_few_as_told_and_those_of_the_dead_go_away(watched: Watched) -> None:
    """One test: what it looks at is made once for each process that runs tests."""
    unanswered = set(watched.unanswered)
    if not WIRE_INTERFACE:  # this machine has none but loopback
        unanswered -= {where for where, query in (of_dashboards() | of_rules()).items() if "wire_" in query}
    assert unanswered == set(OF_SCRIPTS_ALONE)
    assert 60 < watched.series <= most_series(2)
    assert watched.gone
