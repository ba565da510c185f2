"""On a GPU's streams, played late and out of order, the exchange is the exchange; and a missing wait is found."""

import random
import threading
from contextlib import nullcontext

import pytest
import torch

from tests.comm.streams.device import Died, Race, Stuck, World
from tests.comm.streams.planted import (
    DEATHS,
    WAITS,
    everything_on_the_stream_of_backward,
    mean_of_a_box_passed_on_without_a_look_at_the_gate,
)
from tests.comm.streams.ranks import (
    LAYOUT,
    by_node_first,
    done,
    exchange,
    inputs_of,
    late,
    reducer_of,
    run_late,
    steps_on,
)
from thinwire.comm.errors import NonFiniteInput, PeerLost
from thinwire.comm.groups.threads import run_threads
from thinwire.comm.keeps import Keeps

STEPS = 3
SOON = ("served without a look at the gate",)
"""Of the faults that a death finds, what is planted in `make test`."""
ULPS = 4 * torch.finfo(torch.float32).eps


def raised(ours):
    """The first that is no consequence of another one."""
    errors = [one for one in ours if isinstance(one, BaseException)]
    return min(errors, key=lambda error: isinstance(error, PeerLost), default=None)


def differ(ours, theirs):
    """Is anything of these another number?"""
    return any(
        not torch.equal(our_residual, residual)
        or not all(torch.equal(a, b) for a, b in zip(our_outs, outs, strict=True))
        for (our_outs, our_residual), (outs, residual) in zip(ours, theirs, strict=True)
    )


@pytest.mark.law
@pytest.mark.parametrize(
    ("size", "keeps", "results", "seeds"),
    [
        (3, Keeps.ROWS, "kept", 1),
        (2, Keeps.REPLICA, "kept", 1),
        (3, Keeps.NOTHING, "read", 1),
        *(
            pytest.param(size, keeps, results, 12, marks=pytest.mark.slow)
            for size in (1, 2, 3, 4)
            for keeps, results in ((Keeps.NOTHING, "kept"), (Keeps.NOTHING, "read"), (Keeps.REPLICA, "kept"))
        ),
    ],
)
def test_late_and_out_of_order_the_exchange_is_that_of_the_cpu_bit_for_bit(size, keeps, results, seeds, monkeypatch):
    theirs = run_threads(size, lambda group: steps_on(group, STEPS, keeps, results=results))
    late(monkeypatch)
    for seed in range(seeds):
        ours = run_late(World(size, seed), lambda group: steps_on(group, STEPS, keeps, results=results))
        if (error := raised(ours)) is not None:
            raise error
        assert not differ(ours, theirs)


@pytest.mark.law
@pytest.mark.parametrize("fault", WAITS)
def test_a_wait_that_is_missing_is_found(fault, monkeypatch):
    theirs = run_threads(2, lambda group: steps_on(group, 2))
    late(monkeypatch)
    WAITS[fault](monkeypatch)
    found = []
    for seed in range(6):
        ours = run_late(World(2, seed), lambda group: steps_on(group, 2))
        error = raised(ours)
        found.append(isinstance(error, Race | Stuck | NonFiniteInput) if error is not None else differ(ours, theirs))
        if found[-1]:
            return
    pytest.fail(f"{fault}: not found in {len(found)} orders")


@pytest.mark.parametrize("seeds", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_by_node_first_too(seeds, monkeypatch):
    boxes = (0, 0, 1, 1)
    theirs = run_threads(4, lambda group: steps_on(group, 2, make=by_node_first), boxes=boxes)
    late(monkeypatch)
    for seed in range(seeds):
        ours = run_late(World(4, seed, boxes=boxes), lambda group: steps_on(group, 2, make=by_node_first))
        if (error := raised(ours)) is not None:
            raise error
        assert not differ(ours, theirs)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_means_are_those_of_the_cpu_bit_for_bit(wire, monkeypatch):
    def work(group):
        reducer, x, (given,) = reducer_of(group), torch.zeros(LAYOUT.numel), inputs_of(group.rank, 1)
        means, spans = reducer.means(wire), reducer.buckets.spans
        means.begin()
        with getattr(group, "device", nullcontext()):
            for k, (start, stop) in enumerate(spans):
                x[start:stop].copy_(given[start:stop])
                means.launch(k, x)
            means.finish()
            out = x.clone()
            x.fill_(torch.nan)
        return done(group, lambda: out)

    theirs = run_threads(3, work)
    late(monkeypatch)
    for seed in range(2):
        ours = run_late(World(3, seed), work)
        if (error := raised(ours)) is not None:
            raise error
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def mean_with_a_death(world, step):
    """Of every rank that lives: does its mean in bfloat16 count, and what has it served? The last one dies."""
    size = len(world.devices)
    met = threading.Barrier(size, timeout=60)

    def work(group):
        means, x, (given,) = reducer_of(group).means("bf16"), torch.zeros(LAYOUT.numel), inputs_of(group.rank, 1)
        means.begin()
        if met.wait() == 0:
            world.kill = (size - 1, world.ran + step)
        met.wait()
        counts, was_lost = True, False
        with group.device:
            try:
                x.copy_(given)
                for k in range(len(means._coder._rows)):
                    means.launch(k, x)
                means.finish()
            except PeerLost:
                was_lost = True
                with means.redone() as counts:
                    pass
        return counts, done(group, lambda: [one.served_B.clone() for one in means._coder._rows]), was_lost

    return run_late(world, work)


@pytest.mark.parametrize("num", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_death_in_a_mean_in_bfloat16_is_that_too(num, monkeypatch):
    def whole(group):
        means, x, (given,) = reducer_of(group).means("bf16"), torch.zeros(LAYOUT.numel), inputs_of(group.rank, 1)
        means.begin()
        x.copy_(given)
        for k in range(len(means._coder._rows)):
            means.launch(k, x)
        means.finish()
        return [one.served_B.clone() for one in means._coder._rows]

    true, lost = run_threads(3, whole), 0
    late(monkeypatch)
    for seed, step in moments(num, most=110):
        told = [one for one in mean_with_a_death(World(3, seed), step) if not isinstance(one, Died)]
        assert all(isinstance(one, tuple) for one in told), told
        has_it = any(not has_lost for *_, has_lost in told)
        for (counts, rows, has_lost), due in zip(told, true, strict=False):
            lost += has_lost
            assert counts or not has_it, "another rank has the whole mean, and this one says that it has not served it"
            assert not counts or all(torch.equal(a, b) for a, b in zip(rows, due, strict=True)), "it has not served it"
    assert lost


@pytest.mark.parametrize(("make", "boxes"), [(reducer_of, ()), (by_node_first, (0, 0, 1, 1))])
def test_nothing_of_the_exchange_is_queued_on_the_stream_of_backward(make, boxes, monkeypatch):
    """So backward waits for no collective: overlap is kept."""
    late(monkeypatch)
    size = len(boxes) or 2

    def on_main(group):
        reducer, x = make(group), torch.zeros(LAYOUT.numel)
        memory, main = reducer.new_memory(), group.device.current()
        with group.device:
            reducer.begin(memory)
            before = main.clock.get(main.number, 0), main.waits
            for k in range(len(reducer.buckets)):
                reducer.launch_sum(k, x)
            after = main.clock.get(main.number, 0), main.waits
            reducer.finish()
        return [b - a for a, b in zip(before, after, strict=True)]

    assert run_late(World(size, 0, boxes=boxes), on_main) == [[0, 0]] * size
    everything_on_the_stream_of_backward(monkeypatch)
    told = run_late(World(size, 0, boxes=boxes), on_main)
    assert all(queued > 0 and waited > 0 for queued, waited in told)


def test_what_is_refused_or_given_up_is_undone_as_on_the_cpu_bit_for_bit(monkeypatch):
    """A rank refuses a bucket, then one gives up after its first; then all exchange."""

    def work(group):
        reducer = reducer_of(group)
        memory, x, out = reducer.new_memory(), torch.zeros(LAYOUT.numel), torch.empty(LAYOUT.numel)
        first, second, third = inputs_of(group.rank, 3)
        with getattr(group, "device", nullcontext()):
            reducer.begin(memory)
            for k, (start, stop) in enumerate(reducer.buckets.spans):
                x[start:stop].copy_(first[start:stop])
                if (group.rank, k) == (1, 1):
                    reducer.launch_refused(k)
                else:
                    reducer.launch_sum(k, x)
            with pytest.raises(NonFiniteInput):
                reducer.finish()
            x.copy_(second)
            if group.rank == 0:
                reducer.begin(memory)
                reducer.launch_sum(0, x)
                reducer.abandon()
            else:
                with pytest.raises(NonFiniteInput):
                    exchange(reducer, memory, x, second, lerp=False)
            exchange(reducer, memory, x, third, lerp=False)
            reducer.result.decode_(out)
            reducer.commit()
        return done(group, lambda: ([out.clone()], memory.share(group.size)))

    theirs = run_threads(3, work)
    late(monkeypatch)
    ours = run_late(World(3, 0), work)
    if (error := raised(ours)) is not None:
        raise error
    assert not differ(ours, theirs)


def served(reducer):
    """The rows that this rank has served."""
    return [one.served_B.clone() for one in getattr(reducer._coder, "_signs", reducer._coder)._rows]


def errors(memory):
    """The worker's and the server's, and the largest kept sum."""
    return memory.worker_N, memory.server_c, getattr(memory, "between", memory).largest


def after_a_death(size, seed, step, make=reducer_of, boxes=()):
    """One whole exchange, then one in which the last rank dies. What each rank tells of it."""
    world, met = World(size, seed, boxes=boxes), threading.Barrier(size, timeout=60)

    def work(group):
        reducer = make(group)
        memory, x = reducer.new_memory(), torch.zeros(LAYOUT.numel)
        first, second = inputs_of(group.rank, 2, seed)
        with group.device:
            exchange(reducer, memory, x, first, lerp=False)
            reducer.commit()
            before = done(group, lambda: errors(memory))
            if met.wait() == 0:  # all have done the first
                world.kill = (size - 1, world.ran + step)
            met.wait()
            try:
                exchange(reducer, memory, x, second, lerp=True)
            except PeerLost:
                after = done(group, lambda: errors(memory))
                with reducer.redone() as counts:
                    rows = done(group, lambda: served(reducer))
                return "lost", before, after, counts, rows, set(group.aborts) ^ set(group._all.values())
            return "whole", done(group, lambda: served(reducer))

    return run_late(world, work)


def served_on_cpu(size, seed, make=reducer_of, boxes=None):
    """The rows that each rank serves in the second exchange where nobody dies."""

    def work(group):
        reducer = make(group)
        memory, x = reducer.new_memory(), torch.zeros(LAYOUT.numel)
        first, second = inputs_of(group.rank, 2, seed)
        exchange(reducer, memory, x, first, lerp=False)
        reducer.commit()
        exchange(reducer, memory, x, second, lerp=True)
        return served(reducer)

    return run_threads(size, work, boxes=boxes)


def laws_of_a_death(told, true):
    """Which of them do not hold: nothing where all do."""
    broken = []
    whole = any(one[0] == "whole" for one in told if isinstance(one, tuple))
    for rank, one in enumerate(told):
        if isinstance(one, BaseException) and not isinstance(one, Died):
            broken.append(f"rank {rank} raised {one!r}")
        if not isinstance(one, tuple) or one[0] == "whole":
            continue
        _, before, after, counts, rows, left_alone = one
        bound = ULPS * max(before[2], after[2], 1.0)
        if not all(torch.allclose(a, b, rtol=0, atol=bound) for a, b in zip(before[:2], after[:2], strict=True)):
            broken.append(f"rank {rank}'s errors are not what they were")
        if whole and not counts:
            broken.append(f"another rank has the whole result, and rank {rank} says that it has not served it")
        if counts and not all(torch.equal(a, b) for a, b in zip(rows, true[rank], strict=True)):
            broken.append(f"rank {rank} counts as served what it has not served")
        if left_alone:
            broken.append(f"rank {rank} did not abort {len(left_alone)} communicators")
    return broken


def moments(num, seed=0, most=330):
    """After how many operations the rank dies; in what order they run."""
    drawn = random.Random(seed)
    return [(order, drawn.randrange(1, most)) for order in range(num)]


@pytest.mark.law
@pytest.mark.parametrize("num", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_a_death_in_mid_collective_is_peer_lost_and_nothing_unproven_counts(num, monkeypatch):
    refuse_broken_laws(moments(num), monkeypatch)


@pytest.mark.parametrize("num", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_a_death_by_node_first_is_that_too(num, monkeypatch):
    """Also garbage of a box must not get into what is kept between boxes."""
    refuse_broken_laws(moments(num, most=600), monkeypatch, by_node_first, (0, 0, 1, 1))


def test_garbage_of_a_box_is_found_by_the_first_three_of_those_deaths(monkeypatch):
    boxes, seeds = (0, 0, 1, 1), moments(3, most=600)
    true = {seed: served_on_cpu(4, seed, by_node_first, boxes) for seed, _ in seeds}
    late(monkeypatch)
    mean_of_a_box_passed_on_without_a_look_at_the_gate(monkeypatch)
    assert any(laws_of_a_death(after_a_death(4, *death, by_node_first, boxes), true[death[0]]) for death in seeds)


def refuse_broken_laws(deaths, monkeypatch, make=reducer_of, boxes=()):
    size = len(boxes) or 3
    true = {seed: served_on_cpu(size, seed, make, boxes or None) for seed, _ in deaths}
    late(monkeypatch)
    seen = set()
    for seed, step in deaths:
        told = after_a_death(size, seed, step, make, boxes)
        assert laws_of_a_death(told, true[seed]) == [], (seed, step)
        seen |= {one[0] if isinstance(one, tuple) else type(one).__name__ for one in told}
    assert "lost" in seen


@pytest.mark.parametrize(
    "fault", [fault if fault in SOON else pytest.param(fault, marks=pytest.mark.slow) for fault in DEATHS]
)
def test_what_counts_though_nothing_proves_it_is_found(fault, monkeypatch):
    seeds = moments(40, seed=1)
    true = {seed: served_on_cpu(3, seed) for seed, _ in seeds}
    late(monkeypatch)
    DEATHS[fault](monkeypatch)
    assert any(laws_of_a_death(after_a_death(3, seed, step), true[seed]) for seed, step in seeds), fault
