"""ElasticTrainer: `fit()` of Ray Train for a job whose workers come, die and go one by one.

The controller is an actor of the driver's with the job's name. Ray restarts it if it dies, and a driver of the same
job takes its place; either way it adopts the workers that live. What a driver leaves behind when it dies is removed
when the lease is out.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray._raylet
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.train import Result, RunConfig, ScalingConfig
from ray.train.backend import BackendConfig
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.constants import DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE, get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from thinwire.contract import logs
from thinwire.workers.elastic import leftovers
from thinwire.workers.elastic.group import ElasticStatePage, ElasticWorkerGroup
from thinwire.workers.elastic.membership_actor import ensure_membership
from thinwire.workers.elastic.plan import Plan
from thinwire.workers.elastic.worker_side import Failed, Left, with_facts
from thinwire.workers.membership.seats import Limits
from thinwire.workers.membership.state import Dismissed, Fenced

logger = logging.getLogger(__name__)

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
        logs.set_up()
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


TAKE_OVER_S = 30.0
"""A dead driver's controller frees its name within this."""
RETIRE_S = 60.0
ABORT_S = 10.0
RENEW_S = 2.0
"""Between two words of a driver whose controller starts."""


class ElasticTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Runs train_function(config) in between limits.min and limits.max workers, and on whatever comes and goes.

    config is train_loop_config and, under "elastic", what worker_side asks for: job, namespace, slot, secret and the
    name of the membership actor. A train function that goes because it was dismissed or fenced returns
    worker_side.Left, or lets the membership's Dismissed or Fenced pass. One that raises anything else, or returns
    worker_side.Failed, has failed: failures.py says whether its slot is filled again or the job ends. When nobody is
    left of those that trained, because they died or failed, all workers start again, from the checkpoint:
    run_config.failure_config.max_failures times, as in Ray Train.

    limits are those of a new job: where workers of this job live, the membership actor knows the present ones.
    """

    def __init__(
        self,
        train_function: Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any],
        job: str,
        secret: str,
        limits: Limits,
        resources_per_worker: dict[str, float],
        use_gpu: bool,
        run_config: RunConfig,
        lease_s: float = 10.0,
        **patience: Any,
    ) -> None:
        """patience: other fields of Plan."""
        self.plan = Plan(job=job, secret=secret, limits=limits, lease_s=lease_s, **patience)
        super().__init__(
            train_function,
            train_loop_config=train_loop_config,
            backend_config=ElasticConfig(self.plan),
            scaling_config=ScalingConfig(
                num_workers=limits.max, use_gpu=use_gpu, resources_per_worker=resources_per_worker
            ),
            run_config=run_config,
        )

    def fit(self) -> Result:
        """Run the job to its end. Adopts the workers of a driver of this job that died; ends one that lives.

        SIGTERM and SIGINT end the job. Raises: ray.train.TrainingFailedError, whose controller_failure is JobFailed for
        an error of the job's, or where a slot keeps dying; RayError where another driver took the job
        over.
        """
        owner = self.train_run_context.run_id
        with _ended_by_signals():
            try:
                membership = ensure_membership(self.plan)
                ray.get(membership.claim.remote(owner))
                membership.know.remote(self.plan.known)  # one that an earlier version started does not understand it
                return super().fit()
            finally:
                self._retire(owner)

    def _get_train_func(self) -> Callable[[], Any]:
        return _Seated(self.train_loop_per_worker, dict(self.train_loop_config or {}))

    def _create_default_callbacks(self) -> list[Any]:
        return elastic_callbacks(super()._create_default_callbacks())

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Result:
        controller_init_kwargs["scaling_policy"] = PlacedByGroups(self.scaling_config)
        env_vars = {**get_env_vars_to_propagate(), **NO_PREEMPTION_WATCHER}
        env_vars.setdefault(
            RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR, DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE
        )
        factory = ray.remote(
            num_cpus=0,
            label_selector={ray._raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()},
            runtime_env={"env_vars": env_vars},
            max_restarts=-1,
            max_task_retries=-1,
            name=self.plan.controller,
            namespace=self.plan.namespace,
        )(ElasticController)
        controller = self._take_over(lambda: factory.remote(**controller_init_kwargs))
        self._see_started(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())

    def _see_started(self, controller: Any) -> None:
        """Want the job until its controller can say so: on a busy machine an actor's start may outlast the lease."""
        started = controller.__ray_ready__.remote()
        while not ray.wait([started], timeout=RENEW_S)[0]:
            if (membership := leftovers.actor(self.plan, self.plan.membership)) is not None:
                membership.renew_lease.remote()

    def _take_over(self, create: Callable[[], Any]) -> Any:
        until = time.monotonic() + TAKE_OVER_S
        while True:
            old = leftovers.actor(self.plan, self.plan.controller)
            if old is not None:
                logger.warning("controller_superseded job=%s", self.plan.job)
                leftovers.kill(old)
            try:
                return create()
            except ValueError:  # its name is not free yet
                if time.monotonic() > until:
                    raise
            time.sleep(0.2)

    def _retire(self, owner: str) -> None:
        """Remove what is left, unless another driver has the job by now."""
        membership = leftovers.actor(self.plan, self.plan.membership)
        if membership is None:
            leftovers.remove_all(self.plan)
            return
        try:
            if ray.get(membership.retire.remote(owner), timeout=RETIRE_S):
                leftovers.kill(membership)
            else:
                logger.warning("job_not_removed job=%s reason=another driver has it", self.plan.job)
        except (RayActorError, GetTimeoutError, RayError) as error:
            logger.warning("job_not_removed job=%s reason=%s: its lease will end it", self.plan.job, error)


class _Seated:
    """The train function of whichever worker calls it."""

    def __init__(self, train_function: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> None:
        self._train_function = train_function
        self._config = config
        self.__name__ = getattr(train_function, "__name__", "train_function")

    def __call__(self) -> Any:
        try:
            return self._train_function(with_facts(self._config))
        except (Dismissed, Fenced) as error:
            return Left(f"{type(error).__name__}: {error}", fenced=isinstance(error, Fenced))
        except Exception as error:
            logger.exception("train_function_failed")
            return Failed(type(error).__name__, str(error))


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT become SystemExit, so that what is to be removed is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
