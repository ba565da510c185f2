"""All methods for a few tiny steps over two processes, among two that fail: no speed is asserted, only what is told."""

from dataclasses import replace

import pytest

from benchmarks.wire import measure as measuring
from benchmarks.wire.cases import LOADS, Case, Network, loopback_set
from benchmarks.wire.figures import rows
from benchmarks.wire.loads import num_parameters
from benchmarks.wire.methods import COMPUTE, METHODS, ZERO_ONE_INTERVALS
from benchmarks.wire.net import NetError
from benchmarks.wire.phases import PhaseClock
from benchmarks.wire.results import Result
from thinwire.comm.protocol import Stats

pytestmark = pytest.mark.slow

TESTED = tuple(reversed(METHODS))  # long intervals first: a turn must be a whole round whatever was before
FAULTY = ("raises", "aborts")


@pytest.fixture(scope="module")
def result():
    told = []
    (case,) = loopback_set(TESTED)
    case = replace(
        case,
        methods=(*TESTED, *FAULTY),
        budget_s=0.0,
        fewest_rounds=2,
        patience_s=5.0,
        plugins=("tests.benchmarks.wire_faults",),
    )
    try:
        yield measuring.measure(case, "a test", told.append)
    finally:
        for name in FAULTY:
            METHODS.pop(name, None)
    assert any("round 2" in line for line in told)


def test_every_method_has_its_rounds_and_those_that_fail_end_nobody_else(result):
    (sitting,) = result.sittings
    assert set(sitting.measured) == {COMPUTE, *TESTED}
    assert all([turn.round for turn in measured.turns] == [1, 2] for measured in sitting.measured.values())
    assert set(sitting.failed) == set(FAULTY)
    assert "ArithmeticError: rank 1 does not come" in sitting.failed["raises"]
    assert "exit code -6" in sitting.failed["aborts"]


def test_all_ranks_end_with_the_same_parameters(result):
    for name, measured in result.sittings[0].measured.items():
        assert measured.replicas_equal, name
        assert measured.finite, name


def test_a_turn_tells_each_rank_and_each_step(result):
    for name, measured in result.sittings[0].measured.items():
        steps = int(METHODS[name].variant) if name.startswith("zero_one") else 1
        for turn in measured.turns:
            assert turn.steps == len(turn.step_s) == steps
            assert len(turn.rank_s) == len(turn.sent_bytes) == 2
            assert sum(turn.step_s) == pytest.approx(max(turn.rank_s))
            assert 0 < sum(turn.phases.values()) <= 1.001 * max(turn.rank_s)


def test_payload_is_what_each_method_should_send(result):
    sent = {row.method: row.payload_bytes for row in rows(result)}
    size = num_parameters(LOADS["tiny"])
    assert sent["ddp_fp32"] == 4 * size
    assert sent["ddp_bf16"] == sent["ddp_fp16"] == 2 * size
    assert sent["adam"] == pytest.approx(4 * size, rel=0.01)
    assert size / 8 < sent["onebit_adam"] < size / 2
    for interval in ZERO_ONE_INTERVALS:
        assert sent[f"zero_one_adam_{interval}"] * interval == sent["zero_one_adam_1"]
    assert 0 < sent["powersgd_1"] < sent["powersgd_2"] < sent["powersgd_4"] < sent["ddp_bf16"]


def test_the_result_is_whole(result):
    again = Result.model_validate_json(result.model_dump_json())
    assert again == result
    assert again.version == 1
    assert again.net == {"kind": "loopback", "hosts": 2}
    assert again.copy_bytes_s > 0
    assert {"torch", "python", "kernel"} <= set(again.versions)
    assert {"cpu", "cores", "memory_gb"} <= set(again.hardware)


def test_without_the_baseline_there_is_no_result(monkeypatch):
    class Silent:
        def run(self, argv, env, time_limit_s, on_line):
            on_line(0, "no route to host")
            return [1, None]

        def counters(self):
            return None

    (case,) = loopback_set(["ddp_fp32"])
    with pytest.raises(measuring.CaseFailed, match=r"exit code 1, no end \(time limit(.|\n)*rank 0: no route to host"):
        measuring._sit(case, Silent(), [METHODS["ddp_fp32"]], lambda _: None)


def test_the_clock_takes_encoding_and_waiting_out_of_the_phase_that_they_are_in(monkeypatch):
    now, stats = [0.0], Stats()
    monkeypatch.setattr("benchmarks.wire.phases.time.perf_counter", lambda: now[0])
    clock = PhaseClock()
    with clock.phase("forward"):
        now[0] += 1
    with clock.phase("update", stats):
        now[0] += 30
        stats.encode_s += 10
        stats.waited_s += 4
    now[0] += 32
    assert clock.take() == {"forward": 1, "backward": 0, "compress": 10, "wire": 4, "update": 16}
    assert not any(clock.take().values())


@pytest.mark.slow
def test_in_a_lab_frames_are_counted_and_are_somewhat_more_than_the_payload():
    case = Case(
        replace(LOADS["tiny-exchange"]),
        Network(2, 1000),
        ("ddp_fp32", "onebit_adam"),
        budget_s=0.0,
        fewest_rounds=2,
        most_rounds=2,
    )
    try:
        result = measuring.measure(case, "a test")
    except NetError as error:
        pytest.skip(str(error))
    for row in rows(result):
        assert row.payload_bytes < row.frame_bytes < row.payload_bytes + 20_000, row.method
    assert result.net["kind"] == "lab"
