"""What a chaos drill concludes from traces: each violation is found, and a run without one is not accused."""

import json
from dataclasses import replace

import pytest

from thinwire.tools.drill.survivors import Look, grown, has_committed
from thinwire.tools.drill.verdict import Process, Touch, judge, read


def committed(time, step, generation=1, rank=0, digest=7):
    return {"time": time, "step": step, "generation": generation, "rank": rank, "size": 2, "digest": digest}


def fed(step, generation=1, rank=0, rows=None):
    rows = [100 * step + 10 * rank] if rows is None else rows
    return {"time": 0.0, "step": step, "generation": generation, "rank": rank, "rows": rows}


def two(steps, generation=1, begin=0.0, pids=(10, 11)):
    """Two ranks that make these steps together, one a second."""
    return [
        Process(
            pid,
            [committed(begin + at, step, generation, rank) for at, step in enumerate(steps, start=1)],
            [fed(step, generation, rank) for step in steps],
        )
        for rank, pid in enumerate(pids)
    ]


UNDISTURBED = two(range(1, 21))


def found(processes, touches=(), living=(10, 11, 12)):
    return judge(processes, UNDISTURBED, touches, living)


def counts(verdict):
    return {
        name: getattr(verdict, name)
        for name in ("redone", "commits_by_two", "samples_wrong", "replicas_differ", "holders_lost")
        if getattr(verdict, name)
    }


def test_a_run_that_goes_on_with_another_after_a_death_is_not_accused():
    stays, dies = two(range(1, 6))
    later = two(range(6, 9), 2, begin=10.0, pids=(10, 12))
    stays.commits += later[0].commits
    stays.fed += later[0].fed
    verdict = found([stays, dies, later[1]], [Touch(11, 5.5)])
    assert counts(verdict) == {}
    assert verdict.violations == ()
    assert verdict.committed == 8
    assert verdict.compared == 8


def test_a_step_run_again_counts_where_a_holder_goes_on_or_was_never_touched():
    stays, dies = two(range(1, 6))
    again = two(range(4, 9), 2, begin=10.0, pids=(10, 12))
    stays.commits += again[0].commits
    stays.fed += again[0].fed
    assert counts(found([stays, dies, again[1]], [Touch(11, 5.5)])) == {"redone": 2}
    # All that held it are dead: a resume from a checkpoint is no fault.
    all_died = [Touch(10, 5.5), Touch(11, 5.5)]
    assert counts(found([*two(range(1, 6)), *two(range(4, 9), 2, 10.0, (12, 13))], all_died, (12, 13))) == {}
    # Of the ranks' own steps between two syncs nobody else knows.
    local, other = two(range(1, 6))
    for one in [*local.commits, *other.commits]:
        one["digest"] = one["digest"] if one["step"] <= 3 else None
    local.commits += again[0].commits
    local.fed += again[0].fed
    assert counts(found([local, other, again[1]], [Touch(11, 5.5)])) == {}


def test_two_generations_that_commit_at_a_time_are_found():
    old, new = two(range(1, 6)), two(range(6, 9), 2, begin=3.5, pids=(12, 13))
    verdict = found([*old, *new], [Touch(10, 3.0), Touch(11, 3.0)], (10, 11, 12, 13))
    assert verdict.commits_by_two == 2
    assert "committed step 5 in generation 1 0.500 s after generation 2" in verdict.violations[0]


def test_samples_are_those_of_the_last_generation_of_a_step_whoever_computed_them():
    stays, dies = two(range(1, 6))
    (alone,) = two([6, 7], 2, begin=10.0, pids=(10,))
    alone.fed = [fed(6, 2, rows=[600, 610]), fed(7, 2, rows=[700])]
    stays.commits += alone.commits
    stays.fed += [fed(6, 1, rows=[600]), *alone.fed]  # step 6 was begun in generation 1, and undone
    verdict = found([stays, dies], [Touch(11, 5.5)])
    assert counts(verdict) == {"samples_wrong": 1}
    assert "step 7 of generation 2 was fed 1 samples, of which 1 are of that step's 2" in verdict.violations[0]


def test_local_steps_that_a_dead_rank_has_not_made_are_counted_and_no_others():
    stays, dies = two(range(1, 6))
    (on,) = two([6, 7], begin=5.0, pids=(10,))
    stays.commits += [{**one, "digest": None} for one in on.commits]
    stays.fed += on.fed
    verdict = found([stays, dies], [Touch(11, 5.5)])
    assert counts(verdict) == {}
    assert verdict.not_made == 2

    assert counts(found([stays, dies], [Touch(11, 6.5)])) == {"samples_wrong": 1}  # it lived when step 6 was made
    assert counts(found([stays, dies], [], living=(10, 11))) == {"samples_wrong": 2}
    for rows in ([999], [], [710]):  # of nobody, none, and those of the dead rank
        stays.fed[-1] = fed(7, rows=rows)
        assert counts(found([stays, dies], [Touch(11, 5.5)])) == {"samples_wrong": 1}
    stays.fed[-1], stays.commits[-1]["digest"] = fed(7), 7  # an exchange
    assert counts(found([stays, dies], [Touch(11, 5.5)])) == {"samples_wrong": 1}


def test_an_undisturbed_run_that_began_again_counts_by_its_last_generations_too():
    again = two(range(4, 9), 2, begin=10.0, pids=(12,))
    again[0].fed = [fed(step, 2, rows=[100 * step, 100 * step + 10]) for step in range(4, 9)]
    verdict = judge(two(range(1, 9)), [*two(range(1, 6)), *again], (), (10, 11))
    assert counts(verdict) == {}
    assert verdict.compared == 8


def test_replicas_that_differ_are_found():
    processes = two(range(1, 4))
    processes[1].commits[1]["digest"] = 8
    assert counts(found(processes)) == {"replicas_differ": 1}


@pytest.mark.parametrize(
    ("ended", "touched", "lost"),
    [
        ("Fenced: it hangs", False, 1),
        (None, False, 1),
        ("Fenced: it hangs", True, 0),
        ("Dismissed: the job was shrunk", False, 0),
        ("well", False, 0),
    ],
)
def test_who_ends_without_a_fault_was_lost(ended, touched, lost):
    processes = two(range(1, 4))
    processes[1].ended = ended
    touches = [Touch(11, 2.0)] if touched else []
    assert found(processes, touches, living=(10,)).holders_lost == lost


def test_a_fault_that_a_process_got_over_explains_nothing_any_more():
    """It was cut off at 2 s for a second or two, and made steps after all that this could do."""
    processes = two(range(1, 10))
    processes[1].ended = "Fenced: it hangs"
    assert counts(found(processes, [Touch(11, 2.0, until=12.0)], living=(10,))) == {}
    verdict = found(processes, [Touch(11, 2.0, until=5.0)], living=(10,))
    assert counts(verdict) == {"holders_lost": 1}
    assert "touched by no fault that explains it, and ended: Fenced: it hangs" in verdict.violations[0]
    # Nor may a step be run again that it held.
    again = two(range(8, 12), 2, begin=20.0, pids=(12, 13))
    killed, rest = Touch(10, 9.5), (12, 13)
    short, long = Touch(11, 2.0, until=5.0), Touch(11, 2.0, until=12.0)
    assert counts(found([*processes, *again], [killed, short], rest)) == {"redone": 2, "holders_lost": 1}
    assert counts(found([*processes, *again], [killed, long], rest)) == {}


def test_a_line_that_was_being_written_at_the_death_is_left_out(tmp_path):
    whole = json.dumps({"kind": "committed", **committed(1.0, 1)})
    (tmp_path / "10.jsonl").write_text(whole + "\n" + whole[:20])
    (process,) = read(tmp_path)
    assert (process.pid, len(process.commits), process.ended) == (10, 1, None)


def test_a_process_is_looked_at_from_its_first_step_on(tmp_path):
    """On a busy machine it waits for minutes before that, with half of its files and libraries."""
    trace = tmp_path / "10.jsonl"
    trace.write_text(json.dumps({"kind": "fed", "step": 1, "rows": [1, 2]}) + "\n")
    assert not has_committed(trace)
    with trace.open("a") as file:
        file.write(json.dumps({"kind": "committed", **committed(1.0, 1)}) + "\n")
    assert has_committed(trace)


def test_a_process_that_grows_is_told_and_one_that_does_not_is_not():
    flat = [Look(5.0 * i, 3, 40, 60, 500 << 20) for i in range(30)]
    assert grown(10, flat) == []
    leaks = [Look(5.0 * i, 3, 40 + i, 60 + 2 * i, (500 + 20 * i) << 20) for i in range(30)]
    assert [words.split(" grew")[0] for words in grown(10, leaks)] == [
        "process 10: threads",
        "process 10: files",
        "process 10: memory",
    ]
    assert grown(10, leaks[:10]) == []  # too short a life for a trend


def test_what_more_workers_need_is_no_growth_and_what_grows_beside_it_is():
    sizes = [2 if i < 20 or i % 3 == 0 else 7 for i in range(40)]
    connected = [Look(5.0 * i, size, 30 + 5 * size, 40 + 8 * size, 500 << 20) for i, size in enumerate(sizes)]
    assert grown(10, connected) == []
    leaks = [replace(one, files=one.files + i) for i, one in enumerate(connected)]
    assert grown(10, leaks) == ["process 10: files grew from 65.5 to 86 with 2 workers"]
