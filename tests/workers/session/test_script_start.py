"""A script whose job starts from another job's checkpoint: all that it has registered goes on. The rest of a start, of
a model and its optimizer, is in ../loop/test_start.py."""

from __future__ import annotations

import pytest
import torch

from tests.workers.session.test_session import DATA, net
from thinwire.comm import run_threads
from thinwire.contract.spec import Checkpoint
from thinwire.contract.start import Start
from thinwire.optim import Adam, OneBitAdam
from thinwire.train import session
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, Surroundings
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.weights import StartRefused, fetch

CPU, STEPS = torch.device("cpu"), 20


def run_script(folder, size=1, start=None, script=None):
    """What the script returns, by rank. start: of its job."""
    checkpoint = Checkpoint(every_steps=7, keep=9)
    folder.mkdir(exist_ok=True)

    def work(group):
        origin = None if start is None else Start(**start)
        place = Surroundings(FixedRanks(group), CPU, Run(folder, 0.0), Reporter(), checkpoint, group, None, origin)
        with placed(place), session() as run:
            return (script or train)(run)

    return run_threads(size, work)


def train(run, make=OneBitAdam, **more):
    """Losses by step, and all that there is at the end."""
    model, losses = net(), {}
    options = {"warmup": 4} if make is OneBitAdam else {}
    optimizer = make(model.parameters(), lr=1e-2, group=run.group, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    counted = {"steps": 0}
    run.register(model=model, optimizer=optimizer, scheduler=scheduler, counted=counted, **more)
    for x, y in run.batches(DATA, global_batch=6, steps=STEPS):
        loss = (model(x) - y).square().mean()
        run.step(loss)
        scheduler.step()
        counted["steps"] += 1
        losses[run.step_number + 1] = loss.item()
    rates = torch.tensor(scheduler.get_last_lr())
    return losses, [x.clone() for x in model.state_dict().values()] + [rates], counted["steps"]


def test_with_everything_all_that_is_registered_goes_on_at_the_next_sample(tmp_path):
    first = run_script(tmp_path / "first", 2)
    second = run_script(tmp_path / "second", 2, {"checkpoints": str(tmp_path / "first/checkpoints"), "step": 7})
    for (losses, _, steps), (losses_too, _, steps_too) in zip(first, second, strict=True):
        assert losses_too == {step: loss for step, loss in losses.items() if step > 7}
        assert steps == steps_too == STEPS
    assert all(map(torch.equal, first[0][1], second[0][1]))  # statistics of a batch norm are those of rank 0


def refused(folder, start, script):
    with pytest.raises(StartRefused) as told:
        run_script(folder, 1, start, script)
    return str(told.value)


def test_another_script_is_told_what_to_register_or_to_take_the_weights_alone(tmp_path):
    run_script(tmp_path / "first")
    start = {"checkpoints": str(tmp_path / "first/checkpoints"), "step": 7}
    told = refused(tmp_path / "a", start, lambda run: train(run, average=torch.nn.Linear(2, 2)))
    assert "register the same objects under the same names" in told
    assert told.endswith("say start.what = weights")
    told = refused(tmp_path / "b", start, lambda run: train(run, make=Adam))
    assert "this optimizer needs 'Adam'" in told


def test_a_script_without_a_module_is_told_to_register_it(tmp_path):
    run_script(tmp_path / "first")
    file = fetch(str(tmp_path / "first/checkpoints"), tmp_path).path

    def script(run):
        run.register(optimizer=Adam(net().parameters(), group=run.group))
        next(run.batches(DATA, global_batch=6, steps=STEPS))

    for start in ({"weights": str(file)}, {"checkpoints": str(tmp_path / "first/checkpoints"), "what": "weights"}):
        assert "say run.register(model=model)" in refused(tmp_path / "a", start, script)
