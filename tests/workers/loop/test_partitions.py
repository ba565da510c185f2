"""A network that splits while all workers live: one group at most goes on, and gives up a step at most.

That one is the step that was running when a worker was fenced that still reached its peers: it alone may have finished.
"""

from dataclasses import replace

import pytest

from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from tests.workers.loop.elastic_job import Times
from tests.workers.loop.partitions import CUTS, cut_for

pytestmark = pytest.mark.usefixtures("namespaces")
SHARE = 0.2
LEFT_OUT = {
    "one of three": [2],
    "two of three, the membership with the one": [1, 2],
    "two of four": [2, 3],
    "the membership's host alone": [],
    "the way of one of three to the membership": [2],
    "what one of three sends": [2],
    "what is sent to one of three": [2],
    "one pair of three": [2],
    "one pair of three, one direction": [2],
}
"""Of a cut that is longer than all that the rules wait for. Of a pair, the higher rank."""


def test_of_a_pair_that_cannot_talk_one_is_left_out_and_named(tmp_path):
    """Nobody is silent: a collective's time-out ends the generation, and forming the next one finds the pair."""
    times = replace(Times(), beat_s=0.2, collective_s=1.0, connect_s=0.3)
    found = cut_for(CUTS["one pair of three, one direction"], None, times, tmp_path, settle_steps=3)
    assert found.fenced in ([1], [2])  # the higher rank of the two
    assert "cannot reach it (" in found.reasons[0]  # why not differs: whether it was asked, and how often, in time
    assert found.given_up == 0


def test_a_pair_that_is_cut_in_a_step_does_not_wait_for_the_time_out_of_a_collective(tmp_path):
    times = replace(Times().of(SHARE), collective_s=600.0, unreachable_s=1.0)
    found = cut_for(CUTS["one pair of three"], None, times, tmp_path, settle_steps=3)
    assert (found.went_on, found.fenced) == ([0, 1], [2])
    assert "gives no answer (ETIMEDOUT)" in found.reasons[0]
    assert found.given_up == 0


@pytest.mark.slow
@pytest.mark.parametrize("length_s", [5, 30, 120])
@pytest.mark.parametrize("name", CUTS)
def test_one_group_at_most_goes_on_and_who_is_left_out_is_as_said(tmp_path, name, length_s):
    """All times are a fifth of a job's, the cut's too."""
    found = cut_for(CUTS[name], SHARE * length_s, Times().of(SHARE), tmp_path, pause_s=0.1)
    minority = name == "two of three, the membership with the one"
    if length_s == 5 or (minority and length_s == 30):  # shorter than what the rules wait for
        assert (found.went_on, found.fenced) == ([], [])
    else:
        assert found.fenced == LEFT_OUT[name]
        assert not set(found.went_on) & set(found.fenced)
        assert (found.went_on == []) == (found.fenced == [])
    assert found.given_up <= (name == "the way of one of three to the membership")
