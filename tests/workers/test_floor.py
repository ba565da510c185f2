"""Generations are numbered on from what the checkpoints of a run tell, when nothing else of it is left."""

import logging

import pytest
import torch

from tests.workers.membership.members import BEAT_S, SECRET, Job, identity
from thinwire.workers.forming.group import ElasticRanks
from thinwire.workers.forming.pairs import Door
from thinwire.workers.membership.member import Member
from thinwire.workers.membership.state import Fenced


@pytest.fixture
def worker():
    """`worker(floor)`: the ranks of one that comes to a new membership, and the member in them."""
    job, opened = Job(), []

    def make(floor):
        job.serve(1, 1)
        door = Door("127.0.0.1", SECRET)
        member = Member(lambda: job.server.address, SECRET, identity(0), beat_s=BEAT_S)
        opened.extend((member, door))
        return ElasticRanks(member, door, torch.device("cpu"), floor=floor), member

    yield make
    for one in opened:
        one.close()
    job.close()


def test_the_first_generation_of_a_new_membership_is_above_all_that_have_saved(worker):
    ranks, _ = worker(lambda: 41)
    ranks.form(0, False, {})
    assert ranks.seat.generation == 42


def test_a_place_that_cannot_be_listed_for_a_moment_ends_no_worker(worker, caplog):
    def away():
        raise OSError("the store is away")

    ranks, _ = worker(away)
    with caplog.at_level(logging.WARNING):
        ranks.form(0, False, {})
    assert ranks.seat.generation == 1
    assert "generations_not_read reason=the store is away" in caplog.text


def test_whoever_was_fenced_is_told_so_where_it_would_commit(worker):
    ranks, member = worker(lambda: 0)
    ranks.form(0, False, {})
    assert member.wait_to_commit(5.0)
    assert ranks.may_commit()
    with member._state.changed:
        member._state.end(Fenced("the others have gone on"))
    with pytest.raises(Fenced, match="the others have gone on"):
        ranks.may_commit()
