"""What a step asks of the driver on a GPU, on a played one (benchmarks/host): a bucket costs as few calls as it may."""

import pytest

from benchmarks.host_cost import FEW, MANY, ROOT, Child
from tests.once import once


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    def make(_):
        child = Child(ROOT)
        try:
            return [child.ask("1-bit Adam", buckets)["calls"] for buckets in (FEW, MANY)]
        finally:
            child.end()

    return dict(zip((FEW, MANY), once(tmp_path_factory, "host_cost", make), strict=True))


@pytest.mark.slow
def test_where_nothing_overlaps_events_and_streams_are_those_of_a_step_whatever_the_buckets(calls):
    assert calls[FEW]["events"] == calls[MANY]["events"] <= 7
    assert calls[FEW]["streams"] == calls[MANY]["streams"] <= 4


@pytest.mark.slow
def test_a_bucket_is_three_launches_two_operations_of_torch_and_two_collectives(calls):
    more = {kind: (calls[MANY][kind] - calls[FEW][kind]) / (MANY - FEW) for kind in ("launches", "operations")}
    assert more == {"launches": 3, "operations": 2}
    assert calls[MANY]["collectives"] == 2 * MANY
