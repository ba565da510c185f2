"""The laws of every exchange that has an error memory: by any codec, by kernels, means in few bits, by node first."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from tests.comm.exchange import test_bucketed, test_node_first
from tests.comm.exchange.plain import plain
from tests.comm.exchange.test_bucketed_faults import EPS, errors_of
from tests.comm.exchange.test_node_first import BOXES
from tests.comm.exchange.test_plain import CODECS, LAYOUT, SIZES, inputs
from tests.covering import every_value
from thinwire.comm import NonFiniteInput, PeerLost, default_reducer, run_threads
from thinwire.comm.codecs import CountSketch, PowerSGD, SignCodec
from thinwire.comm.errors import Refused
from thinwire.comm.exchange.reducer import flat_reducer
from thinwire.comm.groups.faults import Fault, FaultyGroup, What, When
from thinwire.comm.layout import VectorLayout

DEAD = LAYOUT.dead(0, LAYOUT.numel)


@dataclass(frozen=True)
class Kind:
    """make: a reducer of (group, like, layout, elements of a bucket). wire: of its means, where those are exchanged.

    large: what is finite and cannot be sent; None: all that is finite can be. in_place: are errors as before a failure
    to rounding only? by_node: are ranks in boxes? sums: are both collectives sums of one bucket?
    """

    make: Callable
    wire: str | None = None
    large: float | None = 1e30
    in_place: bool = False
    by_node: bool = False
    sums: bool = False

    def arranged(self, at):
        """Size and boxes of the arrangement of this number."""
        boxes = list(BOXES.values())[at] if self.by_node else None
        return len(boxes) if self.by_node else SIZES[at], boxes

    def run(self, at, work):
        """work(group) on the ranks of this arrangement."""
        size, boxes = self.arranged(at)
        return run_threads(size, work, boxes=boxes)

    def made(self, group, dtype=torch.float32, layout=LAYOUT, bucket_elements=256):
        """The exchange, and an error memory for it."""
        like = torch.empty(0, dtype=dtype)
        if group.size == 1 and self.wire:
            reducer = default_reducer(group, layout, like, full=self.wire)
        else:
            reducer = self.make(group, like, layout, bucket_elements)
        return reducer.full if self.wire else reducer, reducer.new_memory()


def by_rows(codec):
    return lambda group, like, layout, _: plain(group, layout, codec, like)


def by_kernels(group, like, layout, bucket_elements, **how):
    return test_bucketed.make(group, like.dtype, bucket_elements, layout=layout, **how)


def by_node(group, like, layout, bucket_elements):
    return test_node_first.make(group, like.dtype, bucket_elements, layout=layout)


class AnySketch(CountSketch):
    """Also where it is larger than the vector."""

    def refuse_larger(self, numel):
        """Not here."""


def by_sums(codec):
    """The longest tensors are matrices of prime numbers of rows and columns."""
    shapes = {1003: (17, 59), 4097: (17, 241)}

    def make(group, like, layout, _):
        known = tuple(shapes.get(stop - start, (stop - start,)) for start, stop in layout.live)
        return flat_reducer(group, replace(layout, shapes=known), codec, like)

    return make


def means(wire):
    return lambda *given: by_kernels(*given, full=wire)


CARRIES_ALL = ("sign-l1", "dense", "bf16", "int8", "int4", "threshold", "topk")
KINDS = {
    **{name: Kind(by_rows(codec), large=None if name in CARRIES_ALL else 1e30) for name, codec in CODECS.items()},
    "sketch": Kind(by_sums(AnySketch(k=6, columns=20)), large=None, sums=True),
    "low rank": Kind(by_sums(PowerSGD(rank=2)), large=None, sums=True),
    "kernels": Kind(by_kernels, in_place=True),
    "node first": Kind(by_node, in_place=True, by_node=True),
    "means in bf16": Kind(means("bf16"), "bf16", large=3.4e38),
    "means in int8": Kind(means("int8"), "int8", large=None),
    "means in int8, one bucket": Kind(
        lambda group, like, layout, _: plain(group, layout, SignCodec(64), like, full="int8"), "int8", large=None
    ),
}


def arranged(*ats):
    """Each kind in each of these arrangements; and which of them run always: all of what ships, of the others one."""
    pairs = [(name, at) for name in KINDS for at in ats]
    one = {(name, ats[i % len(ats)]) for i, name in enumerate(KINDS)}
    return pairs, [place for place, pair in enumerate(pairs) if pair in one or KINDS[pair[0]].in_place]


ANY, USUAL = arranged(1, 2, 3, 4, 0)
SEVERAL, USUAL_OF_SEVERAL = arranged(2, 1, 3, 4)
"""Of two ranks or more."""


def launch(one, memory, x_N, *, lerp=False, stop=None):
    """The first `stop` buckets of x, or all; as a gradient where lerp says so."""
    one.begin(memory)
    for k in range(len(one.buckets))[:stop]:
        if lerp:
            one.launch_lerp(k, x_N, 0.1)
        else:
            one.launch_sum(k, x_N)


def exchange(one, memory, x_N, *, lerp=False):
    """One exchange of x, which stays: what it gave."""
    out_N = x_N.clone()
    launch(one, memory, out_N, lerp=lerp)
    one.finish()
    if one.is_open:
        assert torch.equal(out_N, x_N)
        one.result.decode_(out_N)
        one.commit()
    return out_N


def last_of(one, memory):
    """What was committed last, where that is kept."""
    if one.last(memory) is None:
        return torch.zeros(0)
    one.last(memory).decode_(out_N := torch.empty_like(memory.worker_N))
    return out_N


def exchanged(kind, at, rounds, **how):
    """By rank: the outputs, the residual before the first and after each, and the memory."""

    def work(group):
        one, memory = kind.made(group, rounds[0][0].dtype, **how)
        outs, residuals = [], [memory.residual()]
        for ranks in rounds:
            outs.append(exchange(one, memory, ranks[group.rank]))
            residuals.append(memory.residual())
        return outs, residuals, memory

    return kind.run(at, work)


def exact(kind, size):
    """Is nothing left out?"""
    return kind is KINDS["dense"] or (kind.wire is not None and size == 1)


def assert_as_before(kind, memory, before, *given):
    """Bit for bit, or to 4 ulp of the largest sum that was kept on the way: an error and what was added to it."""
    after = errors_of(memory)
    if not kind.in_place:
        assert torch.equal(after, before)
        return
    largest = float(before.abs().max()) + max(float(x.abs().max()) for x in given if len(x))
    assert (after - before).abs().max() <= 4 * EPS[before.dtype] * largest


@pytest.mark.few(4)
@every_value(
    {
        "name, at": ANY,
        "bucket_elements, num_live": [(64, None), (200, None), (LAYOUT.numel, None), (8, 1), (8, 9), (504, 4097)],
        "dtype, tolerance": [(torch.float64, 1e-12), (torch.float32, 1e-5)],
    },
    only=USUAL,
)
@pytest.mark.law
def test_t1_every_output_and_its_residual_add_up_to_the_input_and_the_one_before(
    name, at, bucket_elements, num_live, dtype, tolerance
):
    kind, layout = KINDS[name], LAYOUT if num_live is None else VectorLayout.single(num_live)
    size = kind.arranged(at)[0]
    rounds = inputs(size, 6, dtype, layout)
    outs, residuals, _ = exchanged(kind, at, rounds, layout=layout, bucket_elements=bucket_elements)[0]
    for ranks, out, before, after in zip(rounds, outs, residuals, residuals[1:], strict=False):
        given = sum(ranks) / size + before
        room = tolerance * max(1.0, float(given.abs().max()), *(float(x.abs().max()) for x in ranks))
        assert (out + after - given).abs().max() <= room
    in_full = layout.num_live == 1 or (name == "low rank" and layout.num_live < 1000)
    assert any(bool(r.any()) for r in residuals) or in_full or exact(kind, size)


@pytest.mark.few(4)
@every_value({"name, at": ANY, "bucket_elements": (64, 200)}, only=USUAL)
@pytest.mark.law
def test_t2_outputs_are_bit_identical_and_dead_elements_stay_zero(name, at, bucket_elements):
    kind = KINDS[name]
    rounds = inputs(kind.arranged(at)[0], 5, torch.float32)
    for x in (x for ranks in rounds for x in ranks if kind.in_place):
        x[DEAD] = 7.0  # whatever a caller leaves there is not sent
    first, *others = exchanged(kind, at, rounds, bucket_elements=bucket_elements)
    for outs, residuals, memory in (first, *others):
        for out, due in zip(outs, first[0], strict=True):
            assert torch.equal(out.view(torch.int32), due.view(torch.int32))
            assert not out[DEAD].any()
        for out, exact in zip(outs, (sum(ranks) / len(ranks) for ranks in rounds if kind.wire), strict=False):
            assert (out - exact).norm() <= 0.03 * exact.norm()
        assert torch.equal(residuals[-1], first[1][-1])
        assert not memory.worker_N[DEAD].any()
        assert not residuals[-1][DEAD].any()


@pytest.mark.few(2)
@every_value({"name, old": ANY, "new": (3, 1, 4, 0, 2)}, only=USUAL)
@pytest.mark.law
def test_t3_a_resize_keeps_the_residual(name, old, new):
    kind = KINDS[name]
    residual = exchanged(kind, old, inputs(kind.arranged(old)[0], 4, torch.float32))[0][1][-1]
    assert residual.any() or exact(kind, kind.arranged(old)[0])
    size = kind.arranged(new)[0]
    rounds = inputs(size, 5, torch.float32, seed=1)

    def work(group):
        one, memory = kind.made(group, bucket_elements=200)
        others = [other for other in KINDS.values() if not other.by_node]
        for fresh in (memory, *(other.made(group)[1] for other in others)):
            fresh.restore(residual)
            assert torch.equal(fresh.residual(), residual)
            assert not fresh.worker_N.any()
        before, off = residual, []
        for turn, given in enumerate(rounds):
            out, after = exchange(one, memory, given[group.rank]), memory.residual()
            off.append(float((out + after - sum(given) / size - before).abs().max()))
            before = after
            if turn == 2:  # as after a save
                memory.restore(after)
        return max(off)

    assert max(kind.run(new, work)) <= 1e-4


@pytest.mark.few(3)
@every_value({"name": [name for name in KINDS if name not in ("kernels", "node first")], "at": range(1, 5)})
@pytest.mark.parametrize("collective", ["all_to_all", "all_gather"])
@pytest.mark.law
def test_t6_a_lost_peer_in_either_collective_leaves_the_errors_untouched(name, at, collective):
    """Of what is written in place: test_bucketed_faults and test_node_first."""
    kind, size = KINDS[name], SIZES[at]
    rounds = inputs(size, 3, torch.float32)

    def work(group):
        faulty = FaultyGroup(group)
        one, memory = kind.made(faulty)
        for ranks in rounds[:2]:
            exchange(one, memory, ranks[group.rank])
        before, last = errors_of(memory), len(one.buckets) - 1
        which = ("sum", int(collective == "all_gather")) if kind.sums else (collective, last)
        faulty.arm(Fault(tuple(range(size)), *which, When.AFTER, What.ALONE))
        with pytest.raises(PeerLost, match="injected"):
            exchange(one, memory, rounds[2][group.rank])
        assert_as_before(kind, memory, before, *rounds[2])
        return True

    assert all(kind.run(at, work))


@pytest.mark.few(3)
@every_value(
    {
        "name, at": SEVERAL,
        "bad": (float("nan"), float("inf"), -float("inf"), "large"),
        "where": (0, 500, 1070),
        "lerp": (False, True),
    },
    only=USUAL_OF_SEVERAL,
)
@pytest.mark.law
def test_a_non_finite_input_is_named_by_every_rank_and_changes_no_error(name, at, bad, where, lerp):
    kind = KINDS[name]
    *before, last = inputs(kind.arranged(at)[0], 4, torch.float32)
    value, lerp = kind.large if bad == "large" else bad, lerp and not kind.wire

    def work(group):
        one, memory = kind.made(group)
        for ranks in before:
            exchange(one, memory, ranks[group.rank])
        errors, result, x = errors_of(memory), last_of(one, memory), last[group.rank].clone()
        if group.rank == 1:
            x[where] = 3e38 if value is None else value
        if value is None:
            return exchange(one, memory, x, lerp=lerp)
        with pytest.raises(NonFiniteInput, match="rank 1") as raised:
            exchange(one, memory, x, lerp=lerp)
        assert raised.value.ranks == (1,)
        assert not one.is_open
        assert torch.equal(last_of(one, memory), result)
        assert_as_before(kind, memory, errors, *last, result)
        return exchange(one, memory, last[group.rank], lerp=lerp)  # the group is in step and goes on

    first, *others = kind.run(at, work)
    assert torch.isfinite(first).all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.few(3)
@every_value({"name, at": SEVERAL}, only=USUAL_OF_SEVERAL)
def test_who_takes_no_part_is_named_and_who_gives_up_lets_the_others_go_on(name, at):
    kind = KINDS[name]
    *before, last = inputs(kind.arranged(at)[0], 4, torch.float64)
    lerp = not kind.wire

    def work(group):
        one, memory = kind.made(group, torch.float64)
        for ranks in before:
            exchange(one, memory, ranks[group.rank])
        errors, result, x = errors_of(memory), last_of(one, memory), last[group.rank]
        if group.rank == 1:
            one.begin(memory)
            for k in range(len(one.buckets)):
                one.launch_refused(k)
        else:
            launch(one, memory, x.clone(), lerp=lerp)
        with pytest.raises(Refused) as refused:
            one.finish()
        assert refused.value.ranks == (1,)
        launch(one, memory, x.clone(), lerp=lerp, stop=len(one.buckets) // 2 if group.rank == 0 else None)
        if group.rank == 0:
            one.abandon()
        else:
            with pytest.raises(NonFiniteInput):
                one.finish()
        for stop in (group.rank, None):  # all do, from where each is
            launch(one, memory, x.clone(), lerp=lerp, stop=stop)
            one.abandon()
            assert not one.is_open
        if not kind.wire:  # what was finished, which nobody need hear of
            launch(one, memory, x, lerp=lerp)
            one.finish()
            sent = group.stats.collectives
            one.abandon()
            assert group.stats.collectives == sent
        assert torch.equal(last_of(one, memory), result)
        assert_as_before(kind, memory, errors, *last, result)
        return exchange(one, memory, x, lerp=lerp)

    first, *others = kind.run(at, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("name", KINDS)
def test_a_residual_of_another_model_is_refused(name):
    def work(group):
        with pytest.raises(ValueError, match="other parameters"):
            KINDS[name].made(group)[1].restore(torch.zeros(8))
        return True

    assert all(KINDS[name].run(1, work))
