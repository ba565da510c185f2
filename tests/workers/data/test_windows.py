import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.workers.data.corpus import Corpus, DataError, Windows, spread
from thinwire.workers.data.feed import MapFeed

WORLD_SIZES = (1, 2, 3, 4, 8)


def text(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def corpus(train: torch.Tensor, validation: torch.Tensor | None = None) -> Corpus:
    return Corpus(train, text(0) if validation is None else validation, "00" * 32)


def test_targets_are_the_inputs_one_byte_on() -> None:
    tokens = text(500)
    feed = MapFeed(Windows(corpus(tokens), context=10), 6, 50)
    inputs, targets = feed.share(1, 0, 1).batch
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6, 10)
    for row, window in enumerate(feed.order.samples(range(6)).tolist()):
        assert inputs[row].tolist() == tokens[window * 10 : window * 10 + 10].tolist()
        assert targets[row].tolist() == tokens[window * 10 + 1 : window * 10 + 11].tolist()


def test_text_too_short_for_the_context_is_an_error_with_both_sizes() -> None:
    Windows(corpus(text(33)), context=32)
    with pytest.raises(DataError, match=r"training text has 32 bytes; recipe.context = 32 needs at least 33"):
        Windows(corpus(text(32)), context=32)
    with pytest.raises(DataError, match=r"validation text has 0 bytes; recipe.context = 32 needs at least 33"):
        Windows(corpus(text(33)), 32, "validation")


@pytest.mark.parametrize("window", [-1, 31])
def test_a_window_that_is_not_there_is_an_index_error(window: int) -> None:
    with pytest.raises(IndexError, match=f"window {window} of 31"):
        Windows(corpus(text(1000)), context=32)[window]


@given(num_windows=st.integers(1, 60), num=st.integers(1, 80))
def test_validation_windows_are_distinct_in_order_and_evenly_spread(num_windows: int, num: int) -> None:
    context = 4
    tokens = torch.arange(num_windows * context + 1) // context  # window w begins with w (up to 256 windows)
    windows = spread(Windows(corpus(text(9), tokens.to(torch.uint8)), context, "validation"), num)
    inputs, targets = (torch.stack(part) for part in zip(*windows, strict=True))
    starts = inputs[:, 0]
    assert len(starts) == min(num, num_windows)
    gaps = starts.diff()
    assert bool((gaps > 0).all())
    assert len(gaps) == 0 or int(gaps.max() - gaps.min()) <= 1
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
