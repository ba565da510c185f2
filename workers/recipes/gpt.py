"""A byte-level GPT: pre-norm blocks, learned positions, untied head, a vocabulary of the 256 bytes.

Initialised like GPT-2: normal(0, 0.02), and projections back into the residual stream smaller by sqrt(2 layers), so
that the stream's variance does not grow with depth. The first loss is then about ln 256 = 5.55 nats.

Legend: B windows, T bytes of context, D width, H heads, V = 256.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.contract.spec import GptRecipe
from thinwire.workers.data.corpus import Sample, Windows
from thinwire.workers.recipes.of_job import OverText, seeded_normal

VOCABULARY = 256
_INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention over all heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """f[B, T, D] -> f[B, T, D]; position t sees positions up to t."""
        B, T, D = x_BTD.shape
        q, k, v = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y_BHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y_BHTd.transpose(1, 2).reshape(B, T, D))
        return out


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """f[B, T, D] -> f[B, T, D]."""
        x_BTD = x_BTD + self.attention(self.norm_1(x_BTD))
        out: Tensor = x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))
        return out


class Gpt(nn.Module):
    """The whole model; `build` gives it its values."""

    def __init__(self, recipe: GptRecipe) -> None:
        super().__init__()
        self.context = recipe.context
        self.bytes = nn.Embedding(VOCABULARY, recipe.width)
        self.positions = nn.Embedding(recipe.context, recipe.width)
        self.blocks = nn.ModuleList(Block(recipe.width, recipe.heads) for _ in range(recipe.layers))
        self.norm = nn.LayerNorm(recipe.width)
        self.head = nn.Linear(recipe.width, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats a byte, a scalar; without targets the logits, f[B, T, V].

        inputs, targets: int64[B, T], T <= context. Raises ValueError for a longer T.
        """
        num_bytes = inputs.shape[1]
        if num_bytes > self.context:
            raise ValueError(
                f"a window of {num_bytes} bytes does not fit recipe.context = {self.context}; cut it shorter"
            )
        x_BTD = self.bytes(inputs) + self.positions.weight[:num_bytes]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        if targets is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets.flatten())


class GptOverText(OverText):
    """It predicts each next byte of a text."""

    def model(self) -> Gpt:
        """The same for the same spec."""
        assert isinstance(self.spec.recipe, GptRecipe)
        return build(self.spec.recipe, self.seed).to(self.dtype)

    def dataset(self) -> Windows:
        """Windows of the text. Raises: DataError."""
        return Windows(self.corpus, self.context)

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Nats a byte."""
        inputs, targets = batch
        loss: Tensor = model(inputs, targets)
        return loss


def build(recipe: GptRecipe, seed: int) -> Gpt:
    """A new model on the CPU in float32. The same (recipe, seed) gives the same bits; the global rng is not used."""
    with torch.device("meta"):  # the layers' own initialisation would draw from the global rng
        model = Gpt(recipe)
    residual_std = _INIT_STD / math.sqrt(2 * recipe.layers)

    def std(name: str, weight: Tensor) -> float:
        return residual_std if name.endswith(("attention.out.weight", "down.weight")) else _INIT_STD

    return seeded_normal(model, seed, std)
