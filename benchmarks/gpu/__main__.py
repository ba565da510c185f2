"""The command: python -m benchmarks.gpu, from the root of the repository."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu import kernels, machine, report
from benchmarks.gpu.clock import Gpu, Measured, Rehearsal
from benchmarks.gpu.run import PARTS, Found, run
from benchmarks.provenance import ROOT, ProvenanceError, provenance

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
REHEARSED = ROOT / "runs" / "gpu-rehearsal"
NO_GPU = """\
torch sees no GPU, so there is nothing to measure here (torch {torch}, its CUDA: {cuda}).
  on a machine with an NVIDIA GPU   pip install -e ".[optim,cuda12]" (or cuda13, by the CUDA that torch was built with)
                                    pip install pytest pytest-timeout hypothesis, for the tests
  to see whether the benchmark runs python -m benchmarks.gpu --rehearse
"""
HELP = """\
What only a GPU can show, in one command. It needs an NVIDIA GPU, thinwire[cuda12] or [cuda13], and nobody else on
the device. It runs the tests of tests/gpu; times each kernel against a copy of the device's memory; times whole
compressed steps against torch's fused Adam and against DeepSpeed's chain of passes, at 25 M, 340 M and 1.3 B values;
counts launches and the host's time in a step; and tries NCCL with one rank, with many ranks as threads, and with a
rank on each GPU.

Results go into one file, gpu.json, with a table beside it, README.md. What does not fit into the minutes or the memory
is left out, and what fails is kept; both are listed there. Exit codes: 0 all went well, 1 something failed, 2 no GPU.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write. Returns the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=HELP, formatter_class=form)
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="what may be spent; 10 by default")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="no GPU: the same code at tiny sizes on a made-up device with emulated kernels (needs g++, pytest); the "
        f"result says {report.REHEARSAL} and has no times; into runs/gpu-rehearsal",
    )
    parser.add_argument(
        "--only", type=_parts, default=PARTS, help=f"some of {','.join(PARTS)}, by commas; all by default"
    )
    parser.add_argument("--out", type=Path, help="folder of the result; benchmarks/results/gpu by default")
    given = parser.parse_args(arguments)
    if not given.rehearse and not torch.cuda.is_available():
        print(NO_GPU.format(torch=torch.__version__, cuda=torch.version.cuda), file=sys.stderr, end="")
        return 2
    try:
        made_by = provenance()
    except ProvenanceError as error:
        print(error, file=sys.stderr)
        return 2
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", flush=True)

    told = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    try:
        device: Measured = Rehearsal() if given.rehearse else Gpu()
    except ModuleNotFoundError as error:
        print(f"{error}: a rehearsal needs what tests need: make .venv/.dev, or pip install pytest", file=sys.stderr)
        return 2
    words = sys.argv[1:] if arguments is None else arguments
    head = {
        "rehearsal": device.rehearsal,
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *words]),
        "commit": made_by.commit,
        "began": told,
        "minutes": given.minutes,
        "hardware": made_by.hardware,
        "gpus": [] if device.rehearsal else machine.gpus(),
        "nvidia_smi": [] if device.rehearsal else machine.smi(),
        "versions": {**made_by.versions, **machine.versions()},
        "kernels": kernels.kind(device.device),
    }
    folder = given.out or (REHEARSED if given.rehearse else RESULTS)

    def keep(found: Found) -> None:
        """What there is so far, in case that this process does not come to its end: a GPU may hang."""
        report.write({**head, "finished": False, **asdict(found)}, folder)

    keep(Found())  # a folder that cannot be written is told now, not in ten minutes
    found = run(device, given.minutes, say, keep, given.only)
    result = {**head, "finished": True, **asdict(found)}
    path = report.write(result, folder)
    print(report.table(report.shown(result)))
    say(f"wrote {path}")
    return 1 if found.failed or any(one["exit"] for one in found.parts.get("tests", [])) else 0


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and finite")
    return minutes


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := [one for one in parts if one not in PARTS]:
        raise argparse.ArgumentTypeError(f"{','.join(unknown)}: must be of {','.join(PARTS)}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
