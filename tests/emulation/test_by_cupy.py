"""What CuPy is asked for, seen by one that is played: NVIDIA's compiler is the true one, there is no GPU."""

import importlib
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import missing
from tests.emulation import compiled
from thinwire.comm.kernels.cuda import launch

SOURCE = 'extern "C" __global__ void add(float* x) { if (x[0] > 0.f) x[0] = __fadd_rn(x[1], x[2]); }'
GPU = torch.device("cuda", 1)


class PlayedCupy:
    """As much of CuPy 14 as a launcher may want, with the options that CuPy adds. Notes PTX and launches."""

    def __init__(self):
        self.ptx, self.launched = "", []
        played = self

        class Module:
            def load(self, code):
                assert code == b"code"

            def get_function(self, name):
                return lambda *given: played.launched.append((name, *given))

        class RawModule(Module):
            def __init__(self, *, code, options):
                self.given = code, (*options, "-ftz=true")

            def compile(self):
                played.compile(*self.given)

        compiler = SimpleNamespace(compile_using_nvrtc=self.compile, CompileException=ValueError)
        self.module = ModuleType("cupy")
        self.module.RawModule = RawModule
        self.module.cuda = SimpleNamespace(is_available=lambda: True, compiler=compiler, Module=Module)

    def compile(self, source, options):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(compiled, "OPTIONS", [*options, "--device-as-default-execution-space"])
            self.ptx = compiled.compiled.__wrapped__(source, "sm_90").ptx
        return b"code", None


@pytest.fixture
def played(monkeypatch):
    cupy = PlayedCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy.module)
    monkeypatch.delitem(sys.modules, "thinwire.comm.kernels.cuda.by_cupy", raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    cupy.by_cupy = importlib.import_module("thinwire.comm.kernels.cuda.by_cupy")
    yield cupy
    sys.modules.pop("thinwire.comm.kernels.cuda.by_cupy")


def test_what_cupy_compiles_takes_no_number_for_zero(played):
    """CuPy's RawModule adds -ftz=true: sums, and what is above zero, would not be those of a CPU."""
    try:
        launcher = played.by_cupy.CupyLauncher(SOURCE, GPU)
    except compiled.Missing as error:
        missing(str(error))
    assert "add.rn.f32" in played.ptx
    assert ".ftz" not in played.ptx
    x = torch.zeros(3)
    structure = np.zeros(1, [("a", "u4")])
    launcher.launch("add", 5, 64, (x, np.uint32(3), structure))
    name, grid, block, values, shared_bytes, stream = played.launched[0]
    assert (name, grid, block, shared_bytes, stream.ptr) == ("add", (5,), (launch.THREADS,), 64, 77)
    assert values == (np.uint64(x.data_ptr()), np.uint32(3), structure)
    assert isinstance(values[0], np.uint64)
