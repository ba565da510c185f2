"""What CuPy is asked for, seen by one that is played: NVIDIA's compiler is the true one, there is no GPU."""

import ctypes
import importlib
import struct
import sys
import threading
from contextlib import contextmanager
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
        self.ptx, self.launched, self.named, self.prepared, self.sizes = "", [], [], [], []
        played = self

        class Module:
            def load(self, code):
                assert code == b"code"

            def get_function(self, name):
                played.named.append(name)
                return SimpleNamespace(ptr=len(played.named) - 1)

        class RawModule(Module):
            def __init__(self, *, code, options):
                self.given = code, (*options, "-ftz=true")

            def compile(self):
                played.compile(*self.given)

        compiler = SimpleNamespace(compile_using_nvrtc=self.compile, CompileException=ValueError)
        self.module = ModuleType("cupy")
        self.module.RawModule = RawModule
        runtime = SimpleNamespace(setDevice=lambda number: self.prepared.append((threading.get_ident(), number)))
        driver = SimpleNamespace(launchKernel=self.launch)
        self.module.cuda = SimpleNamespace(
            is_available=lambda: True, compiler=compiler, Module=Module, runtime=runtime, driver=driver
        )

    def launch(self, function, *given):
        """As the driver: a pointer for each argument, to so many bytes as the kernel takes."""
        *shape, pointers, extra = given
        assert extra == 0
        at = (ctypes.c_void_p * len(self.sizes)).from_address(pointers)
        assert all(address % 16 == 0 for address in at)
        arguments = [ctypes.string_at(address, size) for address, size in zip(at, self.sizes, strict=True)]
        self.launched.append((self.named[function], tuple(shape), arguments))

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
    cupy.current = 1

    @contextmanager
    def device(wanted):
        before, cupy.current = (
            cupy.current,
            torch.device("cuda", wanted).index if isinstance(wanted, int) else wanted.index,
        )
        yield
        cupy.current = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: cupy.current, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda number: 77 + number, raising=False)
    cupy.by_cupy = importlib.import_module("thinwire.comm.kernels.cuda.by_cupy")
    yield cupy
    sys.modules.pop("thinwire.comm.kernels.cuda.by_cupy")


def test_what_cupy_compiles_takes_no_number_for_zero(played):
    """CuPy's RawModule adds -ftz=true: sums, and what is above zero, would not be those of a CPU."""
    try:
        played.by_cupy.CupyLauncher(SOURCE, GPU)
    except compiled.Missing as error:
        missing(str(error))
    assert "add.rn.f32" in played.ptx
    assert ".ftz" not in played.ptx


@pytest.fixture
def launcher(played, monkeypatch):
    monkeypatch.setattr(played, "compile", lambda source, options: (b"code", None))
    played.module.cuda.compiler.compile_using_nvrtc = played.compile
    return played.by_cupy.CupyLauncher(SOURCE, GPU)


def test_arguments_go_to_the_driver_as_the_bytes_of_c(played, launcher):
    structure = np.array([(7, 2.5)], [("a", "u8"), ("b", "f4")])
    played.sizes = [8, 4, 8, 4, 8, 12]
    for value in (3, 2**32 - 1):
        x = torch.zeros(value % 5 + 1)
        given = x, np.uint32(value), np.int64(-value), np.float32(value / 7), np.float64(value / 7), structure
        launcher.launch("add", value % 9 + 1, 64, given)
        name, shape, arguments = played.launched.pop()
        assert (name, shape) == ("add", (value % 9 + 1, 1, 1, launch.THREADS, 1, 1, 64, 78))
        numbers = (
            struct.pack("=I", value),
            struct.pack("=q", -value),
            struct.pack("=fd", np.float32(value / 7), value / 7),
        )
        numbers = *numbers[:2], numbers[2][:4], numbers[2][4:]
        assert arguments == [struct.pack("=Q", x.data_ptr()), *numbers, structure.tobytes()]
    assert played.named == ["add"]


def test_every_thread_has_memory_of_its_own_for_arguments_and_the_driver_s_context(played, launcher):
    played.sizes = [4]
    threads = [threading.Thread(target=launcher.launch, args=("add", 1, 0, (np.uint32(k),))) for k in range(3)]
    for one in threads:
        one.start()
        one.join()
    assert [arguments for _, _, arguments in played.launched] == [[struct.pack("=I", k)] for k in range(3)]
    assert played.named == ["add"] * 3
    assert [number for _, number in played.prepared] == [1, 1, 1]


def test_a_launch_that_was_prepared_is_that_of_then_whatever_is_launched_meanwhile(played, launcher):
    played.sizes, x = [8, 4], torch.zeros(3)
    start = launcher.prepared("add", 2, 64, (x, np.uint32(7)))
    assert not played.launched
    launcher.launch("add", 1, 0, (torch.zeros(5), np.uint32(8)))
    other = launcher.prepared("add", 3, 0, (x, np.uint32(9)))
    played.launched.clear()
    elsewhere = threading.Thread(target=start)
    start()
    other()
    elsewhere.start()
    elsewhere.join()
    told = [(shape[0], shape[6], struct.unpack("=I", given[1])[0]) for _, shape, given in played.launched]
    assert told == [(2, 64, 7), (3, 0, 9), (2, 64, 7)]
    assert {given[0] for _, _, given in played.launched} == {struct.pack("=Q", x.data_ptr())}
    assert len({thread for thread, _ in played.prepared}) == 2  # each has the driver's context


def test_a_launch_that_was_prepared_is_on_the_vectors_own_gpu(played, launcher):
    played.sizes = [4]
    start = launcher.prepared("add", 1, 0, (np.uint32(5),))
    played.current = 0
    start()
    assert (played.launched[0][1][-1], played.current) == (78, 0)


def test_a_launch_from_where_another_gpu_is_current_is_on_the_vectors_own(played, launcher):
    played.sizes, played.current = [4], 0
    launcher.launch("add", 1, 0, (np.uint32(5),))
    assert played.launched[0][1][-1] == 78
    assert played.current == 0
