"""A history that the service has kept, as the files of a tool: `thinwire fetch --tensorboard`, `--wandb`.

For runs whose workers have left no files that outlive them, on whichever machine somebody wants them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.contract.reports import Event, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.tracking import Tracking, WandbTracking
from thinwire.contract.weights import FetchFailed
from thinwire.workers.telemetry.trackers.follow import AT_ONCE, CannotTrack, Tracker
from thinwire.workers.telemetry.trackers.tensorboard import TensorBoard
from thinwire.workers.telemetry.trackers.wandb import Wandb


def write_files(tool: str, job: Mapping[str, Any], items: Sequence[Sample | Event], target: Path) -> Path:
    """Write what has happened, in order, as files of `tensorboard` or `wandb` (offline). job: as in job.json.

    Modifies: target, which is made where it is missing; beside what is there of the same run. Returns the files'
    folder. Raises: FetchFailed.
    """
    folder = RunFolder(target)
    where = folder.tensorboard if tool == TensorBoard.name else folder.wandb
    tracker: Tracker
    if tool == TensorBoard.name:
        tracker = TensorBoard(where)
    else:
        asked = Tracking.model_validate(job["spec"].get("tracking") or {}).wandb or WandbTracking()
        tracker = Wandb(asked.model_copy(update={"mode": "offline"}), job, where)
    try:
        for first in range(0, len(items), AT_ONCE):
            tracker.write(items[first : first + AT_ONCE])
        tracker.close("succeeded")
    except CannotTrack as error:
        raise FetchFailed(str(error).replace(" on the boxes", "")) from error
    except OSError as error:
        raise FetchFailed(f"{error.filename or where} cannot be written: {error.strerror or error}") from error
    return where
