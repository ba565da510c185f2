"""A GPT as people train it, with tied embeddings and without dropout, and data that it can learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model and of a rank's batch."""

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    batch: int


SIZES = {"gpt2-small": Size(50304, 1024, 768, 12, 12, 8), "tiny": Size(64, 16, 32, 2, 2, 4)}
PATTERN = 512
"""Of the vocabulary the data have so many tokens, at most."""


class Block(nn.Module):
    """Attention and a layer of four times the width, each on what a LayerNorm gives it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        d = size.width
        self.heads = size.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, width], and so is what comes out."""
        batch, tokens, d = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, tokens, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, d))
        mixed: Tensor = x + self.mlp(self.before_mlp(x))
        return mixed


class Gpt(nn.Module):
    """From tokens and those that follow them to the mean loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y: [batch, tokens]. The mean loss, in float32."""
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], dtype=torch.int64, device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), y.flatten())


def batch_of(size: Size, step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens of which every second follows from the one before it; a rank's own at each step."""
    drawn = torch.Generator(device=device).manual_seed(1000 * step + rank)
    most = min(PATTERN, size.vocabulary)
    x = torch.randint(0, most, (size.batch, size.context + 1), generator=drawn, device=device)
    x[:, 1::2] = (x[:, 0:-1:2] * 7 + 3) % most
    return x[:, :-1], x[:, 1:]
