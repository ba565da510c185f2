"""1-bit Adam's compressed step from received rows: the same numbers, and float m only when somebody asks for it."""

import copy
import threading

import pytest
import torch

from tests.comm.exchange.plain import plain
from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.engine.test_overlap import NETS, WARMUP, backward, groups_of, make, train
from tests.optim.reference.written_out import bits
from thinwire.comm import run_threads
from thinwire.comm.groups.blocking import Blocking
from thinwire.comm.protocol import Stats
from thinwire.optim import OneBitAdam, OneBitLamb
from thinwire.optim.engine.exchanges import fused_momentum
from thinwire.optim.engine.replicas import Replicas
from thinwire.optim.engine.schedule import Wire
from thinwire.optim.variance import freezing

HYPER = {"betas": (0.8, 0.95), "block": 64}


class WholeVector(OneBitAdam):
    """The same optimizer on the exchange that keeps errors and float m."""

    def make_reducer(self, group):
        return plain(group, self.space.layout, self.codec, self.space.p_N)


@every_value({"size": [2, 3]}, only=(1,))
def test_it_gives_the_numbers_of_the_exchange_of_whole_vectors(size):
    """One group and one bucket: chunks and blocks are the same then."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]).double() for _ in range(2)]
        kinds = (WholeVector, OneBitAdam)
        whole, fused = (
            construct(kind, net.parameters(), lr=1e-2, weight_decay=0.1, warmup=WARMUP, group=group, **HYPER)
            for kind, net in zip(kinds, nets, strict=True)
        )
        for step in range(1, 25):
            for net, optimizer in zip(nets, (whole, fused), strict=True):
                train(net, optimizer, 1, group.rank)
            torch.testing.assert_close(fused.space.p_N, whole.space.p_N, rtol=0, atol=1e-12)
            if step % 5 == 0:
                torch.testing.assert_close(fused.vectors.m_N, whole.vectors.m_N, rtol=0, atol=1e-12)
        return bits(fused.space.p_N)

    first, *others = run_threads(size, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_float_momentum_is_written_when_somebody_asks(name):
    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make(name, net, group)
        train(net, optimizer, WARMUP, group.rank)
        buffer_N = optimizer.vectors.m_N
        state = optimizer.state[net.last.weight]
        at_freeze = buffer_N.clone()
        train(net, optimizer, 3, group.rank)
        assert torch.equal(buffer_N, at_freeze)
        shown = state["exp_avg"]
        assert not torch.equal(buffer_N, at_freeze)
        place = next(t for t in optimizer.space.tensors if t.param is net.last.weight)
        assert shown.data_ptr() == buffer_N[place.start :].data_ptr()
        assert torch.equal(shown.flatten(), optimizer.vectors.m_N[place.start : place.stop])
        scales = shown.abs().unique()
        assert len(scales) <= 4  # a scale a block and chunk: it is what the rows say
        for ask in (lambda: state.get("exp_avg"), lambda: dict(state.items()), lambda: list(state.values())):
            train(net, optimizer, 1, group.rank)
            before = buffer_N.clone()
            ask()
            assert not torch.equal(buffer_N, before)
        copied = copy.deepcopy(state)
        assert type(copied) is dict
        assert torch.equal(copied["exp_avg"], state["exp_avg"])

    run_threads(2, work)


@pytest.mark.few(1)
@every_value({"overlap": [False, True], "name": ["onebit_adam", "onebit_lamb"]})
def test_to_look_at_the_momentum_changes_no_bit(name, overlap):
    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        ours, seen = (make(name, net, group, overlap=overlap) for net in nets)
        for _ in range(10):
            train(nets[0], ours, 1, group.rank)
            train(nets[1], seen, 1, group.rank)
            seen.vectors.m_N.sum()
            assert torch.equal(ours.space.p_N, seen.space.p_N)

    run_threads(2, work)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_the_first_compressed_step_and_the_one_after_a_save_or_load_begin_from_floats(name, monkeypatch):
    begun = threading.local()

    def watched(reduce, memory, g_N, beta1_K, m_N, factor_T):
        begun.from_floats = m_N is not None
        return fused_momentum(reduce, memory, g_N, beta1_K, m_N, factor_T)

    monkeypatch.setattr(freezing, "fused_momentum", watched)

    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make(name, net, group)

        def kind():
            plan = optimizer.plan(optimizer.num_steps + 1)
            assert plan.momentum is Wire.COMPRESSED
            optimizer.begin_exchange(plan).abandon()
            return begun.from_floats

        train(net, optimizer, WARMUP, group.rank)
        kinds = [kind()]
        train(net, optimizer, 1, group.rank)
        kinds.append(kind())
        state = optimizer.state_dict()
        kinds.append(kind())
        train(net, optimizer, 1, group.rank)
        kinds.append(kind())
        optimizer.load_state_dict(state)
        return [*kinds, kind()]

    for kinds in run_threads(2, work):
        assert kinds == [True, False, True, False, True]


def test_the_divisor_follows_eps_and_a_loaded_variance():
    def work(group):
        net = copy.deepcopy(NETS[0]).double()
        optimizer = construct(OneBitAdam, groups_of(net), warmup=WARMUP, group=group, **HYPER)
        space, dead = optimizer.space, optimizer.space.layout.dead(0, optimizer.space.layout.numel)
        train(net, optimizer, WARMUP + 2, group.rank)
        state = optimizer.state_dict()

        def check():
            p, v = space.p_N.clone(), optimizer.vectors.v_N
            optimizer.zero_grad()
            backward(net, 7, group.rank)
            optimizer.step()
            expected = p.clone()
            for group_of, span in zip(optimizer.param_groups, space.spans, strict=True):
                decay = 1 - group_of["lr"] * group_of["weight_decay"]
                step = optimizer.vectors.m_N[span] / (v[span].sqrt() + group_of["eps"])
                expected[span] = p[span] * decay - group_of["lr"] * step
            torch.testing.assert_close(space.p_N, expected, rtol=0, atol=1e-14)
            assert not space.p_N[dead].any()

        check()
        optimizer.param_groups[1]["eps"] = 1e-2
        check()
        state["vectors"]["v_N"] = state["vectors"]["v_N"] * 3
        optimizer.load_state_dict(state)
        check()

    run_threads(2, work)


class Mirror(Blocking):
    """Two ranks on one thread: the other has the same gradients, and serves zeros."""

    rank, size, serving = 0, 2, False

    def __init__(self):
        self.stats = Stats()

    def all_to_all(self, out_nB, in_nB):
        out_nB[0].copy_(in_nB[0])
        out_nB[1].copy_(in_nB[0])

    def all_gather(self, out_nB, in_B):
        for out in out_nB:
            out.view(-1).copy_(in_B.view(-1))
        if self.serving:
            out_nB[1, 1:] = 0  # but for the row's flag; a scale of 0 fits any row

    def sum_(self, x):
        x.mul_(2)

    def mean_(self, x):
        pass

    def broadcast_(self, x, src=0):
        pass


def large_allocations(work, least_bytes):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    tree = profile.profiler.kineto_results.experimental_event_tree()
    found = []

    def walk(event):
        size = getattr(event.extra_fields, "alloc_size", 0)
        if event.name == "[memory]" and size >= least_bytes:
            found.append(size)
        for child in event.children:
            walk(child)

    for event in tree:
        walk(event)
    return found


@every_value({"kind, made_first": [(OneBitAdam, 1), (OneBitLamb, 2)], "overlap": [False, True]})
def test_a_step_makes_no_vector_after_the_first_compressed_one(kind, made_first, overlap, monkeypatch):
    """Nothing as large as a sixteenth of a vector of signs; in the first compressed step error memory.

    1-bit LAMB decodes what it receives there, for the momentum before is in floats.
    """
    monkeypatch.setattr(Replicas, "begin", lambda *_: None)  # which reads them in pieces, once in many steps
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    group = Mirror()
    optimizer = construct(
        kind, net.parameters(), warmup=2, group=group, overlap=overlap, bucket_elements=1 << 15, block=1 << 12
    )
    optimizer.begins = False  # with which the first step compares them once more
    group.serving = True  # until here ranks compare what they are
    numel = optimizer.space.layout.numel
    least = numel // 8 // 16
    found = []
    for step in range(7):
        optimizer.zero_grad()
        net(torch.randn(1, 256, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        found.append(large_allocations(optimizer.step, least))
    assert optimizer.overlap.num_buckets > 2
    assert found[3:] == [[]] * 4
    if not overlap:
        assert found[2].count(4 * numel) == made_first
