"""events.jsonl of the run folder: one reports.Event a line, whatever becomes of the service."""

from __future__ import annotations

import logging
from pathlib import Path

from thinwire.contract.reports import Event
from thinwire.contract.run_folder import RunFolder

logger = logging.getLogger(__name__)


def keep_event(run_dir: Path, event: Event) -> None:
    """Add a line. A disk that refuses is logged."""
    try:
        with RunFolder(run_dir).events.open("a") as file:
            file.write(event.model_dump_json() + "\n")
    except OSError as error:
        logger.error("event_unwritten kind=%s step=%d reason=%s", event.kind, event.step, error)
