"""GPT-2 on text of yours, as 0/1 Adam's paper trains it, or in minutes on a laptop. transformers' model, in a session.

python examples/papers/gpt2.py                                          small, on the source of Python's own modules
torchrun --nproc-per-node 2 examples/papers/gpt2.py --optimizer adam    two workers on this machine, uncompressed
thinwire submit examples/papers/gpt2.py --min 2 --max 8 -- --preset paper --data /data/*.jsonl --bf16 --micro 8

Text: .txt, .jsonl, .parquet or .arrow, read by `datasets`. Byte pairs are learned from it, unless --tokenizer has some.
Rows are joined, with <|endoftext|> between those that are texts of their own, and cut into windows of one
length; what is held out is never trained on. More than --stream-above bytes are read as they are trained on, in the
order of the files, and a run goes on at the very next window; less is tokenised at once, and shuffled.

The score is the perplexity of a token on the text that is held out, by windows, and strided: each token after at least
half a window of others. Byte pairs of other text make other tokens: compare bits a byte, which is beside it.
Needs pip install "thinwire[papers]".
"""

import argparse
import hashlib
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import datasets
import parts
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from thinwire.optim import named
from thinwire.train import session


@dataclass(frozen=True)
class Preset:
    """lr: of the Adams."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int
    dropout: float
    global_batch: int
    steps: int
    lr: float
    final_lr: float
    lr_warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    evaluate_every: int


PRESETS = {
    # arXiv 2202.06009, section 6: 117 M values (124 M with all of the table of tokens), batch 512, 300,000 steps, rate
    # 1.5e-4 with a cosine. Warm-up, last rate, decay and clipping are those of Megatron-LM's script for this model.
    "paper": Preset(
        layers=12, width=768, heads=12, context=1024, vocabulary=50257, dropout=0.1,
        global_batch=512, steps=300_000, lr=1.5e-4, final_lr=1e-5, lr_warmup_steps=3000, weight_decay=0.01,
        max_grad_norm=1.0, evaluate_every=1000,
    ),
    "small": Preset(
        layers=3, width=128, heads=4, context=128, vocabulary=1024, dropout=0.0,
        global_batch=16, steps=200, lr=2e-3, final_lr=2e-4, lr_warmup_steps=20, weight_decay=0.01,
        max_grad_norm=1.0, evaluate_every=100,
    ),
}  # fmt: skip
END = "<|endoftext|>"
OWN_BYTES = 1_500_000
"""Of Python's own modules, about."""
TAUGHT_ROWS = 200_000
"""From how many rows byte pairs are learned, at most."""


def arguments(words=None):
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts.add_flags(parser, PRESETS, optimizer="zero_one_adam")
    parser.add_argument(
        "--data", nargs="+", type=Path, help="files of one kind, or folders of them; left out: Python's own modules"
    )
    parser.add_argument("--held-out", nargs="+", type=Path, help="left out: the last twentieth; of a stream, its begin")
    parser.add_argument("--held-out-rows", type=int, default=1000, help="of a stream, where no file is held out")
    parser.add_argument("--held-out-windows", type=int, default=64, help="that are evaluated, at most")
    parser.add_argument("--column", default="text", help="of .jsonl, .parquet and .arrow")
    parser.add_argument("--stream-above", type=float, default=2e9, help="bytes of all files")
    parser.add_argument("--tokenizer", type=parts.a_file, help="a tokenizer.json; left out: byte pairs of the text")
    parser.add_argument("--weights", type=parts.a_file, help="a model.safetensors to begin with, such as GPT-2's own")
    given = parser.parse_args(words)
    for name in ("held_out_rows", "held_out_windows"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(given, name)}: give a number from 1")
    return given


def read(files, column, stream):
    """(rows, are rows texts of their own?): a dataset of `datasets` with the one column "text".

    Lines of a text file are no texts of their own. Raises: ValueError for files of several kinds or of an unknown one.
    """
    is_text = parts.KINDS.get(parts.ending(parts.files_in(files)[0])) == "text"
    return parts.texts_of(files, column, stream, keep_linebreaks=True), not is_text


def own_modules():
    """Modules of Python's own library, as rows, in an order in which neighbours have nothing in common."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("[a-z]*.py"), key=lambda file: hashlib.sha256(file.name.encode()).digest())
    texts = []
    for file in files:
        if not file.name.startswith("sitecustomize") and sum(map(len, texts)) < OWN_BYTES:  # that one is the machine's
            texts.append(file.read_text(errors="replace"))
    return datasets.Dataset.from_dict({"text": texts})


def taught(rows, vocabulary):
    """Byte pairs of the rows, as GPT-2's: every text can be written in them. The same rows give the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    tokenizer.train_from_iterator((row["text"] or "" for row in rows.take(TAUGHT_ROWS)), trainer)
    return tokenizer


class Encoding:
    """Rows to tokens: END behind each row that is a text of its own."""

    def __init__(self, tokenizer, apart):
        self.tokenizer, self.end = tokenizer, []
        if apart:
            self.end = [tokenizer.token_to_id(END)]
            if self.end == [None]:
                raise ValueError(f"--tokenizer: it has no token {END}, which stands between the rows of the text")

    def __call__(self, rows):
        """list of str or None -> list of list of int."""
        encoded = self.tokenizer.encode_batch([row or "" for row in rows], add_special_tokens=False)
        return [one.ids + self.end for one in encoded]


class Windows(torch.utils.data.Dataset):
    """Windows of `context` tokens, each with the same one token on, int64[context] both."""

    def __init__(self, tokens, context):
        self.tokens, self.context = tokens, context
        self.digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()  # workers with other tokens are refused

    def __len__(self):
        return max(0, (len(self.tokens) - 1) // self.context)

    def __getitem__(self, i):
        window = self.tokens[i * self.context : (i + 1) * self.context + 1].long()
        return window[:-1], window[1:]


class Stream(torch.utils.data.IterableDataset):
    """The same of rows that are read as they are asked for. Its state says where: at a row, with what is left of it."""

    def __init__(self, rows, encode, context):
        self.rows, self.encode, self.context, self.rest = rows, encode, context, []
        self.begin = rows.state_dict()

    def __iter__(self):
        yield from self.whole()
        for row in self.rows:
            self.rest += self.encode([row["text"]])[0]
            yield from self.whole()
        self.rest = []  # each epoch cuts alike
        self.rows.load_state_dict(self.begin)  # else the next epoch, too, begins where a resumed one did

    def whole(self):
        """The windows of what was read, which are then taken off it."""
        while len(self.rest) > self.context:
            window = torch.tensor(self.rest[: self.context + 1])
            self.rest = self.rest[self.context :]
            yield window[:-1], window[1:]

    def state_dict(self):
        """Behind the window that was given last."""
        return {"rows": self.rows.state_dict(), "rest": list(self.rest)}

    def load_state_dict(self, state):
        """Go on there."""
        self.rows.load_state_dict(state["rows"])
        self.rest = list(state["rest"])


def packed(rows, encode):
    """All tokens of the rows, int32[N], and how many bytes of text they are."""
    ids = rows.map(lambda batch: {"ids": encode(batch["text"])}, batched=True, remove_columns="text")
    tokens = [torch.tensor(row, dtype=torch.int32) for some in ids.iter(1000) for row in some["ids"]]
    num_bytes = sum(len((row["text"] or "").encode()) for row in rows)
    return torch.cat([torch.empty(0, dtype=torch.int32), *tokens]), num_bytes


def prepare(given, preset):
    """(what is trained on, Windows of what is held out, bytes of text behind a token of that, the tokenizer)."""
    stream = False
    if given.data is None:
        rows, apart = own_modules(), True
    else:
        files = parts.files_in(given.data)
        stream = sum(file.stat().st_size for file in files if file.is_file()) > given.stream_above
        rows, apart = read(files, given.column, stream)
    if given.held_out:
        held_out, _ = read(given.held_out, given.column, stream=False)
    elif stream:
        held_out = datasets.Dataset.from_list(list(rows.take(given.held_out_rows)))
        rows = rows.skip(given.held_out_rows)
    else:
        cut = len(rows) - math.ceil(len(rows) / 20)
        rows, held_out = rows.take(cut), rows.skip(cut)
    tokenizer = Tokenizer.from_file(str(given.tokenizer)) if given.tokenizer else taught(rows, preset.vocabulary)
    encode = Encoding(tokenizer, apart)
    trained = Stream(rows, encode, preset.context) if stream else Windows(packed(rows, encode)[0], preset.context)
    tokens, num_bytes = packed(held_out, encode)
    validation = Windows(tokens, preset.context)
    if stream and next(iter(rows), None) is None:
        raise ValueError(
            f"--held-out-rows {given.held_out_rows}: no text is left to train on: give fewer, or --held-out"
        )
    for name, windows in (("train on", trained), ("evaluate", validation)):
        if isinstance(windows, Windows) and not len(windows):
            raise ValueError(
                f"the text to {name} has {len(windows.tokens)} tokens, a window {preset.context + 1}: give more text"
            )
    return trained, validation, num_bytes / len(tokens), tokenizer


def make_model(preset, vocabulary, weights):
    """transformers' GPT-2, with its own initial values or with those of a file. Raises: ValueError for other shapes."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=preset.context,
        n_embd=preset.width,
        n_layer=preset.layers,
        n_head=preset.heads,
        resid_pdrop=preset.dropout,
        embd_pdrop=preset.dropout,
        attn_pdrop=preset.dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    if weights is None:
        return GPT2LMHeadModel(config)
    model, told = GPT2LMHeadModel.from_pretrained(
        None, config=config, state_dict=load_file(weights), output_loading_info=True, ignore_mismatched_sizes=True
    )
    if told["missing_keys"] or told["mismatched_keys"]:
        wrong = sorted(map(str, [*told["missing_keys"], *told["mismatched_keys"]]))
        raise ValueError(f"--weights {weights}: is not of this preset's GPT-2, as in {wrong[0]}")
    return model


def factor(preset, steps):
    """Of the highest rate, by how many steps are made: linear up, then a cosine down to the last rate."""
    warmup, floor = min(preset.lr_warmup_steps, steps // 10), preset.final_lr / preset.lr

    def at(made):
        if made < warmup:
            return (made + 1) / warmup
        part = min(1.0, (made - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * part)) / 2

    return at, warmup


def loss_of(model, inputs, targets):
    """Nats a token, the mean over int64[B, T]."""
    return F.cross_entropy(model(inputs).logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def mean_loss(model, windows, device, batch=8):
    """Nats a token over windows; the model is left as it was."""
    training, total = model.training, 0.0
    model.eval()
    for part in torch.utils.data.DataLoader(windows, batch_size=batch):
        inputs, targets = (one.to(device) for one in part)
        total += loss_of(model, inputs, targets).item() * len(inputs)
    model.train(training)
    return total / len(windows)


@torch.no_grad()
def strided_loss(model, tokens, context, device, stride=None):
    """Nats a token where windows overlap: one begins each `stride` tokens (None: half a window), and of all but the
    first only the last `stride` predictions count, so that each has at least context - stride tokens before it.
    """
    training, stride, total, counted = model.training, stride or context // 2, 0.0, 0
    model.eval()
    tokens = tokens.long().to(device)
    end = 0
    for start in range(0, len(tokens) - 1, stride):
        stop = min(start + context, len(tokens) - 1)
        logits = model(tokens[None, start:stop]).logits[0].float()
        new = stop - max(end, start)
        total += F.cross_entropy(logits[-new:], tokens[stop - new + 1 : stop + 1], reduction="sum").item()
        counted, end = counted + new, stop
        if stop == len(tokens) - 1:
            break
    model.train(training)
    return total / counted


def main(words=None):
    """Train, evaluate, and say how it went."""
    given = arguments(words)
    preset = PRESETS[given.preset]
    steps = given.steps or preset.steps
    trained, validation, bytes_a_token, tokenizer = prepare(given, preset)
    looked_at = torch.utils.data.Subset(validation, range(min(len(validation), given.held_out_windows)))
    at, lr_warmup = factor(preset, steps)
    lr = parts.rate_of(given, preset.lr)

    with session(given.folder, save_every=max(1, steps // 10)) as run:
        torch.manual_seed(given.seed)
        model = make_model(preset, tokenizer.get_vocab_size(), given.weights).to(run.device)
        optimizer = named(
            given.optimizer,
            parts.in_groups(model, preset.weight_decay),
            lr,
            total_steps=steps,
            lr_warmup_steps=lr_warmup,
            max_grad_norm=preset.max_grad_norm,
            group=run.group,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, at)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        run.evaluate_every(preset.evaluate_every, lambda part: mean_loss(model, part, run.device), data=looked_at)
        computed = parts.prepared(model, given)
        began, batch = time.monotonic(), given.batch or preset.global_batch
        model.train()
        loader = {"num_workers": given.loaders}
        for inputs, targets in run.batches(trained, global_batch=batch, steps=steps, seed=given.seed, loader=loader):
            parts.seed_step(run, given.seed)
            share = {"inputs": inputs, "targets": targets}
            loss = parts.step(optimizer, lambda part: loss_of(computed, *part.values()), share, given, run.device)
            scheduler.step()
            run.report(loss=loss)
            step = run.step_number + 1
            if run.rank == 0 and step % max(1, steps // 20) == 0:
                print(f"step {step}: {loss.item():.3f} nats a token, {run.world_size} workers", flush=True)

        if run.rank == 0:
            context, nats = preset.context, mean_loss(model, looked_at, run.device)
            tokens = looked_at.dataset.tokens[: len(looked_at) * context + 1]
            other = {
                "strided": math.exp(strided_loss(model, tokens, context, run.device)),
                "bits_a_byte": nats / bytes_a_token / math.log(2),
            }
            how = {"higher_is_better": False, "began": began}
            parts.tell(given, "gpt2", run, optimizer, math.exp(nats), "perplexity of a token", **how, **other)
            if given.save:
                parts.save(given, model)
                tokenizer.save(str(given.save / "tokenizer.json"))


if __name__ == "__main__":
    main()
