"""The exchange with one scale a vector, held against references of DeepSpeed's and the papers'."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.exchange.test_plain import FailingGroup
from tests.covering import every_value
from thinwire.comm import NonFiniteInput, PeerLost, WireMismatch, default_reducer, run_threads
from thinwire.comm.exchange.vector_scales import Arrangement, deepspeed_reducer, whole_vector_reducer
from thinwire.comm.layout import Partition, VectorLayout
from thinwire.optim.reference.deepspeed import DeepSpeedExchange
from thinwire.optim.reference.exchange import TwoPhase

SIZES = (1, 2, 3, 4, 8)
LAYOUT = VectorLayout(
    numel=16 + 1008 + 48,
    live=((0, 13), (16, 16 + 1003), (1024, 1029), (1032, 1039), (1040, 1071)),
    segments=((0, 16), (16, 1024), (1024, 1072)),
)
VECTORS = {
    "a tensor": [[run] for run in LAYOUT.live],
    "a group": [list(LAYOUT.live[:2]), list(LAYOUT.live[2:])],
    "fused": [[LAYOUT.live[at] for at in (3, 0, 4, 1, 2)]],
}


def order_of(vectors):
    """Positions in the flat vector, in the order in which the vectors lay them."""
    return torch.tensor([at for runs in vectors for start, stop in runs for at in range(start, stop)])


def inputs(size, rounds, seed=0):
    """Random flat vectors [round][rank], zero where dead, of very different sizes along the vector."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-3, 1, LAYOUT.numel, dtype=torch.float64)
    alive = order_of([LAYOUT.live])
    made = []
    for _ in range(rounds):
        full = [torch.randn(LAYOUT.numel, generator=generator, dtype=torch.float64) * scale for _ in range(size)]
        made.append([torch.zeros_like(x).index_copy(0, alive, x[alive]) for x in full])
    return made


def run(size, rounds, make):
    """Outputs [rank][round] and the residual after each, by threads."""

    def work(group):
        reducer = make(group)
        memory = reducer.new_memory()
        outs, residuals = [], []
        for ranks in rounds:
            x = ranks[group.rank].clone()
            reducer.compressed_(x, memory)
            outs.append(x)
            residuals.append(memory.residual())
        return outs, residuals

    return run_threads(size, work)


@every_value({"size": SIZES, "keep_padding": (False, True), "name": VECTORS}, only=(0, 2))
def test_deepspeeds_exchange_is_that_of_the_reference(size, keep_padding, name):
    vectors, order = VECTORS[name], order_of(VECTORS[name])
    rounds = inputs(size, 12)
    reference = DeepSpeedExchange([sum(b - a for a, b in runs) for runs in vectors], size, keep_padding=keep_padding)
    like = rounds[0][0]
    results = run(
        size, rounds, lambda group: deepspeed_reducer(group, LAYOUT, vectors, like, keep_padding=keep_padding)
    )
    for at, ranks in enumerate(rounds):
        expected = reference([x[order] for x in ranks], "z")
        for outs, _ in results:
            torch.testing.assert_close(outs[at][order], expected, rtol=0, atol=1e-12)
            assert torch.equal(outs[at], results[0][0][at])
        if size > 1:
            left = reference.errors["z"].residual()[reference.live]
            torch.testing.assert_close(results[0][1][at][order], left, rtol=0, atol=1e-12)


@every_value({"size": SIZES}, only=(1, 3))
def test_one_scale_for_everything_is_that_of_the_papers(size):
    order = order_of(VECTORS["fused"])
    rounds = inputs(size, 12)
    partition = Partition(-(-len(order) // 8) * 8, size)
    chunks = [(min(a, len(order)), min(b, len(order))) for a, b in map(partition.bounds, range(size))]
    reference = TwoPhase(None, [(a, b) for a, b in chunks if a < b])
    results = run(size, rounds, lambda g: whole_vector_reducer(g, LAYOUT, VECTORS["fused"][0], rounds[0][0]))
    for at, ranks in enumerate(rounds):
        expected = reference([x[order] for x in ranks], "z") if size > 1 else ranks[0][order]
        for outs, _ in results:
            torch.testing.assert_close(outs[at][order], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_vector_shorter_than_the_ranks_are_many_is_exchanged_too(size):
    layout = VectorLayout.single(1)
    x = torch.tensor([4.0] + [0.0] * 7)

    def work(group):
        outs = []
        for reducer in (
            whole_vector_reducer(group, layout, [(0, 1)], x),
            deepspeed_reducer(group, layout, [[(0, 1)]], x),
        ):
            outs.append(x.clone())
            reducer.compressed_(outs[-1], reducer.new_memory())
        return outs

    for whole, padded in run_threads(size, work):
        assert whole[0] == 4.0
        assert 0 < padded[0] < 4.0
        assert not whole[1:].any()
        assert not padded[1:].any()


@every_value(
    {"before, after": [(1, 3), (2, 3), (3, 2), (4, 1), (3, 8), (8, 4)], "keep_padding": (False, True)}, only=(1, 3, 5)
)
def test_the_residual_of_the_live_elements_goes_to_any_number_of_ranks(before, after, keep_padding):
    like = inputs(1, 1)[0][0]

    def make(group):
        return deepspeed_reducer(group, LAYOUT, VECTORS["fused"], like, keep_padding=keep_padding)

    residual = run(before, inputs(before, 5), make)[0][1][-1]

    def work(group):
        memory = make(group).new_memory()
        memory.restore(residual)
        return memory.residual()

    for held in run_threads(after, work):
        assert torch.equal(held, residual)
    again = inputs(after, 3, seed=1)

    def go_on(group):
        reducer = make(group)
        memory = reducer.new_memory()
        memory.restore(residual)
        total = torch.zeros_like(residual)
        for ranks in again:
            x = ranks[group.rank].clone()
            reducer.compressed_(x, memory)
            total += x
        return total + memory.residual()

    expected = sum(sum(ranks) / after for ranks in again) + residual
    torch.testing.assert_close(run_threads(after, go_on)[0], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("keep_padding", [False, True])
@pytest.mark.parametrize("failure", ["non-finite", 1, 2])
def test_a_call_that_fails_leaves_input_and_errors_as_they_were(keep_padding, failure):
    rounds = inputs(3, 4)

    def work(group):
        failing = FailingGroup(group, fail_at=10**9)
        reducer = deepspeed_reducer(failing, LAYOUT, VECTORS["fused"], rounds[0][0], keep_padding=keep_padding)
        memory = reducer.new_memory()
        for ranks in rounds[:2]:
            reducer.compressed_(ranks[group.rank].clone(), memory)
        before = [t.clone() for t in (memory.worker_N, memory.server_c, memory.padding_q)]
        x = rounds[2][group.rank].clone()
        if failure == "non-finite":
            x[20] = float("nan") if group.rank == 1 else x[20]
        else:
            failing._left = failure
        kept = x.clone()
        with pytest.raises(NonFiniteInput if failure == "non-finite" else PeerLost) as raised:
            reducer.compressed_(x, memory)
        if failure == "non-finite":
            assert raised.value.ranks == (1,)
        assert torch.equal(x.nan_to_num(), kept.nan_to_num())
        after = (memory.worker_N, memory.server_c, memory.padding_q)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return True

    assert all(run_threads(3, work))


def test_an_exchange_is_two_collectives_and_one_bit_a_value_each_way():
    def work(group):
        reducer = deepspeed_reducer(group, LAYOUT, VECTORS["a tensor"], torch.zeros(1))
        memory, x = reducer.new_memory(), torch.ones(LAYOUT.numel)
        sent, calls = group.stats.sent_bytes, group.stats.collectives
        reducer.compressed_(x, memory)
        return group.stats.sent_bytes - sent, group.stats.collectives - calls

    padded = sum(-(-(b - a) // 32) * 32 for a, b in LAYOUT.live)
    row = 8 + -(-(4 * len(LAYOUT.live) + padded // 4 // 8) // 8) * 8
    assert run_threads(4, work) == [(2 * 3 * row, 2)] * 4


def test_ranks_whose_tensors_differ_are_told_though_their_padding_hides_it():
    def work(group):
        layout = VectorLayout.single(5 + group.rank)
        with pytest.raises(WireMismatch, match="codec"):
            deepspeed_reducer(group, layout, [list(layout.live)], torch.zeros(1))
        return True

    assert all(run_threads(2, work))


def test_error_memory_of_another_reducer_or_model_is_refused():
    def work(group):
        reducer = deepspeed_reducer(group, LAYOUT, VECTORS["a tensor"], torch.zeros(1))
        memory = reducer.new_memory()
        with pytest.raises(ValueError, match="other parameters"):
            memory.restore(torch.zeros_like(memory.worker_N))
        ours = default_reducer(group, LAYOUT, torch.zeros(1))
        with pytest.raises(TypeError, match="new_memory"):
            reducer.compressed_(torch.zeros(LAYOUT.numel), ours.new_memory())
        return True

    assert all(run_threads(2, work))


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", VECTORS)
def test_every_live_element_and_all_padding_have_one_place(size, name):
    arrangement = Arrangement.deepspeed(VECTORS[name], size)
    x = torch.arange(1.0, LAYOUT.numel + 1)
    placed = torch.zeros(arrangement.layout.numel)
    arrangement.scatter_(placed, x)
    assert int((placed > 0).sum()) == LAYOUT.num_live
    assert all(not placed[a:b].any() for a, b in arrangement.padding())
    assert sum(b - a for a, b in arrangement.padding()) == arrangement.layout.numel - LAYOUT.num_live
    back = torch.zeros_like(x)
    arrangement.gather_(back, placed)
    alive = order_of([LAYOUT.live])
    assert torch.equal(back[alive], x[alive])


@st.composite
def cut_vectors(draw):
    """A layout of runs with dead elements in between, and its runs dealt out to vectors in any order."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    starts = [sum(-(-length // 8) * 8 for length in lengths[:at]) for at in range(len(lengths) + 1)]
    runs = [(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    owners = draw(st.lists(st.integers(0, 2), min_size=len(runs), max_size=len(runs)))
    order = draw(st.permutations(range(len(runs))))
    vectors = [[runs[at] for at in order if owners[at] == owner] for owner in range(3)]
    layout = VectorLayout(starts[-1], tuple(runs), ((0, starts[-1]),))
    return layout, [vector for vector in vectors if vector]


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(cut=cut_vectors(), size=st.sampled_from([2, 3, 5, 6]), keep_padding=st.booleans(), seed=st.integers(0, 99))
def test_any_vectors_on_any_number_of_ranks_are_exchanged_as_the_reference_does(cut, size, keep_padding, seed):
    layout, vectors = cut
    order = order_of(vectors)
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for _ in range(4):
        full = [torch.zeros(layout.numel, dtype=torch.float64) for _ in range(size)]
        for x in full:
            x[order] = torch.randn(len(order), generator=generator, dtype=torch.float64)
        rounds.append(full)
    lengths = [sum(b - a for a, b in runs) for runs in vectors]
    reference = DeepSpeedExchange(lengths, size, keep_padding=keep_padding)
    like = rounds[0][0]
    results = run(size, rounds, lambda g: deepspeed_reducer(g, layout, vectors, like, keep_padding=keep_padding))
    for at, ranks in enumerate(rounds):
        expected = reference([x[order] for x in ranks], "z")
        torch.testing.assert_close(results[-1][0][at][order], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            results[0][1][at][order], reference.errors["z"].residual()[reference.live], rtol=0, atol=1e-12
        )
