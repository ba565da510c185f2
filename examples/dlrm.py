"""DLRM by model and data parallel, both thinned: embedding tables on rank 0, the dense part on every rank.

    torchrun --nproc-per-node 2 examples/dlrm.py

Of each row that rank 0 looks up for a sample of another rank the largest eighth crosses, and back go the gradients of
just that (Thresholded). Of the gradients of the dense part a hundredth crosses, the rest waits in error memory (codec
"threshold"). Clicks are synthetic: ids by Zipf's law, each with an effect of its own that the tables have to learn.
[Gupta et al. 2020, arXiv 2010.08899 (DCT); Naumov et al. 2019, arXiv 1906.00091 (DLRM)]
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm import Group, Thresholded, TorchGroup
from thinwire.optim import SGD, FlatOptimizer, OneBitSGD

TABLES, IDS, WIDTH, NUMBERS, SAMPLES = 8, 500, 32, 8, 64
LR, MOMENTUM, TESTED = 0.3, 0.0, 2000


class Dense(nn.Module):
    """The numbers through one net; the products of all pairs of that and the embeddings through another."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.above = nn.Sequential(nn.Linear(WIDTH + TABLES * (TABLES + 1) // 2, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: Tensor, embedded: Tensor) -> Tensor:
        """Logits. embedded: [samples, TABLES * WIDTH]."""
        first = self.below(numbers)
        every = torch.cat([first.unsqueeze(1), embedded.view(-1, TABLES, WIDTH)], 1)
        low, high = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        pairs = (every @ every.mT)[:, low, high]
        return self.above(torch.cat([first, pairs], 1)).squeeze(1)


class Clicks:
    """Numbers, ids and clicks, drawn alike on every rank."""

    def __init__(self, seed: int) -> None:
        self._drawn = torch.Generator().manual_seed(seed)
        self._effects = torch.randn(TABLES, IDS, generator=self._drawn)
        self._weights = torch.randn(NUMBERS, generator=self._drawn)

    def draw(self, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        """The next samples."""
        zipf = 1.0 / torch.arange(1, IDS + 1)
        numbers = torch.randn(samples, NUMBERS, generator=self._drawn)
        ids = torch.multinomial(zipf, samples * TABLES, replacement=True, generator=self._drawn).view(-1, TABLES)
        logits = self._effects[torch.arange(TABLES), ids].sum(1) + numbers @ self._weights
        return numbers, ids, torch.bernoulli(logits.sigmoid(), generator=self._drawn)


def auc(scores: Tensor, clicked: Tensor) -> float:
    """The chance that one that was clicked has a higher score than one that was not."""
    places, ones = scores.argsort().argsort().double() + 1, clicked.sum()
    return float((places[clicked == 1].sum() - ones * (ones + 1) / 2) / (ones * (len(clicked) - ones)))


def parts(seed: int, num_tables: int) -> tuple[Dense, nn.ModuleList]:
    """The dense part and so many tables, which begin as DLRM's do."""
    torch.manual_seed(seed)
    model, tables = Dense(), nn.ModuleList(nn.Embedding(IDS, WIDTH) for _ in range(num_tables))
    for param in tables.parameters():
        nn.init.uniform_(param, -(IDS**-0.5), IDS**-0.5)
    return model, tables


def train(
    group: Group,
    model: Dense,
    tables: nn.ModuleList,
    make: Callable[[nn.Module], FlatOptimizer],
    share: float,
    steps: int = 300,
    seed: int = 0,
    lr_of_tables: float = 0.1,
    width: int = WIDTH,
) -> float:
    """AUC of this rank's part of samples that were not trained on.

    make: the optimizer of the dense part. width: of what has a threshold of its own; a row of a table has.
    """
    clicks, of_dense = Clicks(seed), make(model)
    of_tables = torch.optim.Adagrad(tables.parameters(), lr=lr_of_tables) if tables else None
    exchange = Thresholded(share=share, group=group)

    def logits_and_clicks(samples: int) -> tuple[Tensor, Tensor]:
        numbers, ids, clicked = clicks.draw(samples * group.size)
        found = [table(ids[:, i]) for i, table in enumerate(tables)]
        rows = torch.cat(found, 1).view(-1, width) if found else torch.zeros(len(ids) * TABLES * WIDTH // width, 0)
        own = slice(group.rank * samples, (group.rank + 1) * samples)
        return model(numbers[own], exchange(rows).view(samples, -1)), clicked[own]

    for _ in range(steps):
        nn.functional.binary_cross_entropy_with_logits(*logits_and_clicks(SAMPLES)).backward()
        of_dense.step()
        of_dense.zero_grad()
        for param in tables.parameters():
            param.grad /= group.size  # the sum of what the ranks' mean losses say
        if of_tables is not None:
            of_tables.step()
            of_tables.zero_grad()
    with torch.no_grad():
        return auc(*logits_and_clicks(TESTED))


def dense(group: Group) -> Callable[[nn.Module], FlatOptimizer]:
    """SGD on the mean gradient."""
    return lambda model: SGD(model.parameters(), lr=LR, momentum=MOMENTUM, group=group, model=model)


def thinned(group: Group, codec: object = "threshold") -> Callable[[nn.Module], FlatOptimizer]:
    """The same, of which what the codec lets through crosses in each step."""
    return lambda model: OneBitSGD(model.parameters(), lr=LR, momentum=MOMENTUM, codec=codec, group=group, model=model)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, make, share in (("dense", dense, 1.0), ("thinned", thinned, 1 / 8)):
        group = TorchGroup.apart()
        model, tables = parts(0, TABLES if group.rank == 0 else 0)
        found = train(group, model, tables, make(group), share)
        told = torch.tensor([found, group.stats.sent_bytes], dtype=torch.float64)
        dist.all_reduce(told)
        if group.rank == 0:
            print(f"{name}: AUC {float(told[0]) / group.size:.4f}, all ranks sent {int(told[1]):,} bytes")
    dist.destroy_process_group()
