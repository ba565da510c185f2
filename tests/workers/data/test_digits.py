import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.workers.data.corpus import DataError, Sample
from thinwire.workers.data.feed import MapFeed
from thinwire.workers.recipes.resnet import Images, ShiftedImages, as_images, load_digits, split


def feed(images: Images, shift: int = 1, seed: int = 0, global_batch: int = 32) -> MapFeed:
    return MapFeed(ShiftedImages(images, shift, seed), global_batch, 99, seed=seed)


def made_up(num: int = 23) -> Images:
    drawn = torch.Generator().manual_seed(0)
    pixels = torch.randint(1, 17, (num, 8, 8), dtype=torch.uint8, generator=drawn)
    return Images(pixels, torch.arange(num) % 10, "00" * 32)


def columns(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.stack(labels)


def test_all_digits_are_there_as_images_from_0_to_1() -> None:
    train, validation = load_digits(1 / 3)
    images, labels = columns(validation.first(1000))
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert images.shape == (599, 1, 8, 8)
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert (len(train.labels), train.digest) == (1198, validation.digest)
    batch = feed(train).share(1, 0, 1).batch
    assert batch[0].shape == (32, 1, 8, 8)
    assert batch[0].dtype == torch.float32
    assert batch[1].shape == (32,)


@given(fraction=st.floats(0.01, 0.99), num=st.integers(1, 300))
def test_every_image_is_on_one_side_and_the_classes_are_cut_alike(fraction: float, num: int) -> None:
    labels = torch.arange(num) % 10
    train, validation = split(labels, fraction)
    assert torch.cat([train, validation]).sort().values.tolist() == list(range(num))
    for label in range(10):
        of_class = int((labels == label).sum())
        assert int((labels[validation] == label).sum()) == round(fraction * of_class)


def test_a_larger_fraction_only_moves_images_to_the_validation_side() -> None:
    labels = torch.arange(200) % 10
    small, large = (set(split(labels, fraction)[1].tolist()) for fraction in (0.2, 0.5))
    assert small < large


def test_the_split_is_always_the_same_and_its_digest_tells_it() -> None:
    one, other = load_digits(1 / 3), load_digits(1 / 3)
    assert torch.equal(one[1].pixels, other[1].pixels)
    assert torch.equal(one[1].labels, other[1].labels)
    assert one[0].digest == one[1].digest == other[0].digest != load_digits(0.5)[0].digest


def test_few_validation_images_are_the_first_of_many_and_of_all_classes() -> None:
    validation = load_digits(1 / 3)[1]
    few, many = columns(validation.first(64)), columns(validation.first(1000))
    assert torch.equal(few[0], many[0][:64])
    assert few[1].unique().tolist() == list(range(10))


def test_without_a_shift_an_epoch_is_the_images_as_they_are() -> None:
    made = made_up()
    batches = feed(made, shift=0, global_batch=23)
    images, targets = batches.share(1, 0, 1).batch
    order = batches.order.samples(range(23))
    assert torch.equal(images, as_images(made.pixels[order]))
    assert torch.equal(targets, made.labels[order])


def test_a_shifted_image_is_the_image_moved_in_by_background() -> None:
    made = made_up(1)
    images, _ = feed(made, shift=2, global_batch=400).share(1, 0, 1).batch
    whole = as_images(made.pixels)[0, 0]
    moves = set()
    for image in images[:, 0]:
        rows, columns = image.nonzero().min(dim=0).values.tolist(), image.nonzero().max(dim=0).values.tolist()
        moves.add((rows[0] - (7 - columns[0]), rows[1] - (7 - columns[1])))
        down, right = rows[0] - (7 - columns[0]), rows[1] - (7 - columns[1])
        moved = torch.zeros(12, 12)
        moved[2 + down : 10 + down, 2 + right : 10 + right] = whole
        assert torch.equal(image, moved[2:10, 2:10])
    assert moves == {(down, right) for down in range(-2, 3) for right in range(-2, 3)}


def test_shifts_are_drawn_anew_in_every_epoch_and_for_every_seed() -> None:
    made = made_up(8)

    def seen(seed: int, epoch: int) -> torch.Tensor:
        batches = feed(made, shift=3, global_batch=8, seed=seed)
        order = batches.order.samples(batches.numbers(epoch, 0, 1))
        return batches.share(epoch, 0, 1).batch[0][order.argsort()]

    drawn = [seen(seed, epoch) for seed in (0, 1) for epoch in (1, 2)]
    assert not any(torch.equal(drawn[i], drawn[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize(("fraction", "part"), [(0.0001, "validation"), (0.9999, "training")])
def test_a_fraction_that_leaves_a_part_empty_is_refused(fraction: float, part: str) -> None:
    with pytest.raises(DataError, match=f"the {part} part of the 1797 digits is empty"):
        load_digits(fraction)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r'pip install "thinwire\[vision\]"'):
        load_digits(1 / 3)
