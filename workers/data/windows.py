"""A text cut into windows at a fixed stride, to predict each next byte.

Legend: T bytes of context.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from thinwire.workers.data.corpus import Corpus, DataError

Sample = tuple[Tensor, Tensor]
"""Inputs and targets."""


class Windows:
    """Windows of one text: a dataset of (bytes, the same one byte on), int64[T] each."""

    def __init__(self, corpus: Corpus, context: int, part: Literal["training", "validation"] = "training") -> None:
        """context: bytes a window predicts. Raises: DataError where the part is shorter than a window."""
        tokens = corpus.train if part == "training" else corpus.validation
        self.digest = corpus.digest
        self._len = (tokens.numel() - 1) // context
        if self._len < 1:
            raise DataError(
                f"the {part} text has {tokens.numel()} bytes; recipe.context = {context} needs at least {context + 1}; "
                "name a longer text, a shorter context or another data.validation_fraction"
            )
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, window: int) -> Sample:
        if not 0 <= window < self._len:
            raise IndexError(f"window {window} of {self._len}")
        first = window * self._context
        bytes_T1 = self._tokens[first : first + self._context + 1].long()
        return bytes_T1[:-1], bytes_T1[1:]


def spread(windows: Windows, num: int) -> list[Sample]:
    """`num` windows spread evenly over the text, always the same; all where there are fewer."""
    num = min(num, len(windows))
    return [windows[i * len(windows) // num] for i in range(num)]
