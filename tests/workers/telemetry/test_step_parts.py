"""The parts of a step add up to it, and a rank that comes late shows as what the others wait for."""

import time

import pytest
import torch

from tests.covering import parametrize
from tests.workers.small_job import Recording, run_small, small_spec
from thinwire.comm.protocol import Stats
from thinwire.contract.metric_names import STEP_PARTS
from thinwire.workers.session.body import Bodies
from thinwire.workers.telemetry.step_parts import PartSeconds, StepClock, StepTimes

LATE, LATE_S = 2, 0.05


class Keeping(Recording):
    """Keeps the parts that were told last."""

    made: dict[int, "Keeping"] = {}  # noqa: RUF012 - of one test, by rank

    def __init__(self, run_dir):
        super().__init__(run_dir)
        self.parts, self.slowest, self.interval = {}, None, None

    def seated(self, group, device):
        super().seated(group, device)
        Keeping.made[group.rank] = self

    def step_parts(self, seconds):
        self.parts = dict(seconds)

    def waits(self, last_share, mean_s, slowest=None):
        self.slowest = slowest

    def saves_every(self, steps):
        self.interval = steps


def trained(tmp_path, monkeypatch, **changes):
    monkeypatch.setattr("tests.workers.small_job.Recording", Keeping)
    opens, watched = Bodies.open, set()

    def wait(optimizer, *_):  # ranks on threads wait where they launch: what they would wait in step() is planted
        if optimizer.group.rank != LATE:
            time.sleep(LATE_S)
            optimizer.group.stats.waited_s += LATE_S

    def late(bodies, share):
        optimizer = bodies._optimizers[0]
        if optimizer.group.rank not in watched:
            watched.add(optimizer.group.rank)
            optimizer.register_step_pre_hook(wait)
        return opens(bodies, share)

    monkeypatch.setattr(Bodies, "open", late)
    run_small(tmp_path, small_spec(steps=20, **changes), 3)
    return [Keeping.made[rank] for rank in range(3)]


def test_the_parts_of_each_rank_add_up_to_its_steps_and_the_late_one_is_waited_for(tmp_path, monkeypatch):
    reporters = trained(tmp_path, monkeypatch)
    for rank, one in enumerate(reporters):
        assert set(one.parts) == set(STEP_PARTS)
        assert sum(one.parts.values()) == pytest.approx(sum(sample.step_seconds for sample in one.samples), rel=0.02), (
            rank
        )
        assert all(one.parts[part] > 0 for part in ("forward_backward", "encode", "decode_update")), one.parts
    assert reporters[0].parts["wire"] > 0
    for part in STEP_PARTS:
        told = [(sample.seconds_by_part or {})[part] for sample in reporters[0].samples if sample.step]
        assert sum(told) == pytest.approx(reporters[0].parts[part], abs=1e-6 * len(told)), part
    for rank, one in enumerate(reporters):
        assert one.parts["slowest"] == pytest.approx(0.0 if rank == LATE else 20 * LATE_S, abs=5 * LATE_S), one.parts
    assert {one.slowest[0] for one in reporters} == {LATE}
    assert len({one.slowest[1] for one in reporters}) == 1, "all know the same, also of one that nobody scrapes"


@parametrize("every", [7, 8], usual=[0])
def test_the_interval_of_checkpoints_is_told(tmp_path, monkeypatch, every):
    assert {one.interval for one in trained(tmp_path, monkeypatch, checkpoint={"every_steps": every})} == {every}


TIMES = StepTimes(inside_s=3.0, waited_s=2.0, encode_s=0.5, encode_inside_s=0.25)


@pytest.mark.parametrize(
    ("waits", "wire_s", "slowest_s"),
    [([2.0, 0.5], 0.5, 1.5), ([2.0, 2.0], 2.0, 0.0), ([2.0, 5.0], 2.0, 0.0), ([], 2.0, 0.0)],
)
def test_what_all_wait_is_the_wire_and_the_rest_is_for_the_last(waits, wire_s, slowest_s):
    parts = PartSeconds()
    assert parts.add(TIMES, 10.0, 0, waits) == parts.seconds
    assert parts.seconds == {
        "forward_backward": 6.75,
        "encode": 0.5,
        "wire": wire_s,
        "slowest": slowest_s,
        "decode_update": 0.75,
    }
    assert sum(parts.seconds.values()) == 10.0


class Optimizer(torch.optim.SGD):
    """One whose step() books what a test says."""

    def __init__(self):
        super().__init__([torch.nn.Parameter(torch.zeros(1))])
        self.stats = Stats()
        self.group = self

    def step(self, closure=None):
        self.stats.waited_s += 0.25
        self.stats.encode_s += 0.5


def test_nothing_is_said_of_a_step_with_a_closure_and_each_step_is_taken_once():
    optimizer = Optimizer()
    clock = StepClock(optimizer)
    assert clock.take() is None
    optimizer.stats.encode_s += 1.0  # in backward
    optimizer.step()
    times = clock.take()
    assert (times.waited_s, times.encode_s, times.encode_inside_s) == (0.25, 1.5, 0.5)
    assert clock.take() is None
    optimizer.step(lambda: 0.0)
    assert clock.take() is None
    optimizer.stats = Stats()  # other ranks
    optimizer.step()
    assert clock.take().encode_s == 0.5
    clock.close()
    optimizer.step()
    assert clock.take() is None
