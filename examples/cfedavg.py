"""CFedAvg: every worker has labels of its own and makes as many steps as it can; moves are averaged in one bit.

    torchrun --nproc-per-node 3 examples/cfedavg.py

[Yang et al. 2021, arXiv 2106.07155]  The outer step goes to the mean of the workers' parameters, unequal numbers of
steps are allowed, and what one bit leaves out is sent later.
"""

import torch
import torch.distributed as dist
from torch import nn

from thinwire.optim import LocalSteps, OuterSGD

CLASSES, FEATURES, EVERY, ROUNDS = 6, 20, 16, 30

dist.init_process_group("gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
centres = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
generator.manual_seed(1 + rank)


def samples(labels: torch.Tensor) -> torch.Tensor:
    """One of each label's cloud."""
    return centres[labels] + torch.randn(len(labels), FEATURES, generator=generator)


def accuracy() -> float:
    """On samples of all labels."""
    labels = torch.arange(1200) % CLASSES
    with torch.no_grad():
        return float((model(samples(labels)).argmax(1) == labels).float().mean())


torch.manual_seed(2)
model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
inner = torch.optim.SGD(model.parameters(), lr=0.02)
optimizer = LocalSteps(inner, every=EVERY, outer=OuterSGD(lr=1.0, momentum=0.0), model=model)
own = torch.arange(CLASSES)[rank::workers]  # a shard that is not like the others
steps = EVERY - 4 * (rank % 3)  # a slow worker makes fewer

for round_ in range(1, ROUNDS + 1):
    for _ in range(steps):
        labels = own[torch.randint(len(own), (32,), generator=generator)]
        nn.functional.cross_entropy(model(samples(labels)), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if not optimizer.at_sync:
        optimizer.sync()
    if rank == 0 and round_ % 10 == 0:
        print(f"round {round_}: accuracy {accuracy():.3f}, {optimizer.stats()['sent_bytes']:,} bytes sent")
dist.destroy_process_group()
