"""The command: python -m benchmarks.service. What does the service bear? Many jobs, many strangers, bombs, two owners.

    jobs          a turn of the reconciler, and a list of 100, over 1,000 jobs that are not over and 10,000 that are
    connections   answers beside 1,200 connections that say nothing
    bombs         a body of unknown fields, an event of four million numbers: the answer, and /healthz meanwhile
    owners        kill -9 of the owner of a database: seconds until the one that stands by is ready, on PostgreSQL; on
                  SQLite, until the refused second home, or the same home, may start

Servers are processes of their own, with the launcher that runs nothing; only the turn is measured in this process.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from sqlalchemy import insert

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import ROOT
from tests.service.control_plane_harness import Service, spec, wait_until
from tests.service.postgresql import postgresql
from thinwire.contract.spec import TrainSpec
from thinwire.service.jobs.models import JobRow
from thinwire.service.jobs.worker_numbers import wanted_workers
from thinwire.service.launch.protocol import LaunchState

RESULTS = ROOT / "benchmarks" / "results" / "service"
CODE = ("service", "thinwire", "benchmarks/service.py", "tests/service", ":!*.md")
PACKAGES = ("fastapi", "starlette", "uvicorn", "pydantic", "SQLAlchemy", "psycopg", "httpx")
UNKNOWN_FIELDS_BYTES = 868_000
NUMBERS = 4_000_000
"""Of two bytes each: just below what telemetry may have."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder for service.json.")] = RESULTS,
    small: Annotated[bool, typer.Option(help="A tenth of everything: does it run?")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Some of: jobs, connections, bombs, owners.")] = None,
) -> None:
    """Measure, print, and write the raw output."""
    made_by = asdict(provenance(CODE))
    made_by["versions"] = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.service", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **made_by,
        "load_average_before": os.getloadavg(),
        "small": small,
    }
    parts: dict[str, Callable[[int], Any]] = {
        "jobs": jobs,
        "connections": connections,
        "bombs": bombs,
        "owners": owners,
    }
    for name, measure in parts.items():
        if only is None or name in only:
            found[name] = measure(10 if small else 1)
            print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
    found["load_average_after"] = os.getloadavg()
    out.mkdir(parents=True, exist_ok=True)
    (out / "service.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {out / 'service.json'}")


def jobs(part: int) -> dict[str, Any]:
    """Turns over many jobs in this process, and lists of them. part: this part of all."""
    unfinished, finished = 1000 // part, 10_000 // part
    with TemporaryDirectory() as home:
        service = Service(Path(home) / "home")
        turn = service.plane.reconciler.turn
        _fill(service, finished, "SUCCEEDED")
        new = _fill(service, unfinished, "SUBMITTING")
        found: dict[str, Any] = {"unfinished": unfinished, "finished": finished}
        found["turn_that_submits_all_s"] = _seconds(turn)
        found["turns_without_news_s"] = [_seconds(turn) for _ in range(10)]
        for state in (LaunchState.RUNNING, LaunchState.SUCCEEDED):
            found["lists_of_100_s"] = [_seconds(lambda: service.client.get("/v1/jobs")) for _ in range(20)]
            for job_id in new:
                service.launcher.put(job_id, state)
            found[f"turn_that_finds_all_{state.lower()}_s"] = _seconds(turn)
        states = service.plane.jobs.count_by_state()
        found["states_at_the_end"] = {state.value: count for state, count in states.items() if count}
        service.close()
    return found


def connections(part: int) -> dict[str, Any]:
    """Answers beside connections that say nothing. part: this part of all."""
    idle = 1200 // part
    with _home() as home, _server(home) as (client, process):
        found: dict[str, Any] = {"idle": idle, "without": _answers(client), "rss_without_mb": _memory(process)}
        url = httpx.URL(client.base_url)
        open_now = [socket.create_connection((url.host, url.port or 80)) for _ in range(idle)]
        found |= {"with": _answers(client), "rss_with_mb": _memory(process)}
        for one in open_now:
            one.close()
    return found


def bombs(part: int) -> dict[str, Any]:
    """Bodies that cost more than they weigh. part: this part of all."""
    fields = b",".join(b'"%d":1' % number for number in range(UNKNOWN_FIELDS_BYTES // part // 9))
    numbers = b'{"attempt":1,"events":[{"kind":"k","step":1,"time":1.0,"fields":{"a":[' + b"0," * (NUMBERS // part)
    found = {}
    with _home() as home, _server(home) as (client, process):
        job_id = client.post("/v1/jobs", json=spec()).json()["id"]
        targets = {
            "unknown_fields": ("/v1/jobs", b"{" + fields + b"}"),
            "numbers_in_an_event": (f"/v1/jobs/{job_id}/telemetry", numbers[:-1] + b"]}}]}"),
        }
        for name, (path, body) in targets.items():
            with _asked_meanwhile(client) as health:
                began = time.perf_counter()
                answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
                seconds = time.perf_counter() - began
            found[name] = {
                "bytes": len(body),
                "status": answer.status_code,
                "says": answer.json()["message"][:200],
                "answer_s": seconds,
                "healthz_meanwhile_s": _spread(health),
                "largest_rss_mb": _memory(process, "VmHWM"),
            }
    return found


def owners(part: int) -> dict[str, Any]:
    """Seconds from a kill -9 to the next owner. part: of five tries."""
    tries = max(1, 5 // part)
    with postgresql() as new_database:
        taken = [_take_over(new_database()) for _ in range(tries)]
    return {"postgresql_kill_to_ready_s": taken, "sqlite": [_sqlite_owners() for _ in range(tries)]}


def _take_over(url: str) -> float:
    with _home() as first, _home() as second, _server(first, url=url) as (client, process):
        client.post("/v1/jobs", json=spec()).raise_for_status()
        with _server(second, url=url, until="standby") as (other, _):
            process.kill()
            began = time.perf_counter()
            wait_until(lambda: other.get("/readyz").status_code == 200, "the take-over", timeout_s=120)
            seconds = time.perf_counter() - began
            other.post("/v1/jobs", json=spec()).raise_for_status()
    return seconds


def _sqlite_owners() -> dict[str, Any]:
    """How long a second home takes to be refused; and after a kill -9, until the same home and another are ready."""
    found: dict[str, Any] = {}
    with _home() as first, _home() as second:
        url = f"sqlite:///{first / 'thinwire.db'}"
        with _server(first) as (_, process):
            began = time.perf_counter()
            refused = subprocess.run(_SERVE, env=_environment(second, url), capture_output=True, text=True)
            found |= {"refused_after_s": time.perf_counter() - began, "says": refused.stderr.strip().splitlines()[-1]}
            process.kill()
        began = time.perf_counter()
        with _server(first) as (_, process):
            found["same_home_ready_after_s"] = time.perf_counter() - began
            process.kill()
        began = time.perf_counter()
        while True:
            try:
                with _server(second, url=url):
                    found["other_home_ready_after_s"] = time.perf_counter() - began
                    return found
            except RuntimeError:
                time.sleep(0.2)


_SERVE = [sys.executable, "-m", "thinwire.cli.main", "serve", "--launcher", "fake"]


def _environment(home: Path, url: str | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("THINWIRE_")}
    return {**kept, "THINWIRE_HOME": str(home), **({"THINWIRE_DATABASE_URL": url} if url else {})}


@contextmanager
def _home() -> Iterator[Path]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _server(
    home: Path, *, url: str | None = None, until: str = "ready"
) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """A service of its own, once /readyz says so, and a client of it. Raises RuntimeError where it ended before."""
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(_SERVE, env=_environment(home, url), stdout=log, stderr=log)

    def found() -> dict[str, Any] | None:
        if process.poll() is not None:
            raise RuntimeError((home / "server.log").read_text())
        try:
            known: dict[str, Any] = json.loads((home / "server.json").read_text())
        except FileNotFoundError:
            return None
        return known if known["pid"] == process.pid else None

    try:
        where = wait_until(found, "server.json", timeout_s=120)
        headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
        with httpx.Client(base_url=where["url"], headers=headers, trust_env=False, timeout=120) as client:
            wait_until(lambda: until in client.get("/readyz").text, until, timeout_s=120)
            yield client, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def _fill(service: Service, count: int, state: str) -> list[str]:
    """Jobs as requests leave them: those that are not over with their run folders."""
    written = TrainSpec.model_validate(spec()).model_dump(mode="json")
    ids = [f"{state.lower()}-{number}" for number in range(count)]
    known = {"name": "n", "spec": written, "spec_digest": "d", "attempt": 1, "max_attempts": 4, "version": 1}
    known["summary"] = {"loss": 2.0} if state == "SUCCEEDED" else None
    rows = [
        {**known, "id": one, "token_hash": one, "state": state, "created_at": float(number)}
        for number, one in enumerate(ids)
    ]
    with service.plane.db.write() as session:
        session.execute(insert(JobRow), rows)
    if state == "SUBMITTING":
        for one in ids:
            with service.plane.db.read() as session:
                row = session.get_one(JobRow, one)
            service.plane.reconciler._complete_folder(row)
            assert wanted_workers(row) == service.plane.reconciler._folders.of(one).read_wanted()
    return ids


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _answers(client: httpx.Client) -> dict[str, Any]:
    def spread(path: str) -> dict[str, float]:
        return _spread([_seconds(lambda: client.get(path)) for _ in range(100)])

    return {path: spread(path) for path in ("/healthz", "/v1/jobs")}


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    return {"times": len(seconds), "median": median(seconds), "longest": max(seconds)}


@contextmanager
def _asked_meanwhile(client: httpx.Client) -> Iterator[list[float]]:
    """Ask /healthz again and again until the end; the seconds of each answer."""
    seconds: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=client.base_url, trust_env=False, timeout=120) as other:
            while not over.is_set():
                seconds.append(_seconds(lambda: other.get("/healthz").raise_for_status()))
                over.wait(0.01)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: seconds, "the first /healthz")
    try:
        yield seconds
    finally:
        over.set()
        asking.join()


def _memory(process: subprocess.Popen[bytes], what: str = "VmRSS") -> float:
    """MB of the process, now or at most so far."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1000
    raise AssertionError(f"/proc/{process.pid}/status has no {what}")


if __name__ == "__main__":
    app()
