"""The figures of the benchmark of sharded boxes, of turns that are made up."""

from benchmarks.sharded import figures


def turn(method, seconds, sent, loss=None):
    return {
        "method": method, "seconds": seconds, "steps": 2, "sent_bytes": [sent, sent], "parameters": 100,
        "loss": loss, "alike": True,
    }  # fmt: skip


def test_each_method_is_held_against_the_first_turn_by_turn_and_bytes_against_hsdp():
    turns = [
        turn("hsdp_bf16", 4.0, 400), turn("onebit_adam", 1.0, 25), turn("hsdp_bf16", 6.0, 400),
        turn("onebit_adam", 1.0, 25), turn("hsdp_bf16", 8.0, 400), turn("onebit_adam", 4.0, 25, loss=2.5),
    ]  # fmt: skip
    found = figures(turns)
    assert found["hsdp_bf16"]["seconds_a_step"] == 3.0
    assert found["hsdp_bf16"]["sent_bytes_a_parameter"] == 2.0
    ours = found["onebit_adam"]
    assert ours["times_as_fast"] == 4.0
    assert ours["times_as_fast_least_most"] == [2.0, 6.0]
    assert ours["hsdp_bf16_bytes_over_its"] == 16.0
    assert ours["loss"] == 2.5
    assert ours["alike"]
    assert "processor_ms_a_rank" not in ours
    assert figures([{**one, "processor": 0.03} for one in turns])["onebit_adam"]["processor_ms_a_rank"] == 15.0
