"""A step counts in all shards of a box or in none, wherever a box dies: in the exchange, or in a regroup after it.

Ranks are threads. Each lane, the ranks with one shard, has a group, and so has each box. The shards are plain tensors
here: what of FSDP matters is that the ranks of a box are asked whether all of their exchanges count.
"""

import threading
from functools import cache

import pytest
import torch

from tests.optim.reference.written_out import bits
from tests.optim.regroup.ranks import Rank, until
from tests.optim.regroup.test_regroup import EPS, expected, shares
from thinwire.comm import PeerLost
from thinwire.comm.groups.faults import Fault, FaultyGroup, What, When
from thinwire.comm.groups.threads import ThreadGroup
from thinwire.optim import OneBitAdam, OneBitMuon
from thinwire.optim.engine import optimizer

LANES, WARMUP, AHEAD = 2, 2, 6
DEAD = "its box is dead"


class Shards:
    """The part of a Box that a rank asks; by threads."""

    def __init__(self, group):
        self._group = group

    def least(self, here):
        own = torch.tensor([here], dtype=torch.int8).view(torch.uint8)
        rows = torch.empty(self._group.size, 1, dtype=torch.uint8)
        self._group.all_gather(rows, own)
        return int(rows.view(torch.int8).min())

    def held_back(self, is_untouched):
        """FSDP holds nothing."""

    def equalise_(self, values):
        """No tensor is on several of them."""


class Boxes:
    """The living ones, each of LANES ranks, and their groups of now."""

    def __init__(self, number, kind, monkeypatch):
        self._here = threading.local()
        connect = optimizer.FlatOptimizer.connect_space

        def connected(one):
            one.space.box = None
            try:
                connect(one)
            finally:
                one.space.box = self._here.shards
            one.reduce.agree = one.space.box.least

        monkeypatch.setattr(optimizer.FlatOptimizer, "connect_space", connected)
        self._groups = [ThreadGroup.create(LANES, 20.0) for _ in range(number)]
        self.ranks = {}

        def make(box, lane):
            self.ranks[box, lane] = Rank(f"{box}/{lane}", lambda net: kind(net.parameters()), seed=lane)

        self.each(make, [(box, lane) for box in range(number) for lane in range(LANES)])

    @property
    def living(self):
        return sorted({box for box, _ in self.ranks})

    def each(self, work, who=None):
        """work(box, lane) in a thread of each; returns what they raised."""
        raised = {}

        def body(box, lane):
            self._here.shards = Shards(self._groups[box][lane])
            try:
                work(box, lane)
            except BaseException as error:  # noqa: BLE001 - looked at below
                raised[box, lane] = error

        threads = [threading.Thread(target=body, args=one, daemon=True) for one in who or list(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"
        return raised

    def together(self, work, faults=None, dies=None):
        """work(rank, group) over new groups of the living. dies: the box that a fault kills, with all its ranks."""
        places = {box: place for place, box in enumerate(self.living)}
        lanes = [[FaultyGroup(one) for one in ThreadGroup.create(len(places), 20.0)] for _ in range(LANES)]

        def run(box, lane):
            group = lanes[lane][places[box]]
            fault = (faults or {}).get((box, lane))
            try:
                work(self.ranks[box, lane], group, fault)
            except PeerLost:
                if box == dies:  # its process is gone, and so are the others of its box
                    self._groups[box][lane].leave(DEAD)
                    for of_lane in lanes:
                        of_lane[places[box]].leave(DEAD)
                raise

        raised = self.each(run)
        assert all(isinstance(error, PeerLost) for error in raised.values()), raised
        if dies is not None and any(box == dies for box, _ in raised):
            for lane in range(LANES):
                del self.ranks[dies, lane]
        return raised

    def steps(self):
        """By box: of each lane."""
        return {box: [self.ranks[box, lane].optimizer.num_steps for lane in range(LANES)] for box in self.living}

    def lanes(self):
        """Of each lane its ranks in the boxes that live."""
        return [[self.ranks[box, lane] for box in self.living] for lane in range(LANES)]

    def assert_equal(self):
        """What is common: parameters, and all but a momentum of each rank's own."""
        for lane in self.lanes():
            held = [bits(one.optimizer.space.p_N, *one.optimizer.common_vectors().values()) for one in lane]
            assert all(torch.equal(held[0], one) for one in held)


def begins(rank, group, fault):
    rank.regroup(group)
    rank.train(group, WARMUP + 2)


def steps_once(rank, group, fault):
    rank.regroup(group)
    if fault is not None:
        group.arm(fault)
    rank.step(group.rank, group.size)


def steps_twice(rank, group, fault):
    """In the first step R of before the regroup is held by all still."""
    rank.regroup(group)
    rank.step(group.rank, group.size)
    if fault is not None:
        group.arm(fault)
    rank.step(group.rank, group.size)


def regroups(rank, group, fault):
    if fault is not None:
        group.arm(fault)
    rank.regroup(group)


def says_r(rank, group, fault):
    rank.regroup(group)
    rank.left = rank.residual(group)


def one_bit_adam(params):
    return OneBitAdam(params, lr=0.01, warmup=WARMUP)


def one_bit_muon(params):
    return OneBitMuon(params, lr=0.01)


KINDS = pytest.mark.parametrize("kind", [one_bit_adam, one_bit_muon])


@cache
def undisturbed(kind, then):
    """Of each lane what 3 boxes hold of R where none dies."""
    with pytest.MonkeyPatch.context() as patch:
        boxes = Boxes(3, kind, patch)
        assert not boxes.together(begins)
        assert not boxes.together(then)
        return [shares(lane) for lane in boxes.lanes()]


@pytest.mark.few(1)
@pytest.mark.law
@KINDS
@pytest.mark.parametrize("lane", range(LANES))
@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("collective", ["all_to_all", "all_gather"])
def test_a_death_in_a_step_leaves_each_box_with_one_step_and_what_the_others_hold_of_r(
    monkeypatch, collective, when, lane, kind
):
    undone, counted = (undisturbed(kind, then) for then in (steps_once, steps_twice))
    boxes = Boxes(3, kind, monkeypatch)
    assert not boxes.together(begins)
    boxes.together(steps_twice, {(2, lane): Fault((2,), collective, 0, when)}, dies=2)
    assert all(len(set(steps)) == 1 for steps in boxes.steps().values()), boxes.steps()
    assert not boxes.together(says_r)
    (step,) = {step for steps in boxes.steps().values() for step in steps}
    boxes.assert_equal()
    for held, ranks in zip(counted if step == WARMUP + 4 else undone, boxes.lanes(), strict=True):
        largest = max(float(one.abs().max()) for own in held for both in own.values() for one in both)
        for name, r_N in expected(held, (0, 1)).items():
            found = [one.left[name] for one in ranks]
            assert torch.equal(found[0], found[1])
            assert found[0].any()
            assert (found[0] - r_N).abs().max() <= 64 * EPS * largest
    assert not boxes.together(steps_once)
    boxes.assert_equal()


def ahead(kind, monkeypatch):
    """Box 0 has made a step that the others have not finished, for each lost a peer in one of its lanes."""
    boxes = Boxes(3, kind, monkeypatch)
    alone = {(box, box - 1): Fault((box,), "all_gather", 0, When.AFTER, What.ALONE) for box in (1, 2)}
    together = WARMUP + 3

    def work(rank, group, fault):
        rank.regroup(group)
        rank.train(group, together)
        until(lambda: all(one.optimizer.num_steps == together for one in boxes.ranks.values()))
        if fault is not None:
            group.arm(fault)  # of one bucket the second phase: the others of its lane have all of the step
        rank.step(group.rank, group.size)

    boxes.together(work, alone)
    assert boxes.steps() == {0: [AHEAD] * 2, 1: [together] * 2, 2: [together] * 2}
    return boxes


@pytest.mark.law
@KINDS
def test_boxes_that_lack_a_step_finish_it_in_all_lanes(monkeypatch, kind):
    boxes = ahead(kind, monkeypatch)
    assert not boxes.together(regroups)
    assert all(steps == [AHEAD] * 2 for steps in boxes.steps().values())
    boxes.assert_equal()


@pytest.mark.slow
@pytest.mark.law
@KINDS
@pytest.mark.parametrize("lane", range(LANES))
def test_a_death_anywhere_in_a_regroup_leaves_each_box_with_one_step(monkeypatch, lane, kind):
    mixed = died = 0
    for collective in ("all_gather", "sum", "broadcast"):
        for when in When:
            for call in range(100):
                with monkeypatch.context() as patch:
                    boxes = ahead(kind, patch)
                    raised = boxes.together(regroups, {(0, lane): Fault((0,), collective, call, when)}, dies=0)
                    if not raised:
                        break
                    died += 1
                    mixed += any(len(set(steps)) > 1 for steps in boxes.steps().values())
                    assert not mixed, (collective, when, call, boxes.steps())
                    assert not boxes.together(regroups)
                    assert len({step for steps in boxes.steps().values() for step in steps}) == 1
                    boxes.assert_equal()
    assert died > 10
