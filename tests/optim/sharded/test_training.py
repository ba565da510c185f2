"""Boxes that FSDP shards a model in, replicated by an optimizer: as FSDP's own replication, but for what crosses."""

from __future__ import annotations

import json

import pytest

from tests.comm.gloo_ranks import said, start
from tests.covering import parametrize
from tests.optim.sharded.boxes import SETUP

TRAINING = """
k = 2 if size == 4 else 3
mesh = grid(k)
boxes_of, box = mesh["replicate"].get_group(), mesh["shard"].get_group()
steps = range(5)

def compare(name, theirs, ours):
    a, b = full(theirs), full(ours)
    found[name] = {"apart": float((a - b).abs().max()), "alike": all(torch.equal(x, b) for x in every(b))}

def beside(name, ours=Adam, batches=1, clip=None, **options):
    "The same loop over a mesh of two dimensions and torch's AdamW, and ours."
    hsdp = sharded(mesh, **options)
    a = train(hsdp, torch.optim.AdamW(hsdp.parameters(), lr=1e-2, weight_decay=0.01), steps, batches, clip)
    model = sharded(mesh["shard"], **options)
    optimizer = ours(model.parameters(), lr=1e-2, weight_decay=0.01, group=boxes_of, max_grad_norm=clip, model=model)
    b = train(model, optimizer, steps, batches)
    compare(name, hsdp, model)
    found[name]["losses"] = max(abs(x - y) for x, y in zip(a, b))
    return optimizer

optimizer = beside("plain")
dense = optimizer.stats()["sent_bytes"]
found["empty shards"] = sum(t.start == t.stop for t in optimizer.space.tensors)
beside("clipped", clip=0.5)
if whole and k == 2:
    beside("accumulated", batches=2)
    beside("kept", reshard_after_forward=False)
    beside("offloaded", offload_policy=CPUOffloadPolicy(pin_memory=False))
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    beside("mixed", mp_policy=bf16)

# LAMB's trust ratios and Muon's matrices are whole: as one that has the whole model on each rank.
matrices = ((OneBitLamb, {"warmup": 3}), (OneBitLamb, {"warmup": 9}), (Muon, {}), (Lamb, {}))
for kind, more in matrices if whole else matrices[:1]:
    model = sharded(mesh["shard"])
    lamb = kind(model.parameters(), lr=1e-2, group=boxes_of, **more)
    train(model, lamb, steps)
    whole = Net()
    train(whole, kind(whole.parameters(), lr=1e-2, **more), steps)
    compare(f"{kind.__name__} {more}", whole, model)
    if kind is OneBitLamb:
        own_T = torch.stack([lamb.vectors.coeff_T, lamb.vectors.scaling_T, lamb.vectors.factor_T])
        found[f"{kind.__name__} {more}"]["coefficients"] = all(torch.equal(x, own_T) for x in every(own_T))
        before = lamb.reduce.stats.sent_bytes
        train(model, lamb, range(5, 6))
        found[f"{kind.__name__} {more}"]["bytes"] = lamb.reduce.stats.sent_bytes - before

# What is compressed: replicas bit-equal, and a fraction of the bytes.
compressed = (
    (OneBitAdam, {"warmup": 2}),
    (OneBitAdam.sized(128), {"warmup": 2, "overlap": False}),
    (OneBitAdam.sized(128), {"warmup": 2, "overlap": True}),
    (OneBitAdam.sized(128), {"warmup": 2, "overlap": True, "max_grad_norm": 0.05}),
    (ZeroOneAdam, {"var_freeze_step": 3}),
    (OneBitAdam, {"total_steps": 20}),
    (OneBitAdam, {"warmup": 2, "max_grad_norm": 0.5}),
    (OneBitAdam.sized(1 << 20), {"warmup": 2, "overlap": True, "max_grad_norm": 0.04}),  # one bucket: the exact norm
    (OneBitAdam.sized(1 << 20), {"warmup": 2, "overlap": False, "max_grad_norm": 0.04}),
    (OneBitSGD, {}),
    (OneBitMuon.sized(128), {}),
)
for kind, more in compressed if whole else compressed[:5]:
    model = sharded(mesh["shard"])
    optimizer = kind(model.parameters(), lr=1e-3, group=boxes_of, **more)
    losses = train(model, optimizer, range(7))
    if kind is ZeroOneAdam:
        optimizer.prepare_to_save()
    if more == {"total_steps": 20}:
        found["norms"] = [float(x) for x in every(torch.tensor(optimizer.stability.read_norms()[-1]))]
    found[f"{kind.__name__} {more}"] = {
        "alike": all(torch.equal(x, full(model)) for x in every(full(model))),
        "overlapped": optimizer.stats().get("overlapped"),
        "losses": losses,
        "norm": float(optimizer.space.gradient_norm) if "max_grad_norm" in more else None,
    }
    before = optimizer.reduce.stats.sent_bytes
    train(model, optimizer, range(7, 8))
    found[f"{kind.__name__} {more}"]["bytes"] = optimizer.reduce.stats.sent_bytes - before
found["dense bytes"] = dense / len(steps)
say("found", json.dumps(found))
dist.destroy_process_group()
"""


@parametrize(
    ("size", "whole"),
    [(4, False), (4, True), (6, True)],
    usual=[0],
    ids=["2 boxes of 2, less of it", "2 boxes of 2", "2 boxes of 3"],
)
def test_sharded_boxes_train_as_replicated_by_fsdp_itself(tmp_path, size, whole):
    """whole: every method; a step of four ranks of FSDP on two cores takes longest of all in `make test`."""
    ranks = start(SETUP + f"whole = {whole}\n" + TRAINING, size, tmp_path)
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * size
    of_rank = [json.loads(said(tmp_path, rank, "found")) for rank in range(size)]
    for found in of_rank:
        for name, one in found.items():
            assert not isinstance(one, dict) or one["alike"], name
        more = ("accumulated", "kept", "offloaded", "mixed") if whole and size == 4 else ()
        for name in ("plain", "clipped", *more):
            assert found[name]["apart"] < 2e-6, (name, found[name])
            assert found[name]["losses"] < 4e-6, (name, found[name])
        assert found["OneBitLamb {'warmup': 3}"]["coefficients"]
        overlapped = found["OneBitAdam {'warmup': 2, 'overlap': True}"]
        assert overlapped["overlapped"]["buckets"] - 1 == overlapped["overlapped"]["in_backward"] > 0
        assert overlapped["losses"] == found["OneBitAdam {'warmup': 2, 'overlap': False}"]["losses"]
        clipped = found["OneBitAdam {'warmup': 2, 'overlap': True, 'max_grad_norm': 0.05}"]
        assert clipped["overlapped"]["buckets"] - 1 == clipped["overlapped"]["in_backward"] > 0
        for kind in ("OneBitAdam {'warmup': 2}", "OneBitLamb {'warmup': 3}", "ZeroOneAdam {'var_freeze_step': 3}"):
            assert found[kind]["bytes"] * 10 < found["dense bytes"], kind
        if whole:
            for name in ("Lamb {}", "OneBitLamb {'warmup': 9}"):
                assert found[name]["apart"] < 2e-6, (name, found[name])
            assert found["Muon {}"]["apart"] < 1e-5, found[
                "Muon {}"
            ]  # the reference takes wide matrices in another order
            assert len(set(found["norms"])) == 1
            of_one_bucket = [
                f"OneBitAdam {{'warmup': 2, 'overlap': {on}, 'max_grad_norm': 0.04}}" for on in (True, False)
            ]
            ours, plain = (found[name] for name in of_one_bucket)
            assert ours["norm"] == pytest.approx(
                plain["norm"], rel=0.01
            )  # signs of values near zero differ by rounding
    norms = [found["OneBitAdam {'warmup': 2, 'overlap': True, 'max_grad_norm': 0.05}"]["norm"] for found in of_rank]
    assert norms[0] == norms[1] != norms[-1]  # of a box, however its shards differ
    assert norms[0] > 0.05
    assert of_rank[0]["empty shards"] == 0 < of_rank[-1]["empty shards"]
