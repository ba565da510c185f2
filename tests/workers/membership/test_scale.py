"""What a job's membership costs grows no faster than its workers: messages, and bytes through the server."""

import pytest

from benchmarks.control_plane.simulated import exponent, measure

SIZES = [16, 32, 64]
MOST = 1.15
"""A power of n. One message more to each for each of the others is 2."""


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["a death", "server", "half"])
def test_messages_and_bytes_grow_no_faster_than_the_workers(case):
    found = [measure(case, n) for n in SIZES]
    for figure in ("messages", "server_sent_bytes", "server_received_bytes"):
        values = [row[figure] for row in found]
        if case == "server" and figure == "server_received_bytes":  # but for the seats, which a few tell
            values = [v - row["kinds"]["own_seat"] * row["largest_bytes"] for v, row in zip(values, found, strict=True)]
        assert exponent(SIZES, values) <= MOST, (figure, values)


def test_deaths_of_many_at_once_are_told_in_two_messages_to_each():
    row = measure("ten deaths", 40)
    assert row["generations"] == 1
    assert row["kinds"]["lost_peers"] <= 2 * 39
    assert row["kinds"]["seating"] == 30
