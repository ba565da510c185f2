"""What the exact*.py beside it share: samples and a model with exact sums, so that it cannot matter who computed what.

Each is called with FOLDER STEPS LOADERS.
"""

import os
import sys
from pathlib import Path

import torch

FOLDER, STEPS, LOADERS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
WIDTH = 6


class Samples(torch.utils.data.Dataset):
    """So many vectors of whole multiples of 2^6, each in a dict under `name` where that is given."""

    def __init__(self, num, name=None):
        self.num, self.name = num, name

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        x = torch.randint(-9, 9, (WIDTH,), generator=torch.Generator().manual_seed(i)) * 2.0**6
        return x if self.name is None else {self.name: x}


class Exact:
    """Beside a kind of module: a parameter, and a buffer that moves before the step."""

    def __init__(self):
        super().__init__()
        self.values = torch.nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def loss(self, x):
        self.seen += 1
        return (self.values * x).sum(dim=1).mean()


def keep(state):
    torch.save(state, FOLDER / f"final-{os.getpid()}")
