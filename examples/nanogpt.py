"""A small GPT over the bytes of a text, in plain PyTorch: the loop is yours, and a lost worker costs it no step.

python examples/nanogpt.py                                      one worker
torchrun --nproc-per-node 2 examples/nanogpt.py                 two workers on this machine
python examples/nanogpt.py --folder /tmp/nanogpt                keeps checkpoints there, and goes on from the newest

What it would be without Thinwire, but for the lines that say `run`. In a job the same file runs as it stands.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from thinwire.optim import OneBitAdam
from thinwire.train import session

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "tests/data/tinyshakespeare.txt")
parser.add_argument("--folder", help="where checkpoints are kept; left out: nowhere")
parser.add_argument("--steps", type=int, default=300)
given = parser.parse_args()

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


class Block(nn.Module):
    """Attention to what came before, then a perceptron; each added to what it was given."""

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        """f[B, T, WIDTH] -> the same shape."""
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, inputs):
        """int64[B, T] -> f[B, T, 256]."""
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Windows(torch.utils.data.Dataset):
    """Windows of a text, each with the same one byte on."""

    def __init__(self, text):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, i):
        window = self.text[i * CONTEXT : (i + 1) * CONTEXT + 1].long()
        return window[:-1], window[1:]


def loss_of(model, inputs, targets):
    """Nats a byte."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate():
    """On the first windows of the validation part; every worker the same, so that their mean is it too."""
    inputs, targets = (
        torch.stack(part).to(run.device) for part in zip(*(validation[i] for i in range(32)), strict=True)
    )
    return loss_of(model, inputs, targets).item()


text = given.text.read_bytes()
cut = len(text) * 9 // 10
train, validation = Windows(text[:cut]), Windows(text[cut:])

with session(given.folder, save_every=100) as run:
    torch.manual_seed(0)
    model = Gpt().to(run.device)
    optimizer = OneBitAdam(model.parameters(), lr=3e-3, betas=(0.9, 0.99), total_steps=given.steps, group=run.group)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, given.steps)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    run.evaluate_every(100, evaluate)

    for inputs, targets in run.batches(train, global_batch=16, steps=given.steps, seed=0):
        loss = loss_of(model, inputs.to(run.device), targets.to(run.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.report(loss=loss)
        if run.rank == 0 and run.step_number % 50 == 0:
            print(f"step {run.step_number}: {loss.item():.3f} nats a byte, {run.world_size} workers", flush=True)

    if run.rank == 0:
        print(f"at the end: validation loss {evaluate():.3f} nats a byte after {run.step_number} steps")
