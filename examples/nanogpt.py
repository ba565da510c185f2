"""A small GPT over the tokens of a text, in plain PyTorch: the loop is yours, and a lost worker costs it no step.

python examples/nanogpt.py                                      one worker
torchrun --nproc-per-node 2 examples/nanogpt.py                 two workers on this machine
thinwire submit examples/nanogpt.py --min 1 --max 4             a job, whose workers may die, come and leave
python examples/nanogpt.py --folder /tmp/nanogpt                keeps checkpoints there, and goes on from the newest

- optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
+ with session(given.folder, save_every=100) as run:
+     optimizer = OneBitAdam(model.parameters(), lr=3e-3, betas=(0.9, 0.99), total_steps=STEPS, group=run.group)
+     run.register(model=model, optimizer=optimizer, scheduler=scheduler)
- for inputs, targets in DataLoader(train, batch_size=16, shuffle=True):
+     for inputs, targets in run.batches(train, global_batch=16, steps=STEPS):

Needs `tokenizers`: the byte pairs are learned on the spot, from the text, which is the source of some modules of Python
where none is given. All workers need the same one.
"""

import argparse
import difflib
import doctest
import inspect
import optparse
import pickle
import subprocess
import tarfile
import typing
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

from thinwire.optim import OneBitAdam
from thinwire.train import session

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--text", type=Path, help="left out: the source of some modules of Python")
parser.add_argument("--folder", help="where checkpoints are kept; left out: nowhere. A job says it itself")
parser.add_argument("--steps", type=int, default=300)
given = parser.parse_args()

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 512, 64, 64, 4, 2
MODULES = argparse, difflib, doctest, inspect, optparse, pickle, subprocess, tarfile, typing


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
    """Tokens in, logits of the next token out."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs):
        """int64[B, T] -> f[B, T, VOCABULARY]."""
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class Windows(torch.utils.data.Dataset):
    """Windows of a row of tokens, each with the same one token on."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, i):
        window = self.tokens[i * CONTEXT : (i + 1) * CONTEXT + 1]
        return window[:-1], window[1:]


def tokens_of(text):
    """The text in pairs of bytes that are learned from it (BPE), int64[N]."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return torch.tensor(tokenizer.encode(text).ids)


def loss_of(model, inputs, targets):
    """Nats a token."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate():
    """On the first windows of the validation part; every worker the same, so that their mean is it too."""
    inputs, targets = (
        torch.stack(part).to(run.device) for part in zip(*(validation[i] for i in range(32)), strict=True)
    )
    return loss_of(model, inputs, targets).item()


text = given.text.read_text() if given.text else "\n".join(inspect.getsource(module) for module in MODULES)
tokens = tokens_of(text)
cut = len(tokens) * 9 // 10
train, validation = Windows(tokens[:cut]), Windows(tokens[cut:])

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
            print(f"step {run.step_number}: {loss.item():.3f} nats a token, {run.world_size} workers", flush=True)

    if run.rank == 0:
        print(f"at the end: validation loss {evaluate():.3f} nats a token after {run.step_number} steps")
