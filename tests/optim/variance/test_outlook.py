"""When compression can begin is said at construction, and where a run ends before."""

import gc
import logging
import sys
from dataclasses import asdict

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import Adam, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.variance.when_to_freeze import VarianceStability


def network():
    return seeded(0, lambda: torch.nn.Linear(6, 3))


def train(net, optimizer, rank, steps):
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        (net(x) - torch.sin(x[:, :3])).square().mean().backward()
        optimizer.step()


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
        run_threads(2, lambda group, given=given: construct(ZeroOneAdam, network().parameters(), group=group, **given))
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
        train(net, construct(made, net.parameters(), group=group, **more), group.rank, steps)

    caplog.clear()
    run_threads(size, work)
    gc.collect()
    return lines(caplog, "never_compressed")


@pytest.mark.slow
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
    monkeypatch.setattr(sys, "last_value", RuntimeError("the loop raised"), raising=False)
    assert not run(caplog, OneBitAdam, 25)
