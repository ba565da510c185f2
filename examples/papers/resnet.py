"""ResNet-18 and 50 on images of yours: 1-bit Adam's CIFAR-10, 0/1 Adam's ImageNet, or in minutes on a laptop.

python examples/papers/resnet.py                                          small, on scikit-learn's handwritten digits
torchrun --nproc-per-node 2 examples/papers/resnet.py --optimizer sgd     two workers on this machine, uncompressed
thinwire submit examples/papers/resnet.py --min 2 --max 8 -- --preset cifar --data /data/cifar-10-batches-py
thinwire submit examples/papers/resnet.py --min 2 --max 8 -- --preset imagenet --data /data/imagenet --bf16

--data is a folder: of CIFAR-10, as Python or as binary files; of train/ and val/, as ImageNet is laid out; or of one
for each class, of which a tenth is held out. What is drawn of an image, its crop and its mirror image, follows from its
number in the run: thinwire.train.seeded. A run that is resumed, resized or has lost a worker sees what it would have.
BatchNorm's statistics are the same on all workers: `model=model`.

The score is top-1 accuracy on what is held out; top-5 is beside it. The model is transformers', and images are read by
`datasets`. Needs pip install "thinwire[papers]".
"""

import argparse
import contextlib
import functools
import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import parts
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import ResNetConfig, ResNetForImageClassification

from thinwire.optim import named
from thinwire.train import seeded, session


@dataclass(frozen=True)
class Preset:
    """drops: epochs after which the rate is a tenth of what it was. warmup_epochs: those that 1-bit Adam sends in full;
    None: it finds out. rates: of those whose steps are of another size than Adam's.
    """

    layers: int
    stem: str
    side: int
    global_batch: int
    epochs: int
    lr: float
    drops: tuple[float, ...]
    warmup_epochs: float | None
    weight_decay: float
    rates: dict[str, float]


PRESETS = {
    # arXiv 2102.02888, section 6: ResNet-18, 8 workers of 128 images each, 200 epochs of which 13 are warm-up, and a
    # rate of 1e-4, a tenth of that after each 100. SGD's rate is not the paper's.
    "cifar": Preset(
        layers=18, stem="cifar", side=32, global_batch=8 * 128, epochs=200, lr=1e-4, drops=(100,), warmup_epochs=13,
        weight_decay=0.0, rates={"sgd": 0.1, "onebit_sgd": 0.1},
    ),
    # arXiv 2202.06009, section 6: ResNet-18, batch 256, 90 epochs. When rates drop, SGD's rate and the decay are those
    # of PyTorch's own ImageNet example.
    "imagenet": Preset(
        layers=18, stem="imagenet", side=224, global_batch=256, epochs=90, lr=1e-4, drops=(30, 60), warmup_epochs=None,
        weight_decay=1e-4, rates={"sgd": 0.1, "onebit_sgd": 0.1},
    ),
    "small": Preset(
        layers=18, stem="cifar", side=8, global_batch=64, epochs=2, lr=1e-3, drops=(1.5,), warmup_epochs=0.5,
        weight_decay=1e-4, rates={"sgd": 0.05, "onebit_sgd": 0.05},
    ),
}  # fmt: skip
SHAPES = {18: ("basic", [2, 2, 2, 2], [64, 128, 256, 512]), 50: ("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048])}
"""Kind of block, blocks and channels of each stage, by layers (arXiv 1512.03385, table 1)."""
OF_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OF_CIFAR = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
"""Mean and standard deviation of red, green and blue."""


def arguments(words=None):
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.add_flags(parser, PRESETS, optimizer="onebit_adam")
    parser.add_argument("--data", type=Path, help="a folder; left out: scikit-learn's handwritten digits")
    parser.add_argument("--layers", type=int, choices=SHAPES, help="left out: the preset's")
    parser.add_argument(
        "--stem", choices=("imagenet", "cifar"), help="cifar: 3x3, and no pooling; left out: the preset's"
    )
    parser.add_argument("--side", type=int, help="pixels of an image out of a folder of images; left out: the preset's")
    parser.add_argument(
        "--weights", type=parts.a_file, help="a model.safetensors to begin with; another head is left out"
    )
    parser.add_argument("--channels-last", action="store_true", help="as tensor cores read images")
    given = parser.parse_args(words)
    if given.side is not None and given.side < 1:
        parser.error(f"--side {given.side}: give a number from 1")
    return given


class Pixels(torch.utils.data.Dataset):
    """Small images that are held in memory. shift: pixels by which a training image is moved; flip: is it mirrored?

    Gives (f32[C, side, side], class).
    """

    def __init__(self, pixels, labels, mean, std, shift=0, flip=False):
        self.pixels, self.labels, self.shift, self.flip = pixels, labels, shift, flip
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image, side = self.pixels[i], self.pixels.shape[-1]
        if self.shift:
            down, right = torch.randint(0, 2 * self.shift + 1, (2,)).tolist()
            image = F.pad(image, [self.shift] * 4)[:, down : down + side, right : right + side]
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image.float() / 255 - self.mean) / self.std, int(self.labels[i])


class Pictures(torch.utils.data.Dataset):
    """Images of a folder, as `datasets` gives them undecoded: (f32[3, side, side], class).

    Training: a random part, half of them mirrored; else the middle.
    """

    def __init__(self, rows, side, training):
        self.rows, self.side, self.training = rows, side, training
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in OF_IMAGENET)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        image = parts.opened(row["image"])
        box = part_of(*image.size) if self.training else middle_of(*image.size)
        image = image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if self.training and torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return (pixels.float() / 255 - self.mean) / self.std, row["label"]


def part_of(width, height):
    """A random part of an image, as (left, upper, right, lower): 8 to 100 % of it, 3:4 to 4:3 (arXiv 1409.4842)."""
    for _ in range(10):
        area = width * height * (0.08 + 0.92 * torch.rand(()).item())
        ratio = (3 / 4) ** (1 - 2 * torch.rand(()).item())
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, upper = (room * torch.rand(()).item() for room in (width - wide, height - high))
            return left, upper, left + wide, upper + high
    return middle_of(width, height)


def middle_of(width, height):
    """The square in the middle, seven eighths of the shorter side, as 224 pixels of 256 are."""
    side = min(width, height) * 7 / 8
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


class Arrays(pickle.Unpickler):
    """What CIFAR-10's Python files are made of, and nothing else: a pickle may call any function that it names."""

    def find_class(self, module, name):
        """Raises: pickle.UnpicklingError for what is no array."""
        if (module.split(".")[0], name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy", "_reconstruct")}:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}: CIFAR-10's files hold arrays and lists")


def cifar_part(files):
    """uint8[N, 3, 32, 32] and int64[N] of CIFAR-10's files: .bin, or pickles. Raises: ValueError."""
    pixels, labels = [], []
    for file in files:
        if file.suffix == ".bin":
            raw = np.fromfile(file, dtype=np.uint8)
            if len(raw) % 3073 or not len(raw):
                raise ValueError(f"{file}: has {len(raw)} bytes, and an image of CIFAR-10 has 3073")
            raw = raw.reshape(-1, 3073)
            own, classes = raw[:, 1:], raw[:, 0]
        else:
            with file.open("rb") as opened:
                found = Arrays(opened, encoding="latin1").load()
            own, classes = found["data"], found["labels"]
        pixels.append(torch.from_numpy(np.array(own, dtype=np.uint8).reshape(-1, 3, 32, 32)))
        labels.append(torch.from_numpy(np.array(classes, dtype=np.int64)))
    return torch.cat(pixels), torch.cat(labels)


def cifar(folder):
    """(training, held out, classes) of CIFAR-10 in this folder or one in it, or None."""
    for inside in (folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"):
        for ending in (".bin", ""):
            training = sorted(inside.glob(f"data_batch_[1-5]{ending}"))
            if training and (inside / f"test_batch{ending}").is_file():
                first = Pixels(*cifar_part(training), *OF_CIFAR, shift=4, flip=True)
                return first, Pixels(*cifar_part([inside / f"test_batch{ending}"]), *OF_CIFAR), 10
    return None


def image_folder(folder, side):
    """(training, held out, classes) of train/ and val/, or of a folder for each class. Raises: ValueError."""
    found = datasets.load_dataset("imagefolder", data_dir=str(folder), drop_labels=False)
    found = found.cast_column("image", datasets.Image(decode=False))  # which would not say what it cannot read
    training = found["train"]
    if "label" not in training.features:
        raise ValueError(f"--data {folder}: give a folder with a folder of images for each class, or train/ and val/")
    held_out = found.get("validation", found.get("test"))
    if held_out is None:
        apart = training.train_test_split(0.1, seed=0, stratify_by_column="label")
        training, held_out = apart["train"], apart["test"]
    names = training.features["label"].names
    if unseen := set(held_out.unique("label")) - set(training.unique("label")):
        raise ValueError(f"--data {folder}: no image to train on is of class {names[min(unseen)]}, which is held out")
    return Pictures(training, side, training=True), Pictures(held_out, side, training=False), len(names)


def digits():
    """The same of scikit-learn's 1797 handwritten digits, grey, 8x8, of which each sixth is held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.from_numpy(found.images * 255 / 16).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(found.target).long()
    held_out = torch.arange(len(labels)) % 6 == 0
    parts = [(pixels[at], labels[at], (0.3,), (0.4,)) for at in (~held_out, held_out)]
    return Pixels(*parts[0], shift=1), Pixels(*parts[1]), 10


def read(given, side):
    """(training, held out, classes) of --data. Raises: ValueError."""
    if given.data is None:
        return digits()
    if not given.data.is_dir():
        raise ValueError(f"--data {given.data}: there is no such folder")
    return cifar(given.data) or image_folder(given.data, side)


def make_model(layers, classes, stem, channels, weights=None):
    """transformers' ResNet; f32[B, channels, side, side] to logits f32[B, classes]. Raises: ValueError for weights that
    are not of this one.
    """
    kind, depths, hidden = SHAPES[layers]
    config = ResNetConfig(
        num_channels=channels,
        embedding_size=64,
        hidden_sizes=hidden,
        depths=depths,
        layer_type=kind,
        num_labels=classes,
    )
    model = ResNetForImageClassification(config)
    if stem == "cifar":
        embedder = model.resnet.embedder
        embedder.pooler = nn.Identity()
        embedder.embedder.convolution = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(embedder.embedder.convolution.weight, mode="fan_out", nonlinearity="relu")
    if weights is not None:
        begin_with(model, load_file(weights), weights)
    return model


def begin_with(model, state, where):
    """Take over these values, but for a head of other classes."""
    own = model.state_dict()
    wrong = [name for name, value in own.items() if name not in state or state[name].shape != value.shape]
    if of_body := [name for name in wrong if not name.startswith("classifier.")]:
        raise ValueError(
            f"--weights {where}: is of another ResNet, as in {of_body[0]}: its layers and stem must be the same"
        )
    model.load_state_dict({**state, **{name: own[name] for name in wrong}}, strict=False)


def checkpoint_stages(model):
    """Keep what goes into each stage, and compute the rest again in backward, without BatchNorm counting it twice."""

    @contextlib.contextmanager
    def uncounted(stage):
        norms = [one for one in stage.modules() if isinstance(one, nn.BatchNorm2d)]
        before = [(norm, norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
        for norm in norms:
            norm.momentum = 0.0  # what was, and nothing of what is
        try:
            yield
        finally:
            for norm, momentum, batches in before:
                norm.momentum = momentum
                norm.num_batches_tracked.copy_(batches)

    for stage in model.resnet.encoder.stages:
        contexts = functools.partial(lambda stage: (contextlib.nullcontext(), uncounted(stage)), stage)
        stage.forward = functools.partial(checkpoint, stage.forward, use_reentrant=False, context_fn=contexts)


@torch.no_grad()
def evaluate(model, images, device, batch=256):
    """{"loss", "top1", "top5"}: means over the images, nats and parts of 1; the model is left as it was."""
    training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for inputs, labels in torch.utils.data.DataLoader(images, batch_size=batch):
        logits, labels = model(inputs.to(device)).logits.float(), labels.to(device)
        right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        of_batch = F.cross_entropy(logits, labels, reduction="sum"), right[:, 0].sum(), right.sum()
        sums += torch.stack([one.double().cpu() for one in of_batch])
    model.train(training)
    return dict(zip(("loss", "top1", "top5"), (sums / len(images)).tolist(), strict=True))


def main(words=None):
    """Train, evaluate, and say how it went."""
    given = arguments(words)
    preset = PRESETS[given.preset]
    training, held_out, classes = read(given, given.side or preset.side)
    batch = given.batch or preset.global_batch
    steps = given.steps or -(-len(training) * preset.epochs // batch)
    drops = [round(steps * drop / preset.epochs) for drop in preset.drops]
    lr = parts.rate_of(given, preset.lr, rates=preset.rates)
    options = {}
    if given.optimizer in ("onebit_adam", "onebit_lamb") and preset.warmup_epochs:
        options["warmup"] = max(1, round(steps * preset.warmup_epochs / preset.epochs))

    with session(given.folder, save_every=max(1, steps // 10)) as run:
        torch.manual_seed(given.seed)
        channels = len(training[0][0])
        stem = given.stem or preset.stem
        model = make_model(given.layers or preset.layers, classes, stem, channels, given.weights).to(run.device)
        layout = torch.channels_last if given.channels_last else torch.contiguous_format
        if given.checkpointing:
            checkpoint_stages(model)
        optimizer = named(
            given.optimizer,
            [{"params": list(model.parameters()), "weight_decay": preset.weight_decay}],
            lr,
            total_steps=steps,
            lr_warmup_steps=0,
            model=model,
            group=run.group,
            **options,
        )
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        run.evaluate_every(
            max(1, steps // preset.epochs), lambda part: evaluate(model, part, run.device), data=held_out
        )
        computed = torch.compile(model) if given.compile else model

        def loss_of(images, labels):
            """Nats, the mean over f[B, C, side, side] and int64[B]."""
            return F.cross_entropy(computed(images.contiguous(memory_format=layout)).logits.float(), labels)

        began = time.monotonic()
        model.train()
        batches = run.batches(
            seeded(training, given.seed),
            global_batch=batch,
            steps=steps,
            seed=given.seed,
            loader={"num_workers": given.loaders},
        )
        for images, labels in batches:
            share = {"images": images, "labels": labels}
            loss = parts.step(optimizer, lambda part: loss_of(**part), share, given, run.device)
            scheduler.step()
            run.report(loss=loss)
            step = run.step_number + 1
            if run.rank == 0 and step % max(1, steps // 20) == 0:
                print(f"step {step}: loss {loss.item():.3f}, {run.world_size} workers", flush=True)

        if run.rank == 0:
            found = evaluate(model, held_out, run.device)
            other = {"top5": 100 * found["top5"], "loss": found["loss"], "images": len(held_out)}
            how = {"higher_is_better": True, "began": began}
            parts.tell(given, "resnet", run, optimizer, 100 * found["top1"], "top-1, %", **how, **other)
            parts.save(given, model)


if __name__ == "__main__":
    main()
