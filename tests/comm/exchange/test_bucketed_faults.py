"""An exchange in buckets that fails leaves what is replicated bit for bit, and R to 4 ulp of the largest kept sum."""

import threading

import pytest
import torch

from tests.comm.exchange.test_bucketed import make
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.covering import every_value
from thinwire.comm import NonFiniteInput, PeerLost, run_threads
from thinwire.comm.groups.faults import Fault, FaultyGroup, What, When

EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
BETA1 = 0.9
BUCKETS = 5
"""Of LAYOUT, as make() cuts it: an exchange is 2 x 5 collectives, first and second phase in turn."""


def nth(ranks, collective, *, after=False, what=What.ALONE):
    """A fault at the collective of this number, from 1 on: the two phases of each bucket in turn."""
    phase = "all_to_all" if collective % 2 else "all_gather"
    return Fault(ranks, phase, (collective - 1) // 2, When.AFTER if after else When.BEFORE, what)


def errors_of(memory):
    return torch.cat([memory.worker_N, memory.server_c])


def step(reducer, memory, vector, momentum):
    """Launch one exchange of `vector`, as a gradient where momentum says so, and finish it."""
    reducer.begin(memory)
    for k in range(len(reducer.buckets)):
        if momentum:
            reducer.launch_lerp(k, vector, 1 - BETA1)
        else:
            reducer.launch_sum(k, vector)
    reducer.finish()


def warmed_up(group, rounds, by=make):
    """A reducer and its memory after exchanges of all rounds but the last."""
    dtype = rounds[0][0].dtype
    reducer = by(group, dtype)
    memory, out = reducer.new_memory(), torch.empty(LAYOUT.numel, dtype=dtype)
    for ranks in rounds[:-1]:
        step(reducer, memory, ranks[group.rank], momentum=False)
        reducer.result.decode_(out)
        reducer.commit()
    return reducer, memory, out


def room(before, *given):
    """4 ulp of the largest sum that was kept on the way: an error and what was added to it."""
    largest = float(before.abs().max()) + max(float(x.abs().nan_to_num(0, 0, 0).max()) for x in given)
    return 4 * EPS[before.dtype] * largest


@every_value(
    {
        "dtype": [torch.float32, torch.float64],
        "momentum": (False, True),
        "collective": (1, 2, 3, 6, 9, 10),
        "after": (False, True),
    },
    only=(0, 2, 4),
)
@pytest.mark.law
def test_t6_a_lost_peer_in_any_phase_of_any_bucket_is_undone(dtype, momentum, collective, after):
    """Every rank loses its peers at the same place."""
    rounds = inputs(3, 4, dtype)

    def work(group):
        faulty = FaultyGroup(group)
        reducer, memory, m = warmed_up(faulty, rounds)
        before, given = errors_of(memory), rounds[-1][group.rank].clone()
        faulty.arm(nth((0, 1, 2), collective, after=after))
        with pytest.raises(PeerLost, match="injected"):
            step(reducer, memory, given, momentum)
        assert not reducer.is_open
        assert torch.equal(given, rounds[-1][group.rank])
        assert (errors_of(memory) - before).abs().max() <= room(before, given, m)
        reducer.last(memory).decode_(out := torch.empty_like(m))
        assert torch.equal(out, m)
        # the group is in step, as here all have lost each other alike: R itself, and a step from it
        memory.restore(residual := memory.residual())
        reducer.compressed_(given, memory)
        due = sum(rounds[-1]) / 3 + residual
        assert (given + memory.residual() - due).abs().max() <= room(before, *rounds[-1])
        return True

    assert run_threads(3, work) == [True] * 3


@pytest.mark.parametrize("collective", [1, 2, 5, 10])
def test_survivors_of_a_rank_that_dies_before_a_collective_are_as_before_the_step(collective):
    rounds = inputs(3, 3, torch.float32)
    arrived = threading.Barrier(3)  # who dies at once would be missed in the step before

    def work(group):
        faulty = FaultyGroup(group)
        reducer, memory, m = warmed_up(faulty, rounds)
        before, given = errors_of(memory), rounds[-1][group.rank]
        arrived.wait(60)
        if group.rank == 2:
            faulty.arm(nth((2,), collective, what=What.LOSE))
        with pytest.raises(PeerLost, match="injected" if group.rank == 2 else "lost rank 2|lost a peer"):
            step(reducer, memory, given, momentum=True)
        assert (errors_of(memory) - before).abs().max() <= room(before, given, m)
        reducer.last(memory).decode_(out := torch.empty_like(m))
        return torch.equal(out, m)

    assert run_threads(3, work) == [True] * 3


def test_where_the_last_collective_fails_on_one_rank_only_it_alone_is_as_before():
    rounds = inputs(3, 3, torch.float32)

    def work(group):
        faulty = FaultyGroup(group)
        reducer, memory, m = warmed_up(faulty, rounds)
        before, given = errors_of(memory), rounds[-1][group.rank]
        if group.rank == 1:
            faulty.arm(nth((1,), 2 * BUCKETS, after=True))
            with pytest.raises(PeerLost):
                step(reducer, memory, given, momentum=True)
            assert (errors_of(memory) - before).abs().max() <= room(before, given, m)
            reducer.last(memory).decode_(out := torch.empty_like(m))
            assert torch.equal(out, m)
            return None
        step(reducer, memory, given, momentum=True)
        reducer.commit()
        reducer.last(memory).decode_(out := torch.empty_like(m))
        assert not torch.equal(out, m)
        return out

    first, undone, last = run_threads(3, work)
    assert undone is None
    assert torch.equal(first, last)


def test_a_mean_that_overflows_though_every_input_was_finite_names_no_rank():
    """The squares of a block fit just so, and no longer where the server adds what it has kept."""

    def work(group):
        reducer = make(group, torch.float32)
        memory = reducer.new_memory()
        memory.restore(torch.full((LAYOUT.numel,), 2e18))
        x = torch.full((LAYOUT.numel,), 2e18)
        with pytest.raises(NonFiniteInput, match="each rank's own was finite") as raised:
            reducer.compressed_(x, memory)
        assert raised.value.ranks == ()
        assert torch.equal(x, torch.full((LAYOUT.numel,), 2e18))
        return float(memory.worker_N.abs().max())

    assert run_threads(2, work) == [0.0, 0.0]


def test_a_lost_peer_in_the_mean_in_full_is_raised_once_and_closes_it():
    def work(group):
        faulty = FaultyGroup(group)
        reducer = make(faulty, torch.float32)
        faulty.arm(Fault((0, 1), "sum", 2, what=What.ALONE))
        x = torch.ones(LAYOUT.numel)
        with pytest.raises(PeerLost, match="injected"):
            reducer.full_(x)
        assert not reducer.full.is_open
        x.fill_(group.rank)
        reducer.full_(x)
        return bool((x == 0.5).all())

    assert run_threads(2, work) == [True, True]
