"""CADA: every worker has labels of its own, and sends its gradient only when that has changed enough.

    torchrun --nproc-per-node 3 examples/cada.py

[Chen et al. 2020, arXiv 2012.15469]  step() takes a closure: it computes the gradient of the step's batch, also at an
older point, to see how much the gradient itself has changed, whatever the noise of the batch.
"""

import torch
import torch.distributed as dist
from torch import nn

from thinwire.optim import CADA

CLASSES, FEATURES, STEPS = 6, 20, 300

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
optimizer = CADA(model.parameters(), lr=2e-3, model=model)
own = torch.arange(CLASSES)[rank::workers]

for step in range(1, STEPS + 1):
    labels = own[torch.randint(len(own), (32,), generator=generator)]
    batch = samples(labels)

    def closure(batch: torch.Tensor = batch, labels: torch.Tensor = labels) -> float:
        """Of this step's batch, wherever the parameters are."""
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    optimizer.step(closure)
    if rank == 0 and step % 100 == 0:
        told = optimizer.stats()
        print(f"step {step}: accuracy {accuracy():.3f}, {told['num_uploads']} of {told['possible_uploads']} uploads")
dist.destroy_process_group()
