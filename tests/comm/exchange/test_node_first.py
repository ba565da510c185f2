"""Laws of the exchange by node first: those of the compressed all-reduce, with boxes in the place of ranks."""

import threading
from dataclasses import replace

import pytest
import torch

from tests.comm.exchange.plain import plain
from tests.comm.exchange.test_bucketed import exchanged
from tests.comm.exchange.test_bucketed_faults import EPS, errors_of, room, step, warmed_up
from tests.comm.exchange.test_plain import LAYOUT, inputs
from tests.covering import every_value
from thinwire.comm import NonFiniteInput, PeerLost, WireMismatch, run_threads
from thinwire.comm.codecs import SignCodec
from thinwire.comm.exchange.node_first import Slices
from thinwire.comm.exchange.reducer import flat_reducer, node_first_reducer
from thinwire.comm.groups.faults import Fault, FaultyGroup, What, When
from thinwire.comm.groups.nodes import nodes_of
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.layout import Buckets, VectorLayout
from thinwire.comm.wire.link_classes import LinkClass, exchange_boxes
from thinwire.workers.telemetry.ledger import Ledger

BOXES = {
    "2 of 2": (0, 0, 1, 1),
    "2 of 4": (0, 0, 0, 0, 1, 1, 1, 1),
    "4 of 2": (0, 0, 1, 1, 2, 2, 3, 3),
    "3 of 2, in turn": (0, 1, 2, 0, 1, 2),
    "2 of 3": (0, 0, 0, 1, 1, 1),
}
CUTS = (64, 200, LAYOUT.numel)
"""Elements of a bucket: few, some, all."""


def make(group, dtype=torch.float64, bucket_elements=256, block=64, layout=LAYOUT, **more):
    nodes = nodes_of(group)
    assert not isinstance(nodes, str), nodes
    like = torch.empty(0, dtype=dtype)
    return node_first_reducer(nodes, layout, SignCodec(block), like, bucket_elements=bucket_elements, **more)


@pytest.mark.few(1)
@every_value({"boxes": BOXES}, only=(2, 4))
@pytest.mark.law
def test_it_is_on_each_slice_the_compressed_all_reduce_of_the_boxes_means(boxes):
    of_rank = BOXES[boxes]
    rounds = inputs(len(of_rank), 6, torch.float64)
    ours = exchanged(len(of_rank), rounds, by=make, boxes=of_rank, bucket_elements=LAYOUT.numel)
    members = [[rank for rank, box in enumerate(of_rank) if box == name] for name in dict.fromkeys(of_rank)]
    slices = Slices(Buckets.cut(LAYOUT, LAYOUT.numel), len(members[0]))

    def work(group):
        found = []
        for number in range(slices.parts):
            layout, like = slices.layout(number), rounds[0][0]
            if LAYOUT.numel % (8 * slices.parts):  # the plain codec knows no block that is dead
                reducer = flat_reducer(group, layout, SignCodec(64), like, bucket_elements=layout.numel)
            else:
                reducer = plain(group, layout, SignCodec(64), like)
            memory, outs = reducer.new_memory(), []
            for ranks in rounds:
                mean_N = sum(ranks[rank] for rank in members[group.rank]) / slices.parts
                outs.append(slices.take(mean_N, number))
                reducer.compressed_(outs[-1], memory)
            found.append((outs, memory.worker_N, memory.server_c))
        return found

    for of_slices, ranks in zip(run_threads(len(members), work), members, strict=True):
        for number, (rank, (outs, worker_M, server_c)) in enumerate(zip(ranks, of_slices, strict=True)):
            for got, due in zip(ours[rank][0], outs, strict=True):
                torch.testing.assert_close(slices.take(got, number), due, rtol=0, atol=1e-12)
            torch.testing.assert_close(slices.take(ours[rank][2], number), worker_M, rtol=0, atol=1e-12)
            torch.testing.assert_close(ours[rank][3], server_c, rtol=0, atol=1e-12)


@pytest.mark.few(1)
@every_value(
    {"dtype": [torch.float32, torch.float64], "boxes": BOXES, "given": ("vector", "runs", "start")}, only=(0, 3)
)
@pytest.mark.law
def test_a_momentum_formed_on_the_way_is_that_formed_before_to_rounding(dtype, boxes, given):
    of_rank, weight = BOXES[boxes], 0.25
    rounds = inputs(len(of_rank), 4, dtype)
    start_N = inputs(1, 1, dtype, seed=5)[0][0]

    def work(group):
        formed, fused = make(group, dtype), make(group, dtype)
        sums, lerps = formed.new_memory(), fused.new_memory()
        out, due = torch.zeros(LAYOUT.numel, dtype=dtype), torch.zeros(LAYOUT.numel, dtype=dtype)
        for at, ranks in enumerate(rounds):
            g = ranks[group.rank]
            r = start_N if given == "start" else due
            z = r + weight * (g - r) if at or given == "start" else g.clone()
            formed.compressed_(z, sums)
            due.copy_(z)
            fused.begin(lerps)
            runs = [g[a:b].clone() for a, b in LAYOUT.live] if given == "runs" else ()
            for k in range(len(fused.buckets)):
                if at or given == "start":
                    fused.launch_lerp(k, g, weight, runs, start_N if given == "start" else None)
                else:
                    fused.launch_sum(k, g)
            fused.finish()
            fused.result.decode_(out)
            fused.commit()
            if at == 0:
                continue
            slack = 64 * EPS[dtype] * float(max(due.abs().max(), sums.largest))
            assert (out - due).abs().max() <= slack
            assert (lerps.residual() - sums.residual()).abs().max() <= slack
        return True

    assert all(run_threads(len(of_rank), work, boxes=of_rank))


@pytest.mark.few(1)
@every_value({"boxes": BOXES}, only=(1, 4))
@pytest.mark.law
def test_factors_of_runs_and_sums_formed_by_bucket_are_as_those_of_whole_vectors(boxes):
    of_rank, weight = BOXES[boxes], 0.25
    rounds = inputs(len(of_rank), 4, torch.float64)
    factor_r = torch.linspace(0.5, 2.0, len(LAYOUT.live), dtype=torch.float64)

    def work(group):
        plain, formed, scaled = (make(group) for _ in range(3))
        memories = [reducer.new_memory() for reducer in (plain, formed, scaled)]
        r = torch.zeros(LAYOUT.numel, dtype=torch.float64)
        for ranks in rounds:
            g = ranks[group.rank]
            z = spread(factor_r, LAYOUT) * (r + weight * (g - r))
            for reducer, memory in zip((plain, formed, scaled), memories, strict=True):
                reducer.begin(memory)
                for k in range(len(reducer.buckets)):
                    if reducer is plain:
                        reducer.launch_sum(k, z)
                    elif reducer is formed:
                        reducer.launch_formed(k, lambda at, z=z: z[at].clone())
                    else:
                        reducer.launch_lerp(k, g, weight, (), r, factor_r)
                reducer.finish()
            outs = [reducer.result for reducer in (plain, formed, scaled)]
            decoded = [torch.empty_like(z) for _ in outs]
            for one, out in zip(outs, decoded, strict=True):
                one.decode_(out)
            for reducer in (plain, formed, scaled):
                reducer.commit()
            assert torch.equal(decoded[1], decoded[0])
            torch.testing.assert_close(decoded[2], decoded[0], rtol=0, atol=1e-12)
            r = decoded[0] / spread(factor_r, LAYOUT)
        return True

    assert all(run_threads(len(of_rank), work, boxes=of_rank))


BUCKETS = 5
"""Of LAYOUT, as make() cuts it for two and three ranks a box: 5 all-to-alls there, and as many exchanges between
boxes, one bucket behind."""
PLACES = [("all_to_all", at) for at in (0, 1, 2, 5, 9)] + [("all_gather", at) for at in (0, 3, 4, 5)]


@pytest.mark.few(2)
@every_value(
    {"place": range(len(PLACES)), "when": list(When), "boxes": ("2 of 2", "2 of 3"), "momentum": (False, True)},
    only=(1, 4, 6, 8),
)
@pytest.mark.law
def test_t6_a_peer_lost_at_any_collective_leaves_the_errors_of_all_ranks_untouched(place, when, boxes, momentum):
    of_rank = BOXES[boxes]
    rounds = inputs(len(of_rank), 4, torch.float64)
    collective, call = PLACES[place]
    everyone = tuple(range(len(of_rank)))
    arrived = threading.Barrier(len(of_rank))  # who dies at once would be missed in the step before
    nobody_waits = (collective, call, when) == ("all_gather", BUCKETS, When.AFTER)

    def work(group):
        faulty = FaultyGroup(group)
        reducer, memory, m = warmed_up(faulty, rounds, make)
        before, given = errors_of(memory), rounds[-1][group.rank].clone()
        faulty.arm(Fault(everyone if nobody_waits else (1,), collective, call, when))
        arrived.wait(60)
        try:
            step(reducer, memory, given, momentum)
        except PeerLost:
            assert not reducer.is_open
        else:
            return "it was done"
        assert torch.equal(given, rounds[-1][group.rank])
        assert (errors_of(memory) - before).abs().max() <= room(before, given, m)
        reducer.last(memory).decode_(out := torch.empty_like(m))
        assert torch.equal(out, m)
        return "it was undone"

    found = run_threads(len(of_rank), work, boxes=of_rank)
    # Other boxes may have all that they need of this one before its last collective, which is its own alone.
    sure = everyone if nobody_waits or collective == "all_to_all" else [i for i in everyone if of_rank[i] == of_rank[1]]
    assert [found[rank] for rank in sure] == ["it was undone"] * len(sure)
    assert set(found) <= {"it was undone", "it was done"}


@pytest.mark.few(1)
@every_value({"boxes": BOXES, "momentum": (False, True)}, only=(2, 4))
def test_an_exchange_whose_last_collective_failed_here_alone_can_be_counted(boxes, momentum):
    of_rank = BOXES[boxes]
    rounds = inputs(len(of_rank), 4, torch.float64)

    def work(group, alone):
        faulty = FaultyGroup(group)
        reducer, memory, _ = warmed_up(faulty, rounds, make)
        if alone and group.rank == 1:
            faulty.arm(Fault((1,), "all_gather", BUCKETS, When.AFTER, What.ALONE))
            before = memory.share(len(of_rank))
            with pytest.raises(PeerLost):
                step(reducer, memory, rounds[-1][group.rank], momentum)
            with reducer.redone() as counts:
                assert counts
                share = memory.share(len(of_rank))
            torch.testing.assert_close(memory.share(len(of_rank)), before, rtol=0, atol=1e-12)
            return share
        step(reducer, memory, rounds[-1][group.rank], momentum)
        reducer.commit()
        return memory.share(len(of_rank))

    undisturbed = run_threads(len(of_rank), lambda group: work(group, alone=False), boxes=of_rank)
    for got, due in zip(
        run_threads(len(of_rank), lambda group: work(group, alone=True), boxes=of_rank), undisturbed, strict=True
    ):
        torch.testing.assert_close(got, due, rtol=0, atol=1e-12)


@pytest.mark.few(1)
@every_value({"boxes": BOXES, "bucket_elements": CUTS, "full": ("fp32", "bf16")}, only=(1, 4))
@pytest.mark.law
def test_a_mean_in_full_is_the_mean_bit_identical_on_all_and_a_nan_is_named(boxes, bucket_elements, full):
    of_rank = BOXES[boxes]
    ((*ranks,),) = inputs(len(of_rank), 1, torch.float64)
    due = sum(ranks) / len(of_rank)

    def work(group):
        reducer = make(group, bucket_elements=bucket_elements, full=full)
        reducer.full_(x := ranks[group.rank].clone(), full)
        bad = ranks[group.rank].clone()
        if group.rank == 2:
            bad[1030] = float("nan")
        with pytest.raises(NonFiniteInput, match="rank 2"):
            reducer.full_(bad, full)
        reducer.full_(y := ranks[group.rank].clone(), full)
        assert torch.equal(x, y)
        return x

    found = run_threads(len(of_rank), work, boxes=of_rank)
    assert all(torch.equal(x, found[0]) for x in found)
    assert (found[0] - due).abs().max() <= {"fp32": 1e-12, "bf16": 0.2}[full]


@every_value({"collective, call": [("all_to_all", 0), ("all_to_all", 4), ("sum", 0), ("sum", 4), ("all_gather", 2)]})
def test_a_peer_lost_in_any_collective_of_a_mean_in_full_is_raised_and_closes_it(collective, call):
    arrived = threading.Barrier(4)

    def work(group):
        faulty = FaultyGroup(group)
        reducer = make(faulty)
        arrived.wait(60)
        faulty.arm(Fault((1,), collective, call))
        try:
            reducer.full_(torch.ones(LAYOUT.numel, dtype=torch.float64))
        except PeerLost:
            return reducer.full.is_open
        with pytest.raises(PeerLost):  # it had all that it needs of rank 1
            group.sum_(torch.ones(1))
        return "it was done"

    found = run_threads(4, work, boxes=BOXES["2 of 2"])
    may_be_done = collective == "all_gather"  # of a box alone: the other box has its sums by then
    assert found[:2] == [False] * 2
    assert all(rank is False or (rank == "it was done" and may_be_done) for rank in found[2:])


@every_value({"collective, call": [("all_to_all", 1), ("sum", 0), ("all_gather", 0)]}, only=(1,))
def test_after_a_sum_of_a_mean_has_failed_nothing_more_is_begun(collective, call):
    """Else others, which have not failed yet, would meet a collective of another bucket, and be told of other calls."""

    def work(group):
        faulty = FaultyGroup(group)
        reducer = make(faulty)
        if group.rank == 1:
            faulty.arm(Fault((1,), collective, call, When.AFTER, What.ALONE))
        before = group.stats.bytes_by_kind["box all_gather"]
        try:
            reducer.full_(torch.ones(LAYOUT.numel, dtype=torch.float64))
            lost = False  # whoever needs nothing more of rank 1 may be done before it is seen to have left
        except PeerLost:
            lost = True
            group.leave("lost a peer")
        return lost, group.stats.bytes_by_kind["box all_gather"] > before

    found = run_threads(4, work, boxes=BOXES["2 of 2"])
    assert found[1] == (True, collective == "all_gather")


def test_how_well_it_carried_is_known_of_a_vector_so_small_that_some_ranks_own_nothing_of_it():
    layout = VectorLayout.single(3)

    def work(group):
        reducer = make(group, layout=layout)
        memory = reducer.new_memory()
        reducer.compressed_(torch.tensor([1.0, -2.0, 3.0, 0, 0, 0, 0, 0], dtype=torch.float64), memory)
        return reducer.fidelity(memory)

    first, *others = run_threads(4, work, boxes=BOXES["2 of 2"])
    assert 0 < first.worker_density < 1
    assert others == [first] * 3


def between_boxes(ledger):
    return sum(entry.num_bytes for entry in ledger.entries() if entry.link is LinkClass.BETWEEN)


@pytest.mark.law
def test_two_boxes_of_four_send_each_other_less_than_a_2_4th_of_what_flat_sends():
    layout = VectorLayout.single(1 << 20)

    def work(group):
        like, boxes = torch.ones(layout.numel), exchange_boxes(group)
        sent, means = [], []
        for reducer in (
            flat_reducer(group, layout, SignCodec(), like),
            node_first_reducer(nodes_of(group), layout, SignCodec(), like),
        ):
            ledger = Ledger(group.stats, boxes)
            reducer.compressed_(like.clone(), reducer.new_memory())
            sent.append((between_boxes(ledger), ledger.predicted(boxes.ids[0]).num_bytes))
            ledger = Ledger(group.stats, boxes)
            reducer.full_(like.clone())
            means.append(between_boxes(ledger))
        return sent, means

    for (flat, ours), means in run_threads(8, work, boxes=BOXES["2 of 4"]):
        assert flat[0] / ours[0] == pytest.approx(23 / 8, rel=0.02)
        assert flat[1] / ours[1] > 2.4
        assert means[0] / means[1] == pytest.approx(7 / 4, rel=0.02)


@pytest.mark.few(1)
@every_value({"boxes": BOXES}, only=(0, 2))
def test_a_share_of_the_errors_goes_back_bit_for_bit_and_shares_add_up_to_r(boxes):
    of_rank = BOXES[boxes]
    rounds = inputs(len(of_rank), 4, torch.float32)

    def work(group):
        reducer, memory, _ = warmed_up(group, rounds, make)
        held, fresh = memory.held(), make(group, torch.float32)
        copy = fresh.new_memory()
        assert copy.hold(type(held).of_plain("it", held.plain()))
        assert not copy.is_behind
        outs = []
        for one, of in ((reducer, memory), (fresh, copy)):
            one.compressed_(x := rounds[-1][group.rank].clone(), of)
            outs.append(x)
        assert torch.equal(*outs)
        return held.part(len(of_rank)), memory.residual(), held

    def load_elsewhere(group):
        reducer = flat_reducer(group, LAYOUT, SignCodec(64), torch.empty(0), bucket_elements=200)
        memory = reducer.new_memory()
        memory.hold(held[group.rank])
        flat = memory.held()
        other = make(group, torch.float32, bucket_elements=40).new_memory()
        assert not other.hold(flat)
        assert other.is_behind
        assert torch.equal(other.held().part(len(of_rank)), other.share(len(of_rank)))
        found = memory.residual(), other.residual()
        other.restore(found[1])
        assert not other.is_behind
        return *found, other.residual()

    parts, _, held = zip(*run_threads(len(of_rank), work, boxes=of_rank), strict=True)
    due = sum(parts)
    for found in run_threads(len(of_rank), load_elsewhere, boxes=of_rank):
        for residual in found:
            assert (residual - due).abs().max() <= 8 * EPS[torch.float32] * due.abs().max()
    assert due.any()


def test_a_part_of_r_that_a_dead_rank_held_is_imputed_from_the_other_boxes_of_its_slices():
    of_rank, dead = BOXES["3 of 2, in turn"], 4
    rounds = inputs(len(of_rank), 4, torch.float64)

    def work(group):
        _, memory, _ = warmed_up(group, rounds, make)
        assert memory.kept_of(group.rank)
        assert memory.workers == 3
        return memory.share(5, (dead,)), memory.worker_N, memory.share(1) - memory.worker_N / 3

    parts, workers, servers = zip(*run_threads(len(of_rank), work, boxes=of_rank), strict=True)
    found = sum(part for rank, part in enumerate(parts) if rank != dead)
    left = [rank for rank in range(6) if rank != dead]
    owners = {0: [0, 1, 2], 1: [3, 5]}  # of slices of either number, without the dead one
    due = sum(sum(workers[rank] for rank in ranks) / len(ranks) for ranks in owners.values())
    due = due + sum(servers[rank] for rank in left)
    torch.testing.assert_close(found, due, rtol=0, atol=1e-12)


def test_what_it_cannot_do_is_refused_and_ranks_that_disagree_are_told():
    with pytest.raises(ValueError, match='full = "int8"'):
        run_threads(4, lambda group: make(group, full="int8"), boxes=BOXES["2 of 2"])
    told = run_threads(5, nodes_of, boxes=(0, 0, 0, 1, 1))
    assert set(told) == {"the 2 boxes have 3, 2 ranks: all must have as many"}
    assert run_threads(2, nodes_of) == ["all 2 ranks are in one box"] * 2
    assert run_threads(2, nodes_of, boxes="ab") == ["each of the 2 boxes has one rank"] * 2
    with pytest.raises(WireMismatch, match="sign:64:l2"):
        run_threads(4, lambda group: make(group, block=64 if group.rank else 128), boxes=BOXES["2 of 2"])


def test_one_part_of_a_group_that_breaks_takes_the_others_with_it():
    def work(group):
        nodes = nodes_of(group)
        if group.rank == 3:
            raise ArithmeticError("on purpose")
        with pytest.raises(PeerLost, match="rank 3"):
            (nodes.box if group.rank == 0 else nodes.peers).mean_(torch.zeros(8))

    with pytest.raises(ArithmeticError):
        run_threads(4, work, boxes=BOXES["2 of 2"])


def test_held_of_other_boxes_says_so():
    def work(group):
        memory = make(group).new_memory()
        held = memory.held()
        assert held.workers == 2
        with pytest.raises(ValueError, match="workers"):
            type(held).of_plain("it", {**held.plain(), "workers": -1})
        return memory.hold(replace(held, workers=4))

    assert run_threads(4, work, boxes=BOXES["2 of 2"]) == [False] * 4
