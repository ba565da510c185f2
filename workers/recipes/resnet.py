"""A small ResNet (arXiv 1512.03385) for grey images of 8x8: a stem, three stages of basic blocks, a linear head.

Group norms stand where the paper has batch norms. Statistics of a batch would be those of a rank's share: the
gradient would depend on the number of workers, and running averages would differ between replicas. A group norm
looks at one image.

Initialised as the paper's authors do (arXiv 1502.01852): normal with std sqrt(2 / fan-in) before a ReLU; the head
small, so that the first loss is about ln 10 = 2.30 nats.

Legend: B images, C channels of a stage.

Its images are real and need no download: scikit-learn's handwritten digits, 1797 of them, grey, 8x8, ten classes.
They are split class by class, so that both parts hold the classes alike; which image is on which side depends on
nothing but the fraction. A training image is moved by a few pixels, anew each time that it is visited.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.contract.spec import Digits, ResnetRecipe
from thinwire.workers.data.corpus import DataError, Sample
from thinwire.workers.data.order import generator
from thinwire.workers.recipes.of_job import OfJob, seeded_normal

_GROUPS = 8
_HEAD_STD = 0.01


class Block(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))); the shortcut is x, or a projection where shapes differ."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = _conv(channels_in, channels, stride)
        self.norm_1 = _norm(channels)
        self.conv_2 = _conv(channels, channels)
        self.norm_2 = _norm(channels)
        self.projection = (
            nn.Identity() if (channels_in, stride) == (channels, 1) else _Projection(channels_in, channels, stride)
        )

    def forward(self, x: Tensor) -> Tensor:
        """f[B, channels_in, h, w] -> f[B, C, h / stride, w / stride]."""
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.projection(x) + self.norm_2(self.conv_2(y)))


class _Projection(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
        self.norm = _norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        return out


class Resnet(nn.Module):
    """The whole model; `build` gives it its values. The first stage keeps the image's size, the others halve it."""

    def __init__(self, recipe: ResnetRecipe) -> None:
        super().__init__()
        self.stem = _conv(1, recipe.widths[0])
        self.stem_norm = _norm(recipe.widths[0])
        blocks: list[Block] = []
        channels = recipe.widths[0]
        for stage, width in enumerate(recipe.widths):
            for number in range(recipe.blocks):
                blocks.append(Block(channels, width, stride=2 if stage and not number else 1))
                channels = width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats an image, a scalar; without targets the logits, f[B, 10].

        inputs: f[B, 1, 8, 8], brought to the parameters' dtype; targets: int64[B].
        """
        x = F.relu(self.stem_norm(self.stem(inputs.to(self.stem.weight.dtype))))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float(), targets)


class ResnetOnDigits(OfJob):
    """It tells which digit an image shows."""

    @cached_property
    def images(self) -> tuple[Images, Images]:
        """Those to train and to validate on, read when they are first asked for. Raises: DataError."""
        assert isinstance(self.spec.data, Digits), "a spec that was validated has no other"
        return load_digits(self.spec.data.validation_fraction)

    def model(self) -> Resnet:
        """The same for the same spec."""
        assert isinstance(self.spec.recipe, ResnetRecipe)
        return build(self.spec.recipe, self.seed).to(self.dtype)

    def dataset(self) -> ShiftedImages:
        """Images, moved anew at every visit. Raises: DataError."""
        assert isinstance(self.spec.recipe, ResnetRecipe)
        return ShiftedImages(self.images[0], self.spec.recipe.shift, self.seed)

    def validation(self) -> list[Sample]:
        """Images as they are. Raises: DataError."""
        return self.images[1].first(self.spec.evaluation.windows)

    def loss(self, model: nn.Module, batch: Sample) -> Tensor:
        """Nats an image."""
        images, labels = batch
        loss: Tensor = model(images, labels)
        return loss


def build(recipe: ResnetRecipe, seed: int) -> Resnet:
    """A new model on the CPU in float32. The same (recipe, seed) gives the same bits; the global rng is not used."""
    with torch.device("meta"):  # the layers' own initialisation would draw from the global rng
        model = Resnet(recipe)
    return seeded_normal(model, seed, _std)


def _std(name: str, weight: Tensor) -> float:
    return _HEAD_STD if name == "head.weight" else math.sqrt(2 / weight[0].numel())


def _conv(channels_in: int, channels: int, stride: int = 1) -> nn.Conv2d:
    """3x3, without a bias: the norm that follows has one."""
    return nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(channels, _GROUPS), channels)


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
