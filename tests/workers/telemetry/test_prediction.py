"""What a running job says a step should take: by hand, and in a whole run."""

import json
import logging

import pytest
import torch

from tests.workers.small_job import run_small, small_spec
from thinwire.comm.groups.blocking import MirroredGroup
from thinwire.comm.wire.network import all_reduce
from thinwire.contract.figures import prediction as held
from thinwire.contract.reports import Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.optim import OneBitAdam
from thinwire.workers.telemetry.prediction import Prediction

ELEMENTS = 800_000
FULL, BITS = int(all_reduce(2, 4 * ELEMENTS).num_bytes), 101_000


@pytest.fixture
def run_dir(tmp_path):
    chosen = {"bucket_elements": 1 << 20, "elements": ELEMENTS, "ranks": 3, "latency_s": 0.01, "bytes_per_s": 1e6}
    RunFolder(tmp_path).buckets.write_text(json.dumps(chosen))
    return tmp_path


@pytest.fixture
def optimizer():
    params = [torch.nn.Parameter(torch.zeros(ELEMENTS))]
    return OneBitAdam.sized(1 << 20)(params, group=MirroredGroup(2), full_exchange="fp32")


def sample(seconds, sent=FULL, phase="warmup", world_size=2, step=1):
    return Sample(step=step, phase=phase, step_seconds=seconds, payload_bytes=sent, world_size=world_size, time=0.0)


def predict(prediction, optimizer, steps, waited_s, **known):
    """What is predicted for each of so many steps, of which each has waited so long."""
    found = []
    for seconds in steps:
        optimizer.group.stats.waited_s += waited_s
        found.append(prediction.of_step(sample(seconds, **known), optimizer))
    return found


def test_the_first_steps_without_their_waiting_and_the_network_of_the_beginning(run_dir, optimizer):
    """Half a second of work in each; 3.2 MB at 1 MB/s, and a ring of two has two rounds of 10 ms. No overlap."""
    found = predict(Prediction(run_dir, optimizer.group), optimizer, [9.0, 2.4, 2.5, 2.6, 7.0, 1.0], 2.0)
    assert found == [None, None, None, *[pytest.approx(0.5 + 3.2 + 0.02)] * 3]


def test_each_kind_of_step_has_its_own(run_dir, optimizer):
    """Both phases of one bit have two rounds in all; a step that sends nothing is what it computes."""
    prediction = Prediction(run_dir, optimizer.group)
    predict(prediction, optimizer, [1.0] * 4, 0.5)
    bits = predict(prediction, optimizer, [0.6] * 4, 0.2, sent=BITS, phase="compressed")
    local = predict(prediction, optimizer, [0.3] * 4, 0.0, sent=0, phase="compressed")
    both = predict(prediction, optimizer, [2.0] * 4, 1.0, sent=FULL + BITS)
    assert bits[-1] == pytest.approx(0.4 + 0.101 + 0.02)
    assert local[-1] == pytest.approx(0.3)
    assert both[-1] == pytest.approx(1.0 + 3.301 + 0.04)


def test_what_goes_in_rows_takes_their_own_line_where_it_was_measured(run_dir, optimizer):
    """A round of 0.1 s and a tenth of the bandwidth, for the two rounds of one bit alone."""
    known = json.loads(RunFolder(run_dir).buckets.read_text()) | {"rows": [0.1, 1e5]}
    RunFolder(run_dir).buckets.write_text(json.dumps(known))
    prediction = Prediction(run_dir, optimizer.group)
    in_full = predict(prediction, optimizer, [1.0] * 4, 0.5)
    bits = predict(prediction, optimizer, [0.6] * 4, 0.2, sent=BITS, phase="compressed")
    both = predict(prediction, optimizer, [2.0] * 4, 1.0, sent=FULL + BITS)
    assert in_full[-1] == pytest.approx(0.5 + 3.2 + 0.02)
    assert bits[-1] == pytest.approx(0.4 + 1.01 + 0.2)
    assert both[-1] == pytest.approx(1.0 + 3.2 + 1.01 + 0.02 + 0.2)


def test_there_is_none_without_a_network(tmp_path, optimizer, run_dir, caplog):
    fresh = tmp_path / "other"
    fresh.mkdir()
    assert predict(Prediction(fresh, optimizer.group), optimizer, [1.0] * 5, 0.5) == [None] * 5
    RunFolder(run_dir).buckets.write_text('{"bucket_elements": 5}')
    with caplog.at_level(logging.WARNING):
        assert predict(Prediction(run_dir, optimizer.group), optimizer, [1.0] * 5, 0.5) == [None] * 5
    assert "no_prediction" in caplog.text


def test_there_is_none_of_an_exchange_that_tells_no_waiting(run_dir, optimizer):
    assert predict(Prediction(run_dir, optimizer.group), optimizer, [1.0] * 6, 0.0) == [None] * 6


def test_one_rank_has_no_network_and_its_work_is_its_step(tmp_path):
    alone = OneBitAdam([torch.nn.Parameter(torch.zeros(8))], group=MirroredGroup(1))
    assert predict(Prediction(tmp_path, alone.group), alone, [0.5] * 4, 0.0, sent=0, world_size=1)[-1] == 0.5


def test_what_is_held_against_it_are_the_steps_of_the_last_phase():
    def one(step, phase, predicted_s, seconds):
        return sample(seconds, phase=phase, step=step).model_copy(update={"predicted_step_seconds": predicted_s})

    samples = [one(1, "warmup", 5.0, 4.0), one(2, "compressed", None, 9.0), one(3, "compressed", 1.0, 2.0),
               one(4, "compressed", 3.0, 3.0)]  # fmt: skip
    found = held(samples)
    assert list(found.values()) == [2.0, 2.5, -0.2]
    assert held(samples[:2]) == {}


def test_a_whole_run_tells_it_in_history_and_summary(tmp_path):
    (summary, samples, _), *_ = run_small(tmp_path, small_spec(), 2)
    known = [one for one in samples if one.predicted_step_seconds is not None]
    assert {one.phase for one in known} == {"warmup", "compressed"}
    predicted_s, measured_s = summary["predicted_step_seconds"], summary["measured_step_seconds"]
    assert predicted_s > 0
    assert measured_s > 0
    assert summary["prediction_error"] == pytest.approx(predicted_s / measured_s - 1, abs=0.01)
