"""Signals wait for a moment at which they may raise, and find their handlers afterwards."""

import signal
import threading

import pytest

from thinwire.comm.signals import armed, deferred


@pytest.fixture
def handled():
    """What a handler of one's own has seen; SIGINT raises as usual."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_a_signal_waits_for_the_end(handled):
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - when it comes is what is tested
        with deferred():
            with deferred():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
            handled.append("after the inner one")
        handled.append("never")
    assert sorted(map(str, handled)) == [str(int(signal.SIGTERM)), "after the inner one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_armed_part_raises_what_was_noted_and_what_comes():
    reached = []
    with deferred():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), armed():
            reached.append("never")
        with pytest.raises(KeyboardInterrupt), armed():
            signal.raise_signal(signal.SIGINT)
    assert not reached


def test_what_must_not_be_cut_again_waits_even_where_it_waits_for_others():
    with pytest.raises(KeyboardInterrupt), deferred():  # noqa: PT012
        with deferred(to_the_end=True), armed():
            signal.raise_signal(signal.SIGINT)
        with armed():
            raise AssertionError("it was to raise before")


def test_other_threads_have_no_signals_to_wait_for():
    def work():
        with deferred(), armed():
            return

    thread = threading.Thread(target=work)
    with deferred():
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
