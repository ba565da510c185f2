"""Launches through CuPy, on the stream that torch is on: RawModule compiles a source with NVRTC, for the GPU it finds.

CuPy finds NVRTC in its own wheels (the extras cuda12 and cuda13): no CUDA need be installed. Importing this module
without CuPy raises ImportError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np
import torch
from torch import Tensor

from thinwire.comm.kernels.cuda.launch import THREADS, Argument

OPTIONS = ("--std=c++17", "--fmad=false")
"""The sources name every rounding; --fmad=false says it once more."""


class UnusableCupy(Exception):
    """CuPy is there and cannot be used: no driver, or a source that its NVRTC refuses."""


class CupyLauncher:
    """A Launcher for vectors of one GPU. Compiles at once. Raises: UnusableCupy."""

    def __init__(self, source: str, device: torch.device) -> None:
        if not cupy.cuda.is_available():
            raise UnusableCupy("CuPy finds no GPU: is it the wheel for this driver's CUDA?")
        self._device = device
        self._module = cupy.RawModule(code=source, options=OPTIONS)
        self._kernels: dict[str, Any] = {}
        self._streams: dict[int, Any] = {}
        try:
            with torch.cuda.device(device):
                self._module.compile()
        except (cupy.cuda.compiler.CompileException, RuntimeError) as error:
            raise UnusableCupy(str(error)) from error

    def launch(
        self, kernel: str, blocks: int, shared_bytes: int, arguments: Sequence[Argument], reads: Sequence[Tensor] = ()
    ) -> None:
        """As Launcher.launch, on torch's current stream."""
        found = self._kernels.get(kernel)
        if found is None:
            found = self._kernels[kernel] = self._module.get_function(kernel)
        values = tuple(np.uint64(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments)
        with torch.cuda.device(self._device), self._stream():
            found((blocks,), (THREADS,), values, shared_mem=shared_bytes)

    def _stream(self) -> Any:
        """torch's current stream, as CuPy's."""
        pointer = torch.cuda.current_stream(self._device).cuda_stream
        found = self._streams.get(pointer)
        if found is None:
            found = self._streams[pointer] = cupy.cuda.ExternalStream(pointer)
        return found
