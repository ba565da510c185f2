"""What `thinwire watch` says of checkpoints: that they fail, since when, and that they are saved again.

A job reports each whole checkpoint and each that failed. The first are many, and of interest only after one of the
others: the watcher asks for them only then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.contract.reports import Event, EventKind

LONGEST_REASON = 500


@dataclass(slots=True)
class Saves:
    """Tells each turn once. What was there at the first answer is news where it still holds."""

    failing_since: int | None = None
    """The step of the first save that failed since the last whole checkpoint; None where none has."""
    _whole: Event | None = None
    """The newest whole checkpoint that is known."""

    def is_in_doubt(self, events: Sequence[Event]) -> bool:
        """Is there a failure that is newer than any whole checkpoint known? events: CHECKPOINT_FAILED among them."""
        return bool(self._open(events))

    def saw(self, events: Sequence[Event]) -> list[str]:
        """The news, a line each. events: where it is in doubt those of CHECKPOINT_SAVED too, in order of time."""
        whole = [event for event in events if event.kind == EventKind.CHECKPOINT_SAVED]
        self._whole = max([*whole, *([self._whole] if self._whole else [])], key=_time, default=None)
        failed, before = self._open(events), self.failing_since
        self.failing_since = failed[0].step if failed else None
        if failed and before is None:
            reason = str(failed[0].fields.get("reason", "no reason was told"))[:LONGEST_REASON]
            lost = "all of its steps" if self._whole is None else f"the steps after {self._whole.step}"
            return [f"at step {failed[0].step}: no checkpoint: {reason}; the job trains on, and a crash costs {lost}"]
        if not failed and before is not None and self._whole is not None:
            return [f"at step {self._whole.step}: checkpoints are saved again"]
        return []

    def _open(self, events: Sequence[Event]) -> list[Event]:
        since = _time(self._whole)
        return [event for event in events if event.kind == EventKind.CHECKPOINT_FAILED and event.time > since]


def _time(event: Event | None) -> float:
    return -math.inf if event is None else event.time
