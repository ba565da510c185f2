"""Experts' parameters, which only some ranks hold, have an optimizer over those ranks beside the others' one."""

import json

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.optim.constructing import construct
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.comm.groups.nodes import Part
from thinwire.optim import SGD, OneBitAdam, OneBitSGD, ZeroOneAdam

EXPERTS, WIDTH, TOKENS, STEPS = 2, 6, 8, 9
KINDS = {
    "onebit_adam": lambda p, **k: construct(OneBitAdam, p, lr=1e-2, warmup=3, **k),
    "onebit_sgd": lambda p, **k: construct(OneBitSGD, p, lr=1e-2, **k),
    "zero_one_adam": lambda p, **k: construct(
        ZeroOneAdam, p, lr=1e-2, dense_steps=2, var_freeze_step=4, local_step_clipper=1, **k
    ),
}


class Exchanged(torch.autograd.Function):
    """x of all ranks of a group, [ranks, ...]; backward: each rank is given the sum of what others have of its own."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty((group.size, *x.shape))
        for rank in range(group.size):
            out[rank] = x
            group.broadcast_(out[rank], rank)
        return out

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        ctx.group.start_sum_(total).wait()
        return total[ctx.group.rank], None


class Mixture(torch.nn.Module):
    """A layer that all ranks have, and behind it an expert for the even tokens and one for the odd ones.

    mine: the experts that are here. A rank's gradient of an expert is of the tokens of all ranks of its pair.
    """

    def __init__(self, pair=None):
        super().__init__()
        self.pair = pair
        self.shared = torch.nn.Linear(WIDTH, WIDTH)
        experts = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 2) for _ in range(EXPERTS)])
        self.mine = experts if pair is None else experts[pair.rank : pair.rank + 1]

    def forward(self, x):
        h = torch.tanh(self.shared(x))
        if self.pair is None:
            return torch.stack([expert(h[at::EXPERTS]) for at, expert in enumerate(self.mine)])
        of_pair = Exchanged.apply(h, self.pair)  # tokens to where their expert is, and the answers back
        answers = self.mine[0](of_pair[:, self.pair.rank :: EXPERTS])
        return Exchanged.apply(answers, self.pair)[:, self.pair.rank]


def batch(step, rank):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_of(model, step, rank):
    return (model(batch(step, rank)) - torch.arange(2)).square().mean()


def groups_of(whole):
    """Ranks 0 and 1 are a pair with an expert each, ranks 2 and 3 another one; and the group of those with the same."""
    first, at = whole.rank - whole.rank % EXPERTS, whole.rank % EXPERTS
    return whole.part(Part.BOX, [first, first + 1]), whole.part(Part.PEERS, [at, at + EXPERTS])


def trained(whole, make, **given):
    pair, replicas = groups_of(whole)
    model = seeded(0, lambda: Mixture(pair)).double()
    if "model" in given:
        given["model"] = model
        model._ddp_params_and_buffers_to_ignore = [f"mine.{name}" for name, _ in model.mine.named_parameters()]
    shared = make(model.shared.parameters(), group=whole, **given)
    experts = make(model.mine.parameters(), group=replicas)
    for step in range(STEPS):
        shared.zero_grad()
        experts.zero_grad()
        loss_of(model, step, whole.rank).backward()
        for param in model.mine.parameters():
            param.grad.div_(EXPERTS)  # of the loss of a pair's ranks added up, where the others' is a mean
        shared.step()
        experts.step()
    return [[p.detach().clone() for p in part.parameters()] for part in (model.shared, model.mine)]


@pytest.mark.law
def test_a_group_for_the_experts_and_one_for_the_rest_train_as_one_process_with_all_experts_does():
    found = run_threads(4, lambda whole: trained(whole, lambda p, **k: SGD(p, lr=0.1, **k)))
    model = seeded(0, Mixture).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(4)) / 4).backward()
        optimizer.step()
    for rank, (shared, expert) in enumerate(found):
        due = [*model.shared.parameters(), *model.mine[rank % EXPERTS].parameters()]
        for a, b in zip((*shared, *expert), due, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize("given", [{}, {"model": None}], ids=["without model=", "with model="])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.law
def test_replicas_of_each_expert_are_bit_equal_and_experts_differ_and_nothing_is_said(name, given, caplog):
    found = run_threads(4, lambda whole: trained(whole, KINDS[name], **given))
    shared, experts = ([torch.cat([p.flatten() for p in parts]) for parts in part] for part in zip(*found, strict=True))
    assert all(torch.equal(one, shared[0]) for one in shared)
    assert torch.equal(experts[0], experts[2])
    assert torch.equal(experts[1], experts[3])
    assert not torch.equal(experts[0], experts[1])
    assert not [line for line in caplog.messages if "replicas_differ" in line]


OVER_GLOO = """
import json, logging
from thinwire.optim import OneBitAdam
join()
lines = []
class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("thinwire").addHandler(Kept())

made = [dist.new_group([at, at + 2]) for at in (0, 1)]  # by all ranks, in one order
replicas = TorchGroup(made[rank % 2])
torch.manual_seed(0)
shared, experts = torch.nn.Linear(6, 6), [torch.nn.Linear(6, 2) for _ in range(2)]
expert = experts[rank % 2]
one = OneBitAdam(shared.parameters(), lr=1e-2, warmup=3, overlap=True)
other = OneBitAdam(expert.parameters(), lr=1e-2, warmup=3, overlap=True, group=replicas)
for step in range(8):
    one.zero_grad(), other.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    expert(torch.tanh(shared(x))).square().mean().backward()
    one.step(), other.step()
flat = lambda module: torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
say("shared", json.dumps(flat(shared))), say("expert", json.dumps(flat(expert)))
say("differ", json.dumps([line for line in lines if "replicas_differ" in line]))
say("overlapped", one.stats()["overlapped"]["in_backward"] + other.stats()["overlapped"]["in_backward"])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_over_process_groups_of_the_user_both_exchange_while_backward_runs(tmp_path):
    ranks = start(OVER_GLOO, 4, tmp_path, timeout_s=60)
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * 4
    told = [{name: said(tmp_path, rank, name) for name in ("shared", "expert", "differ")} for rank in range(4)]
    assert len({one["shared"] for one in told}) == 1
    assert told[0]["expert"] == told[2]["expert"] != told[1]["expert"] == told[3]["expert"]
    assert all(json.loads(one["differ"]) == [] for one in told)
    assert all(int(said(tmp_path, rank, "overlapped")) == 2 for rank in range(4))
