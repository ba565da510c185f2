"""Which kernels a vector gets, and where what numba compiles is kept."""

import os
import re
import subprocess
import sys

import pytest
import torch

from thinwire.comm.kernels import choose
from thinwire.comm.kernels.choose import kernels_for, warm_up
from thinwire.comm.kernels.cpu import CpuKernels
from thinwire.comm.kernels.fused_reference import PLAIN

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_on_the_cpu_get_compiled_kernels(dtype):
    assert isinstance(kernels_for(CPU, dtype), CpuKernels)
    assert kernels_for(CPU, dtype, 2) is kernels_for(CPU, dtype, 2)


@pytest.mark.parametrize(
    ("device", "dtype"), [("meta", torch.float32), ("cuda", torch.float32), ("cpu", torch.bfloat16)]
)
def test_others_get_plain_torch(device, dtype):
    assert kernels_for(torch.device(device), dtype) is PLAIN


def test_without_what_launches_kernels_on_a_gpu_plain_torch_runs_and_the_log_says_why_once(caplog):
    if torch.cuda.is_available():
        pytest.skip("this machine may have it")
    for made in (choose.cuda_launcher, choose._say_missing, choose._on_cuda):
        made.cache_clear()
    cuda = torch.device("cuda")
    assert choose.cuda_launcher(cuda, torch.float32, "") is None
    assert kernels_for(cuda, torch.float32) is PLAIN
    assert len(re.findall(r"cuda_kernels_missing reason=.* install=thinwire\[cuda1", caplog.text)) == 1


def test_warming_up_leaves_nothing_to_compile():
    from thinwire.comm.kernels import cpu

    warm_up(torch.float32)
    warm_up(torch.float32, torch.bfloat16)
    warm_up(torch.bfloat16)
    compiled = [f for f in vars(cpu).values() if hasattr(f, "nopython_signatures") and not f.__name__.startswith("_")]
    assert len(compiled) == 9
    before = [len(f.nopython_signatures) for f in compiled]
    assert min(before) >= 1
    warm_up(torch.float32)
    assert [len(f.nopython_signatures) for f in compiled] == before


@pytest.mark.slow
def test_the_cache_goes_where_it_is_told(tmp_path):
    code = """
import torch
from thinwire.comm.kernels.blocks import BlockTable, RowMemory
from thinwire.comm.kernels.choose import kernels_for
x = torch.ones(8)
table = BlockTable.from_spans([[(0, 8)]], [], x)
rows = RowMemory.of(torch.zeros(table.wire_bytes, dtype=torch.uint8), x.dtype)
kernels_for(x.device, x.dtype).decode(rows, table, x)
print(not x.any())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "True"
    assert list(tmp_path.rglob("cpu.decode*.nbi"))


def test_without_any_folder_for_the_cache_kernels_are_compiled_all_the_same(monkeypatch, caplog):
    from numba.core import caching

    from thinwire.comm.kernels.compiled import compiled

    def add(a, b):
        return a + b

    monkeypatch.setattr(caching.FunctionCache._impl_class, "_locator_classes", [])
    assert compiled(add)(1, 2) == 3
    assert "kernels_not_cached function=add" in caplog.text
