"""Two small problems on which 0/1 Adam was seen to fall behind: a character LSTM, and embedding rows rarely touched.

A batch is drawn from (seed, step) for all ranks together, and each rank takes its part: any number of ranks sees the
same samples. b: samples of a batch, c: characters of a window, t: tokens of a bag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.provenance import TEXT

Batch = tuple[Tensor, Tensor]

CONTEXT = 32
TOKENS, CLASSES, BAG = 1000, 8, 3


@dataclass(frozen=True, slots=True)
class Problem:
    """What is trained. draw: (generator, samples, is it for validation?) to inputs and labels. lr: of the baseline."""

    name: str
    title: str
    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator, int, str], Batch]
    batch: int
    validation: int
    steps: int
    lr: float

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy, nats."""
        inputs, labels = batch
        return cross_entropy(model(inputs).flatten(0, -2), labels.flatten())

    def batch_of(self, seed: int, step: int) -> Batch:
        """The samples of all ranks in one step, from 1."""
        return self.draw(torch.Generator().manual_seed(1_000_003 * seed + step), self.batch, "training")

    def validation_batch(self) -> Batch:
        """The same samples in every run."""
        return self.draw(torch.Generator().manual_seed(7), self.validation, "validation")


class CharacterLstm(nn.Module):
    """Logits of the next character at each place of a window: long[b, c] to float[b, c, characters]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(text()[1]), 32)
        self.lstm = nn.LSTM(32, 96, batch_first=True)
        self.head = nn.Linear(96, len(text()[1]))

    def forward(self, windows: Tensor) -> Tensor:
        """One pass."""
        out: Tensor = self.head(self.lstm(self.embed(windows))[0])
        return out


@cache
def text() -> tuple[Tensor, list[int]]:
    """The text as numbers of its characters, and its characters."""
    data = TEXT.read_bytes()
    characters = sorted(set(data))
    number = {character: at for at, character in enumerate(characters)}
    return torch.tensor([number[byte] for byte in data]), characters


def _windows(generator: torch.Generator, samples: int, part: str) -> Batch:
    return windows_of(text()[0], generator, samples, part)


def windows_of(letters: Tensor, generator: torch.Generator, samples: int, part: str) -> Batch:
    """Windows of a text, each with the character that follows at each place; its last tenth is for validation."""
    cut = len(letters) * 9 // 10
    first, stop = (0, cut) if part == "training" else (cut, len(letters))
    starts = torch.randint(first, stop - CONTEXT - 1, (samples, 1), generator=generator)
    windows = letters[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


@cache
def _teacher() -> tuple[Tensor, Tensor]:
    """How often a token comes (Zipf), and what it says for each class: float[TOKENS], float[TOKENS, CLASSES]."""
    often = 1 / torch.arange(1, TOKENS + 1, dtype=torch.float64)
    says = torch.randn(TOKENS, CLASSES, generator=torch.Generator().manual_seed(3))
    return often, says


def _bags(generator: torch.Generator, samples: int, part: str) -> Batch:
    """Bags of tokens; the label is the class for which they say most, all together."""
    often, says = _teacher()
    bags = torch.multinomial(often, samples * BAG, replacement=True, generator=generator).view(samples, BAG)
    return bags, says[bags].sum(1).argmax(1)


def _classifier() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(TOKENS, 32, mode="sum"), nn.Linear(32, CLASSES))


LSTM = Problem("lstm", "LSTM, 0.09 M, characters", CharacterLstm, _windows, 32, 256, 400, 1.6e-2)
ROWS = Problem("rows", "embedding rows, 0.13 M, tokens by Zipf's law", _classifier, _bags, 64, 2048, 600, 1.6e-2)
