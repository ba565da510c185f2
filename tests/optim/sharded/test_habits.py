"""What users do around a sharded box: evaluate and then save, checkpoint activations, accumulate, forget a sync."""

from __future__ import annotations

import json

import pytest

from tests.comm.gloo_ranks import said, start
from tests.optim.sharded.boxes import SETUP

HABITS = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from thinwire.integrations.checkpoint import by_parameter
mesh = grid(2)
boxes_of = mesh["replicate"].get_group()

def whole(net=Net):
    "FSDP leaves it gathered after a forward."
    return fully_shard(net(), mesh=mesh["shard"])

def evaluate(model):
    with torch.no_grad():
        model(data(99)[0])

# Evaluated and then saved: under the same names, and on it goes
model = whole()
optimizer = OneBitAdam(model.parameters(), lr=1e-2, group=boxes_of, model=model, warmup=2)
train(model, optimizer, range(4))
evaluate(model)
found["gathered"] = not any(isinstance(p, DTensor) for p in model.parameters())
found["names"] = sorted(key for key in by_parameter(optimizer) if key.endswith("m_N"))
found["shards"] = all(isinstance(p, DTensor) for p in model.parameters())
train(model, optimizer, range(4, 6))
found["alike"] = all(torch.equal(x, full(model)) for x in every(full(model)))
evaluate(model)
found["late"] = refused(lambda: OneBitAdam(model.parameters(), lr=1e-2, group=boxes_of, model=model))

# One box has evaluated, and the other has not, where they lay out anew
model, head = whole(), sharded(mesh["shard"], nn.Sequential(nn.Linear(1, 5), nn.Linear(5, 1)))
optimizer = Adam(model.parameters(), lr=1e-2, group=boxes_of, model=model)
train(model, optimizer, range(2))
if rank < 2:
    evaluate(model)
found["added"] = refused(lambda: optimizer.add_param_group({"params": list(head.parameters())}))

# Activations are checkpointed: the names are those of the model without
net = Net()
net[0], net[2] = checkpoint_wrapper(net[0]), checkpoint_wrapper(net[2])
model = sharded(mesh["shard"], net)
optimizer = Adam(model.parameters(), lr=1e-2, group=boxes_of, model=model)
train(model, optimizer, range(2))
found["checkpointed"] = sorted(key for key in by_parameter(optimizer) if key.endswith("m_N"))

# A buffer that tensor parallelism has made a DTensor
net = nn.Sequential(nn.Linear(11, 8), nn.Tanh(), nn.Linear(8, 1))
model = parallelize_module(net, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
model.register_buffer("scale", DTensor.from_local(torch.full((3,), 1.0 + rank // 2), mesh["shard"], [Replicate()]))
optimizer = Adam(model.parameters(), lr=1e-2, group=boxes_of, model=model)
train(model, optimizer, range(2))
found["buffer"] = model.scale.to_local().tolist()

# Nothing of a bfloat16 model is on the second rank of a box
model = fully_shard(nn.Linear(11, 1, dtype=torch.bfloat16), mesh=mesh["shard"])
optimizer = OneBitAdam(model.parameters(), lr=1e-2, group=boxes_of, warmup=2, max_grad_norm=1.0)
for step in range(4):
    x, y = data(step)
    (model(x.bfloat16()).float() - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
found["nothing here"] = all(torch.equal(x, full(model)) for x in every(full(model)))

# Accumulated with overlap, as without: a module's gradients have one version
for name, dtype, kind, more in (
    ("bf16", torch.bfloat16, Adam, {}),
    ("compressed", torch.float32, OneBitAdam, {"warmup": 2}),
):
    ends = []
    for overlap in (False, True):
        model = sharded(mesh["shard"], Net(dtype))
        optimizer = kind(model.parameters(), lr=1e-3, group=boxes_of, overlap=overlap, **more)
        for step in range(5):
            for part in range(2):
                x, y = data(2 * step + part)
                loss = lambda: (model(x.to(dtype)).float() - y).square().mean().backward()
                if part == 0:
                    with optimizer.no_sync():
                        loss()
                else:
                    loss()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(full(model))
    found[f"overlap {name}"] = torch.equal(*ends)
    loss()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False)
    found[f"written {name}"] = refused(optimizer.step)
    optimizer.zero_grad()

# FSDP holds the gradients back of all backwards of a step, or of the last one, in all boxes or in one
def accumulated(kind, more, wrong=None, boxes=(0, 1), reduced=()):
    model = sharded(mesh["shard"])
    optimizer = kind(model.parameters(), lr=1e-2, group=boxes_of, **more)
    for step in range(5):
        for part in range(2):
            off = part == 0 if step != wrong or rank // 2 not in boxes else part not in reduced
            model.set_requires_gradient_sync(not off)
            x, y = data(2 * step + part)
            (model(x) - y).square().mean().backward()
        before = full(model), optimizer.num_steps
        told = refused(optimizer.step)
        if told != "nothing":
            found["held back"] += [[told, torch.equal(before[0], full(model)), before[1] == optimizer.num_steps]]
        if told.startswith("RuntimeError"):  # what FSDP holds is added by the next backward that it reduces
            model.set_requires_gradient_sync(True)
            (model(x) * 0).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    return full(model)

found["held back"] = []
for kind, more in ((Adam, {}), (OneBitAdam, {"warmup": 2})):
    right = accumulated(kind, more)
    for wrong in (1, 3):
        found[f"late {kind.__name__} {wrong}"] = float((accumulated(kind, more, wrong) - right).abs().max())
        accumulated(kind, more, wrong, reduced=(0,))
        accumulated(kind, more, wrong, boxes=(1,))
accumulated(OneBitAdam, {"warmup": 2, "overlap": True}, 3)
say("found", json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_evaluation_checkpointing_and_accumulation_leave_names_values_and_overlap(tmp_path):
    ranks = start(SETUP + HABITS, 4, tmp_path)
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * 4
    names = [f"{layer}.{name}/m_N" for layer in (0, 2, 3, 4) for name in ("bias", "weight")]
    for rank in range(4):
        found = json.loads(said(tmp_path, rank, "found"))
        assert found["gathered"]
        assert found["names"] == names
        assert found["shards"]
        assert found["alike"]
        assert "0.weight: is whole, as FSDP has gathered it for a forward" in found["late"]
        assert found["added"] == "nothing"
        assert found["checkpointed"] == names
        assert found["buffer"] == [1.0] * 3
        assert found["nothing here"]
        for name in ("bf16", "compressed"):
            assert found[f"overlap {name}"], name
            assert "gradients were written between backward and step()" in found[f"written {name}"], name
        told = iter(found["held back"])
        for wrong in (1, 3, 1, 3):
            for boxes in (2, 2, 1):
                text, same, uncounted = next(told)
                assert same
                assert uncounted
                assert "call model.set_requires_gradient_sync(True) before the last backward of a step" in text, text
                if boxes == 2:
                    assert f"step {wrong + 1}: FSDP holds back the gradient of parameter 0 of group 0" in text, text
                else:
                    assert "rank 0 has the gradient of no parameter held back by FSDP; rank 1 has the gradient" in text
        assert len(list(told)) == 1
        assert all(value < 1e-6 for name, value in found.items() if name.startswith("late "))
