"""A dry session: a few steps of a script's own loop are timed, and then it ends, whatever the loop would do."""

import itertools

import pytest
import torch

from thinwire.comm import SoloGroup
from thinwire.optim import Adam, OneBitAdam
from thinwire.train import session
from thinwire.workers.plan import scripts
from thinwire.workers.plan.scripts import SETTLING, DrySession
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.body import STEPLESS
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, ScriptError, Surroundings
from thinwire.workers.telemetry.reporter import Reporter

DATA = [torch.full((3,), float(i)) for i in range(40)]
STEPS, WORKERS = 3, 4


class Over(BaseException):
    """A dry session has learned enough."""


class Slow(torch.autograd.Function):
    """Forward takes 2 s and backward 5 s, of a clock that stands still else."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock.now += 2.0
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.now += 5.0
        return grad, None


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Script:
    """What a script has: a model, its optimizer, and what was seen of its loop."""

    def __init__(self, run, **options):
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = OneBitAdam(self.model.parameters(), lr=1e-3, group=run.group, warmup=2, **options)
        run.register(model=self.model, optimizer=self.optimizer)


@pytest.fixture
def ends(tmp_path):
    """`ends(script)` runs script(run) in a dry session; returns what was learned, None where that is not enough."""

    def run(script, workers=WORKERS):
        found = []

        def done(steps):
            found.append(steps)
            raise Over

        group = SoloGroup()
        place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), Reporter(), None, group)
        with placed(place, lambda one: DrySession(one, workers, STEPS, lambda: None, done)):
            try:
                with session(tmp_path / "kept") as of_script:
                    script(of_script)
            except Over:
                pass
        assert not (tmp_path / "kept").exists()
        return found[0] if found else None

    return run


def test_it_ends_after_its_steps_whatever_the_loop_does_and_nothing_is_evaluated_or_saved(ends):
    seen = []

    def script(run):
        own = Script(run)
        run.evaluate_every(1, lambda: pytest.fail("evaluated"))
        for step in itertools.count():
            for batch in run.batches(DATA, global_batch=8, steps=10**9):
                seen.append(len(batch))
                run.step(own.model(batch).sum())
                run.report(loss=1.0)
                run.save()
                assert run.world_size == 1
            assert not step, "a second loop"

    found = ends(script)
    assert seen == [8 // WORKERS] * (SETTLING + STEPS)
    assert (found.timed, found.run["steps"], found.global_batch) == (STEPS, 10**9, 8)


@pytest.mark.parametrize("closure", [False, True])
def test_forward_and_backward_are_told_apart_and_the_data_and_the_optimizer_are_in_neither(ends, monkeypatch, closure):
    clock = Clock()
    monkeypatch.setattr(scripts, "time", clock)

    class Slowly:
        def __len__(self):
            return 1000

        def __getitem__(self, i):
            clock.now += 100.0
            return DATA[i % 40]

    def script(run):
        own = Script(run)
        for batch in run.batches(Slowly(), global_batch=8):

            def compute():
                own.optimizer.zero_grad()
                loss = Slow.apply(own.model(batch), clock).sum()  # noqa: B023 - called in this turn
                loss.backward()
                return loss

            if not closure:
                compute()
            own.optimizer.step(compute) if closure else own.optimizer.step()
            clock.now += 1.0  # a scheduler, a report

    found = ends(script)
    assert (found.forward_s, found.backward_s) == (3.0, 5.0)


def test_a_loop_that_is_left_early_is_told_by_what_was_timed_until_then(ends):
    def script(count):
        def loop(run):
            own = Script(run)
            for batch, _ in zip(run.batches(DATA, global_batch=8), range(count), strict=False):
                run.step(own.model(batch).sum())

        return loop

    assert ends(script(SETTLING + 1)).timed == 1
    assert ends(script(SETTLING)) is None


def test_a_dataset_that_is_short_is_gone_through_again_and_its_length_is_known(ends):
    def script(run):
        own = Script(run)
        for batch in run.batches(DATA[:9], global_batch=8, epochs=3):
            run.step(own.model(batch).sum())

    found = ends(script)
    assert (found.timed, found.run["steps"]) == (STEPS, 4)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda run: Script(run).optimizer.step(), "optimizer.step() before run.batches()"),
        (lambda run: list(zip(run.batches(DATA, global_batch=8), range(99), strict=False)), "no optimizer is regis"),
        (
            lambda run: (Script(run), list(zip(run.batches(DATA, global_batch=8), range(99), strict=False))),
            f"{STEPLESS} batches without optimizer.step()",
        ),
        (lambda run: (Script(run), next(run.batches(DATA, global_batch=2))), "4 workers for global_batch = 2"),
        (
            lambda run: (
                Script(run),
                run.register(second=Adam(torch.nn.Linear(1, 1).parameters(), group=run.group)),
                next(run.batches(DATA, global_batch=8)),
            ),
            "2 optimizers are registered, and a forecast is of a run with one",
        ),
    ],
    ids=["own loop", "no optimizer", "no step", "few samples", "two optimizers"],
)
def test_what_cannot_be_learned_is_said(ends, script, words):
    with pytest.raises(ScriptError) as told:
        ends(script)
    assert words in str(told.value)
