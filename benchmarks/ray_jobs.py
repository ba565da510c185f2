"""The command: python -m benchmarks.ray_jobs. The service beside Ray's own Jobs API, on the same head of Ray.

A service with the launcher `local` starts Ray's head, whose dashboard serves the Jobs API on 127.0.0.1. All jobs run
`true`, whichever of both has taken them. So many jobs that are over are put into both: into the service's SQLite, and
into the GCS, where Ray keeps them. Both are asked in turns:

    list       the service: its first page of 100, and all of its pages; Ray has no pages
    one job    the same one: the service has submitted it to Ray
    log        the last 64 KiB of 1 MiB, of that job, the same file: the service by offset; Ray whole by its Jobs API,
               and by its state API as lines
    burst      submissions one after the other, none waits for the job before: until each is answered, until all are
               over; the head's processes and memory meanwhile, and whether it lived

Ray answers when it has begun to start a process for the job; the service when the job is on the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer

from benchmarks.lists import fill
from benchmarks.service import RESULT, SERVE, Service, bearer, keep, made
from benchmarks.team import percentiles
from tests.service.control_plane_harness import spec, wait_until
from thinwire.service.db import Database
from thinwire.service.launch import processes
from thinwire.service.launch.ray_head import Head

TRUE = (
    "import thinwire.service.server as server; from thinwire.service.launch.local import LocalLauncher as L; "
    "server.LAUNCHERS['local'] = lambda settings: L(settings.home, command=lambda *_: ['true'], "
    f"lease_s=60.0); {SERVE}"
)
"""A service whose jobs run `true`; where it is killed, its head ends within a minute."""
FILL = """
import asyncio, sys
from ray._raylet import GcsClient
from ray.dashboard.modules.job.common import JobInfo, JobInfoStorageClient, JobStatus

async def fill(address, count):
    jobs = JobInfoStorageClient(GcsClient(address=address))
    for number in range(count):
        began = 1_767_225_600_000 + 600_000 * number
        info = JobInfo(JobStatus.SUCCEEDED, "true", message="Job finished successfully.", start_time=began,
            end_time=began + 60_000, metadata={"name": f"job-{number % 10}"}, driver_exit_code=0)
        await jobs.put_info(f"job-{number % 10}-{number:06x}", info)

asyncio.run(fill(sys.argv[1], int(sys.argv[2])))
"""
"""Put jobs that are over into the GCS at an address."""
LOG_BYTES, TAIL_BYTES, TAIL_LINES = 1 << 20, 64 << 10, 1024
LINE = "x" * 63 + "\n"
OVER_S = 600.0
"""So long a burst may take until all of it is over."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Both:
    """A service, and the head of Ray that it has started."""

    def __init__(self, stack: ExitStack, home: Path, jobs: int) -> None:
        database = Database(f"sqlite:///{home / 'thinwire.db'}")
        database.upgrade()
        fill(database, jobs, running=0)
        database.close()
        settings = {"THINWIRE_CHANGES_BURST": "100000", "THINWIRE_PERSON_MAX_JOBS": "100000"}
        self.service = Service(home, 4096, TRUE, "local", **settings)
        stack.callback(self._end)
        self.head = Head.model_validate_json((home / "ray" / "head.json").read_bytes())
        token = home / "ray" / "auth_token"
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        (port,) = (self.head.temp_dir / "r" / "session_latest").glob("gcs_server_port_*")
        address = f"127.0.0.1:{port.read_text().strip()}"
        subprocess.run([sys.executable, "-c", FILL, address, str(jobs)], env=environment, check=True)
        about: dict[str, Any] = {"trust_env": False, "timeout": 120.0}
        operator, of_head = (bearer(one) for one in (self.service.operator, token.read_text().strip()))
        self.ours = stack.enter_context(httpx.Client(base_url=self.service.url, headers=operator, **about))
        self.rays = stack.enter_context(httpx.Client(base_url=self.head.url, headers=of_head, **about))

    def _end(self) -> None:
        self.service.process.terminate()
        self.service.process.wait(120)  # for its head, too

    def submitted(self) -> str:
        """A job of ours. Its ID."""
        answer = self.ours.post("/v1/jobs", json=spec(workers={"min": 1, "max": 1})).raise_for_status()
        return str(answer.json()["id"])

    def submitted_to_ray(self) -> str:
        """A job of Ray's. Its ID."""
        answer = self.rays.post("/api/jobs/", json={"entrypoint": "true"}).raise_for_status()
        return str(answer.json()["submission_id"])

    def open(self) -> int:
        """Jobs of ours that are not over; of more than a page, a page."""
        states = ["SUBMITTING", "QUEUED", "PENDING", "RUNNING", "CANCELLING"]
        return len(self.ours.get("/v1/jobs", params={"limit": 1000, "state": states}).raise_for_status().json()["jobs"])

    def of_ray(self) -> list[dict[str, Any]]:
        """All that Ray knows."""
        found: list[dict[str, Any]] = self.rays.get("/api/jobs/").raise_for_status().json()
        return found

    def pages(self) -> int:
        """All jobs of ours, page by page. How many."""
        count, asked = 0, dict[str, Any](limit=1000)
        while True:
            page = self.ours.get("/v1/jobs", params=asked).raise_for_status().json()
            count += len(page["jobs"])
            if page["next"] is None:
                return count
            asked["before"] = page["next"]

    def reads(self, times: int) -> dict[str, Any]:
        """Of each question milliseconds and bytes, in turns."""
        mine = self.submitted()
        wait_until(lambda: self.open() == 0, "the first job is over", timeout_s=OVER_S)
        state = self.ours.get(f"/v1/jobs/{mine}").json()["state"]
        (of_ray,) = [one for one in self.of_ray() if one["metadata"].get("job_id") == mine]
        its, node = of_ray["submission_id"], of_ray["driver_node_id"]
        with self.head.log_of(its).open("a") as log:
            log.write(LINE * (LOG_BYTES // len(LINE)))
        end = self.ours.get(f"/v1/jobs/{mine}/logs?limit={4 << 20}").raise_for_status().json()["next_offset"]
        asked: dict[str, Callable[[], httpx.Response | int]] = {
            "list, its first 100": lambda: self.ours.get("/v1/jobs?limit=100"),
            "list, all in pages of 1,000": self.pages,
            "list, Ray's": lambda: self.rays.get("/api/jobs/"),
            "one job": lambda: self.ours.get(f"/v1/jobs/{mine}"),
            "one job, Ray's": lambda: self.rays.get(f"/api/jobs/{its}"),
            "log, its last 64 KiB": lambda: self.ours.get(
                f"/v1/jobs/{mine}/logs?offset={end - TAIL_BYTES}&limit={TAIL_BYTES}"
            ),
            "log, Ray's, whole": lambda: self.rays.get(f"/api/jobs/{its}/logs"),
            "log, Ray's state API, its last 1,024 lines": lambda: self.rays.get(
                f"/api/v0/logs/file?node_id={node}&filename={self.head.log_of(its).name}&lines={TAIL_LINES}"
            ),
        }
        taken: dict[str, list[float]] = {name: [] for name in asked}
        length: dict[str, int] = {}
        for turn in range(times + 1):
            for name, ask in asked.items():
                began = time.perf_counter()
                answer = ask()
                if isinstance(answer, httpx.Response):
                    length[name] = len(answer.raise_for_status().content)
                if turn:  # of the first one each connection is made
                    taken[name].append(time.perf_counter() - began)
        found = {name: percentiles(seconds) | {"bytes": length.get(name)} for name, seconds in taken.items()}
        return {"jobs of ours": self.pages(), "jobs of Ray": len(self.of_ray()), "it ended": state, **found}

    @contextmanager
    def watched(self) -> Iterator[dict[str, Any]]:
        """What the head has meanwhile: the most processes and memory that no other shares, and how its dashboard
        answers.
        """
        found: dict[str, Any] = {"processes": 0, "mib": 0, "longest_answer_s": 0.0, "no_answer": Counter()}
        over = threading.Event()

        def watch() -> None:
            while not over.wait(1.0):
                below = processes.descendants(self.head.pid)
                own = 0
                for one in below:
                    with suppress(FileNotFoundError, ProcessLookupError):
                        fields = Path(f"/proc/{one.pid}/statm").read_text().split()
                        own += PAGE_BYTES * (int(fields[1]) - int(fields[2]))
                found["processes"] = max(found["processes"], len(below))
                found["mib"] = max(found["mib"], own >> 20)
                began = time.perf_counter()
                try:
                    self.rays.get("/api/version").raise_for_status()
                except httpx.HTTPError as error:
                    found["no_answer"][type(error).__name__] += 1
                found["longest_answer_s"] = round(max(found["longest_answer_s"], time.perf_counter() - began), 2)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield found
        finally:
            over.set()
            thread.join()
            found["lived"] = self.head.alive()

    def burst(
        self, count: int, submit: Callable[[], str], states: Callable[[set[str]], Counter[str]]
    ) -> dict[str, Any]:
        """So many submissions; until all are over, at most OVER_S."""
        taken: list[float] = []
        errors: Counter[str] = Counter()
        ids: set[str] = set()
        began = time.monotonic()
        with self.watched() as meanwhile:
            for _ in range(count):
                since = time.perf_counter()
                try:
                    ids.add(submit())
                except httpx.HTTPError as error:
                    errors[type(error).__name__] += 1
                taken.append(time.perf_counter() - since)
            answered_s = time.monotonic() - began
            ended: Counter[str] = Counter()
            while time.monotonic() < began + OVER_S:
                with suppress(httpx.HTTPError):
                    ended = states(ids)
                if sum(ended[one] for one in ("SUCCEEDED", "FAILED", "STOPPED", "CANCELLED")) == len(ids):
                    break
                time.sleep(1.0)
        return percentiles(taken) | {
            "a_second": round(count / answered_s, 2),
            "refused": errors,
            "over_after_s": round(time.monotonic() - began, 1),
            "states": ended,
            "of the head meanwhile": meanwhile,
        }

    def bursts(self, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Ray's, and ours."""

        def of_rays(ids: set[str]) -> Counter[str]:
            return Counter(one["status"] for one in self.of_ray() if one["submission_id"] in ids)

        def of_ours(ids: set[str]) -> Counter[str]:
            states: Counter[str] = Counter()
            page = self.ours.get("/v1/jobs", params={"limit": 1000}).raise_for_status().json()["jobs"]
            states.update(one["state"] for one in page if one["id"] in ids)
            return states

        yield "ours", self.burst(count, self.submitted, of_ours)
        yield "Ray's", self.burst(count, self.submitted_to_ray, of_rays)


def main(
    jobs: Annotated[str, typer.Option(help="Numbers of jobs that are over.")] = "100,1000,10000",
    times: Annotated[int, typer.Option(min=1, help="Each question is asked so often.")] = 50,
    burst: Annotated[int, typer.Option(min=0, help="Submissions of a burst; with the first number of jobs.")] = 30,
    name: Annotated[str, typer.Option(help="Of the file with the result.")] = "ray-jobs",
) -> None:
    """Ask both, print what they answer, and write it."""
    found = made("benchmarks.ray_jobs")
    for number, count in enumerate(int(one) for one in jobs.split(",")):
        with ExitStack() as stack:
            home = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
            both = Both(stack, Path(home), count)
            found[f"{count} jobs"] = told = both.reads(times)
            print(f"{count} jobs: {json.dumps(told, indent=1)}", flush=True)
            if burst and number == 0:
                for whose, one in both.bursts(burst):
                    found[f"burst, {whose}"] = one
                    print(f"burst, {whose}: {json.dumps(one)}", flush=True)
    keep(found, RESULT.with_name(f"{name}.json"))


if __name__ == "__main__":
    typer.run(main)
