"""The command: python -m benchmarks.one_rank. What a step of one rank costs beside torch's fused AdamW, and its memory.

    seconds   two copies of a model in one process, one stepped by AdamW(fused=True), one by ours, in turns; one thread.
              CPU time of step() alone, and of zero_grad, backward and step(): medians, and ratios of the means
    peak      bytes a parameter, each optimizer in a process of its own: the most resident (ru_maxrss) above what there
              was before the model, gradients and parameters included

A model is matrices of 2048 x 2048 and vectors, and its loss half the sum of their squares, so that backward is short.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.provenance import ROOT, provenance
from benchmarks.report import pipes
from thinwire.comm import SoloGroup
from thinwire.optim import Adam, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam, ZeroOneSchedule

RESULTS = ROOT / "benchmarks" / "results" / "one-rank"
SIDE = 2048
LEAD = 6
"""Steps before those that count: what is made when it is first needed is there then."""
EARLY, LATE = 10**6, 2
Make = Callable[[list[Tensor], bool], torch.optim.Optimizer]


def _zero_one(freeze: int, **schedule: Any) -> Make:
    def make(params: list[Tensor], overlap: bool) -> torch.optim.Optimizer:
        how = ZeroOneSchedule(dense_steps=1, **schedule)
        return ZeroOneAdam(params, group=SoloGroup(), overlap=overlap, var_freeze_step=freeze, schedule=how)

    return make


CASES: dict[str, Make] = {
    "Adam": lambda params, overlap: Adam(params, group=SoloGroup(), overlap=overlap),
    "1-bit Adam, warm-up": lambda params, overlap: OneBitAdam(params, group=SoloGroup(), overlap=overlap, warmup=EARLY),
    "1-bit Adam, compressed": lambda params, overlap: OneBitAdam(
        params, group=SoloGroup(), overlap=overlap, warmup=LATE
    ),
    "0/1 Adam, a sync each step, v moves": _zero_one(EARLY, var_update_scaler=1),
    "0/1 Adam, frozen, a sync each step": _zero_one(LATE, local_step_clipper=1),
    "0/1 Adam, frozen, a sync in four": _zero_one(LATE, local_step_scaler=1, local_step_clipper=4),
    "LAMB": lambda params, overlap: Lamb(params, group=SoloGroup(), overlap=overlap),
    "1-bit LAMB, warm-up": lambda params, overlap: OneBitLamb(params, group=SoloGroup(), overlap=overlap, warmup=EARLY),
    "1-bit LAMB, compressed": lambda params, overlap: OneBitLamb(
        params, group=SoloGroup(), overlap=overlap, warmup=LATE
    ),
}
"""Each as it is after LEAD steps."""
OVERLAPPED = ("Adam", "1-bit Adam, compressed")
"""Those that are measured with overlap=True too, which copies each gradient once in backward."""
FUSED = "torch AdamW, fused"

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def made_params(millions: int) -> list[Tensor]:
    """About so many values."""
    count = max(1, round(millions * 1e6 / SIDE**2))
    return [torch.randn(shape).mul_(0.02).requires_grad_() for _ in range(count) for shape in ((SIDE, SIDE), (SIDE,))]


def made_optimizer(name: str, params: list[Tensor], *, overlap: bool) -> torch.optim.Optimizer:
    """Of CASES, or torch's."""
    return torch.optim.AdamW(params, fused=True) if name == FUSED else CASES[name](params, overlap)


def turn(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> tuple[float, float]:
    """One step. CPU seconds of step(), and of all."""
    began = time.process_time()
    optimizer.zero_grad()
    torch.autograd.backward(torch.stack([param.square().sum() for param in params]).sum().mul(0.5))
    ready = time.process_time()
    optimizer.step()
    ended = time.process_time()
    return ended - ready, ended - began


def seconds(name: str, millions: int, turns: int, *, overlap: bool) -> dict[str, float]:
    """In turns with AdamW, in this process."""
    torch.set_num_threads(1)
    pairs = [(made_params(millions), which) for which in (FUSED, name)]
    both = [(made_optimizer(which, params, overlap=overlap), params) for params, which in pairs]
    for optimizer, params in both:
        for _ in range(LEAD):
            turn(optimizer, params)
    taken = [[turn(optimizer, params) for optimizer, params in both] for _ in range(turns)]
    found = {}
    for at, what in enumerate(("step", "all")):
        fused_s, ours_s = ([one[side][at] for one in taken] for side in (0, 1))
        found[f"{what}_fused_s"], found[f"{what}_s"] = statistics.median(fused_s), statistics.median(ours_s)
        # Where steps differ in kind the mean of ours counts.
        found[f"{what}_ratio"] = statistics.mean(ours_s) / statistics.mean(fused_s)
    return found


def peak(name: str, millions: int, steps: int, *, overlap: bool) -> float:
    """Bytes a parameter, of this process."""
    torch.set_num_threads(1)
    few = [torch.randn(64, 64).requires_grad_()]
    small = made_optimizer(name, few, overlap=overlap)
    for _ in range(LEAD + 4):
        turn(small, few)  # loops and what torch imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    params = made_params(millions)
    optimizer = made_optimizer(name, params, overlap=overlap)
    for _ in range(steps):
        turn(optimizer, params)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / sum(p.numel() for p in params)


@app.command()
def one(what: str, name: str, millions: int, count: int, overlap: bool) -> None:
    """Measure one case in this process, and print it as JSON."""
    found: Any = (
        seconds(name, millions, count, overlap=overlap)
        if what == "seconds"
        else peak(name, millions, count, overlap=overlap)
    )
    print(json.dumps(found))


@app.command()
def run(
    millions: Annotated[int, typer.Option(help="parameters")] = 100,
    turns: Annotated[int, typer.Option(help="steps of each that count")] = 12,
    only: Annotated[str, typer.Option(help="a part of the names of the cases")] = "",
    out: Annotated[Path, typer.Option(help="the folder of the results")] = RESULTS,
) -> None:
    """Measure all cases, and write results.json and README.md."""
    found: dict[str, Any] = {"millions": millions, "turns": turns, **_made_by(), "cases": []}
    fused = _asked("peak", FUSED, millions, LEAD + 4, overlap=False)
    for name in (one for one in CASES if only in one):
        for overlap in (False, True) if name in OVERLAPPED else (False,):
            case = {"name": name, "overlap": overlap, **_asked("seconds", name, millions, turns, overlap=overlap)}
            case |= {"peak_fused": fused, "peak": _asked("peak", name, millions, LEAD + 4, overlap=overlap)}
            case["peak_ratio"] = case["peak"] / fused
            found["cases"].append(case)
            print(json.dumps(case), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "README.md").write_text(_page(found))


def _made_by() -> dict[str, Any]:
    by = provenance()
    return {"commit": by.commit, "versions": by.versions, "hardware": by.hardware}


def _asked(what: str, name: str, millions: int, count: int, *, overlap: bool) -> Any:
    command = [sys.executable, "-m", "benchmarks.one_rank", "one", what, name, str(millions), str(count), str(overlap)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _page(found: dict[str, Any]) -> str:
    columns = ["", "overlap", "step, s", "fused AdamW, s", "ratio", "with backward, ratio", "peak, bytes", "ratio"]
    rows = [
        (
            case["name"],
            "yes" if case["overlap"] else "no",
            f"{case['step_s']:.3f}",
            f"{case['step_fused_s']:.3f}",
            f"{case['step_ratio']:.2f}",
            f"{case['all_ratio']:.2f}",
            f"{case['peak']:.1f}",
            f"{case['peak_ratio']:.2f}",
        )
        for case in found["cases"]
    ]
    about = (
        f"{found['millions']} million parameters in float32, one thread, {found['turns']} steps of each in turns; "
        f"commit {found['commit']}, torch {found['versions']['torch']}, {found['hardware']}. CPU seconds, medians, and "
        "ratios of means; `peak` is in bytes a parameter, with parameter and gradient, of AdamW "
        f"{found['cases'][0]['peak_fused']:.1f}. `python -m benchmarks.one_rank run`."
    )
    return "\n".join(["# One rank beside torch's fused AdamW", "", about, "", *pipes(columns, rows), ""])


if __name__ == "__main__":
    app()
