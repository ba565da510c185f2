"""A GPT over the bytes of a text, in a loop over a session: the script that benchmarks.across_hosts submits.

It runs as it stands, too: python benchmarks/gpt_session.py --text tests/data/tinyshakespeare.txt --layers 1 --width 32
"""

import argparse
import os
import time
from pathlib import Path

import torch

from thinwire.contract.spec import GptRecipe
from thinwire.optim import Adam, OneBitAdam
from thinwire.train import session
from thinwire.workers.recipes.gpt import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--optimizer", choices=("adam", "onebit_adam"), default="onebit_adam")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--warmup", type=int, default=20, help="uncompressed steps of 1-bit Adam")
parser.add_argument("--global-batch", type=int, default=4, help="windows in a step, over all workers")
parser.add_argument("--lr", type=float, default=3e-4)
parser.add_argument("--begun", default=os.devnull, help="a file to which each step that begins is written")
for name, value in (("layers", 8), ("width", 512), ("heads", 8), ("context", 16)):
    parser.add_argument(f"--{name}", type=int, default=value)
given = parser.parse_args()

CONTEXT = given.context
EVALUATED = 128
"""Windows of the validation part, the first ones."""


class Windows(torch.utils.data.Dataset):
    """Windows of a text, each with the same one byte on."""

    def __init__(self, text):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, i):
        window = self.text[i * CONTEXT : (i + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


def optimizer_of(model, group):
    """Both send while backward runs, wherever that is possible."""
    how = {"lr": given.lr, "betas": (0.9, 0.99), "group": group, "overlap": True}
    if given.optimizer == "adam":
        return Adam(model.parameters(), **how)
    return OneBitAdam(model.parameters(), warmup=given.warmup, **how)


@torch.no_grad()
def evaluate():
    """Nats a byte; on every worker the same windows, so that the mean of all is it too."""
    windows = [validation[i] for i in range(min(EVALUATED, len(validation)))]
    losses = [model(*map(torch.stack, zip(*windows[at : at + 64], strict=True))) for at in range(0, len(windows), 64)]
    return torch.stack(losses).mean().item()


text = given.text.read_bytes()
cut = len(text) * 9 // 10
train, validation = Windows(text[:cut]), Windows(text[cut:])
torch.set_num_threads(1)

with session() as run:
    recipe = GptRecipe(layers=given.layers, width=given.width, heads=given.heads, context=CONTEXT)
    model = build(recipe, seed=0)
    optimizer = optimizer_of(model, run.group)
    run.register(model=model, optimizer=optimizer)
    run.evaluate_every(given.steps, evaluate)
    for inputs, targets in run.batches(train, global_batch=given.global_batch, steps=given.steps, seed=0):
        with open(given.begun, "a") as begun:
            print(time.time(), os.getpid(), run.step_number, run.world_size, file=begun)
        run.step(model(inputs, targets))
