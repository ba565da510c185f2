"""What the ranks of a box do together, and what they are refused: one of them has a NaN, or a mesh is not the one."""

from __future__ import annotations

import json

import pytest

from tests.comm.gloo_ranks import said, start
from tests.covering import parametrize
from tests.optim.sharded.boxes import SETUP

TOGETHER = """
mesh = grid(2)
boxes_of, box = mesh["replicate"].get_group(), mesh["shard"].get_group()

def broken(optimizer, model, poisoned):
    "A step with a NaN in one shard of one rank."
    x, y = data(99)
    (model(x) - y).square().mean().backward()
    if rank == poisoned:
        next(model.parameters()).grad.to_local().view(-1)[0] = float("nan")
    before = full(model), optimizer.num_steps
    said = refused(optimizer.step)
    optimizer.zero_grad()
    return said, torch.equal(before[0], full(model)), optimizer.num_steps - before[1]

methods = (
    ("compressed", OneBitAdam, {"warmup": 2}),
    ("dense", Adam, {}),
    ("8 bits", OneBitAdam, {}),
    ("lamb", OneBitLamb, {"warmup": 2}),
)
for name, kind, more in methods if whole else methods[:1]:
    for non_finite in ("raise", "skip"):
        model = sharded(mesh["shard"])
        optimizer = kind(model.parameters(), lr=1e-2, group=boxes_of, non_finite=non_finite, **more)
        train(model, optimizer, range(4))
        memory = getattr(optimizer.vectors, "momentum_error", None)
        errors = memory.residual() if memory else torch.zeros(1)
        found[f"{name} {non_finite}"] = broken(optimizer, model, 1)
        after = memory.residual() if memory else torch.zeros(1)
        found[f"{name} {non_finite} R"] = float((after - errors).abs().max())
        train(model, optimizer, range(4, 6))
        found[f"{name} {non_finite} after"] = all(torch.equal(x, full(model)) for x in every(full(model)))

# A scaler finds an overflow in one shard: all ranks leave the step out.
model = sharded(mesh["shard"])
optimizer = OneBitAdam(model.parameters(), lr=1e-2, group=boxes_of, warmup=2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(5):
    x, y = data(step)
    scaler.scale((model(x) - y).square().mean()).backward()
    if step == 3 and rank == 1:
        next(model.parameters()).grad.to_local().view(-1)[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
found["scaler"] = [optimizer.num_steps, optimizer.steps_skipped, scaler.get_scale()]
found["scaled alike"] = all(torch.equal(x, full(model)) for x in every(full(model)))

# Saved by each rank, loaded by each: as the run that went on, bit for bit.
saved_by = ((OneBitLamb, {"warmup": 3}), (OneBitAdam, {"warmup": 3}), (ZeroOneAdam, {"var_freeze_step": 3}))
for kind, more in saved_by if whole else saved_by[:1]:
    model = sharded(mesh["shard"])
    optimizer = kind(model.parameters(), lr=1e-2, group=boxes_of, **more)
    train(model, optimizer, range(5))
    saved = optimizer.state_dict()
    weights = {name: p.to_local().clone() for name, p in model.named_parameters()}
    train(model, optimizer, range(5, 8))
    again = sharded(mesh["shard"])
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.to_local().copy_(weights[name])
    other = kind(again.parameters(), lr=1e-2, group=boxes_of, **more)
    other.load_state_dict(saved)
    train(again, other, range(5, 8))
    found[f"resumed {kind.__name__}"] = torch.equal(full(again), full(model))
    theirs = [None, None]
    dist.all_gather_object(theirs, {**saved, "vectors": None}, group=box)
    found[f"other shard {kind.__name__}"] = refused(lambda: other.load_state_dict(theirs[1 - rank % 2]))
    # One box goes on alone: it has all of R.
    if rank < 2:
        alone = kind(sharded(mesh["shard"]).parameters(), lr=1e-2, group=SoloGroup(), **more)
        alone.load_state_dict(saved)
        (name, residual), = saved["residuals"].items()
        found[f"R {kind.__name__}"] = float((getattr(alone.vectors, name).residual() - residual).abs().max())
    dist.barrier()

# What somebody writes into shards between steps counts.
model = sharded(mesh["shard"])
optimizer = Adam(model.parameters(), lr=0.0, weight_decay=0.0, group=boxes_of)
train(model, optimizer, range(1))
with torch.no_grad():
    for p in model.parameters():
        p.data.mul_(2.0)
twice = full(model)
train(model, optimizer, range(1, 2))
found["written"] = torch.equal(twice, full(model))
found["state"] = [list(optimizer.state[p]["exp_avg"].shape) == list(p.to_local().shape) for p in model.parameters()]

# bfloat16 shards have masters in float32.
model = sharded(mesh["shard"], Net(torch.bfloat16))
optimizer = OneBitAdam(model.parameters(), lr=1e-4, group=boxes_of, warmup=2)
for step in range(4):
    x, y = data(step)
    (model(x.bfloat16()).float() - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
masters = optimizer.space.masters()
found["bf16"] = [
    p.dtype == torch.bfloat16 and torch.equal(masters[p].to(torch.bfloat16), p.to_local().reshape(-1))
    for p in model.parameters()
]

# What cannot be
def given(model, kind=Adam, **more):
    return refused(lambda: kind(model.parameters(), **more))

class Replicated(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = Net(), nn.Linear(1, 1)

both = Replicated()
fully_shard(both.net, mesh=mesh["shard"])
found["world"] = given(sharded(mesh["shard"]))
found["2-D"] = given(sharded(mesh), group=boxes_of)
found["2-D, world"] = given(sharded(mesh))
found["beside"] = given(both, group=boxes_of)
alone = grid(1)["shard"]
other = mesh["shard"] if rank < 2 else alone
found["otherwise"] = given(sharded(other), group=boxes_of)
found["other mesh"] = given(sharded(mesh["replicate"]), group=boxes_of)
found["sparse"] = given(sharded(mesh["shard"]), kind=SparseAdam, group=boxes_of)
found["text"] = refused(lambda: Adam(Net().parameters(), group="replicate"))
found["solo"] = given(sharded(mesh["shard"]), group=SoloGroup())
found["TorchGroup"] = given(sharded(mesh["shard"]), group=TorchGroup(boxes_of))
say("found", json.dumps(found))
dist.destroy_process_group()
"""


DIES = """
from thinwire.optim.regroup import regroup
mesh = grid(2)
model = sharded(mesh["shard"])
group = TorchGroup(mesh["replicate"].get_group())
optimizer = OneBitAdam(model.parameters(), lr=1e-2, group=group, warmup=2, max_grad_norm=1.0)
train(model, optimizer, range(5))
x, y = data(5)
if rank == 3:
    os._exit(9)
try:
    (model(x) - y).square().mean().backward()
    optimizer.step()
except (PeerLost, RuntimeError) as error:
    if rank == 2:  # FSDP has lost it, inside of the box
        os._exit(8)
    found["lost"] = f"{type(error).__name__}: {error}"
found["steps"] = optimizer.num_steps
regroup(optimizer, SoloGroup(), has_state=True)
optimizer.zero_grad()
for step in range(5, 8):
    x, y = data(step)
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
found["then"] = optimizer.num_steps
say("found", json.dumps(found))
os._exit(0)
"""


def test_a_process_that_dies_takes_its_box_out_and_the_other_box_goes_on(tmp_path):
    ranks = start(SETUP + DIES, 4, tmp_path, timeout_s=30)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0, 8, 9]
    for rank in (0, 1):
        found = json.loads(said(tmp_path, rank, "found"))
        assert found["lost"].startswith("PeerLost: "), found
        assert (found["steps"], found["then"]) == (5, 8)


INTERRUPTED = """
from thinwire.optim.regroup import regroup
mesh = grid(2)
model = sharded(mesh["shard"])
group = TorchGroup(mesh["replicate"].get_group())
optimizer = OneBitAdam(model.parameters(), lr=1e-2, group=group, warmup=2, max_grad_norm=1.0)
train(model, optimizer, range(5))
before, found["sure"] = full(model), True
x, y = data(5)
(model(x) - y).square().mean().backward()
if rank == 3:
    def interrupt():
        time.sleep(LATER_S)
        raise KeyboardInterrupt
    optimizer.reduce.finish = interrupt
began = time.monotonic()
try:
    optimizer.step()
except (PeerLost, KeyboardInterrupt) as error:
    found["lost"] = f"{type(error).__name__}: {error}"
found["steps"], found["seconds"] = optimizer.num_steps, time.monotonic() - began
try:
    regroup(optimizer, SoloGroup(), has_state=True)
except PeerLost as error:
    found["out"] = str(error)
else:
    found["as before"] = torch.equal(full(model), before)
    optimizer.zero_grad()
    for step in range(5, 8):
        x, y = data(step)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found["then"] = optimizer.num_steps
say("found", json.dumps(found))
dist.barrier()
os._exit(0)
"""


@pytest.mark.law
@pytest.mark.slow
@pytest.mark.parametrize("later_s", [0, 15])
def test_ctrl_c_in_one_process_takes_its_box_out_at_once_and_the_other_box_goes_on(tmp_path, later_s):
    """It lives on, so that no connection of its box is closed: its word is all that the others of the box have.

    Its thread may have served by then all that the other box wants of it, and so may its neighbour's: then the step
    stands there, on both ranks, as one does whose peers die behind it.
    """
    ranks = start(SETUP + f"LATER_S = {later_s}\n" + INTERRUPTED, 4, tmp_path, timeout_s=100)
    assert [rank.wait(timeout=200) for rank in ranks] == [0] * 4
    of_rank = [json.loads(said(tmp_path, rank, "found")) for rank in range(4)]
    stood = "lost" not in of_rank[0]
    assert stood or not later_s, "all that it sends has been sent by then"
    for rank, found in enumerate(of_rank):
        assert found["seconds"] < 50, "it waited for a time-out"
        assert ("out" in found) == (rank in (2, 3)), (rank, found)
        if stood and rank in (0, 1):
            assert ("lost" not in found, found["steps"], found["then"]) == (True, 6, 9), (rank, found)
            continue
        assert found["lost"].startswith("KeyboardInterrupt: " if rank == 3 else "PeerLost: "), (rank, found)
        assert found["steps"] == 5
        assert found.get("then", 8) == 8
        assert found.get("as before", True)
    assert "KeyboardInterrupt in OneBitAdam.step() 6" in of_rank[2]["lost"]


@parametrize("whole", [False, True], usual=[0], ids=["less of it", "every method"])
def test_the_ranks_of_a_box_step_together_or_not_at_all(tmp_path, whole):
    ranks = start(SETUP + f"whole = {whole}\n" + TOGETHER, 4, tmp_path)
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * 4
    of_rank = [json.loads(said(tmp_path, rank, "found")) for rank in range(4)]
    for rank, found in enumerate(of_rank):
        for name in ("compressed", "dense", "8 bits", "lamb")[: None if whole else 1]:
            told, same, steps = found[f"{name} raise"]
            assert told.startswith("NonFiniteInput: "), (name, told)
            assert (same, steps) == (True, 0), name
            assert ("another rank of this box" in told) == (rank % 2 == 0), (rank, told)
            assert found[f"{name} skip"] == ["nothing", True, 0], name
        for name, value in found.items():
            assert not name.startswith("other shard") or "loads what the rank at its place" in value, (name, value)
            assert not name.endswith(" R") or value < 1e-6, (name, value)
            assert not name.endswith(" after") or value, name
            assert not name.startswith("resumed") or value, name
        assert found["scaler"] == [4, 1, 512.0]
        assert found["scaled alike"]
        assert found["written"]
        assert all(found["bf16"] + found["state"])
        if rank < 2:
            assert len([value for name, value in found.items() if name.startswith("R ") and value < 1e-6]) == (
                3 if whole else 1
            )
        assert "have a shard of it each, and group= has ranks [0, 1, 2, 3]" in found["world"]
        assert 'group=mesh["replicate"].get_group()' in found["world"]
        for name in ("2-D", "2-D, world"):
            assert "FSDP averages gradients over them itself" in found[name]
            assert 'fully_shard(model, mesh=mesh["shard"])' in found[name]
        assert "of group 0, (1, 1): is a plain tensor beside DTensors such as parameter 0" in found["beside"]
        assert "shard the model alike in each box" in found["otherwise"]
        assert "have a shard of it each, and group= has ranks" in found["other mesh"]
        assert "SparseAdam exchanges rows of whole tables" in found["sparse"]
        assert found["text"].startswith("TypeError: group = str: must be a Group of thinwire.comm, or a process group")
        assert found["solo"] == found["TorchGroup"] == "nothing"
    for name in ("otherwise", "beside"):
        told = [found[name] for found in of_rank]
        assert told[:2] == told[2:]  # those that hold the same shard say the same
