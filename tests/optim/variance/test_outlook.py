"""When compression can begin is said at construction, and where a run ends before; a scheduler tells its length."""

import functools
import gc
import logging
import sys
from dataclasses import asdict

import pytest
import torch
from torch.optim import lr_scheduler

from tests.covering import every_value
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import Adam, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.variance.when_to_freeze import VarianceStability


def network():
    return seeded(0, lambda: torch.nn.Linear(6, 3))


def train(net, optimizer, rank, steps, schedule=None):
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        (net(x) - torch.sin(x[:, :3])).square().mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def ends_at(rule, total):
    """The step at which the rule ends a warm-up under a constant norm and rate."""
    return next((step for step in range(rule.start + 1, total) if rule.observe(step, 1.0, [0.1])), None)


@every_value(
    {
        "start": [0, 37],
        "lr_warmup": [None, 5, 90],
        "total": [None, 1, 30, 300, 5000],
        "beta2": [0.9, 0.99, 0.999],
        "part": [0.2, 0.4, 0.6],
    }
)
def test_the_earliest_end_that_is_told_is_the_one_of_a_variance_that_does_not_move(
    beta2, total, lr_warmup, start, part
):
    rule = VarianceStability(beta2, total and total + start, lr_warmup, start=start, part=part)
    assert rule.earliest_end == ends_at(VarianceStability(**asdict(rule)), 7000)


def lines(caplog, event):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(event)]


def test_0_1_adam_says_when_its_dense_start_ends(caplog):
    caplog.set_level(logging.INFO)
    full = {"total_steps": 300, "full_exchange": "fp32"}
    for given in ({}, {"total_steps": 300}, full, {"dense_steps": 0}, {"var_freeze_step": 7}, {"lr_warmup_steps": 50}):
        run_threads(2, lambda group, given=given: ZeroOneAdam(network().parameters(), group=group, **given))
    run_threads(1, lambda group: ZeroOneAdam(network().parameters(), group=group))
    assert lines(caplog, "compression_begins") == [
        "compression_begins earliest_step=1001 latest_step=1001 dense_steps=1000 total_steps=None",
        "compression_begins earliest_step=181 latest_step=181 dense_steps=180 total_steps=300",
        "compression_begins earliest_step=61 latest_step=61 dense_steps=60 total_steps=300",
        "compression_begins earliest_step=1 latest_step=1 dense_steps=0 total_steps=None",
        "compression_begins earliest_step=8 latest_step=1001 dense_steps=1000 total_steps=None",
        "compression_begins earliest_step=1001 latest_step=1001 dense_steps=1000 total_steps=None",
    ]


@pytest.mark.parametrize(("made", "of_300"), [(OneBitAdam, 181), (OneBitLamb, 211)])
def test_at_construction_rank_0_says_when_compression_can_begin(made, of_300, caplog):
    caplog.set_level(logging.INFO)
    run_threads(2, lambda group: made(network().parameters(), group=group))
    run_threads(2, lambda group: made(network().parameters(), group=group, total_steps=300))
    run_threads(2, lambda group: made(network().parameters(), group=group, total_steps=300, full_exchange="fp32"))
    run_threads(2, lambda group: made(network().parameters(), group=group, warmup=7))
    run_threads(1, lambda group: made(network().parameters(), group=group))
    assert lines(caplog, "compression_begins") == [
        "compression_begins earliest_step=1006 latest_step=None warmup=auto total_steps=None",
        f"compression_begins earliest_step={of_300} latest_step={of_300} warmup=auto total_steps=300",
        "compression_begins earliest_step=61 latest_step=61 warmup=auto total_steps=300",
        "compression_begins earliest_step=8 latest_step=8 warmup=7 total_steps=None",
    ]


def run(caplog, made, steps, size=2, **more):
    def work(group):
        net = network()
        train(net, made(net.parameters(), group=group, **more), group.rank, steps)

    caplog.clear()
    run_threads(size, work)
    gc.collect()
    return lines(caplog, "never_compressed")


def test_a_run_that_ends_before_compression_says_so_once(caplog, monkeypatch):
    (line,) = run(caplog, OneBitAdam, 25)
    assert line.startswith("never_compressed steps=25 begins=1006: ")
    assert "total_steps" in line
    assert len(run(caplog, OneBitLamb, 25, warmup=30)) == 1
    assert not run(caplog, OneBitAdam, 25, warmup=24)
    assert not run(caplog, OneBitAdam, 4)  # a trial
    assert not run(caplog, OneBitAdam, 25, total_steps=1000)  # cut short, and would have compressed
    assert not run(caplog, OneBitAdam, 25, size=1)
    assert not run(caplog, Adam, 25)
    (line,) = run(caplog, ZeroOneAdam, 25)
    assert line.startswith("never_compressed steps=25 begins=1001: ")
    assert "dense_steps" in line
    assert not run(caplog, ZeroOneAdam, 25, dense_steps=24)
    assert not run(caplog, ZeroOneAdam, 25, parity="deepspeed")
    monkeypatch.setattr(sys, "last_value", RuntimeError("the loop raised"), raising=False)
    assert not run(caplog, OneBitAdam, 25)


def linear(step, *, num_warmup_steps, num_training_steps):
    return max(0.0, 1 - step / num_training_steps)


def of_transformers(optimizer):
    return lr_scheduler.LambdaLR(optimizer, functools.partial(linear, num_warmup_steps=2, num_training_steps=60))


SCHEDULES = {
    "one cycle": (lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=60, cycle_momentum=False), 60),
    "polynomial": (lambda o: lr_scheduler.PolynomialLR(o, total_iters=60), 60),
    "linear to 0": (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=60), 60),
    "transformers": (of_transformers, 60),
    "linear warm-up": (lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=60), None),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 60), None),
    "any rule": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), None),
    "none": (lambda o: None, None),
}


@every_value({"overlap": [False, True], "name": SCHEDULES}, only=(1, 4, 6))
def test_a_scheduler_that_knows_the_length_of_the_run_tells_it(name, overlap, caplog):
    make, length = SCHEDULES[name]
    caplog.set_level(logging.INFO)

    def work(group):
        net = network()
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, group=group, overlap=overlap, full_exchange="fp32")
        train(net, optimizer, group.rank, 40, make(optimizer))
        return optimizer.total_steps, optimizer.frozen_at

    (first, *others) = run_threads(3, work)
    assert all(other == first for other in others)
    assert first[0] == length
    assert (first[1] is None) == (length is None)
    told = lines(caplog, "compression_begins")
    assert told[1:] == (
        [f"compression_begins earliest_step=13 latest_step=13 warmup=auto total_steps={length}"] * bool(length)
    )


def test_what_was_given_is_not_changed_and_a_scheduler_stepped_by_epochs_tells_nothing(caplog):
    def work(group):
        found = []
        for given, each in ((200, 1), (None, 30), (None, 1)):
            net = network()
            optimizer = OneBitAdam(net.parameters(), lr=1e-2, group=group, total_steps=given)
            schedule = lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=60, cycle_momentum=False)
            for _ in range(2):
                train(net, optimizer, group.rank, 3, schedule if each == 1 else None)
                if each > 1:
                    schedule.step()
            found.append(optimizer.total_steps)
        return found

    assert run_threads(2, work) == [[200, None, 60]] * 2


def test_ranks_whose_schedulers_differ_learn_nothing():
    def work(group):
        net = network()
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, group=group)
        schedule = lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=60 + group.rank, cycle_momentum=False)
        train(net, optimizer, group.rank, 4, schedule)
        return optimizer.total_steps

    assert run_threads(2, work) == [None, None]


def test_a_scheduler_that_is_stepped_once_for_each_rank_counts_so():
    def work(group):
        net = network()
        optimizer = OneBitAdam(net.parameters(), lr=1e-2, group=group)
        schedule = lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=120, cycle_momentum=False)
        for _ in range(4):
            train(net, optimizer, group.rank, 1, schedule)
            schedule.step()  # as accelerate does on two ranks
        return optimizer.total_steps

    assert run_threads(2, work) == [60, 60]


def test_what_was_learnt_is_saved_and_a_resumed_run_ends_its_warm_up_at_the_same_step():
    def work(group):
        ends = []
        for stop in (None, 2, 9):
            net = network()
            optimizer = OneBitAdam(net.parameters(), lr=1e-2, group=group, full_exchange="fp32")
            schedule = lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=60, cycle_momentum=False)
            train(net, optimizer, group.rank, stop or 20, schedule)
            if stop is not None:
                state = net.state_dict(), optimizer.state_dict(), schedule.state_dict()
                optimizer = OneBitAdam(net.parameters(), lr=1e-2, group=group, full_exchange="fp32")
                schedule = lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=60, cycle_momentum=False)
                for part, saved in zip((net, optimizer, schedule), state, strict=True):
                    part.load_state_dict(saved)
                train(net, optimizer, group.rank, 20 - stop, schedule)
            ends.append((optimizer.frozen_at, optimizer.stability.total_steps))
        return ends

    assert run_threads(2, work) == [[(12, 60)] * 3] * 2
