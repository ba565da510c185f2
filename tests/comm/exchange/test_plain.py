"""Laws of the compressed all-reduce, for every codec and number of ranks."""

import pytest
import torch

from tests.comm.exchange.plain import Dense, plain
from tests.covering import every_value
from thinwire.comm import NonFiniteInput, PeerLost, ThreadGroup, WireMismatch, codecs, run_threads
from thinwire.comm.codecs import Bf16Codec, Int8Codec, SignCodec
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
    assert set(codecs.__all__) <= {type(codec).__name__ for codec in CODECS.values()}


@every_value(
    {
        "size": SIZES,
        "name": CODECS,
        "num_live": (None, 1, 9, 4097),
        "dtype, tolerance": [(torch.float64, 1e-12), (torch.float32, 1e-5)],
    },
    only=(2, 4),
)
@pytest.mark.law
def test_t1_outputs_and_residual_add_up_to_the_inputs(size, name, num_live, dtype, tolerance):
    layout = LAYOUT if num_live is None else VectorLayout.single(num_live)
    rounds = inputs(size, 50, dtype, layout)
    outs, residual, _ = reduce_rounds(size, rounds, CODECS[name], layout)
    total_in = sum(sum(ranks) / size for ranks in rounds)
    total_out = sum(ranks[0] for ranks in outs)
    scale = max(1.0, float(total_in.abs().max()))
    assert (total_out + residual - total_in).abs().max() <= tolerance * scale * 10


@every_value({"size": SIZES, "name": CODECS})
@pytest.mark.law
def test_t2_outputs_are_bit_identical_and_dead_elements_stay_zero(size, name):
    rounds = inputs(size, 10, torch.float32)
    outs, residual, slots = reduce_rounds(size, rounds, CODECS[name])
    dead = LAYOUT.dead(0, LAYOUT.numel)
    for ranks in outs:
        for out in ranks:
            assert torch.equal(out.view(torch.int32), ranks[0].view(torch.int32))
            assert not out[dead].any()
    assert not residual[dead].any()
    assert not any(memory.worker_N[dead].any() for memory in slots)


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


@every_value({"size": SIZES[1:]}, only=(1, 3))
def test_a_compressed_exchange_sends_one_bit_a_value_each_way(size):
    layout = VectorLayout.single(512 * 4096)

    def work(group):
        x = torch.randn(layout.numel)
        reducer = plain(group, layout, SignCodec(), x)
        before = group.stats.sent_bytes, group.stats.collectives
        reducer.compressed_(x, reducer.new_memory())
        compressed = group.stats.sent_bytes - before[0]
        assert group.stats.collectives - before[1] == 2
        reducer.full_(x)
        return compressed, group.stats.sent_bytes - before[0] - compressed

    for compressed, full in run_threads(size, work):
        assert full == 2 * (size - 1) * layout.numel * 4 // size
        assert full / compressed == pytest.approx(32, rel=0.02)


@every_value({"old": SIZES, "new": SIZES[2:] + SIZES[:2]}, only=(0, 2))
@pytest.mark.law
def test_t3_resize_keeps_the_residual(old, new):
    _, residual, _ = reduce_rounds(old, inputs(old, 5, torch.float32), SignCodec(block=64))
    if old == 1:  # a group of one that compresses, to have something to carry
        assert residual.abs().max() > 0

    def work(group):
        memory = plain(group, LAYOUT, SignCodec(block=64), residual).new_memory()
        memory.restore(residual)
        return memory.residual()

    for restored in run_threads(new, work):
        assert torch.equal(restored, residual)


@pytest.mark.law
def test_t4_reusing_server_errors_by_rank_would_break_the_residual():
    """The negative of T3: what restore() must not do is visible to T3's measure."""
    _, residual, slots = reduce_rounds(2, inputs(2, 5, torch.float32), SignCodec(block=64))
    wrong = torch.cat([slots[rank % 2].server_c[: LAYOUT.numel // 4] for rank in range(4)])
    right = torch.cat([memory.server_c for memory in slots])
    assert (wrong - right).norm() > 0.5 * residual.norm()


@every_value({"where": [0, 500, 1070], "bad": [float("nan"), float("inf"), -float("inf"), 1e30]})
@pytest.mark.law
def test_a_non_finite_input_is_named_by_every_rank_and_changes_no_error(bad, where):
    rounds = inputs(3, 4, torch.float32)

    def work(group):
        reducer = plain(group, LAYOUT, SignCodec(block=64), rounds[0][0])
        memory = reducer.new_memory()
        for ranks in rounds[:3]:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        before = memory.worker_N.clone(), memory.server_c.clone()
        x = rounds[3][group.rank].clone()
        if group.rank == 1:
            x[where] = bad
        with pytest.raises(NonFiniteInput, match="rank 1") as raised:
            reducer.compressed_(x, memory)
        assert raised.value.ranks == (1,)
        assert torch.equal(memory.worker_N, before[0])
        assert torch.equal(memory.server_c, before[1])
        x = rounds[3][group.rank].clone()
        reducer.compressed_(x, memory)  # the group is in step and goes on
        return x

    first, *others = run_threads(3, work)
    assert torch.isfinite(first).all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_input_of_the_full_mean_is_named_by_every_rank(bad):
    def work(group):
        x = torch.ones(LAYOUT.numel)
        if group.rank == 2:
            x[3] = bad
        with pytest.raises(NonFiniteInput, match="rank 2"):
            plain(group, LAYOUT, SignCodec(), x).full_(x)
        return True

    assert all(run_threads(3, work))


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


@pytest.mark.parametrize("collective", [1, 2])
@pytest.mark.law
def test_t6_a_lost_peer_in_either_collective_leaves_the_errors_untouched(collective):
    rounds = inputs(2, 3, torch.float32)

    def work(group):
        failing = FailingGroup(group, fail_at=10**9)
        reducer = plain(failing, LAYOUT, SignCodec(block=64), rounds[0][0])
        memory = reducer.new_memory()
        for ranks in rounds[:2]:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        before = memory.worker_N.clone(), memory.server_c.clone()
        failing._left = collective
        with pytest.raises(PeerLost, match="injected"):
            reducer.compressed_(rounds[2][group.rank].clone(), memory)
        assert torch.equal(memory.worker_N, before[0])
        assert torch.equal(memory.server_c, before[1])
        return True

    assert run_threads(2, work) == [True, True]


@pytest.mark.parametrize("other", [SignCodec(block=128), SignCodec(block=64, scale="l1")])
def test_ranks_that_disagree_are_told_so_with_both_sides(other):
    def work(group):
        codec = SignCodec(block=64) if group.rank == 0 else other
        with pytest.raises(WireMismatch, match=r"rank 0 has codec sign:64:l2, rank 1 has codec sign:(128:l2|64:l1)"):
            flat_reducer(group, LAYOUT, codec, torch.zeros(1))
        return True

    assert all(run_threads(2, work))


def test_a_residual_of_another_model_is_refused():
    def work(group):
        memory = plain(group, LAYOUT, SignCodec(), torch.zeros(1)).new_memory()
        with pytest.raises(ValueError, match="other parameters"):
            memory.restore(torch.zeros(8))
        return True

    assert run_threads(1, work) == [True]
