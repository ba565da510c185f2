"""Faults planted into the exchange on streams, each a wait or a look that is missing. Every one must be found."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from thinwire.comm.exchange import pipeline
from thinwire.comm.exchange.exchange import Exchange
from thinwire.comm.exchange.node_first import NodeCoder
from thinwire.comm.exchange.pipeline import DeviceGate, SidePipeline


def no_event_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def fed(self: Any) -> Any:
        with self._streams.on(self._side):
            yield

    monkeypatch.setattr(SidePipeline, "fed", fed)


def no_wait_before_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Exchange._serve

    def at_once(self: Any, k: int) -> None:
        hold = self._pipeline.hold
        self._pipeline.hold = lambda pending: None
        try:
            serve(self, k)
        finally:
            self._pipeline.hold = hold

    monkeypatch.setattr(Exchange, "_serve", at_once)


def no_wait_before_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Exchange._settle

    def forgetful(self: Any, *, receive: bool) -> None:
        raised = self._pipeline.drain()
        self._second[:] = [()] * len(self._second)
        settle(self, receive=receive)
        self._error = self._error or raised

    monkeypatch.setattr(Exchange, "_settle", forgetful)


def rows_sent_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective does not wait for the stream that encodes: it begins outside of fed()."""
    send = Exchange._send

    def elsewhere(self: Any, k: int) -> None:
        with self._pipeline._streams.on(self._pipeline._streams.stream()):
            send(self, k)

    monkeypatch.setattr(Exchange, "_send", elsewhere)


def no_join_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SidePipeline, "join", lambda self: None)


def flags_read_before_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(self: Any, x: Any) -> Any:
        with self._streams.world.lock:  # or another rank's look runs the copy in the meantime
            copied = self._copied(x)[0]
            read = self._streams.pinned(copied)
            with _disable_current_modes():
                return read.copy_(copied)

    monkeypatch.setattr(SidePipeline, "host", host)


def everything_on_the_stream_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not wrong, but all overlap is lost: found by who waits for whom."""
    monkeypatch.setattr(SidePipeline, "fed", lambda self: pipeline._NOTHING)


def served_without_a_look_at_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SidePipeline, "admit", lambda self, k, fuse: None)


def gate_that_nobody_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(self: Any) -> None:
        self.is_closed = True

    monkeypatch.setattr(DeviceGate, "close", closed)


def all_that_was_queued_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SidePipeline, "admitted", lambda self, num: num)


def what_an_event_says_after_the_abort_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an event behind each serve were asked: after an abort all of them have fired."""

    def admitted(self: Any, num: int) -> int:
        SIDE_ADMITTED(self, num)
        return num

    monkeypatch.setattr(SidePipeline, "admitted", admitted)


def mean_of_a_box_passed_on_without_a_look_at_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of node first alone. What its peers exchange is looked at as ever, but then it is garbage already."""
    monkeypatch.setattr(NodeCoder, "fuse", lambda self, k: None)


SIDE_ADMITTED = SidePipeline.admitted

WAITS = {
    "no event of backward": no_event_of_backward,
    "no wait before serve": no_wait_before_serve,
    "no wait before decode": no_wait_before_decode,
    "rows sent before they are written": rows_sent_before_they_are_written,
    "no join at the end": no_join_at_the_end,
    "flags read before they are there": flags_read_before_they_are_there,
}
"""Found where nobody dies."""
DEATHS = {
    "served without a look at the gate": served_without_a_look_at_the_gate,
    "a gate that nobody closes": gate_that_nobody_closes,
    "all that was queued counts": all_that_was_queued_counts,
    "what an event says after the abort counts": what_an_event_says_after_the_abort_counts,
}
"""Found where a rank dies in mid-collective."""
