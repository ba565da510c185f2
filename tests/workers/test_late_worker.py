"""A worker that was stopped, and wakes when the others have gone on without it: nothing that it saves counts."""

from pathlib import Path

import pytest
import torch

from tests.optim.seeded import seeded
from tests.workers.checkpoints.states import CPU, bits
from thinwire.comm import PeerLost, SoloGroup
from thinwire.contract.spec import Checkpoint
from thinwire.optim import OneBitAdam
from thinwire.workers.checkpoints import CheckpointStore
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.membership.seats import Seat
from thinwire.workers.saving import Saving, floor_of
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.training import Training
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.reporter import Reporter, RunSuperseded

KEEP = 2


def seat(generation):
    """None where ranks are fixed."""
    return None if generation is None else Seat(generation, 0, 1, (), "first", ())


class Worker:
    """The only one of its generation, so that it needs nobody to come to a step at which it saves."""

    def __init__(self, run_dir, generation, seed, may_commit=lambda: True, attempt=0):
        self.group = SoloGroup()
        model = seeded(seed, lambda: torch.nn.Linear(31, 17))
        optimizer = OneBitAdam(model.parameters(), warmup=4, group=self.group)
        registered = Registered(optimizer)
        registered.add("model", model)
        self.training = Training(self.group, CPU, optimizer, registered, MapFeed([0], 1, 1))
        self.meter = Meter(self.group.stats)
        self.told = []
        reporter = Reporter()
        reporter.event = lambda kind, step, **fields: self.told.append((kind.value, step, fields.get("reason", "")))
        self.saving = Saving(run_dir, Checkpoint(every_steps=10, keep=KEEP), reporter, may_commit, lambda: attempt)
        self.saving.seated(seat(generation))

    def resume(self):
        return self.saving.resume(self.training, self.meter)

    def save(self, step, look=lambda: None):
        self.saving.save(self.training, self.meter, step, look)
        self.saving.wait(lambda: None)
        self.saving.tell()
        return self.told[-1]

    @property
    def parameters(self):
        return bits(self.training.optimizer.space.p_N)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", KEEP)


def folders(store):
    return sorted(path.name for path in Path(store.storage.path).glob("step-*"))


def resumed_by(run_dir, generation):
    worker = Worker(run_dir, generation, seed=99)
    return worker.resume(), worker.parameters


@pytest.mark.parametrize("anew", [True, False], ids=["from the store", "from a peer's state"])
def test_what_a_late_worker_saves_is_not_resumed_from_and_removes_nothing_of_the_living(tmp_path, store, anew):
    late = Worker(tmp_path, 1, seed=1)
    late.resume()
    assert late.save(10)[0] == "checkpoint_saved"
    living = Worker(tmp_path, 2, seed=2)
    if anew:
        assert living.resume() == 10
    for step in (20, 30, 40):
        assert living.save(step)[0] == "checkpoint_saved"
    held = folders(store)
    kind, _, reason = late.save(20)  # before it looks: it has heard nothing yet
    if anew:
        assert (kind, reason[:26]) == ("checkpoint_failed", "Superseded: generation 2 h")
    else:
        assert kind == "checkpoint_saved"
    assert set(held) <= set(folders(store))
    assert store.newest_whole() == (2, 40)
    assert living.save(50)[0] == "checkpoint_saved"
    assert len(folders(store)) == KEEP
    assert resumed_by(tmp_path, 3) == (50, living.parameters)


def test_a_late_worker_of_fixed_ranks_is_told_by_the_store(tmp_path, store):
    late = Worker(tmp_path, None, seed=1)
    assert late.resume() is None  # there is nothing yet
    living = Worker(tmp_path, None, seed=2)
    assert living.resume() is None
    assert "Superseded: generation 2 has gone on" in late.save(10)[2]
    assert living.save(10)[0] == "checkpoint_saved"
    assert "Superseded" in late.save(20)[2]
    assert resumed_by(tmp_path, None) == (10, living.parameters)


@pytest.mark.parametrize("later", [2, 7], ids=["the same number", "a higher one"])
def test_an_attempt_that_another_has_gone_on_from_makes_nothing_whole_whatever_its_generation(tmp_path, store, later):
    """Each has a membership of its own, on another Ray: both number on, and neither hears of the other."""
    first = Worker(tmp_path, 1, seed=1, attempt=1)
    first.resume()
    assert first.save(10)[0] == "checkpoint_saved"
    second = Worker(tmp_path, 2, seed=2, attempt=2)
    assert second.resume() == 10
    first.saving.seated(seat(later))  # it has lost a worker, or taken one in that has looked at the store
    first.saving.raise_if_attempt_over()
    kind, _, reason = first.save(20)
    assert (kind, reason) == (
        "checkpoint_failed",
        "AttemptSuperseded: attempt 2 of this job has gone on from the checkpoints here; this is 1",
    )
    with pytest.raises(RunSuperseded, match="attempt 2 of this job has gone on"):
        first.saving.raise_if_attempt_over()
    assert second.save(20)[0] == "checkpoint_saved"
    assert store.newest_whole() == (2, 20)
    with pytest.raises(RunSuperseded):  # all its workers have died, and others have come
        Worker(tmp_path, later + 1, seed=1, attempt=1).resume()
    assert Worker(tmp_path, 8, seed=3, attempt=2).resume() == 20


def test_workers_that_a_newer_attempt_has_adopted_save_as_its_own(tmp_path):
    attempts = [1]
    worker = Worker(tmp_path, 1, seed=1)
    worker.saving._writer.store._attempt = lambda: attempts[-1]
    worker.resume()
    Worker(tmp_path, 2, seed=2, attempt=2).resume()
    attempts.append(2)
    worker.saving.seated(seat(3))
    assert worker.save(10)[0] == "checkpoint_saved"


def test_a_generation_below_one_that_the_store_knows_does_not_begin(tmp_path):
    worker = Worker(tmp_path, 5, seed=1)
    worker.resume()
    worker.save(10)
    assert floor_of(tmp_path, Checkpoint()) == 5
    for generation in (4, 5):
        with pytest.raises(PeerLost, match="newer generation"):
            Worker(tmp_path, generation, seed=1).resume()
    assert Worker(tmp_path, 6, seed=1).resume() == 10


def test_a_worker_looks_before_it_saves(tmp_path, store):
    def over():
        raise PeerLost("the others have gone on")

    worker = Worker(tmp_path, 1, seed=1)
    with pytest.raises(PeerLost):
        worker.save(10, over)
    assert folders(store) == []


def test_what_is_removed_between_the_choice_and_the_loading_is_chosen_anew(tmp_path, store):
    """By the rank 0 of before, which had looked before this generation began, and was stopped in between."""
    writer = Worker(tmp_path, 1, seed=1)
    for step in (10, 20):
        writer.save(step)
    worker = Worker(tmp_path, 2, seed=3)
    found, newest_whole = [], worker.saving._writer.store.newest_whole

    def late():
        found.append(newest_whole())
        if len(found) == 1:
            store.storage.remove(Path(store.address(found[0])).name)
        return found[-1]

    worker.saving._writer.store.newest_whole = late
    assert worker.resume() == 10
    assert found == [(1, 20), (1, 10)]
    assert worker.parameters == writer.parameters


def test_what_a_rank_does_not_see_ends_the_resume_with_the_place(tmp_path):
    Worker(tmp_path, 1, seed=1).save(10)
    worker = Worker(tmp_path, 2, seed=3)
    worker.saving._writer.store.newest_whole = lambda: (1, 20)
    with pytest.raises(FileNotFoundError, match="all nodes share"):
        worker.resume()
