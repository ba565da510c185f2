"""What a worker group asks of its membership: over an actor that is played here."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.workers.elastic import membership_actor
from thinwire.workers.elastic.membership_actor import Headcount, MembershipLink


class Call:
    """A method of an actor. Its answer is there at once."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return self.answer


class Actor:
    def __init__(self, ids: dict[tuple[int, int], str]) -> None:
        self.headcount = Call(Headcount(target=2, generation=1, seated=frozenset(), gone={}, ids=ids))
        self.bar = Call(None)


def test_who_was_given_up_is_barred_and_barred_again_where_the_actor_was_restarted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(membership_actor.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(membership_actor.ray, "get", lambda ref: ref)
    link: Any = MembershipLink(plan=None)  # type: ignore[arg-type]
    link._handle = first = Actor({(0, 100): "a", (1, 101): "b"})
    link.headcount()
    link._handle = second = Actor({})  # which knows nobody yet
    link.headcount()
    link.bar(1, 101, "it is gone")
    link.bar(1, 102, "it has never connected")
    link.headcount()
    assert first.bar.asked == []
    assert second.bar.asked == [("b", "it is gone")]
    assert second.headcount.asked == [({"b": "it is gone"},), ({"b": "it is gone"},)]
