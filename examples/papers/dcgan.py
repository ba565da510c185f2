"""DCGAN: two optimizers that take turns, as in 1-bit Adam's appendix; on faces in full, on drawn shapes in minutes.

python examples/papers/dcgan.py                                           small, on shapes that are drawn on the spot
torchrun --nproc-per-node 2 examples/papers/dcgan.py --optimizer adam     two workers on this machine, uncompressed
thinwire submit examples/papers/dcgan.py --min 2 --max 8 -- --preset paper --data /data/celeba/img_align_celeba

Networks and settings are those of PyTorch's own DCGAN example (arXiv 1511.06434). With each batch the discriminator
makes a step, then the generator, which sees the discriminator that has moved; a batch counts with both or with none, so
that a lost worker costs nothing. Noise follows from an image's number and the epoch, however many workers there are.

The score is the sliced Wasserstein distance between images that were generated and real ones that were not trained on
(arXiv 1710.10196, but of pixels): lower is better. --grid FILE draws 64 of the former. A folder of images is
read with Pillow. --save leaves both networks as safetensors. Needs pip install "thinwire[papers]".
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import parts
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from thinwire.optim import named
from thinwire.train import session

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
PRIME = 1_000_003


@dataclass(frozen=True)
class Preset:
    """side: pixels, a power of 2. channels: of the layer beside the image. noise: numbers that an image is made of."""

    side: int
    channels: int
    noise: int
    global_batch: int
    epochs: int
    lr: float


PRESETS = {
    # arXiv 2102.02888 trains DCGAN on CelebA; its settings were not at hand. These are of PyTorch's example: 5 epochs
    # of 202,599 images.
    "paper": Preset(side=64, channels=64, noise=100, global_batch=128, epochs=5, lr=2e-4),
    "small": Preset(side=16, channels=12, noise=16, global_batch=64, epochs=10, lr=1e-3),
}
WARMUP = 0.2
"""Of the steps, those in which 1-bit Adam and 1-bit LAMB send in full."""
MOMENTUM = 0.5
"""Of the gradient, whatever the optimizer calls it: a game of two turns round with more of it (arXiv 1511.06434)."""
HELD_OUT = 1024
"""Images that are not trained on, at most; of a small folder a tenth."""


def arguments(words=None):
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.add_flags(parser, PRESETS, optimizer="onebit_adam", memory=False)
    parser.add_argument("--data", type=Path, help="a folder of images, at any depth; left out: shapes")
    parser.add_argument("--grid", type=Path, help="a PNG of 64 generated images, at the end")
    return parser.parse_args(words)


def options(name, steps):
    """What an optimizer of that name takes beside its rate."""
    if "muon" in name or "sgd" in name:
        return {"momentum": MOMENTUM}
    own = {} if name == "local_steps" else {"betas": (MOMENTUM, 0.999)}
    return own | ({"warmup": max(1, int(WARMUP * steps))} if name in ("onebit_adam", "onebit_lamb") else {})


class Shapes(torch.utils.data.Dataset):
    """Discs and squares of one colour on black. All of one follows from its number."""

    def __init__(self, numbers, side):
        self.numbers, self.side = numbers, side

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, at):
        """(f32[3, side, side] in -1 to 1, its number)."""
        number = self.numbers[at]
        drawn = torch.Generator().manual_seed(number)
        radius = self.side * (0.15 + 0.15 * torch.rand((), generator=drawn))
        middle = self.side * (0.35 + 0.3 * torch.rand(2, 1, generator=drawn))
        x, y = torch.arange(self.side) + 0.5 - middle
        across, down = x.abs()[None, :], y.abs()[:, None]
        size = (across**2 + down**2).sqrt() if number % 2 else torch.maximum(across, down)
        colour = 0.4 + 0.6 * torch.rand(3, 1, 1, generator=drawn)
        return 2 * (radius - size).clamp(0, 1) * colour - 1, number


class Pictures(torch.utils.data.Dataset):
    """Images in files: the shorter edge becomes `side`, and the middle is taken."""

    def __init__(self, files, numbers, side):
        self.files, self.numbers, self.side = files, numbers, side

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, at):
        """(f32[3, side, side] in -1 to 1, its number)."""
        from PIL import Image, ImageOps

        number = self.numbers[at]
        image = parts.opened(self.files[number])
        fitted = ImageOps.fit(image, (self.side, self.side), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(fitted.tobytes()), dtype=torch.uint8)
        return pixels.view(self.side, self.side, 3).permute(2, 0, 1) / 127.5 - 1, number


def read(folder, side):
    """(training, held out). Raises: ValueError for a folder with too few images."""
    if folder is None:
        return Shapes(range(2048), side), Shapes(range(2048, 2048 + HELD_OUT // 2), side)
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    apart = min(HELD_OUT, len(files) // 10)
    if not apart:
        raise ValueError(f"--data {folder}: {len(files)} images ({', '.join(sorted(SUFFIXES))}); give at least 10")
    return Pictures(files, range(len(files) - apart), side), Pictures(
        files, range(len(files) - apart, len(files)), side
    )


def initialised(net):
    """Convolutions from N(0, 0.02), factors of BatchNorm from N(1, 0.02), as in the example."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    return net


def widths(preset):
    """Channels of the layers from 4x4 pixels to half the side: 8, 4, 2, 1 times preset.channels for 64 pixels."""
    return [preset.channels << k for k in reversed(range((preset.side // 8).bit_length()))]


def generator(preset):
    """f[B, noise, 1, 1] -> f[B, 3, side, side] in -1 to 1."""
    layers, before = [], preset.noise
    for k, wide in enumerate(widths(preset)):
        layers += [nn.ConvTranspose2d(before, wide, 4, 2 if k else 1, 1 if k else 0, bias=False)]
        layers += [nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
        before = wide
    return initialised(nn.Sequential(*layers, nn.ConvTranspose2d(before, 3, 4, 2, 1, bias=False), nn.Tanh()))


def discriminator(preset):
    """f[B, 3, side, side] -> logits f[B, 1, 1, 1]: is it a real image?"""
    layers, before = [], 3
    for k, wide in enumerate(reversed(widths(preset))):
        layers += [nn.Conv2d(before, wide, 4, 2, 1, bias=False), *([nn.BatchNorm2d(wide)] if k else [])]
        layers += [nn.LeakyReLU(0.2, inplace=True)]
        before = wide
    return initialised(nn.Sequential(*layers, nn.Conv2d(before, 1, 4, 1, 0, bias=False)))


def drawn_noise(numbers, epoch, seed, size):
    """f[B, size, 1, 1], of which each row follows from the number of its image."""
    rows = []
    for number in numbers.tolist():
        drawn = torch.Generator().manual_seed((seed * PRIME + epoch) * PRIME + number)
        rows.append(torch.randn(size, 1, 1, generator=drawn))
    return torch.stack(rows)


def judged(net, images, is_real):
    """Mean cross-entropy of what it says of them. is_real: what it should say."""
    logits = net(images).flatten().float()
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def distance(one, other, projections=512):
    """Sliced Wasserstein-1 of two sets of as many images: the mean over directions of that of their projections."""
    drawn = torch.Generator().manual_seed(0)
    one, other = one.flatten(1), other.flatten(1)
    directions = torch.randn(one.shape[1], projections, generator=drawn)
    directions /= directions.norm(dim=0)
    sorted_a, sorted_b = ((x @ directions).sort(dim=0).values for x in (one, other))
    return (sorted_a - sorted_b).abs().mean().item()


@torch.no_grad()
def generated(net, count, preset, device):
    """f32[count, 3, side, side] in -1 to 1, of fixed noise."""
    noise = torch.randn(count, preset.noise, 1, 1, generator=torch.Generator().manual_seed(1))
    net.eval()  # the statistics of BatchNorm, which are the same on all workers
    images = torch.cat([net(part.to(device)).cpu() for part in noise.split(128)])
    net.train()
    return images


def draw(images, file, across=8):
    """Images side by side, as a PNG."""
    from PIL import Image

    _, channels, high, wide = images.shape
    rows = images[: across * across].view(across, across, channels, high, wide).permute(0, 3, 1, 4, 2)
    pixels = ((rows + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).reshape(across * high, across * wide, channels)
    Image.frombytes("RGB", (across * wide, across * high), bytes(pixels.flatten().tolist())).save(file)


def main(words=None):
    """Train both, and say how far what is generated is from what is real."""
    given = arguments(words)
    preset = PRESETS[given.preset]
    batch, lr = given.batch or preset.global_batch, parts.rate_of(given, preset.lr)
    training, held_out = read(given.data, preset.side)
    steps = given.steps or preset.epochs * len(training) // batch

    with session(given.folder, save_every=max(1, steps // 10)) as run:
        torch.manual_seed(given.seed)
        g, d = generator(preset).to(run.device), discriminator(preset).to(run.device)
        g_optimizer, d_optimizer = (
            named(
                given.optimizer,
                net.parameters(),
                lr,
                total_steps=steps,
                lr_warmup_steps=0,
                model=net,
                group=run.group,
                **options(given.optimizer, steps),
            )
            for net in (g, d)
        )
        run.register(generator=g, discriminator=d, g_optimizer=g_optimizer, d_optimizer=d_optimizer)

        made_by, judge = (torch.compile(net) if given.compile else net for net in (g, d))
        precision = torch.autocast(run.device.type, torch.bfloat16, enabled=given.bf16)
        began = time.monotonic()
        batches = run.batches(
            training, global_batch=batch, steps=steps, seed=given.seed, loader={"num_workers": given.loaders}
        )
        for real, numbers in batches:
            epoch = run.step_number * batch // len(training)
            real = real.to(run.device)
            noise = drawn_noise(numbers, epoch, given.seed, preset.noise).to(run.device)
            with precision:
                fake = made_by(noise)

            d_optimizer.zero_grad()
            with precision:
                d_loss = judged(judge, real, is_real=True) + judged(judge, fake.detach(), is_real=False)
            d_loss.backward()
            d_optimizer.step()

            d.requires_grad_(False)  # its gradients of the next line would be thrown away
            g_optimizer.zero_grad()
            with precision:
                g_loss = judged(judge, fake, is_real=True)
            g_loss.backward()
            d.requires_grad_(True)
            g_optimizer.step()

            run.report(loss=d_loss, generator_loss=g_loss)
            if run.rank == 0 and run.step_number % 50 == 0:
                print(
                    f"step {run.step_number}: discriminator {d_loss.item():.3f}, generator {g_loss.item():.3f}, "
                    f"{run.world_size} workers",
                    flush=True,
                )

        if run.rank == 0:
            images = generated(g, len(held_out), preset, run.device)
            score = distance(images, torch.stack([image for image, _ in held_out]))
            if given.grid:
                draw(images, given.grid)
            losses = {"discriminator_loss": d_loss.item(), "generator_loss": g_loss.item()}
            how = {"higher_is_better": False, "began": began}
            both = (g_optimizer, d_optimizer)
            parts.tell(given, "dcgan", run, both, score, "sliced Wasserstein distance", **how, **losses)

            if given.save:
                given.save.mkdir(parents=True, exist_ok=True)
                for name, net in (("generator", g), ("discriminator", d)):
                    save_file(net.state_dict(), given.save / f"{name}.safetensors")


if __name__ == "__main__":
    main()
