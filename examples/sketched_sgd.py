"""Sketched SGD on a few hundred rare features: a tenth of fp32's bytes, and the largest updates cross exactly.

    torchrun --nproc-per-node 2 examples/sketched_sgd.py

[Ivkin et al. 2019, arXiv 1903.04488]  Each step sums a count-sketch of what every rank would move by, then the exact
values of the largest. What was not among them waits in error memory.
"""

import torch
import torch.distributed as dist
from torch import nn

from thinwire.optim import SketchedSGD

FEATURES, CLASSES, BATCH, STEPS = 400, 10, 64, 200

dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(0)
rare = torch.rand(CLASSES, FEATURES, generator=generator) < 0.1
centres = 2 * rare * torch.randn(CLASSES, FEATURES, generator=generator)
generator.manual_seed(1 + rank)

torch.manual_seed(2)
model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
optimizer = SketchedSGD(model.parameters(), lr=0.02, momentum=0.9, model=model)

for step in range(1, STEPS + 1):
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    found = model(centres[labels] + torch.randn(BATCH, FEATURES, generator=generator))
    nn.functional.cross_entropy(found, labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 50 == 0:
        right = float((found.argmax(1) == labels).float().mean())
        print(f"step {step}: accuracy {right:.3f}, {optimizer.stats()['sent_bytes'] / step:,.0f} bytes a step")
dist.destroy_process_group()
