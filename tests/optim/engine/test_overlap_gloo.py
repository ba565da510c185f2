"""Overlap over real processes: collectives run in the background while hooks go on, and the result is the same."""

import pytest

from tests.comm.gloo_ranks import said, start
from tests.covering import every_value

TRAIN = """
import copy
from tests.optim.reference.written_out import bits
from tests.optim.engine.test_overlap import NETS, WARMUP, backward, make, train
from thinwire.optim.engine.state import replicated
join()
group = TorchGroup()
name = "NAME"
nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
plain, ours = (make(name, net, group, overlap=on) for net, on in zip(nets, (False, True)))
for step in range(1, WARMUP + 7):
    train(nets[0], plain, 1, rank, parts=1 + step % 2)
    told = train(nets[1], ours, 1, rank, parts=1 + step % 2)[0]
    same = torch.equal(bits(plain.space.p_N, *replicated(plain.vectors).values()),
                       bits(ours.space.p_N, *replicated(ours.vectors).values()))
    assert same, (name, step)
    assert (told["in_backward"] > 0) == (step > 1), told
backward(nets[1], 50, rank)  # a batch that is skipped
ours.zero_grad()
train(nets[1], ours, 3, rank)
say(name, bits(ours.space.p_N).tolist())
dist.destroy_process_group()
"""


@pytest.mark.slow  # threads show the same in test_overlap.py and test_overlap_undone.py
@pytest.mark.parametrize("name", ["onebit_adam", "adam", "onebit_lamb"])
def test_over_gloo_overlap_is_bit_equal_and_a_skipped_batch_leaves_replicas_equal(tmp_path, name):
    ranks = start(TRAIN.replace("NAME", name), 2, tmp_path, timeout_s=120)
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    assert said(tmp_path, 0, name) == said(tmp_path, 1, name)


OWN_COLLECTIVE = """
from thinwire.optim import Adam, OneBitAdam
from thinwire.optim.engine.state import replicated
join()
torch.manual_seed(0)

class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(16, 32), torch.nn.Linear(32, 10)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, k):
        h = torch.tanh(self.into(x))
        return self.out(h + torch.tanh(self.experts[k](h)))

net = Experts()
optimizer = KIND.sized(1024)(net.parameters(), model=net, lr=1e-2, overlap=True, **MORE)
for step in range(30):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(size * step + rank))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x, (3 * step + 2 * rank) % 4), x[:, :10].argmax(1))
    loss.backward()
    shown = torch.full((1025,), float(rank + step))  # as long as a bucket, about
    dist.all_reduce(shown)
    assert shown.eq(sum(range(size)) + size * step).all(), (step, shown)
    optimizer.step()
    told = optimizer.stats()["overlapped"]
    assert told["in_step"] == 0 or step == 0, told
say("parameters", optimizer.space.p_N.tolist())
assert optimizer.group._process_group() is not dist.group.WORLD
other = Adam(torch.nn.Linear(3, 2).parameters())
assert other.group._process_group() is optimizer.group._process_group()
given = TorchGroup()
assert Adam(torch.nn.Linear(3, 2).parameters(), group=given).group is given
dist.destroy_process_group()
"""


@pytest.mark.slow
@every_value({"kind, more": [("OneBitAdam", {"warmup": 10}), ("Adam", {})], "size": (3, 2)})
def test_a_collective_of_the_users_own_between_backward_and_step_meets_none_of_ours(tmp_path, kind, more, size):
    """Where ranks have used different experts, so that hooks have launched different buckets."""
    ranks = start(OWN_COLLECTIVE.replace("KIND", kind).replace("MORE", str(more)), size, tmp_path, timeout_s=120)
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * size
    assert len({said(tmp_path, rank, "parameters") for rank in range(size)}) == 1
