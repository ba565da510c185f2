"""What stands where Ray Train's worker group keeps one placement group and a synchronisation actor for all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState, _shutdown_workers


class Units(PlacementGroupHandle):  # type: ignore[misc]
    """A placement group for each worker. remove: frees all of them."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    @property
    def placement_group(self) -> Any:
        """There is no single one."""
        raise NotImplementedError("an elastic job has a placement group for each worker, not one for all")

    def ready(self) -> Any:
        """There is no single one."""
        raise NotImplementedError("an elastic job has a placement group for each worker, not one for all")

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Nobody waits but bring-ups."""
        return True

    def shutdown(self) -> None:
        """Give up what is on its way, and free everything."""
        self._remove()


class ElasticGroupState(WorkerGroupState):  # type: ignore[misc]
    """Ray Train's, without the synchronisation actor."""

    def shutdown(self) -> None:
        """Kill the workers and free all."""
        _shutdown_workers(self.workers)
        self.placement_group_handle.shutdown()
