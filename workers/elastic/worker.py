"""The actor around a train function: Ray Train's own, which can besides be adopted, and ends when nobody asks for it.

A restarted controller, or the next driver's, finds it by name and goes through the same calls as with a new one:
`hello`, `init_train_context`, `run_train_fn`, then `poll_status` for ever. The second and third do nothing twice.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker

from thinwire.workers.elastic import worker_side
from thinwire.workers.elastic.plan import Plan
from thinwire.workers.elastic.worker_side import Lease, heed_sigterm, lease_expired

logger = logging.getLogger(__name__)


class LeaseExpired(RuntimeError):
    """This worker is ending: neither a driver nor the membership has been heard of in time."""


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself to the driver that adopts it. unit: the name of its placement group."""

    slot: int
    unit: str


class NoCollectives:
    """Stands where Ray Train has its synchronisation actor."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name}: ray.train.report and ray.train.collective are barriers over a fixed number of workers, and this "
            "job has none: write checkpoints to the run folder, and use the job's own group"
        )

    def __reduce__(self) -> tuple[type[NoCollectives], tuple[()]]:
        return (NoCollectives, ())


class ElasticWorker(RayTrainWorker):  # type: ignore[misc]
    """One worker. Ray calls its methods one at a time."""

    def __init__(self, plan: Plan, slot: int, unit: str) -> None:
        super().__init__()
        self._plan = plan
        self._slot = slot
        self._unit = unit
        self._running = False
        self._lease = Lease(plan.alone_s, self._end)
        worker_side.seat(plan.facts(slot), self._lease)
        heed_sigterm(plan.grace_s, self._train_function_runs)

    def hello(self, attempt: int) -> Hello:
        """Who this is, and whose from now on: of this attempt of the job. Raises: LeaseExpired where it is ending."""
        self._lease.renew()
        worker_side.adopt(attempt)
        if lease_expired.is_set():
            raise LeaseExpired(f"slot {self._slot} is ending: nobody asked for it in {self._plan.alone_s:g} s")
        return Hello(self._slot, self._unit)

    def get_metadata(self) -> Any:
        """Where this process is."""
        self._lease.renew()
        return super().get_metadata()

    def init_train_context(self, *args: Any, **kwargs: Any) -> None:
        """Make Ray Train's context; where the train function runs already, only replace who serves it."""
        with self._lease.held():
            if not self._running:
                super().init_train_context(*args, **kwargs)
                return
            context = get_train_context()
            context.controller_actor = kwargs["controller_actor"]
            context.execution_context = dataclasses.replace(
                context.execution_context, synchronization_actor=kwargs["synchronization_actor"]
            )

    def run_train_fn(self, train_fn_ref: Any) -> None:
        """Start the train function, once."""
        with self._lease.held():  # it imports torch
            if not self._running:
                super().run_train_fn(train_fn_ref)
                self._running = True

    def poll_status(self) -> Any:
        """How it goes. Being asked renews the lease."""
        self._lease.renew()
        status = super().poll_status()
        if lease_expired.is_set():  # it returned because of that, not because the training has come to its end
            status = dataclasses.replace(status, running=True)
        return status

    def _end(self) -> None:
        logger.warning("lease_expired slot=%d pid=%d alone_s=%g", self._slot, os.getpid(), self._plan.alone_s)
        lease_expired.set()
        until = time.monotonic() + self._plan.grace_s
        while time.monotonic() < until and self._train_function_runs():
            time.sleep(0.05)
        logger.warning("worker_ends slot=%d pid=%d", self._slot, os.getpid())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the train function may hang: nothing else is sure

    def _train_function_runs(self) -> bool:
        return self._running and any(thread.name.startswith("TrainingThread") for thread in threading.enumerate())
