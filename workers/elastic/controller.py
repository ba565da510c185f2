"""What an elastic job changes of Ray Train's controller: its worker group, its settings, and who asks for resources."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ray.train.backend import BackendConfig
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.util import TrainingFramework

from thinwire.workers.elastic.group import ElasticWorkerGroup
from thinwire.workers.elastic.plan import Plan
from thinwire.workers.elastic.state_page import ElasticStatePage

NO_PREEMPTION_WATCHER = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""Ray Train's would restart all workers when one node is drained; the group empties that node."""


@dataclass
class ElasticConfig(BackendConfig):  # type: ignore[misc]
    """Carries the plan to where Ray Train makes a worker group. There is no back end: the job makes its own groups."""

    plan: Plan

    @property
    def framework(self) -> Any:
        """For the Train page."""
        return TrainingFramework.TORCH


class ElasticController(TrainController):  # type: ignore[misc]
    """Ray Train's, over our worker group."""

    worker_group_cls = ElasticWorkerGroup

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        super().__init__(*args, **kwargs)


class PlacedByGroups(FixedScalingPolicy):  # type: ignore[misc]
    """Never resizes: the worker group does. Asks the autoscaler for nothing: waiting placement groups do."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Starts no coordinator."""

    async def before_controller_shutdown(self) -> None:
        """Nothing was asked for."""

    def before_controller_abort(self) -> None:
        """Nothing was asked for."""

    def _maybe_send_resource_request(self) -> None:
        pass


def elastic_callbacks(stock: list[Any]) -> list[Any]:
    """Ray Train's callbacks, less those that know a fixed group only.

    The cleaner would free all placement groups while the controller is restarted, and the datasets' would start an
    actor for each worker.
    """
    kept: list[Any] = []
    for callback in stock:
        if isinstance(callback, StateManagerCallback):
            kept.append(ElasticStatePage(datasets={}))
        elif not isinstance(callback, PlacementGroupCleanerCallback | DatasetsCallback):
            kept.append(callback)
    return kept
