"""The parts, in the order of what is owed most, as far as minutes reach; what fails is kept, and the others go on."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu import chain, kernels, memory, nccl, steps
from benchmarks.gpu.clock import Measured
from benchmarks.gpu.echo import Echo
from benchmarks.provenance import ROOT

SIZES = (25_000_000, 340_000_000, 1_300_000_000)
TINY_SIZES = (4_096, 20_000, 1_300_000_000)
"""Of a rehearsal; the last one does not fit."""
HOST_SIZE, TINY_HOST_SIZE = 1_000_000, 2_048
"""So few values that the device is done before the host is: what a step costs the host."""
MEMORY_SIZE = 100_000_000
THREADS = (2, 4, 8)
PARTS = ("tests", "kernels", "steps", "host", "memory", "nccl", "threads")
TESTS = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
if find_spec("xdist"):
    TESTS += ["-n", "8"]
TESTS_S = 240.0


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure. seconds: about. family: what is as much slower than that. needs_bytes: of the device."""

    part: str
    what: str
    seconds: float
    call: Callable[[], Any]
    family: str = ""
    needs_bytes: int = 0


@dataclass(slots=True)
class Found:
    """parts: what each has measured. left_out, failed: what was not, and why."""

    parts: dict[str, list[Any]] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    spent_s: float = 0.0


def tasks(device: Measured) -> list[Task]:
    """All of them. Sizes rise, so that the first minutes have some of everything."""
    sizes = TINY_SIZES if device.rehearsal else SIZES
    found = [Task("tests", "pytest -m gpu", 90.0, lambda: tests(device))]
    for numel in sizes:
        found += _of_size(device, numel)
        if numel == sizes[0]:
            found += _of_host(device)
            found += _of_memory(device)
            found += _of_ranks(device, numel)
    return found


def _of_size(device: Measured, numel: int) -> list[Task]:
    name, room = f"{numel / 1e6:g} M values", numel / 25e6
    found = [
        Task(
            "kernels",
            f"each kernel, {name}",
            3 + 0.4 * room,
            lambda: kernels.measured(device, numel),
            "kernels",
            kernels.BYTES_A_VALUE * numel,
        )
    ]
    for one in (*steps.OURS, *steps.ALSO):
        what = f"{one.name} against fused Adam, {name}"
        call, needs = partial(_listed, partial(steps.measured, device, numel, one)), one.bytes_a_value * numel
        found.append(Task("steps", what, 4 + 0.6 * room, call, one.name, needs))
    needs = chain.BYTES_A_VALUE * numel
    what = f"DeepSpeed's chain against fused Adam, {name}"
    found.append(Task("steps", what, 4 + 0.6 * room, lambda: [steps.measured_chain(device, numel)], "chain", needs))
    return found


def _of_host(device: Measured) -> list[Task]:
    numel = TINY_HOST_SIZE if device.rehearsal else HOST_SIZE
    return [
        Task(
            "host",
            f"the host's time in a step of {one.name}, {numel / 1e6:g} M values",
            3.0,
            partial(_listed, partial(steps.measured, device, numel, one)),
        )
        for one in steps.OURS
    ]


def _of_memory(device: Measured) -> list[Task]:
    numel = TINY_HOST_SIZE if device.rehearsal else MEMORY_SIZE
    what, needs = f"bytes of memory, {numel / 1e6:g} M values", 2 * steps.OURS[1].bytes_a_value * numel
    return [Task("memory", what, 5.0, lambda: list(memory.measured(device, numel)), "", needs)]


def _of_ranks(device: Measured, numel: int) -> list[Task]:
    found = [Task("nccl", f"one rank, {numel / 1e6:g} M values", 20.0, lambda: _one_rank(device, numel))]
    for ranks in THREADS[:1] if device.rehearsal else THREADS:
        what, needs = f"{ranks} ranks as threads, {numel / 1e6:g} M values", steps.OURS[0].bytes_a_value * numel * ranks
        found.append(
            Task(
                "threads",
                what,
                5.0 * ranks,
                partial(_listed, partial(steps.measured_threads, device, numel, ranks)),
                "threads",
                needs,
            )
        )
    if not device.rehearsal:
        found.append(Task("nccl", "a rank on each GPU", 60.0, lambda: _all_gpus(numel)))
    return found


def _listed(call: Callable[[], Any]) -> list[Any]:
    return [call()]


def tests(device: Measured) -> list[dict[str, Any]]:
    """What pytest -m gpu says. Raises: RuntimeError where it could not run."""
    argv = [sys.executable, "-c", "print('0 passed')"] if device.rehearsal else TESTS
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TESTS_S)
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = lines[-1].strip("= ") if lines else ""
    if not re.search(r"\d+ (passed|failed|skipped|error)", summary):
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    command = "python " + " ".join(argv[1:])
    return [{"command": command, "exit": done.returncode, "summary": summary, "failures": failures}]


def _one_rank(device: Measured, numel: int) -> list[Any]:
    if device.rehearsal:
        with nccl.one_rank("gloo") as group:
            found = nccl.collectives(group, numel, torch.device("cpu"))
        return [*found, steps.measured(device, numel, steps.OURS[0], Echo(1))]
    with nccl.one_rank("nccl") as group:
        found = nccl.collectives(group, numel, device.device)
        return found + [steps.measured(device, numel, one, group) for one in steps.OURS]


def _all_gpus(numel: int) -> list[Any]:
    if torch.cuda.device_count() < 2:
        raise LeftOut("this machine has one GPU")
    return nccl.over_all_gpus(numel)


class LeftOut(Exception):
    """It cannot be measured here; the message says why."""


def run(
    device: Measured,
    minutes: float,
    say: Callable[[str], None],
    keep: Callable[[Found], None] = lambda found: None,
    only: Collection[str] = PARTS,
) -> Found:
    """Measure what fits. say: is told what is being done, and how long it may take. keep: is told what there is so far.
    only: these parts.

    Ctrl-C ends it, with what there is. So does nothing else: an error of the device, which all after it meet, is kept.
    """
    found, began = Found(), time.monotonic()
    known: dict[str, float] = {}  # how much slower than was thought, by family
    every = [task for task in tasks(device) if task.part in only]

    def left_s() -> float:
        return 60 * minutes - (time.monotonic() - began)

    for number, task in enumerate(every, 1):
        expected = task.seconds * known.get(task.family, 1.0)
        line, why = f"{number}/{len(every)} {task.part}: {task.what}", None
        interrupted = False
        try:
            if task.needs_bytes > (free := steps.SPARE * device.free_bytes()):
                raise LeftOut(
                    f"it needs {task.needs_bytes / 1e9:.1f} GB of the device's memory, {free / 1e9:.1f} are free"
                )
            if expected > left_s():
                raise LeftOut(
                    f"it takes about {expected:.0f} s, and {max(left_s(), 0):.0f} s are left of {minutes:g} minutes"
                )
            say(f"{line}, about {expected:.0f} s ({left_s():.0f} s left)")
            started = time.monotonic()
            found.parts.setdefault(task.part, []).extend(task.call())
            if task.family:
                known[task.family] = min(max((time.monotonic() - started) / task.seconds, 0.5), 3.0)
        except LeftOut as error:
            why = str(error)
        except torch.OutOfMemoryError as error:
            why = f"out of memory: {str(error).splitlines()[0]}"
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - one part is not to cost the others
            interrupted = isinstance(error, KeyboardInterrupt)
            words = f"{type(error).__name__}: {error}"
            found.failed.append({"part": task.part, "what": task.what, "error": words, "at": traceback.format_exc()})
            say(f"{line}: FAILED: {words.splitlines()[0][:200]}")
        if why is not None:
            found.left_out.append({"part": task.part, "what": task.what, "why": why})
            say(f"{line}: left out: {why}")
        if interrupted:
            found.left_out += [{"part": one.part, "what": one.what, "why": "interrupted"} for one in every[number:]]
        found.spent_s = time.monotonic() - began
        keep(found)
        if interrupted:
            break
    return found
