"""What a dataset draws at random, such as an augmentation, as a function of the sample's number in the run.

Transforms draw from the random numbers of the process, whose state is that of a worker's history: after a resume, a
resize or a lost step a sample would look another way. Here that state is set for each sample, and put back after it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from thinwire.workers.data.order import generator

_NUMPYS_BITS = 32
"""Of a seed that numpy takes."""


class Seeded:
    """A dataset with len() and [i], whose samples draw from a state that follows from (seed, number of the sample).

    As workers.data.feed visits it, a sample is drawn anew in each epoch, alike on whichever worker and however often.
    [i] alone is the one drawing of sample i that is the same for ever.
    """

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        """Raises: TypeError for a dataset that has no len() or no [i], or that draws by the number by itself."""
        kind, lacks = type(dataset).__name__, not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__")
        if lacks or isinstance(dataset, IterableDataset):  # that one inherits a [i] that raises
            raise TypeError(f"seeded({kind}): give a dataset with len() and [i]")
        if hasattr(dataset, "visit"):
            raise TypeError(f"seeded({kind}): it has visit(i, number), and so draws by the number: give it as it is")
        self.dataset, self.seed = dataset, seed
        if hasattr(dataset, "digest"):
            self.digest = dataset.digest

    @property
    def told(self) -> str:
        """What is seeded and how: workers of another seed draw other samples."""
        return f"{type(self.dataset).__name__}, seeded with {self.seed},"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        sample = range(len(self))[i]  # -1, and an integer of numpy or torch, are the samples that they name
        with drawing_by(self.seed, "sample", sample):
            return self.dataset[sample]

    def visit(self, sample: int, number: int) -> Any:
        """Sample `sample`, as the run's sample number `number`."""
        with drawing_by(self.seed, "visit", number):
            return self.dataset[sample]


@contextmanager
def drawing_by(*words: int | str) -> Iterator[None]:
    """Inside, what torch draws on the CPU, `random` and numpy's global functions follow from `words`; after it, all
    three go on as if nothing had been drawn. Generators that somebody has made for himself are not touched.
    """
    seed = generator(*words).initial_seed()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too
    random.seed(seed)
    np.random.seed(seed % (1 << _NUMPYS_BITS))
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
