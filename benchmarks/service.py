"""The command: python -m benchmarks.service --hostile, or --jobs 100,300,1000. What does the service bear?

--jobs: so many jobs of eight workers, on the launcher that runs nothing, and all that their workers say: how many
submissions a second it takes, what a list, a page of metrics, a registration and a post cost its processor, and by
which power of the number of jobs that grows. Then what a job costs a second whose rank 0 posts once a second and whose
workers register anew every ten. In SQLite, or --on postgresql.

--hostile: do the budgets hold that docs/operations.md names?

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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from sqlalchemy import insert, select, text
from sqlalchemy.orm import Session

from benchmarks.control_plane.simulated import exponent
from benchmarks.provenance import ROOT, provenance
from tests.service.control_plane_harness import sample, spec, wait_until
from tests.service.postgresql import postgresql
from thinwire.contract.reports import HEARTBEAT_S
from thinwire.service.db import Database
from thinwire.service.jobs.repository import JobRow, LeaseRow
from thinwire.service.launch.keeper import die_with_parent


class Kind(StrEnum):
    """A database that the service may have."""

    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"

    @property
    def title(self) -> str:
        """As people call it, and results name it."""
        return {"sqlite": "SQLite", "postgresql": "PostgreSQL"}[self]


On = Annotated[list[Kind], typer.Option("--on", help="The database; more than one are measured in turns.")]


def empty(kind: Kind, stack: ExitStack) -> str:
    """The URL of a database of this kind, which ends with `stack`. Durable, as people run it."""
    if kind is Kind.POSTGRESQL:
        return stack.enter_context(postgresql(durable=True))()
    return f"sqlite:///{stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))}/thinwire.db"


def looked_over(kind: Kind, database: Database) -> str:
    """Let PostgreSQL know what was filled in, as its autovacuum does within a minute. Returns its version."""
    with database.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        if kind is Kind.POSTGRESQL:
            connection.execute(text("VACUUM ANALYZE"))
        return f"{kind.title} {'.'.join(map(str, connection.dialect.server_version_info or ()))}"


RESULT = ROOT / "benchmarks" / "results" / "service" / "hostile.json"
CODE = ("service", "thinwire", "benchmarks/service.py", "benchmarks/lists.py", "benchmarks/team.py", ":!*.md")
PACKAGES = ("fastapi", "starlette", "uvicorn", "h11", "pydantic", "SQLAlchemy", "psycopg", "httpx")
FILES = 600
"""That the service may have open: 344 connections."""
CONNECTIONS = 400
SECONDS = 20
ASK = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n"
BODY_BYTES = (8 << 20) - 100
SERVE = "from thinwire.cli.main import main; main()"
FOR_EVER = (
    "import thinwire.service.server as server; from thinwire.service.launch.fake import Timeline; "
    f"server.Timeline = lambda: Timeline(1.0, 1e9); {SERVE}"
)
"""Jobs that never end."""
SUBMITTED = 20
"""Jobs that are submitted first, and last, and report."""
WORKERS, POSTS, ASKED = 8, 5, 20
"""Of a job; posts of each of those; lists and pages."""
AT_ONCE = 4
"""Connections of those who report."""
IDLE_S = 5.0


class Service:
    """A server of its own, which does not outlive the thread that has made it. Raises where it does not start.

    files: that it may have open; code: what its process runs; settings: of its environment.
    """

    def __init__(
        self, home: Path, files: int = FILES, code: str = SERVE, launcher: str = "fake", **settings: str
    ) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("THINWIRE_")}
        self.home = home

        def set_up() -> None:
            die_with_parent()
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        with (home / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", "--launcher", launcher, "--port", "0"],
                env={**kept, "THINWIRE_HOME": str(home), **settings},
                stdout=log,
                stderr=log,
                preexec_fn=set_up,
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


class Load:
    """So many jobs in one service, and what each kind of request costs it."""

    def __init__(self, service: Service, jobs: int, url: str) -> None:
        self._service, self.jobs, self._url = service, jobs, url
        self._idle = 0.0
        self.ids: list[str] = []
        self.tokens: list[str] = []
        self._local = threading.local()

    def cpu_s(self) -> float:
        """Of the service's process, so far."""
        fields = Path(f"/proc/{self._service.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def measured(self, calls: Sequence[Callable[[], httpx.Response]], at_once: int = 1) -> dict[str, float]:
        """Rate, latencies, and the processor's time of each beside what the service takes when nobody asks."""
        taken: list[float] = []

        def call(one: Callable[[], httpx.Response]) -> None:
            began = time.perf_counter()
            one().raise_for_status()
            taken.append(time.perf_counter() - began)

        before, began = self.cpu_s(), time.perf_counter()
        with ThreadPoolExecutor(at_once) as threads:
            list(threads.map(call, calls))
        seconds = time.perf_counter() - began
        each = (self.cpu_s() - before - self._idle * seconds) / len(calls)
        ordered = sorted(taken)
        return {
            "count": len(calls),
            "a_second": round(len(calls) / seconds, 1),
            "cpu_ms": round(1e3 * each, 2),
            "p50_ms": round(1e3 * ordered[len(ordered) // 2], 1),
            "p99_ms": round(1e3 * ordered[int(0.99 * len(ordered))], 1),
        }

    def run(self) -> dict[str, Any]:
        """All of it. Some jobs are submitted, and report; the others are put beside them in the database."""
        service, found = self._service, dict[str, Any]()
        body = spec(workers={"min": WORKERS, "max": WORKERS}, steps=10**6)
        found["submit the first"] = self.measured([lambda: self.submitted(body)] * SUBMITTED)
        began = time.monotonic()
        self._put_beside(self.jobs - 2 * SUBMITTED)
        found["submit the last"] = self.measured([lambda: self.submitted(body)] * SUBMITTED)
        wait_until(lambda: self.running() == self.jobs, "all jobs run", timeout_s=600)
        found["all_running_after_s"] = round(time.monotonic() - began, 1)
        self.tokens = [(service.home / "runs" / id / "token").read_text().strip() for id in self.ids]
        self.put_leases()
        found["rss_mib"] = service.memory()
        before, began = self.cpu_s(), time.monotonic()
        time.sleep(IDLE_S)
        self._idle = (self.cpu_s() - before) / (time.monotonic() - began)
        found["idle_cores"] = round(self._idle, 3)
        ranks = [(job, rank) for rank in range(WORKERS) for job in range(len(self.ids))]
        found["register"] = self.measured([partial(self.register, *one) for one in ranks], AT_ONCE)
        steps = [(job, step) for step in range(1, POSTS + 1) for job in range(len(self.ids))]
        found["post"] = self.measured([partial(self.post, *one) for one in steps], AT_ONCE)
        for name, path in (
            ("list", "/v1/jobs?limit=100"),
            ("show", f"/v1/jobs/{self.ids[0]}"),
            ("history", f"/v1/jobs/{self.ids[0]}/metrics"),
            ("metrics", "/metrics"),
            ("targets", "/v1/metrics/targets"),
        ):
            found[name] = self.measured([partial(self.get, path)] * ASKED)
        found["rss_after_mib"] = service.memory()
        beats = WORKERS / HEARTBEAT_S
        each = round(found["post"]["cpu_ms"] + beats * found["register"]["cpu_ms"], 2)
        found |= {"job_cpu_ms_a_second": each, "cores_at_the_real_rate": round(self._idle + self.jobs * each / 1e3, 2)}
        return found

    def _put_beside(self, count: int) -> None:
        """So many copies of the first job, which the reconciler finds as ones that it has to submit."""
        table = JobRow.__table__
        with self._database() as session:
            row = dict(session.execute(select(table).where(table.c.id == self.ids[0])).mappings().one())
            row |= {"state": "SUBMITTING", "idempotency_key": None, "kept_bytes": 1000}
            copies = [row | {"id": f"copy-{n}", "token_hash": f"none-{n}", "arrival": 10**6 + n} for n in range(count)]
            if copies:  # an insert of no rows is one of a row of defaults
                session.execute(insert(JobRow), copies)

    def put_leases(self) -> None:
        """Of the workers of all jobs that run."""
        with self._database() as session:
            ids = session.scalars(select(JobRow.id).where(JobRow.state == "RUNNING")).all()
            lease = {"attempt": 1, "pid": 1, "node": "box", "expires_at": time.time() + 86400.0}
            leases = [
                lease | {"job_id": id, "rank": rank, "address": f"10.0.0.1:{39000 + rank}"}
                for id in ids
                for rank in range(WORKERS)
            ]
            session.execute(insert(LeaseRow), leases)

    @contextmanager
    def _database(self) -> Iterator[Session]:
        database = Database(self._url)
        try:
            with database.unfenced() as session:
                yield session
        finally:
            database.close()

    def _client(self) -> httpx.Client:
        client = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = httpx.Client(base_url=self._service.url, trust_env=False, timeout=60)
        return client

    def submitted(self, body: dict[str, Any]) -> httpx.Response:
        """Submit a job, whose ID is noted."""
        answer = self._client().post("/v1/jobs", json=body, headers=bearer(self._service.operator))
        self.ids.append(str(answer.json()["id"]))
        return answer

    def running(self) -> int:
        """How many jobs run, as its metrics say."""
        text = self.get("/metrics").text
        lines = [line for line in text.splitlines() if line.startswith('thinwire_service_jobs{state="RUNNING"}')]
        return int(float(lines[0].split()[-1])) if lines else 0

    def get(self, path: str) -> httpx.Response:
        """What the operator is answered."""
        return self._client().get(path, headers=bearer(self._service.operator))

    def register(self, job: int, rank: int) -> httpx.Response:
        """A worker of one of the jobs registers."""
        said = {"address": f"127.0.0.1:{39000 + rank}", "attempt": 1, "pid": 100 + rank, "node": f"box{rank}"}
        path = f"/v1/jobs/{self.ids[job]}/workers/{rank}"
        return self._client().put(path, json=said | {"leads": rank == 0}, headers=bearer(self.tokens[job]))

    def post(self, job: int, step: int) -> httpx.Response:
        """Rank 0 of one of the jobs posts a sample."""
        made = sample(step, at=time.time(), lr=1e-3, step_seconds=1.0, world_size=WORKERS, payload_bytes=10**6)
        path = f"/v1/jobs/{self.ids[job]}/telemetry"
        return self._client().post(path, json={"attempt": 1, "samples": [made]}, headers=bearer(self.tokens[job]))


def bearer(token: str) -> dict[str, str]:
    """The header of who has this token."""
    return {"Authorization": f"Bearer {token}"}


def many_jobs(sizes: Sequence[int], kind: Kind) -> dict[str, Any]:
    """Of each number of jobs, in a service of its own; and by which power of it the processor's times grow."""
    found: dict[str, Any] = {}
    for jobs in sizes:
        with ExitStack() as stack, TemporaryDirectory(ignore_cleanup_errors=True) as home:
            url = empty(kind, stack)
            service = Service(Path(home), 4096, FOR_EVER, THINWIRE_DATABASE_URL=url)
            try:
                found[str(jobs)] = Load(service, jobs, url).run()
            finally:
                service.process.terminate()
                service.process.wait(60)
        print(f"{jobs} jobs: {json.dumps(found[str(jobs)], indent=1)}", flush=True)
    if len(sizes) > 1:
        kinds = [kind for kind, one in found[str(sizes[0])].items() if isinstance(one, dict)]
        found["exponents"] = {
            kind: round(exponent(sizes, [found[str(jobs)][kind]["cpu_ms"] for jobs in sizes]), 2) for kind in kinds
        }
        print(json.dumps(found["exponents"]))
    return found


def made(module: str = "benchmarks.service") -> dict[str, Any]:
    """Of a result: by what it was made."""
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **asdict(provenance(CODE)),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "load_average_before": os.getloadavg(),
    }


def keep(found: dict[str, Any], path: Path) -> None:
    """Write a result."""
    found["load_average_after"] = os.getloadavg()
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written: {path}")


def main(
    hostile: Annotated[bool, typer.Option("--hostile", help="Attack a service of its own.")] = False,
    jobs: Annotated[str, typer.Option(help="Numbers of jobs to bear, such as 100,300,1000.")] = "",
    kind: Annotated[Kind, typer.Option("--on", help="Of --jobs: the database.")] = Kind.SQLITE,
    name: Annotated[str, typer.Option(help="Of the file with the result of --jobs.")] = "jobs",
) -> None:
    """Try what the service bears, print what came of it, and write it."""
    if hostile == bool(jobs):
        raise typer.BadParameter("say --hostile, or --jobs with numbers of jobs")
    if jobs:
        sizes = [int(one) for one in jobs.split(",")]
        if min(sizes) < 2 * SUBMITTED:
            raise typer.BadParameter(f"--jobs {jobs}: at least {2 * SUBMITTED}, as many as are submitted one by one")
        found = made() | {"workers": WORKERS, "database": kind.title} | many_jobs(sizes, kind)
        keep(found, RESULT.with_name(f"{name}.json"))
        return
    found = made() | {"files": FILES}
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
    keep(found, RESULT)


if __name__ == "__main__":
    typer.run(main)
