"""The command: python -m benchmarks.local_steps_downstream FOLDER. Is what local steps trained as good to build on?

A linear layer on the mean of the last hidden states of a model of benchmarks.local_steps (its --weights) learns from
pieces of plays which of six people says them. The model stays as it is, or with --whole is fine-tuned with the layer. A
score is the share of pieces that are named rightly, out of speeches that nothing was learned from here; all were in the
text that the model itself learned from.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

from benchmarks.local_steps import RESULTS, SIZES, task_of
from benchmarks.paired import interval
from benchmarks.provenance import TEXT, provenance
from benchmarks.report import made_by, pipes
from thinwire.contract.files import write_whole
from thinwire.contract.spec import GptRecipe
from thinwire.workers.recipes.gpt import Gpt

OUT = RESULTS / "downstream"
PEOPLE, SPEECHES, TESTS, LENGTH = 6, 80, 30, 64
"""How many are told apart; speeches of each, and how many of them to test with; bytes of each that are read."""
STEPS, RATE, DECAY = 200, 1e-2, 0.1
EPOCHS, BATCH, WHOLE_RATE = 8, 20, 3e-4
"""Of fine-tuning the whole model."""


def speeches_of_people() -> Tensor:
    """Their first bytes, int64[PEOPLE, SPEECHES, LENGTH]."""
    found = re.findall(r"^([A-Z][A-Z ]+):\n((?:.+\n)+)", TEXT.read_text(), re.MULTILINE)
    long_enough = [(who, said.encode()[:LENGTH]) for who, said in found if len(said.encode()) >= LENGTH]
    people = [who for who, _ in Counter(who for who, _ in long_enough).most_common(PEOPLE)]
    by_person = [[list(said) for who, said in long_enough if who == person] for person in people]
    return torch.tensor([speeches[:SPEECHES] for speeches in by_person])


def trained(recipe: GptRecipe, weights: Path) -> Gpt:
    """The model, which gives its last hidden states in place of logits."""
    gpt = Gpt(recipe)
    gpt.load_state_dict(torch.load(weights))
    gpt.head = nn.Identity()  # type: ignore[assignment]
    return gpt


def features(gpt: Gpt) -> Tensor:
    """Of each speech the mean of the last hidden states, f[PEOPLE, SPEECHES, width]."""
    with torch.no_grad():
        parts = [gpt(part).mean(1) for part in torch.split(speeches_of_people().flatten(0, 1), 50)]
    return torch.cat(parts).unflatten(0, (PEOPLE, -1))


def split(all_PS: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """What is tested with, and what is learned from."""
    order = torch.randperm(all_PS.shape[1], generator=torch.Generator().manual_seed(seed))
    return all_PS[:, order[:TESTS]], all_PS[:, order[TESTS:]]


def fine_tuned(gpt: Gpt, seed: int) -> float:
    """As score(), of the whole model. gpt: modified."""
    tests, learned = split(speeches_of_people(), seed)
    layer = nn.Linear(gpt.norm.weight.numel(), PEOPLE)
    nn.init.zeros_(layer.weight)
    pieces, labels = learned.flatten(0, 1), torch.arange(PEOPLE).repeat_interleave(learned.shape[1])
    optimizer = torch.optim.AdamW([*gpt.parameters(), *layer.parameters()], lr=WHOLE_RATE, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(pieces), generator=generator).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(layer(gpt(pieces[batch]).mean(1)), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        right = layer(gpt(tests.flatten(0, 1)).mean(1)).argmax(-1).view(PEOPLE, -1) == torch.arange(PEOPLE)[:, None]
    return round(100 * float(right.float().mean()), 2)


def score(features_PSD: Tensor, seed: int) -> float:
    """The share of test speeches named rightly, in per cent. seed: of which speeches these are, and of the layer."""
    tests, learned = split(features_PSD, seed)
    mean, spread = learned.mean((0, 1)), learned.std((0, 1)) + 1e-6
    x_nD, labels_n = ((learned - mean) / spread).flatten(0, 1), torch.arange(PEOPLE).repeat_interleave(learned.shape[1])
    layer = nn.Linear(x_nD.shape[1], PEOPLE)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=RATE, weight_decay=DECAY)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(layer(x_nD), labels_n).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    right = layer((tests - mean) / spread).argmax(-1) == torch.arange(PEOPLE)[:, None]
    return round(100 * float(right.float().mean()), 2)


def main(
    weights: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Of benchmarks.local_steps.")],
    size: Annotated[str, typer.Option(help=f"Of its models: {', '.join(SIZES)}.")] = "10m",
    seeds: Annotated[int, typer.Option(min=1, help="Of which speeches are tests, from 0.")] = 10,
    only: Annotated[str, typer.Option(help="Part of the names of the weights.")] = "",
    whole: Annotated[bool, typer.Option("--whole", help="Fine-tune the whole model, not the layer alone.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = OUT,
) -> None:
    """Score each model of the folder, then write the table. Half a minute of a core a model, 20 with --whole.

    Raises: BadParameter for a size that there is not, and for a folder without models.
    """
    if size not in SIZES:
        raise typer.BadParameter(f"--size {size!r}: must be one of {', '.join(SIZES)}")
    if not (models := sorted(file for file in weights.glob("*.pt") if only in file.stem)):
        raise typer.BadParameter(
            f"{weights} holds no model with {only!r} in its name: run benchmarks.local_steps first"
        )
    torch.set_num_threads(1)
    recipe = task_of(size).spec({"name": "adam", "lr": 1e-3}, 0, 128, 4).recipe
    assert isinstance(recipe, GptRecipe)
    out.mkdir(parents=True, exist_ok=True)
    by = provenance()
    for model in models:
        learns = "all of it" if whole else "the layer"
        path = out / f"{size}-{model.stem}{'-whole' * whole}.json"
        if not path.exists():
            if whole:
                scores = [fine_tuned(trained(recipe, model), seed) for seed in range(seeds)]
            else:
                found = features(trained(recipe, model))
                scores = [score(found, seed) for seed in range(seeds)]
            one = {"size": size, "model": model.stem, "learns": learns, "scores": scores}
            write_whole(path, json.dumps({**asdict(by), **one}, indent=1) + "\n")
            typer.echo(f"{model.stem}: {scores}")
    runs = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    (out / "README.md").write_text(markdown(runs))


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """The table of these runs."""
    dense = {(one["size"], one["learns"]): one["scores"] for one in runs if one["model"].startswith("adamw-0-dense")}
    rows = []
    for one in runs:
        beside, scores = "-", one["scores"]
        theirs = dense.get((one["size"], one["learns"]))
        if theirs is not None and theirs is not scores:
            worse = interval([their - mine for mine, their in zip(scores, theirs, strict=False)])
            beside = f"{-worse.mean:+.1f} +- {worse.half:.1f}"
        rows.append([one["size"], one["model"], one["learns"], ", ".join(f"{one:.1f}" for one in scores), beside])
    return "\n".join(
        [
            "# What local steps trained, to build on",
            "",
            "Written by `python -m benchmarks.local_steps_downstream FOLDER`; do not edit.",
            "",
            f"Which of {PEOPLE} people says a piece of {LENGTH} bytes: per cent of {PEOPLE * TESTS}, by a linear layer "
            f"on the mean of the last hidden states, learned from {PEOPLE * (SPEECHES - TESTS)} others. The model "
            "stays as it is where the layer learns alone. "
            f"By chance: {100 / PEOPLE:.0f} %. Each score is of other speeches to test with. "
            "Beside dense: points, with the 95 % interval of the paired difference, too narrow as the speeches "
            "overlap.",
            "",
            *pipes(["size", "model", "learns", "score, %", "beside dense"], rows),
            "",
            f"Made {made_by(runs[0])}.",
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
