"""The worker group's line to the membership actor: asked at each poll, never waited for.

The actor is restarted by Ray when it dies, and by us when it was ended for good. Meanwhile the last answer stands.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from thinwire.workers.elastic.membership_actor import Beat, ensure_membership
from thinwire.workers.elastic.plan import Plan

logger = logging.getLogger(__name__)

ANSWER_S = 0.1
"""It answers in a few milliseconds; a late answer is taken at the next poll."""


class MembershipLink:
    """For one worker group."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._handle: Any = None
        self._question: Any = None
        self._last: Beat | None = None
        self._mending: threading.Thread | None = None

    def open(self, *, owner: str, living: int) -> None:
        """Find or start the actor, and say who asks. living: workers that are there. Raises: RayError."""
        self._handle = ensure_membership(self._plan)
        ray.get(self._handle.claim.remote(owner))
        if not living:
            ray.get(self._handle.begin.remote())

    def beat(self) -> Beat | None:
        """The last answer; None before the first."""
        if self._question is None:
            self._question = self._handle.beat.remote()
        if ray.wait([self._question], timeout=ANSWER_S)[0]:
            question, self._question = self._question, None
            try:
                self._last = ray.get(question)
            except RayActorError as error:
                logger.warning("membership_away reason=%s", str(error).splitlines()[0])
                self._mend()
        return self._last

    def dismiss(self, slot: int, reason: str) -> None:
        """Ask the worker of this slot to leave. Nothing if it is no member; say it again until it is gone."""
        self._handle.dismiss.remote(slot, reason)

    def _mend(self) -> None:
        if self._mending is None or not self._mending.is_alive():
            self._mending = threading.Thread(target=self._find, name="membership-mend", daemon=True)
            self._mending.start()

    def _find(self) -> None:
        try:
            self._handle = ensure_membership(self._plan)
        except RayError as error:
            logger.warning("membership_not_started reason=%s", str(error).splitlines()[0])
