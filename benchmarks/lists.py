"""The command: python -m benchmarks.lists [--jobs 100000] [--on sqlite --on postgresql]. How quick are lists of jobs?

A database with so many jobs that are over, of 50 people, a tenth of them with a label that one job in 1,000 has, all
with one that half of them have; beside them 1,000 that are not over. A server of its own answers over HTTP: each list
is asked for as a page of 100, in turn with the others so that a busy machine slows all of them alike, and each of its
next pages by its cursor. Of two databases one is asked, then the other, for each page. Printed: p50 and p99 in
milliseconds, what it is of the page without a filter, and the median of its turns' ratios to the first database.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer
from sqlalchemy import insert

from benchmarks.provenance import ROOT
from benchmarks.service import Kind, On, Service, bearer, empty, keep, looked_over, made
from tests.service.control_plane_harness import sample, spec
from thinwire.contract.spec import read_spec
from thinwire.service.auth import token_hash
from thinwire.service.db import Database
from thinwire.service.jobs.listing import LabelRow
from thinwire.service.jobs.repository import JobRow

RESULT = ROOT / "benchmarks" / "results" / "service" / "lists.json"
OPEN = 1000
PEOPLE = 50
LISTS: dict[str, dict[str, Any]] = {
    "all": {},
    "not over": {"state": ["PENDING", "RUNNING"]},
    "succeeded": {"state": "SUCCEEDED"},
    "over": {"state": ["SUCCEEDED", "FAILED", "CANCELLED"]},
    "cancelled, of which there is none": {"state": "CANCELLED"},
    "of one person": {"person": "person-7"},
    "of nobody": {"person": "nobody"},
    "of a name": {"name": "job-3"},
    "of names that begin so": {"name": "job-*"},
    "of no name": {"name": "none*"},
    "of a label that half have": {"label": "half=yes"},
    "of a label that few have": {"label": "sweep=17"},
    "of two labels": {"label": ["half=yes", "sweep=17"]},
    "of half, and one person": {"label": "half=yes", "person": "person-7"},
    "of half, and nobody": {"label": "half=yes", "person": "nobody"},
    "of a day": {"created_after": "2026-01-01T00:00:00Z", "created_before": "2026-01-02T00:00:00Z"},
    "with a text in few": {"text": "00042"},
    "with a text in none": {"text": "nowhere"},
    "all of one person that failed": {"person": "person-7", "state": "FAILED"},
}
"""What is asked for beside limit=100."""


def token_of(number: int) -> str:
    """The token of the job of this number, which has no run folder that holds it."""
    return f"of-job-{number:08}"


def fill(database: Database, count: int, state: str = "PENDING", running: int = OPEN, **job: Any) -> None:
    """Jobs that are over, ten minutes apart, and some that are not, in this state. job: what it asks for beside."""
    draw = random.Random(0)
    made = read_spec(spec(**job)).model_dump(mode="json", exclude={"labels"})
    newest = {"attempt": 1, "sample": sample(100)}
    first = 1_767_225_600.0  # the beginning of 2026
    with database.unfenced() as session:
        for begin in range(0, count + running, 5000):
            jobs, labels = [], []
            for number in range(begin, min(begin + 5000, count + running)):
                job_id = f"job-{number % 10}-{number:06x}"
                over = number < count
                own = {"half": "yes" if number % 2 else "no"}
                if number % 10 == 0:
                    own["sweep"] = str(draw.randrange(100))
                at = first + 600.0 * number
                now = draw.choice(["SUCCEEDED"] * 9 + ["FAILED"]) if over else state
                row = {"id": job_id, "name": f"job-{number % 10}", "spec": made, "labels": own, "state": now}
                row |= {
                    "spec_digest": "0" * 64,
                    "token_hash": token_hash(token_of(number)),
                    "max_attempts": 4,
                    "attempt": 1,
                }
                row |= {"created_at": at, "finished_at": at + 60.0 if over else None, "version": 1, "kept_bytes": 0}
                row |= {"submitted_by": f"person-{draw.randrange(PEOPLE)}", "arrival": number + 1}
                row |= {"newest_sample": newest if over else None, "summary": {"state": now} if over else None}
                jobs.append(row)
                labels += [{"job_id": job_id, "key": k, "value": v, "created_at": at} for k, v in own.items()]
            session.execute(insert(JobRow), jobs)
            session.execute(insert(LabelRow), labels)


def measure(clients: dict[Kind, httpx.Client], times: int) -> dict[Kind, dict[str, dict[str, float]]]:
    """Milliseconds of each list's first page, and of the page that follows it."""
    taken: dict[Kind, dict[str, list[float]]] = {kind: {} for kind in clients}
    for _ in range(times):
        for name, asked in LISTS.items():
            before: dict[Kind, dict[str, str]] = {kind: {} for kind in clients}
            for page in ("", ", the next page"):
                following: dict[Kind, dict[str, str]] = {}
                for kind in before:
                    began = time.perf_counter()
                    answer = clients[kind].get("/v1/jobs", params={"limit": 100, **asked, **before[kind]})
                    taken[kind].setdefault(name + page, []).append(1000.0 * (time.perf_counter() - began))
                    answer.raise_for_status()
                    found = answer.json()
                    if found["next"] is not None:
                        following[kind] = {"before": found["next"]}
                before = following
    first = next(iter(clients))
    return {
        kind: {
            name: {
                "p50_ms": round(median(ms), 1),
                "p99_ms": round(sorted(ms)[min(len(ms) - 1, int(0.99 * len(ms)))], 1),
                "of_all": round(median(ms) / median(of_kind["all"]), 2),
            }
            | ({} if kind is first else {f"of_{first}": round(ratio(taken[first][name], ms), 2)})
            for name, ms in of_kind.items()
        }
        for kind, of_kind in taken.items()
    }


def ratio(before: Sequence[float], after: Sequence[float]) -> float:
    """The median of the ratios of the turns."""
    return median(other / one for one, other in zip(before, after, strict=True))


@contextmanager
def served(kind: Kind, jobs: int) -> Iterator[tuple[Service, str]]:
    """A service over such a database, filled; and the database's version."""
    with ExitStack() as stack:
        url = empty(kind, stack)
        database = Database(url)
        database.upgrade()
        fill(database, jobs)
        version = looked_over(kind, database)
        database.close()
        # A turn of the reconciler in five minutes: what is measured is the lists alone.
        settings = {"THINWIRE_DATABASE_URL": url, "THINWIRE_RECONCILE_INTERVAL_S": "300"}
        home = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
        service = Service(Path(home), files=4096, **settings)
        try:
            yield service, version
        finally:
            service.process.terminate()
            service.process.wait(60)


def main(
    jobs: Annotated[int, typer.Option(min=1000, help="That are over.")] = 100_000,
    times: Annotated[int, typer.Option(min=1, help="Each list is asked for so often.")] = 50,
    on: On = [Kind.SQLITE],  # noqa: B006 - typer reads it
    write: Annotated[bool, typer.Option("--keep/--no-keep", help="Write the result beside the others.")] = True,
) -> None:
    """Fill databases, ask for lists, print what they took."""
    about = made("benchmarks.lists") | {"jobs": jobs, "not_over": OPEN, "times": times}
    with ExitStack() as stack:
        services = {kind: stack.enter_context(served(kind, jobs)) for kind in on}
        time.sleep(5.0)  # the first turn, which finds nobody there and waits
        clients = {}
        for kind, (service, _) in services.items():
            client = httpx.Client(base_url=service.url, headers=bearer(service.operator), trust_env=False, timeout=60.0)
            clients[kind] = stack.enter_context(client)
        measure(clients, 2)
        found = measure(clients, times)
        of = {kind: {"database": known, "rss_most_mib": one.memory("VmHWM")} for kind, (one, known) in services.items()}
    for kind, lists in found.items():
        print(f"{jobs} jobs, {kind.title}")
        for name, figures in lists.items():
            print(f"{name:40} " + "  ".join(f"{what} {figure:8.2f}" for what, figure in figures.items()))
    if write:
        known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        known |= {kind.title: about | of[kind] | {"lists": found[kind]} for kind in on}
        keep(known, RESULT)


if __name__ == "__main__":
    typer.run(main)
