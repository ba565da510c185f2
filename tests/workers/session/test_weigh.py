"""run.batches(weigh=...): the gradient is that of the mean over all that is counted, whoever computes it."""

import math

import pytest
import torch

from tests.covering import every_value
from tests.workers.loop.threads_job import Plan, ThreadsJob
from tests.workers.small_job import Recording
from thinwire.comm import run_threads
from thinwire.comm.groups.faults import Fault
from thinwire.optim import Adam
from thinwire.train import session
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, ScriptError, Surroundings

GLOBAL_BATCH, SAMPLES = 7, 22
TEXTS = [torch.arange(1 + i * i % 11) * 0.1 + i for i in range(SAMPLES)]
"""Of 1 to 11 tokens. The last of the four steps has one sample, which all ranks compute."""


def padded(texts):
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=math.nan)
    return {"tokens": tokens, "count": (~tokens.isnan()).sum()}


def trained(run, weigh=lambda batch: batch["count"], texts=TEXTS, after=lambda: None):
    """A parameter by the mean loss over tokens, and what is reported of it."""
    slope = torch.nn.Parameter(torch.tensor([0.1, 0.0]))
    optimizer = Adam([slope], lr=0.05, eps=1e-3, group=run.group)
    run.register(optimizer=optimizer)
    how = {"global_batch": GLOBAL_BATCH, "epochs": 2, "seed": 3, "loader": {"collate_fn": padded}}
    for batch in run.batches(texts, **how, weigh=weigh):
        tokens = batch["tokens"][~batch["tokens"].isnan()]
        losses = (slope[0] * tokens + slope[1] - tokens.sin()).square()
        run.step(losses.sum() / max(1, losses.numel()))
        after()
    return slope.detach()


def on_ranks(folder, size, **given):
    """By rank: the parameter at the end, the losses, and of how many samples each is."""

    def work(group):
        reporter = Recording()
        place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(folder, 0.0), reporter, None, group)
        with placed(place), session() as run:
            slope = trained(run, **given)
        return slope, [sample.loss for sample in reporter.samples[1:]]

    return run_threads(size, work)


@pytest.mark.few(2)
@every_value({"size": [2, 3, 4, 8]})
def test_a_mean_over_tokens_is_that_of_one_rank_on_any_number(tmp_path, size):
    ((slope, losses),) = on_ranks(tmp_path, 1)
    for found, told in on_ranks(tmp_path, size):
        torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-7)
        assert told == pytest.approx(losses, rel=1e-5)
    by_samples = on_ranks(tmp_path, size, weigh=None)[0][0]
    assert not torch.allclose(by_samples, slope, rtol=1e-4)
    given_none = on_ranks(tmp_path, size, weigh=lambda batch: None)[0][0]
    assert torch.equal(given_none, by_samples)


def test_a_rank_without_a_token_adds_nothing_and_a_step_without_one_is_no_error(tmp_path):
    empty = [torch.empty(0)] * SAMPLES
    half = [text if i % 3 == 0 else text[:0] for i, text in enumerate(TEXTS)]
    ((slope, _),) = on_ranks(tmp_path, 1, texts=half)
    torch.testing.assert_close(on_ranks(tmp_path, 3, texts=half)[0][0], slope, rtol=1e-5, atol=1e-7)
    assert torch.equal(on_ranks(tmp_path, 2, texts=empty)[0][0], torch.tensor([0.1, 0.0]))


def test_a_worker_that_is_lost_changes_nothing_of_it(tmp_path, monkeypatch):
    """Killed in a step, at a boundary, and while the ranks say how much they have counted; another one comes."""

    def script(job, worker):
        with session() as run:
            return trained(run)

    faults = Plan(kills={2: (1, Fault((0,), "sum", 0)), 4: (0, None), 5: (1, Fault((0,), "mean", 0))}, joins={3: 2})
    alone = ThreadsJob(tmp_path / "alone", script, 1).run(monkeypatch)
    disturbed = ThreadsJob(tmp_path / "disturbed", script, 4, faults).run(monkeypatch)
    assert len(disturbed.killed) == 3
    (expected,) = alone.ended.values()
    assert len(disturbed.ended) == 3
    for found in disturbed.ended.values():
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [-1, math.nan, math.inf, "many", [1], torch.ones(2)])
def test_what_is_no_count_is_refused(tmp_path, count):
    with pytest.raises(ScriptError, match=r"weigh=.*counted .* in its batch of step 1: give one from 0"):
        on_ranks(tmp_path, 2, weigh=lambda batch: count)
