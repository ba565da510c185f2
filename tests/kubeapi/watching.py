"""What a watch is told: the changes of the objects that it selects, in order, with bookmarks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from tests.kubeapi.answers import Refused
from tests.kubeapi.api import Asked, flag
from tests.kubeapi.kinds import Object
from tests.kubeapi.store import Change, Store

Event = tuple[str, Object]
TICK_S: Final = 0.1
"""How long nothing may come before whoever iterates is asked whether to go on."""


class Watch:
    """One watch of a store. late_s: how long after its change each event comes. Raises Refused where it cannot be."""

    def __init__(self, store: Store, asked: Asked, bookmark_every_s: float, late_s: float = 0.0) -> None:
        self._store, self._asked, self._late_s = store, asked, late_s
        self._matches = asked.selected
        self._since = asked.since
        self._bookmarks = flag(asked.query, "allowWatchBookmarks")
        self._every_s = bookmark_every_s
        self._deadline = time.monotonic() + float(asked.query.get("timeoutSeconds") or 1800)

    def events(self) -> Iterator[Event | None]:
        """ADDED, MODIFIED, DELETED, BOOKMARK, and ERROR as the last; None now and then where nothing comes. It ends at
        timeoutSeconds. Without a version, or with "0", everything that is there comes first.
        """
        position = self._since or 0
        if not self._since:
            with self._store.changed:
                found = self._store.all(self._asked.kind, self._asked.namespace, self._matches)
                position = self._store.version
            yield from (("ADDED", one) for one in found)
        late: deque[Change] = deque()
        told, bookmark_at_s = position, time.monotonic() + self._every_s
        while time.monotonic() < self._deadline:
            try:
                news = self._news(position, late)
            except Refused as gone:
                yield "ERROR", gone.status()
                return
            late.extend(news)
            position = news[-1].version if news else position
            yielded = False
            while late and late[0].at_s + self._late_s <= time.monotonic():
                change = late.popleft()
                told = change.version
                if (event := self._event(change)) is not None:
                    yielded = True
                    yield event
            if self._bookmarks and time.monotonic() >= bookmark_at_s and not late:
                bookmark_at_s = time.monotonic() + self._every_s
                yield self._bookmark(position)
            elif not yielded:
                yield None
        if self._bookmarks:
            yield self._bookmark(position if not late else told)

    def _news(self, position: int, late: deque[Change]) -> list[Change]:
        """Changes after this version; waits for one, but not for long."""
        with self._store.changed:
            news = self._store.since(position)
            if not news and not late:
                rest_s = self._deadline - time.monotonic()
                self._store.changed.wait(max(0.0, min(TICK_S, rest_s)))
                news = self._store.since(position)
            elif not news:
                self._store.changed.wait(0.01)
            return news

    def _event(self, change: Change) -> Event | None:
        """As this watch sees it: what begins to be selected is ADDED, what ceases to be is DELETED."""
        if change.kind is not self._asked.kind:
            return None
        was, becomes = self._sees(change.before), self._sees(change.after)
        if becomes and change.after is not None:
            return ("MODIFIED" if was else "ADDED"), change.after
        if was and change.before is not None:
            last = change.before | {"metadata": change.before["metadata"] | {"resourceVersion": str(change.version)}}
            return "DELETED", last
        return None

    def _sees(self, found: Object | None) -> bool:
        if found is None or self._asked.namespace not in (None, found["metadata"].get("namespace")):
            return False
        return self._matches(found)

    def _bookmark(self, version: int) -> Event:
        kind = self._asked.kind
        metadata = {"resourceVersion": str(version), "creationTimestamp": None}
        return "BOOKMARK", {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
