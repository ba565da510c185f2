"""The figures of a drill, from histories and events made by hand."""

import pytest

from thinwire.contract.reports import Event, Sample
from thinwire.tools.drill.run import Kill, Killer, account


def step(number, at, world_size=2, seconds=0.8, **more):
    return Sample(
        step=number, phase="compressed", loss=2.0, step_seconds=seconds, world_size=world_size, time=at, **more
    )


def regrouped(at, step, world_size, *, lost=(), **more):
    known = {"seconds": 0.5, "error_lost_norm": 0.2 if lost else 0.0, "error_norm": 1.0, "redone": 0}
    fields = {**known, "local_steps_lost": 0, "world_size": world_size, "lost": list(lost), **more}
    return Event(kind="regrouped", step=step, time=at, fields=fields)


START = Sample(step=0, phase="warmup", time=0.0)
# Ten steps of 0.8 s, one a second; a worker is killed at 3.2 and back at 7.
STEPS = [START, *(step(n, float(n), 1 if 4 <= n <= 6 else 2) for n in range(1, 11))]
EVENTS = [regrouped(3.7, 3, 1, lost=["worker 1"]), regrouped(7.0, 6, 2)]
KILLS = [Kill(3.2, 1, 1)]


def test_goodput_is_time_inside_committed_steps_over_wall_time():
    found = account(STEPS, EVENTS, KILLS, STEPS, 2, 16)
    assert found.goodput == pytest.approx(8.0 / 9.8)
    assert found.outside_s == {"regrouping": 1.0, "other": pytest.approx(0.8)}
    assert found.steps == 10
    assert found.steps_lost == 0
    assert found.regroup_s.median == pytest.approx(0.5)
    assert found.readmit_s.worst == pytest.approx(3.8)
    assert found.mean_world_size == pytest.approx((3 * 1 + 6 * 2) / 9)
    assert found.error_lost.median == 0.2


def test_steps_that_were_run_again_are_lost_steps():
    again = [regrouped(3.7, 3, 1, lost=["worker 1"], redone=2)]
    assert account(STEPS, again, KILLS, STEPS, 2, 16).steps_lost == 2


def test_steps_that_all_workers_took_before_they_died_are_lost_steps():
    restart = [Event(kind="resumed", step=4, time=7.5, fields={})]
    after = [START, *STEPS[1:5], *(step(n, n + 5.0) for n in range(5, 11))]
    found = account(after, restart, [Kill(6.9, 0, 0, step=7)], STEPS, 2, 16)
    assert found.restarts == 1
    assert found.steps_lost == 3
    from_nothing = [START, *(step(n, n + 7.0) for n in range(1, 11))]
    assert account(from_nothing, [], [Kill(6.9, 0, 0, step=7)], STEPS, 2, 16).steps_lost == 7


def test_the_losses_compared_are_of_the_last_step_that_both_evaluated():
    ours = [START, step(1, 1.0, validation_loss=3.0), step(2, 2.0, validation_loss=2.5), step(3, 3.0)]
    theirs = [START, step(1, 1.0, validation_loss=3.1), step(2, 2.0), step(3, 3.0, validation_loss=2.0)]
    found = account(ours, [], [], theirs, 2, 16)
    assert (found.final_loss, found.undisturbed_loss) == (3.0, 3.1)


def test_the_json_has_the_names_that_programs_read():
    said = account(STEPS, EVENTS, KILLS, STEPS, 2, 16).as_json()
    names = "goodput kills steps_lost regroup_s readmit_s mean_world_size final_loss undisturbed_loss"
    assert set(names.split()) <= set(said)
    assert said["regroup_s"] == pytest.approx(0.5)


def test_a_run_without_steps_is_refused_by_name():
    with pytest.raises(ValueError, match="0 steps"):
        account([START], [], [], STEPS, 2, 16)


def test_a_killer_without_members_kills_nobody():
    assert Killer(lambda: None, 0.0, seed=0).look() is None
    assert Killer(lambda: {"members": []}, 0.0, seed=0).look() is None
    assert Killer(lambda: {"members": [{"pid": 1}]}, 1000.0, seed=0).look() is None
