"""The command: python -m benchmarks.cada. How many gradients does CADA leave out at Adam's accuracy?

The digits of scikit-learn (8 x 8 pixels) by label: each of ten ranks, which are threads, has the images of one digit
and no other. Steps, batch, rate and settings are those of the files of Chen et al. 2020 (MNIST by label, 10 workers).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.provenance import ROOT, provenance
from benchmarks.report import made_by, pipes
from benchmarks.turns import Turns, run_in_turns
from thinwire.contract.files import write_whole
from thinwire.optim import CADA, Adam, FlatOptimizer

RESULTS = ROOT / "benchmarks" / "results" / "cada"
RANKS, STEPS, BATCH, RATE = 10, 10_000, 12, 5e-4
LOOKS = 10
"""How often a run is evaluated."""
SHOWN = (0, 2, 4)
"""Which looks the table has, beside the last."""
PAPERS = {"Adam": (99_910, 99.08), "CADA1": (39_583, 98.99), "CADA2": (18_361, 98.2)}
"""Uploads and accuracy (%) after 10,000 steps on MNIST by label, of the files of the paper's authors."""

Make = Callable[..., FlatOptimizer[Any]]


def cases() -> dict[str, Make]:
    """Every optimizer by its name in the table. c: the threshold."""
    rules = {
        f"CADA{rule}{'' if c == 1 else f', c = {c:g}'}": partial(CADA, lr=RATE, rule=rule, threshold=c)
        for rule in (1, 2)
        for c in (1.0, 10.0, 100.0)
    }
    return {"Adam": partial(Adam, lr=RATE), "AMSGrad": partial(CADA, lr=RATE, max_age=0), **rules}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images float[n, 1, 8, 8] and labels, to train with; and those of every fifth image, to test with."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images_n, labels_n = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(labels_n), generator=torch.Generator().manual_seed(0))
    images_n, labels_n = images_n[order], labels_n[order]
    tests = torch.arange(len(labels_n)) % 5 == 0
    return images_n[~tests], labels_n[~tests], images_n[tests], labels_n[tests]


def network(seed: int) -> nn.Module:
    """38,282 parameters: two convolutions and a layer that is fully connected."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def train(make: Make, steps: int, seed: int, group: Turns) -> dict[str, Any]:
    """One run on one rank. Its accuracy is that on all digits, %."""
    images_n, labels_n, test_n, test_labels_n = digits()
    own = images_n[labels_n == group.rank]
    target = torch.full((BATCH,), group.rank)
    model = network(seed)
    optimizer = make(model.parameters(), group=group)
    generator = torch.Generator().manual_seed(1000 * seed + group.rank)
    sent_before, began, curve = group.stats.sent_bytes, time.perf_counter(), []
    for step in range(1, steps + 1):
        batch = own[torch.randint(len(own), (BATCH,), generator=generator)]

        def closure(batch: Tensor = batch) -> float:
            optimizer.zero_grad()
            loss: Tensor = nn.functional.cross_entropy(model(batch), target)
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())

        optimizer.step(closure)
        if step % max(steps // LOOKS, 1) == 0:
            with torch.no_grad():
                right = (model(test_n).argmax(1) == test_labels_n).float().mean()
            stats = optimizer.stats()
            curve.append([step, round(100 * float(right), 2), stats.get("num_uploads", step * group.size)])
    return {
        "parameters": optimizer.space.layout.num_live,
        "curve": curve,
        "sent_bytes": group.stats.sent_bytes - sent_before,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(
    steps: Annotated[int, typer.Option(min=LOOKS, help="Of each run.")] = STEPS,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Names of what is run; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run each that is not there, one after another, then write the table of all. Minutes of a core each.

    Raises: BadParameter for a name that is none.
    """
    every = cases()
    if unknown := [name for name in only or () if name not in every]:
        raise typer.BadParameter(f"--only {unknown[0]!r}: must be one of these: {'; '.join(every)}")
    torch.set_num_threads(1)
    by = provenance()
    out.mkdir(parents=True, exist_ok=True)
    for name, make in every.items():
        path = out / f"{name.replace(', ', '-').replace(' = ', '')}-{seed}.json"
        if path.exists() or (only and name not in only):
            continue
        found = run_in_turns(RANKS, partial(train, make, steps, seed), 3600.0)
        one = {
            "command": f"python -m benchmarks.cada --steps {steps} --seed {seed} --only {name!r}",
            "method": name,
            "seed": seed,
            "steps": steps,
            "data": "scikit-learn's load_digits, one digit a rank; every fifth image is a test",
            **{key: found[0][key] for key in ("parameters", "curve", "seconds")},
            "sent_bytes": sum(rank["sent_bytes"] for rank in found),
        }
        write_whole(path, json.dumps({**asdict(by), **one}, indent=1) + "\n")
        typer.echo(f"{name}: {one['curve'][-1]}, {one['sent_bytes']:,} bytes, {one['seconds']} s")
    if kept := [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]:
        (out / "README.md").write_text(markdown(kept))


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """The table of these runs."""
    ends = {(one["method"], one["seed"]): one for one in runs}
    order = list(cases())
    rows = []
    for one in sorted(runs, key=lambda one: (one["seed"], order.index(one["method"]))):
        (steps, right, uploads), dense = one["curve"][-1], ends.get(("Adam", one["seed"]))
        rows.append(
            [
                one["method"],
                str(one["seed"]),
                f"{uploads:,}",
                f"{RANKS * steps / uploads:.1f}",
                *(f"{one['curve'][look][1]:.2f}" for look in SHOWN),
                f"{right:.2f}",
                "-" if dense is None else f"{dense['sent_bytes'] / one['sent_bytes']:.2f}",
            ]
        )
    way = [f"after {runs[0]['curve'][look][0]:,}" for look in SHOWN]
    papers = [[name, f"{n:,}", f"{PAPERS['Adam'][0] / n:.1f}", f"{right:.2f}"] for name, (n, right) in PAPERS.items()]
    first = runs[0]
    return "\n".join(
        [
            "# CADA: uploads at Adam's accuracy",
            "",
            "Written by `python -m benchmarks.cada`; do not edit.",
            "",
            f"{first['steps']:,} steps of a network of {first['parameters']:,} parameters on {first['data']}: "
            f"{RANKS} ranks, batches of {BATCH}, rate {RATE:g}, D 50, H 10, c = 1 where nothing else is said. "
            "An upload is a gradient that one rank sends. Accuracy: on images of all digits, on the way and at the "
            "end. With few uploads a run learns later, as the columns on the way say. Bytes: of all ranks in training "
            "steps, what Adam's ring all-reduce sends over what this one does; a gradient that is not sent saves its "
            "half of the way, and the mean has to reach every rank all the same. One run a row. Rows that lose are "
            "printed as they are.",
            "",
            *pipes(["method", "seed", "uploads", "fewer", *way, "accuracy at the end, %", "fewer bytes"], rows),
            "",
            "Of the files of the paper's authors, 10,000 steps on MNIST by label, 10 workers:",
            "",
            *pipes(["method", "uploads", "fewer", "accuracy, %"], papers),
            "",
            f"Made {made_by(first)}.",
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
