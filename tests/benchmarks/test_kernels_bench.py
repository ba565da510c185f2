"""The benchmark of the kernels runs, and counts what it says."""

import json

import pytest
import torch

from benchmarks.kernels import bench, traffic
from benchmarks.kernels.cases import CORES, cases
from benchmarks.kernels.chain import Chain
from thinwire.comm.kernels.added import Vector
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.fused_reference import PLAIN
from thinwire.comm.layout import VectorLayout


def test_floors_are_what_each_array_is_read_and_written_once():
    floor = {name: traffic.total(accesses) for name, accesses in traffic.floor(2).items()}
    assert floor["encode_lerp"] == 12.25
    assert floor["descend"] == 12.125
    assert floor["serve"] == 8.375
    assert floor["copy"] == 8


def test_the_chain_does_what_the_kernels_do():
    """Else it would be a straw man: equal signs, and scales but for the order of the sums."""
    chain = Chain(8192, 1, torch.Generator().manual_seed(0))
    x = chain._x.clone()
    chain.encode_sum()
    table = BlockTable.of(VectorLayout.single(8192), 0, 8192, 4096, x)
    c, scale = torch.zeros(8192), torch.zeros(2)
    row = RowMemory.of(torch.zeros(table.wire_bytes, dtype=torch.uint8), torch.float32)
    PLAIN.encode(c, scale, Vector(x), table, row)
    row_scale = row.values_V[table.scale_at]
    assert torch.equal(chain._row[8:], row.bytes_B[table.bits_at[0] :])
    assert torch.allclose(chain._row[:8].view(torch.float32), row_scale)
    assert torch.allclose(chain._error, c - torch.where(c >= 0, 1, -1) * scale.repeat_interleave(4096), atol=1e-6)


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
