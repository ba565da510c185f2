"""The command: python -m benchmarks.local_steps_downstream FOLDER. Are models of local steps as good to fine-tune?

A model of benchmarks.local_steps (its --weights) learns from pieces of plays which of six people says them: all of it
is trained, with a new head on the mean of its last hidden states. A score is the share of pieces that are named
rightly, out of speeches it was not fine-tuned with; all were in the text that the model itself learned from.
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
from benchmarks.paired import Interval, interval
from benchmarks.provenance import TEXT, provenance
from benchmarks.report import made_by, pipes
from thinwire.contract.files import write_whole
from thinwire.contract.spec import GptRecipe
from thinwire.workers.recipes.gpt import Gpt

OUT = RESULTS / "downstream"
PEOPLE, TESTS, LENGTH = 6, 40, 64
"""How many are told apart; speeches of each to test with; bytes of a piece of a speech."""
STEPS, BATCH, RATE = 24, 16, 5e-4


def pieces_of_people() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes int64[n, LENGTH] and labels int64[n] to train with; and those to test with, a piece of each speech."""
    speeches = re.findall(r"^([A-Z][A-Z ]+):\n((?:.+\n)+)", TEXT.read_text(), re.MULTILINE)
    long_enough = [(who, said.encode()) for who, said in speeches if len(said.encode()) >= LENGTH]
    people = [who for who, _ in Counter(who for who, _ in long_enough).most_common(PEOPLE)]
    generator = torch.Generator().manual_seed(0)
    train, tests = [], []
    for label, person in enumerate(people):
        spoken = [torch.split(torch.tensor(list(said)), LENGTH) for who, said in long_enough if who == person]
        order = torch.randperm(len(spoken), generator=generator).tolist()
        tests += [(spoken[i][0], label) for i in order[:TESTS]]
        train += [(piece, label) for i in order[TESTS:] for piece in spoken[i] if len(piece) == LENGTH]
    (x_n, y_n), (test_n, labels_n) = (
        (torch.stack([piece for piece, _ in part]), torch.tensor([label for _, label in part]))
        for part in (train, tests)
    )
    return x_n, y_n, test_n, labels_n


class Named(nn.Module):
    """gpt without its head, and a new one: f[B, people] of int64[B, T]."""

    def __init__(self, gpt: Gpt, width: int, seed: int) -> None:
        super().__init__()
        gpt.head = nn.Identity()  # type: ignore[assignment]
        self.gpt = gpt
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.head = nn.Linear(width, PEOPLE)

    def forward(self, x_BT: Tensor) -> Tensor:
        """The logits."""
        found: Tensor = self.head(self.gpt(x_BT).mean(1))
        return found


def score(recipe: GptRecipe, weights: Path, seed: int) -> float:
    """The share of tests named rightly after fine-tuning, in per cent. seed: of the head and of the batches."""
    x_n, y_n, test_n, labels_n = pieces_of_people()
    gpt = Gpt(recipe)
    gpt.load_state_dict(torch.load(weights))
    model, generator = Named(gpt, recipe.width, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 8) * (1 - step / STEPS)
        chosen = torch.randint(len(x_n), (BATCH,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x_n[chosen]), y_n[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in torch.split(test_n, 60)]) == labels_n
    return round(100 * float(right.float().mean()), 2)


def main(
    weights: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Of benchmarks.local_steps.")],
    size: Annotated[str, typer.Option(help=f"Of its models: {', '.join(SIZES)}.")] = "10m",
    seeds: Annotated[int, typer.Option(min=1, help="Of the fine-tuning, from 0.")] = 3,
    only: Annotated[str, typer.Option(help="Part of the names of the weights.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = OUT,
) -> None:
    """Fine-tune each model of the folder, then write the table. Under a minute of a core a seed and model.

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
    for model in models:
        for seed in range(seeds):
            path = out / f"{size}-{model.stem}-{seed}.json"
            if path.exists():
                continue
            one = {"size": size, "model": model.stem, "seed": seed, "score": score(recipe, model, seed)}
            write_whole(path, json.dumps({**asdict(provenance()), **one}, indent=1) + "\n")
            typer.echo(f"{model.stem}, seed {seed}: {one['score']} %")
    runs = [json.loads(file.read_text()) for file in sorted(out.glob("*.json"))]
    (out / "README.md").write_text(markdown(runs))


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """The table of these runs."""
    by_model: dict[tuple[str, str], dict[int, float]] = {}
    for one in runs:
        by_model.setdefault((one["size"], one["model"]), {})[one["seed"]] = one["score"]
    rows = []
    for (size, model), scores in by_model.items():
        dense = next(
            (theirs for (of, name), theirs in by_model.items() if of == size and name.startswith("adamw-0-dense")), {}
        )
        common = sorted(scores.keys() & dense.keys())
        beside = "-"
        if common and scores is not dense:
            worse: Interval = interval([dense[seed] - scores[seed] for seed in common])
            beside = f"{-worse.mean:+.1f} +- {worse.half:.1f}"
        rows.append([size, model, ", ".join(f"{scores[seed]:.1f}" for seed in sorted(scores)), beside])
    x_n, *_ = pieces_of_people()
    return "\n".join(
        [
            "# Models of local steps, fine-tuned",
            "",
            "Written by `python -m benchmarks.local_steps_downstream FOLDER`; do not edit.",
            "",
            f"Which of {PEOPLE} people says a piece of {LENGTH} bytes: per cent of {PEOPLE * TESTS}, after {STEPS} "
            f"steps of {BATCH} out of {len(x_n)} others, all parameters trained by AdamW, for each seed of the "
            f"fine-tuning. By chance: {100 / PEOPLE:.0f} %. Beside the dense model's of the same seeds: points, with "
            "the 95 % interval of the paired difference, which three seeds leave wide.",
            "",
            *pipes(["size", "model", "score, %", "beside dense AdamW"], rows),
            "",
            f"Made {made_by(runs[0])}.",
            "",
        ]
    )


if __name__ == "__main__":
    typer.run(main)
