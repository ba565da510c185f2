"""The driver reports that a job waits for workers or stands still, and what its membership has given up: no worker may
be left, or none may be able to say it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue, ValidationError

from thinwire.contract.reports import Event, EventKind
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.run_place import Place
from thinwire.workers.telemetry.reporter import Reporter

logger = logging.getLogger(__name__)

MEMBERSHIP_LOOK_S = 0.5
"""Between two questions to the membership."""
START_S = 20.0
"""A job that starts is said to wait only after so long: its workers are being started."""
LAST_WORDS_S = 10.0
"""At the end of a job the service has so long to take what it has not heard yet; the run folder has it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """For how many workers, and since which step."""

    have: int
    least: int
    step: int


def waiting(snapshot: dict[str, Any], begun_s: float) -> Waiting | None:
    """What the membership's snapshot says of it, so long after the driver has begun."""
    if snapshot["status"] != "waiting for workers" or (not snapshot["generation"] and begun_s < START_S):
        return None
    return Waiting(snapshot["joined"], snapshot["limits"]["min"], snapshot["last_step"])


KINDS = {
    "minority": EventKind.MEMBERSHIP_MINORITY,
    "gave_up": EventKind.MEMBERSHIP_GAVE_UP,
    "waited_for": EventKind.WORKER_STUCK,
    "stands_still": EventKind.STALLED,
}
"""Of what happens at the membership: others have gone on without members that had committed steps, or without any; a
worker is waited for, or the whole job stands still (membership/stuck.py)."""


def happened(snapshot: dict[str, Any]) -> list[Event]:
    """What the membership's snapshot says of that."""
    return [
        Event(
            kind=KINDS[one["kind"]],
            step=one["fields"]["step"],
            time=one["time"],
            fields={"generation": one["generation"], **{k: v for k, v in one["fields"].items() if k != "step"}},
        )
        for name in ("given_up", "still")  # missing where an earlier version has started the membership
        for one in snapshot.get(name, ())
    ]


class MembershipWatch:
    """Looks every MEMBERSHIP_LOOK_S, in a thread, and reports what has changed: in the run folder, and to the service,
    also through an outage of it. What the driver of an earlier attempt has reported it does not report again.

    look: the membership's snapshot; None where nobody answers. A later sample or `regrouped` ends the waiting.
    """

    def __init__(self, place: Place, look: Callable[[], dict[str, Any] | None]) -> None:
        self._reporter, self._look = Reporter.in_place(place), look
        self._began = time.monotonic()
        self._told: Waiting | None = None
        self._known = _told_before(place.folder)
        self._unseen = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._thread.join(5.0)
        self._reporter.close(timeout_s=LAST_WORDS_S)

    def _run(self) -> None:
        while not self._closing.wait(MEMBERSHIP_LOOK_S):
            try:
                snapshot = self._look()
            except Exception:  # whatever Ray raises: the actor is being started again, or has gone
                if not self._unseen:
                    logger.warning("membership_unseen", exc_info=True)
                self._unseen = True
                continue
            self._unseen = False
            if snapshot is None:
                continue
            now = waiting(snapshot, time.monotonic() - self._began)
            if now is not None and now != self._told:
                self._tell(now)
            self._told = now
            for event in happened(snapshot):
                if _key(event) not in self._known:
                    self._known.add(_key(event))
                    logger.warning("%s step=%d %s", event.kind, event.step, event.fields.get("told", event.fields))
                    self._reporter.publish(event)

    def _tell(self, now: Waiting) -> None:
        logger.warning("waiting_for_workers have=%d min=%d step=%d", now.have, now.least, now.step)
        fields: dict[str, JsonValue] = {"have": now.have, "min": now.least}
        self._reporter.publish(
            Event(kind=EventKind.WAITING_FOR_WORKERS, step=now.step, time=time.time(), fields=fields)
        )


def _key(event: Event) -> tuple[str, float]:
    return event.kind, event.time


def _told_before(folder: RunFolder) -> set[tuple[str, float]]:
    """Of events.jsonl, without a line that was torn. Empty where it cannot be read."""
    try:
        lines = folder.events.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    told = set()
    for line in lines:
        with suppress(ValidationError):
            told.add(_key(Event.model_validate_json(line)))
    return told
