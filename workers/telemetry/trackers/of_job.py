"""The trackers that a job asks for (contract/tracking.py), told together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from thinwire.contract import stores
from thinwire.contract.reports import EventKind, Sample
from thinwire.contract.run_folder import RunFolder, checkpoints_in
from thinwire.contract.spec import JobSpec
from thinwire.contract.traces import OfJob
from thinwire.workers.telemetry.trackers.follow import Ended, Follower, Item, Tracker
from thinwire.workers.telemetry.trackers.mlflow import Mlflow
from thinwire.workers.telemetry.trackers.tensorboard import TensorBoard
from thinwire.workers.telemetry.trackers.wandb import Wandb

logger = logging.getLogger(__name__)

LAST_WORDS_S = 15.0
"""How long the end of a run waits for tools that do not answer."""


class Trackers:
    """All of them, on the rank 0 of the time. Its methods return at once, but for `close`."""

    def __init__(self, trackers: Iterable[Tracker] = (), on_begin: Callable[[], None] = lambda: None) -> None:
        """on_begin: this process leads."""
        self._followers, self._on_begin = [Follower(one) for one in trackers], on_begin

    def begin(self, recent: Sequence[Sample]) -> None:
        """This process leads from here on. recent: what it knows of the steps so far; the one before may not have said
        them all."""
        self._on_begin()
        if recent:
            self.void(recent[0].step - 1)
            self.take(recent)

    def take(self, items: Sequence[Item]) -> None:
        """New samples, or an event."""
        for one in self._followers:
            one.take(items)

    def void(self, after: int) -> None:
        """Steps after this one come again."""
        for one in self._followers:
            one.void(after)

    def news(self) -> Iterator[tuple[EventKind, dict[str, JsonValue]]]:
        """What has happened to tools since this was asked last, as events."""
        for one in self._followers:
            while one.news:
                yield one.news.popleft()

    def end(self, ended: Ended | None, timeout_s: float) -> None:
        """Begin to end. ended: how the run has; None where another process may go on with it."""
        for one in self._followers:
            one.end(ended, min(timeout_s, LAST_WORDS_S))

    def close(self, timeout_s: float) -> None:
        """Wait for the end."""
        for one in self._followers:
            one.close(min(timeout_s, LAST_WORDS_S))


def trackers_of(
    spec: JobSpec, job: Mapping[str, Any], folder: RunFolder, *, shared: bool, spans: FirstStep | None = None
) -> Trackers:
    """job: job.json of the run. shared: does its folder outlive this process? What is of files alone needs that, and
    is else beside the checkpoints where these are in a folder that all machines share (checkpoint.store).
    spans: of the way to the first step, where the job is traced."""
    if not shared and (store := spec.checkpoint.store) is not None and stores.is_local(store):
        folder, shared = RunFolder(stores.path_of(checkpoints_in(store, str(job["job_id"])))), True
    asked, found = spec.tracking, list[Tracker]()
    if spans is not None:
        found.append(spans)
    if asked.tensorboard and shared:
        found.append(TensorBoard(folder.tensorboard))
    if asked.mlflow is not None:
        found.append(Mlflow(asked.mlflow, job))
    if asked.wandb is not None:
        if shared or asked.wandb.mode == "online":
            found.append(Wandb(asked.wandb, job, folder.wandb))
        else:
            logger.warning(
                "tracker_left_out tracker=wandb reason=%s",
                "the folders of this job's workers end with them: say mode: online, name a checkpoint.store in a "
                "folder that all machines share, or ask for `thinwire fetch --wandb`",
            )
    return Trackers(found, (lambda: None) if spans is None else spans.seated)


class FirstStep:
    """A Tracker of nothing but the spans to the first step that this process has told of (contract/traces.py)."""

    name = "traces"

    def __init__(self, trace: OfJob, began: float) -> None:
        """began: when this process did, in unix seconds."""
        self._trace, self._began = trace, began
        self._seated: float | None = None
        self._is_told = False

    def seated(self) -> None:
        """It has its place among the others."""
        if self._seated is None:
            self._seated = time.time()
            self._trace.past("workers joined", self._began, self._seated)

    def write(self, items: Sequence[Item]) -> None:
        """Look for the first step."""
        first = next((one for one in items if isinstance(one, Sample) and one.step > 0), None)
        if first is not None and not self._is_told:
            self._is_told = True
            start = self._began if self._seated is None else self._seated
            self._trace.past("first step", start, first.time, step=first.step, workers=first.world_size)

    def close(self, ended: Ended | None) -> None:
        """Send what is left."""
        self._trace.close()


def say_end(spec: JobSpec, job: Mapping[str, Any], ended: Ended, timeout_s: float = LAST_WORDS_S) -> None:
    """What no worker can say: that the job has failed, or was ended. By the driver; for so long at most."""
    asked = spec.tracking.mlflow
    if asked is None:
        return

    def say() -> None:
        try:
            Mlflow(asked, job).close(ended)
        except Exception as error:  # noqa: BLE001 - whatever the library raises: the end of a job does not wait for it
            logger.warning("end_not_tracked tracker=mlflow reason=%r", f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=say, name="thinwire-mlflow", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        logger.warning("end_not_tracked tracker=mlflow reason=it has not answered for %g s", timeout_s)
