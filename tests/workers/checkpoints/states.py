"""States that divide by nothing, and checkpoints of them written by as many ranks as asked for."""

import math

import torch

from thinwire.workers.checkpoints import CheckpointId, Content, Snapshot

GENERATION = 7
SIZES = (1, 2, 3, 4, 8)
CPU = torch.device("cpu")

PLAIN = {
    "optimizer": {
        "num_steps": 17,
        "frozen_at": None,
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}],
        "saved": {"stability": {"evidence": [(1, 0.1), (2, 1 / 3)]}, "limit": math.inf},
        "evidence": {3: "floored", "$tuple": [1]},
    },
    "meter": {"seconds": {"checkpoint": 0.1 + 0.2}, "sent_bytes": {"exchange": 2**60}},
}


def state(seed=0):
    """Several vectors, one shorter than eight ranks, a scalar, an empty one; buffers of other kinds."""
    generator = torch.Generator().manual_seed(seed)
    flat = {
        "parameters": torch.randn(1009, generator=generator),
        "vectors.m_N": torch.randn(1009, generator=generator),
        "vectors.v_N": torch.rand(1009, generator=generator, dtype=torch.float64),
        "vectors.coefficients": torch.rand(7, generator=generator),
        "vectors.count": torch.tensor(float(seed)),
        "vectors.none": torch.empty(0),
        "residuals.momentum_error": torch.randn(17, 31, generator=generator).to(torch.bfloat16),
        "master": torch.tensor([math.inf, -0.0, 1e-45, math.pi]),
    }
    buffers = {
        "norm.running_mean": torch.randn(5, 3, generator=generator).half(),
        "norm.num_batches_tracked": torch.tensor(12345678901),
        "mask": torch.rand(11, generator=generator) > 0.5,
    }
    return Content(flat, buffers, {**PLAIN, "seed": seed})


def save(store, step, size=2, generation=GENERATION, content=None):
    """A whole checkpoint, as `size` ranks write it. Returns which."""
    which, content = CheckpointId(generation, step), content or state(step)
    snapshots = [Snapshot.take(which, rank, size, content) for rank in range(size)]
    records = {snapshot.rank: store.deliver(snapshot) for snapshot in snapshots}
    assert store.answers(snapshots[0], ()) == records
    store.commit(snapshots[0], records, [])
    return which


def assert_same(loaded, content):
    """Bit for bit, shapes, dtypes and plain values too."""
    for ours, theirs in ((loaded.flat, content.flat), (loaded.buffers, content.buffers)):
        assert set(ours) == set(theirs)
        for name, tensor in theirs.items():
            assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
            assert bits(ours[name]) == bits(tensor), name
    assert repr(loaded.plain) == repr(dict(content.plain))


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
