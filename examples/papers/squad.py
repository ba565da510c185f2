"""SQuAD 1.1 (arXiv 1606.05250): BERT finds the answer to a question in a text; exact match and F1 by SQuAD's own rules.

python examples/papers/squad.py --weights bert                          a folder that bert_pretrain.py has written
torchrun --nproc-per-node 2 examples/papers/squad.py --weights bert     two workers on this machine
thinwire submit examples/papers/squad.py --working-dir . --max 4 -- --weights /shared/bert
python examples/papers/squad.py --preset paper --weights bert-large --train train-v1.1.json --dev dev-v1.1.json

--train and --dev: SQuAD's JSON, or JSONL, parquet or arrow with the columns id, context, question, answers (texts and
answer_start), as the hub has it. Left out: questions on who says which line, made of Shakespeare's plays.
Needs transformers, datasets, tokenizers.
--preset paper: as 1-bit Adam was tried on it (arXiv 2102.02888): batch 96, 3e-5, 2 epochs, 384 pieces.
"""

import argparse
import json
import random
import re
import string
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import parts
import torch
from bert_pretrain import SamePieces, a_model
from transformers import BertForQuestionAnswering

from thinwire.train import session

BEST, LONGEST = 20, 30
"""Ends that are looked at of each text, and pieces of an answer at most: as transformers' own example has them."""
LONGEST_QUESTION = 64
"""Pieces of a question, at most; of short sequences half."""


@dataclass(frozen=True)
class Preset:
    """length: pieces of a question and a text; stride: those that two parts of a text share. rise: of the steps."""

    optimizer: str
    length: int
    stride: int
    batch: int
    epochs: float
    lr: float
    rise: float
    full: int | str
    weight_decay: float


PRESETS = {
    # DeepSpeed's tutorial of 1-bit Adam: 32 GPUs with 3 samples each, 400 of 1,848 steps in full, no decay.
    "paper": Preset("onebit_adam", 384, 128, 96, 2.0, 3e-5, 0.1, 400, 0.0),
    "small": Preset("onebit_adam", 96, 32, 16, 2.0, 2e-3, 0.1, "auto", 0.0),
}


def questions(file):
    """Questions of a file: id, context, question, answers {text: [...], answer_start: [...]}. Raises: ValueError."""
    if not Path(file).is_file():
        raise ValueError(f"{file}: there is no such file")
    if Path(file).suffix == ".json":
        with open(file, encoding="utf-8-sig") as opened:
            try:
                articles = json.load(opened)
            except json.JSONDecodeError:
                articles = None  # a line for each question, perhaps
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}: cannot be read: {error}") from error
        if isinstance(articles, dict) and "data" in articles:
            try:
                return _answered(file, list(_of_articles(articles["data"])))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{file}: is no JSON of SQuAD 1.1: {error!r} where its questions are read") from error
    rows = parts.rows_of([file])
    missing = {"id", "context", "question", "answers"} - set(rows.column_names)
    if missing:
        raise ValueError(f"{file}: neither SQuAD's JSON, nor rows with {', '.join(sorted(missing))}")
    return _answered(file, list(rows))


def _answered(file, asked):
    """The same. A text that is not where its answer begins would be trained on as an answer of its own."""
    for one in asked:
        answers = one["answers"]
        if not answers["text"]:
            raise ValueError(f"{file}: question {one['id']} has no answer: this is for SQuAD 1.1, where each has one")
        for text, begin in zip(answers["text"], answers["answer_start"], strict=True):
            if one["context"][begin : begin + len(text)] != text:
                raise ValueError(f"{file}: the answer {text!r} of question {one['id']} does not stand at {begin}")
    if not asked:
        raise ValueError(f"{file}: it has no question")
    return asked


def _of_articles(articles):
    for article in articles:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                answers = asked.get("answers", [])
                yield {
                    "id": asked["id"],
                    "context": paragraph["context"],
                    "question": asked["question"],
                    "answers": {name: [one[name] for one in answers] for name in ("text", "answer_start")},
                }


def who_says(count, seed, speeches_in_one=3):
    """As many questions on who says a line, of Shakespeare's plays; the answer is the name before the speech."""
    speeches = [(speaker, said.splitlines()[:3]) for speaker, said in parts.speeches()]
    drawn = random.Random(seed)
    while count:
        first = drawn.randrange(len(speeches) - speeches_in_one)
        shown = speeches[first : first + speeches_in_one]
        if len({speaker for speaker, _ in shown}) < len(shown):
            continue  # two answers
        which = drawn.randrange(len(shown))
        speaker, lines = shown[which]
        texts = [f"{name}: {' '.join(said)}" for name, said in shown]
        start = sum(len(text) + 1 for text in texts[:which])
        yield {
            "id": f"{seed}-{count}",
            "context": " ".join(texts),
            "question": f"Who says: {drawn.choice(lines)}",
            "answers": {"text": [speaker], "answer_start": [start]},
        }
        count -= 1


def features(tokenizer, asked, length, stride):
    """Question and text in pieces, once for each part of a long text.

    Each is a dict: input_ids, token_type_ids, attention_mask; offsets, the letters of the text that a piece stands for,
    None outside of it; question, its place in `asked`; start_positions and end_positions of the answer, the first piece
    of all where this part does not have the whole of it.
    """
    found = []
    for number, one in enumerate(asked):
        cut = tokenizer(
            _beginning(tokenizer, one["question"].strip(), min(LONGEST_QUESTION, length // 2)),
            one["context"],
            truncation="only_second",
            max_length=length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",
        )
        for i, offsets in enumerate(cut["offset_mapping"]):
            of_text = [place if which == 1 else None for place, which in zip(offsets, cut.sequence_ids(i), strict=True)]
            start, end = _pieces_of(one["answers"], of_text)
            names = ("input_ids", "token_type_ids", "attention_mask")
            tensors = {name: torch.tensor(cut[name][i]) for name in names}
            tensors |= {"start_positions": torch.tensor(start), "end_positions": torch.tensor(end)}
            found.append({**tensors, "offsets": of_text, "question": number})
    return found


def _beginning(tokenizer, question, pieces):
    """Of a question so many pieces at most, as BERT's own script has it: a longer one would leave the text no room."""
    places = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return question if len(places) <= pieces else question[: places[pieces - 1][1]]


def _pieces_of(answers, offsets):
    """The first and last piece of the first answer; (0, 0) where it is not wholly here."""
    if not answers["text"]:
        return 0, 0
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    here = [i for i, place in enumerate(offsets) if place and place[0] < end and place[1] > begin]
    whole = here and offsets[here[0]][0] <= begin and offsets[here[-1]][1] >= end
    return (here[0], here[-1]) if whole else (0, 0)


def best_answer(context, found, best=BEST, longest=LONGEST):
    """The text whose first and last piece have the highest scores together.

    found: (offsets, starts, ends) of each part of the context; starts, ends: f[length], by piece. An empty text where
    no part has a piece of the context.
    """
    highest, answer = float("-inf"), ""
    for offsets, starts, ends in found:
        tops = [torch.topk(scores, min(best, len(scores))).indices.tolist() for scores in (starts, ends)]
        for start in tops[0]:
            for end in tops[1]:
                if offsets[start] is None or offsets[end] is None or not 0 <= end - start < longest:
                    continue
                score = (starts[start] + ends[end]).item()
                if score > highest:
                    highest, answer = score, context[offsets[start][0] : offsets[end][1]]
    return answer


def words(text):
    """Of an answer, as SQuAD compares them: no case, no punctuation, no articles."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def f1(found, right):
    """Of two lists of words, from 0 to 1."""
    common = sum((Counter(found) & Counter(right)).values())
    return 2 * common / (len(found) + len(right)) if common else 0.0


def metric(answers, asked):
    """{"exact_match", "f1"} in percent, as SQuAD's evaluate-v1.1.py has them.

    answers: a text for each of `asked`; it is compared with each of its answers, and the best one counts.
    """
    exact = overlap = 0.0
    for text, one in zip(answers, asked, strict=True):
        found, rights = words(text), [words(right) for right in one["answers"]["text"]]
        exact += any(found == right for right in rights)
        overlap += max(f1(found, right) for right in rights)
    return {"exact_match": 100 * exact / len(asked), "f1": 100 * overlap / len(asked)}


class Answers:
    """A model's answers: called with a share of the questions, it returns loss, exact match and F1 of that share."""

    def __init__(self, model, tokenizer, preset, device, batch=32):
        self.model, self.tokenizer, self.preset, self.device, self.batch = model, tokenizer, preset, device, batch

    def __call__(self, asked):
        """asked: questions; all parts of a question's text are looked at together."""
        asked = list(asked)
        cut = features(self.tokenizer, asked, self.preset.length, self.preset.stride)
        by_question, losses = defaultdict(list), []
        self.model.eval()
        with torch.no_grad():
            for i in range(0, len(cut), self.batch):
                some = cut[i : i + self.batch]
                out = self.model(**{k: v.to(self.device) for k, v in stacked(some).items()})
                losses += [out.loss.item()] * len(some)
                for one, starts, ends in zip(some, out.start_logits.cpu(), out.end_logits.cpu(), strict=True):
                    by_question[one["question"]].append((one["offsets"], starts, ends))
        self.model.train()
        answers = [best_answer(one["context"], by_question[i]) for i, one in enumerate(asked)]
        return {"loss": sum(losses) / len(losses), **metric(answers, asked)}


def stacked(some):
    """What the model takes, of features: int64[batch, length] each, positions int64[batch]."""
    return {name: torch.stack([one[name] for one in some]) for name in some[0] if name not in ("offsets", "question")}


def main(words=None):
    """Train, and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--weights",
        type=parts.model_folder,
        metavar="FOLDER",
        help="as bert_pretrain.py --save leaves it; left out: fresh ones",
    )
    parser.add_argument("--train", help="left out: questions made of Shakespeare's plays")
    parser.add_argument("--dev", help="what is evaluated; left out: a twentieth of the questions of --train")
    parser.add_argument("--questions", type=int, default=2000, help="how many are made, where there is no --train")
    parts.add_flags(parser, PRESETS)
    given = parser.parse_args(words)
    preset = PRESETS[given.preset]
    given.optimizer = given.optimizer or preset.optimizer

    train = questions(given.train) if given.train else list(who_says(given.questions, seed=0))
    if given.dev:
        dev = questions(given.dev)
    elif given.train:
        cut = max(1, len(train) // 20)
        train, dev = train[:-cut], train[-cut:]
        if not train:
            raise ValueError(f"{given.train}: has one question, which is held out: give --dev, or more questions")
    else:
        dev = list(who_says(max(1, given.questions // 10), seed=1))
    with session(given.folder, save_every=100) as run:
        torch.manual_seed(given.seed)
        model, tokenizer = a_model(BertForQuestionAnswering, given.weights)
        model.to(run.device)
        cut = features(tokenizer, train, preset.length, preset.stride)
        batch = given.batch or preset.batch
        steps = given.steps or max(1, round(preset.epochs * len(cut) / batch))
        rise = max(1, round(preset.rise * steps))
        optimizer = parts.bert_optimizer(
            given,
            model,
            run,
            lr=parts.rate_of(given, preset.lr),
            steps=steps,
            rise=rise,
            warmup=preset.full if preset.full == "auto" else min(preset.full, steps),
            weight_decay=preset.weight_decay,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, parts.risen_and_fallen(rise, steps))
        run.register(model=model, optimizer=optimizer, scheduler=scheduler, pieces=SamePieces(tokenizer))
        called = parts.prepared(model, given)
        evaluate = Answers(model, tokenizer, preset, run.device)
        run.evaluate_every(max(1, steps // 2), evaluate, data=dev)
        model.train()
        began = time.monotonic()
        loader = {"num_workers": given.loaders, "collate_fn": stacked}
        for inputs in run.batches(cut, global_batch=batch, steps=steps, seed=given.seed, loader=loader):
            parts.seed_step(run, given.seed)
            loss = parts.step(optimizer, lambda part: called(**part).loss, inputs, given, run.device)
            scheduler.step()
            run.report(loss=loss)
            if run.rank == 0 and (run.step_number + 1) % 25 == 0:
                print(f"step {run.step_number + 1}: {loss.item():.3f} nats, {run.world_size} workers", flush=True)

        if run.rank == 0:
            found = evaluate(dev)
            how = {"exact_match": found["exact_match"], "questions": len(dev)}
            parts.tell(
                given, "bert-squad", run, optimizer, found["f1"], "F1, %", higher_is_better=True, began=began, **how
            )
            parts.save(given, model, tokenizer)


if __name__ == "__main__":
    main()
