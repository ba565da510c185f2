from __future__ import annotations

import pytest

from thinwire.comm.wire.ledger import Frames, HeaderModel


def test_ordinary_ethernet_carries_1448_bytes_behind_66() -> None:
    assert (HeaderModel().mss, HeaderModel().frame) == (1448, 66)
    assert HeaderModel(ip=40).mss == 1428


def test_one_full_segment_is_one_frame_and_its_notice_another() -> None:
    headers = HeaderModel()
    assert headers.forward(1448 - 48, 1) == Frames(2, 1448 + 66 + 48 + 66)
    assert headers.forward(1448 - 47, 1) == Frames(3, 1449 + 2 * 66 + 48 + 66)


def test_a_receiver_answers_with_a_notice_a_message_and_an_ack_for_some_segments() -> None:
    headers = HeaderModel(segments_per_ack=2)
    assert headers.backward(4 * 1448 - 48, 1) == Frames(1 + 2, 48 + 66 + 2 * 66)
    assert headers.backward(0, 0) == Frames() == headers.forward(0, 0)


def test_frames_of_an_all_to_all_are_those_that_were_counted() -> None:
    """Per step and host over gloo, 1 Gbit/s: 2 hosts, a row of 1 MB; 3 messages of 33 KB and more in a ring."""
    headers = HeaderModel()

    def predicted(num_bytes: int, messages: int) -> float:
        return (headers.forward(num_bytes, messages) + headers.backward(num_bytes, messages)).num_bytes

    assert predicted(1_000_000, 1) == pytest.approx(1_047_790, rel=0.01)  # all_to_all, 2 hosts
    assert predicted(300_000, 6) == pytest.approx(316_150, rel=0.01)  # all_gather, 4 hosts
    assert predicted(600_000, 12) == pytest.approx(632_183, rel=0.01)  # all_reduce of 400 KB, 4 hosts
    assert predicted(15_000_000, 18) == pytest.approx(15_703_902, rel=0.01)  # all_reduce of 10 MB, 4 hosts


@pytest.mark.parametrize(("segments_per_ack", "most"), [(2, 0.017), (45, 0.005)])
def test_the_guess_at_acknowledgements_moves_the_sum_no_more_than_it_says(segments_per_ack: int, most: float) -> None:
    guessed, other = HeaderModel(), HeaderModel(segments_per_ack=segments_per_ack)
    forward = guessed.forward(10**8, 10).num_bytes
    difference = abs(other.backward(10**8, 10).num_bytes - guessed.backward(10**8, 10).num_bytes)
    assert difference / forward <= most


@pytest.mark.parametrize(
    ("field", "value"), [("mtu", 0), ("mtu", 50), ("gloo", -1), ("segments_per_ack", 0), ("ip", 2.5)]
)
def test_sizes_that_cannot_be_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"headers\.{field}"):
        HeaderModel(**{field: value})  # type: ignore[arg-type]
