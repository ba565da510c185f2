import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.workers.data.batches import Batches, share, validation_windows
from thinwire.workers.data.corpus import DataError

WORLD_SIZES = (1, 2, 3, 4, 8)


def text(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(global_batch=st.integers(1, 200), world_size=st.integers(1, 64))
def test_shares_cut_the_batch_in_order_and_differ_by_at_most_one(global_batch: int, world_size: int) -> None:
    shares = [share(global_batch, rank, world_size) for rank in range(world_size)]
    assert [i for part in shares for i in part] == list(range(global_batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_share_of_a_rank_that_is_not_there_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of world_size = {world_size}"):
        share(4, rank, world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("step", [1, 2, 7, 50])
def test_union_over_ranks_is_the_same_global_batch_for_any_world_size(world_size: int, step: int) -> None:
    batches = Batches(text(1000), context=16, global_batch=13, seed=3)
    inputs, targets = batches.local(step, 0, 1)
    parts = [batches.local(step, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)


@given(
    num_windows=st.integers(1, 40),
    global_batch=st.integers(1, 50),
    num_epochs=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_every_window_is_used_exactly_once_an_epoch(
    num_windows: int, global_batch: int, num_epochs: int, seed: int
) -> None:
    batches = Batches(text(num_windows * 4 + 1), context=4, global_batch=global_batch, seed=seed)
    assert batches.num_windows == num_windows
    num_steps = -(-num_windows * num_epochs // global_batch)
    used = torch.cat([batches.window_ids(step) for step in range(1, num_steps + 1)])
    for epoch in range(num_epochs):
        in_epoch = used[epoch * num_windows : (epoch + 1) * num_windows]
        assert in_epoch.sort().values.tolist() == list(range(num_windows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(Batches(text(401), context=4, global_batch=100, seed=seed).window_ids(step).tolist())
        for seed in (0, 1, 2)
        for step in (1, 2, 3)
    }
    assert len(orders) == 9


def test_position_is_a_function_of_seed_and_step_alone() -> None:
    asked_in_order = Batches(text(999), context=8, global_batch=50, seed=1)
    in_order = [asked_in_order.window_ids(step) for step in range(1, 30)]
    resumed = Batches(text(999), context=8, global_batch=50, seed=1)
    for step in (29, 3, 17, 1, 28, 2):
        assert torch.equal(resumed.window_ids(step), in_order[step - 1])


def test_global_rng_is_neither_used_nor_moved() -> None:
    batches = Batches(text(999), context=8, global_batch=5, seed=1)
    torch.manual_seed(1)
    first, state = batches.window_ids(1), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(Batches(text(999), context=8, global_batch=5, seed=1).window_ids(1), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_targets_are_the_inputs_one_byte_on() -> None:
    tokens = text(500)
    batches = Batches(tokens, context=10, global_batch=6, seed=0)
    inputs, targets = batches.local(1, 0, 1)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6, 10)
    for row, window in enumerate(batches.window_ids(1).tolist()):
        assert inputs[row].tolist() == tokens[window * 10 : window * 10 + 10].tolist()
        assert targets[row].tolist() == tokens[window * 10 + 1 : window * 10 + 11].tolist()


def test_a_rank_beyond_the_batch_gets_an_empty_share() -> None:
    inputs, targets = Batches(text(100), context=9, global_batch=2, seed=0).local(1, 2, 3)
    assert inputs.shape == targets.shape == (0, 9)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step 0 has no batch"):
        Batches(text(100), context=4, global_batch=2, seed=0).window_ids(0)


def test_text_too_short_for_the_context_is_an_error_with_both_sizes() -> None:
    Batches(text(33), context=32, global_batch=2, seed=0)
    with pytest.raises(DataError, match=r"training text has 32 bytes; recipe.context = 32 needs at least 33"):
        Batches(text(32), context=32, global_batch=2, seed=0)
    with pytest.raises(DataError, match=r"validation text has 0 bytes; recipe.context = 32 needs at least 33"):
        validation_windows(text(0), 32, 4)


@given(num_windows=st.integers(1, 60), num=st.integers(1, 80))
def test_validation_windows_are_distinct_in_order_and_evenly_spread(num_windows: int, num: int) -> None:
    context = 4
    tokens = torch.arange(num_windows * context + 1) // context  # window w begins with w (up to 256 windows)
    inputs, targets = validation_windows(tokens.to(torch.uint8), context, num)
    starts = inputs[:, 0]
    assert len(starts) == min(num, num_windows)
    gaps = starts.diff()
    assert bool((gaps > 0).all())
    assert len(gaps) == 0 or int(gaps.max() - gaps.min()) <= 1
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_validation_windows_are_always_the_same() -> None:
    one, other = (validation_windows(text(5000), 16, 20) for _ in range(2))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
