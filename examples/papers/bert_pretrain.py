"""BERT pre-training (arXiv 1810.04805): masked words and next sentence, on the schedules of 1-bit Adam and 1-bit LAMB.

python examples/papers/bert_pretrain.py --save bert                             small: a minute of one core
torchrun --nproc-per-node 2 examples/papers/bert_pretrain.py --save bert        two workers on this machine
thinwire submit examples/papers/bert_pretrain.py --working-dir . --max 4        a job, whose workers may come and go
thinwire fetch JOB --to bert                                                    its weights, and beside them by
python examples/papers/bert_pretrain.py --describe bert                         what from_pretrained("bert") needs too
python examples/papers/bert_pretrain.py --phase 2 --weights bert --save bert    goes on with sequences of 512

--preset paper-adam and --preset paper-lamb are BERT-Large as arXiv 2102.02888 and arXiv 2104.06069 trained it: give
them --data, text whose documents stand between empty lines, or JSONL, parquet or arrow with a column of texts. Words
are cut into pieces (WordPiece) that are learned from the text on the spot, or by --tokenizer FOLDER are those of a
model. Needs transformers, datasets, tokenizers.
"""

import argparse
import hashlib
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import parts
import torch
from transformers import AutoTokenizer, BertConfig, BertForPreTraining, BertTokenizer, DataCollatorForLanguageModeling

from thinwire.train import session

LEARNED_FROM = 200_000
"""Documents that the pieces are learned from, at most: the first ones."""
LETTERS = 1000
"""Letters of the alphabet, at most: the most frequent ones, as BERT's."""
HELD_OUT = 50
"""One document of so many is not trained on, but evaluated."""


@dataclass(frozen=True)
class Rate:
    """Of a step: (step / rise) to a `power` of `peak`, then times `decay` every `every` steps; plus `offset`."""

    peak: float
    rise: int
    power: int = 1
    decay: float = 0.99
    every: int = 520
    offset: float = 0.0

    def __call__(self, step):
        """step: from 1."""
        if step < self.rise:
            return self.offset + self.peak * (step / self.rise) ** self.power
        return self.offset + self.peak * self.decay ** ((step - self.rise) / self.every)


@dataclass(frozen=True)
class Phase:
    """length: tokens of a sequence. full: steps in full before one bit; "auto": the optimizer finds out."""

    length: int
    batch: int
    steps: int
    full: int | str
    rate: Rate


@dataclass(frozen=True)
class Preset:
    """The optimizer, BERT's size, and its two phases."""

    optimizer: str
    width: int
    layers: int
    heads: int
    pieces: int
    phases: tuple[Phase, Phase]


PRESETS = {
    # 1-bit Adam, section 7.1: batch 4096; 4e-4 after a rise over 12,500 steps, then times 0.99 every 520; 23,000 of
    # 152,000 steps in full, and 1,500 of 10,000 with sequences of 512. The rate of those: DeepSpeedExamples,
    # bing_bert/bert_large.json.
    "paper-adam": Preset(
        "onebit_adam", 1024, 24, 16, 30522,
        (
            Phase(128, 4096, 152_000, 23_000, Rate(4e-4, 12_500)),
            Phase(512, 4096, 10_000, 1_500, Rate(1e-5, 150, decay=0.9, every=150)),
        ),
    ),
    # 1-bit LAMB: batch 65,536 and 32,768; 1,000 of 5,993 steps in full, and 107 of 555. The shape of the rate:
    # DeepSpeedExamples, bing_bert/bert_large_lamb.json with --lr_schedule EE, --lr_offset 10e-4 and 0.0.
    "paper-lamb": Preset(
        "onebit_lamb", 1024, 24, 16, 30522,
        (
            Phase(128, 65_536, 5_993, 1_000, Rate(11e-3, 450, 2, 0.9, 250, 1e-3)),
            Phase(512, 32_768, 555, 107, Rate(2e-3, 150, 2, 0.9, 150)),
        ),
    ),
    "small": Preset(
        "onebit_adam", 64, 2, 2, 1024,
        (
            Phase(128, 16, 300, "auto", Rate(3e-3, 30, decay=0.9, every=15)),
            Phase(512, 4, 30, "auto", Rate(3e-4, 5, decay=0.9, every=4)),
        ),
    ),
}  # fmt: skip


def config_of(preset, pieces, **how):
    """BERT of that size; `pieces` in its vocabulary, which may be fewer than asked where the text is short."""
    return BertConfig(
        vocab_size=pieces,
        hidden_size=preset.width,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        intermediate_size=4 * preset.width,
        max_position_embeddings=512,
        initializer_range=0.02 * max(1.0, 768 / preset.width) ** 0.5,  # each block adds as much as one of BERT's
        **how,
    )


def learned_pieces(texts, size):
    """A BertTokenizer with at most `size` pieces, learned from texts: the same ones on every worker.

    The trainer numbers the letters that go on with a word, `##a`, in an order that differs from process to process, and
    whatever is as frequent as something else is chosen by these numbers. So they are named to it, in order.
    """
    blank = BertTokenizer()
    texts = list(texts)
    letters = Counter()
    for text in texts:
        letters.update(blank.backend_tokenizer.normalizer.normalize_str(text))
    kept = sorted(letters, key=lambda letter: (-letters[letter], letter))[:LETTERS]
    alphabet = sorted(letter for letter in kept if not letter.isspace())
    learned = blank.train_new_from_iterator(
        texts,
        size,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=LETTERS,
        new_special_tokens=[f"##{letter}" for letter in alphabet],
    )
    return BertTokenizer(vocab=learned.get_vocab(), model_max_length=512)


def a_model(kind, folder, **how):
    """(a model of transformers' class `kind`, its tokenizer): of that folder, or small and fresh where there is none.

    how: goes to its config, such as num_labels.
    """
    if folder:
        return kind.from_pretrained(folder, **how), AutoTokenizer.from_pretrained(folder)
    preset = PRESETS["small"]
    tokenizer = learned_pieces((row["text"] for row in parts.documents(None)), preset.pieces)
    return kind(config_of(preset, len(tokenizer), **how)), tokenizer


def pairs(documents, length, random_next, drawn):
    """BERT's samples of documents: (pieces of A, pieces of B, is B another document's?), in order.

    documents: lists of sentences, each a list of pieces. A and B are whole sentences, together up to length - 3 pieces;
    longer ones are cut at a random end. B goes on where A ends, or with the probability `random_next` stands elsewhere
    (appendix A.2 of the paper). drawn: a random.Random.
    """
    room = length - 3
    for number, document in enumerate(documents):
        at = 0
        while at < len(document):
            chunk, pieces = [], 0
            while at < len(document) and (pieces < room or len(chunk) < 2):
                chunk.append(document[at])
                pieces += len(document[at])
                at += 1
            cut = drawn.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            first = [piece for sentence in chunk[:cut] for piece in sentence]
            is_random = len(documents) > 1 and (len(chunk) == 1 or drawn.random() < random_next)
            if is_random:
                other = drawn.randrange(len(documents) - 1)
                from_there = documents[other + (other >= number)]
                begin = drawn.randrange(len(from_there))
                at -= len(chunk) - cut  # what would have followed is used in the next sample
                follows = from_there[begin:]
            else:
                follows = chunk[cut:]
            second = []
            for sentence in follows:
                second += sentence
                if len(first) + len(second) >= room:
                    break
            while len(first) + len(second) > room:
                longer = first if len(first) > len(second) else second
                del longer[0 if drawn.random() < 0.5 else -1]
            if first and second:
                yield first, second, is_random


def in_samples(rows, tokenizer, length, seed):
    """The same as a function of `datasets`' batches: what BERT takes, padded to `length`, of many documents at once."""
    begin, end, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    unmasked = set(
        tokenizer.all_special_ids
    )  # such as that of what is unknown: a sample of these alone teaches nothing

    def made(batch, indices):
        texts = [parts.sentences(text or "") for text in batch["text"]]
        flat = [sentence for document in texts for sentence in document]
        ids = iter(tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"] if flat else [])
        cut = [[one for one in islice(ids, len(document)) if one] for document in texts]
        found = {"input_ids": [], "token_type_ids": [], "attention_mask": [], "next_sentence_label": []}
        drawn = random.Random(parts.seed_of(seed, indices[0]))
        for first, second, is_random in pairs([document for document in cut if document], length, 0.5, drawn):
            if unmasked.issuperset(first + second):
                continue
            whole = [begin, *first, end, *second, end]
            missing = length - len(whole)
            found["input_ids"].append(whole + [pad] * missing)
            found["token_type_ids"].append([0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * missing)
            found["attention_mask"].append([1] * len(whole) + [0] * missing)
            found["next_sentence_label"].append(int(is_random))
        return found

    return rows.map(made, batched=True, batch_size=500, with_indices=True, remove_columns=["text"])


class SamePieces:
    """What is registered beside a model: a worker, or a run that goes on, with other pieces is refused.

    To the model a piece is a number. One that has learned from another text has other pieces under the same numbers.
    """

    def __init__(self, tokenizer):
        in_order = sorted(tokenizer.get_vocab().items(), key=lambda piece: piece[1])
        self.digest = hashlib.sha256(repr(in_order).encode()).hexdigest()

    def state_dict(self):
        """A digest of all pieces and their numbers."""
        return {"digest": self.digest}

    def load_state_dict(self, state):
        """Raises: ValueError where the run has other pieces."""
        if state["digest"] != self.digest:
            raise ValueError(
                f"the pieces of this run are {state['digest'][:16]}, those that were learned here {self.digest[:16]}: "
                "give all workers the same --data, or the tokenizer of the run by --tokenizer FOLDER"
            )


class Masked(torch.utils.data.Dataset):
    """Samples whose masks are drawn by transformers' collator, anew at every visit, from the sample's number."""

    def __init__(self, rows, tokenizer, seed):
        self.rows, self.seed = rows, seed
        self.collator = DataCollatorForLanguageModeling(tokenizer)

    def __len__(self):
        return len(self.rows)

    def visit(self, i, number):
        """What run.batches asks for: row i, as sample `number` of the run."""
        return self.masked(self.rows[i], number)

    def __getitem__(self, i):
        """Always the same mask: for evaluation."""
        return self.masked(self.rows[i], i)

    def masked(self, row, number):
        """int64[length] each, and a number for the next sentence."""
        self.collator.generator = torch.Generator().manual_seed(parts.seed_of(self.seed, number))
        ids = torch.tensor([row["input_ids"]])
        inputs, labels = self.collator.torch_mask_tokens(ids.clone())
        while (labels == -100).all():  # at least one, as BERT's own script has it: the mean over none is no number
            inputs, labels = self.collator.torch_mask_tokens(ids.clone())
        return {
            "input_ids": inputs[0],
            "token_type_ids": torch.tensor(row["token_type_ids"]),
            "attention_mask": torch.tensor(row["attention_mask"]),
            "labels": labels[0],
            "next_sentence_label": torch.tensor(row["next_sentence_label"]),
        }


class MaskedStream(torch.utils.data.IterableDataset):
    """The same of rows that are streamed; it says where it is, so that a worker who comes need not read them again."""

    def __init__(self, rows, tokenizer, seed):
        self.rows, self.number, self.begin = rows, 0, rows.state_dict()
        self.masked = Masked(rows, tokenizer, seed).masked

    def __iter__(self):
        for row in self.rows:
            self.number += 1
            yield self.masked(row, self.number - 1)
        self.rows.load_state_dict(self.begin)  # else the next epoch, too, begins where a run went on

    def state_dict(self):
        """The place in the rows, and the number of the next sample."""
        return {"rows": self.rows.state_dict(), "number": self.number}

    def load_state_dict(self, state):
        """Go on from there."""
        self.rows.load_state_dict(state["rows"])
        self.number = state["number"]


def split(rows, stream):
    """(documents to train on, documents to evaluate on)."""
    if stream:
        return rows.skip(HELD_OUT), rows.take(HELD_OUT)
    held_out = list(range(0, len(rows), HELD_OUT))
    return rows.select([i for i in range(len(rows)) if i % HELD_OUT]), rows.select(held_out)


def main(words=None):
    """Train, and leave what from_pretrained takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phase", type=int, choices=(1, 2), default=1)
    parser.add_argument("--data", nargs="+", help="left out: Shakespeare, as far as the repository has him")
    parser.add_argument("--column", default="text", help="of the documents, in JSONL, parquet, arrow and CSV")
    parser.add_argument("--stream", action="store_true", help="do not read all data at the beginning")
    parser.add_argument("--tokenizer", help="a folder of transformers; left out: WordPiece is learned from the data")
    parser.add_argument(
        "--weights", type=parts.model_folder, metavar="FOLDER", help="begin with the weights and pieces of a --save"
    )
    parser.add_argument("--describe", type=Path, metavar="FOLDER", help="write config and pieces, and do not train")
    parts.add_flags(parser, PRESETS)
    given = parser.parse_args(words)
    preset = PRESETS[given.preset]
    phase = preset.phases[given.phase - 1]
    given.optimizer = given.optimizer or preset.optimizer
    if given.preset != "small" and not given.data:
        parser.error(f"--preset {given.preset} without --data: Shakespeare is too short for BERT-Large")
    if given.phase == 2 and not given.weights:
        print("phase 2 without --weights: with fresh weights, unless the job starts from another one's", flush=True)

    rows = parts.documents(given.data, given.column, given.stream)
    folder = given.tokenizer or given.weights
    if folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    else:
        tokenizer = learned_pieces((row["text"] or "" for row in islice(rows, LEARNED_FROM)), preset.pieces)
    config = config_of(preset, len(tokenizer))
    if given.describe:
        for what in (config, tokenizer):
            what.save_pretrained(given.describe)
        print(f"{given.describe}: config and {len(tokenizer):,} pieces")
        return

    steps, batch = given.steps or phase.steps, given.batch or phase.batch
    highest = parts.rate_of(given, phase.rate.peak, preset.optimizer)
    rate = replace(phase.rate, peak=highest, offset=phase.rate.offset * highest / phase.rate.peak)
    stretched = steps / phase.steps  # a run of half the steps goes through the same rates twice as fast
    train, held_out = (in_samples(part, tokenizer, phase.length, given.seed) for part in split(rows, given.stream))
    validation = Masked(list(islice(held_out, 64)), tokenizer, given.seed)
    train = (MaskedStream if given.stream else Masked)(train, tokenizer, given.seed)
    if not len(validation) or next(iter(train.rows), None) is None:
        apart = f"the first {HELD_OUT}" if given.stream else f"one of {HELD_OUT}"
        raise ValueError(
            f"too few documents to train on and to evaluate, of which {apart} are held out: give more text; in "
            "text files documents stand between empty lines"
        )

    with session(given.folder, save_every=100) as run:
        torch.manual_seed(given.seed)
        model = BertForPreTraining.from_pretrained(given.weights) if given.weights else BertForPreTraining(config)
        model.to(run.device)
        full = phase.full if phase.full == "auto" else max(1, round(phase.full * stretched))
        rise = max(1, round(rate.rise * stretched))
        optimizer = parts.bert_optimizer(given, model, run, lr=1.0, steps=steps, rise=rise, warmup=full)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda made: rate((made + 1) / stretched))
        run.register(model=model, optimizer=optimizer, scheduler=scheduler, pieces=SamePieces(tokenizer))
        called = parts.prepared(model, given)

        def evaluate(part):
            """Nats a masked piece and a next sentence, of this worker's share of what is held out."""
            model.eval()
            with torch.no_grad():
                losses = [model(**{k: v[None].to(run.device) for k, v in one.items()}).loss.item() for one in part]
            model.train()
            return sum(losses) / len(losses)

        run.evaluate_every(max(1, steps // 4), evaluate, data=validation)
        model.train()
        began = time.monotonic()
        count = lambda part: (part["labels"] != -100).sum()  # noqa: E731
        loader = {"num_workers": given.loaders}
        for inputs in run.batches(train, global_batch=batch, steps=steps, seed=given.seed, loader=loader, weigh=count):
            parts.seed_step(run, given.seed)
            loss = parts.step(optimizer, lambda part: called(**part).loss, inputs, given, run.device, count)
            scheduler.step()
            run.report(loss=loss)
            if run.rank == 0 and (run.step_number + 1) % 25 == 0:
                print(f"step {run.step_number + 1}: {loss.item():.3f} nats, {run.world_size} workers", flush=True)

        if run.rank == 0:
            score = evaluate(validation)
            parts.tell(given, "bert", run, optimizer, score, "nats", higher_is_better=False, began=began)
            parts.save(given, model, tokenizer)


if __name__ == "__main__":
    main()
