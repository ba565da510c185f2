"""The CUDA sources through NVIDIA's own compiler, without a GPU: what it makes of them, read off the machine code.

NVRTC compiles to PTX and to machine code for a named architecture; cuobjdump and nvdisasm print that. All three are
wheels of the extra `dev`. `python -m tests.emulation.compiled` prints the tables of docs/gpu-kernels.md.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from thinwire.comm.kernels.cuda import int8
from thinwire.comm.kernels.cuda import kernels as exchange
from thinwire.comm.kernels.cuda.launch import THREADS
from thinwire.optim.kernels import lamb, updates

ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "sm_120"]
OPTIONS = ["--std=c++17", "--fmad=false", "--ptxas-options=-v"]
SOURCES = {
    "exchange.cu": exchange.source,
    "updates.cu": updates.source,
    "lamb.cu": lamb.source,
    "int8.cu": int8.source,
}
WARP = 32
BLOCK, ROWS, RUN = 4096, 8, 256
"""Of the table: elements of a block of values, rows that a rank serves, and 8-bit values that share a scale."""
BYTES = {
    "encode_sum": 12 + 1 / 8,
    "encode_sum_narrow": 8 + 1 / 8,
    "encode_lerp": 12 + 2 / 8,
    "encode_lerp_narrow": 8 + 2 / 8,
    "encode_scaled": 12 + 2 / 8,
    "encode_first_advanced": 16 + 1 / 8,
    "encode_advanced": 20 + 1 / 8,
    "serve": 8 + (ROWS + 1) / 8,
    "serve_narrow": 4 + (ROWS + 1) / 8,
    "decode": 4 + 1 / 8,
    "narrow_all": 6,
    "descend": 12 + 1 / 8,
    "descend_narrow": 10 + 1 / 8,
    "adam": 28,
    "local": 32,
    "propose": 16,
    "first_local": 32,
    "first_proposal": 12,
    "receive": 20,
    "receive_rows": 16 + 1 / 8,
    "measure_rows": 16 + 2 / 8,
    "measure_floats": 24,
    "sum_rows": 16 + 2 / 8,
    "sum_floats": 24,
    "measure_gradient": 24,
    "move_rows": 12 + 1 / 8,
    "move_floats": 16,
    "encode_rows": 5 + 4 / RUN,
    "encode_left": 13 + 4 / RUN,
    "serve_rows": 9 + 4 / RUN + ROWS * (1 + 4 / RUN),
    "decode_rows": 5 + 4 / RUN,
}
"""That a kernel moves for an element of what it does, with gradients in float32."""
PER_THREAD = {"narrow_all": 4, "encode_rows": 8, "encode_left": 8, "serve_rows": 8, "decode_rows": 8}
"""Elements that a thread does which goes over its code once, with runs of RUN values."""
WRITTEN = {"measure_gradient": 2}
"""Vectors that an iteration writes, where it is not one."""
AGAIN = {"serve_rows": 2 * (ROWS / 4 - 1)}
"""How often such a thread goes over its longest loop again: there are two such loops, one for each four."""
AS_COUNTED = ("bool fits = run.end - run.begin <= HELD * FOUR * WARP;", "bool fits = true;")
"""What is replaced in a source before its instructions are counted: which way runs of RUN values go."""
DEVICES = {  # architecture, multiprocessors, GHz, TB/s of memory, as their data sheets say
    "A100": ("sm_80", 108, 1.41, 1.56),
    "H100": ("sm_90", 132, 1.76, 3.35),
    "H200": ("sm_90", 132, 1.76, 4.8),
    "B200": ("sm_100", 148, 1.85, 8.0),
    "RTX 5090": ("sm_120", 170, 2.41, 1.79),
}
SCHEDULERS = 4
"""Of a multiprocessor; each issues one instruction of one warp in a cycle."""


class Missing(Exception):
    """A wheel that this needs is not installed."""


@dataclass(frozen=True)
class Kernel:
    """What the compiler made of one kernel. code: its instructions in order, as (address, name, operands)."""

    name: str
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int
    code: tuple[tuple[int, str, str], ...]

    @property
    def operations(self) -> Counter[str]:
        """How many instructions there are of each name."""
        return Counter(name for _, name, _ in self.code)


@dataclass(frozen=True)
class Compiled:
    """One source for one architecture."""

    ptx: str
    kernels: dict[str, Kernel]


def inexact(ptx: str) -> set[str]:
    """Instructions on floats whose result IEEE 754 does not fix to the last bit: fused, approximate, flushing."""
    operation = re.compile(
        r"^\s+(?:@!?%\w+\s+)?((?:fma|mad|add|sub|mul|div|sqrt|rcp|rsqrt|ex2|lg2|sin|cos|tanh)\.[\w.]*f(?:16|32|64)\w*)",
        re.M,
    )
    return {one for one in operation.findall(ptx) if not re.fullmatch(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)", one)}


@cache
def compiled(source: str, architecture: str) -> Compiled:
    """Raises: Missing; ValueError with the compiler's words where it refuses the source."""
    library, program = _nvrtc(), ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}", *OPTIONS]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    refused = library.nvrtcCompileProgram(program, len(options), given)
    log = _text(program, "ProgramLog").decode(errors="replace").rstrip("\0")
    if refused:
        raise ValueError(f"NVRTC refuses it for {architecture}:\n{log}")
    code = _machine_code(_text(program, "CUBIN"))
    return Compiled(_text(program, "PTX").decode().rstrip("\0"), dict(_kernels(log, code)))


def counted(source: str, architecture: str) -> Compiled:
    """As compiled, without what runs of RUN values never do. Raises: as there."""
    return compiled(source.replace(*AS_COUNTED), architecture)


def instructions_an_element(kernel: Kernel) -> float:
    """That all threads together execute for one element of a block of values, at most.

    Counted by what each loop is for, which its memory operations tell: as many elements an iteration of a thread as it
    writes, where vectors are loaded; 4 where a block is kept; 64 a step of one warp of eight where its squares are
    added, 8 where those of three kinds are. What stands in no loop is counted once a thread, and what is jumped over
    too: gradients that are not aligned, dead elements. A thread that does a few elements and no more counts as one that
    goes over all of its code once. Left out is what the compiler puts behind the last exit, the
    slow paths of divisions and roots.
    """
    names = [name for _, name, _ in kernel.code]
    end = max(at for at, name in enumerate(names) if name == "EXIT")
    loops = [(a, b) for a, b in _loops(kernel) if "EXIT" not in names[a : b + 1]]
    if kernel.name in PER_THREAD:
        return (end + 1 + AGAIN.get(kernel.name, 0) * max(map(_length, loops), default=0)) / PER_THREAD[kernel.name]
    whole = [loop for loop in loops if not any(a < loop[0] and loop[1] < b for a, b in loops)]

    def count(loop: tuple[int, int], pattern: str) -> int:
        return sum(bool(re.fullmatch(pattern, name)) for name in names[loop[0] : loop[1] + 1])

    kept = [loop for loop in whole if count(loop, r"LDS\.128")]
    rest = [loop for loop in whole if loop not in kept]
    main = max(rest, key=lambda loop: (count(loop, r"(LDG|STG)\.E\.128"), count(loop, r"STS\.128")), default=None)
    total = 0.0
    if main:
        adds = [
            (a, b) for a, b in loops if main[0] < a and b < main[1] and count((a, b), "LDS") and count((a, b), "FADD")
        ]
        elements = 4 * (count(main, r"STG\.E\.128") // WRITTEN.get(kernel.name, 1) or count(main, r"STS\.128") or 2)
        total += (_length(main) - sum(map(_length, adds))) / elements
        if adds:
            unrolled = max(adds, key=lambda loop: count(loop, "LDS"))
            total += _length(unrolled) / count(unrolled, "LDS") / 8 * WARP
    keeping = [_length(loop) / (4 * count(loop, r"LDS\.128")) for loop in kept if count(loop, r"STG\.E\.(64|128)")]
    total += min(keeping, default=0.0)  # of the loop that is unrolled
    squares = [loop for loop in whole if loop != main and count(loop, "LDS") >= 8]
    total += sum(_length(loop) / (count(loop, "LDS") / 2) / 64 * WARP for loop in squares)
    barriers = [at for at, name in enumerate(names) if name.startswith("BAR.SYNC")]
    of_one_warp = range(barriers[-2], barriers[-1]) if squares else range(0)
    outside = [at for at in range(end + 1) if not any(a <= at <= b for a, b in whole)]
    once = sum(WARP / THREADS if at in of_one_warp else 1 for at in outside)
    return total + once * (THREADS / BLOCK if main else 1 / 8)


def _length(loop: tuple[int, int]) -> int:
    return loop[1] + 1 - loop[0]


def _loops(kernel: Kernel) -> list[tuple[int, int]]:
    """First and last instruction of each: a branch backwards."""
    at = {address: number for number, (address, _, _) in enumerate(kernel.code)}
    found = []
    for number, (address, name, operands) in enumerate(kernel.code):
        target = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        if target and int(target[1], 16) < address:
            found.append((at[int(target[1], 16)], number))
    return found


def _kernels(log: str, code: dict[str, tuple[tuple[int, str, str], ...]]) -> Iterator[tuple[str, Kernel]]:
    for part in log.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert frame
        assert used
        spilled = int(frame[2]) + int(frame[3])
        yield name, Kernel(name, int(used[1]), spilled, int(frame[1]), int(shared[1]) if shared else 0, code[name])


def _machine_code(cubin: bytes) -> dict[str, tuple[tuple[int, str, str], ...]]:
    tools = _file("nvidia-cuda-cuobjdump", "cuobjdump"), _file("nvidia-cuda-nvdisasm", "nvdisasm")
    path = os.pathsep.join([*(str(tool.parent) for tool in tools), os.environ["PATH"]])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools[0]), "-sass", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path})
    found = {}
    line = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
    for part in told.stdout.split("Function : ")[1:]:
        found[part.split()[0]] = tuple((int(at, 16), name, rest) for at, name, rest in line.findall(part))
    return found


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    out = ctypes.create_string_buffer(size.value)
    assert getattr(_nvrtc(), f"nvrtcGet{what}")(program, out) == 0
    return out.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(str(_file("nvidia-cuda-nvrtc", "libnvrtc.so.13")))


@cache
def _file(package: str, name: str) -> Path:
    try:
        found = [file.locate() for file in files(package) or [] if file.name == name]
    except PackageNotFoundError as error:
        raise Missing(f"needs {package}: pip install {package}") from error
    return Path(str(found[0]))


def _tables() -> None:
    print("| kernel | registers | instructions an element | bytes an element | 128-bit loads, stores |")
    print("|---|---|---|---|---|")
    for source in SOURCES.values():
        for name, kernel in compiled(source(), "sm_90").kernels.items():
            if name not in BYTES:
                continue
            registers = ", ".join(str(compiled(source(), one).kernels[name].registers) for one in ARCHITECTURES)
            wide = [kernel.operations[f"{one}.E.128"] for one in ("LDG", "STG")]
            count = instructions_an_element(counted(source(), "sm_90").kernels[name])
            print(f"| {name} | {registers} | {count:.1f} | {BYTES[name]:.3g} | {wide[0]}, {wide[1]} |")
    print(f"\n| kernel | {' | '.join(DEVICES)} |\n|---|{'---|' * len(DEVICES)}")
    for source in SOURCES.values():
        for name in compiled(source(), "sm_90").kernels:
            if name not in BYTES:
                continue
            shares = []
            for architecture, processors, ghz, terabytes in DEVICES.values():
                count = instructions_an_element(counted(source(), architecture).kernels[name])
                issue = count / 32 / (processors * SCHEDULERS * ghz * 1e9)
                shares.append(issue / (BYTES[name] / (terabytes * 1e12)))
            print(f"| {name} | {' | '.join(f'{100 * share:.0f} %' for share in shares)} |")


if __name__ == "__main__":
    _tables()
