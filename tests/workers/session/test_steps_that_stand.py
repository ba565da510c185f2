"""A local step stands though the exchange after it was lost: it counts, is not taken back, and does not come again."""

import math
from collections import Counter

import pytest
import torch

from tests.workers.loop.threads_job import Plan, ThreadsJob, Worker
from tests.workers.session.test_lost_steps import BATCH, DATA, Exact
from thinwire.comm import NonFiniteInput, PeerLost
from thinwire.comm.groups.faults import Fault
from thinwire.contract.run_folder import RunFolder
from thinwire.optim import LocalSteps
from thinwire.train import session
from thinwire.workers.session.body import Bodies
from thinwire.workers.telemetry import history

EVERY, STEPS, ROUND = 3, 20, 12
"""ROUND: after which step an exchange is lost."""


def script(job, worker):
    with session() as run:
        model = Exact()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LocalSteps(inner, every=EVERY, group=run.group, overlap=job.overlap)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
        counters = {"steps": 0}
        run.register(model=model, optimizer=optimizer, scheduler=scheduler, counters=counters)
        for numbers, x in run.batches(DATA, global_batch=BATCH, steps=STEPS, seed=3):
            job.attempts.append((run.step_number + 1, worker.identity.slot, numbers.tolist()))
            assert optimizer.num_steps == run.step_number
            loss = model(x)
            loss.backward()
            if job.spoils and run.step_number + 1 == ROUND - 1 and worker.identity.slot == 1:
                model.values.grad.fill_(math.nan)
            optimizer.step()
            scheduler.step()
            counters["steps"] += 1
            run.report(loss=loss, counted=float(counters["steps"]))
            assert not run.step_is_lost
            if job.leaves_at == run.step_number + 1:
                break
    return [optimizer.num_steps, counters["steps"], scheduler.last_epoch, int(model.calls)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("overlap", "collective"),
    [(False, "all_to_all"), (False, "all_gather"), (False, None), (True, "all_to_all"), (True, None)],
)
def test_a_step_that_stands_counts_once_for_all_that_is_registered(tmp_path, monkeypatch, overlap, collective):
    """collective: in which a worker dies; None: its gradient is not finite, which is told at the end of the round."""
    faults, stood = Plan(), []
    if collective is not None:
        faults.kills[ROUND - 1] = 1, Fault((0,), collective, 0)
        faults.joins[ROUND + EVERY + 1] = 1
    note = Bodies._note_undone

    def noting(bodies, error):
        stood.append((type(error), bodies._open.share.step))
        note(bodies, error)

    monkeypatch.setattr(Bodies, "_note_undone", noting)
    if overlap:  # who looks between two steps knows of a death before the step that waits for the exchange
        monkeypatch.setattr(Worker, "look", lambda self, step: None)
    job = ThreadsJob(tmp_path, script, 3, faults)
    job.overlap, job.spoils, job.leaves_at = overlap, collective is None, None
    job.run(monkeypatch, tolerate=NonFiniteInput)

    kind = NonFiniteInput if collective is None else PeerLost
    assert (kind, ROUND + EVERY if overlap else ROUND) in stood
    assert list(job.ended.values()) == [[STEPS] * 4] * len(job.ended)
    assert len(job.ended) == (2 if collective is None else 3)
    given = Counter((step, slot) for step, slot, _ in job.attempts)
    assert set(given.values()) == {1}
    samples = history.read(RunFolder(tmp_path).history)
    assert [sample.step for sample in samples] == list(range(STEPS + 1))
    assert all(sample.loss is not None for sample in samples[1:])


def test_a_loop_that_is_left_after_a_step_that_stands_has_made_it(tmp_path, monkeypatch):
    job = ThreadsJob(tmp_path, script, 3, Plan())
    job.overlap, job.spoils, job.leaves_at = False, True, ROUND
    job.run(monkeypatch)
    assert list(job.ended.values()) == [[ROUND] * 4] * 3
    assert [sample.step for sample in history.read(RunFolder(tmp_path).history)] == list(range(ROUND + 1))
