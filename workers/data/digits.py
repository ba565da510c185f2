"""Real images that need no download: scikit-learn's handwritten digits, 1797 of them, grey, 8x8, ten classes.

They are split class by class, so that both parts hold the classes alike; which image is on which side depends on
nothing but the fraction. A training image is moved by a few pixels, anew each time that it is visited.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.workers.data.corpus import DataError
from thinwire.workers.data.order import generator
from thinwire.workers.data.windows import Sample

SIDE = 8
CLASSES = 10
_WHITE = 16
"""The largest value of a pixel; 0 is the background."""


@dataclass(frozen=True, slots=True)
class Images:
    """Some of the digits: pixels, uint8[N, 8, 8], and classes, int64[N]. digest: of all, and the split."""

    pixels: Tensor
    labels: Tensor
    digest: str

    def first(self, num: int) -> list[Sample]:
        """The first `num` of them, as they are: (f32[1, 8, 8] from 0 to 1, class)."""
        return list(zip(as_images(self.pixels[:num]), self.labels[:num], strict=True))


class ShiftedImages:
    """Images moved by up to `shift` pixels each way, anew every time that one is visited: a dataset of (image, class).

    What comes in from beyond the edge is background.
    """

    def __init__(self, images: Images, shift: int, seed: int) -> None:
        self._images, self._shift, self._seed = images, shift, seed
        self.digest = images.digest

    def __len__(self) -> int:
        return len(self._images.labels)

    def visit(self, sample: int, number: int) -> Sample:
        """f32[1, 8, 8] from 0 to 1, and int64[]."""
        by = torch.randint(0, 2 * self._shift + 1, (2,), generator=generator(self._seed, "shift", number))
        moved = _window(self._images.pixels[sample], self._shift, *by.tolist())
        return as_images(moved[None])[0], self._images.labels[sample]


def load_digits(validation_fraction: float) -> tuple[Images, Images]:
    """The digits: those to train on, and those to validate on, in an order that is fixed.

    Raises: DataError where scikit-learn is missing, or a part would be empty.
    """
    pixels, labels = _read()
    train, validation = split(labels, validation_fraction)
    for part, chosen in (("training", train), ("validation", validation)):
        if not len(chosen):
            raise DataError(
                f"the {part} part of the {len(labels)} digits is empty at data.validation_fraction = "
                f"{validation_fraction}; name another fraction, such as 0.3"
            )
    hashed = hashlib.sha256(len(train).to_bytes(8, "big"))
    for chosen in (train, validation):
        hashed.update(pixels[chosen].numpy().tobytes())
        hashed.update(labels[chosen].numpy().tobytes())
    digest = hashed.hexdigest()
    return Images(pixels[train], labels[train], digest), Images(pixels[validation], labels[validation], digest)


def split(labels: Tensor, validation_fraction: float) -> tuple[Tensor, Tensor]:
    """Which samples train and which validate, int64 each, in a random order that is always the same.

    Of every class the same fraction validates, to rounding; a larger fraction only moves samples to the validation.
    """
    order = torch.randperm(len(labels), generator=generator("split"))
    validates = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        of_class = order[labels[order] == label]
        validates[of_class[: round(validation_fraction * len(of_class))]] = True
    return order[~validates[order]], order[validates[order]]


def as_images(pixels: Tensor) -> Tensor:
    """uint8[W, 8, 8] -> f32[W, 1, 8, 8] from 0, the background, to 1."""
    return pixels[:, None].float() / _WHITE


def _window(image: Tensor, shift: int, down: int, right: int) -> Tensor:
    """The image in a frame of background, seen through a window at (down, right); (shift, shift) is the image."""
    return F.pad(image, (shift, shift, shift, shift))[down : down + SIDE, right : right + SIDE]


def _read() -> tuple[Tensor, Tensor]:
    """All images, uint8[N, 8, 8], and their classes, int64[N]."""
    try:
        from sklearn.datasets import load_digits  # an extra; only jobs on images need it
    except ImportError as error:
        raise DataError(
            f"data.source = digits needs scikit-learn on every worker, and here: {error}; "
            'run pip install "thinwire[vision]"'
        ) from error
    found = load_digits()
    return torch.as_tensor(found.images).to(torch.uint8), torch.as_tensor(found.target).long()
