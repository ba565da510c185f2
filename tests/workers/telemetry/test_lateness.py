"""Which rank the others wait for: of one step, of many, and on to the metric, the event and the summary."""

from typing import ClassVar

import pytest

from tests.workers.small_job import Recording, run_small, small_spec
from thinwire.comm import SoloGroup
from thinwire.workers.telemetry import lateness, step_log
from thinwire.workers.telemetry.lateness import LEAST_KNOWN, RECENT, Last, Recent, Waits, last_of


@pytest.mark.parametrize(
    ("waits", "step_s", "expected"),
    [
        ([0.3, 0.1, 0.3], 1.0, Last(1, pytest.approx(0.2))),
        ([0.0, 0.5], 1.0, Last(0, 0.5)),
        ([0.3, 0.3, 0.3], 1.0, None),  # a tie
        ([0.30, 0.26, 0.30], 1.0, None),  # 4 % of the step
        ([0.0005, 0.0], 0.001, None),  # half a millisecond
        ([5.0, 5.0, 5.01, 5.0], 10.0, None),  # a slow link: all wait
        ([0.0], 1.0, None),
        ([], 1.0, None),
    ],
)
def test_who_waited_least_came_last_where_that_is_clear(waits, step_s, expected):
    assert last_of(waits, step_s) == expected


def test_of_who_came_last_it_is_known_how_much_longer_it_computed():
    assert last_of([0.3, 0.1, 0.3], 1.0, [0.5, 0.7, 0.4]) == Last(1, pytest.approx(0.2), pytest.approx(0.25))


@pytest.mark.parametrize(
    ("computed_s", "words"),
    [
        (0.15, "it computes 0.15 s longer than they do"),
        (0.1, "its link (thinwire doctor)"),
        (-0.2, "no longer"),
        (None, ""),
    ],
)
def test_whether_it_computes_or_its_link_is_slow_is_said(computed_s, words):
    recent = Recent()
    for _ in range(LEAST_KNOWN):
        recent.take(Last(1, 0.25, computed_s), 0.5)
    told = Waits(SoloGroup()).words(recent.news())
    assert "the others wait 0.25 s for it in a step of 0.50 s" in told
    assert words in told
    assert told.endswith("0.50 s") == (computed_s is None)


def shares(*lasts, known=LEAST_KNOWN):
    """Of so many steps, these many by each rank in turn; ties for the rest."""
    recent = Recent()
    for rank, count in enumerate(lasts):
        for _ in range(count):
            recent.take(Last(rank, 0.25), 0.5)
    for _ in range(known - sum(lasts)):
        recent.take(None, 0.5)
    return recent


def test_a_worker_that_is_the_last_most_of_the_time_is_named_once_and_its_end_too():
    recent = shares(0, 0, 45)
    slow = recent.news()
    assert (slow.rank, slow.share, slow.steps, slow.wait_s, slow.step_s) == (2, 0.9, LEAST_KNOWN, 0.25, 0.5)
    assert not slow.over
    assert recent.news() is None
    for _ in range(RECENT):
        recent.take(None, 0.5)
    over = recent.news()
    assert (over.rank, over.over, over.share) == (2, True, 0.0)
    assert recent.news() is None


@pytest.mark.parametrize("lasts", [(25, 25), (34, 8), (0, 0), (20, 20, 10)])
def test_nobody_is_named_by_chance_or_where_two_are_equally_late(lasts):
    assert shares(*lasts).news() is None


def test_nobody_is_named_by_few_steps():
    assert shares(LEAST_KNOWN - 1, known=LEAST_KNOWN - 1).news() is None


SLOW = 1


class Exporting(Recording):
    """Keeps what is told of waits, and the events whole."""

    made: ClassVar[list["Exporting"]] = []

    def __init__(self, run_dir):
        super().__init__(run_dir)
        self.shares, self.told = [], []
        Exporting.made.append(self)

    def seated(self, group, device):
        super().seated(group, device)
        self.rank = group.rank

    def waits(self, last_share, mean_s, slowest=None):
        self.shares.append((last_share, mean_s))

    def event(self, kind, step, **fields):
        self.told.append((kind, step, fields))


def trained(tmp_path, monkeypatch, size, planted):
    """(summary, samples, reporters) of a run on threads; planted: seconds that each rank waits in a step."""
    Exporting.made = []
    monkeypatch.setattr("tests.workers.small_job.Recording", Exporting)
    monkeypatch.setattr(lateness, "LEAST_KNOWN", 15)
    monkeypatch.setattr(Waits, "of_step", lambda self: planted[self.rank])
    monkeypatch.setattr(step_log, "_computed_s", lambda part: 100.0 - planted[part.waits.rank])
    summary, samples, _ = run_small(tmp_path, small_spec(steps=20), size)[0]
    return summary, samples, sorted(Exporting.made, key=lambda reporter: reporter.rank)


def test_a_planted_wait_names_the_rank_and_no_other(tmp_path, monkeypatch):
    summary, samples, reporters = trained(tmp_path, monkeypatch, 3, [50.0, 0.0, 51.0])
    assert [sample.last_worker for sample in samples] == [None] + [SLOW] * 20
    assert all(sample.waited_seconds == pytest.approx(50.5) for sample in samples[1:])
    assert [one.shares[-1][0] for one in reporters] == [0.0, 1.0, 0.0]
    assert all(sample.computed_seconds == pytest.approx(50.5) for sample in samples[1:])
    assert summary["waited_for"] == {"worker": SLOW, "share": 1.0, "seconds": 1010.0, "computing": 1010.0}
    ((kind, step, fields),) = [one for one in reporters[0].told if one[0] == "slow_worker"]
    assert (kind, step, fields["worker"], fields["rank"], fields["share"]) == ("slow_worker", 15, SLOW, SLOW, 1.0)
    assert fields["computed_seconds"] == pytest.approx(50.5)
    assert fields["told"].endswith("it computes 50.50 s longer than they do")
    assert fields["told"].startswith("rank 1 is the last in 100% of the last 15 steps: the others wait 50.50 s for it")


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "planted"), [(3, [0.2, 0.2, 0.2]), (1, [0.0])])
def test_with_ties_or_alone_nothing_is_said(tmp_path, monkeypatch, size, planted):
    summary, samples, reporters = trained(tmp_path, monkeypatch, size, planted)
    assert {sample.last_worker for sample in samples} == {None}
    assert summary["waited_for"] is None
    assert not [one for reporter in reporters for one in reporter.told if one[0] == "slow_worker"]
    assert {reporter.shares[-1][0] for reporter in reporters} == ({None} if size == 1 else {0.0})
