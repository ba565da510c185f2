"""The table of pairs: ratios are of the two runs of a pair, and medians over turns."""

import pytest

from benchmarks.pairs import ratios, seconds_of, table


def run(seconds):
    turns = [{"rank_s": [0.1, one * 2], "steps": 2} for one in seconds]
    return {"sittings": [{"measured": {"onebit_adam": {"turns": turns}, "compute": {"turns": []}}}]}


def test_a_step_ends_with_its_slowest_rank_and_pairs_are_compared():
    assert seconds_of(run([1.0, 2.0])) == {"onebit_adam": [1.0, 2.0]}
    pairs = [
        {"old": {"ddp_fp32": [4.0], "onebit_adam": [1.0, 9.0, 1.0]}, "new": {"ddp_fp32": [4.0], "onebit_adam": [ratio]}}
        for ratio in (1.1, 0.9, 1.0)
    ]
    assert ratios(pairs) == pytest.approx([1.1, 0.9, 1.0])
    assert table(pairs)[2] == "| 1 | 1000 | 1100 | 1.100 | 4.00 | 3.64 |"
    assert table(pairs)[-1].startswith("Median of the ratios: 1.000; smallest 0.900, largest 1.100;")
