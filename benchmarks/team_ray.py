"""The command: python -m benchmarks.team_ray [--jobs 1000]. What Ray's own Jobs API takes for such questions.

A head of its own, with Ray's dashboard, on free ports. So many jobs that are over are put into its store, as it writes
them itself; then jobs that do nothing (`true`) are submitted, each of which is a process and an actor of Ray. Asked are
its list, which has no pages, and one job. What cannot be compared: it keeps no history, no people, no filters, and its
store is the memory of its head; a submission of Thinwire's to a launcher that runs nothing starts no process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.service import RESULT, keep, made
from benchmarks.team import percentiles
from thinwire.service.launch.start_hook import free_ports

PATIENT = {"RAY_raylet_start_wait_time_s": "200", "RAY_gcs_server_request_timeout_seconds": "200"}
"""On a busy machine a head gives itself up after half a minute."""


def timed(times: int, call: Any) -> dict[str, float]:
    """So often, one after the other."""
    taken: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return percentiles(taken)


async def put(address: str, count: int) -> None:
    """Jobs that are over, into the head's store."""
    from ray._raylet import GcsClient
    from ray.dashboard.modules.job.common import JobInfo, JobInfoStorageClient, JobStatus

    store = JobInfoStorageClient(GcsClient(address=address), "/tmp")
    for number in range(count):
        info = JobInfo(status=JobStatus.SUCCEEDED, entrypoint="true", start_time=number, end_time=number + 1)
        await store.put_info(f"job-{number:06}", info)


def main(
    jobs: Annotated[int, typer.Option(help="That are over.")] = 1000,
    submitted: Annotated[int, typer.Option(help="Jobs that do nothing.")] = 10,
    times: Annotated[int, typer.Option(help="Each is asked so often.")] = 20,
) -> None:
    """Start a head, ask it, end it, and write what it took."""
    from ray.job_submission import JobSubmissionClient

    found = made() | {"over": jobs, "ray": version("ray")}
    with TemporaryDirectory(dir="/tmp", prefix="r", ignore_cleanup_errors=True) as folder:
        port, dashboard = free_ports(2)
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
        command += [f"--dashboard-port={dashboard}", "--num-cpus=4", f"--temp-dir={folder}", "--disable-usage-stats"]
        command += ["--object-store-memory=100000000", "--node-ip-address=127.0.0.1"]
        with (Path(folder) / "log").open("wb") as log:
            head = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"RAY_AUTH_MODE": "disabled", **PATIENT}
            )
        try:
            until = time.monotonic() + 180
            while True:
                try:
                    client = JobSubmissionClient(f"http://127.0.0.1:{dashboard}")
                    break
                except (ConnectionError, RuntimeError):
                    if time.monotonic() > until or head.poll() is not None:
                        raise
                    time.sleep(1.0)
            asyncio.run(put(f"127.0.0.1:{port}", jobs))
            ids: list[str] = []
            found["submit"] = timed(submitted, lambda: ids.append(client.submit_job(entrypoint="true")))
            found["list, all in one answer"] = timed(times, client.list_jobs)
            found["listed"] = len(client.list_jobs())
            found["show"] = timed(times, lambda: client.get_job_info(ids[0]))
            found["status"] = timed(times, lambda: client.get_job_status(ids[0]))
        finally:
            head.terminate()
            head.wait(60)
    print(json.dumps(found, indent=1))
    keep(found, RESULT.with_name("ray.json"))


if __name__ == "__main__":
    typer.run(main)
