"""The session of one process: what it resumes, what it reports, and how it says that a script is wrong."""

import json
import math
import os
import random
import socket
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.workers.small_job import Recording
from thinwire.comm import SoloGroup, run_threads
from thinwire.contract.reports import MOST_REPORTED
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import Checkpoint
from thinwire.optim import CADA, Adam, LocalSteps, OneBitAdam, ZeroOneAdam
from thinwire.train import Recipe, session, train
from thinwire.workers.checkpoints.manifest import checkpoints, from_json, to_json
from thinwire.workers.checkpoints.shard import DTYPES
from thinwire.workers.checkpoints.storage import StoreRefused
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, ScriptError, Surroundings
from thinwire.workers.telemetry.reporter import Reporter

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.tensor([i % 3.0])) for i in range(22)]


def net():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def trained(folder, stop=None, steps=24, save_at=(), frozen_from=24):
    """Losses by step, and the state at the end. stop: where the script raises. frozen_from: of the first layer."""
    losses = {}
    with session(folder, save_every=7) as run:
        model = net()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, warmup=6, group=run.group)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        counted = {"steps": 0, "noise": torch.zeros(3)}
        run.register(model=model, optimizer=optimizer, scheduler=scheduler, counted=counted)
        for x, y in run.batches(DATA, global_batch=6, steps=steps):
            if run.step_number == stop:
                raise RuntimeError("stopped here")
            model[0].requires_grad_(run.step_number < frozen_from)
            loss = (model(x) - y).square().mean()
            run.step(loss)
            scheduler.step()
            counted["steps"] += 1
            counted["noise"] += 0.5
            losses[run.step_number + 1] = loss.item()
            if run.step_number + 1 in save_at:
                run.save()
    return losses, [*model.state_dict().values(), counted["noise"], torch.tensor(scheduler.get_last_lr())], counted


@pytest.mark.parametrize(
    ("stop", "save_at", "resumed", "frozen_from"), [(17, (), 14, 24), (17, (16,), 16, 24), (17, (), 14, 9)]
)
def test_a_run_that_is_started_again_goes_on_at_the_next_sample_with_all_that_was_registered(
    tmp_path, stop, save_at, resumed, frozen_from
):
    losses, state, counted = trained(None, frozen_from=frozen_from)
    with pytest.raises(RuntimeError, match="stopped here"):
        trained(tmp_path, stop, save_at=save_at, frozen_from=frozen_from)
    again, state_again, counted_again = trained(tmp_path, frozen_from=frozen_from)
    assert again == {step: loss for step, loss in losses.items() if step > resumed}
    assert all(map(torch.equal, state, state_again))
    assert counted_again["steps"] == counted["steps"] == 24


def test_another_script_does_not_go_on_from_a_checkpoint(tmp_path):
    trained(tmp_path, steps=8)

    def another():
        with session(tmp_path) as run:
            model = net()
            run.register(model=model, optimizer=OneBitAdam(model.parameters(), lr=1e-2, warmup=6, group=run.group))
            next(run.batches(DATA, global_batch=6, steps=8))

    with pytest.raises(ValueError, match="register the same objects"):
        another()


def test_what_ranks_report_is_averaged_over_the_samples_and_gradients_too(tmp_path):
    """Shares of three and two samples: the gradient is that of the mean over five."""
    samples = [torch.tensor([float(2**i)]) for i in range(5)]

    def work(group):
        reporter = Recording()
        place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), reporter, None, group)
        with placed(place), session() as run:
            model = torch.nn.Linear(1, 1, bias=False)
            optimizer = Adam(model.parameters(), lr=0.0, group=run.group)
            run.register(model=model, optimizer=optimizer)
            run.evaluate_every(2, lambda: float(run.rank))
            gradients = []
            for x in run.batches(samples, global_batch=5, steps=4, shuffle=False):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                gradients.append(model.weight.grad.item())
                run.report(loss=x.mean(), **({"of_one": 3} if run.rank == 0 else {}))
        return gradients, reporter.samples

    for gradients, told in run_threads(2, work):
        assert gradients == pytest.approx([31 / 5] * 4)
        assert [sample.loss for sample in told[1:]] == pytest.approx([31 / 5] * 4)
        assert [sample.reported for sample in told[1:]] == [{"of_one": 3.0}] * 4
        assert [sample.validation_loss for sample in told] == [0.5, None, 0.5, None, 0.5]


def test_outside_of_a_job_what_is_reported_is_printed_beside_the_scripts_own_output(capsys):
    with session() as run:
        model = torch.nn.Linear(1, 1)
        run.register(model=model, optimizer=Adam(model.parameters(), lr=0.0, group=run.group))
        run.evaluate_every(10, lambda: {"loss": 0.5, "accuracy": float("nan")})
        for _ in run.batches([torch.ones(1)] * 40, global_batch=2, steps=11):
            run.step(model(torch.ones(1)).mean() * 0 + 3.0)
            run.report(of_mine=0.25)
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[0].startswith("step 0/11  validation 0.5000  validation_accuracy nan  ")
    assert [line.split("  ")[1:-1] for line in lines if line.startswith("step 11/11")] == [
        ["loss 3.0000", "validation 0.5000", "of_mine 0.25", "validation_accuracy nan"]
    ]


def test_what_an_evaluation_reports_is_told_with_its_step_the_one_before_the_first_too(tmp_path):
    def work(group):
        reporter = Recording()
        place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), reporter, None, group)
        with placed(place), session() as run:
            model = torch.nn.Linear(4, 1)
            optimizer = Adam(model.parameters(), group=run.group)
            run.register(model=model, optimizer=optimizer)

            def evaluate():
                run.report(perplexity=float(run.step_number + run.rank), **({"of_one": 3} if run.rank else {}))
                return 1.0

            run.evaluate_every(2, evaluate)
            for x, y in run.batches(DATA, global_batch=4, steps=3):
                run.step((model(x) - y).square().mean())
        return reporter.samples

    for told in run_threads(2, work):
        of_step = [sample.reported for sample in told]
        assert of_step[:2] == [{"perplexity": 0.5, "of_one": 3.0}, None]
        assert [of_step[2]["perplexity"], of_step[3]["perplexity"]] == [2.5, 3.5]


def test_an_evaluation_gives_numbers_by_name_and_each_sample_of_its_data_is_in_one_share(tmp_path):
    """Five samples over two ranks: shares of three and two, and the mean is over the samples."""

    def work(group):
        reporter = Recording()
        place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), reporter, None, group)
        seen = []
        with placed(place), session() as run:
            model = torch.nn.Linear(4, 1)
            run.register(model=model, optimizer=Adam(model.parameters(), group=run.group))

            def evaluate(part):
                values = [part[i] for i in range(len(part))]
                seen.extend(values)
                return {"loss": sum(values) / len(values), "accuracy": torch.tensor(len(values) / 10)}

            run.evaluate_every(3, evaluate, data=[1.0, 2.0, 4.0, 8.0, 16.0])
            for x, y in run.batches(DATA, global_batch=4, steps=3):
                run.step((model(x) - y).square().mean())
        return sorted(seen), reporter.samples

    (first, told), (second, _) = run_threads(2, work)
    assert sorted({*first, *second}) == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert not {*first} & {*second}
    for sample in (told[0], told[-1]):
        assert sample.validation_loss == pytest.approx(31 / 5)
        assert sample.reported["validation_accuracy"] == pytest.approx((3 * 0.3 + 2 * 0.2) / 5)
    assert [sample.last_step for sample in told] == [3] * 4


def test_a_rank_without_a_sample_of_the_evaluation_has_no_part_in_it(tmp_path):
    def work(group):
        reporter = Recording()
        place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), reporter, None, group)
        with placed(place), session() as run:
            model = torch.nn.Linear(4, 1)
            run.register(model=model, optimizer=Adam(model.parameters(), group=run.group))
            run.evaluate_every(3, lambda part: {"accuracy": part[0]}, data=[0.5])
            for x, y in run.batches(DATA, global_batch=4, steps=3):
                run.step((model(x) - y).square().mean())
        return reporter.samples

    for told in run_threads(2, work):
        assert [told[0].reported, told[0].validation_loss] == [{"validation_accuracy": 0.5}, None]


def test_an_evaluation_that_takes_long_may_look_whether_workers_have_changed(tmp_path):
    looks = []

    class Ranks(FixedRanks):
        def look(self, step):
            looks.append(step)

    group = SoloGroup()
    place = Surroundings(Ranks(group), torch.device("cpu"), Run(tmp_path, 0.0), Reporter(), None, group)
    with placed(place), session() as run:
        model = torch.nn.Linear(4, 1)
        run.register(model=model, optimizer=Adam(model.parameters(), group=run.group))

        def evaluate():
            before = len(looks)
            run.look()
            assert looks[before:] == [run.step_number]
            return 1.0

        run.evaluate_every(2, evaluate)
        for x, y in run.batches(DATA, global_batch=4, steps=3):
            run.step((model(x) - y).square().mean())
    assert looks[-1] == 3


class Line(Recipe):
    global_batch, steps = 4, 5

    def model(self):
        return torch.nn.Linear(4, 1)

    def dataset(self):
        return DATA

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean()


def test_a_recipe_is_a_model_a_dataset_and_a_loss():
    assert isinstance(train(Line()), torch.nn.Linear)


def test_a_loop_may_be_left_and_its_last_step_is_saved(tmp_path):
    with session(tmp_path, save_every=100) as run:
        model = net()
        optimizer = Adam(model.parameters(), group=run.group)
        run.register(model=model, optimizer=optimizer)
        for x, y in run.batches(DATA, global_batch=6, steps=50):
            run.step((model(x) - y).square().mean())
            if run.step_number + 1 == 4:
                break
    with session(tmp_path) as run:
        model = net()
        optimizer = Adam(model.parameters(), group=run.group)
        run.register(model=model, optimizer=optimizer)
        next(run.batches(DATA, global_batch=6, steps=50))
        assert run.step_number == 4


def on_threads(tmp_path, size, script):
    """What script(run, optimizer, model) gives, by rank."""

    def work(group):
        checkpoint = Checkpoint(every_steps=100, keep=9)
        place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), Reporter(), checkpoint, group)
        with placed(place), session() as run:
            model = torch.nn.Linear(4, 1)
            optimizer = Adam(model.parameters(), lr=0.01, group=run.group)
            run.register(model=model, optimizer=optimizer)
            return script(run, model)

    return run_threads(size, work)


def test_one_rank_alone_may_ask_for_a_checkpoint(tmp_path):
    def script(run, model):
        for x, y in run.batches(DATA, global_batch=6, steps=20):
            run.step((model(x) - y).square().mean())
            if run.rank == 1 and run.step_number + 1 == 7:
                run.save()

    on_threads(tmp_path, 2, script)
    saved = checkpoints(one.name for one in RunFolder(tmp_path).checkpoints.iterdir())
    assert [one.step for one in saved] == [11, 20]  # all hear of it with the report of step 10


class Stream:
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    ("differs", "told"),
    [
        ({"global_batch": 8}, "global_batch = 8.*global_batch = 6"),
        ({"seed": 5}, "seed = 5.*seed = 0"),
        ({"shuffle": False}, "shuffle = False.*shuffle = True"),
        ({"steps": 9}, "9 steps.*20 steps"),
        ({"dataset": Stream(), "steps": 9}, "steps = 9.*steps = 20"),
        ({"dataset": Stream(), "steps": None, "epochs": 3}, "epochs = 3.*steps = 20"),
    ],
)
def test_ranks_that_would_draw_other_samples_are_told_what_differs(tmp_path, differs, told):
    def script(run, model):
        given = {"dataset": differs.get("dataset", DATA), "global_batch": 6, "steps": 20}
        with pytest.raises(ScriptError, match=rf"rank 1 does not draw the samples.*{told}"):
            next(run.batches(**{**given, **(differs if run.rank == 1 else {})}))
        raise Stopped

    with pytest.raises(Stopped):
        on_threads(tmp_path, 2, script)


def test_ranks_that_would_read_other_files_of_one_length_are_told_by_the_digest(tmp_path):
    class Text(list):
        digest = "of all that is in it"

    def script(run, model):
        dataset = Text(DATA)
        if run.rank == 1:
            dataset.digest = "of another file"
        with pytest.raises(ScriptError, match=r"rank 1 has Text of 22 samples #of another file.*rank 0 has .*#of all "):
            next(run.batches(dataset, global_batch=6, steps=20))
        raise Stopped

    with pytest.raises(Stopped):
        on_threads(tmp_path, 2, script)


class Stopped(Exception):
    pass


def ahead(run, step):
    """Draws a batch before the step of the one before."""
    batches = run.batches(DATA, global_batch=6, steps=3)
    batch = next(batches)
    while batch is not None:
        now, batch = batch, next(batches, None)
        step(now)


def in_evaluation(run, step):
    run.evaluate_every(2, lambda: step(DATA[0]))
    for batch in run.batches(DATA, global_batch=6, steps=3):
        step(batch)


def after_the_last(run, step):
    for batch in run.batches(DATA, global_batch=6, steps=3):
        step(batch)
    step(batch)


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (ahead, "after step 3 of 3: the run is at its end. Make the step of a batch before"),
        (in_evaluation, "after step 0 of 3: an evaluation is no step"),
        (after_the_last, "after step 3 of 3: the run is at its end"),
    ],
)
def test_a_step_that_nobody_would_count_is_refused(loop, told):
    def script():
        with session() as run:
            model = torch.nn.Linear(4, 1)
            optimizer = Adam(model.parameters(), group=run.group)
            run.register(model=model, optimizer=optimizer)

            def step(batch):
                (model(batch[0]) - batch[1]).square().mean().backward()
                optimizer.step()

            loop(run, step)

    with pytest.raises(ScriptError, match=rf"optimizer.step\(\) outside of the loop's body, {told}"):
        script()


def test_after_the_session_the_optimizer_is_the_scripts_own():
    with session() as run:
        model = torch.nn.Linear(4, 1)
        optimizer = Adam(model.parameters(), group=run.group)
        run.register(model=model, optimizer=optimizer)
        for x, _ in run.batches(DATA, global_batch=6, steps=3):
            run.step(model(x).mean())
    model(DATA[0][0]).mean().backward()
    optimizer.step()
    assert optimizer.num_steps == 4


class Broken:
    """A dataset whose sample 9 cannot be read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 9:
            raise OSError(5, "Input/output error")
        return DATA[index % len(DATA)]


class Exhausted:
    """A dataset that reads on in an iterator, which is at its end before the run is."""

    def __init__(self):
        self._rows = iter(DATA[:9])

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return next(self._rows)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_dataset_that_ends_too_early_ends_the_run_with_an_error(tmp_path, processes):
    def script(run, model):
        for x, y in run.batches(Exhausted(), global_batch=4, loader={"num_workers": processes}):
            run.step((model(x) - y).square().mean())

    with pytest.raises(ScriptError, match=r"ended before step 3 of 10: .* raised StopIteration"):
        on_threads(tmp_path, 1, script)


def test_an_error_of_the_dataset_that_the_script_catches_is_no_end_of_the_run(tmp_path):
    def script(run, model):
        batches = run.batches(Broken(), global_batch=4, shuffle=False)
        while True:
            try:
                x, y = next(batches)
            except (OSError, StopIteration):
                break
            run.step((model(x) - y).square().mean())

    with pytest.raises(ScriptError, match=r"raised OSError after step 2 of 10: .*Input/output error.*another sample"):
        on_threads(tmp_path, 1, script)


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.array, torch.tensor])
def test_any_number_may_be_reported_and_be_a_batch(tmp_path, kind):
    def script(run, model):
        for x, y in run.batches(DATA, global_batch=np.int64(6), steps=np.int32(3)):
            run.step((model(x) - y).square().mean())
            run.report(accuracy=kind(3))
        return run.step_number

    assert on_threads(tmp_path, 1, script) == [3]


@pytest.mark.parametrize(
    "value",
    [
        1 + 2j,
        np.complex64(1),
        torch.tensor(1j),
        torch.zeros(1, device="meta"),
        torch.zeros(1).to_sparse(),
        np.array("text"),
        np.array(["2020"], dtype="datetime64[D]"),
        10**400,
        "x" * 10**6,
    ],
    ids=["complex", "numpy", "complex tensor", "meta", "sparse", "array of text", "date", "large int", "long text"],
)
def test_what_is_no_real_number_is_refused_at_the_report_by_its_name_in_few_words(tmp_path, value):
    def script(run, model):
        for x, y in run.batches(DATA, global_batch=6, steps=1):
            with pytest.raises(
                TypeError, match=r"(?s)^run\.report\(rate=\.\.\.\): got .{1,103}; give a real number"
            ) as raised:
                run.report(rate=value)
            run.report(rate=np.array([2.0]))
            run.step((model(x) - y).square().mean())
        return str(raised.value)

    assert on_threads(tmp_path, 1, script)


def test_the_optimizer_inside_of_local_steps_is_no_stranger():
    def script(run, model):
        optimizer = LocalSteps(torch.optim.AdamW(model.parameters()), every=2, group=run.group, model=model)
        run.register(optimizer=optimizer, model=model)
        for x, y in run.batches(DATA, global_batch=6, steps=5):
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.num_steps, optimizer.at_sync

    with session() as run:
        assert script(run, net()) == (5, True)


TOGETHER = {
    "overlapped": partial(OneBitAdam, lr=1e-3, overlap=True),
    "of rounds": partial(ZeroOneAdam, lr=1e-3, total_steps=9),
    "of a closure": partial(CADA, lr=1e-3),
    "a step of two": Adam,
}


def wrong(what):
    with session() as run:
        model = net()
        optimizer = Adam(model.parameters(), group=run.group)
        if what == "unregistered":
            run.register(model=model)
        elif what == "of torch":
            run.register(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        elif what == "stateless":
            run.register(optimizer=optimizer, thing=object())
        elif what == "unwritable":
            run.register(optimizer=optimizer, thing={"seen": {1, 2}})
        elif what == "two":
            run.register(optimizer=optimizer, other=Adam(model.parameters(), group=run.group))
        elif what in TOGETHER:
            run.register(optimizer=optimizer, other=TOGETHER[what](net().parameters(), group=run.group))
        else:
            run.register(optimizer=optimizer, model=model)
        other = torch.optim.SGD(net().parameters(), lr=0.1)
        if what == "no loss":
            run.evaluate_every(2, lambda: None)
        if what == "no function":
            run.evaluate_every(2, None)
        if what == "never drawn":
            run.batches(DATA, global_batch=6)
            return
        for x, y in run.batches(DATA, global_batch=6, steps=3):
            (model(x) - y).square().mean().backward()
            optimizer.step()
            if what == "twice":
                optimizer.step()
            if what == "a step of two":
                run.step(model(x).mean())
            if what == "a stranger":
                other.step()
            if what == "no number":
                run.report(loss=torch.zeros(2))
        if what == "again":
            run.batches(DATA, global_batch=6)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("unregistered", r"no optimizer is registered.*There is .*Adam"),
        ("of torch", r"optimizer=...\): a SGD sends no gradient"),
        ("stateless", r"thing=...\): a object has no state_dict"),
        ("unwritable", r"thing=...\): its state\['seen'\] is set"),
        ("two", r"other=...\): this Adam has parameters that an optimizer has which was registered before"),
        ("overlapped", "OneBitAdam is one of 2 optimizers of this run, and with overlap=True"),
        ("of rounds", "ZeroOneAdam is one of 2 optimizers of this run, and it makes steps that ranks do not share"),
        ("of a closure", "CADA is one of 2 optimizers of this run, and its step"),
        ("a step of two", r"run.step\(\) with 2 optimizers"),
        ("twice", "for a second time with one batch, at step 1"),
        ("a stranger", "SGD made a step and is not registered"),
        ("no number", "a tensor of 2 elements"),
        ("again", "for a second time.*epochs=N"),
        ("never drawn", "no batch was drawn from it"),
        ("no function", r"evaluate_every\(2, None\): give a function"),
        ("no loss", "returned NoneType 'None': return the validation loss"),
    ],
)
def test_what_is_wrong_with_a_script_is_said_with_what_to_write(what, told):
    with pytest.raises((ScriptError, TypeError, ValueError), match=told):
        wrong(what)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"save_every": 0}, "save_every=0, keep=2.*from 1"),
        ({"save_every": "3"}, "save_every='3'.*whole numbers"),
        ({"keep": 1.5}, "keep=1.5.*whole numbers"),
        ({"keep": None}, "keep=None.*whole numbers"),
        ({"folder": "s3://bucket/run"}, "'s3://bucket/run'.*must be a folder of this machine"),
    ],
)
def test_a_session_says_which_of_its_arguments_cannot_be_before_it_makes_anything(tmp_path, monkeypatch, given, told):
    made = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # whatever other tests have left
    monkeypatch.setattr(torch.distributed, "init_process_group", made.append)
    with pytest.raises((TypeError, ValueError), match=told):
        session(**{"folder": "run", **given})
    assert not list(tmp_path.iterdir())
    assert not made


def test_numbers_of_numpy_and_a_folder_in_bytes_will_do(tmp_path):
    with session(os.fsencode(tmp_path), save_every=np.int64(2), keep=np.int64(1)) as run:
        model = net()
        run.register(model=model, optimizer=Adam(model.parameters(), group=run.group))
        for x, y in run.batches(DATA, global_batch=4, steps=3):
            run.step((model(x) - y).square().mean())
    assert [which.step for which in checkpoints(os.listdir(tmp_path / "checkpoints"))] == [3]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, False),
        ({"steps": 6}, False),
        ({"global_batch": 2}, True),
        ({"seed": 1}, True),
        ({"shuffle": False}, True),
        ({"dataset": DATA[:20]}, True),
    ],
)
def test_a_resume_that_draws_other_samples_says_so(tmp_path, caplog, changed, says):
    def train(**given):
        with session(tmp_path) as run:
            model = net()
            run.register(model=model, optimizer=Adam(model.parameters(), group=run.group))
            for x, y in run.batches(**{"dataset": DATA, "global_batch": 4, "steps": 5, **given}):
                run.step((model(x) - y).square().mean())

    train(steps=3)
    train(**changed)
    assert ("samples_differ step=3" in caplog.text) == says


@pytest.mark.parametrize("used", [False, True])
def test_ranks_that_are_given_folders_of_their_own_are_told_before_the_first_step(tmp_path, monkeypatch, used):
    monkeypatch.setattr("thinwire.workers.saving.SEES_S", 0.3)
    if used:
        trained(tmp_path / "1", steps=2)  # a generation has begun there, and it is another one

    def work(group):
        run = Run(tmp_path / str(group.rank), 0.0)
        place = Surroundings(FixedRanks(group), torch.device("cpu"), run, Reporter(), Checkpoint(), group)
        with placed(place), session() as run:
            model = net()
            run.register(model=model, optimizer=Adam(model.parameters(), group=run.group))
            with pytest.raises(StoreRefused, match=rf"rank 1 does not see .*/{run.rank}/checkpoints.* one folder"):
                next(run.batches(DATA, global_batch=4, steps=3))

    with pytest.raises(ScriptError, match=r"raised StoreRefused after step 0 of 3"):
        run_threads(2, work)


@pytest.mark.slow
def test_peers_hear_of_the_error_by_which_a_session_is_left():
    script = textwrap.dedent("""
        import torch
        from thinwire.optim import Adam
        from thinwire.train import session

        with session() as run:
            model = torch.nn.Linear(1, 1)
            optimizer = Adam(model.parameters(), group=run.group)
            if run.rank == 1:
                raise OSError("my own")
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    """)
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert "lost rank 1 (it left: its session ended with OSError: my own)" in said[0]
    assert "OSError: my own" in said[1]


def test_importing_it_imports_no_torch():
    code = "import sys, thinwire.train; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_lies_within_a_registered_dict_is_filled_where_it_is():
    registered = Registered(OneBitAdam(net().parameters()))
    losses, mean, nested = [1.0, 2.0], torch.zeros(3), {"best": [5]}
    registered.add("state", {"losses": losses, "mean": mean, "nested": nested})
    plain, tensors = registered.collected()
    kept = from_json(to_json(plain)), {name: x.clone() for name, x in tensors.items()}
    losses.append(3.0)
    mean += 1.0
    nested["best"][0] = 7
    registered.load(*kept)
    assert (losses, mean.tolist(), nested) == ([1.0, 2.0], [0.0] * 3, {"best": [5]})


def test_an_array_within_a_registered_dict_is_filled_where_it_is():
    registered = Registered(OneBitAdam(net().parameters()))
    seen = np.zeros(3)
    registered.add("state", {"seen": seen, "pair": Pair(1, torch.ones(2))})
    registered.remember()
    registered.before_step()
    seen += 1
    registered.put_back()
    assert seen.tolist() == [0.0] * 3
    seen += 5  # the loop goes on with the array that it has
    assert registered.collected()[1]["state.seen"].tolist() == [5.0] * 3


class Pair(NamedTuple):
    one: int
    other: torch.Tensor


@pytest.mark.parametrize("way", ["a lost step", "a checkpoint"])
def test_containers_come_back_as_what_they_are(way):
    """A loop that counts by a Counter does so after a loss as well."""
    value = {"seen": Counter("aab"), "by": defaultdict(list, {3: [1]}), "last": Pair(1, torch.ones(2)), "on": [[]]}
    held = Held(value)
    registered = Registered(OneBitAdam(net().parameters()))
    registered.add("held", held)
    registered.remember()
    kept = through_a_checkpoint(registered)
    registered.before_step()
    held.value["seen"]["a"] += 1
    if way == "a checkpoint":
        registered.load(*kept)
    else:
        registered.put_back()
    held.value["seen"]["new"] += 1
    held.value["by"]["new"].append(1)
    assert held.value["seen"] == Counter("aab") + Counter(["new"])
    assert held.value["by"] == {3: [1], "new": [1]}
    assert (held.value["last"].one, held.value["last"].other.tolist(), held.value["on"]) == (1, [1.0, 1.0], [[]])


class Held:
    """Any value, as the state of an object."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


RANDOM = [
    *(pytest.param(kind, id=f"Generator of {kind.__name__}") for kind in (np.random.PCG64, np.random.MT19937)),
    *(np.random.Philox, np.random.SFC64, np.random.RandomState, random.Random),
    pytest.param(lambda seed: torch.Generator().manual_seed(seed), id="torch.Generator"),
    *(pytest.param(lambda seed, every=every: every, id=every.__name__) for every in (random, np.random)),
]


def drawn(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(3, generator=generator).tolist()
    return [float(generator.random()) for _ in range(3)]


def through_a_checkpoint(registered):
    """What a checkpoint, or a newcomer, is given of it; as it comes back from there."""
    plain, tensors = registered.collected()
    assert all(tensor.dtype in DTYPES for tensor in tensors.values())
    return from_json(json.loads(json.dumps(to_json(plain)))), {name: x.clone() for name, x in tensors.items()}


@pytest.mark.parametrize("kind", RANDOM)
def test_a_registered_generator_goes_on_where_it_was_saved(kind):
    made = kind(7)
    generator = np.random.Generator(made) if isinstance(made, np.random.BitGenerator) else made
    registered = Registered(OneBitAdam(net().parameters()))
    registered.add("rng", generator)
    registered.refuse_unwritable()
    drawn(generator)
    kept = through_a_checkpoint(registered)
    after = drawn(generator)
    registered.load(*kept)
    assert drawn(generator) == after


LAYOUTS = {
    "by_place": lambda x: x.to_sparse(),
    "twice": lambda x: torch.sparse_coo_tensor([[0, 0], [1, 1]], x[0, :2].clone(), x.shape, check_invariants=False),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "empty": lambda x: (x * 0).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_tensor_is_given_taken_back_and_saved(tmp_path, layout):
    x = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 3.0, 0.0, 4.0]])

    def work(group):
        model = torch.nn.Linear(1, 1)
        registered = Registered(Adam(model.parameters(), group=group))
        held = LAYOUTS[layout](x * (1 + group.rank))
        mine = {"graph": held}
        registered.add("mine", mine)
        registered.refuse_unwritable()
        given = registered.give(group, (0, 1), torch.device("cpu"))
        if given is not None:
            registered.load(*given)
        before = mine["graph"].clone()
        for moved_before_step in (False, True, True):  # the first step learns
            registered.remember()
            if moved_before_step:
                mine["graph"] *= 2.0
            registered.before_step()
        registered.keep()
        mine["graph"] *= 3.0
        registered.put_back()
        return before, mine["graph"], held if layout in ("by_place", "twice", "empty") else mine["graph"]

    for before, graph, held in run_threads(2, work):
        assert graph.layout == before.layout
        assert torch.equal(before.to_dense(), LAYOUTS[layout](x).to_dense())
        assert torch.equal(graph.to_dense(), 2.0 * before.to_dense())
        assert held is graph  # what the script holds by another name is still it
        if layout in ("by_place", "twice", "empty"):
            assert before.is_coalesced() == (layout != "twice")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_an_expanded_tensor_comes_back_and_as_a_buffer_is_refused_at_the_start():
    optimizer, model = Adam([torch.nn.Parameter(torch.ones(1))]), net()
    state = {"rows": torch.ones(1).expand(5)}
    registered = Registered(optimizer)
    registered.add("state", state)
    registered.remember()
    state["rows"] = torch.zeros(1).expand(5)
    registered.put_back()
    assert state["rows"].tolist() == [1.0] * 5
    model.register_buffer("rows", torch.ones(1).expand(5))
    registered.add("model", model)
    with pytest.raises(ValueError, match=r"rows of a module is an expanded tensor.* clone\(\)"):
        registered.refuse_unwritable()


def test_a_tensor_that_no_checkpoint_holds_is_named():
    model = torch.nn.Linear(1, 1)
    registered = Registered(Adam(model.parameters()))
    registered.add("mine", {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)})
    with pytest.raises(TypeError, match=r"mine\.q is a tensor quantized, which no checkpoint holds"):
        registered.refuse_unwritable()


REAL = ["bool", "uint8", "int8", "uint16", "uint32", "uint64", "int64", "float16", "float64"]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(dtype, shape) for dtype in (*REAL, "complex64", "complex128") for shape in ((5,), (2, 3))]
    + [(dtype, ()) for dtype in REAL],
)
def test_arrays_and_tensors_of_any_type_come_back_as_they_were(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    held = Held({"array": array, "tensor": torch.from_numpy(np.array(array)), 3: [array, (1, None, "x")]})
    registered = Registered(OneBitAdam(net().parameters()))
    registered.add("held", held)
    kept, before = through_a_checkpoint(registered), held.value
    held.value = None
    registered.load(*kept)
    assert held.value["tensor"].dtype == before["tensor"].dtype
    assert torch.equal(held.value["tensor"], before["tensor"])
    assert held.value[3][1] == (1, None, "x")
    for back in (held.value["array"], held.value[3][0]):
        assert np.array_equal(back, array)
        assert shape == () or back.dtype == array.dtype


@pytest.mark.parametrize("value", [{1, 2}, np.array(["a"]), np.datetime64("2026-01-01"), object()])
def test_what_no_checkpoint_can_hold_is_refused_when_it_is_registered(value):
    registered = Registered(OneBitAdam(net().parameters()))
    registered.add("held", Held(value))
    with pytest.raises((TypeError, ValueError), match=r"held"):
        registered.refuse_unwritable()


def test_a_run_takes_so_many_names_and_says_once_which_it_leaves_out(tmp_path, caplog):
    """Ranks report different names; what they take is the same, and a later name finds no place."""

    def work(group):
        reporter = Recording()
        place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), reporter, None, group)
        with placed(place), session() as run:
            model = torch.nn.Linear(1, 1)
            run.register(model=model, optimizer=Adam(model.parameters(), lr=0.0, group=run.group))
            for step, x in enumerate(run.batches([torch.ones(1)] * 2, global_batch=2, steps=12)):
                run.step(model(x).mean())
                mine = (
                    {f"n{run.rank}{number:02}": float(number) for number in range(20)} if step > 4 else {"z": math.nan}
                )
                run.report(**mine, **{"a\nb": 1.0, "\ud800": 1.0, "x" * 65: 1.0})
        return [sample.reported for sample in reporter.samples[1:]]

    first, second = run_threads(2, work)
    assert first == second
    assert first[0] == {"z": "nan"}
    kept = {name for one in first for name in one}
    assert len(kept) == MOST_REPORTED
    assert {"z", "n000", "n019", "n100"} <= kept  # who is first stays, and then by name
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("reported_left_out")]
    assert len(told) == 2 * (3 + 41 - MOST_REPORTED)  # each rank says it once
    assert sum("'n119' reason='a run has at most 32 names'" in one for one in told) == 2
