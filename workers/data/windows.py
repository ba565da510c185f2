"""A text cut into windows at a fixed stride, to predict each next byte.

Legend: W windows in a share, T bytes of context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.workers.data.batches import Data, Order
from thinwire.workers.data.corpus import Corpus, DataError


class Windows:
    """Training windows of one text, with the same one byte on as targets."""

    def __init__(self, tokens: Tensor, context: int, global_batch: int, seed: int) -> None:
        """`tokens`: uint8[N], not modified. `context`: bytes a window predicts. Raises DataError if N <= context."""
        self.order = Order(_count_windows(tokens, context, "training"), global_batch, seed)
        self._tokens = tokens
        self._context = context

    def local(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """A rank's share of a step as (inputs, targets), int64[W, T] each; targets are inputs one byte on."""
        windows_W = self.order.samples(self.order.numbers(step, rank, world_size))
        return _cut(self._tokens, windows_W, self._context)


def validation_windows(tokens: Tensor, context: int, num: int) -> tuple[Tensor, Tensor]:
    """`num` windows spread evenly over the text, always the same, as (inputs, targets), int64[num, T] each.

    Fewer where the text has fewer windows. Raises DataError where it has none.
    """
    available = _count_windows(tokens, context, "validation")
    num = min(num, available)
    return _cut(tokens, torch.arange(num) * available // num, context)


def next_bytes(corpus: Corpus, context: int, global_batch: int, num_validation: int, seed: int) -> Data:
    """Windows of both parts of a text. Raises: DataError where a part is shorter than a window."""
    return Data(
        Windows(corpus.train, context, global_batch, seed),
        validation_windows(corpus.validation, context, num_validation),
        corpus.description,
        corpus.digest,
    )


def _count_windows(tokens: Tensor, context: int, part: str) -> int:
    num_windows = (tokens.numel() - 1) // context
    if num_windows < 1:
        raise DataError(
            f"the {part} text has {tokens.numel()} bytes; recipe.context = {context} needs at least {context + 1}; "
            "name a longer text, a shorter context or another data.validation_fraction"
        )
    return num_windows


def _cut(tokens: Tensor, windows_W: Tensor, context: int) -> tuple[Tensor, Tensor]:
    index = windows_W[:, None] * context + torch.arange(context + 1)
    bytes_W = tokens[index].long()
    return bytes_W[:, :-1].contiguous(), bytes_W[:, 1:].contiguous()
