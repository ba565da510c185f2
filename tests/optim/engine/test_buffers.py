"""Buffers of `model=` are rank 0's on every rank, as DDP has them, whatever happens to them; constants cost nothing."""

import copy
import threading
from itertools import pairwise

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.written_out import CLASSES, bits
from tests.optim.seeded import seeded
from thinwire.comm import PeerLost, WireMismatch, run_threads
from thinwire.comm.groups.faults import Fault, FaultyGroup, What
from thinwire.optim import Adam, OneBitAdam

HEADER = 16
MASK = 4096


class Net(torch.nn.Module):
    """BatchNorm, and constants: a mask, which is not saved, a complex and an empty one."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = (
            torch.nn.Linear(6, 8, bias=False),
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 3),
        )
        self.register_buffer("mask", torch.ones(MASK, dtype=torch.bool), persistent=False)
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def inputs(step, rank):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(net, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        net(inputs(step, rank)).square().mean().backward()
        optimizer.step()


def made(name, net, group, **more):
    more |= {} if name in ("adam", "lamb", "sgd") else {"block": 64}
    more |= {"warmup": 3} if name in ("onebit_adam", "onebit_lamb") else {}
    more |= {"var_freeze_step": 3, "local_step_scaler": 2} if name == "zero_one_adam" else {}
    return construct(CLASSES[name], net.parameters(), lr=1e-2, group=group, model=net, **more)


@pytest.mark.few(3)
@every_value({"overlap": [False, True], "name": CLASSES})
def test_buffers_are_those_of_rank_0_wherever_ranks_hold_the_same_parameters(name, overlap):
    def work(group):
        net = seeded(group.rank, Net)  # other values on each rank at first
        optimizer = made(name, net, group, overlap=overlap)
        net.turns += group.rank * 1j
        seen = [bits(net.norm.running_mean, net.norm.num_batches_tracked)]
        for step in range(1, 11):
            train(net, optimizer, group.rank, [step])
            if optimizer.at_sync:
                seen.append(bits(*net.buffers()))
        optimizer.prepare_to_save()
        return [*seen, bits(*net.buffers())], optimizer.stats()["buffer_bytes"], int(net.norm.num_batches_tracked)

    first, *others = run_threads(3, work)
    assert len(first[0]) > 6
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True))
        assert other[1:] == first[1:] == (first[1], 10)


def test_rank_0_has_the_running_statistics_that_it_would_have_alone():
    def work(group):
        net = seeded(0, Net)
        alone = copy.deepcopy(net)
        optimizer = made("adam", net, group)
        for step in range(1, 6):
            alone.load_state_dict({k: v for k, v in net.state_dict().items() if "norm.r" not in k}, strict=False)
            alone(inputs(step, 0))
            train(net, optimizer, group.rank, [step])
        return [torch.equal(a, b) for a, b in zip(net.norm.buffers(), alone.norm.buffers(), strict=True)]

    assert run_threads(2, work) == [[True] * 3] * 2


def test_only_what_changes_is_sent_in_one_broadcast_a_step():
    def work(group):
        net = seeded(0, Net)
        optimizer = made("adam", net, group)
        sent = [group.stats.bytes_by_kind["broadcast"]]
        calls = []
        for step in range(1, 5):
            before = sum(n for (kind, *_), n in group.stats.calls.items() if kind == "broadcast")
            train(net, optimizer, group.rank, [step])
            sent.append(group.stats.bytes_by_kind["broadcast"])
            calls.append(sum(n for (kind, *_), n in group.stats.calls.items() if kind == "broadcast") - before)
        return [b - a for a, b in pairwise(sent)], calls, optimizer.stats()["buffer_bytes"]

    (given, calls, told), (none, *_) = run_threads(2, work)
    flags, statistics, constants = 5, 2 * 8 * 4 + 8, MASK + 3 * 8
    assert given == [HEADER + flags + statistics] * 4
    assert calls == [2, 1, 1, 1]
    assert none == [0] * 4
    assert told == HEADER + flags + statistics + constants + sum(given)


def test_a_buffer_that_ddp_would_leave_alone_stays_a_ranks_own():
    def work(group):
        net = seeded(0, Net)
        net.register_buffer("mine", torch.full((2 + group.rank,), float(group.rank)))
        net._ddp_params_and_buffers_to_ignore = ["mine"]
        train(net, made("adam", net, group), group.rank, [1, 2])
        return net.mine.tolist()

    assert run_threads(2, work) == [[0.0] * 2, [1.0] * 3]


def test_a_model_without_buffers_costs_no_byte_and_one_rank_none():
    def work(group):
        net = seeded(0, lambda: torch.nn.Linear(6, 3))
        counted = []
        for given in (None, net):
            before = group.stats.sent_bytes
            optimizer = Adam(net.named_parameters(), group=group, model=given)
            train(net, optimizer, group.rank, [1, 2])
            counted.append(group.stats.sent_bytes - before)
        return counted[0] == counted[1]

    assert run_threads(2, work) == [True, True]
    assert Adam((net := Net()).parameters(), model=net).stats()["buffer_bytes"] == 0


def test_buffers_may_come_go_and_grow_later_on_all_ranks():
    def work(group):
        net = seeded(0, lambda: torch.nn.Linear(6, 3))
        optimizer = made("onebit_adam", net, group)
        ends = []
        for step in range(1, 9):
            if step in (2, 3):
                net.register_buffer("cache", torch.full((5 * step,), float(group.rank)))
            if step == 5:
                net.register_buffer("more", torch.full((2,), group.rank, dtype=torch.int16))
            if step == 7:
                del net.cache, net.more
            if step == 8:
                net.register_buffer("again", torch.full((3, 2), float(group.rank)).t())
            if step == 6:
                net.cache.fill_(7.0 if group.rank else 0.0)
            train(net, optimizer, group.rank, [step])
            ends.append([b.clone() for b in net.buffers()])
        return ends

    for ends in run_threads(2, work):
        assert [len(end) for end in ends] == [0, 1, 1, 1, 2, 2, 0, 1]
        assert not any(bool(b.any()) for end in ends for b in end)


def test_a_rank_whose_buffers_are_others_says_so_and_changes_nothing():
    def work(group):
        net = seeded(0, Net)
        optimizer = made("adam", net, group)
        train(net, optimizer, group.rank, [1])
        if group.rank == 1:
            net.register_buffer("cache", torch.ones(4))
        before = bits(optimizer.space.p_N, net.norm.running_mean)
        net(inputs(2, group.rank)).sum().backward()
        before = bits(optimizer.space.p_N, net.norm.running_mean)
        if group.rank == 1:
            with pytest.raises(ValueError, match=r"buffer cache: torch.float32 \(4,\) is new.*on every rank alike"):
                optimizer.step()
            group.leave("it has another buffer")
        else:
            with pytest.raises(PeerLost, match="it has another buffer"):
                optimizer.step()
        assert optimizer.num_steps == 1
        assert torch.equal(before, bits(optimizer.space.p_N, net.norm.running_mean))

    run_threads(2, work)


@pytest.mark.parametrize("given", [{1: None}, {1: "smaller"}])
def test_ranks_that_differ_in_model_or_buffers_raise_alike_at_construction(given):
    def work(group):
        net = seeded(0, Net)
        if given.get(group.rank) == "smaller":
            net.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        model = None if group.rank in given and given[group.rank] is None else net
        with pytest.raises(WireMismatch, match=r"model= was given|buffer mask: torch.bool \(4096,\)"):
            Adam(net.parameters(), group=group, model=model)

    run_threads(2, work)


@pytest.mark.parametrize("name", ["adam", "onebit_adam", "zero_one_adam"])
def test_a_peer_lost_while_buffers_cross_leaves_the_step_undone(name):
    all_are_here = threading.Barrier(3)

    def work(group):
        net, faulty = seeded(0, Net), FaultyGroup(group)
        optimizer = made(name, net, faulty)
        train(net, optimizer, group.rank, [1, 2, 3, 4])
        optimizer.zero_grad()
        net(inputs(5, group.rank)).square().mean().backward()
        before = bits(optimizer.space.p_N, optimizer.vectors.m_N, net.norm.running_mean)
        faulty.arm(Fault(ranks=(1,), collective="broadcast"))
        all_are_here.wait()  # and in no collective of the step before
        with pytest.raises(PeerLost):
            optimizer.step()
        assert optimizer.num_steps == 4
        assert torch.equal(before, bits(optimizer.space.p_N, optimizer.vectors.m_N, net.norm.running_mean))

    run_threads(3, work)


@pytest.mark.parametrize("name", ["adam", "onebit_adam"])
def test_with_overlap_a_peer_lost_there_leaves_a_step_that_all_ranks_have_and_the_next_raises(name):
    all_are_here = threading.Barrier(3)

    def work(group):
        net, faulty = seeded(0, Net), FaultyGroup(group)
        optimizer = made(name, net, faulty, overlap=True)
        train(net, optimizer, group.rank, [1, 2, 3, 4])
        optimizer.zero_grad()
        net(inputs(5, group.rank)).square().mean().backward()
        assert optimizer.overlap.exchange is not None
        faulty.arm(Fault(ranks=(1,), collective="broadcast"))
        all_are_here.wait()
        optimizer.step()
        at_5 = bits(optimizer.space.p_N, optimizer.vectors.m_N)
        all_are_here.wait()
        with pytest.raises(PeerLost):
            train(net, optimizer, group.rank, [6])
        assert optimizer.num_steps == 5
        assert torch.equal(at_5, bits(optimizer.space.p_N, optimizer.vectors.m_N))
        return at_5

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


@every_value({"ranks": [2, 3]})
def test_with_overlap_a_rank_that_has_lost_a_peer_in_the_exchange_sends_no_buffers_after_it(ranks):
    """The others are in the exchange yet, and would be told that they are in different calls."""
    all_are_here = threading.Barrier(ranks)

    def work(group):
        net, faulty = seeded(0, Net), FaultyGroup(group)
        optimizer = made("onebit_adam", net, faulty, overlap=True)
        train(net, optimizer, group.rank, [1, 2, 3, 4])
        before = bits(optimizer.space.p_N)
        all_are_here.wait()
        faulty.arm(Fault(ranks=(1,), collective="all_to_all", what=What.ALONE))
        with pytest.raises(PeerLost):
            train(net, optimizer, group.rank, [5])
        group.leave("lost a peer")
        assert torch.equal(before, bits(optimizer.space.p_N))

    run_threads(ranks, work)


def test_a_layer_that_one_rank_does_not_use_keeps_the_order_of_what_is_sent():
    class Sometimes(Net):
        def forward(self, x, skip=False):
            return self.norm(x) if skip else super().forward(x)

    def work(group):
        net = seeded(0, Sometimes)
        net.norm = torch.nn.BatchNorm1d(8)
        net.first = torch.nn.Linear(8, 8)
        optimizer = construct(
            OneBitAdam, net.parameters(), group=group, model=net, warmup=2, overlap=True, bucket_elements=32
        )
        for step in range(1, 7):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            net(x, skip=step % 2 == group.rank).square().mean().backward()
            optimizer.step()
        return bits(*net.buffers(), optimizer.space.p_N)

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


def test_what_cannot_be_sent_or_written_is_refused_by_name():
    def work(group):
        net = seeded(0, Net)
        net.register_buffer("where", torch.ones(3).to_sparse())
        with pytest.raises(ValueError, match=r"buffer where: is torch.sparse_coo"):
            Adam(net.parameters(), group=group, model=net)
        net = seeded(0, Net)
        optimizer = Adam(net.parameters(), group=group, model=net)
        net.register_buffer("wide", torch.full((1,), float(group.rank)).expand(3))
        net(inputs(1, group.rank)).sum().backward()
        if group.rank:
            with pytest.raises(ValueError, match=r"buffer wide: differs from rank 0's and cannot be written.*clone"):
                optimizer.step()
            group.leave()
        else:
            with pytest.raises(PeerLost):
                optimizer.step()

    run_threads(2, work)


def test_model_must_be_the_module_that_is_trained():
    net = Net()
    with pytest.raises(ValueError, match=r"model = generator: must be the torch.nn.Module that is trained"):
        Adam(net.parameters(), model=net.parameters())
    with pytest.raises(ValueError, match=r"model = Net has none of the parameters"):
        Adam(net.parameters(), model=copy.deepcopy(net))


AGAINST_DDP = """
import copy
from tests.optim.engine.test_buffers import Net, inputs, seeded
from thinwire.optim import Adam, OneBitAdam
join()
ours, theirs = seeded(rank, Net), seeded(rank, Net)
theirs = torch.nn.parallel.DistributedDataParallel(theirs)
optimizers = [Adam(ours.parameters(), lr=1e-2, model=ours, overlap=True)]
optimizers += [torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0)]
for step in range(1, 7):
    for net, optimizer in zip((ours, theirs), optimizers):
        optimizer.zero_grad()
        net(inputs(step, rank)).square().mean().backward()
        optimizer.step()
if rank == 0:
    theirs.eval(), ours.eval()
    with torch.no_grad():  # alone: nobody waits for anybody
        ours(inputs(0, 0))
    for a, b in zip(ours.norm.buffers(), theirs.module.norm.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
compressed = seeded(0, Net)
optimizer = OneBitAdam.sized(16)(compressed.parameters(), lr=1e-2, model=compressed, overlap=True, warmup=2)
for step in range(1, 9):
    optimizer.zero_grad()
    compressed(inputs(step, rank)).square().mean().backward()
    optimizer.step()
assert optimizer.frozen_at == 2 and optimizer.stats()["overlapped"]["in_backward"] > 2
say("buffers", [b.tolist() for net in (ours, compressed) for b in (*net.norm.buffers(), *net.parameters())])
dist.destroy_process_group()
"""


def test_over_gloo_buffers_are_what_ddp_makes_them(tmp_path):
    ranks = start(AGAINST_DDP, 2, tmp_path, timeout_s=60)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert said(tmp_path, 0, "buffers") == said(tmp_path, 1, "buffers")
