"""What cannot be sent in backward is sent in step(), and stats() say why."""

import copy
import logging

import pytest
import torch

from tests.covering import every_value
from tests.optim.engine.test_overlap import NETS, WARMUP, backward, everything, make, train
from tests.optim.reference.written_out import bits
from thinwire.comm import run_threads

CLIPPED = "max_grad_norm waits for a first norm: at first, and after a save or a change of ranks"
SCALED = "a GradScaler's gradients are divided by their scale in step()"


@every_value({"name": ["adam", "onebit_adam", "onebit_lamb", "zero_one_adam"]}, only=(1, 3))
def test_max_grad_norm_waits_in_the_first_step_in_which_a_rank_shortens_its_own(name, caplog):
    caplog.set_level(logging.INFO, "thinwire.optim.engine.overlap")

    def work(group):
        net = copy.deepcopy(NETS[0])
        more = {"local_step_clipper": 1} if name == "zero_one_adam" else {}
        told = train(net, make(name, net, group, overlap=True, max_grad_norm=0.05, **more), WARMUP + 3, group.rank)
        return told[1], told[WARMUP], told[-1]

    for in_warmup, first, last in run_threads(2, work):
        assert in_warmup["waits_for"] is None
        assert in_warmup["in_backward"]
        assert last == in_warmup
        if name != "adam":
            assert first["waits_for"] == CLIPPED
            assert first["in_backward"] == 0
            assert first["in_step"] == first["buckets"]
    lines = [record.getMessage() for record in caplog.records if CLIPPED in record.getMessage()]
    expected = [] if name == "adam" else [f"not_overlapped reason={CLIPPED}"] * 2
    assert lines == expected  # once a rank, not at every step


def test_one_rank_sends_nothing():
    net = copy.deepcopy(NETS[0])
    for told in train(net, make("onebit_adam", net, None, overlap=True), WARMUP + 2, 0):
        assert told["in_backward"] == 0
        assert told["waits_for"] == "one rank sends nothing"


def scaled_step(net, optimizer, scaler, step, rank, parts=1):
    optimizer.zero_grad()
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = (net(x, extra=False) - torch.sin(x[:, :3] * 2)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("name", ["adam", "onebit_adam"])
def test_under_a_grad_scaler_all_is_sent_in_step(name):
    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        plain, ours = (make(name, net, group, overlap=on) for net, on in zip(nets, (False, True), strict=True))
        for net, optimizer in zip(nets, (plain, ours), strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            for step in range(1, WARMUP + 4):
                scaled_step(net, optimizer, scaler, step, group.rank)
        return torch.equal(everything(plain), everything(ours)), ours.stats()["overlapped"]

    for equal, told in run_threads(2, work):
        assert equal
        assert told["in_backward"] == 0
        assert told["waits_for"] == SCALED


def test_a_grad_scaler_that_comes_later_costs_one_step():
    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make("onebit_adam", net, group, overlap=True)
        train(net, optimizer, WARMUP + 3, group.rank)
        before = optimizer.num_steps, optimizer.space.p_N.clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with pytest.raises(RuntimeError, match="for the first time after gradients have been sent"):
            scaled_step(net, optimizer, scaler, 50, group.rank)
        assert (optimizer.num_steps, True) == (before[0], torch.equal(optimizer.space.p_N, before[1]))
        scaler.update()
        for step in range(3):
            scaled_step(net, optimizer, scaler, step, group.rank)
        assert optimizer.num_steps == before[0] + 3
        assert optimizer.stats()["overlapped"]["waits_for"] == SCALED
        train(net, optimizer, 2, group.rank)  # the first of them learns that the scaler has gone
        return bits(optimizer.space.p_N, optimizer.vectors.m_N), optimizer.stats()["overlapped"]

    (first, told), (second, _) = run_threads(2, work)
    assert torch.equal(first, second)
    assert told["in_backward"]


def test_micro_steps_inside_no_sync_alone_are_sent_in_step():
    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make("onebit_adam", net, group, overlap=True)
        train(net, optimizer, WARMUP + 2, group.rank)
        optimizer.zero_grad()
        with optimizer.no_sync(), optimizer.no_sync():
            backward(net, 1, group.rank)
        assert not optimizer.overlap.is_open
        optimizer.step()
        return optimizer.stats()["overlapped"]

    for told in run_threads(2, work):
        assert told["in_backward"] == 0
        assert told["in_step"] == told["buckets"]
