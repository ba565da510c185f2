"""benchmarks.whole_job: a run is compared with the first method's of its own turn; steps are told by its own freeze."""

from benchmarks.whole_job import figures


def run(method, turn, seconds, step_s, frozen_at=None):
    return {
        "method": method,
        "turn": turn,
        "seconds": seconds,
        "frozen_at": frozen_at,
        "sent_bytes": 100,
        "step_s": step_s,
    }


def test_ratios_are_of_one_turn_and_steps_are_counted_on_both_sides_of_the_freeze():
    runs = []
    for turn, slow in ((1, 1.0), (2, 3.0), (3, 1.0)):  # in the second turn the machine had other work
        runs += [
            run("ddp_fp32", turn, 8.0 * slow, [2.0 * slow] * 4),
            run("onebit_adam", turn, 4.0 * slow, [1.5, 1.5, 0.5, 0.5], frozen_at=2),
        ]
    found = figures(runs)
    assert found["onebit_adam"]["of_each_turn"] == [2.0, 2.0, 2.0]
    assert found["onebit_adam"]["faster_than_ddp_fp32"] == 2.0
    assert found["onebit_adam"]["warm_up_steps"] == 2
    assert found["onebit_adam"]["seconds_a_step_of_the_warm_up"] == 1.5
    assert found["onebit_adam"]["seconds_a_step_after_it"] == 0.5
    assert found["ddp_fp32"]["seconds_a_step_of_the_warm_up"] is None
    assert found["ddp_fp32"]["seconds_a_step_after_it"] == 2.0
