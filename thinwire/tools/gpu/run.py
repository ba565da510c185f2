"""The command: makes the hosts, starts the ranks, keeps what they say, as far as the minutes reach."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from thinwire.tools.gpu.cases import NOTHING, RATES_MBIT, TITLES, UNSHAPED_MBIT, Pass, passes
from thinwire.tools.gpu.rank import Orders, argument
from thinwire.tools.gpu.table import write
from thinwire.tools.hardware import hardware
from thinwire.tools.lab import Lab, LabError, LabSpec, Line
from thinwire.tools.lab.lab import require_machine
from thinwire.tools.lab.spec import MAX_HOSTS, MAX_RATE_MBIT, MIN_RATE_MBIT
from thinwire.tools.marked_lines import told_in

NO_GPU = """\
torch sees no GPU, so there is nothing to measure here (torch {torch}, its CUDA: {cuda}).
  on a machine with an NVIDIA GPU   pip install "thinwire[optim,cuda12]", or cuda13, by the CUDA of torch
  to see whether it runs            {prog} --rehearse
"""
HELP = """\
Whole training steps of GPT-2 small (124 M values) over NCCL, on a machine with one NVIDIA GPU: its ranks are hosts,
each in a network namespace, joined by links of a given rate. DDP in fp32 and with its bf16 and PowerSGD hooks, FSDP2's
own replication, DeepSpeed's OneBitAdam where that is installed, and all of thinwire's optimizers, beside the same step
without any exchange. It needs root and iproute2, and nobody else on the GPU.

Results go into one file, with a table beside it. What the minutes do not reach is left out, and what fails is kept;
both are listed there. Exit codes: 0 all went well, 1 something failed, 2 it cannot run here.
"""
RATES_HELP = (
    "Mbit/s or unshaped, by commas, the most wanted first; "
    f"{','.join('unshaped' if rate == UNSHAPED_MBIT else f'{rate:g}' for rate in RATES_MBIT)} by default"
)
METHOD_S = 60.0
"""How long a method may take that was begun in time."""
START_S = 60.0
"""Until a rank has what it needs: torch, CUDA, its peers."""
REHEARSED_RATES = (1_000.0, 100.0)
SOON_S = 5.0
"""Nothing is begun where less is left."""

Say = Callable[[str], None]


@dataclass(slots=True)
class Found:
    """What there is so far. rows: of each method and pass."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)


Ranks = Callable[[Pass, Orders, float, Callable[[Line], None]], str | None]
"""Runs all ranks of a pass, at most so many seconds, and gives every line that they write; returns how they failed."""


def in_lab(one: Pass, orders: Orders, limit_s: float, on_line: Callable[[Line], None]) -> str | None:
    """On hosts of a lab. Raises: LabError where there can be none."""
    argv = [sys.executable, "-m", "thinwire.tools.gpu.rank", argument(orders)]
    with Lab(LabSpec(hosts=one.hosts, rate_mbit=one.rate_mbit, ranks_per_host=one.ranks_per_host)) as lab:
        result = lab.run(argv, time_limit_s=limit_s, on_line=on_line)
    if result.ok:
        return None
    rank = result.first_failed or 0
    what = f"not done after {result.wall_s:.0f} s" if result.timed_out else f"rank {rank} failed"
    return f"{what}, return codes {list(result.returncodes)}: {(result.stderr[rank] or result.stdout[rank])[-2000:]}"


def measure(
    todo: Sequence[Pass], load: str, device: str, minutes: float, say: Say, keep: Callable[[Found], None], ranks: Ranks
) -> Found:
    """All passes, in their order. A method that fails costs its pass a new start, and no other method.

    keep: is told what there is, whenever there is more.
    """
    found, until = Found(), time.monotonic() + 60 * minutes
    for one in todo:
        methods = list(dict.fromkeys([NOTHING, *one.methods]))
        while methods and (left_s := until - time.monotonic()) > SOON_S:
            say(f"{one.words()}: {', '.join(methods)} ({left_s:.0f} s left)")
            methods = _start(one, methods, Orders(tuple(methods), load, device, until), found, say, keep, ranks)
        if set(methods) - {NOTHING}:
            why = f"the {minutes:g} minutes were over"
            found.left_out += [{"where": one.words(), "method": name, "why": why} for name in methods]
            keep(found)
    return found


def _start(
    one: Pass,
    methods: list[str],
    orders: Orders,
    found: Found,
    say: Say,
    keep: Callable[[Found], None],
    ranks: Ranks,
) -> list[str]:
    """Start the ranks once. Returns the methods that are still to be done."""
    left, now, errors = list(methods), None, []

    def on_line(line: Line) -> None:
        nonlocal now
        _, told = told_in(line.text)
        if told is None:
            return
        kind, where = told.pop("kind"), {"where": one.words()}
        if kind == "machine":
            found.machine = told
        elif kind == "begin":
            now = told["method"]
        elif kind == "failed":
            errors.append(told | {"rank": line.rank})
        elif kind in ("row", "left_out"):
            left.remove(told["method"])
            now = None
            getattr(found, "rows" if kind == "row" else "left_out").append(where | told)
            say(f"{one.words()}: {TITLES[told['method']]}: {_short(told, orders)}")
            keep(found)

    limit_s = max(0.0, orders.until - time.monotonic()) + METHOD_S + START_S
    failed = ranks(one, orders, limit_s, on_line)
    if failed is None:
        return left
    error = errors[0] if errors else {"error": failed}
    if now is None:  # they did not come so far as a method, and would not the next time
        found.failed += [{"where": one.words(), "method": ", ".join(left), "error": failed, **error}]
        left = []
    else:
        left.remove(now)
        found.failed.append({"where": one.words(), "method": now, "said": failed, **error})
    say(f"{one.words()}: FAILED: {found.failed[-1]['method']}: {str(error['error']).splitlines()[0][:200]}")
    keep(found)
    return left


def _short(told: Mapping[str, Any], orders: Orders) -> str:
    if "why" in told:
        return f"left out: {told['why']}"
    sent = f"{told['wire_bytes'] / 1e6:.2f} MB"
    return f"{median(told['seconds']):.4f} s, {sent}" if orders.device == "cuda" else f"rehearsed, {sent}"


def main(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = "thinwire bench gpu",
    folder: Path = Path("runs/gpu-hosts"),
    made_by: Mapping[str, str] | None = None,
) -> int:
    """Measure and write. Returns the exit code. made_by: what a result says beside its versions, such as the commit."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=HELP, formatter_class=form)
    parser.add_argument("--minutes", type=_minutes, default=10.0, help="what may be spent; 10 by default")
    parser.add_argument("--rates", type=_rates, help=RATES_HELP)
    parser.add_argument(
        "--hosts", type=_hosts, default=2, help="ranks, each a host, where boxes have one; 2 by default"
    )
    parser.add_argument("--only", type=_methods, help=f"some of these methods, by commas: {', '.join(TITLES)}")
    parser.add_argument(
        "--rehearse", action="store_true", help="no GPU: all of it with a tiny model on processors; has no times"
    )
    parser.add_argument("--out", type=Path, help=f"folder of the result; {folder} by default")
    given = parser.parse_args(arguments)
    if not given.rehearse and not torch.cuda.is_available():
        sys.stderr.write(NO_GPU.format(torch=torch.__version__, cuda=torch.version.cuda, prog=prog))
        return 2
    try:
        require_machine()
    except LabError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    rates = given.rates or (REHEARSED_RATES if given.rehearse else RATES_MBIT)
    todo = passes(given.hosts, rates, given.only)
    load, device = ("tiny", "cpu") if given.rehearse else ("gpt2-small", "cuda")
    out = given.out or (Path("runs/gpu-hosts-rehearsal") if given.rehearse else folder)
    began = time.monotonic()
    head = {
        "rehearsal": given.rehearse,
        "command": shlex.join([*prog.split(), *(sys.argv[1:] if arguments is None else arguments)]),
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "minutes": given.minutes,
        "hardware": hardware(),
        "versions": _versions() | dict(made_by or {}),
        "load": load,
    }

    def say(line: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - began:4.0f} s] {line}\n")
        sys.stdout.flush()

    def keep(found: Found) -> None:
        """What there is so far, in case that this process does not come to its end: a GPU may hang."""
        written(found, finished=False)

    def written(found: Found, *, finished: bool) -> Path:
        spent_s = time.monotonic() - began
        told = {name: getattr(found, name) for name in ("machine", "rows", "left_out", "failed")}
        return write({**head, "finished": finished, "spent_s": spent_s, **told}, out)

    keep(Found())  # a folder that cannot be written is told now
    try:
        found = measure(todo, load, device, given.minutes, say, keep, in_lab)
    except LabError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    path = written(found, finished=True)
    sys.stdout.write(path.read_text(encoding="utf-8"))
    say(f"wrote {path}")
    return 1 if found.failed else 0


def _versions() -> dict[str, str]:
    """Of what a figure depends on, as far as it is installed."""
    wheels = ("thinwire", "torch", "cupy-cuda12x", "cupy-cuda13x", "deepspeed")
    found = {"python": sys.version.split()[0]}
    for wheel in wheels:
        try:
            found[wheel] = version(wheel)
        except PackageNotFoundError:
            continue
    return found


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and finite")
    return minutes


def _hosts(text: str) -> int:
    hosts = int(text)
    if not 2 <= hosts <= MAX_HOSTS:
        raise argparse.ArgumentTypeError(f"{text}: must be from 2 to {MAX_HOSTS}")
    return hosts


def _rates(text: str) -> list[float]:
    rates = [UNSHAPED_MBIT if word == "unshaped" else float(word) for word in text.split(",")]
    if wrong := [rate for rate in rates if not MIN_RATE_MBIT <= rate <= MAX_RATE_MBIT]:
        raise argparse.ArgumentTypeError(f"{wrong[0]:g}: must be from {MIN_RATE_MBIT:g} to {MAX_RATE_MBIT:g} Mbit/s")
    return rates


def _methods(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in TITLES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(TITLES)}")
    return names
