"""transformers.Trainer inside of a session: an evaluation is one of the run, and who draws the samples is said."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.conftest import missing
from tests.integrations.hugging_face import sequences, small_gpt
from tests.workers.small_job import Recording
from thinwire.comm import SoloGroup
from thinwire.optim import OneBitAdam
from thinwire.train import session
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, Surroundings


@pytest.fixture
def place(tmp_path):
    """Where a session of one rank runs."""
    if importlib.util.find_spec("transformers") is None:
        missing("transformers")
    group = SoloGroup()
    return Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), Recording(), None, group)


def test_what_trainer_finds_in_an_evaluation_is_in_the_history(tmp_path, place):
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import with_thinwire

    how = {"per_device_train_batch_size": 2, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 2}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, **how)
    with placed(place), session() as run:
        given = {"train_dataset": sequences(16), "eval_dataset": sequences(4)}
        plain = Trainer(small_gpt(0), args, compute_metrics=lambda found: {"accuracy": 0.25}, **given)
        trainer = with_thinwire(plain, OneBitAdam, run=run)
        trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    found = {sample.step: sample for sample in place.reporter.samples if sample.validation_loss is not None}
    assert [*found] == [*losses] == [2, 4, 5]
    for step, sample in found.items():
        assert sample.validation_loss == pytest.approx(losses[step])
        assert sample.reported == {"validation_accuracy": 0.25}
    assert {sample.last_step for sample in place.reporter.samples} == {5}


def test_samples_come_in_the_order_that_is_asked_for_and_another_way_of_drawing_them_is_refused(tmp_path, place):
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import with_thinwire

    class Draws(Trainer):
        def _get_train_sampler(self, *given):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    seen = []

    def collate(rows):
        seen.extend(int(row["input_ids"][0]) for row in rows)
        return torch.utils.data.default_collate(rows)

    def made(kind, order):
        how = {"per_device_train_batch_size": 2, "max_steps": 3, "train_sampling_strategy": order}
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **how)
        trainer = kind(small_gpt(0), args, train_dataset=sequences(16), data_collator=collate)
        return with_thinwire(trainer, OneBitAdam, run=run)

    with placed(place), session() as run:
        for kind, order, words in (
            (Draws, "random", r"Draws\._get_train_sampler says which samples.*leave run= out"),
            (
                Trainer,
                "group_by_length",
                r"train_sampling_strategy='group_by_length'.*say \"random\" or \"sequential\"",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                made(kind, order)
        made(Trainer, "sequential").train()
    assert seen[:6] == [int(row["input_ids"][0]) for row in sequences(6)]


def test_a_share_without_a_token_to_learn_is_no_error(tmp_path, place):
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import with_thinwire

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2)
    masked = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in sequences(16)]
    with placed(place), session() as run:
        trainer = with_thinwire(Trainer(small_gpt(0), args, train_dataset=masked), OneBitAdam, run=run)
        trainer.train()
    assert [sample.loss for sample in place.reporter.samples[1:]] == [0.0, 0.0]


def test_a_trainer_is_evaluated_on_shards_by_the_session(tmp_path, place):
    """What Trainer cannot: it gathers predictions by collectives that nobody could leave."""
    if importlib.util.find_spec("transformers") is None:
        missing("transformers")
    from transformers import Trainer, TrainingArguments

    from thinwire.integrations.transformers import with_thinwire

    def evaluate(part):
        assert not part.dataset[0]["input_ids"].requires_grad
        return {"loss": float(len(part)), "accuracy": 0.5}

    how = {"per_device_train_batch_size": 2, "max_steps": 4}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **how)
    with placed(place), session() as run:
        run.evaluate_every(2, evaluate, data=sequences(6))
        trainer = with_thinwire(Trainer(small_gpt(0), args, train_dataset=sequences(16)), OneBitAdam, run=run)
        trainer.train()
    found = {one.step: (one.validation_loss, one.reported) for one in place.reporter.samples if one.validation_loss}
    assert found == dict.fromkeys((0, 2, 4), (6.0, {"validation_accuracy": 0.5}))
