"""The command: python -m benchmarks.local_steps. Where do local steps in one bit end beside a dense exchange?

A GPT on the bytes of a text, four ranks as threads, equal tokens. Every rank makes the steps that it would make with a
dense exchange; every H-th is followed by the exchange of what parameters have moved by. --size: a small GPT, one of
10.9 M parameters, or two layers of that for a search of rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.defaults.runs import CURVE, DECAY, train_job
from benchmarks.defaults.tasks import DEFAULTS_TASKS, DefaultsTask
from benchmarks.paired import interval, judge
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import made_by, pipes
from benchmarks.turns import run_in_turns
from thinwire.comm import SoloGroup
from thinwire.comm.codecs import SignCodec
from thinwire.contract.files import write_whole
from thinwire.optim import Adam, LocalSteps, Muon, OneBitMuon, OuterSGD

RESULTS = ROOT / "benchmarks" / "results" / "local-steps"
RANKS = 4
STEPS = 1024
"""Whole rounds of all that is run: what ends a round early is not counted."""
RATES = {"adamw": 2e-3, "muon": 0.024}
"""The dense AdamW's of benchmarks/defaults, and dense Muon's best in results/muon. Of another size: --lr."""
_WIDE = {"name": "gpt", "width": 384, "heads": 6, "context": 64}
SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    "10m": {"global_batch": 8, "recipe": {**_WIDE, "layers": 6}},
    "10m-shallow": {"global_batch": 8, "recipe": {**_WIDE, "layers": 2}},
}
"""What differs from the job of benchmarks/defaults' GPT. Shallow: as wide, for rates, which go by width."""


def _inner(name: str, params: Any, lr: float) -> torch.optim.Optimizer:
    params = list(params)
    if name == "muon":
        return Muon(params, lr=lr, weight_decay=DECAY, group=SoloGroup())
    return torch.optim.AdamW(params, lr=lr, weight_decay=DECAY)


def _local(name: str, lr: float, every: int, outer: OuterSGD, params: Any, **where: Any) -> LocalSteps:
    return LocalSteps(_inner(name, params, lr), every=every, outer=outer, **where)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: its peak rate, and of (parameters, group, model) the optimizer."""

    lr: float
    make: Callable[..., Any]


def cases(inner: str, lr: float) -> dict[str, Case]:
    """What is run for this inner optimizer at this rate, by name."""
    nesterov, half, mean = OuterSGD(0.7, 0.9), OuterSGD(1.0, 0.5), OuterSGD(1.0, 0.0)
    dense = Case(lr, partial(Muon if inner == "muon" else Adam, lr=lr, weight_decay=DECAY))
    one_bit = {"one bit a step": Case(lr, partial(OneBitMuon, lr=lr, weight_decay=DECAY))} if inner == "muon" else {}
    local = {
        f"local steps, H = {every}, {said}": Case(rate, partial(_local, inner, rate, every, outer, codec=codec))
        for every, outer, said, rate, codec in (
            (32, nesterov, "Nesterov 0.7, 0.9", lr, "sign"),
            (128, nesterov, "Nesterov 0.7, 0.9", lr, "sign"),
            (32, half, "Nesterov 1, 0.5", lr, "sign"),
            (128, half, "Nesterov 1, 0.5", lr, "sign"),
            (32, mean, "the mean", lr, "sign"),
            (128, mean, "the mean", lr, "sign"),
            (16, mean, "the mean", lr, "sign"),
            (32, mean, "the mean, twice the rate", 2 * lr, "sign"),
            (32, mean, "the mean, 4 times the rate", 4 * lr, "sign"),
            (32, mean, "the mean, scales of the 1-norm", lr, SignCodec(scale="l1")),
            (32, mean, "the mean, a scale for 64 values", lr, SignCodec(block=64)),
            (32, mean, "the mean, a scale of the 1-norm for 64 values", lr, SignCodec(block=64, scale="l1")),
            (32, mean, "the mean, 8 bits", lr, "int8"),
            (128, mean, "the mean, 8 bits", lr, "int8"),
            (32, mean, "the mean, 4 bits", lr, "int4"),
            (64, mean, "the mean, 4 bits", lr, "int4"),
        )
    }
    in_parts = {
        f"local steps, H = 32, the mean, {said}parts = {parts}": Case(
            lr, partial(_local, inner, lr, 32, mean, parts=parts, overlap=bool(said))
        )
        for said, parts in (("", 1), ("", 2), ("", 4), ("late, ", 1), ("late, ", 4))
    }
    alone = {"a rank alone": Case(lr, lambda params, group, model: dense.make(params, group=SoloGroup()))}
    return {"dense": dense, **alone, **one_bit, **local, **in_parts}


def task_of(size: str) -> DefaultsTask:
    """The job that is trained, of this size."""
    task = DEFAULTS_TASKS["gpt"]
    return replace(task, job={**task.job, **SIZES[size]})


def main(
    inner: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    steps: Annotated[int, typer.Option(min=128, help="Of each run, a multiple of 128.")] = STEPS,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    only: Annotated[str, typer.Option(help="Part of the names of what is run.")] = "",
    name: Annotated[list[str] | None, typer.Option(help="Whole names of what is run.")] = None,
    size: Annotated[str, typer.Option(help=f"{', '.join(SIZES)}.")] = "small",
    lr: Annotated[float | None, typer.Option(help="Peak rate, in place of the small GPT's.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results, of one size. [default: results/local-steps, by size]")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Folder for what each run has trained.")] = None,
) -> None:
    """Run all of one inner optimizer, and after each write the table of all that are there. A minute of a core each.

    Raises: BadParameter for steps that are no whole rounds, an inner optimizer, a size or a name that there is not.
    """
    if steps % 128:
        raise typer.BadParameter(f"{steps}: must be a multiple of 128, the longest round")
    for said, value, known in (("inner", inner, RATES), ("size", size, SIZES)):
        if value not in known:
            raise typer.BadParameter(f"--{said} {value!r}: must be one of {', '.join(known)}")
    if lr is not None and lr <= 0:
        raise typer.BadParameter(f"--lr {lr:g}: must be above 0")
    every = cases(inner, lr or RATES[inner])
    if unknown := [one for one in name or () if one not in every]:
        raise typer.BadParameter(f"--name {unknown[0]!r}: must be one of these: {'; '.join(every)}")
    if not (chosen := {one: case for one, case in every.items() if only in one and (not name or one in name)}):
        raise typer.BadParameter(f"--only {only!r}: must be part of one of these: {'; '.join(every)}")
    torch.set_num_threads(1)
    task, by = task_of(size), provenance()
    out = out or (RESULTS if size == "small" else RESULTS / size)
    out.mkdir(parents=True, exist_ok=True)
    for method, case in chosen.items():
        path = out / f"{_file(inner, seed, method)}{f'-at-{lr:g}' if lr else ''}.json"
        if path.exists():
            continue
        spec = task.spec({"name": "adam", "lr": case.lr}, seed, steps, RANKS)
        kept = _Kept(case.make)
        seen = run_in_turns(RANKS, partial(_train, spec, kept), 24 * 3600.0)[0]
        assert spec.recipe.name == "gpt"
        one = {
            "inner": inner,
            "method": method,
            "seed": seed,
            "lr": case.lr,
            "steps": spec.steps,
            "parameters": seen.numel,
            "windows": spec.global_batch // RANKS,
            "context": spec.recipe.context,
            "curve": [round(value, 5) for value in seen.curve],
            "diverged": seen.diverged,
            "sent_bytes": sum(seen.sent.values()),
            "fp32_bytes": seen.fp32_bytes(RANKS, spec.steps),
        }
        if weights is not None:
            weights.mkdir(parents=True, exist_ok=True)
            torch.save(kept.model.state_dict(), weights / f"{path.stem}.pt")
        write_whole(path, json.dumps({**asdict(by), **one}, indent=1) + "\n")
        typer.echo(f"{inner} {method}: {one['curve'][-1:]}, {one['fp32_bytes'] / max(one['sent_bytes'], 1):.0f} times")
        (out / "README.md").write_text(_markdown([json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]))


def _file(inner: str, seed: int, method: str) -> str:
    return f"{inner}-{seed}-{method.replace(', ', '-').replace(' ', '_').replace('=', '')}"


@dataclass(slots=True)
class _Kept:
    """Makes optimizers, and keeps rank 0's model."""

    make: Callable[..., Any]
    model: Any = None

    def __call__(self, params: Any, group: Any, model: Any) -> Any:
        if group.rank == 0:
            self.model = model
        return self.make(params, group=group, model=model)


def _train(spec: Any, make: Callable[..., Any], group: Any) -> Any:
    return train_job(spec, group, max(128, spec.steps // CURVE), make=make)


def _verdicts(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Of each method with several seeds beside dense AdamW of the same ones, a line by the rule of paired.py."""
    runs = [one for one in runs if not one["diverged"]]
    beside = ("adamw", "dense")
    dense: dict[int, float] = {}
    for one in (one for one in runs if (one["inner"], one["method"]) == beside):
        dense[one["seed"]] = min(one["curve"][-1], dense.get(one["seed"], inf))
    worse: dict[tuple[str, str, float], list[float]] = {}
    for one in runs:
        if one["seed"] in dense and (one["inner"], one["method"]) != beside:
            of = worse.setdefault((one["inner"], one["method"], one["lr"]), [])
            of.append(100 * (one["curve"][-1] / dense[one["seed"]] - 1))
    lines = []
    for (inner, method, lr), of in sorted(worse.items()):
        if len(of) > 1:
            by = interval(of)
            lines.append(
                f"* {inner}, {method}, rate {lr:g}, {len(of)} seeds: {by.mean:+.1f} +- {by.half:.1f} % beside dense "
                f"AdamW: {judge(by)}"
            )
    return [*lines, ""] if lines else []


def _markdown(runs: Sequence[dict[str, Any]]) -> str:
    ends: dict[tuple[str, int], float] = {}
    for one in runs:
        if one["method"] == "dense" and not one["diverged"]:
            key = one["inner"], one["seed"]
            ends[key] = min(one["curve"][-1], ends.get(key, inf))

    def beside(one: dict[str, Any]) -> str:
        dense = ends.get((one["inner"], one["seed"]), ends.get(("adamw", one["seed"])))
        return "-" if dense is None or one["diverged"] else f"{100 * (one['curve'][-1] / dense - 1):+.1f} %"

    rows = [
        [
            one["inner"],
            one["method"],
            str(one["seed"]),
            f"{one['lr']:g}",
            one["diverged"] or f"{one['curve'][-1]:.4f}",
            beside(one),
            f"{one['fp32_bytes'] / one['sent_bytes']:.0f}" if one["sent_bytes"] else "-",
        ]
        for one in sorted(runs, key=lambda one: (one["inner"], one["seed"], one["method"] != "dense", one["method"]))
    ]
    head = ["inner", "method", "seed", "rate", "validation loss", "beside dense", "fp32's bytes / its"]
    first = runs[0]
    return "\n".join(
        [
            "# Local steps in one bit",
            "",
            "Written by `python -m benchmarks.local_steps`; do not edit.",
            "",
            f"Validation loss, nats, after {first['steps']} steps of a GPT of {first['parameters']:,} parameters on "
            f"the bytes of a text; {RANKS} ranks of {first.get('windows', 8)} windows of {first.get('context', 64)} "
            "bytes, equal tokens. Local steps are in signs unless the method says otherwise. Beside dense: the same "
            "inner optimizer's, at its best rate here, or where there is none AdamW's. "
            "fp32's bytes: of a ring all-reduce in every step; its: all that rank 0 "
            "sent in training steps, comparisons of replicas among it; construction and the save at the end are in "
            "neither. One seed a row: differences of a few per cent mean nothing. Rows that lose are printed as they "
            "are.",
            "",
            *pipes(head, rows),
            "",
            *_verdicts(runs),
            f"Made {made_by(first)}.",
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
