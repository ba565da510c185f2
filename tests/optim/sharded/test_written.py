"""Gradients of shards that are written after they have been sent: all ranks say so, though torch leaves no trace."""

from __future__ import annotations

import json

import pytest

from tests.comm.gloo_ranks import said, start
from tests.optim.sharded.boxes import SETUP

WRITTEN = """
from thinwire.optim.engine.local import local
mesh = grid(size // 2)
boxes_of, first_box = mesh["replicate"].get_group(), rank < size // 2

def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

def clipped_in_one_box(model):
    "The norm of the other one is less, and a factor of 1 changes nothing."
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if first_box else 1e6)

def scaled(model):
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)

def divided(model):
    for p in model.parameters():
        p.grad.div_(2)

def through_data(model):
    for p in model.parameters():
        p.grad.data.mul_(0.5)

def zeroed_on_one_rank(model):
    if rank == size - 2:
        torch._foreach_zero_([local(p.grad) for p in model.parameters()])

def backward(model, step, dtype):
    x, y = data(step)
    return (model(x.to(dtype)).float() - y).square().mean()

for name, dtype, kind, more in (
    ("dense", torch.float32, Adam, {}),
    ("dense bf16", torch.bfloat16, Adam, {}),
    ("compressed", torch.float32, OneBitAdam, {"warmup": 2}),
    ("skipping", torch.float32, OneBitAdam, {"warmup": 2, "non_finite": "skip"}),
    ("compressed bf16", torch.bfloat16, OneBitLamb, {"warmup": 2}),
):
    model = sharded(mesh["shard"], Net(dtype))
    optimizer = kind.sized(64)(model.parameters(), lr=1e-3, group=boxes_of, overlap=True, **more)
    writes = clipped, clipped_in_one_box, scaled, divided, through_data, zeroed_on_one_rank
    for step, write in enumerate((zeroed_on_one_rank, None, None, None, *writes, None)):
        backward(model, step, dtype).backward()
        if write is not None:
            write(model)
        before, steps = full(model), optimizer.num_steps
        told = refused(optimizer.step)
        same = torch.equal(before, full(model)) and optimizer.num_steps == steps
        if write is not None and step:
            found[f"{name} {write.__name__}"] = [told, same]
        else:  # in the first step nothing goes early: what was written counts
            assert told == "nothing", told
        optimizer.zero_grad()
    early = optimizer.stats()["overlapped"]
    found[f"{name} early"] = early["in_backward"] == early["buckets"] - 1 > 0
    found[f"{name} skipped"] = optimizer.steps_skipped
    found[f"{name} alike"] = all(torch.equal(x, full(model)) for x in every(full(model)))
    x, y = data(99)
    backward(model, 99, dtype).backward()
    if rank == 1:
        local(next(model.parameters()).grad).view(-1)[:1].fill_(float("nan"))  # in place: seen by its version
    found[f"{name} then"] = refused(optimizer.step).split(":")[0]
    optimizer.zero_grad()

# A scaler, and what is clipped after unscale_(), is as without overlap
for name, dtype, kind, more in (
    ("fp32", torch.float32, OneBitAdam, {"warmup": 2}),
    ("bf16", torch.bfloat16, Adam, {}),
):
    ends = []
    for overlap in (False, True):
        model = sharded(mesh["shard"], Net(dtype))
        optimizer = kind.sized(64)(model.parameters(), lr=1e-2, group=boxes_of, overlap=overlap, **more)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            scaler.scale(backward(model, step, dtype)).backward()
            scaler.unscale_(optimizer)
            clipped(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.num_steps == 5
        ends.append(full(model))
    found[f"scaler {name}"] = torch.equal(*ends)
say("found", json.dumps(found))
dist.destroy_process_group()
"""
KINDS = ("dense", "dense bf16", "compressed", "skipping", "compressed bf16")
WRITES = ("clipped", "clipped_in_one_box", "scaled", "divided", "through_data", "zeroed_on_one_rank")


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_gradients_of_shards_that_are_written_after_they_were_sent_are_refused_alike(tmp_path, size):
    ranks = start(SETUP + WRITTEN, size, tmp_path)
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * size
    for rank in range(size):
        found = json.loads(said(tmp_path, rank, "found"))
        for kind in KINDS:
            for write in WRITES:
                told, same = found[f"{kind} {write}"]
                assert told.startswith("RuntimeError: gradients were written between backward and step()"), (
                    kind, write, told,
                )  # fmt: skip
                assert same, (kind, write)
            assert found[f"{kind} early"], kind
            assert found[f"{kind} skipped"] == 0, kind
            assert found[f"{kind} alike"], kind
        assert found["scaler fp32"]
        assert found["scaler bf16"]
