"""A few small tensors, gradients of several workers for them, and a loop: what tests of the reference share."""

import torch

from tests.reference.papers import Hyper

SIZES = (1, 2, 3, 4, 8)
SHAPES = ((13, 7), (3, 13), (13,), (1,), (5,))
EXACT = {"rtol": 0, "atol": 1e-12}
HYPER = Hyper(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
SHARED = Hyper(lr=1e-2, betas=(0.9, 0.99), eps=1e-8)


def always(step):
    return True


def never(step):
    return False


def start(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradients(step, num_workers, signal=0.3):
    """A common part and a worker's own noise: [worker][tensor]."""
    common = start(7)
    made = []
    for worker in range(num_workers):
        noise = start(1000 * step + worker + 1)
        made.append([signal * c + n for c, n in zip(common, noise, strict=True)])
    return made


def run(reference, steps, num_workers, of=gradients):
    for step in range(1, steps + 1):
        reference.step(of(step, num_workers))
    return reference


def assert_same(got, expected, atol=1e-12):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)
