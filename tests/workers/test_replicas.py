"""Replicas and data are compared by hash, and who differs is named alike on every rank."""

import pytest
import torch

from thinwire.comm import run_threads
from thinwire.optim import Adam
from thinwire.workers.replicas import ranks_at_fault, ranks_that_differ, replicas_bit_equal


def test_one_flipped_bit_on_one_rank_is_seen_by_all():
    def work(group):
        optimizer = Adam(torch.nn.Linear(5, 3).parameters(), group=group)
        before = replicas_bit_equal(optimizer, group)
        if group.rank == 1:
            optimizer.vectors.v_N[2] = -0.0  # equal to 0.0 for arithmetic, not in its bits
        return before, replicas_bit_equal(optimizer, group)

    assert run_threads(3, work) == [(True, False)] * 3


def test_the_ranks_that_differ_from_rank_0_are_named():
    def work(group):
        return ranks_that_differ(group, b"same" if group.rank != 2 else b"else", torch.device("cpu"))

    assert run_threads(4, work) == [[2]] * 4


@pytest.mark.parametrize(
    ("held", "at_fault"),
    [
        ("aaaa", ()),
        ("aaba", (2,)),
        ("baaaa", (0,)),
        ("abaca", (1, 3)),
        ("ab", (0, 1)),
        ("aabb", (0, 1, 2, 3)),
        ("abc", (0, 1, 2)),
        ("abcaa", (1, 2)),
    ],
)
def test_at_fault_is_who_does_not_hold_what_most_hold_and_where_no_majority_does_all_are(held, at_fault):
    def work(group):
        return ranks_at_fault(group, held[group.rank].encode(), torch.device("cpu"))

    assert run_threads(len(held), work) == [at_fault] * len(held)
