"""TRL's trainers inside of a session: workers that die and come change neither what is learned nor what is counted.

The workers are threads of this process, for importing TRL costs more than all that they train.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools

import pytest
import torch

from tests.conftest import missing
from tests.workers.loop.threads_job import Plan, ThreadsJob
from tests.workers.small_job import Recording
from thinwire.comm import SoloGroup
from thinwire.comm.groups.faults import Fault
from thinwire.optim import Adam
from thinwire.train import session
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, Surroundings

STEPS, EVERY = 12, 3
FAULTS = {
    "kills": {2: (1, Fault((0,), "sum", 0)), 7: (0, Fault((0,), "sum", 0)), 9: (2, None)},
    "joins": {4: 1, 8: 1},
}
"""Two die in the exchange of step 3 and of step 8, one between steps; two come."""


@pytest.fixture(scope="module")
def parts():
    """The libraries, and models that all workers begin with: what draws from one generator is not for threads."""
    for library in ("trl", "datasets"):
        if importlib.util.find_spec(library) is None:
            missing(f"{library} is not installed: pip install {library}")
    import datasets
    import trl

    from examples import small

    datasets.disable_progress_bars()
    return trl, datasets.Dataset, small, small.small_model(0), small.small_model(1), small.small_tokenizer()


def arguments(kind, folder, **given):
    return kind(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=6,
        learning_rate=3e-3,
        adam_epsilon=1e-3,  # above the rounding of gradients: how many workers add them up is not to be seen
        max_grad_norm=0.0,
        logging_steps=EVERY,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **given,
    )


def supervised(parts, folder, **given):
    trl, dataset, small, model, _, tokenizer = parts
    rows = dataset.from_list([{"prompt": small.question(n), "completion": small.answer(n)} for n in range(40)])
    args = arguments(trl.SFTConfig, folder, **given)
    held_out = rows.select(range(4))
    return trl.SFTTrainer(copy.deepcopy(model), args, None, rows, held_out, processing_class=tokenizer)


def preferred(parts, folder):
    """The reference model follows the trained one, by a callback: every second step moves it."""
    trl, dataset, small, model, reference, tokenizer = parts
    ask, tell = small.question, small.answer
    rows = [{"prompt": ask(n), "chosen": tell(n), "rejected": small.evasion(n)} for n in range(40)]
    args = arguments(trl.DPOConfig, folder, sync_ref_model=True, ref_model_sync_steps=2, beta=1.0)
    model, reference = copy.deepcopy(model), copy.deepcopy(reference)
    return trl.DPOTrainer(model, reference, args, train_dataset=dataset.from_list(rows), processing_class=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("made", [supervised, preferred])
def test_nothing_that_trl_keeps_shows_that_workers_died_and_came(tmp_path, monkeypatch, parts, made):
    """Its reference model; and numbers that it adds up for its log, of which a lost step must not be one."""
    from thinwire.integrations.transformers import with_thinwire

    averaged, number = {}, itertools.count()

    def script(job, worker):
        with session() as run:
            trainer = made(parts, tmp_path / str(next(number)))
            log, found = trainer.log, averaged.setdefault(worker, [])

            def logged(logs, *rest):
                if "loss" in logs:
                    found.append({len(values) for values in trainer._metrics["train"].values() if values})
                return log(logs, *rest)

            with_thinwire(trainer, Adam, run=run).log = logged
            trainer.train()
        reference = getattr(trainer, "ref_model", None) or torch.nn.Identity()
        weights = [p.detach().flatten() for model in (trainer.model, reference) for p in model.parameters()]
        return torch.cat(weights), trainer._total_train_tokens, trainer.state.global_step

    with monkeypatch.context() as patched:
        alone = ThreadsJob(tmp_path / "alone", script, 1).run(patched)
    with monkeypatch.context() as patched:
        disturbed = ThreadsJob(tmp_path / "disturbed", script, 3, Plan(**copy.deepcopy(FAULTS))).run(patched)
    assert len(disturbed.killed) == 3
    assert len(disturbed.ended) == 2
    ((expected, tokens, steps),) = alone.ended.values()
    began = torch.cat([p.detach().flatten() for model in parts[3:5] for p in model.parameters()])[: len(expected)]
    assert steps == STEPS
    for worker, (found, of_worker, steps) in disturbed.ended.items():
        assert steps == STEPS
        assert (found - expected).norm() < 1e-3 * (expected - began).norm()
        assert 0.2 * tokens < of_worker < 0.8 * tokens  # as many as it, and those before it, have had
        assert all(lengths <= {EVERY, 1} for lengths in averaged[worker])
    assert all(lengths <= {EVERY, 1} for lengths in averaged[next(iter(alone.ended))])
    for model in parts[3:5]:
        model.zero_grad()


@pytest.mark.slow
def test_what_sft_finds_in_an_evaluation_is_in_the_history_of_the_run(tmp_path, parts):
    from thinwire.integrations.transformers import with_thinwire

    group, reporter = SoloGroup(), Recording()
    place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), reporter, None, group)
    with placed(place), session() as run:
        trainer = with_thinwire(supervised(parts, tmp_path, eval_strategy="steps", eval_steps=6), Adam, run=run)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    found = [sample for sample in reporter.samples if sample.validation_loss is not None]
    assert [sample.step for sample in found] == [entry["step"] for entry in logged] == [6, 12]
    for sample, entry in zip(found, logged, strict=True):
        assert sample.validation_loss == pytest.approx(entry["eval_loss"])
        accuracy = sample.reported["validation_mean_token_accuracy"]
        assert accuracy == pytest.approx(entry["eval_mean_token_accuracy"], rel=1e-5)
