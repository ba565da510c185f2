"""Keeps the Train page of Ray's dashboard true: workers come and go within one attempt of the run."""

from __future__ import annotations

from typing import Any

from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback


class ElasticStatePage(StateManagerCallback):  # type: ignore[misc]
    """Ray Train's, told of each change of the workers."""

    def after_worker_group_start(self, worker_group: Any) -> None:
        """No worker is there yet, whom the inherited method would ask for versions."""
        self.workers_changed(worker_group)

    def workers_changed(self, worker_group: Any) -> None:
        """These are the workers now."""
        self._state_manager.update_train_run_attempt_running(
            run_id=self._run_id,
            attempt_id=worker_group.get_worker_group_context().run_attempt_id,
            workers=worker_group.get_workers(),
        )
