"""GLUE (arXiv 1804.07461): BERT classifies sentences and pairs; accuracy, F1, Matthews, Pearson as the tasks have them.

python examples/papers/glue.py --weights bert                             a folder that bert_pretrain.py has written
torchrun --nproc-per-node 2 examples/papers/glue.py --weights bert        two workers on this machine
thinwire submit examples/papers/glue.py --working-dir . --max 4 -- --weights /shared/bert
python examples/papers/glue.py --preset paper --task mrpc --weights bert-large --train train.tsv --dev dev.tsv

--train and --dev: GLUE's TSV, or JSONL, parquet, arrow or CSV with the columns that the hub has. Left out: lines of
Shakespeare's plays, and the same with their words in another order, which is a task as CoLA is. --preset paper: as BERT
was tried on GLUE (arXiv 1810.04805, section 4.1): batch 32, 3 epochs, 2e-5. Needs transformers, datasets, tokenizers,
scikit-learn.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import parts
import torch
from bert_pretrain import SamePieces, a_model
from scipy import stats
from sklearn import metrics as measures
from transformers import BertForSequenceClassification

from thinwire.train import session


@dataclass(frozen=True)
class Task:
    """texts: the columns of the sentences, by any of these names. labels: in order; None: a number is to be found.

    metrics: the first one is the score. columns: of TSV files that have no line of names.
    """

    texts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...] | None
    metrics: tuple[str, ...]
    label: tuple[str, ...] = ("label",)
    columns: tuple[str, ...] | None = None


PAIR = (("sentence1", "premise", "#1 String"), ("sentence2", "hypothesis", "#2 String"))
ENTAILED = ("entailment", "not_entailment")
TASKS = {
    "cola": Task((("sentence",),), ("0", "1"), ("matthews",), columns=("source", "label", "note", "sentence")),
    "sst2": Task((("sentence",),), ("0", "1"), ("accuracy",)),
    "mrpc": Task(PAIR, ("0", "1"), ("f1", "accuracy"), ("label", "Quality")),
    "qqp": Task((("question1",), ("question2",)), ("0", "1"), ("f1", "accuracy"), ("label", "is_duplicate")),
    "stsb": Task(PAIR, None, ("pearson", "spearman"), ("label", "score")),
    "mnli": Task(PAIR, ("entailment", "neutral", "contradiction"), ("accuracy",), ("label", "gold_label")),
    "qnli": Task((("question",), ("sentence",)), ENTAILED, ("accuracy",)),
    "rte": Task(PAIR, ENTAILED, ("accuracy",)),
    "wnli": Task(PAIR, ("0", "1"), ("accuracy",)),
}


@dataclass(frozen=True)
class Preset:
    """length: pieces of a sentence or a pair. rise: of the steps. full: steps in full before one bit."""

    optimizer: str
    length: int
    batch: int
    epochs: float
    lr: float
    rise: float


PRESETS = {
    "paper": Preset("onebit_adam", 128, 32, 3.0, 2e-5, 0.1),
    "small": Preset("onebit_adam", 48, 32, 2.0, 2e-3, 0.1),
}


def rows_of(file, task):
    """[(texts, label)] of a file: a tuple of one or two texts, and the label's place among the task's, or its number.

    Raises: ValueError for columns or labels that the task does not have.
    """
    ending = Path(file).suffixes
    how = {}
    if task.columns and ".tsv" in ending:
        with open(file, encoding="utf-8-sig", errors="replace") as opened:
            first = opened.readline().rstrip("\n").split("\t")
        if "sentence" not in first:
            how = {"names": list(task.columns), "header": None}
    rows = parts.rows_of([file], **how)

    def column(names):
        for name in names:
            if name in rows.column_names:
                return rows[name]
        raise ValueError(f"{file}: it has {', '.join(rows.column_names)}, but no column {' or '.join(names)}")

    texts = list(zip(*(column(names) for names in task.texts), strict=True))
    empty = next((i for i, row in enumerate(texts) if not all(isinstance(text, str) for text in row)), None)
    if empty is not None:
        raise ValueError(f"{file}: row {empty + 1} has no text, but {texts[empty]!r}")
    return [
        (row, _label(file, task, i, one)) for i, (row, one) in enumerate(zip(texts, column(task.label), strict=True))
    ]


def _label(file, task, row, found):
    if task.labels is None:
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = float("nan")
        if number != number:
            raise ValueError(f"{file}: the label of row {row + 1} is {found!r}, and not a number")
        return number
    if isinstance(found, str) and found in task.labels:
        return task.labels.index(found)
    try:
        place = int(found)
    except (TypeError, ValueError):
        place = -1
    if not 0 <= place < len(task.labels):
        raise ValueError(
            f"{file}: the label of row {row + 1} is {found!r}: this task has {', '.join(task.labels)}, or 0 to "
            f"{len(task.labels) - 1}. (GLUE's test files have no labels: give dev files)"
        )
    return place


def lines_in_order(count, seed):
    """As many lines of Shakespeare's plays, half of them with their words in another order: label 0, else 1."""
    lines = [line for _, said in parts.speeches() for line in said.splitlines() if len(line.split()) > 4]
    drawn = random.Random(seed)
    found = []
    while len(found) < count:
        words = drawn.choice(lines).split()
        label = len(found) % 2
        if not label:
            in_order = words[:]
            while words == in_order and len(set(words)) > 1:
                drawn.shuffle(words)
        found.append(((" ".join(words),), label))
    return found


METRICS = {
    "accuracy": measures.accuracy_score,
    "f1": measures.f1_score,
    "matthews": measures.matthews_corrcoef,
    "pearson": lambda right, found: stats.pearsonr(right, found).statistic,
    "spearman": lambda right, found: stats.spearmanr(right, found).statistic,
}


def metric(task, found, right):
    """{name: value} of the task's metrics, F1 of label 1. found, right: labels, or numbers, as lists.

    A correlation with what is the same for all rows counts 0.
    """
    if task.labels is None and len(set(found)) == 1:
        return dict.fromkeys(task.metrics, 0.0)
    return {name: float(METRICS[name](right, found)) for name in task.metrics}


class InPieces(torch.utils.data.Dataset):
    """Rows as BERT takes them, cut to `length` pieces."""

    def __init__(self, tokenizer, rows, length, is_number):
        self.cut = tokenizer(
            *([row[0][i] for row in rows] for i in range(len(rows[0][0]))),
            truncation=True,
            max_length=length,
            padding="max_length",
        )
        self.labels = torch.tensor([row[1] for row in rows], dtype=torch.float32 if is_number else torch.int64)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        names = ("input_ids", "token_type_ids", "attention_mask")
        return {**{name: torch.tensor(self.cut[name][i]) for name in names}, "labels": self.labels[i]}


def main(words=None):
    """Train, and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="cola")
    parser.add_argument(
        "--weights",
        type=parts.model_folder,
        metavar="FOLDER",
        help="as bert_pretrain.py --save leaves it; left out: fresh ones",
    )
    parser.add_argument("--train", help="left out: lines of Shakespeare's plays, in order or not")
    parser.add_argument("--dev", help="what is evaluated; left out: a tenth of --train")
    parser.add_argument("--rows", type=int, default=4000, help="how many are made, where there is no --train")
    parts.add_flags(parser, PRESETS)
    given = parser.parse_args(words)
    preset, task = PRESETS[given.preset], TASKS[given.task]
    given.optimizer = given.optimizer or preset.optimizer

    if given.train:
        train = rows_of(given.train, task)
        dev = rows_of(given.dev, task) if given.dev else train[::10]
        if not given.dev:
            train = [row for i, row in enumerate(train) if i % 10]
        if not train:
            raise ValueError(f"{given.train}: has one row, which is held out: give --dev, or more rows")
    elif given.task == "cola":
        train, dev = lines_in_order(given.rows, seed=0), lines_in_order(max(2, given.rows // 10), seed=1)
    else:
        parser.error(f"--task {given.task} needs --train FILE: rows are made for cola alone")
    is_number = task.labels is None

    with session(given.folder, save_every=100) as run:
        torch.manual_seed(given.seed)
        model, tokenizer = a_model(BertForSequenceClassification, given.weights, num_labels=len(task.labels or "1"))
        model.to(run.device)
        cut, asked = (InPieces(tokenizer, rows, preset.length, is_number) for rows in (train, dev))
        batch = given.batch or preset.batch
        steps = given.steps or max(1, round(preset.epochs * len(cut) / batch))
        rise = max(1, round(preset.rise * steps))
        optimizer = parts.bert_optimizer(given, model, run, lr=parts.rate_of(given, preset.lr), steps=steps, rise=rise)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, parts.risen_and_fallen(rise, steps))
        run.register(model=model, optimizer=optimizer, scheduler=scheduler, pieces=SamePieces(tokenizer))
        called = parts.prepared(model, given)

        def evaluate():
            """Over all rows, by each worker the same: F1 and Matthews are no means of shares."""
            model.eval()
            found, losses = [], []
            with torch.no_grad():
                for i in range(0, len(asked), 64):
                    some = [asked[j] for j in range(i, min(i + 64, len(asked)))]
                    out = model(**{name: torch.stack([one[name] for one in some]).to(run.device) for name in some[0]})
                    found += (out.logits[:, 0] if is_number else out.logits.argmax(dim=1)).tolist()
                    losses.append(out.loss.item() * len(some))
            model.train()
            return {"loss": sum(losses) / len(asked), **metric(task, found, asked.labels.tolist())}

        run.evaluate_every(max(1, steps // 2), evaluate)
        model.train()
        began = time.monotonic()
        loader = {"num_workers": given.loaders}
        for inputs in run.batches(cut, global_batch=batch, steps=steps, seed=given.seed, loader=loader):
            parts.seed_step(run, given.seed)
            loss = parts.step(optimizer, lambda part: called(**part).loss, inputs, given, run.device)
            scheduler.step()
            run.report(loss=loss)
            if run.rank == 0 and (run.step_number + 1) % 25 == 0:
                print(f"step {run.step_number + 1}: {loss.item():.3f} nats, {run.world_size} workers", flush=True)

        if run.rank == 0:
            found, unit = evaluate(), task.metrics[0]
            parts.tell(
                given,
                "bert-glue",
                run,
                optimizer,
                found[unit],
                unit,
                higher_is_better=True,
                began=began,
                task=given.task,
                rows=len(asked),
                **found,
            )
            parts.save(given, model, tokenizer)


if __name__ == "__main__":
    main()
