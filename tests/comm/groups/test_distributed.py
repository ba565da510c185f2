"""Groups: threads and real gloo processes give the same bits, and a peer that goes is noticed, not waited for."""

from pathlib import Path

import pytest
import torch

from tests.comm.exchange.plain import plain
from tests.comm.gloo_ranks import said, start
from thinwire.comm import ThreadGroup, TorchGroup, run_threads
from thinwire.comm.codecs import SignCodec
from thinwire.comm.layout import VectorLayout

EXCHANGES = """
from tests.comm.groups.test_distributed import exchanged

join()
group = TorchGroup()
reducer, x, slot = exchanged(group)
torch.save({"out": x, "residual": slot.residual(), "sent": group.stats.sent_bytes}, f"{folder}/{rank}.pt")
if rank == size - 1:
    os._exit(9)  # as a kill: no goodbye
try:
    while True:
        reducer.full_(x)
except PeerLost as error:
    say("lost", error)
    os._exit(0)
"""


def exchanged(group):
    """Three exchanges: the reducer, what the last gave, and its error memory."""
    layout = VectorLayout.single(10_001)
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.zeros(layout.numel)
    reducer = plain(group, layout, SignCodec(block=512), x)
    slot = reducer.new_memory()
    for _ in range(3):
        x[: layout.num_live] = torch.randn(layout.num_live, generator=generator)
        reducer.compressed_(x, slot)
    return reducer, x, slot


def test_gloo_processes_agree_with_threads_bit_for_bit_and_notice_a_dead_peer(tmp_path):
    size = 3
    assert [rank.wait(timeout=120) for rank in start(EXCHANGES, size, tmp_path, timeout_s=30)] == [0, 0, 9]

    def work(group: ThreadGroup):
        _, x, slot = exchanged(group)
        return x, slot.residual(), group.stats.sent_bytes

    for rank, (out, residual, sent) in enumerate(run_threads(size, work)):
        saved = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(saved["out"], out)
        torch.testing.assert_close(saved["residual"], residual, rtol=0, atol=1e-6)  # the mean may sum in another order
        assert saved["sent"] == sent
    for rank in range(size - 1):
        assert f"rank {rank} of 3 lost rank 2 (its process" in said(tmp_path, rank, "lost")


def test_a_group_needs_a_rank_and_torch_needs_initialising():
    with pytest.raises(ValueError, match="at least one rank"):
        ThreadGroup.create(0)
    with pytest.raises(ValueError, match="init_process_group"):
        TorchGroup()


THREADS_AFTER_THE_END = """
import contextlib, pathlib
from thinwire.optim import OneBitAdam
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
optimizer = OneBitAdam(model.parameters(), warmup=1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

def tasks():
    names = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended since it was listed
            names.append((task / "comm").read_text())
    return names

assert any("gloo" in name for name in tasks()), tasks()
dist.destroy_process_group()
say("left", [name for name in tasks() if "gloo" in name])
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_destroying_the_process_group_ends_it_though_an_optimizer_lives(tmp_path):
    """Something that keeps the group alive would abort the process now and then, when the interpreter ends."""
    (rank,) = start(THREADS_AFTER_THE_END, 1, tmp_path)
    assert (rank.wait(timeout=120), said(tmp_path, 0, "left")) == (0, "[]")
