"""DDP as a wrapper that sends no gradient: its collectives are counted, and training is that of AdamW under DDP."""

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from thinwire.integrations.ddp import keep_gradients_local

TRAIN = """
import copy, warnings
import thinwire.optim
from torch.nn.parallel import DistributedDataParallel as DDP
from thinwire.integrations.ddp import keep_gradients_local
join()
warnings.simplefilter("ignore")
of_ddp = dist.new_group()  # all that DDP does is in it, and nothing else

def sent():
    return of_ddp._get_sequence_number_for_group()

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))

def batch(step, part):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * part + rank))

def train(model, optimizer, steps=4, first=1):
    "From step `first` on each has a micro-step inside no_sync(). Returns the collectives of each forward and backward."
    told = []
    for step in range(steps):
        optimizer.zero_grad()
        before = sent()
        if step >= first:
            with model.no_sync():
                model(batch(step, 0)).square().mean().div(2).backward()
        model(batch(step, 1)).square().mean().div(2).backward()
        told.append(sent() - before)
        optimizer.step()
    return told
"""

LAW = """
plain = DDP(net(), process_group=of_ddp)
told = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0))
assert min(told) >= 1, told  # else what follows would show nothing
for settings in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
    ours = keep_gradients_local(DDP(net(), process_group=of_ddp, **settings))
    assert ours.thinwire_gradients == "local"
    assert keep_gradients_local(ours) is ours
    optimizer = thinwire.optim.Adam(ours.parameters(), lr=0.01)
    told = train(ours, optimizer)
    # Once DDP agrees on the order of its buckets; it sums a map of used parameters, with static_graph once.
    mapped = int("find_unused_parameters" in settings)
    assert told[0] == int(mapped or "static_graph" in settings), (settings, told)
    assert told[3] == mapped and sum(told) <= 3 + 4 * mapped, (settings, told)
    for a, b in zip(plain.parameters(), ours.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)

# What compresses does so, and the replicas stay bit-equal.
ours = keep_gradients_local(DDP(net(), process_group=of_ddp, gradient_as_bucket_view=True))
optimizer = thinwire.optim.OneBitAdam(ours.parameters(), lr=0.01, warmup=3)
train(ours, optimizer, steps=6)
assert optimizer.frozen_at == 3
say("replica", torch.cat([p.detach().view(-1) for p in ours.parameters()]).tolist())

# Buffers are DDP's business as before.
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
ours = keep_gradients_local(DDP(model, process_group=of_ddp))
optimizer = thinwire.optim.Adam(ours.parameters(), lr=0.01)
train(ours, optimizer, steps=2)
ours(batch(9, 9))  # rank 0's came before this forward, and each rank's own batch after
ours.eval()(batch(9, 9))
say("buffers", model[1].running_mean.tolist())
dist.destroy_process_group()
"""

REFUSED = """
def refused(call, *words, kind=ValueError):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
        return
    raise AssertionError(f"was not refused: {words}")

def other_hook(state, bucket):
    raise AssertionError

ours = DDP(net(), process_group=of_ddp)
ours.register_comm_hook(None, other_hook)
for _ in range(2):
    refused(lambda: keep_gradients_local(ours), "other_hook", "no second")
assert not hasattr(ours, "thinwire_gradients")
ours = DDP(net(), process_group=of_ddp)
ours._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
refused(lambda: keep_gradients_local(ours), "communication hook already")

ours = DDP(net(), process_group=of_ddp)
ours.mixed_precision = "bfloat16"
refused(lambda: keep_gradients_local(ours), "mixed_precision", "autocast")
model = net()
late = DDP(model, process_group=of_ddp, delay_all_reduce_named_params=[("2.bias", model[2].bias)],
           param_to_hook_all_reduce=model[0].weight)
refused(lambda: keep_gradients_local(late), "delay_all_reduce_named_params")
model = torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True))
refused(lambda: keep_gradients_local(DDP(model, process_group=of_ddp)), "0 makes sparse gradients", "sparse=False")
ours = keep_gradients_local(DDP(net(), process_group=of_ddp))
refused(lambda: ours.join().__enter__(), "step()", "as many batches", kind=RuntimeError)

# A copy has a new reducer without the hook: it says so, and can be given one.
ours = keep_gradients_local(DDP(net()))
copied = copy.deepcopy(ours)
assert copied.thinwire_gradients != "local"
copied = keep_gradients_local(copied)
copied(batch(rank, 0)).square().mean().backward()
say("copied", copied.module[0].weight.grad.tolist())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ddp_sends_no_gradient_and_trains_as_adamw_under_ddp(tmp_path):
    ranks = start(TRAIN + LAW, 2, tmp_path)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert said(tmp_path, 0, "replica") == said(tmp_path, 1, "replica")
    assert said(tmp_path, 0, "buffers") == said(tmp_path, 1, "buffers")


@pytest.mark.slow
def test_what_would_send_gradients_all_the_same_is_refused(tmp_path):
    ranks = start(TRAIN + REFUSED, 2, tmp_path)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert said(tmp_path, 0, "copied") != said(tmp_path, 1, "copied")


def test_a_model_without_ddp_is_refused_by_name():
    with pytest.raises(TypeError, match=r"model is Linear: must be .*DistributedDataParallel"):
        keep_gradients_local(torch.nn.Linear(2, 2))
