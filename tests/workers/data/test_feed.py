"""Which samples a worker is given: each of an epoch once, whoever comes and goes, weighed so that the mean is right."""

from collections import Counter
from fractions import Fraction

import pytest
import torch

from thinwire.workers.data.feed import feed_of, own_part


class Map(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return torch.tensor(i)


class Stream(torch.utils.data.IterableDataset):
    """reads: samples that were read so far."""

    def __init__(self, size):
        self.size, self.reads = size, 0

    def __iter__(self):
        for i in range(self.size):
            self.reads += 1
            yield torch.tensor(i)


class Placed(Stream):
    """Says where it is, and goes on from there."""

    at = 0

    def __iter__(self):
        while self.at < self.size:
            self.reads += 1
            self.at += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def feed(dataset, batch, **given):
    known = {"steps": None, "epochs": None, "shuffle": True, "seed": 1, "loader": {}}
    return feed_of(dataset, batch, **{**known, **given})


def test_weights_make_the_mean_over_workers_that_over_the_samples():
    for samples in range(1, 9):
        for size in range(1, 9):
            counted = Counter()
            for rank in range(size):
                positions, weight = own_part(samples, rank, size)
                for position in positions:
                    counted[position] += Fraction(weight).limit_denominator(1000) / len(positions) / size
            assert counted == {position: Fraction(1, samples) for position in range(samples)}


def drawn(feeds, sizes):
    """What is given out over steps whose number of workers is `sizes`; a change makes everything anew."""
    found, shares, before = [], [], None
    for step, size in enumerate(sizes, 1):
        if size != before:
            shares = [feeds[rank].shares(step, rank, size) for rank in range(size)]
            before = size
        given = [next(one, None) for one in shares]
        found.append([number for share in given if share is not None for number in share.batch.tolist()])
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_map_style_dataset_gives_the_same_steps_to_any_workers(shuffle):
    sizes = [1, 1, 3, 3, 2, 5, 5, 1, 4, 4]
    moved = drawn([feed(Map(11), 5, steps=10, shuffle=shuffle) for _ in range(5)], sizes)
    assert moved == drawn([feed(Map(11), 5, steps=10, shuffle=shuffle)], [1] * 10)
    flat = [number for step in moved for number in step]
    assert [sorted(flat[at : at + 11]) for at in (0, 11, 22, 33)] == [list(range(11))] * 4
    assert (flat[:11] == sorted(flat[:11])) == (not shuffle)


def test_an_epoch_ends_with_what_is_left():
    one = feed(Map(11), 4, epochs=2)
    assert one.last == 6
    assert [one.samples(step) for step in range(1, 7)] == [4, 4, 4, 4, 4, 2]
    flat = [number for share in one.shares(1, 0, 1) for number in share.batch.tolist()]
    assert Counter(flat) == dict.fromkeys(range(11), 2)


def test_processes_and_a_collate_function_of_ones_own_give_the_same():
    plain = [share.batch for share in feed(Map(9), 4, steps=3).shares(1, 0, 2)]
    loader = {"num_workers": 1, "collate_fn": list}
    assert [share.batch for share in feed(Map(9), 4, steps=3, loader=loader).shares(1, 0, 2)] == [
        list(batch) for batch in plain
    ]


@pytest.mark.parametrize("kind", [Stream, Placed])
def test_a_stream_gives_its_samples_in_order_to_any_workers(kind):
    sizes = [1, 1, 3, 3, 2, 2, 3]
    feeds = [feed(kind(11), 3, epochs=2) for _ in range(3)]
    found = drawn(feeds, sizes)
    assert [number for step in found for number in step] == [*range(11), *range(10)]
    assert feeds[0].last is None
    drawn(feeds, [1])
    late = feeds[0].shares(8, 0, 1)
    assert next(late).batch.tolist() == [10]
    assert feeds[0].last == 8
    assert next(late, None) is None


@pytest.mark.parametrize(("kind", "reads"), [(Stream, 10), (Placed, 4)])
def test_a_stream_that_says_where_it_is_need_not_be_read_again(kind, reads, caplog):
    here, newcomer = feed(kind(20), 3), feed(kind(20), 3)
    shares = here.shares(1, 0, 1)
    assert [next(shares).batch.tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    newcomer.load_state_dict(here.state_dict())
    assert next(newcomer.shares(3, 0, 1)).batch.tolist() == [6, 7, 8]
    assert newcomer._dataset.reads == reads
    assert ("stream_replayed samples=6" in caplog.text) == (kind is Stream)


def test_a_step_that_is_given_out_again_is_not_read_again():
    one = feed(Stream(9), 4)
    first = next(one.shares(1, 0, 1)).batch.tolist()
    assert [next(one.shares(1, rank, 2)).batch.tolist() for rank in range(2)] == [first[:2], first[2:]]
    assert one._dataset.reads == 5


@pytest.mark.parametrize(
    ("dataset", "given", "told"),
    [
        (torch.utils.data.DataLoader(Map(3)), {}, "give it the dataset itself"),
        (iter([1, 2]), {}, "can be read only once"),
        (7, {}, "was given a int"),
        (Map(0), {}, "no samples"),
        (Map(3), {"loader": {"batch_size": 3}}, "batch_size"),
        (Map(3), {"steps": 0}, "steps = 0"),
        (Map(3), {"steps": 2.5}, "steps=2.5.*whole number"),
        ({"x": torch.zeros(3), "y": torch.zeros(3)}, {}, "was given a dict.*StackDataset"),
        (Stream(3), {"loader": {"num_workers": 2}}, "num_workers = 2"),
    ],
)
def test_what_cannot_be_fed_is_refused_with_what_to_do(dataset, given, told):
    with pytest.raises((TypeError, ValueError), match=told):
        feed(dataset, 2, **given)


class Counted(torch.utils.data.IterableDataset):
    """As many iterable datasets are: it tells its length."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(5))


def test_an_iterable_dataset_that_tells_its_length_is_iterated_over():
    assert [share.batch.tolist() for share in feed(Counted(), 2).shares(1, 0, 1)] == [[0, 1], [2, 3], [4]]


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="step 0 has no batch"):
        feed(Map(25), 2).numbers(0, 0, 1)
