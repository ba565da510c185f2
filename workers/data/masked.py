"""Windows of a text with some bytes masked, to predict them from both sides (BERT, arXiv 1810.04805, section 3.1).

Every window has the same number of masked positions. The mean over the masked positions of a batch is then the mean
of the windows' means, so windows weigh alike and the gradient does not depend on which rank has which of them.

Legend: W windows in a share, T bytes of context, M masked positions a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.workers.data.batches import Data, Order, generator
from thinwire.workers.data.corpus import Corpus
from thinwire.workers.data.windows import Windows, validation_windows

MASK = 256
"""The token that stands for a masked byte; bytes are 0 to 255."""
MASKED_FRACTION = 0.15
IGNORED = -100
"""The target where nothing is to be predicted; what cross_entropy leaves out."""


def num_masked(context: int) -> int:
    """M: how many positions of a window are predicted; at least one."""
    return max(1, round(MASKED_FRACTION * context))


def mask(window_T: Tensor, drawn: torch.Generator) -> tuple[Tensor, Tensor]:
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
    """Training windows of one text, each masked anew every time that it is visited."""

    def __init__(self, tokens: Tensor, context: int, global_batch: int, seed: int) -> None:
        """`tokens`: uint8[N], not modified. Raises DataError if N <= context."""
        self._windows = Windows(tokens, context, global_batch, seed)
        self.order: Order = self._windows.order

    def local(self, step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        """A rank's share of a step as (inputs, targets), int64[W, T] each; targets are IGNORED but at M positions."""
        windows_WT, _ = self._windows.local(step, rank, world_size)
        numbers = self.order.numbers(step, rank, world_size)
        return _mask_each(windows_WT, [generator(self.order.seed, "mask", number) for number in numbers])


def masked_bytes(corpus: Corpus, context: int, global_batch: int, num_validation: int, seed: int) -> Data:
    """Masked windows of both parts of a text. The validation masks are the same for every seed.

    Raises: DataError where a part is shorter than a window.
    """
    windows_WT, _ = validation_windows(corpus.validation, context, num_validation)
    return Data(
        MaskedWindows(corpus.train, context, global_batch, seed),
        _mask_each(windows_WT, [generator("validation mask", number) for number in range(len(windows_WT))]),
        corpus.description,
        corpus.digest,
    )


def _mask_each(windows_WT: Tensor, drawn: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    inputs, targets = torch.empty_like(windows_WT), torch.empty_like(windows_WT)
    for row, (window_T, own) in enumerate(zip(windows_WT, drawn, strict=True)):
        inputs[row], targets[row] = mask(window_T, own)
    return inputs, targets
