"""A small ResNet on images, as people write it with torchvision: a lost worker costs it no step.

python examples/images.py                                       one worker
torchrun --nproc-per-node 2 examples/images.py                  two workers on this machine
thinwire submit examples/images.py --min 1 --max 4              a job, whose workers may die, come and leave

- optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
+ with session() as run:
+     optimizer = OneBitAdam(model.parameters(), model=model, lr=2e-3, total_steps=steps, group=run.group)
+     run.register(model=model, optimizer=optimizer, schedule=schedule)
- for images, labels in DataLoader(train, batch_size=32, shuffle=True, num_workers=1):
+     for images, labels in run.batches(train, global_batch=32, steps=steps, loader={"num_workers": 1}):

`model=model`: the statistics of BatchNorm are the same on all workers, as under DistributedDataParallel. The images are
drawn on the spot, each from its number; a dataset and transforms of torchvision would stand in their place.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from thinwire.optim import OneBitAdam
from thinwire.train import session

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--loaders", type=int, default=1, help="processes that draw images ahead, on each worker")
given = parser.parse_args()

SIDE, CLASSES = 16, 3


class Shapes(torch.utils.data.Dataset):
    """Discs, squares and crosses in noise. Which one, where and how large follows from an image's number."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        drawn = torch.Generator().manual_seed(self.numbers[i])
        label = self.numbers[i] % CLASSES
        radius = 3 + 2 * torch.rand((), generator=drawn)
        x, y = torch.arange(SIDE) - (4 + (SIDE - 8) * torch.rand(2, 1, generator=drawn))
        across, down = x.abs().expand(SIDE, SIDE), y.abs()[:, None].expand(SIDE, SIDE)
        inside = (
            across**2 + down**2 < radius**2,
            torch.maximum(across, down) < 0.8 * radius,
            (torch.minimum(across, down) < 1) & (torch.maximum(across, down) < radius),
        )[label]
        colour = 0.5 + 0.5 * torch.rand(3, 1, 1, generator=drawn)
        return inside * colour + 0.3 * torch.randn(3, SIDE, SIDE, generator=drawn), label


class Residual(nn.Module):
    """Two convolutions, added to what they were given; half the side, twice the channels."""

    def __init__(self, channels):
        super().__init__()
        wide = 2 * channels
        self.first, self.norm_1 = nn.Conv2d(channels, wide, 3, 2, 1, bias=False), nn.BatchNorm2d(wide)
        self.second, self.norm_2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide)
        self.shortcut = nn.Conv2d(channels, wide, 1, 2, bias=False)

    def forward(self, x):
        """f[B, channels, side, side] -> f[B, 2 channels, side / 2, side / 2]."""
        y = F.relu(self.norm_1(self.first(x)))
        return F.relu(self.shortcut(x) + self.norm_2(self.second(y)))


def resnet():
    """f[B, 3, SIDE, SIDE] -> logits f[B, CLASSES]."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))
    return nn.Sequential(stem, Residual(8), Residual(16), head)


@torch.no_grad()
def accuracy():
    """Of 96 images that were not trained on."""
    model.eval()
    images = torch.stack([image for image, _ in validation]).to(run.device)
    labels = torch.tensor([label for _, label in validation], device=run.device)
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


train, validation = Shapes(range(2000)), Shapes(range(2000, 2096))

with session() as run:
    torch.manual_seed(0)
    model = resnet().to(run.device)
    optimizer = OneBitAdam(model.parameters(), model=model, lr=2e-3, total_steps=given.steps, group=run.group)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, given.steps)
    run.register(model=model, optimizer=optimizer, schedule=schedule)

    loader = {"num_workers": given.loaders}
    for images, labels in run.batches(train, global_batch=32, steps=given.steps, loader=loader):
        loss = F.cross_entropy(model(images.to(run.device)), labels.to(run.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.report(loss=loss)
        if run.rank == 0 and run.step_number % 20 == 0:
            print(f"step {run.step_number}: loss {loss.item():.3f}, {run.world_size} workers", flush=True)

    if run.rank == 0:
        print(f"at the end: {accuracy():.0%} of the other images are classified correctly")
