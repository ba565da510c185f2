"""Does a job wait for workers or stand still, and what has its membership given up? The driver says so: no worker may
be left, or none may be able to say it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from thinwire.contract.reports import Event, EventKind
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.telemetry.delivery import Poster, ServiceClient
from thinwire.workers.telemetry.history import keep_event

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


def given_up(snapshot: dict[str, Any]) -> list[Event]:
    """Where others have gone on without members that had committed steps, as the membership's snapshot says."""
    return [
        Event(
            kind=EventKind.MEMBERSHIP_MINORITY if one["kind"] == "minority" else EventKind.MEMBERSHIP_GAVE_UP,
            step=one["fields"]["step"],
            time=one["time"],
            fields={"generation": one["generation"], **{k: v for k, v in one["fields"].items() if k != "step"}},
        )
        for one in snapshot.get("given_up", ())  # missing where an earlier version has started the membership
    ]


def stood_still(snapshot: dict[str, Any]) -> list[Event]:
    """Who was waited for, and when the whole job stood still, as the membership's snapshot says (standstill.py)."""
    return [
        Event(
            kind=EventKind.WORKER_STUCK if one["kind"] == "waited_for" else EventKind.STALLED,
            step=one["fields"]["step"],
            time=one["time"],
            fields={"generation": one["generation"], **{k: v for k, v in one["fields"].items() if k != "step"}},
        )
        for one in snapshot.get("still", ())  # missing as given_up may be
    ]


class MembershipTeller:
    """Looks every MEMBERSHIP_LOOK_S, in a thread, and tells what has changed: in the run folder, and to the service,
    also through an outage of it. What the driver of an earlier attempt has told it does not tell again.

    look: the membership's snapshot; None where nobody answers. A later sample or `regrouped` ends the waiting.
    """

    def __init__(self, run_dir: Path, attempt: int, look: Callable[[], dict[str, Any] | None]) -> None:
        self._run_dir, self._look = run_dir, look
        self._client = ServiceClient(run_dir, 0, attempt) if RunFolder(run_dir).service_url.exists() else None
        self._began = time.monotonic()
        self._poster = None if self._client is None else Poster(self._client)
        self._told: Waiting | None = None
        self._known = _told_before(run_dir)
        self._unseen = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._thread.join(5.0)
        if self._poster is not None:
            self._poster.close(timeout_s=LAST_WORDS_S)
        if self._client is not None:
            self._client.close()

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
            for event in (*given_up(snapshot), *stood_still(snapshot)):
                if _key(event) not in self._known:
                    self._known.add(_key(event))
                    logger.warning("%s step=%d %s", event.kind, event.step, event.fields.get("told", event.fields))
                    self._keep(event)

    def _tell(self, now: Waiting) -> None:
        logger.warning("waiting_for_workers have=%d min=%d step=%d", now.have, now.least, now.step)
        fields: dict[str, JsonValue] = {"have": now.have, "min": now.least}
        self._keep(Event(kind=EventKind.WAITING_FOR_WORKERS, step=now.step, time=time.time(), fields=fields))

    def _keep(self, event: Event) -> None:
        keep_event(self._run_dir, event)
        if self._poster is not None:
            self._poster.add_event(event)


def _key(event: Event) -> tuple[str, float]:
    return event.kind, event.time


def _told_before(run_dir: Path) -> set[tuple[str, float]]:
    """Of events.jsonl, without a line that was torn. Empty where it cannot be read."""
    try:
        lines = RunFolder(run_dir).events.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    told = set()
    for line in lines:
        with suppress(ValidationError):
            told.add(_key(Event.model_validate_json(line)))
    return told
