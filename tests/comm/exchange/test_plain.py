"""Laws of the compressed all-reduce, for every codec and number of ranks."""

import pytest
import torch

from tests.comm.exchange.plain import Dense, plain
from tests.covering import every_value
from thinwire.comm import PeerLost, ThreadGroup, WireMismatch, codecs, run_threads
from thinwire.comm.codecs import Bf16Codec, Int4Codec, Int8Codec, SignCodec, ThresholdCodec, TopKCodec
from thinwire.comm.exchange.reducer import flat_reducer
from thinwire.comm.exchange.simulate import SimulatedErrors, compressed_mean
from thinwire.comm.kernels.reference import BLOCK_SCALES
from thinwire.comm.layout import VectorLayout

SIZES = (1, 2, 3, 4, 8)
LAYOUT = VectorLayout(
    numel=16 + 1008 + 48,
    live=((0, 13), (16, 16 + 1003), (1024, 1029), (1032, 1039), (1040, 1071)),
    segments=((0, 16), (16, 1024), (1024, 1072)),
)
CODECS = {
    "sign": SignCodec(block=64),
    "sign-l1": SignCodec(block=64, scale="l1"),
    "dense": Dense(),
    "bf16": Bf16Codec(),
    "int8": Int8Codec(block=64),
    "int4": Int4Codec(block=64),
    "threshold": ThresholdCodec(0.1),
    "topk": TopKCodec(block=64, keep=8),
}


def inputs(size: int, rounds: int, dtype: torch.dtype, layout: VectorLayout = LAYOUT, seed: int = 0):
    """Random vectors [round][rank], zero where dead, of very different sizes along the vector."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-3, 1, layout.numel, dtype=dtype)
    dead = layout.dead(0, layout.numel)
    made = []
    for _ in range(rounds):
        ranks = [torch.randn(layout.numel, generator=generator, dtype=dtype) * scale for _ in range(size)]
        for x in ranks:
            x[dead] = 0
        made.append(ranks)
    return made


def reduce_rounds(size, rounds, codec, layout=LAYOUT):
    """Outputs [round][rank] and the residual before and after, by threads."""

    def work(group: ThreadGroup):
        reducer = plain(group, layout, codec, rounds[0][0])
        memory = reducer.new_memory()
        outs = []
        for ranks in rounds:
            x = ranks[group.rank].clone()
            reducer.compressed_(x, memory)
            outs.append(x)
        return outs, memory.residual(), memory

    by_rank = run_threads(size, work)
    return [[r[0][t] for r in by_rank] for t in range(len(rounds))], by_rank[0][1], [r[2] for r in by_rank]


def test_every_codec_is_covered():
    """Linear ones by test_laws.py."""
    by_rows = {name for name in codecs.__all__ if not hasattr(getattr(codecs, name), "over")}
    assert by_rows <= {type(codec).__name__ for codec in CODECS.values()}


@every_value({"size": SIZES[1:], "dtype": [torch.float32, torch.float64], "scale": BLOCK_SCALES}, only=(0, 2))
@pytest.mark.law
def test_collective_equals_the_simulation_bit_for_bit(size, dtype, scale):
    rounds = inputs(size, 10, dtype)
    outs, _, slots = reduce_rounds(size, rounds, SignCodec(64, scale))
    errors = SimulatedErrors.zeros(rounds[0])
    for ranks, out in zip(rounds, outs, strict=True):
        assert torch.equal(compressed_mean(ranks, errors, LAYOUT, 64, scale), out[0])
    for worker, memory in zip(errors.workers, slots, strict=True):
        assert torch.equal(worker, memory.worker_N)
    assert torch.equal(errors.server_N, torch.cat([memory.server_c for memory in slots]))


@pytest.mark.law
def test_t11_one_rank_does_not_compress():
    rounds = inputs(1, 5, torch.float32)

    def work(group):
        from thinwire.comm import default_reducer

        reducer = default_reducer(group, LAYOUT, rounds[0][0])
        memory = reducer.new_memory()
        for (x,) in rounds:
            out = x.clone()
            reducer.compressed_(out, memory)
            assert torch.equal(out, x)
        return float(memory.residual().abs().max()), reducer.stats.sent_bytes

    assert run_threads(1, work) == [(0.0, 0)]


@pytest.mark.law
def test_t4_reusing_server_errors_by_rank_would_break_the_residual():
    """The negative of T3: what restore() must not do is visible to T3's measure."""
    _, residual, slots = reduce_rounds(2, inputs(2, 5, torch.float32), SignCodec(block=64))
    wrong = torch.cat([slots[rank % 2].server_c[: LAYOUT.numel // 4] for rank in range(4)])
    right = torch.cat([memory.server_c for memory in slots])
    assert (wrong - right).norm() > 0.5 * residual.norm()


class FailingGroup:
    """A ThreadGroup whose k-th collective raises PeerLost before anything is exchanged."""

    def __init__(self, group, fail_at):
        self._group, self._left = group, fail_at
        self.rank, self.size, self.stats = group.rank, group.size, group.stats

    def second_communicator(self):
        return self

    def __getattr__(self, name):
        self._left -= 1
        if self._left == 0:
            raise PeerLost("injected")
        return getattr(self._group, name)


@pytest.mark.parametrize("other", [SignCodec(block=128), SignCodec(block=64, scale="l1")])
def test_ranks_that_disagree_are_told_so_with_both_sides(other):
    def work(group):
        codec = SignCodec(block=64) if group.rank == 0 else other
        with pytest.raises(WireMismatch, match=r"rank 0 has codec sign:64:l2, rank 1 has codec sign:(128:l2|64:l1)"):
            flat_reducer(group, LAYOUT, codec, torch.zeros(1))
        return True

    assert all(run_threads(2, work))
