"""Launches through CuPy, on the stream that torch is on: a source is compiled with NVRTC, for the GPU that is there.

CuPy finds NVRTC in its own wheels (the extras cuda12 and cuda13): no CUDA need be installed. Importing this module
without CuPy raises ImportError.

Not through cupy.RawModule: that appends -ftz=true to the options it is given (CuPy 14, cuda/compiler.py), and of two
the last one counts. Then every operation takes a number below 1.2e-38 for zero, and no result is that of a CPU. It
would keep what it has compiled in a folder, too; here each process compiles again.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.cuda.launch import FORMS, THREADS, Argument

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false")
"""The sources name every rounding; these say it once more."""
SLOT = 16
"""An argument begins at a multiple of so many bytes, as any structure of C may need."""


class UnusableCupy(Exception):
    """CuPy is there and cannot be used: no driver, or a source that its NVRTC refuses."""


class CupyLauncher:
    """A Launcher for vectors of one GPU. Compiles at once. Raises: UnusableCupy."""

    def __init__(self, source: str, device: torch.device) -> None:
        if not cupy.cuda.is_available():
            raise UnusableCupy("CuPy finds no GPU: is it the wheel for this driver's CUDA?")
        self._device = device
        self._number = torch.cuda.current_device() if device.index is None else device.index
        self._module = cupy.cuda.Module()
        self._of_thread = threading.local()
        try:
            with torch.cuda.device(device):
                code, _ = cupy.cuda.compiler.compile_using_nvrtc(source, OPTIONS)
                self._module.load(code)
        except (cupy.cuda.compiler.CompileException, RuntimeError) as error:
            raise UnusableCupy(str(error)) from error

    def launch(
        self, kernel: str, blocks: int, shared_bytes: int, arguments: Sequence[Argument], reads: Sequence[Tensor] = ()
    ) -> None:
        """As Launcher.launch, on torch's current stream."""
        if torch._C._cuda_getDevice() != self._number:  # the public one takes 1 us more
            with torch.cuda.device(self._number):
                return self.launch(kernel, blocks, shared_bytes, arguments, reads)
        calls = self._calls()
        call = calls.get(kernel)
        if call is None:
            call = calls[kernel] = _Call(self._module.get_function(kernel), arguments)
        call.pack(arguments)
        call.start(blocks, shared_bytes, torch._C._cuda_getCurrentRawStream(self._number))
        return None

    def prepared(
        self, kernel: str, blocks: int, shared_bytes: int, arguments: Sequence[Argument], reads: Sequence[Tensor] = ()
    ) -> Callable[[], None]:
        """As Launcher.prepared: packed once, in memory of its own. Holds no tensor."""
        call, number = _Call(self._module.get_function(kernel), arguments), self._number
        call.pack(arguments)

        def start() -> None:
            if torch._C._cuda_getDevice() != number:
                with torch.cuda.device(number):
                    return start()
            self._calls()
            call.start(blocks, shared_bytes, torch._C._cuda_getCurrentRawStream(number))
            return None

        return start

    def _calls(self) -> dict[str, _Call]:
        """Of this thread, in which the driver's context is current from now on."""
        calls: dict[str, _Call] | None = getattr(self._of_thread, "calls", None)
        if calls is None:
            cupy.cuda.runtime.setDevice(self._number)
            calls = self._of_thread.calls = {}
        return calls


class _Call:
    """Launches of one kernel: its arguments are packed into memory that the driver copies them from.

    CuPy's own call makes an object of each argument, and of a structure a description: 16 to 36 us a launch on the
    host of an H200, where this takes 7 to 16. arguments: of any launch; those of others are of the same types.
    """

    def __init__(self, function: Any, arguments: Sequence[Argument]) -> None:
        self._function = function  # keeps the module
        self._values = list(map(_value_of, arguments))
        self._packed = struct.Struct("=" + "".join(map(_slot, arguments)))
        starts = [struct.calcsize("=" + "".join(map(_slot, arguments[:at]))) for at in range(len(arguments))]
        self._memory = ctypes.create_string_buffer(self._packed.size + SLOT)
        self._start = -ctypes.addressof(self._memory) % SLOT
        first = ctypes.addressof(self._memory) + self._start
        self._pointers = (ctypes.c_void_p * len(arguments))(*(first + at for at in starts))
        self._at = ctypes.addressof(self._pointers)

    def pack(self, arguments: Sequence[Argument]) -> None:
        """What start() launches with from now on."""
        values = [value(a) for value, a in zip(self._values, arguments, strict=True)]
        self._packed.pack_into(self._memory, self._start, *values)

    def start(self, blocks: int, shared_bytes: int, stream: int) -> None:
        """On this stream, of torch's current device, which is the module's."""
        cupy.cuda.driver.launchKernel(
            self._function.ptr, blocks, 1, 1, THREADS, 1, 1, shared_bytes, stream, self._at, 0
        )


def _value_of(argument: Argument) -> Callable[[Any], Any]:
    """What gives the value of such an argument, as struct takes it."""
    if isinstance(argument, Tensor):
        return Tensor.data_ptr
    return np.ndarray.tobytes if isinstance(argument, np.ndarray) else np.generic.item


def _slot(argument: Argument) -> str:
    """Of struct: the argument, and room to the next."""
    if isinstance(argument, Tensor):
        form, size = "Q", 8
    elif isinstance(argument, np.ndarray):
        form, size = f"{argument.nbytes}s", argument.nbytes
    else:
        form, size = FORMS[argument.dtype.str[1:]], argument.nbytes
    return f"{form}{-size % SLOT}x"
