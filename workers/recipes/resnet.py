"""A small ResNet (arXiv 1512.03385) for grey images of 8x8: a stem, three stages of basic blocks, a linear head.

Group norms stand where the paper has batch norms. Statistics of a batch would be those of a rank's share: the
gradient would depend on the number of workers, and running averages would differ between replicas. A group norm
looks at one image.

Initialised as the paper's authors do (arXiv 1502.01852): normal with std sqrt(2 / fan-in) before a ReLU; the head
small, so that the first loss is about ln 10 = 2.30 nats.

Legend: B images, C channels of a stage.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.contract.spec import Digits, ResnetRecipe
from thinwire.workers.data.digits import CLASSES, Images, ShiftedImages, load_digits
from thinwire.workers.data.windows import Sample
from thinwire.workers.recipes.of_job import OfJob
from thinwire.workers.recipes.seeded import seeded_normal

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
