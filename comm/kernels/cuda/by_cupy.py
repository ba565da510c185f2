"""Launches through CuPy, on the stream that torch is on: a source is compiled with NVRTC, for the GPU that is there.

CuPy finds NVRTC in its own wheels (the extras cuda12 and cuda13): no CUDA need be installed. Importing this module
without CuPy raises ImportError.

Not through cupy.RawModule: that appends -ftz=true to the options it is given (CuPy 14, cuda/compiler.py), and of two
the last one counts. Then every operation takes a number below 1.2e-38 for zero, and no result is that of a CPU. It
would keep what it has compiled in a folder, too; here each process compiles again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.cuda.launch import THREADS, Argument

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false")
"""The sources name every rounding; these say it once more."""


class UnusableCupy(Exception):
    """CuPy is there and cannot be used: no driver, or a source that its NVRTC refuses."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream of CUDA, as CuPy's functions take one."""

    ptr: int


class CupyLauncher:
    """A Launcher for vectors of one GPU. Compiles at once. Raises: UnusableCupy."""

    def __init__(self, source: str, device: torch.device) -> None:
        if not cupy.cuda.is_available():
            raise UnusableCupy("CuPy finds no GPU: is it the wheel for this driver's CUDA?")
        self._device = device
        self._module = cupy.cuda.Module()
        self._kernels: dict[str, Any] = {}
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
        values = tuple(np.uint64(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments)
        with torch.cuda.device(self._device):
            found = self._kernels.get(kernel)
            if found is None:
                found = self._kernels[kernel] = self._module.get_function(kernel)
            stream = _Stream(torch.cuda.current_stream(self._device).cuda_stream)
            found((blocks,), (THREADS,), values, shared_bytes, stream)
