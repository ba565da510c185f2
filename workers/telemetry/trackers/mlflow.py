"""A run of MLflow: the job file as parameters, the samples as metrics, events as tags, the job's ID to find it by.

The client is MLflow's own (mlflow-skinny): it knows the tokens, stores and TLS of its environment, and goes with its
servers. A run belongs to the job: whoever becomes rank 0, in whichever attempt, looks for it by the job's ID and goes
on with it. MLflow can neither change nor delete a value of a metric, and shows a step that was logged twice as two
points: of a step that is lost and made again the first stays, and the later one is not sent. The last step that is
there stands in a tag, which is written in the same call as the values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from thinwire.contract.redaction import redacted_json
from thinwire.contract.reports import Event, Sample
from thinwire.contract.tracking import MlflowTracking
from thinwire.workers.telemetry.trackers.follow import CannotTrack, Ended, Item
from thinwire.workers.telemetry.trackers.scalars import scalars

JOB_TAG = "thinwire.job_id"
LAST_TAG = "thinwire.last_step"
MOST_METRICS, MOST_PARAMS, MOST_TAGS = 900, 100, 100
"""Of one call: the server takes 1000 in all."""
LONGEST_VALUE = 500
STATUS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Of one call: it is tried again from here. By default seven times, within minutes."""
_NO_KEY = re.compile(r"[^A-Za-z0-9_\-. /]")


class Mlflow:
    """A Tracker. job: job.json of the run."""

    name = "mlflow"

    def __init__(self, asked: MlflowTracking, job: Mapping[str, Any]) -> None:
        self._asked, self._job = asked, job
        self._api: Any = None
        self._run: str | None = None
        self._last = -1

    def write(self, items: Sequence[Item]) -> None:
        """Send them. Raises: MLflow's errors, where the server does not answer; CannotTrack."""
        run = self._begun()
        from mlflow.entities import Metric, RunTag

        calls: list[list[Metric]] = []
        last = self._last
        for one in items:
            if not isinstance(one, Sample) or one.step <= last:
                continue
            last, at = one.step, round(1000 * one.time)
            of_step = [Metric(_NO_KEY.sub("_", name), value, at, last) for name, value in scalars(one).items()]
            if not calls or len(calls[-1]) + len(of_step) > MOST_METRICS:
                calls.append([])
            calls[-1] += of_step
        tags = [
            RunTag(f"thinwire.event.{one.kind}", f"step {one.step}: {one.fields}"[:LONGEST_VALUE])
            for one in items
            if isinstance(one, Event)
        ]
        for metrics in filter(None, calls):
            step = metrics[-1].step
            self._api.log_batch(run, metrics=metrics, tags=[RunTag(LAST_TAG, str(step))])
            self._last = step
        for first in range(0, len(tags), MOST_TAGS):
            self._api.log_batch(run, tags=tags[first : first + MOST_TAGS])

    def close(self, ended: Ended | None) -> None:
        """Say how it has ended; a run that another process goes on with stays open. Raises as `write`."""
        if ended is not None and (self._run is not None or self._found() is not None):
            self._api.set_terminated(self._run or self._found(), STATUS[ended])

    def _client(self) -> Any:
        if self._api is None:
            for name, value in PATIENCE.items():
                os.environ.setdefault(name, value)
            try:
                from mlflow import MlflowClient
            except ImportError as error:
                raise CannotTrack(f"{error}: pip install 'thinwire[mlflow]' on the boxes") from error
            if self._asked.uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
                raise CannotTrack("no server: say tracking.mlflow.uri, or set MLFLOW_TRACKING_URI on the boxes")
            self._api = MlflowClient(self._asked.uri)
        return self._api

    def _found(self) -> str | None:
        """The job's run, where there is one."""
        experiment = self._client().get_experiment_by_name(self._asked.experiment)
        if experiment is None:
            return None
        query = f"tags.`{JOB_TAG}` = '{self._job['job_id']}'"
        runs = self._api.search_runs([experiment.experiment_id], query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _begun(self) -> str:
        """The run, which is made or gone on with."""
        if self._run is None:
            run = self._found() or self._made()
            self._api.update_run(run, "RUNNING")
            said = self._api.get_run(run).data.tags.get(LAST_TAG, "")
            self._last = int(said) if said.isdecimal() else -1
            self._run = run
        return self._run

    def _made(self) -> str:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        experiment = self._api.get_experiment_by_name(self._asked.experiment)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            try:
                number = self._api.create_experiment(self._asked.experiment)
            except MlflowException:  # another job has made it meanwhile
                experiment = self._api.get_experiment_by_name(self._asked.experiment)
                if experiment is None:
                    raise
                number = experiment.experiment_id
        spec = redacted_json(self._job["spec"])
        labels = spec.get("labels") or {}
        tags = {JOB_TAG: self._job["job_id"], **{str(name): str(value) for name, value in labels.items()}}
        run = self._api.create_run(number, tags=tags, run_name=self._job.get("name") or self._job["job_id"])
        params = [Param(name, value) for name, value in flat(spec)]
        for first in range(0, len(params), MOST_PARAMS):
            self._api.log_batch(run.info.run_id, params=params[first : first + MOST_PARAMS])
        return str(run.info.run_id)


def flat(spec: Mapping[str, JsonValue], above: str = "") -> Iterator[tuple[str, str]]:
    """The job file as parameters: `optimizer.lr`, one text each."""
    for name, value in spec.items():
        path = f"{above}{_NO_KEY.sub('_', name)}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path[:250], str(value)[:LONGEST_VALUE]
