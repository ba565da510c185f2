"""Optimizers by node first: what holds for all of them holds with boxes in the place of ranks too."""

import logging

import pytest
import torch

from tests.covering import every_value
from tests.optim.engine.test_resume import network, through_a_file, train, two_groups
from tests.optim.reference.written_out import COMPRESSED, bits, make
from tests.optim.regroup.ranks import goes_on, new_ranks, together, trained, until
from tests.optim.regroup.test_regroup import EPS, maker
from thinwire.comm import Keeps, PeerLost, run_threads
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim.engine.health import health
from thinwire.optim.engine.replicas import Replicas
from thinwire.optim.engine.share import read
from thinwire.optim.engine.shares import agree_on_load
from thinwire.optim.engine.state import error_memories
from thinwire.optim.regroup import hand_over
from thinwire.optim.saves import together as of_all

BOXES = (0, 0, 1, 1)
FREEZE = 5


def one(name, net, group, **more):
    given = {"topology": "node_first", "bucket_elements": 64, **more}
    return make(name, two_groups(net), group, warmup=FREEZE, block=64, **given)


@pytest.mark.few(1)
@every_value({"name": COMPRESSED}, only=(0, 2))
@pytest.mark.law
def test_replicas_are_bit_equal_and_hooks_change_no_bit(name):
    def work(group):
        held = []
        for overlap in (False, True):
            net = network(seed=group.rank)
            optimizer = one(name, net, group, overlap=overlap)
            assert optimizer.reduce.topology.startswith("node_first")
            train(net, optimizer, 12, group.rank)
            optimizer.state_dict()  # a sync
            held.append(bits(optimizer.space.p_N))
        assert optimizer.stats()["topology"] == "node_first, 2 boxes of 2 ranks"
        assert health(optimizer)["max_step"] > 0
        return held

    found = run_threads(4, work, boxes=BOXES)
    assert all(torch.equal(x, found[0][0]) for held in found for x in held)


@pytest.mark.few(1)
@every_value({"name": COMPRESSED, "steps": (3, FREEZE, 9)}, only=(0, 1))
@pytest.mark.law
def test_the_shares_of_all_ranks_have_the_r_of_their_state_dict(name, steps):
    def work(group):
        net = network(seed=0)
        optimizer = one(name, net, group)
        train(net, optimizer, steps, group.rank)
        return through_a_file(optimizer.rank_state_dict()), optimizer.state_dict()["residuals"]

    shares_n, residuals = zip(*run_threads(4, work, boxes=BOXES), strict=True)
    for name_of, r_N in of_all(list(shares_n))["residuals"].items():
        torch.testing.assert_close(r_N, residuals[0][name_of], rtol=0, atol=1e-6)


@pytest.mark.few(1)
@every_value({"topology": ("flat", "node_first"), "name": COMPRESSED}, only=(1, 2))
@pytest.mark.law
def test_shares_go_from_either_topology_to_either_with_their_r(topology, name):
    def work(group):
        net = network(seed=0)
        optimizer = one(name, net, group, topology=topology)
        train(net, optimizer, 8, group.rank)
        share, weights = optimizer.rank_state_dict(), through_a_file(net.state_dict())
        due = {key: memory.residual() for key, memory in error_memories(optimizer.vectors).items()}
        for other in ("flat", "node_first"):
            again = network(seed=1)
            loaded = one(name, again, group, topology=other)
            again.load_state_dict(weights)
            loaded.load_state_dict(share)
            agree_on_load(loaded)
            for key, memory in error_memories(loaded.vectors).items():
                assert (memory.residual() - due[key]).abs().max() <= 8 * EPS * due[key].abs().max()
                assert not memory.is_behind
            train(again, loaded, 3, group.rank)
            loaded.state_dict()
        return bits(loaded.space.p_N)

    held = run_threads(4, work, boxes=BOXES)
    assert all(torch.equal(one, held[0]) for one in held)


def test_what_the_share_of_one_rank_lacks_of_r_is_told_about_right():
    def work(group):
        net = network(seed=0)
        optimizer = one("onebit_adam", net, group)
        train(net, optimizer, 12, group.rank)
        share = read(optimizer.rank_state_dict())
        (memory,) = error_memories(optimizer.vectors).values()
        (held,) = share.errors.values()
        return float(torch.linalg.vector_norm(memory.residual() - held.part(4))), share.missing_norm(4)[1]

    for true, told in run_threads(4, work, boxes=BOXES):
        assert 0.8 * true <= told <= 1.25 * true  # from what one of four ranks holds of 140 elements


def begun(name, boxes, steps):
    ranks = trained(maker(name, topology="node_first"), len(boxes), steps, boxes)
    assert all(rank.optimizer.reduce.topology.startswith("node_first") for rank in ranks)
    return ranks


CHANGES = {
    "a box loses a rank": ((0, 1, 2), (0, 0, 1), "flat"),
    "a box goes": ((0, 1), (0, 0), "flat"),
    "a rank comes to each box": ((0, 1, 2, 3, 4, 5), (0, 0, 1, 1, 0, 1), "node_first, 2 boxes of 3 ranks"),
    "a box comes": ((0, 1, 2, 3, 4, 5), (0, 0, 1, 1, 2, 2), "node_first, 3 boxes of 2 ranks"),
    "ranks lie otherwise": ((0, 1, 2, 3), (0, 1, 0, 1), "node_first, 2 boxes of 2 ranks"),
}


@pytest.mark.few(1)
@every_value({"change": CHANGES, "name": COMPRESSED}, only=(0, 2, 4))
@pytest.mark.law
def test_t3_a_planned_change_keeps_r_and_takes_the_topology_that_can_be(change, name):
    stay, boxes, topology = CHANGES[change]
    ranks = begun(name, BOXES, 12)

    def leave(rank, group):
        hand_over(rank.optimizer)
        return rank.optimizer.handed_over, rank.held()

    handed, _ = zip(*together(ranks, leave, boxes=BOXES), strict=True)
    new = iter(new_ranks(2, maker(name, topology="node_first")))
    after = [ranks[at] if at < 4 else next(new) for at in stay]

    def regrouped(rank, group):
        rank.regroup(group)
        return rank.residual(group)

    for residuals in together(after, regrouped, boxes=boxes):
        for memory, r_N in residuals.items():
            due = handed[0][memory]
            assert (r_N - due).abs().max() <= 4 * EPS * due.abs().max()
            assert due.any()
    assert {rank.optimizer.stats()["topology"] for rank in after} == {topology}

    goes_on(after, boxes=boxes)


def errors_of(rank):
    """By memory: the worker error of this rank's box on its slices, and its server error in its place."""
    found = {}
    for name, memory in error_memories(rank.optimizer.vectors).items():
        worker_N = memory.worker_N
        found[name] = worker_N, memory.share(4) - worker_N / 2
    return found


FAULTS = {
    "in the box": Fault((1,), "all_to_all", 0),
    "between boxes": Fault((1,), "all_to_all", 1),
    "serving": Fault((1,), "all_gather", 0),
    # 3 buckets. Ranks 2 and 3 need nothing more of rank 1: they would be done, were rank 2 not cut off too.
    "at the end": Fault((1, 2), "all_gather", 3),
}


@pytest.mark.few(1)
@every_value({"name": ("onebit_adam", "onebit_lamb"), "fault": FAULTS}, only=(1, 3))
@pytest.mark.law
def test_a_rank_that_dies_in_a_step_takes_only_its_own_part_of_r(name, fault):
    ranks, done = begun(name, BOXES, 10), []

    def die(rank, group):
        rank.regroup(group)
        rank.train(group, 11)
        done.append(rank)
        until(lambda: len(done) == 4)
        group.arm(FAULTS[fault])
        rank.train(group, 12)

    together(ranks, die, boxes=BOXES)
    assert all(rank.lost is not None for rank in ranks)
    survivors = [rank for at, rank in enumerate(ranks) if at != 1]
    told = [errors_of(rank) for rank in survivors]

    def go_on(rank, group):
        rank.regroup(group)
        return rank.residual(group), rank.told

    for residuals, regrouped in together(survivors, go_on, boxes=(0, 1, 1)):
        assert regrouped.lost == (1,)
        assert regrouped.server_lost == (1,)
        assert regrouped.lost_norm > 0
        for memory, r_N in residuals.items():
            # Slices 0 have two holders, slices 1 are held by rank 3 alone now.
            due = sum(one[memory][0] for one in told[:2]) / 2 + told[2][memory][0]
            due = due + sum(one[memory][1] for one in told)
            assert (r_N - due).abs().max() <= 64 * EPS * due.abs().max()


def test_a_rank_that_lost_the_last_collective_alone_goes_forward_with_the_others(monkeypatch):
    monkeypatch.setattr(Replicas, "begin", lambda *_: None)  # beside the exchange, in some steps
    ranks, done = begun("onebit_adam", BOXES, 10), []

    def step(rank, group):
        rank.regroup(group)
        rank.train(group, 11)
        done.append(rank)
        until(lambda: len(done) == 4)
        group.arm(Fault((2,), "all_gather", len(rank.optimizer.reduce.buckets), When.AFTER, What.ALONE))
        try:
            rank.train(group, 12)
        except PeerLost:
            others = [one for one in ranks if one is not rank]
            until(lambda: all(one.optimizer.num_steps == 12 for one in others))
            raise

    together(ranks, step, boxes=BOXES)
    assert [rank.lost is not None for rank in ranks] == [False, False, True, False]
    due = [rank.held() for rank in ranks if rank.lost is None]

    def go_on(rank, group):
        rank.regroup(group)
        return rank.told, rank.held()

    for told, found in together(ranks, go_on, boxes=BOXES):
        assert told.rolled_forward == (2,)
        assert told.step == 12
        assert torch.equal(found, due[0])


def test_what_cannot_be_is_refused_and_auto_says_why_it_is_flat(caplog):
    def work(group, **more):
        return one("onebit_adam", network(seed=0), group, **more).stats()["topology"]

    for boxes, reason in (((0, 0, 1), "have 2, 1 ranks"), ((0, 0, 0), "all 3 ranks are in one box")):
        with pytest.raises(ValueError, match=f'topology = "node_first": .*{reason}'):
            run_threads(3, work, boxes=boxes)
        with caplog.at_level(logging.WARNING):
            assert run_threads(3, lambda group: work(group, topology="auto"), boxes=boxes) == ["flat"] * 3
        assert f"topology_flat ranks=3 reason={'the 2 boxes ' if 'have' in reason else ''}{reason}" in caplog.text
    with pytest.raises(ValueError, match="8 bits"):
        run_threads(4, lambda group: work(group, full_exchange="int8"), boxes=BOXES)
    with pytest.raises(ValueError, match='must be "flat", "node_first" or "auto"'):
        run_threads(1, lambda group: work(group, topology="ring"))


def test_what_ranks_keep_of_each_other_is_turned_off_and_said(caplog):
    def work(rank, group):
        rank.optimizer.keeps = Keeps.ROWS
        rank.regroup(group)
        rank.train(group, 7)
        return rank.optimizer.reduce.topology

    with caplog.at_level(logging.WARNING):
        found = together(new_ranks(4, maker("onebit_adam", topology="auto")), work, boxes=BOXES)
    assert found == ["node_first, 2 boxes of 2 ranks"] * 4
    assert "keeps_nothing asked=rows reason=topology is node_first" in caplog.text
