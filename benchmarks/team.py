"""The command: python -m benchmarks.team [--on sqlite --on postgresql] [--paced 60 | --minutes 60].

What a service bears that a team has left open: a database with 100,000 jobs that are over, of 50 people, and 1,000 that
run with eight workers each, on the launcher that runs nothing. A server of its own answers over HTTP. Measured, each
with p50, p99 and the service's processor:

    reads            lists and their next pages, the page at / with its files, a job, a history, metrics, targets
    most             as many job-seconds as it takes: a post, and eight workers that register every ten seconds
    reads meanwhile  the same reads while the jobs report at half of that
    submit           one after the other, meanwhile
    streams          a job's stream with so many readers (benchmarks/streams.py)

Of two databases each has a service, and they are measured in turns: one round of reads here, one there, and so on.

With --paced nothing of that: for so many seconds all jobs report and all workers register as seldom as the service asks
them to, a step a second each, which nobody looks at. Does one service bear them?

With --minutes nothing of that either, but the service's memory every ten seconds for so long: jobs report, people look,
watch 50 streams, submit, cancel and delete.
"""

from __future__ import annotations

import heapq
import http.client
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import httpx
import typer
from sqlalchemy import insert, select

from benchmarks.lists import OPEN, fill, token_of
from benchmarks.service import (
    FOR_EVER,
    RESULT,
    WORKERS,
    Kind,
    Load,
    On,
    Service,
    bearer,
    empty,
    keep,
    looked_over,
    made,
)
from benchmarks.streams import Posts, read
from tests.service.control_plane_harness import sample, spec
from thinwire.contract.reports import HEARTBEAT_S, MOST_HEARTBEAT_S, NEXT_HEADER
from thinwire.service.db import Database
from thinwire.service.jobs.repository import JobRow, SampleRow

RUN = (
    "from thinwire.service.launch.fake import FakeLauncher as F, LaunchState as S, LaunchStatus as L; "
    "known = F.status; "
    f"F.status = lambda one, id: known(one, id) if id in one.submissions else L(S.RUNNING); {FOR_EVER}"
)
"""Jobs that never end, those too that it has not started itself."""
SAMPLES = 20_000
"""Of one job's history."""
SENDERS = 4
"""Connections of those who report."""
SAMPLED_S = 10.0
WATCHED = 50
"""Streams while memory is looked at."""
ASKED = frozenset({"count", "readers", "asked_a_second", "over", "running", "workers"})
"""Numbers that say what was done, and not how well."""

Returned = TypeVar("Returned")


def percentiles(seconds: list[float]) -> dict[str, float]:
    """How many, and milliseconds."""
    ordered = sorted(seconds)
    at = lambda share: round(1e3 * ordered[int(share * (len(ordered) - 1))], 1)  # noqa: E731
    return {"count": len(ordered), "p50_ms": at(0.5), "p99_ms": at(0.99)} if ordered else {"count": 0}


def at_once(turns: Generator[None, None, Returned]) -> Returned:
    """What comes of it, where nobody else has a turn."""
    while True:
        try:
            next(turns)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]


class Team(Load):
    """The jobs that run, and those who ask of them."""

    def filled(self) -> None:
        """Their tokens, and leases of their workers."""
        assert self.running() == OPEN
        with self._database() as session:
            query = select(JobRow.id, JobRow.arrival).where(JobRow.state == "RUNNING").order_by(JobRow.arrival)
            found = session.execute(query).all()
        self.ids = [id for id, _ in found]
        self.tokens = [token_of(arrival - 1) for _, arrival in found]
        self.put_leases()

    def idle(self, seconds: float) -> float:
        """Cores that it takes when nobody asks; from here on they are no part of what a request costs."""
        before, began = self.cpu_s(), time.monotonic()
        time.sleep(seconds)
        self._idle = (self.cpu_s() - before) / (time.monotonic() - began)
        return round(self._idle, 3)

    def reads(self, times: int) -> Generator[None, None, dict[str, Any]]:
        """What each costs: in turn, so that a busy machine slows all of them alike. Yields after each round."""
        following = self.get("/v1/jobs?limit=100").json()["next"]
        page = self.get("/").text
        files = re.findall(r'(?:src|href)="([^"#:]+\.[a-z]+)"', page)
        files = ["/" + path.lstrip("./") for path in files]
        one = self.ids[0]
        paths = {
            "list": ["/v1/jobs?limit=100"],
            "list, the next page": [f"/v1/jobs?limit=100&before={following}"],
            "list, running": ["/v1/jobs?limit=100&state=RUNNING"],
            "list, of one person": ["/v1/jobs?limit=100&person=person-7"],
            "list, of a label that few have": ["/v1/jobs?limit=100&label=sweep%3D17"],
            f"the page, and its {len(files)} files": ["/", *files],
            "show": [f"/v1/jobs/{one}"],
            "history, 500 points of 20,000": [f"/v1/jobs/{one}/metrics?points=500"],
            "history, 1,000 samples": [f"/v1/jobs/{one}/metrics?limit=1000"],
            "metrics": ["/metrics"],
            "targets": ["/v1/metrics/targets"],
        }
        taken: dict[str, list[float]] = {name: [] for name in paths}
        for _ in range(times):
            for name, group in paths.items():
                began = time.perf_counter()
                for path in group:
                    self.get(path).raise_for_status()
                taken[name].append(time.perf_counter() - began)
            yield
        return {name: percentiles(seconds) for name, seconds in taken.items()}


class Reports:
    """All jobs report, each worker and each rank 0 in its turn, from threads. rate: job-seconds a second; None: as fast
    as SENDERS connections may.
    """

    def __init__(self, team: Team, service: Service, rate: float | None) -> None:
        self._team, self._address, self._rate = team, service.address, rate
        self._over, self._lock, self.asked = threading.Event(), threading.Lock(), threading.local()
        self.posts: list[float] = []
        self.registrations: list[float] = []
        self.errors: list[str] = []
        self._next = 0
        self._began = time.monotonic()
        self._threads = [threading.Thread(target=self._run) for _ in range(SENDERS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        beats = WORKERS / HEARTBEAT_S
        while not self._over.is_set():
            with self._lock:
                number, self._next = self._next, self._next + 1
            if self._rate is not None:
                late = self._began + number / self._rate - time.monotonic()
                if late > 0 and self._over.wait(late):
                    break
            try:
                job = number % len(self._team.ids)
                self.posts.append(self._sent(connection, *self._post(job, 30_000 + number // len(self._team.ids))))
                for beat in range(int(number * beats), int((number + 1) * beats)):
                    self.registrations.append(self._sent(connection, *self._register(job, beat % WORKERS)))
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                connection.close()

    def _sent(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, job: int) -> float:
        """Seconds that it took; after how many more the service asks for the next is in `asked`, of this thread."""
        headers = {**bearer(self._team.tokens[job]), "Content-Type": "application/json"}
        began = time.perf_counter()
        connection.request(method, path, json.dumps(body), headers)
        answer = connection.getresponse()
        said = answer.read()
        self.asked.seconds = float(answer.headers.get(NEXT_HEADER, 1.0))
        if answer.status != 204:
            self.errors.append(f"{answer.status} {said[:200]!r}")
        return time.perf_counter() - began

    def _post(self, job: int, step: int, steps: int = 1) -> tuple[str, str, Any, int]:
        told = {"lr": 1e-3, "step_seconds": 1.0, "world_size": WORKERS, "payload_bytes": 10**6}
        some = [sample(one, at=time.time(), **told) for one in range(step, step + steps)]
        return "POST", f"/v1/jobs/{self._team.ids[job]}/telemetry", {"attempt": 1, "samples": some}, job

    def _register(self, job: int, rank: int) -> tuple[str, str, Any, int]:
        said = {"address": f"127.0.0.1:{39000 + rank}", "attempt": 1, "pid": 100 + rank, "node": f"box{rank}"}
        return "PUT", f"/v1/jobs/{self._team.ids[job]}/workers/{rank}", said | {"leads": rank == 0}, job

    def end(self) -> dict[str, Any]:
        """No more; what there was."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        seconds = time.monotonic() - self._began
        return {
            **self._told(seconds),
            "post": percentiles(self.posts),
            "register": percentiles(self.registrations),
            "errors": len(self.errors),
            "error": self.errors[:1],
        }

    def _told(self, seconds: float) -> dict[str, Any]:
        return {"asked_a_second": self._rate, "job_seconds_a_second": round(len(self.posts) / seconds, 1)}


class Paced(Reports):
    """All jobs take a step a second, and report and register when the service has asked for it, as workers do."""

    def __init__(self, team: Team, service: Service) -> None:
        begins = time.monotonic()
        # Jobs that run have begun at any time: all at once they would go on to register at once.
        spread = [MOST_HEARTBEAT_S * number / len(team.ids) for number in range(len(team.ids))]
        self._due = [(begins + late, job, rank) for job, late in enumerate(spread) for rank in (-1, *range(WORKERS))]
        self._due.sort(key=lambda one: one[0])  # which is a heap
        self._steps = [(30_000, begins)] * len(team.ids)
        self._late: list[float] = []
        self.samples = 0
        super().__init__(team, service, None)

    def _run(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        while True:
            with self._lock:
                due, job, rank = heapq.heappop(self._due)
            if self._over.wait(max(0.0, due - time.monotonic())):
                return
            now = time.monotonic()
            self._late.append(now - due)
            try:
                if rank < 0:  # it is rank 0 that posts
                    step, at = self._steps[job]
                    steps = max(1, round(now - at))
                    self.posts.append(self._sent(connection, *self._post(job, step, steps)))
                    self._steps[job] = step + steps, now
                    self.samples += steps
                else:
                    self.registrations.append(self._sent(connection, *self._register(job, rank)))
                next_s = self.asked.seconds
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                connection.close()
                next_s = 1.0
            with self._lock:
                heapq.heappush(self._due, (now + next_s, job, rank))

    def settled(self) -> None:
        """From here on it counts: how often to report is known to all."""
        self.posts.clear()
        self.registrations.clear()
        self._late.clear()
        self.samples, self._began = 0, time.monotonic()

    def _told(self, seconds: float) -> dict[str, Any]:
        kinds = {"posts": len(self.posts), "registrations": len(self.registrations), "samples": self.samples}
        return {f"{kind}_a_second": round(many / seconds, 1) for kind, many in kinds.items()} | {
            "late": percentiles(self._late)
        }


def paced(team: Team, service: Service, seconds: float) -> dict[str, Any]:
    """What it takes of the service that all report as seldom as it asks."""
    idle = team.idle(5.0)
    reports = Paced(team, service)
    time.sleep(1.5 * MOST_HEARTBEAT_S)  # by then it knows of all, and all know what it asks
    reports.settled()
    before, began = team.cpu_s(), time.monotonic()
    time.sleep(seconds)
    cores = (team.cpu_s() - before) / (time.monotonic() - began)
    meanwhile = at_once(team.reads(3))
    return {"idle_cores": idle, "cores": round(cores, 3), **reports.end(), "reads_meanwhile": meanwhile}


def measured(
    team: Team, service: Service, seconds: float, times: int, readers: int
) -> Iterator[tuple[str, Any] | None]:
    """All but the memory, each part with its name as it comes; None where it is another's turn."""
    yield "idle_cores", team.idle(5.0)
    yield "rss_filled_mib", service.memory()
    at_once(team.reads(1))
    yield "reads", (yield from team.reads(times))
    before, began = team.cpu_s(), time.monotonic()
    reports = Reports(team, service, None)
    time.sleep(seconds)
    most = reports.end()
    taken = team.cpu_s() - before - team._idle * (time.monotonic() - began)
    yield "most", most | {"cpu_ms_of_a_job_second": round(1e3 * taken / max(1, len(reports.posts)), 2)}
    half = most["job_seconds_a_second"] / 2
    body = spec(workers={"min": WORKERS, "max": WORKERS}, steps=10**6)
    reports = Reports(team, service, half)
    submissions, began = list[float](), time.monotonic()
    while time.monotonic() < began + seconds:
        since = time.perf_counter()
        team.submitted(body).raise_for_status()
        submissions.append(time.perf_counter() - since)
    yield "submit", percentiles(submissions) | {"a_second": round(len(submissions) / (time.monotonic() - began), 1)}
    yield "reports beside submissions", reports.end()
    reports = Reports(team, service, half)
    yield "reads meanwhile", at_once(team.reads(max(3, times // 5)))
    yield "reports meanwhile", reports.end()
    posts = Posts(service, team.ids[1], team.tokens[1])
    try:
        yield "streams", read(service, team.ids[1], readers, seconds, team.cpu_s)
    finally:
        posts.end()
    yield "rss_after_mib", service.memory()
    yield "rss_most_mib", service.memory("VmHWM")


@contextmanager
def watchers(service: Service, ids: list[str]) -> Iterator[Callable[[], int]]:
    """Who read a stream each, of some jobs; how many still do."""
    over = threading.Event()
    open_now: list[int] = []

    def watch(job_id: str) -> None:
        with socket.create_connection(service.address, timeout=60) as made:
            head = (
                f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {service.operator}\r\n\r\n"
            )
            made.sendall(head.encode())
            open_now.append(1)
            try:
                while not over.is_set() and made.recv(1 << 16):
                    pass
            except OSError:
                pass
            finally:
                open_now.pop()

    threads = [threading.Thread(target=watch, args=(job,), daemon=True) for job in ids]
    for thread in threads:
        thread.start()
    try:
        yield lambda: len(open_now)
    finally:
        over.set()


def memory(team: Team, service: Service, minutes: float, rate: float, every: float, keep_at: Path) -> dict[str, Any]:
    """The service's memory while it is used as on any day: its people look each `every` seconds.

    Written as it comes; Ctrl-C ends it with what there is.
    """
    curve: list[dict[str, Any]] = []
    found = {"minutes": minutes, "rate": rate, "looks_every_s": every, "curve": curve}
    body = spec(workers={"min": 1, "max": 1})
    mine: list[str] = []
    counts = {"looks": 0, "submissions": 0, "deleted": 0, "failed": 0}
    reports = Reports(team, service, rate)
    began = time.monotonic()

    def ask(method: str, path: str, **more: Any) -> httpx.Response | None:
        try:
            answer = team._client().request(method, path, headers=bearer(service.operator), **more)
            answer.raise_for_status()
            return answer
        except httpx.HTTPError:
            counts["failed"] += 1
            return None

    with watchers(service, team.ids[:WATCHED]) as watching, suppress(KeyboardInterrupt):
        turn = 0
        while (since := time.monotonic() - began) < 60.0 * minutes:
            if since >= SAMPLED_S * len(curve):
                told: dict[str, Any] = {"posts": len(reports.posts), "registrations": len(reports.registrations)}
                told |= {"streams": watching(), "cores_s": round(team.cpu_s(), 1), "errors": len(reports.errors)}
                sizes = {"rss_mib": service.memory(), "anonymous_mib": service.memory("RssAnon")}
                curve.append({"at_s": round(since, 1), **sizes, **told, **counts})
                keep_at.write_text(json.dumps(found) + "\n")
            one = team.ids[turn % len(team.ids)]
            lists = ("/v1/jobs?limit=100", "/v1/jobs?limit=100&state=RUNNING", "/v1/jobs?person=person-7", "/metrics")
            for path in (lists[turn % 4], f"/v1/jobs/{one}", f"/v1/jobs/{one}/metrics?points=500", "/"):
                counts["looks"] += ask("GET", path) is not None
            if turn % 5 == 0 and (answer := ask("POST", "/v1/jobs", json=body)) is not None:
                counts["submissions"] += 1
                mine.append(str(answer.json()["id"]))
            if len(mine) > 10:
                oldest = mine[0]
                state = ask("GET", f"/v1/jobs/{oldest}")
                if state is not None and state.json()["state"] == "CANCELLED":
                    counts["deleted"] += ask("DELETE", f"/v1/jobs/{oldest}") is not None
                    mine.pop(0)
                else:
                    ask("POST", f"/v1/jobs/{oldest}/cancel")
            turn += 1
            time.sleep(every)
    found["minutes"] = round(curve[-1]["at_s"] / 60.0, 1)
    return found | {"reports": reports.end(), "rss_most_mib": service.memory("VmHWM")}


def picture(found: dict[str, Any], path: Path) -> None:
    """The curve of the memory."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3), layout="constrained")
    for kind, one in found.items():
        if isinstance(one, dict) and "curve" in one:
            axes.plot(
                [point["at_s"] / 60 for point in one["curve"]], [point["rss_mib"] for point in one["curve"]], label=kind
            )
    axes.set(xlabel="minutes", ylabel="MiB resident", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=110)


@contextmanager
def served(kind: Kind, jobs: int, readers: int) -> Iterator[tuple[Team, Service, str]]:
    """A service over such a database, filled, and its version."""
    with ExitStack() as stack:
        url = empty(kind, stack)
        database = Database(url)
        database.upgrade()
        fill(database, jobs, "RUNNING", workers={"min": WORKERS, "max": WORKERS}, steps=10**6)
        with database.unfenced() as session:
            first = session.scalars(select(JobRow.id).where(JobRow.state == "RUNNING").order_by(JobRow.id)).first()
            rows = [{"job_id": first, "step": n, "attempt": 1, "sample": sample(n)} for n in range(1, SAMPLES + 1)]
            session.execute(insert(SampleRow), rows)
        version = looked_over(kind, database)
        database.close()
        many = str(readers + WATCHED)
        settings = {"THINWIRE_DATABASE_URL": url, "THINWIRE_STREAMS_OF_ONE": many, "THINWIRE_STREAMS": many}
        settings |= {"THINWIRE_CHANGES_BURST": "100000", "THINWIRE_PERSON_MAX_JOBS": "100000"}
        home = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        service = Service(home, 4096, RUN, **settings)
        try:
            team = Team(service, OPEN, url)
            team.filled()
            yield team, service, version
        finally:
            service.process.terminate()
            service.process.wait(60)


def ratios(before: Any, after: Any) -> Any:
    """Of what is in both, number by number, the second over the first; None of what is not."""
    if isinstance(before, dict) and isinstance(after, dict):
        both = (before.keys() & after.keys()) - ASKED
        found = {name: ratios(before[name], after[name]) for name in before if name in both}
        return {name: one for name, one in found.items() if one not in (None, {})} or None
    numbers = all(isinstance(one, int | float) and one for one in (before, after))
    return round(after / before, 2) if numbers else None


def main(
    jobs: Annotated[int, typer.Option(min=1000, help="That are over.")] = 100_000,
    times: Annotated[int, typer.Option(min=1, help="Each read is made so often.")] = 100,
    seconds: Annotated[float, typer.Option(help="That each other part takes.")] = 20.0,
    readers: Annotated[int, typer.Option(help="Of one stream at once.")] = 500,
    on: On = [Kind.SQLITE],  # noqa: B006 - typer reads it
    paced_s: Annotated[float, typer.Option("--paced", help="Report as seldom as asked, alone, for so long.")] = 0.0,
    minutes: Annotated[float, typer.Option(help="Look at the memory alone, for so long.")] = 0.0,
    rate: Annotated[float, typer.Option(help="Job-seconds a second meanwhile.")] = 5.0,
    every: Annotated[float, typer.Option(help="Seconds between looks meanwhile.")] = 2.0,
) -> None:
    """Fill databases, serve them, print what they bear, and write it beside the results that are there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    result = RESULT.with_name("memory.json" if minutes else "paced.json" if paced_s else "team.json")
    found = {kind: made("benchmarks.team") | {"over": jobs, "running": OPEN, "workers": WORKERS} for kind in on}

    def written() -> dict[str, Any]:
        known = json.loads(result.read_text()) if result.exists() else {}
        known |= {kind.title: of_kind for kind, of_kind in found.items()}
        keep(known, result)
        return known

    if minutes or paced_s:  # one after the other: each needs the machine
        for kind in on:
            with served(kind, jobs, readers) as (team, service, version):
                part = RESULT.with_name(f"memory-{kind.title}.part")
                told = memory(team, service, minutes, rate, every, part) if minutes else paced(team, service, paced_s)
                found[kind] |= {"database": version} | told
            if minutes:
                part.unlink()
                picture(written(), RESULT.with_name("memory.png"))
            else:
                print(json.dumps(found[kind], indent=1))
                written()
        return
    with ExitStack() as stack:
        teams = {kind: stack.enter_context(served(kind, jobs, readers)) for kind in on}
        turns = [measured(team, service, seconds, times, readers) for team, service, _ in teams.values()]
        for parts in zip(*turns, strict=True):
            for kind, part in zip(on, parts, strict=True):
                if part is not None:
                    found[kind]["database"] = teams[kind][-1]
                    found[kind][part[0]] = part[1]
                    print(f"{kind.title}, {part[0]}: {json.dumps(part[1])}", flush=True)
                    written()
    for kind in on[1:]:
        found[kind][f"of_{on[0]}"] = ratios(found[on[0]], found[kind])
        print(f"{kind.title}, of {on[0].title}: {json.dumps(found[kind][f'of_{on[0]}'], indent=1)}")
        written()


if __name__ == "__main__":
    typer.run(main)
