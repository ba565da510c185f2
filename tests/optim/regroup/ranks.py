"""Ranks as threads that survive their group: what tests of a change of ranks share."""

import time

import torch

from tests.optim.reference.written_out import bits
from tests.optim.seeded import seeded
from thinwire.comm import PeerLost, run_threads
from thinwire.comm.groups.faults import Fault, FaultyGroup, What
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.regroup import hand_over, regroup


class Rank:
    """One worker: a model, an optimizer, and the error that ended its last group."""

    def __init__(self, name, make_optimizer, seed=0):
        net = seeded(seed, lambda: torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3)))
        self.name = name
        self.net = net
        self.optimizer = make_optimizer(net)
        self.has_state = False
        self.lost = None
        self.told = None

    def train(self, group, until):
        while self.optimizer.num_steps < until:
            self.step(group.rank, group.size)

    def step(self, rank, size):
        step = self.optimizer.num_steps + 1
        x = torch.randn(24, 7, generator=torch.Generator().manual_seed(step))
        mine = slice(24 * rank // size, 24 * (rank + 1) // size)
        like = next(self.net.parameters())
        x = x[mine].to(like.device)
        self.optimizer.zero_grad()
        out = self.net(x.to(like.dtype))
        loss = (out.float() - torch.sin(x[:, :3] * 2)).square().sum() * size / 24
        loss.backward()
        self.optimizer.step()

    def regroup(self, group):
        self.told = regroup(self.optimizer, group, has_state=self.has_state)
        self.has_state = True

    def held(self):
        s = self.optimizer.vectors
        return bits(self.optimizer.space.p_N, *replicated(s).values())

    def residual(self, group):
        return {name: memory.residual() for name, memory in error_memories(self.optimizer.vectors).items()}


def new_ranks(size, make_optimizer):
    return [Rank(f"w{i}", make_optimizer, seed=i) for i in range(size)]


def trained(build, size, steps, boxes=None):
    """So many ranks that have made so many steps together."""
    ranks = new_ranks(size, build)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, steps)

    together(ranks, work, boxes=boxes)
    assert all(rank.lost is None for rank in ranks)
    return ranks


def goes_on(ranks, steps=4, boxes=None):
    """All take more steps in a new group, and hold the same bits after them."""

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, rank.optimizer.num_steps + steps)
        hand_over(rank.optimizer)
        return rank.held()

    held = together(ranks, work, boxes=boxes)
    assert all(rank.lost is None for rank in ranks)
    assert all(torch.equal(one, held[0]) for one in held)


def until(holds, limit_s=20.0):
    """Wait for it, and fail where it does not come."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.001)


def struck(ranks, step, fault, *, calls=1, more=3):
    """All make `step` steps together, and up to so many more in which the fault strikes.

    fault: its call is the number of a bucket, -1 the last, of which each makes so many calls. Ranks that lose what the
    others have let these finish their step before they go.
    """

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, step)
        until(lambda: all(one.optimizer.num_steps >= step for one in ranks))  # else one may still be in its last wait
        last = len(rank.optimizer.reduce.buckets) - 1
        bucket = last if fault.call < 0 else min(fault.call, last)
        group.arm(Fault(fault.ranks, fault.collective, calls * bucket, fault.when, fault.what))
        try:
            rank.train(group, step + more)
        except PeerLost:
            if fault.what is What.ALONE and group.rank in fault.ranks:
                ahead = [one for at, one in enumerate(ranks) if at not in fault.ranks]
                until(lambda: all(one.optimizer.num_steps == step + 1 for one in ahead))
            raise

    together(ranks, work)


def together(ranks, work, timeout_s=20.0, boxes=None):
    """work(rank, group) on every rank of one new group; what each returns. PeerLost ends a rank's work, and is kept.

    boxes: where each is, as in run_threads.
    """

    def one(group):
        rank = ranks[group.rank]
        rank.lost = None
        faulty = FaultyGroup(group)
        try:
            return work(rank, faulty)
        except PeerLost as error:
            group.leave("lost a peer")
            rank.lost = error
            return None

    return run_threads(len(ranks), one, timeout_s, boxes)
