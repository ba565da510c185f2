"""Windows of a text with some bytes masked, to predict them from both sides (BERT, arXiv 1810.04805, section 3.1).

Every window has the same number of masked positions. The mean over the masked positions of a batch is then the mean
of the windows' means, so windows weigh alike and the gradient does not depend on which rank has which of them.

Legend: T bytes of context, M masked positions a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.workers.data.order import generator
from thinwire.workers.data.windows import Sample, Windows

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
