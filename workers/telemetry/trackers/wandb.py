"""A run of Weights & Biases, offline by default: files in the run folder, which `wandb sync` sends when somebody likes.

The run's ID is the job's, in what each attempt and each rank 0 has written. A step is a field of its own: W&B refuses
to go back in its own count, and steps that are lost are made again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.contract.redaction import redacted_json
from thinwire.contract.reports import Event, Sample
from thinwire.contract.tracking import WandbTracking
from thinwire.workers.telemetry.trackers.follow import CannotTrack, Ended, Item
from thinwire.workers.telemetry.trackers.scalars import scalars

STEP = "step"


class Wandb:
    """A Tracker. job: job.json of the run. folder: where its files are; made where it is not there."""

    name = "wandb"

    def __init__(self, asked: WandbTracking, job: Mapping[str, Any], folder: Path) -> None:
        self._asked, self._job, self._folder = asked, job, folder
        self._run: Any = None

    def write(self, items: Sequence[Item]) -> None:
        """Hand them to its process, which writes them. Raises: its errors, OSError; CannotTrack."""
        if self._run is None:
            self._run = self._begun()
        for one in items:
            if isinstance(one, Sample):
                self._run.log({STEP: one.step, "time": one.time, **scalars(one)})
            elif isinstance(one, Event):
                self._run.log({STEP: one.step, "time": one.time, f"events/{one.kind}": str(one.fields)})

    def close(self, ended: Ended | None) -> None:
        """Its process writes the rest. A run that another process goes on with ends here too: that one begins one."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if ended in (None, "succeeded") else 1)

    def _begun(self) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb
        except ImportError as error:
            raise CannotTrack(f"{error}: pip install 'thinwire[wandb]' on the boxes") from error
        if self._asked.mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
            raise CannotTrack("no key: set WANDB_API_KEY in the environment of Ray on the boxes, or say mode: offline")
        self._folder.mkdir(parents=True, exist_ok=True)
        spec = redacted_json(self._job["spec"])
        labels = spec.get("labels") or {}
        run = wandb.init(
            project=self._asked.project,
            entity=self._asked.entity,
            mode=self._asked.mode,
            id=self._job["job_id"],
            name=self._job.get("name") or self._job["job_id"],
            config=spec,
            tags=[f"{name}:{value}"[:64] for name, value in labels.items()],
            dir=str(self._folder),
            resume="allow",
            reinit="create_new",  # a script may have a run of its own in this process
            save_code=False,
            settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True),
        )
        run.define_metric("*", step_metric=STEP)
        return run
