"""The benchmark of the kernels runs, and counts what it says."""

import json

import pytest
import torch

from benchmarks.kernels import bench, traffic
from benchmarks.kernels.cases import CORES, cases


def test_floors_are_what_each_array_is_read_and_written_once():
    floor = {name: traffic.total(accesses) for name, accesses in traffic.floor(2).items()}
    assert floor["encode_lerp"] == 12.25
    assert floor["descend"] == 12.125
    assert floor["serve"] == 8.375
    assert floor["copy"] == 8


@pytest.mark.slow
def test_a_run_times_every_kernel_and_writes_numbers_and_table(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "QUICK_SIZES", (8192, 16384))
    told = []
    threads = torch.get_num_threads()
    path = bench.run(True, tmp_path, lambda *what: told.append(what))
    assert torch.get_num_threads() == threads
    result = json.loads(path.read_text())
    assert {t["kernel"] for t in result["timings"]} == set(traffic.floor(2))
    assert len(result["timings"]) == 2 * len(cases(8192))
    assert {t["threads"] for t in result["timings"]} == {1, CORES}
    for timing in result["timings"]:
        assert timing["best_s"] == min(timing["seconds"])
        assert timing["gb_per_s"] == pytest.approx(timing["floor_bytes"] * timing["values"] / timing["best_s"] / 1e9)
    assert {t["share_of_copy"] for t in result["timings"] if t["kernel"] == "copy"} == {1.0}
    assert result["versions"]["numba"]
    assert told[-1][1] == told[-1][2]
    table = (tmp_path / "README.md").read_text()
    assert "| encode_lerp | 1 |" in table
    assert "A quick run" in table
