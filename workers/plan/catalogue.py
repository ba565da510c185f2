"""Models and devices by name, for forecasts: how many values and flops, and how fast. Every number says where from.

    flops = 6 m s + 12 l w s^2        of one sample, forward and backward: m values that are multiplied, s tokens,
                                      l layers of width w, whose attention is the second term  [Narayanan et al. 2021]

Those of a convolutional network are three times its forward pass, at 224 x 224 (torchvision's count).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """values: that are trained. multiplied: of them, by every token; of an image model 0. layers, width: of its blocks.

    sequence: tokens of a sample, where nothing is said. flops: of a sample of an image model. steps, warmup,
    lamb_warmup, lr_warmup: of the run that its paper made: whole, and the shares of it that 1-bit Adam, 1-bit LAMB and
    the learning rate warm up in.
    """

    title: str
    values: int
    multiplied: int = 0
    layers: int = 1
    width: int = 1024
    sequence: int = 1
    flops: float = 0.0
    steps: int = 100_000
    warmup: float = 0.15
    lamb_warmup: float = 1000 / 5993
    lr_warmup: float = 0.08

    def flops_of(self, sequence: int | None) -> float:
        """Of one sample, forward and backward. sequence: None: its own."""
        if self.flops:
            return self.flops
        tokens = sequence or self.sequence
        return 6.0 * self.multiplied * tokens + 12.0 * self.layers * self.width * tokens**2


MODELS = {
    "bert-base": Model(
        "BERT-Base", 110_106_428, 86_000_000, 12, 768, 128, steps=118_000, warmup=16 / 118, lr_warmup=12.5 / 118
    ),
    "bert-large": Model(
        "BERT-Large", 336_226_108, 307_000_000, 24, 1024, 128, steps=152_000, warmup=23 / 152, lr_warmup=12.5 / 152
    ),
    "bert-large-squad": Model(
        "BERT-Large on SQuAD", 335_143_938, 302_000_000, 24, 1024, 384, steps=1848, warmup=400 / 1848, lr_warmup=0.1
    ),
    "gpt2": Model("GPT-2", 124_439_808, 123_600_000, 12, 768, 1024, steps=300_000),
    "gpt2-medium": Model("GPT-2 medium", 354_823_168, 353_500_000, 24, 1024, 1024, steps=300_000),
    "gpt2-xl": Model("GPT-2 XL", 1_557_611_200, 1_555_000_000, 48, 1600, 1024, steps=300_000),
    "llama-1b": Model("Llama 3.2 1B", 1_235_814_400, 1_235_814_400, 16, 2048, 2048, steps=100_000),
    "resnet-18": Model("ResNet-18", 11_689_512, layers=18, width=512, flops=3 * 2 * 1.814e9, steps=450_450),
    "resnet-50": Model("ResNet-50", 25_557_032, layers=50, width=512, flops=3 * 2 * 4.089e9, steps=450_450),
    "vit-base": Model("ViT-Base", 86_567_656, layers=12, width=768, flops=3 * 2 * 17.56e9),
}
"""By name. BERT's include both heads, and multiply the vocabulary by the masked tokens alone.

steps and warm-up of BERT: arXiv 2102.02888, sec. 7.1; of SQuAD: 88 k questions in batches of 96, twice, 400 of them
dense (DeepSpeed's script); GPT-2: arXiv 2202.06009; ResNet: 90 epochs of ImageNet in batches of 256.
"""


@dataclass(frozen=True, slots=True)
class Device:
    """flops: per second that training in 16 bits reaches. copy_bytes_s: read and written. inside_bytes_s: between two
    devices of a box. layer_s: a layer's forward and backward take no less. cores: of a rank; infinite: a GPU.
    """

    title: str
    flops: float
    copy_bytes_s: float
    inside_bytes_s: float
    layer_s: float
    source: str
    cores: float = float("inf")
    checked: bool = False


DEVICES = {
    "v100": Device(
        "V100",
        4.16e13,
        8.0e11,
        4.2e10,
        2.0e-3,
        "table 1 of arXiv 2102.02888: one box of 8 and a batch of 1; its memory by the data sheet",
        checked=True,
    ),
    "a100": Device("A100", 1.25e14, 1.4e12, 2.0e11, 1.0e-3, "data sheet, at the shares that the V100 reaches"),
    "h100": Device(
        "H100",
        2.1e14,
        3.01e12,
        3.0e11,
        1.0e-3,
        "steps of GPT-2 and copies measured on one, benchmarks/results",
        checked=True,
    ),
    "h200": Device("H200", 2.1e14, 4.23e12, 3.0e11, 1.0e-3, "copies measured on one; its matrices as on the H100"),
    "cpu": Device(
        "one core",
        4.0e10,
        1.83e10,
        1.0e10,
        0.0,
        "an AMD EPYC core, benchmarks/results/kernels and plan",
        1.0,
        checked=True,
    ),
}

COPIED = {
    "dense": 33.0,
    "onebit_adam": 35.0,
    "onebit_lamb": 71.0,
    "zero_one_adam": 63.0,
    "local": 47.0,
    "onebit_muon": 37.0,
    "full": 45.0,
}
"""Bytes of a device's copy rate that a whole step's optimizer takes for a value: medians of 340 M values on an H200 and
an H100 (benchmarks/results/gpu; the other's are within 14 %). "full": a step of a warm-up; "local": between two syncs.
Muon's without its matrices: those are NEWTON_SCHULZ flops for each value and unit of width.
"""
ENCODED, SERVED = 12.35, 8.4
"""The same of encoding a value, and of serving one of the chunk's."""
NEWTON_SCHULZ = 30.0
"""Five iterations of 4 m + 2 m^2 / n multiplications and additions a value of a matrix of m rows, m <= n."""
CAST = 12.0
"""Of a gradient that is cast to 16 bits and back."""
