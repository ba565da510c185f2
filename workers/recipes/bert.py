"""A byte-level BERT (arXiv 1810.04805) that fills in masked bytes: post-norm blocks, learned positions, tied head.

It is the model that the compressed optimizers were published with, made small: no segments and no second task, since
a window is one text. Query, key and value have layers of their own, as in BERT. The key's bias moves all scores of a
query alike, so its gradient is zero but for rounding; here that bias is a tensor by itself.

Initialised as BERT: normal(0, 0.02), biases zero. The first loss is then about ln 257 = 5.55 nats a masked byte. BERT
is 768 wide; at another width 0.02 would be another function. Layers here have the std 0.02 sqrt(768 / D), so that each
block adds to the stream what BERT's adds. With 0.02 as it stands, two layers of width 64 took twice as long to learn
more than how frequent each byte is: 400 steps of Adam, not 200.

Legend: B windows, T bytes of context, D width, H heads, V = 257: the bytes and the mask.

The task is to predict masked bytes of a window from both sides (section 3.1). Every window has the same number of
masked positions. The mean over the masked positions of a batch is then the mean of the windows' means, so windows weigh
alike and the gradient does not depend on which rank has which of them.

Legend: M masked positions a window.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.contract.spec import BertRecipe
from thinwire.workers.data.corpus import Sample, Windows
from thinwire.workers.data.order import generator
from thinwire.workers.recipes.of_job import OverText, seeded_normal

MASK = 256
"""The token that stands for a masked byte; bytes are 0 to 255."""
MASKED_FRACTION = 0.15
IGNORED = -100
"""The target where nothing is to be predicted; what cross_entropy leaves out."""


def num_masked(context: int) -> int:
    """M: how many positions of a window are predicted; at least one."""
    return max(1, round(MASKED_FRACTION * context))


def mask(window_T: Tensor, drawn: torch.Generator) -> Sample:
    """One window as (inputs, targets), int64[T] each; `window_T` is not modified.

    Of the M predicted positions eight tenths read MASK, one tenth a random byte, one tenth the byte itself, drawn each
    for itself, so that the model cannot tell a masked position from a byte it can trust.
    """
    context = len(window_T)
    at_M = torch.randperm(context, generator=drawn)[: num_masked(context)]
    chance_M = torch.rand(len(at_M), generator=drawn)
    random_M = torch.randint(0, 256, (len(at_M),), generator=drawn)
    byte_M = window_T[at_M]
    inputs, targets = window_T.clone(), torch.full_like(window_T, IGNORED)
    inputs[at_M] = torch.where(chance_M < 0.8, MASK, torch.where(chance_M < 0.9, random_M, byte_M))
    targets[at_M] = byte_M
    return inputs, targets


class MaskedWindows:
    """Windows of one text, each masked anew every time that it is visited: a dataset of (inputs, targets)."""

    def __init__(self, windows: Windows, seed: int) -> None:
        self._windows, self._seed = windows, seed
        self.digest = windows.digest

    def __len__(self) -> int:
        return len(self._windows)

    def visit(self, sample: int, number: int) -> Sample:
        """int64[T] each; targets are IGNORED but at M positions."""
        window_T, _ = self._windows[sample]
        return mask(window_T, generator(self._seed, "mask", number))


def masked(windows: list[Sample]) -> list[Sample]:
    """These windows, masked; the same for every seed."""
    return [mask(window_T, generator("validation mask", number)) for number, (window_T, _) in enumerate(windows)]


VOCABULARY = MASK + 1
_TABLE_STD = 0.02
_LAYER_STD = 0.02 * math.sqrt(768)
"""Times 1 / sqrt(D)."""


class Attention(nn.Module):
    """Self-attention over all heads; every position sees every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """f[B, T, D] -> f[B, T, D]."""
        B, T, D = x_BTD.shape
        q, k, v = (
            layer(x_BTD).view(B, T, self.heads, D // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y_BHTd = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(y_BHTd.transpose(1, 2).reshape(B, T, D))
        return out


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm_1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm_2 = nn.LayerNorm(width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """f[B, T, D] -> f[B, T, D]."""
        x_BTD = self.norm_1(x_BTD + self.attention(x_BTD))
        out: Tensor = self.norm_2(x_BTD + self.down(F.gelu(self.up(x_BTD))))
        return out


class Bert(nn.Module):
    """The whole model; `build` gives it its values."""

    def __init__(self, recipe: BertRecipe) -> None:
        super().__init__()
        self.context = recipe.context
        self.bytes = nn.Embedding(VOCABULARY, recipe.width)
        self.positions = nn.Embedding(recipe.context, recipe.width)
        self.norm = nn.LayerNorm(recipe.width)
        self.blocks = nn.ModuleList(Block(recipe.width, recipe.heads) for _ in range(recipe.layers))
        self.transform = nn.Linear(recipe.width, recipe.width)
        self.transform_norm = nn.LayerNorm(recipe.width)
        self.decoder_bias = nn.Parameter(torch.empty(VOCABULARY))

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats over the masked bytes, a scalar; without targets the logits, f[B, T, V].

        inputs, targets: int64[B, T], T <= context; targets are IGNORED where nothing is predicted. Raises ValueError
        for a longer T.
        """
        num_bytes = inputs.shape[1]
        if num_bytes > self.context:
            raise ValueError(
                f"a window of {num_bytes} bytes does not fit recipe.context = {self.context}; cut it shorter"
            )
        x_BTD = self.norm(self.bytes(inputs) + self.positions.weight[:num_bytes])
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.transform_norm(F.gelu(self.transform(x_BTD)))
        logits_BTV = F.linear(x_BTD, self.bytes.weight, self.decoder_bias)  # tied: bytes are read as they are written
        if targets is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


class BertOverText(OverText):
    """It fills in the masked bytes of a text."""

    def model(self) -> Bert:
        """The same for the same spec."""
        assert isinstance(self.spec.recipe, BertRecipe)
        return build(self.spec.recipe, self.seed).to(self.dtype)

    def dataset(self) -> MaskedWindows:
        """Windows of the text, masked anew at every visit. Raises: DataError."""
        return MaskedWindows(Windows(self.corpus, self.context), self.seed)

    def validation(self) -> list[Sample]:
        """Windows of the text's other part, whose masks are always the same. Raises: DataError."""
        return masked(super().validation())

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Nats a masked byte."""
        inputs, targets = batch
        loss: Tensor = model(inputs, targets)
        return loss


def build(recipe: BertRecipe, seed: int) -> Bert:
    """A new model on the CPU in float32. The same (recipe, seed) gives the same bits; the global rng is not used."""
    with torch.device("meta"):  # the layers' own initialisation would draw from the global rng
        model = Bert(recipe)
    tables = ("bytes.weight", "positions.weight")
    layer_std = _LAYER_STD / math.sqrt(recipe.width)
    return seeded_normal(model, seed, lambda name, _: _TABLE_STD if name in tables else layer_std)
