"""What a dataset draws at random follows from the sample's number, whoever draws it and whatever was drawn before."""

import random

import numpy as np
import pytest
import torch

from thinwire.train import seeded
from thinwire.workers.data.feed import feed_of


class Drawn(torch.utils.data.Dataset):
    """Its samples draw from all three sources that transforms draw from."""

    def __init__(self, size=6):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return i, torch.rand(()).item(), random.random(), np.random.rand()


def run(workers, loader=0, epochs=2, start=1):
    """All samples from step `start` on, in the order of the run."""
    feeds = [
        feed_of(
            seeded(Drawn(), 3),
            3,
            steps=None,
            epochs=epochs,
            shuffle=True,
            seed=1,
            loader={"num_workers": loader, "collate_fn": list},
        )
        for _ in range(workers)
    ]
    shares = [feed.shares(start, rank, workers) for rank, feed in enumerate(feeds)]
    return [sample for step in zip(*shares, strict=True) for share in step for sample in share.batch]


def test_a_sample_is_drawn_alike_by_any_number_of_workers_and_processes_and_after_a_resume():
    alone = run(1)
    torch.rand(7), random.random(), np.random.rand()
    assert run(3) == alone
    assert run(1, loader=2) == alone
    assert run(1, start=3) == alone[6:]


def test_each_visit_draws_anew():
    samples = run(1, epochs=4)
    for i in range(6):
        assert len({drawn for number, *drawn in map(tuple, samples) if number == i for drawn in [tuple(drawn)]}) == 4


def test_what_was_drawn_leaves_no_trace():
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(()).item(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    data = seeded(Drawn())
    assert data[2] == data[2]
    assert data.visit(2, 9) == data.visit(2, 9) != data[2]
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected


def test_nor_does_one_that_raises():
    class Broken(Drawn):
        def __getitem__(self, i):
            torch.rand(())
            raise OSError("no such image")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="no such image"):
        seeded(Broken())[0]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sample_has_one_drawing_whatever_names_it():
    data = seeded(Drawn(6))
    assert data[5] == data[-1] == data[np.int64(5)] == data[torch.tensor(5)]
    with pytest.raises(IndexError):
        data[6]


def test_a_run_knows_what_is_seeded_and_how():
    def told(seed):
        feed = feed_of(seeded(Drawn(), seed), 3, steps=1, epochs=None, shuffle=True, seed=1, loader={})
        return feed.data

    assert told(3) == "Drawn, seeded with 3, of 6 samples"
    assert told(4) != told(3)


def test_what_cannot_be_seeded_is_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(range(3))

    with pytest.raises(TypeError, match=r"seeded\(Stream\): give a dataset with len\(\) and \[i\]"):
        seeded(Stream())
    with pytest.raises(TypeError, match=r"seeded\(Seeded\): it has visit\(i, number\)"):
        seeded(seeded(Drawn()))


def test_seeds_differ_and_a_stream_is_refused():
    assert seeded(Drawn(), 1)[0] != seeded(Drawn(), 2)[0]
    assert len(seeded(Drawn(4))) == 4
    with pytest.raises(TypeError, match=r"seeded\(list_iterator\): give a dataset with len\(\) and \[i\]"):
        seeded(iter([1]))
