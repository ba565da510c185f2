import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.workers.data.corpus import Corpus, Windows, spread
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.data.order import generator
from thinwire.workers.recipes.bert import IGNORED, MASK, MaskedWindows, mask, masked, num_masked


def text(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def corpus(num_bytes: int = 2000) -> Corpus:
    return Corpus(text(num_bytes), text(500, 1), "00" * 32)


def feed(num_bytes: int, context: int, global_batch: int, seed: int) -> MapFeed:
    return MapFeed(MaskedWindows(Windows(corpus(num_bytes), context), seed), global_batch, 99, seed=seed)


@given(context=st.integers(2, 300), seed=st.integers(0, 99))
def test_every_window_has_the_same_number_of_targets_whatever_is_drawn(context: int, seed: int) -> None:
    window = text(context).long()
    inputs, targets = mask(window, generator(seed))
    predicted = targets != IGNORED
    assert int(predicted.sum()) == num_masked(context) == max(1, round(0.15 * context))
    assert torch.equal(targets[predicted], window[predicted])
    assert torch.equal(inputs[~predicted], window[~predicted])
    assert torch.equal(window, text(context).long())


def test_of_the_targets_eight_tenths_read_mask_one_tenth_a_random_byte_one_tenth_themselves() -> None:
    window = torch.full((1000,), 7)
    drawn = [mask(window, generator(seed)) for seed in range(100)]
    seen = torch.cat([inputs[targets != IGNORED] for inputs, targets in drawn])
    assert (seen == MASK).double().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (seen == 7).double().mean().item() == pytest.approx(0.1 + 0.1 / 256, abs=0.01)
    others = seen[(seen != MASK) & (seen != 7)]
    assert others.unique().numel() == 255


def test_every_position_is_as_likely_to_be_masked() -> None:
    counts = sum((mask(torch.zeros(20).long(), generator(seed))[1] != IGNORED).long() for seed in range(4000))
    assert isinstance(counts, torch.Tensor)
    assert bool(((counts / 4000 - 0.15).abs() < 0.03).all())


def test_masks_are_drawn_anew_in_every_epoch_and_for_every_seed() -> None:
    def targets_of_window_0(seed: int, epoch: int) -> torch.Tensor:
        batches = feed(4 * 64 + 1, context=64, global_batch=4, seed=seed)
        order = batches.order.samples(batches.numbers(epoch, 0, 1))
        return batches.share(epoch, 0, 1).batch[1][order == 0][0]

    drawn = {tuple(targets_of_window_0(seed, epoch).tolist()) for seed in (0, 1) for epoch in (1, 2, 3)}
    assert len(drawn) == 6


def test_validation_masks_are_always_the_same() -> None:
    windows = spread(Windows(corpus(), 16, "validation"), 9)
    one, other = ([torch.stack(part) for part in zip(*masked(windows), strict=True)] for _ in range(2))
    assert one[0].shape == (9, 16)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert (one[1] != IGNORED).sum(dim=1).tolist() == [num_masked(16)] * 9
