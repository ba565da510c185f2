"""A long history in few points: held against the same rule in plain Python, on random histories."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from tests.service.control_plane_harness import Service, sample
from thinwire.service.db import Database
from thinwire.service.jobs.repository import JobRepository, SampleRow
from thinwire.service.jobs.thinning import MOST, kept_steps

History = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, str]]:
    service = Service(tmp_path_factory.mktemp("kept") / "home")
    yield service.plane.db, service.submit()
    service.close()


def put(database: Database, job_id: str, history: History) -> None:
    """In the place of what was there."""
    rows = [{"job_id": job_id, "step": step, "attempt": 1, "sample": one} for step, one in history.items()]
    with database.write() as session:
        session.execute(SampleRow.__table__.delete())
    for at in range(0, len(rows), 1000):  # PostgreSQL ends a transaction of a service that says nothing for 5 s
        with database.write() as session:
            session.execute(insert(SampleRow), rows[at : at + 1000])


ALL = range(10**9)


def thinned(database: Database, job_id: str, points: int, steps: range = ALL) -> list[int]:
    with database.read() as session:
        return kept_steps(session, job_id, steps, points)


def reference(history: History, points: int) -> list[int]:
    """As thinning.py says it."""
    steps = sorted(history)
    if len(steps) <= points:
        return steps
    first, last = steps[0], steps[-1]
    kept = {first, last}

    def of_ranges(of: list[int], ranges: int, *orders: Callable[[int], tuple[float, int]]) -> set[int]:
        if ranges < 1:
            return set()
        if len(of) <= ranges * len(orders):
            return set(of)
        parts: dict[int, list[int]] = {}
        for step in of:
            parts.setdefault((step - first) * ranges // (last - first + 1), []).append(step)
        return {min(part, key=order) for part in parts.values() for order in orders}

    inner = steps[1:-1]
    validated = [step for step in inner if history[step]["validation_loss"] is not None]
    kept |= of_ranges(validated, (points - 2) // 2, lambda step: (-step, step))
    losses = {step: history[step]["loss"] for step in inner if history[step]["loss"] is not None}
    by_loss = (lambda step: (losses[step], step)), (lambda step: (-losses[step], step))
    return sorted(kept | of_ranges(list(losses), (points - len(kept)) // 2, *by_loss))


def drawn(chance: random.Random) -> History:
    """Steps with holes, losses that are alike or missing, validations often or never."""
    often, holes, missing = chance.choice([0.0, 0.02, 0.5]), chance.choice([1, 3, 50]), chance.choice([0.0, 0.1, 1.0])
    steps = sorted(chance.sample(range(400 * holes), chance.randrange(1, 300)))
    return {
        step: {
            "loss": None if chance.random() < missing else round(chance.uniform(-1, 3), chance.choice([0, 6])),
            "validation_loss": 1.5 if chance.random() < often else None,
        }
        for step in steps
    }


@pytest.mark.parametrize("seed", range(12))
def test_it_is_what_the_rule_says(kept: tuple[Database, str], seed: int) -> None:
    chance = random.Random(seed)
    history = drawn(chance)
    put(*kept, history)
    for points in (2, 3, 4, 7, 50, chance.randrange(2, 400)):
        found = thinned(*kept, points)
        assert found == reference(history, points), points
        assert len(found) <= points or len(history) <= points
        assert {min(history), max(history)} <= set(found)
        first = chance.randrange(max(history) + 2)
        part = range(first, chance.randrange(first, max(history) + 3))
        assert thinned(*kept, points, part) == reference(
            {step: history[step] for step in part if step in history}, points
        )


def test_a_peak_of_one_step_stays_and_so_do_all_validations(kept: tuple[Database, str]) -> None:
    history = {step: {"loss": 1.0, "validation_loss": 2.0 if step % 100 == 0 else None} for step in range(1000)}
    history[537]["loss"] = 9.0
    put(*kept, history)
    found = thinned(*kept, 60)
    assert 537 in found
    assert {step for step in history if step % 100 == 0} <= set(found)


def test_of_nothing_nothing_is_left(kept: tuple[Database, str]) -> None:
    put(*kept, {})
    assert thinned(*kept, 10) == []
    put(*kept, {5: {"loss": None, "validation_loss": None}})
    assert thinned(*kept, 2) == [5]
    assert thinned(*kept, 2, range(6, 9)) == []


def test_the_api_thins_on_request(service: Service) -> None:
    job_id = service.running()
    made = [sample(step, validation_loss=1.0 if step % 50 == 0 else None) for step in range(200)]
    assert service.post(job_id, samples=made).status_code == 204
    answer = service.client.get(f"/v1/jobs/{job_id}/metrics", params={"points": 20}).json()
    steps = [one["step"] for one in answer["samples"]]
    assert len(steps) <= 20
    assert {0, 50, 100, 150, 199} <= set(steps)
    assert answer["next_after_step"] is None
    rest = service.client.get(f"/v1/jobs/{job_id}/metrics", params={"points": 20, "after_step": 149}).json()
    assert next(one["step"] for one in rest["samples"]) == 150
    url = f"/v1/jobs/{job_id}/metrics"
    between = {"after_step": 119, "before_step": 131}
    for points in ({}, {"points": 20}):  # of so few all, that an overview leaves out
        part = service.client.get(url, params={**between, **points}).json()
        assert [one["step"] for one in part["samples"]] == list(range(120, 131))
    first = service.client.get(url, params={**between, "limit": 4}).json()
    assert first["next_after_step"] == 123
    assert service.client.get(url, params={"after_step": 130, "before_step": 3}).json()["samples"] == []
    for name, wrongs in {"points": (1, 0, -3, MOST + 1, "x", "1.0"), "before_step": (-1, 10**9 + 2, "", "1e3")}.items():
        for wrong in wrongs:
            assert service.client.get(url, params={name: wrong}).status_code == 422, (name, wrong)


@pytest.mark.slow
def test_a_long_history_is_thinned_in_bounded_time_in_both_databases(
    tmp_path: Path, new_database: Callable[[], str]
) -> None:
    history = {step: {**sample(step), "loss": 5 / (1 + step), "validation_loss": None} for step in range(100_000)}
    for url in (None, new_database()):
        service = Service(tmp_path / ("pg" if url else "lite"), database_url=url)
        try:
            job_id = service.submit()
            put(service.plane.db, job_id, history)
            found = thinned(service.plane.db, job_id, 1000)
            assert found == reference(history, 1000)
            with service.plane.db.read() as session:
                assert JobRepository(session).found(job_id)
        finally:
            service.close()
