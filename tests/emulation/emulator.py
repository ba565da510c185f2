"""A GPU that is a compiler: CUDA sources built by g++ and run lane by lane, every access to memory checked.

cuda_on_host.h is the kernel language, lanes.cpp decides which lane runs next, checks.cpp looks at what lanes touch.
What is not emulated: memory order between blocks, atomics, tensor cores, copies in the background, the device's own
compiler, and speed (docs/gpu.md).
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from torch import Tensor

from tests.conftest import missing
from thinwire.comm.kernels.cuda.launch import FORMS, THREADS, Argument, Launcher

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / ".pytest_cache" / "emulation"
# Without -fno-tree-sra a load of 16 bytes becomes four, and nobody sees that it was not aligned.
CHECKED = ["-O1", "-fno-tree-sra", "-fsanitize=thread"]
FLAGS = ["-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wno-unknown-pragmas"]
KERNEL = re.compile(r'(?:^KERNEL |extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?)(?!__)(\w+)\(', re.M)
SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
TOLD_BYTES = 1000


class KernelFault(Exception):
    """What a kernel did that it must not: which access, which lane, which line."""


def kernels_in(source: str) -> list[str]:
    """Names of a source's kernels."""
    return KERNEL.findall(source)


class Emulator(Launcher):
    """A Launcher for vectors on the CPU. seed: of the order of blocks and lanes; 0: as they are numbered.

    resident: blocks that run at the same time, lane by lane. Raises from launch: KernelFault.
    """

    def __init__(self, source: str, seed: int = 0, resident: int = 2) -> None:
        self._library = _library(source)
        self.seed, self.resident = seed, resident
        self.launched: list[str] = []
        self.moved: list[tuple[str, int]] = []
        """Of each that has ended, bytes of memory: those that it read and those that it wrote, each once."""

    def launch(
        self, kernel: str, blocks: int, shared_bytes: int, arguments: Sequence[Argument], reads: Sequence[Tensor] = ()
    ) -> None:
        """As Launcher.launch; returns when the kernel has run."""
        self.launched.append(kernel)
        unknown = {a.dtype.str[1:] for a in arguments if isinstance(a, np.generic)} - FORMS.keys()
        assert not unknown, f"{kernel} is given {unknown}, which a launch on a GPU cannot pack"
        tensors = [a for a in arguments if isinstance(a, Tensor)] + list(reads)
        held = [np.array([a.data_ptr()], np.uint64) if isinstance(a, Tensor) else np.array([a]) for a in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(one.ctypes.data for one in held))
        addresses = (ctypes.c_uint64 * len(tensors))(*(t.data_ptr() for t in tensors))
        sizes = (ctypes.c_uint64 * len(tensors))(*(t.numel() * t.element_size() for t in tensors))
        told, moved = ctypes.create_string_buffer(TOLD_BYTES), (ctypes.c_uint64 * 2)()
        entry = getattr(self._library, f"kernel_{kernel}")
        entry.restype = ctypes.c_void_p
        numbers = ctypes.c_uint(blocks), ctypes.c_uint(THREADS), ctypes.c_uint(shared_bytes), ctypes.c_uint64(self.seed)
        spans = ctypes.c_uint(len(tensors)), addresses, sizes
        lane = ctypes.c_void_p(entry())
        if self._library.emulate(
            lane, pointers, *numbers, ctypes.c_uint(self.resident), *spans, moved, told, ctypes.c_uint(TOLD_BYTES)
        ):
            raise KernelFault(f"{kernel}: {told.value.decode()}")
        self.moved.append((kernel, sum(moved)))


def require_compiler() -> None:
    """Skip the test where there is no g++; in CI it fails."""
    if shutil.which("g++") is None:
        missing("needs g++: apt install g++")


@cache
def _library(source: str) -> ctypes.CDLL:
    require_compiler()
    text = SHARED.sub(r"\1* \2 = static_cast<\1*>(::host::shared_memory());", source)
    ends = "\n".join(f"HOST_KERNEL({name})" for name in kernels_in(source))
    whole = f'#include "cuda_on_host.h"\n#line 1 "kernels.cu"\n{text}\n{ends}\n'
    runtime = [_object(HERE / name) for name in ("lanes.cpp", "checks.cpp")]
    return ctypes.CDLL(str(_built(whole, ".so", [*CHECKED, "-shared"], runtime)))


def _object(path: Path) -> Path:
    return _built(path.read_text(encoding="utf-8"), ".o", ["-O2", "-c"], [])


def _built(text: str, ending: str, flags: list[str], linked: list[Path]) -> Path:
    """Compiled once: the name says of what."""
    headers = [(HERE / name).read_text(encoding="utf-8") for name in ("cuda_on_host.h", "lanes.h")]
    key = hashlib.sha256("\0".join([text, *FLAGS, *flags, *headers, *(p.name for p in linked)]).encode()).hexdigest()[
        :20
    ]
    out = BUILT / f"{key}{ending}"
    if out.exists():
        return out
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        source, made = Path(folder) / "source.cpp", Path(folder) / f"made{ending}"
        source.write_text(text, encoding="utf-8")
        if linked:  # our own checks stand where the sanitizer's runtime would: it is not linked
            part = Path(folder) / "part.o"
            compile_only = [flag for flag in flags if flag != "-shared"]
            _gxx([*FLAGS, *compile_only, f"-I{HERE}", "-c", str(source), "-o", str(part)])
            _gxx(["-shared", "-o", str(made), str(part), *map(str, linked)])
        else:
            _gxx([*FLAGS, *flags, f"-I{HERE}", str(source), "-o", str(made)])
        made.replace(out)
    return out


def _gxx(arguments: list[str]) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"g++ refuses it:\n{done.stderr[:3000]}")
