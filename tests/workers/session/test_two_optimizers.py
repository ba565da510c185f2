"""Several optimizers step with one batch: it counts on all ranks, with all their steps, or it counts on none."""

import itertools
import random
import shutil

import pytest
import torch

from tests.covering import parametrize
from tests.workers.loop.threads_job import Plan, Telling, ThreadsJob
from tests.workers.session.test_lost_steps import Exact
from thinwire.comm import NonFiniteInput
from thinwire.comm.groups.faults import Fault, When
from thinwire.optim import Adam, OneBitAdam
from thinwire.optim.engine.state import error_memories
from thinwire.train import session

STEPS, BATCH, SAMPLES, WIDTH = 14, 12, 44, 6
DATA = [
    torch.randint(-9, 9, (WIDTH,), generator=torch.Generator().manual_seed(i)) * 3.0**4 * 2**6 for i in range(SAMPLES)
]


def dense(params, group):
    return Adam(params, lr=0.1, group=group)


def one_bit(params, group):
    return OneBitAdam(params, lr=0.01, warmup=3, group=group)


def script(job, worker):
    """As of a GAN: the second one's gradient hangs on what the first one's step has made of its parameters."""
    with session() as run:
        critic, actor = Exact(), Exact()
        first, second = job.optimizer(critic.parameters(), run.group), job.optimizer(actor.parameters(), run.group)
        rates = [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in (first, second)]
        average = {"of": critic.values.detach().clone()}
        run.register(critic=critic, first=first, actor=actor, second=second, average=average)
        run.register(rate1=rates[0], rate2=rates[1])
        for x in run.batches(DATA, global_batch=BATCH, steps=STEPS, seed=3):
            step = run.step_number + 1
            job.attempts.append((step, run.group.generation, [id(one) for one in x]))
            critic.requires_grad_(True)  # not before: where workers change, it is as the body has left it
            if step % 4:
                for _ in range(1 + step % 2):
                    first.zero_grad()
                    critic(x).backward()
                    first.step()
                rates[0].step()
                average["of"].lerp_(critic.values.detach(), 0.25)
            critic.requires_grad_(False)
            second.zero_grad()
            # sign(): exact, and another gradient where the critic did not move as it should
            (actor(x) + actor.values @ (critic.values - average["of"]).sign()).backward()
            if (step, worker.identity.slot) == job.spoiled:
                actor.values.grad.fill_(torch.nan)
            second.step()
            rates[1].step()
            run.report(loss=0.0)
    return {
        "critic": critic.values.detach(),
        "actor": actor.values.detach(),
        "calls": torch.stack([critic.calls, actor.calls]),
        "average": average["of"],
        "m": torch.cat([one.state[p]["exp_avg"] for one, p in ((first, critic.values), (second, actor.values))]),
        "counts": torch.tensor([first.num_steps, second.num_steps]),
        "rates": torch.tensor([rate.get_last_lr()[0] for rate in rates]),
        **{f"R of {name}": _residual(one) for name, one in (("critic", first), ("actor", second))},
    }


def _residual(optimizer):
    """R of its error memory. Collective."""
    return torch.stack([one.residual() for one in error_memories(optimizer.vectors).values()] or [torch.zeros(1)])


def made(tmp_path, monkeypatch, name, size, plan, optimizer=dense, **given):
    job = ThreadsJob(tmp_path / name, script, size, plan, **given)
    job.optimizer, job.spoiled = optimizer, None
    job.run(monkeypatch)
    monkeypatch.undo()
    return job


def assert_same(found, expected):
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        (found,) = made(tmp_path_factory.mktemp("alone"), patch, "alone", 1, Plan()).ended.values()
    return found


@parametrize(("step", "call", "when"), itertools.product((4, 5), range(4), When), usual=[2, 11])
def test_wherever_a_worker_dies_the_run_ends_bit_equal_to_one_without_the_death(
    tmp_path, monkeypatch, expected, step, call, when
):
    """Before and after each exchange of a batch, and in what follows it."""
    plan = Plan(kills={step: (1, Fault((1,), "sum", call, when))})
    disturbed = made(tmp_path, monkeypatch, "disturbed", 3, plan)
    assert disturbed.killed == [step]
    assert len(disturbed.ended) == 2
    for found in disturbed.ended.values():
        assert_same(found, expected)


@parametrize("seed", range(8), usual=[0])
def test_and_so_does_one_whose_workers_die_come_and_leave(tmp_path, monkeypatch, expected, seed):
    plan, draw = Plan(), random.Random(seed)
    for step in range(1, STEPS - 3, 3):
        plan.kills[step] = draw.randrange(4), Fault((0,), "sum", draw.randrange(4), draw.choice(list(When)))
        if draw.random() < 0.5:
            plan.second.add(step)
        plan.joins[step + 1] = 1
    plan.leaves[STEPS - 3] = 0
    disturbed = made(tmp_path, monkeypatch, "disturbed", 4, plan)
    assert len(disturbed.killed) >= 2
    for found in disturbed.ended.values():
        assert_same(found, expected)


@parametrize(("call", "when"), itertools.product((1, 2), When), usual=[1])
def test_with_one_bit_a_death_after_steps_that_stood_leaves_what_one_in_the_first_exchange_does(
    tmp_path, monkeypatch, call, when
):
    """R of both, moments and parameters: of what stood in the batch nothing is left, and nothing else is lost."""
    step = STEPS - 2

    def struck(name, *at):
        return made(tmp_path, monkeypatch, name, 3, Plan(kills={step: (1, Fault((1,), "all_to_all", *at))}), one_bit)

    before, disturbed = struck("first", 0, When.AFTER), struck("later", call, when)
    assert disturbed.killed == before.killed == [step]
    expected, *_ = before.ended.values()
    assert expected["R of critic"].any()
    assert expected["R of actor"].any()
    first, *others = disturbed.ended.values()
    for other in others:
        assert_same(other, first)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=1e-5, atol=1e-6, msg=name)


@parametrize("optimizer", [dense, one_bit], usual=[1])
def test_a_planned_change_and_a_resume_from_a_checkpoint_go_on_as_a_run_without(tmp_path, monkeypatch, optimizer):
    """2 workers, 3, 2: R is kept, of both. And what was saved goes on bit-equal to the run that saved it."""
    plan = Plan(joins={3: 1}, leaves={7: 0})
    job = made(tmp_path, monkeypatch, "run", 2, plan, optimizer, checkpoint={"every_steps": 10, "keep": 2})
    first, *others = job.ended.values()
    for other in others:
        assert_same(other, first)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"), key=lambda folder: folder.name)
    shutil.rmtree(newest)
    again = made(tmp_path, monkeypatch, "run", 2, Plan(), optimizer, checkpoint={"every_steps": 100, "keep": 2})
    assert {step for step, *_ in again.attempts} == set(range(11, STEPS + 1))
    for other in again.ended.values():
        assert_same(other, first)


def test_a_gradient_that_is_not_finite_takes_the_batch_back_and_its_rank_away(tmp_path, monkeypatch, expected):
    job = ThreadsJob(tmp_path / "run", script, 3)
    job.optimizer, job.spoiled = dense, (5, 1)
    job.run(monkeypatch, tolerate=NonFiniteInput)
    assert [type(error) for error in job.errors] == [NonFiniteInput]
    assert len(job.ended) == 2
    for found in job.ended.values():
        assert_same(found, expected)


def together(folder, kinds, steps=3, spoiled=0):
    """Optimizers of these kinds, each of a model of its own. spoiled: where the last one's gradient is NaN."""
    models = [Exact() for _ in kinds]
    with session(folder, save_every=2) as run:
        optimizers = [kind(model.parameters(), group=run.group) for kind, model in zip(kinds, models, strict=True)]
        run.register(**{f"o{at}": one for at, one in enumerate(optimizers)})
        for x in run.batches(DATA, global_batch=BATCH, steps=steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(x).backward()
                if model is models[-1] and run.step_number + 1 == spoiled:
                    model.values.grad.fill_(torch.nan)
                optimizer.step()
    return models, optimizers


@pytest.mark.parametrize("kinds", [(Adam, OneBitAdam), (OneBitAdam,), (Adam, OneBitAdam, Adam)])
def test_a_checkpoint_of_other_optimizers_is_refused_before_anything_is_loaded(tmp_path, kinds):
    together(tmp_path, (OneBitAdam, Adam))
    with pytest.raises(ValueError, match=r"2 optimizers \(OneBitAdam, Adam\).*in the same order"):
        together(tmp_path, kinds, steps=6)


def test_where_no_batch_follows_one_that_was_lost_is_taken_back_all_the_same(monkeypatch):
    made_here = []
    monkeypatch.setattr(Adam, "resumed", lambda self, plain=Adam.resumed: made_here.append(self) or plain(self))
    with pytest.raises(NonFiniteInput, match="after step 1"):
        together(None, (Adam, Adam), spoiled=2)
    assert [one.num_steps for one in made_here] == [1]


def test_bytes_are_counted_over_all_that_has_stepped(tmp_path, monkeypatch):
    samples = []
    monkeypatch.setattr(Telling, "steps", lambda self, found, *_: samples.extend(found))
    made(tmp_path, monkeypatch, "run", 2, Plan())
    of_step = {sample.step: sample for sample in samples if sample.step}
    assert sorted(of_step) == list(range(1, STEPS + 1))
    vectors = {4: 1, 5: 3, 6: 2}
    for step, count in vectors.items():
        assert of_step[step].payload_bytes >= count * WIDTH * 4
        assert of_step[step].payload_bytes == pytest.approx(count * of_step[4].payload_bytes, rel=0.2)
        assert of_step[step].compression_ratio == pytest.approx(of_step[4].compression_ratio, rel=0.2)
