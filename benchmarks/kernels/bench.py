"""Time the kernels against the rate at which this machine copies memory; write raw numbers and a table.

Rates are bytes of the floor (traffic.py) a second, so that a kernel that moves more than it must is not flattered; the
copy's are the bytes it reads and writes. The processor may move more: it reads the target's lines before it overwrites
them, in the copy for one of two arrays, so that a kernel that writes in place can be faster than the copy.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numba
import numpy as np
import torch

from benchmarks.kernels import table, traffic
from benchmarks.kernels.cases import CORES, NUM_ROWS, Case, cases
from benchmarks.provenance import provenance
from thinwire.comm.layout import DEFAULT_BLOCK
from thinwire.optim.kernels.compiled import compile_all

SIZES, REPEATS, SLOW_REPEATS = (1_000_000, 25_000_000), 9, 3
QUICK_SIZES, QUICK_REPEATS, QUICK_SLOW_REPEATS = (1_000_000, 4_000_000), 5, 1

Tell = Callable[[str, int, int], None]
"""What is measured now, how many rounds are done, of how many."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One case on one size. floor_bytes: a value. gb_per_s: floor bytes in the best time."""

    values: int
    kernel: str
    by: str
    threads: int
    floor_bytes: float
    seconds: list[float]
    best_s: float
    median_s: float
    gb_per_s: float
    share_of_copy: float


def run(quick: bool, out: Path, tell: Tell | None = None) -> Path:
    """Measure, write `kernels.json` and `README.md` into the folder `out`; returns the path of the first.

    Changes torch's number of threads while it runs. Raises: ProvenanceError where other code than the checkout's runs.
    """
    made_by = provenance()
    load_before = os.getloadavg()
    threads_before = torch.get_num_threads()
    sizes = QUICK_SIZES if quick else SIZES
    compile_all(torch.float32)
    try:
        timings = [timing for i, numel in enumerate(sizes) for timing in _measure(numel, quick, i, len(sizes), tell)]
    finally:
        torch.set_num_threads(threads_before)
    result = {
        "command": _command(),
        "quick": quick,
        "commit": made_by.commit,
        "versions": {**made_by.versions, "numba": numba.__version__, "numpy": np.__version__},
        "hardware": made_by.hardware,
        "load_average_before": list(load_before),
        "cores": CORES,
        "dtype": "float32",
        "block": DEFAULT_BLOCK,
        "rows_served": NUM_ROWS,
        "floor": {name: [asdict(a) for a in accesses] for name, accesses in traffic.floor(NUM_ROWS).items()},
        "timings": [asdict(timing) for timing in timings],
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "kernels.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    (out / "README.md").write_text(table.readme(result))
    return path


def _measure(numel: int, quick: bool, size: int, num_sizes: int, tell: Tell | None) -> list[Timing]:
    """In rounds, each case once a round, so that what disturbs the machine for a while disturbs all alike."""
    repeats, slow = (QUICK_REPEATS, QUICK_SLOW_REPEATS) if quick else (REPEATS, SLOW_REPEATS)
    listed = cases(numel)
    seconds: list[list[float]] = [[] for _ in listed]
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats + 1):
            if tell is not None:
                tell(f"{numel / 1e6:g} M values", size * (repeats + 1) + turn, num_sizes * (repeats + 1))
            for case, spent in zip(listed, seconds, strict=True):
                if not case.slow or turn <= slow:
                    spent.append(_timed(case))
    finally:
        gc.enable()
    if tell is not None:
        tell(f"{numel / 1e6:g} M values", (size + 1) * (repeats + 1), num_sizes * (repeats + 1))
    # The first round touches memory for the first time and starts threads.
    kept = [spent[1:] for spent in seconds]
    copy_s = {case.threads: min(spent) for case, spent in zip(listed, kept, strict=True) if case.kernel == "copy"}
    return [_timing(numel, case, spent, copy_s[case.threads]) for case, spent in zip(listed, kept, strict=True)]


def _timed(case: Case) -> float:
    if torch.get_num_threads() != case.threads:
        torch.set_num_threads(case.threads)
        torch.zeros(1 << 20).add_(1)  # starts them
    started = time.perf_counter()
    case.call()
    return time.perf_counter() - started


def _timing(numel: int, case: Case, seconds: list[float], copy_s: float) -> Timing:
    floor = traffic.floor(NUM_ROWS)
    floor_bytes, copy_bytes = traffic.total(floor[case.kernel]), traffic.total(floor["copy"])
    best = min(seconds)
    rate, copy_rate = floor_bytes * numel / best, copy_bytes * numel / copy_s
    return Timing(
        numel,
        case.kernel,
        case.by,
        case.threads,
        floor_bytes,
        seconds,
        best,
        median(seconds),
        rate / 1e9,
        rate / copy_rate,
    )


def _command() -> str:
    """As somebody has typed it, without the folders of this machine."""
    program = Path(sys.argv[0]).name
    words = ["python", "-m", "benchmarks.kernels"] if program == "__main__.py" else [program]
    return shlex.join([*words, *sys.argv[1:]])
