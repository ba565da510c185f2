"""Who may start, and with how many workers: a minimum at once, in order, and nobody for ever behind small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.contract.places import Room
from thinwire.service.jobs.queue import PATIENCE_S, RISES_S, Claim, Grants, Served, Share, grant

EIGHT = Room(cpus=8, gpus=0)


def claim(name: str, least: int, most: int | None = None, **more: Any) -> Claim:
    return Claim(id=name, least=least, most=most or least, created_at=float(ord(name[0])), **more)


def granted(room: Room, *claims: Claim, now: float = 1000.0) -> tuple[dict[str, int], list[str]]:
    found = grant(room, claims, now)
    return found.places, [one.claim.id for one in found.waiting]


def test_a_minimum_is_granted_whole_or_not_at_all() -> None:
    assert granted(EIGHT, claim("a", 5), claim("b", 5)) == ({"a": 5}, ["b"])
    assert granted(EIGHT, claim("a", 5, granted=5), claim("b", 3)) == ({"a": 5, "b": 3}, [])


def test_the_order_is_by_priority_then_by_age() -> None:
    waiting = [claim("c", 8), claim("b", 8), claim("a", 8, priority=-1), claim("d", 8, priority=5)]
    assert granted(EIGHT, *waiting) == ({"d": 8}, ["b", "c", "a"])


def test_a_small_one_starts_behind_a_large_one_that_does_not_fit_until_that_has_waited_long() -> None:
    running, large, small = claim("a", 4, granted=4), claim("b", 8, queued_at=1000.0), claim("c", 2)
    assert granted(EIGHT, running, large, small, now=1000.0 + PATIENCE_S - 1) == ({"a": 4, "c": 2}, ["b"])
    assert granted(EIGHT, running, large, small, now=1000.0 + PATIENCE_S) == ({"a": 4}, ["b", "c"])


def test_of_one_moment_and_priority_the_first_to_come_is_the_first() -> None:
    same = [replace(claim(name, 8), created_at=5.0, arrival=at) for name, at in (("a", 3), ("b", 2), ("c", 1))]
    assert granted(EIGHT, *same) == ({"c": 8}, ["b", "a"])


def starts(room: Room, *claims: Claim, now: float = 1000.0) -> dict[str, float | None]:
    return {one.claim.id: one.starts_at for one in grant(room, claims, now).waiting}


def test_when_who_waits_may_start_follows_from_when_others_are_over() -> None:
    a, b = claim("a", 5, granted=5, over_at=1500.0), claim("b", 3, granted=3, over_at=1200.0)
    assert starts(EIGHT, a, b, claim("c", 3), claim("d", 5), claim("e", 1)) == {"c": 1200.0, "d": 1500.0, "e": None}
    assert starts(EIGHT, a, b, claim("c", 4), claim("d", 4)) == {"c": 1500.0, "d": 1500.0}
    assert starts(EIGHT, a, b, claim("d", 8), claim("e", 9)) == {"d": 1500.0, "e": None}
    assert starts(EIGHT, replace(a, over_at=None), b, claim("c", 3), claim("d", 5)) == {"c": 1200.0, "d": None}
    assert starts(EIGHT, replace(a, over_at=900.0), b, claim("c", 5)) == {"c": 1000.0}  # it takes longer than it said
    assert starts(Room(8, 0, others_cpus=2), replace(a, living=6), claim("c", 6), claim("d", 1)) == {
        "c": 1500.0,
        "d": None,
    }


def test_when_who_waits_for_gpus_may_start() -> None:
    room = Room(cpus=8, gpus=4)
    a, b = claim("a", 3, gpus=True, granted=3, over_at=1500.0), claim("b", 4, granted=4, over_at=1200.0)
    assert starts(room, a, b, claim("c", 3, gpus=True), claim("d", 2)) == {"c": 1500.0, "d": 1200.0}


def test_what_is_said_of_the_start_is_when_it_starts_if_nobody_comes_between() -> None:
    """All have waited for so long that nobody starts on places that are kept for one before it."""
    for seed in range(40):
        random = Random(seed)
        room = Room(cpus=random.randint(2, 12), gpus=0)
        jobs = {name: claim(name, random.randint(1, room.cpus), queued_at=-PATIENCE_S) for name in "abcdefgh"}
        said: dict[str, float] = {}
        for now in (10.0 * turn for turn in range(200)):
            jobs = {name: one for name, one in jobs.items() if one.granted is None or (one.over_at or 0.0) > now}
            found = grant(room, list(jobs.values()), now)
            for name in found.places.keys() & said.keys():
                if jobs[name].granted is None:
                    assert now <= said[name], f"seed {seed}, {name}"
            for one in found.waiting:
                if one.starts_at is not None:
                    said.setdefault(one.claim.id, one.starts_at)
            for name in found.places.keys() & jobs.keys():
                if jobs[name].granted is None:
                    end = now + random.randint(1, 20) * 10.0
                    jobs[name] = replace(jobs[name], granted=found.places[name], over_at=end)
        assert not jobs
        assert said, f"seed {seed}"


def test_one_that_can_never_fit_holds_nobody_up() -> None:
    found = grant(EIGHT, [claim("a", 9, queued_at=0.0), claim("b", 2, 4)], now=10_000.0)
    assert found.places == {"b": 4}
    assert [(one.claim.id, one.never) for one in found.waiting] == [("a", True)]


def test_what_is_left_goes_to_those_that_want_more_only_while_nobody_waits() -> None:
    assert granted(EIGHT, claim("a", 1, 8), claim("b", 1, 3)) == ({"a": 5, "b": 3}, [])
    assert granted(EIGHT, claim("a", 1, 8, granted=2), claim("b", 7)) == ({"a": 2}, ["b"])
    assert granted(EIGHT, claim("a", 1, 8, granted=2, grows=False)) == ({"a": 2}, [])


def test_a_place_is_free_only_when_its_worker_has_gone() -> None:
    shrunk = claim("a", 1, 2, granted=8, living=8)
    assert granted(EIGHT, shrunk, claim("b", 6)) == ({"a": 2}, ["b"])
    assert granted(EIGHT, claim("a", 1, 2, granted=2, living=2), claim("b", 6)) == ({"a": 2, "b": 6}, [])


def test_a_minimum_that_was_raised_is_granted_before_those_who_wait() -> None:
    raised = claim("z", 6, 6, granted=4)
    assert granted(EIGHT, raised, claim("a", 3)) == ({"z": 6}, ["a"])
    assert granted(EIGHT, raised, claim("b", 3, granted=3), claim("c", 1, 2)) == ({"z": 4, "b": 3, "c": 1}, [])


def test_what_others_hold_is_not_given_away() -> None:
    assert granted(Room(cpus=8, gpus=0, others_cpus=3), claim("a", 6), claim("b", 5)) == ({"b": 5}, ["a"])


def test_jobs_with_gpus_and_without_share_the_cpus() -> None:
    room = Room(cpus=8, gpus=4)
    on_gpus = claim("a", 4, gpus=True)
    assert granted(room, on_gpus, claim("b", 1, gpus=True), claim("c", 4)) == ({"a": 4, "c": 4}, ["b"])
    [waits] = grant(room, [claim("a", 6, granted=6), claim("b", 3, gpus=True)], 0.0).waiting
    assert (waits.free, waits.total) == (2, 4)


def test_one_that_waits_for_gpus_keeps_its_cpus_and_not_all() -> None:
    running, waits = claim("a", 3, gpus=True, granted=3), claim("b", 2, gpus=True, queued_at=1000.0)
    others = [claim("c", 1, gpus=True), claim("d", 4), claim("e", 3)]
    found = grant(Room(cpus=8, gpus=4), [running, waits, *others], now=1000.0 + PATIENCE_S)
    assert found.places == {"a": 3, "e": 3}
    assert [(one.claim.id, one.free) for one in found.waiting] == [("b", 1), ("c", 1), ("d", 2)]


def test_a_cancelled_job_holds_what_it_has_and_asks_for_nothing() -> None:
    going = claim("a", 5, granted=5, waits=False, grows=False)
    assert granted(EIGHT, going, claim("b", 5, waits=False, grows=False)) == ({"a": 5}, [])


def test_an_endless_row_of_small_jobs_keeps_no_large_one_waiting() -> None:
    jobs = [claim("a", 2, granted=2), claim("b", 2, granted=2), claim("c", 2, granted=2)]
    large, began = Claim("large", 8, 8, created_at=0.0, queued_at=0.0), None
    for turn in range(200):
        now = 10.0 * turn
        jobs = [*jobs[turn % 7 == 0 :], Claim(f"small-{turn}", 2, 2, created_at=now)]  # one ends now and then
        found = grant(EIGHT, [large, *jobs], now)
        if "large" in found.places:
            began = now
            break
        jobs = [replace(one, granted=found.places.get(one.id)) for one in jobs]
    assert began is not None
    assert PATIENCE_S < began < PATIENCE_S + 4 * 70 + 10


def test_whatever_comes_no_place_is_given_twice_no_minimum_in_part_and_everyone_gets_their_turn() -> None:
    """Jobs of every size come, grow and end; each starts in the end."""
    for seed in range(30):
        random = Random(seed)
        room = Room(cpus=random.randint(1, 12), gpus=random.randint(0, 6))
        jobs: dict[str, Claim] = {}
        for turn in range(400):
            now = turn * 10.0
            if turn < 300 and random.random() < 0.12:
                gpus = room.gpus > 0 and random.random() < 0.4
                total = min(room.cpus, room.gpus) if gpus else room.cpus
                least = random.randint(1, total)
                name = f"job-{turn}"
                most = random.choice([least, least + random.randint(0, 4)])
                jobs[name] = Claim(name, least, most, random.choice([0, 0, 1]), now, gpus)
            for name, one in list(jobs.items()):
                if one.granted is not None and random.random() < 0.15:
                    del jobs[name]
            found = grant(room, list(jobs.values()), now)
            check(room, list(jobs.values()), found)
            queued = {one.claim.id for one in found.waiting}
            since = {name: now if one.queued_at is None else one.queued_at for name, one in jobs.items()}
            jobs = {
                name: replace(
                    one,
                    granted=found.places.get(name),
                    queued_at=since[name] if name in queued else None,
                )
                for name, one in jobs.items()
            }
        assert not [one for one in jobs.values() if one.granted is None], f"seed {seed}"


def check(room: Room, claims: Sequence[Claim], found: Grants) -> None:
    by_id = {one.id: one for one in claims}
    assert sum(found.places.values()) <= room.cpus
    assert sum(places for name, places in found.places.items() if by_id[name].gpus) <= room.gpus
    assert all(by_id[name].least <= places <= by_id[name].most for name, places in found.places.items())
    assert found.places.keys() | {one.claim.id for one in found.waiting} == by_id.keys()


def of(project: str, name: str, least: int = 1, **more: Any) -> Claim:
    return Claim(id=name, least=least, most=least, project=project, **more)


@given(
    room=st.integers(1, 6),
    weights=st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=4),
    seed=st.integers(0, 999),
)
@settings(max_examples=15)
def test_a_project_that_waits_gets_its_share_to_within_a_job_and_its_turn_within_a_round(
    room: int, weights: list[float], seed: int
) -> None:
    """Jobs of one place. All projects wait all the time, those of the first have come before all others."""
    random, names = Random(seed), [f"p{index}" for index in range(len(weights))]
    served, made = dict.fromkeys(names, Served()), dict.fromkeys(names, 0)
    running: list[Claim] = []
    began: list[str] = []
    for turn in range(25):
        now = 1.0 + turn
        running = [one for one in running if random.random() > 0.3]
        waiting = [
            of(name, f"{name}-{made[name] + n}", arrival=made[name] + n - 999 * (name == "p0"), queued_at=0.0)
            for name in names
            for n in range(room)
        ]
        shares = {name: Share(weight, served[name]) for name, weight in zip(names, weights, strict=True)}
        found = grant(Room(cpus=room, gpus=0), [*running, *waiting], now, shares)
        new = [one for one in waiting if one.id in found.places]
        before = {name: sum(one.project == name for one in running) for name in names}
        for one in new:
            made[one.project] += 1
            began.append(one.project)
        served |= found.served
        running += [replace(one, granted=1) for one in new]
        use = {name: sum(one.project == name for one in running) for name in names}
        assert sum(use.values()) == room, "no place is left while somebody waits"
        for mine, its_weight in zip(names, weights, strict=True):
            for other, weight in zip(names, weights, strict=True):
                if use[mine] > before[mine]:  # whoever got a place has at most one more than was due beside who waits
                    assert (use[mine] - 1) / its_weight <= use[other] / weight
    if room == 1:  # then they take turns: in every window each has its share to within a job
        for window in (began[i:j] for j in range(len(began) + 1) for i in range(j)):
            for mine, its_weight in zip(names, weights, strict=True):
                for other, weight in zip(names, weights, strict=True):
                    ahead = window.count(mine) / its_weight - window.count(other) / weight
                    assert ahead <= 1 / its_weight + 1 / weight + 1e-6


@given(rival=st.integers(-100, 100), own=st.integers(-100, 100), projects=st.sampled_from([("a", "a"), ("a", "b")]))
@settings(max_examples=20)
def test_no_priority_keeps_anyone_waiting_for_ever(rival: int, own: int, projects: tuple[str, str]) -> None:
    """On one place, beside an endless row of others, in its own project or another."""
    mine, other = projects
    waits = of(mine, "mine", priority=own, queued_at=0.0, arrival=1)
    shares = {mine: Share(), other: Share()}
    running: list[Claim] = []
    turns = int((abs(rival - own) + 2) * RISES_S / 300.0) + 2
    for turn in range(turns):
        now = 300.0 * turn
        new = of(other, f"n{turn}", priority=rival, queued_at=now, arrival=2 + turn)
        found = grant(Room(cpus=1, gpus=0), [waits, new], now, shares)
        if "mine" in found.places:
            return
        shares |= {name: Share(served=last) for name, last in found.served.items()}
        running = [new]
    raise AssertionError(f"it still waits after {turns} turns, beside {running}")


def test_who_uses_least_for_its_weight_is_the_next_by_the_resource_that_it_uses_most_of() -> None:
    room = Room(cpus=8, gpus=4)
    cpus, gpus = of("a", "a0", 3, granted=3), of("b", "b0", 2, granted=2, gpus=True)
    waiting = [of("b", "b1", 3, arrival=1), of("a", "a1", 3, arrival=2)]  # 3 of 8 CPUs are less than 2 of 4 GPUs
    assert set(grant(room, [cpus, gpus, *waiting], 1.0).places) == {"a0", "b0", "a1"}
    shares = {"b": Share(weight=2.0)}
    assert set(grant(room, [cpus, gpus, *waiting], 1.0, shares).places) == {"a0", "b0", "b1"}
    waiting = [of("b", "b1", 3, arrival=1, priority=1), of("a", "a1", 3, arrival=2)]
    assert set(grant(room, [cpus, gpus, *waiting], 1.0).places) == {"a0", "b0", "b1"}  # priority is before the share


def test_the_places_in_the_queue_are_those_in_which_they_will_start() -> None:
    full = of("a", "x", 8, granted=8)
    waiting = [of("a", f"a{n}", arrival=n) for n in range(3)] + [of("b", f"b{n}", arrival=9 + n) for n in range(3)]
    found = grant(EIGHT, [full, *waiting], 1.0)
    assert [one.claim.id for one in found.waiting] == ["b0", "b1", "b2", "a0", "a1", "a2"]
    found = grant(EIGHT, [of("c", "x", 8, granted=8), *waiting], 1.0)
    assert [one.claim.id for one in found.waiting] == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_who_has_as_many_running_as_it_may_waits_and_keeps_nobody_else_waiting() -> None:
    shares = {"a": Share(running=1, running_of_one=1), "b": Share(running_of_one=1)}
    jobs = [of("a", "a0", granted=1), of("a", "a1", queued_at=-1e4), of("b", "b0", 7)]
    found = grant(EIGHT, jobs, 1.0, shares)
    assert (set(found.places), [one.held for one in found.waiting]) == (
        {"a0", "b0"},
        ["project a has 1 of 1 running_jobs"],
    )
    anna, bert = (of("b", name, person=name) for name in ("anna", "bert"))
    found = grant(EIGHT, [of("b", "b0", granted=1, person="anna"), anna, bert], 1.0, shares)
    assert (set(found.places), [one.claim.id for one in found.waiting]) == ({"b0", "bert"}, ["anna"])


def test_of_two_that_stand_still_below_their_minimum_the_younger_gives_back() -> None:
    """Of six places four are left: two of three each, and neither can go on."""
    four, since = Room(cpus=4, gpus=0), 1000.0
    older, younger = (claim(name, 3, granted=3, living=2, stalled_at=since) for name in "ab")

    def back(*claims: Claim, room: Room = four, now: float = since + PATIENCE_S) -> str | None:
        found = grant(room, claims, now).back
        return None if found is None else found.id

    assert back(older, younger) == "b"
    assert back(older, replace(younger, priority=1)) == "a"
    assert back(older, younger, now=since + PATIENCE_S - 1) is None
    assert back(older, younger, room=Room(cpus=6, gpus=0)) is None  # their machines are there
    assert back(older, replace(younger, stalled_at=None)) is None  # nobody could use what it holds
    assert back(older, claim("c", 2), claim("d", 2, granted=2)) == "a"
    assert back(older, claim("c", 5), claim("d", 2, granted=2)) is None  # nor could one that never fits
    assert back(older, replace(younger, waits=False)) is None  # it gives back already
