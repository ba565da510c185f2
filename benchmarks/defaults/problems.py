"""Small problems on which others have seen compressed optimizers fall behind, and a few like them.

A character LSTM; embedding rows that are rarely touched, of bags of tokens and of users and items; two views of a digit
to be told from those of others; a small transformer on digits. A batch is drawn from (seed, step) for all ranks
together, and each rank takes its part: any number of ranks sees the same samples. b: samples of a batch, c: characters
of a window, t: tokens of a bag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

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


@cache
def _any_order() -> Tensor:
    return torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))


def _shuffled_bags(generator: torch.Generator, samples: int, part: str) -> Batch:
    """The same bags; rows of common and of rare tokens lie side by side."""
    bags, labels = _bags(generator, samples, part)
    return _any_order()[bags], labels


USERS, ITEMS, TASTES = 1000, 2000, 4


class Factors(nn.Module):
    """Logits of "does not like" and "likes" for pairs of a user and an item: long[b, 2] to float[b, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 16), nn.Embedding(ITEMS, 16)
        biases = [nn.Embedding(USERS, 1), nn.Embedding(ITEMS, 1)]
        self.biases = nn.ModuleList(biases)
        for factors in (self.users, self.items):
            nn.init.normal_(factors.weight, std=0.1)
        for bias in biases:
            nn.init.zeros_(bias.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        """One pass."""
        user, item = pairs.T
        likes = (self.users(user) * self.items(item)).sum(1)
        likes = likes + self.biases[0](user)[:, 0] + self.biases[1](item)[:, 0]
        return torch.stack([torch.zeros_like(likes), likes], 1)


@cache
def _tastes() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """How often users and items come (Zipf, in any order), their tastes, and how much an item is liked by all."""
    random = torch.Generator().manual_seed(5)
    orders = [torch.randperm(count, generator=random) for count in (USERS, ITEMS)]
    often = [
        (1 / torch.arange(1, len(order) + 1, dtype=torch.float64) ** power)[order]
        for order, power in zip(orders, (0.8, 1.0), strict=True)
    ]
    tastes = [torch.randn(count, TASTES, generator=random) for count in (USERS, ITEMS)]
    return often[0], often[1], tastes[0], tastes[1], torch.randn(ITEMS, generator=random)


def _likes(generator: torch.Generator, samples: int, part: str) -> Batch:
    """Pairs of a user and an item, and whether it is liked: by chance, the more so the more tastes agree."""
    often_u, often_i, taste_u, taste_i, liked = _tastes()
    user = torch.multinomial(often_u, samples, replacement=True, generator=generator)
    item = torch.multinomial(often_i, samples, replacement=True, generator=generator)
    chance = torch.sigmoid(2 * ((taste_u[user] * taste_i[item]).sum(1) + liked[item]))
    return torch.stack([user, item], 1), (torch.rand(samples, generator=generator) < chance).long()


@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits  # here, for it takes a second

    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(1))
    return torch.from_numpy(images).float()[order].view(-1, 8, 8) / 16, torch.from_numpy(classes)[order]


def _drawn(generator: torch.Generator, samples: int, part: str) -> tuple[Tensor, Tensor]:
    """Digits without noise; the last third is for validation."""
    images, classes = _digits()
    first, stop = (0, 1200) if part == "training" else (1200, len(classes))
    at = torch.randint(first, stop, (samples,), generator=generator)
    return images[at], classes[at]


def _noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + 0.3 * torch.randn(images.shape, generator=generator)


def _noisy_digits(generator: torch.Generator, samples: int, part: str) -> Batch:
    images, classes = _drawn(generator, samples, part)
    return _noisy(images, generator), classes


def _views(generator: torch.Generator, samples: int, part: str) -> Batch:
    images, _ = _drawn(generator, samples, part)
    return _noisy(images, generator), _noisy(images, generator)


class Contrast(Problem):
    """A problem of two views of each sample: each is to be told from the views of the other samples of its rank."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """InfoNCE at a temperature of 0.2, nats."""
        one, other = (normalize(model(view), dim=1) for view in batch)
        return cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def _encoder() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 16))


class SmallVit(nn.Module):
    """Logits of the class of an image, from its 16 patches: float[b, 8, 8] to float[b, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(4, 32), nn.Parameter(0.02 * torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """One pass."""
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), 16, 4)
        out: Tensor = self.head(self.body(self.patches(patches) + self.places).mean(1))
        return out


LSTM = Problem("lstm", "LSTM, 0.09 M, characters", CharacterLstm, _windows, 32, 256, 400, 1.6e-2)
ROWS = Problem("rows", "embedding rows, 0.13 M, tokens by Zipf's law", _classifier, _bags, 64, 2048, 600, 1.6e-2)
SHUFFLED = Problem("steady", ROWS.title, _classifier, _shuffled_bags, 64, 2048, 600, 1.6e-2)
RATINGS = Problem(
    "ratings", "factors of users and items, 0.05 M, by Zipf's law", Factors, _likes, 128, 8192, 1000, 1.6e-2
)
CONTRAST = Contrast("contrast", "two views of a digit, 0.02 M", _encoder, _views, 64, 1024, 600, 4e-3)
VIT = Problem("vit", "ViT, 0.02 M, noisy digits", SmallVit, _noisy_digits, 64, 1024, 600, 4e-3)
