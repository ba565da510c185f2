"""The command: python -m benchmarks.service --hostile. Do the budgets hold that docs/operations.md names?

    unread       more connections than there may be, with pipelined requests whose answers nobody reads; no token
    silent       the same, that say nothing
    guesses      wrong tokens from one address, from which others come with right ones for the first time
    halves       of the largest bodies, of one job and of ten, while another job reports
    bombs        bodies of unknown fields, by names and by samples

Of each: how others are answered meanwhile, /healthz among them, and what memory the service takes. It is a process of
its own, with few open files, so that its connections can be used up, and with the launcher that runs nothing.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer

from benchmarks.provenance import ROOT, provenance
from tests.service.control_plane_harness import spec, wait_until

RESULT = ROOT / "benchmarks" / "results" / "service" / "hostile.json"
CODE = ("service", "thinwire", "benchmarks/service.py", ":!*.md")
PACKAGES = ("fastapi", "starlette", "uvicorn", "h11", "pydantic", "SQLAlchemy", "httpx")
FILES = 600
"""That the service may have open: 344 connections."""
CONNECTIONS = 400
SECONDS = 20
ASK = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n"
BODY_BYTES = (8 << 20) - 100


class Service:
    """A server of its own. Raises where it does not start."""

    def __init__(self, home: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("THINWIRE_")}
        self.home = home
        with (home / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "thinwire.cli.main", "serve", "--launcher", "fake", "--port", "0"],
                env={**kept, "THINWIRE_HOME": str(home)},
                stdout=log,
                stderr=log,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
            )
        known = wait_until(self._known, (home / "log").read_text(), timeout_s=120)
        self.url: str = known["url"]
        self.address = ("127.0.0.1", int(self.url.rpartition(":")[2]))
        self.operator = (home / "token").read_text().strip()
        wait_until(lambda: self.status("/readyz") == 200, "ready", timeout_s=120)

    def _known(self) -> Any:
        with suppress(FileNotFoundError):
            return json.loads((self.home / "server.json").read_text())

    def ask(self, path: str, token: str = "", **more: Any) -> httpx.Response:
        """By a connection of its own, as a newcomer's."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"} if token else {}
        method = "POST" if more else "GET"
        with httpx.Client(trust_env=False, timeout=20) as client:
            return client.request(method, self.url + path, headers=headers, **more)

    def status(self, path: str, token: str = "", **more: Any) -> int | str:
        """Of the answer, or the error in its place."""
        try:
            return self.ask(path, token, **more).status_code
        except httpx.HTTPError as error:
            return type(error).__name__

    def job(self) -> tuple[str, str]:
        """A new job, and its token."""
        job_id = str(self.ask("/v1/jobs", self.operator, json=spec()).json()["id"])
        return job_id, (self.home / "runs" / job_id / "token").read_text().strip()

    def half(self, stack: ExitStack, job_id: str, token: str) -> socket.socket:
        """The largest body of a report, and the end of it missing."""
        made = stack.enter_context(socket.create_connection(self.address, timeout=20))
        head = f"POST /v1/jobs/{job_id}/telemetry HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {BODY_BYTES}\r\n\r\n"
        made.settimeout(2)
        with suppress(OSError):  # refused, and not read any more
            made.sendall(head.encode() + b'{"attempt":1,"summary":{"a":"' + b"x" * (BODY_BYTES - 1000))
        return made

    def memory(self, what: str = "VmRSS") -> int:
        """MiB, now or, as VmHWM, at most so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(what))

    @contextmanager
    def others(self) -> Iterator[dict[str, Any]]:
        """What others meet meanwhile, who ask for /healthz, for jobs, and for a new token, again and again."""
        found: dict[str, Any] = {"rss_before_mib": self.memory()}
        answers: dict[str, Counter[str]] = {"healthz": Counter(), "jobs": Counter(), "new token": Counter()}
        longest = dict.fromkeys(answers, 0.0)
        over = threading.Event()

        def newcomer() -> int | str:
            name = f"n{sum(answers['new token'].values())}"
            try:
                made = self.ask("/v1/tokens", self.operator, json={"name": name, "role": "viewer"}).json()
            except httpx.HTTPError as error:
                return type(error).__name__
            return self.status("/v1/jobs", made["token"])

        def ask(name: str, call: Callable[[], int | str]) -> None:
            while not over.wait(0.1):
                began = time.perf_counter()
                answers[name][str(call())] += 1
                longest[name] = max(longest[name], time.perf_counter() - began)

        asked = (lambda: self.status("/healthz"), lambda: self.status("/v1/jobs", self.operator), newcomer)
        threads = [threading.Thread(target=ask, args=one) for one in zip(answers, asked, strict=True)]
        for thread in threads:
            thread.start()
        try:
            yield found
        finally:
            over.set()
            for thread in threads:
                thread.join()
            found |= {"others": answers, "longest_s": longest}
            found |= {"rss_after_mib": self.memory(), "rss_most_mib": self.memory("VmHWM")}


def connections(service: Service, said: bytes) -> dict[str, Any]:
    """Such connections, and new ones in the place of those that were ended, for SECONDS."""
    with ExitStack() as stack, service.others() as found:
        open_now: list[socket.socket] = []
        opened = 0
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            while len(open_now) < CONNECTIONS:
                with suppress(OSError):
                    made = stack.enter_context(socket.create_connection(service.address, timeout=5))
                    made.setblocking(False)
                    open_now.append(made)
                    opened += 1
                    made.send(said)
            open_now = open_now[CONNECTIONS // 10 :]  # they are left as they are, and new ones come
            time.sleep(1)
        found["opened"] = opened
    return found


def guesses(service: Service) -> dict[str, Any]:
    """Different wrong tokens, as fast as one connection asks, for SECONDS."""
    statuses: Counter[int] = Counter()
    with service.others() as found, httpx.Client(trust_env=False, timeout=20) as client:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            headers = {"Authorization": f"Bearer guess-{statuses.total()}"}
            statuses[client.get(f"{service.url}/v1/jobs", headers=headers).status_code] += 1
    return {**found, "wrong": statuses, "wrong_a_second": round(statuses.total() / SECONDS)}


def halves(service: Service, jobs: int) -> dict[str, Any]:
    """60 bodies without their ends, of so many jobs, and what another job meets."""
    greedy, (job_id, token) = [service.job() for _ in range(jobs)], service.job()
    statuses: Counter[int | str] = Counter()
    with ExitStack() as stack, service.others() as found:
        for number in range(60):
            service.half(stack, *greedy[number % jobs])
            statuses[service.status(f"/v1/jobs/{job_id}/telemetry", token, json={"attempt": 1})] += 1
        found["rss_with_halves_mib"] = service.memory()
    return {**found, "reports_of_another": statuses}


def bombs(service: Service) -> dict[str, Any]:
    """Bodies that cost more than they weigh."""
    job_id, token = service.job()
    told: dict[str, Any] = {}
    fields = {f"f{i}": 1 for i in range(90)}
    bodies: dict[str, dict[str, Any]] = {
        "60,000 unknown fields": {f"f{i}": 1 for i in range(60_000)},
        "2,000 samples of 90 unknown fields": {"samples": [fields] * 2000},
        "2,000 events of 90 values": {"events": [{"kind": "a", "step": 1, "time": 1, "fields": fields}] * 2000},
    }
    with service.others() as found:
        for name, body in bodies.items():
            began = time.perf_counter()
            answer = service.status(f"/v1/jobs/{job_id}/telemetry", token, json={"attempt": 1, **body})
            told[name] = {"status": answer, "seconds": round(time.perf_counter() - began, 3)}
    return {**found, "bodies": told}


def main(
    hostile: Annotated[bool, typer.Option("--hostile", help="Attack a service of its own.")] = False,
) -> None:
    """Try each of the service's budgets, print what came of it, and write it."""
    if not hostile:
        raise typer.BadParameter("nothing else is tried: say --hostile")
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.service", *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(provenance(CODE)),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "load_average_before": os.getloadavg(),
        "files": FILES,
    }
    parts: dict[str, Callable[[Service], dict[str, Any]]] = {
        "unread": lambda service: connections(service, ASK * 1000),
        "silent": lambda service: connections(service, b""),
        "guesses": guesses,
        "halves of one job": lambda service: halves(service, 1),
        "halves of ten jobs": lambda service: halves(service, 10),
        "bombs": bombs,
    }
    for name, attack in parts.items():
        with TemporaryDirectory(ignore_cleanup_errors=True) as home:
            service = Service(Path(home))
            try:
                found[name] = attack(service)
            finally:
                service.process.terminate()
                service.process.wait(60)
        print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
    found["load_average_after"] = os.getloadavg()
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {RESULT}")


if __name__ == "__main__":
    typer.run(main)
