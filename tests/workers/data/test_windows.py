import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.workers.data.corpus import DataError
from thinwire.workers.data.windows import Windows, validation_windows

WORLD_SIZES = (1, 2, 3, 4, 8)


def text(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("step", [1, 2, 7, 50])
def test_union_over_ranks_is_the_same_global_batch_for_any_world_size(world_size: int, step: int) -> None:
    batches = Windows(text(1000), context=16, global_batch=13, seed=3)
    inputs, targets = batches.local(step, 0, 1)
    parts = [batches.local(step, rank, world_size) for rank in range(world_size)]
    assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
    assert torch.equal(torch.cat([part[1] for part in parts]), targets)


def test_targets_are_the_inputs_one_byte_on() -> None:
    tokens = text(500)
    batches = Windows(tokens, context=10, global_batch=6, seed=0)
    inputs, targets = batches.local(1, 0, 1)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6, 10)
    for row, window in enumerate(batches.order.samples(range(6)).tolist()):
        assert inputs[row].tolist() == tokens[window * 10 : window * 10 + 10].tolist()
        assert targets[row].tolist() == tokens[window * 10 + 1 : window * 10 + 11].tolist()


def test_a_rank_beyond_the_batch_gets_an_empty_share() -> None:
    inputs, targets = Windows(text(100), context=9, global_batch=2, seed=0).local(1, 2, 3)
    assert inputs.shape == targets.shape == (0, 9)


def test_text_too_short_for_the_context_is_an_error_with_both_sizes() -> None:
    Windows(text(33), context=32, global_batch=2, seed=0)
    with pytest.raises(DataError, match=r"training text has 32 bytes; recipe.context = 32 needs at least 33"):
        Windows(text(32), context=32, global_batch=2, seed=0)
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
