"""One slot: the actor that fills it, and how it gets there, from nothing or from a living worker: a thread for each.

    place       a placement group of its own; waits for resources as long as it takes
    create      the worker's actor, named by its slot           (an adopted worker begins here, with `hello`)
    initialise  Ray Train's context
    run         the train function

A thread touches nothing of the group's: it leaves an Arrival in the queue. Waiting never blocks the controller.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError, RuntimeEnvSetupError
from ray.train.v2._internal.execution.context import DistributedContext, get_train_context
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker, Worker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from thinwire.contract.environment_words import why_no_environment
from thinwire.workers.elastic import leftovers, worker_side
from thinwire.workers.elastic.plan import Plan
from thinwire.workers.elastic.worker_side import Lease, heed_sigterm, lease_expired

logger = logging.getLogger(__name__)

NODE_ID = "ray.io/node-id"
"""A label that Ray gives each node."""
HELLO_S = 30.0
"""A living worker answers in no time; one whose host is busy, in this."""
NAME_FREE_S = 15.0
"""A dead worker's name is free soon after."""
LOOK_S = 10.0
"""While a worker waits for a place, between two looks at which nodes are silent."""
ANSWER_S = 2.0
"""A raylet's port takes a connection in no time; one of a busy machine, in this."""
MOST_AT_ONCE = 32
_POLL_S = 0.1
_SLOW_POLL_S = 1.0


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
    """The actor around a train function: Ray Train's own, but it can be adopted, and ends when nobody asks for it.

    A restarted controller, or the next driver's, finds it by name and goes through the same calls as with a new one:
    `hello`, `init_train_context`, `run_train_fn`, then `poll_status` for ever. The second and third do nothing twice.
    Ray calls its methods one at a time.
    """

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


@dataclass
class Unit:
    """A slot that is filled: its worker and its placement group.

    started: when its train function began, monotonic. seated: it has been a member of a generation.
    """

    slot: int
    name: str
    group: Any
    worker: Any
    started: float
    adopted: bool
    seated: bool = False


@dataclass(frozen=True)
class Arrival:
    """What became of a bring-up: a unit, or why not. started: when its process began to be, monotonic.

    no_environment: its box cannot make what the job's processes run in.
    """

    slot: int
    unit: Unit | None
    why: str
    started: float
    cancelled: bool = False
    no_environment: bool = False


class Cancelled(Exception):
    """The slot is not wanted any more."""


class SilentNodes:
    """Nodes that do not answer: Ray's head takes a minute and more to give one up, and places work there till then.

    A machine that has lost its power, or is cut off, ends no connection. Where a worker was lost that did not answer,
    its node is suspected: before a worker is placed all suspects are asked whether they answer by now, and it is kept
    away from those that do not. A suspect that answers is none any more, as one that the head has given up.
    Methods may be called by any thread. nodes: the cluster's, as ray.nodes() has them.
    """

    def __init__(self, nodes: Callable[[], list[dict[str, Any]]] = ray.nodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._suspects: set[str] = set()

    def suspect(self, node_id: str) -> None:
        """A worker there did not answer. Returns at once."""
        with self._lock:
            self._suspects.add(node_id)

    def answers(self, node_id: str) -> bool:
        """Whether this one does; else it is suspected from here on. May take ANSWER_S."""
        self.suspect(node_id)
        return node_id not in self.now()

    def now(self) -> frozenset[str]:
        """The ids of suspects that the head takes to be alive, and that do not answer. May take ANSWER_S."""
        with self._lock:
            suspects = set(self._suspects)
        if not suspects:
            return frozenset()
        alive = [node for node in self._nodes() if node["Alive"] and node["NodeID"] in suspects]
        with ThreadPoolExecutor(min(len(alive), MOST_AT_ONCE) or 1) as pool:
            answers = list(pool.map(_answers, alive))
        silent = frozenset(node["NodeID"] for node, answered in zip(alive, answers, strict=True) if not answered)
        with self._lock:
            self._suspects -= suspects - silent
        return silent


def _answers(node: dict[str, Any]) -> bool:
    try:
        with socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_S):
            return True
    except OSError:
        return False


class Starter(Protocol):
    """What the worker group lends to a bring-up. Called from its thread."""

    plan: Plan
    silent: SilentNodes

    def resources(self) -> dict[str, float]:
        """Of one worker."""
        ...

    def runtime_env(self) -> dict[str, Any]:
        """Of a worker's process."""
        ...

    def initialise(self, worker: Any) -> None:
        """Make Ray Train's context in this worker, and what callbacks do at its start."""
        ...

    def train_function(self) -> Any:
        """What `run_train_fn` takes."""
        ...


class BringUp:
    """Fills one slot. group: a placement group to use again. living: a worker to adopt."""

    def __init__(
        self,
        starter: Starter,
        slot: int,
        arrivals: queue.SimpleQueue[Arrival],
        *,
        pause_s: float = 0.0,
        group: tuple[str, Any] | None = None,
        living: Any | None = None,
    ) -> None:
        self.slot = slot
        self.unit_name = group[0] if group else starter.plan.new_unit(slot)
        self.placed = living is not None
        self._starter = starter
        self._plan = starter.plan
        self._arrivals = arrivals
        self._pause_s = pause_s
        self._group: Any = group[1] if group else None
        self._actor: Any = living
        self.adopts = living is not None
        self._cancelled = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"bring-up-w{slot}", daemon=True)
        self._thread.start()

    @property
    def cancelled(self) -> bool:
        """Given up, but its thread may not be through yet."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Give the slot up; what was made for it is removed by its thread, unless it has begun to train."""
        self._cancelled.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            unit = self._adopt() if self.adopts else self._new()
            self._arrivals.put(Arrival(self.slot, unit, "", self._started))
        except Cancelled:
            self._remove()
            self._arrivals.put(Arrival(self.slot, None, "", self._started, cancelled=True))
        except RuntimeEnvSetupError as error:
            self._remove()
            logger.warning("no_environment slot=%d ray_says=%r", self.slot, str(error))
            why, cancelled = why_no_environment(str(error)), self._cancelled.is_set()
            self._arrivals.put(Arrival(self.slot, None, why, self._started, cancelled, no_environment=True))
        except Exception as error:  # noqa: BLE001 - the border of a thread: passed to the group, which counts
            self._remove()
            why = f"{type(error).__name__}: {str(error).strip()}"
            self._arrivals.put(Arrival(self.slot, None, why, self._started, cancelled=self._cancelled.is_set()))

    def _adopt(self) -> Unit:
        try:
            hello: Hello = self._get(self._actor.hello.remote(self._plan.attempt), HELLO_S)
        except LeaseExpired:
            self._let_it_save()
            raise
        self.unit_name = hello.unit
        self._group = leftovers.units_of(self._plan).get(hello.unit)
        return self._start()

    def _let_it_save(self) -> None:
        """It was ending before this driver came: wait for that, for it may be in the middle of a checkpoint."""
        until = time.monotonic() + self._plan.grace_s + HELLO_S
        with suppress(RayError):
            while time.monotonic() < until:
                try:
                    self._get(self._actor.hello.remote(self._plan.attempt), HELLO_S)
                except LeaseExpired:
                    self._cancelled.wait(_SLOW_POLL_S)
                    self._check()

    def _new(self) -> Unit:
        if self._cancelled.wait(self._pause_s):
            raise Cancelled
        self._place()
        self._started = time.monotonic()
        self._actor = self._create()
        return self._start()

    def _start(self) -> Unit:
        slot = self.slot
        metadata = self._first_answer(self._actor.get_metadata.remote())
        # What the train function may ask Ray Train for: its slot. Its rank changes with the generations.
        seat = DistributedContext(
            world_rank=slot, world_size=self._plan.limits.max, local_rank=0, local_world_size=1, node_rank=slot
        )
        worker = Worker(self._actor, metadata, self._starter.resources(), seat, placement_group_bundle_index=0)
        self._starter.initialise(worker)
        self._check()
        running = self._actor.run_train_fn.remote(self._starter.train_function())
        with suppress(
            Cancelled
        ):  # it may be seated by now, and hold what nobody else does: it is dismissed like others
            self._get(running)
        return Unit(slot, self.unit_name, self._group, worker, time.monotonic(), self.adopts)

    def _place(self) -> None:
        silent = self._starter.silent.now()
        if self._group is not None and (not leftovers.placed(self._group) or leftovers.node_of(self._group) in silent):
            self._give_back()
        while True:
            if self._group is None:
                self._group = self._ask_for_place(silent)
            if self._wait_for_place(LOOK_S):
                break
            before, silent = silent, self._starter.silent.now()
            if silent != before:  # Ray may be placing it on a node that is silent now, or may place it on one that was
                self._give_back()
        self.placed = True

    def _ask_for_place(self, silent: frozenset[str]) -> Any:
        if silent:
            logger.info("place_elsewhere slot=%d silent_nodes=%s", self.slot, ",".join(sorted(silent)))
        return placement_group(
            [self._starter.resources()],
            "STRICT_PACK",
            name=self.unit_name,
            lifetime="detached",
            bundle_label_selector=[{NODE_ID: f"!in({','.join(sorted(silent))})"}] if silent else None,
        )

    def _wait_for_place(self, within_s: float) -> bool:
        began = time.monotonic()
        while not leftovers.placed(self._group):
            self._check()
            waited_s = time.monotonic() - began
            if waited_s > within_s:
                return False
            self._cancelled.wait(_POLL_S if waited_s < 2.0 else _SLOW_POLL_S)
        self._check()
        return True

    def _give_back(self) -> None:
        remove_placement_group(self._group)
        self._group = None
        self.unit_name = self._plan.new_unit(self.slot)

    def _create(self) -> Any:
        resources = self._starter.resources()
        factory = ray.remote(runtime_env=self._starter.runtime_env(), **bundle_to_remote_args(resources))(ElasticWorker)
        options = factory.options(
            name=self._plan.worker(self.slot),
            namespace=self._plan.namespace,
            lifetime="detached",
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0),
        )
        until = time.monotonic() + NAME_FREE_S
        while True:
            try:
                return options.remote(self._plan, self.slot, self.unit_name)
            except ValueError:  # the name is taken: by whom we replace, or by a bring-up of a controller that is dead
                if time.monotonic() > until:
                    raise
            old = leftovers.actor(self._plan, self._plan.worker(self.slot))
            if old is not None:
                leftovers.kill(old)
            self._check()
            time.sleep(_POLL_S)

    def _first_answer(self, ref: Any) -> Any:
        """Its process starts, which may take long; on a node that has vanished meanwhile it takes for ever."""
        while True:
            try:
                return self._get(ref, LOOK_S)
            except GetTimeoutError:
                node = None if self._group is None else leftovers.node_of(self._group)
                if node is not None and not self._starter.silent.answers(node):
                    raise GetTimeoutError(
                        f"slot {self.slot} was placed on node {node}, which does not answer"
                    ) from None

    def _get(self, ref: Any, within_s: float | None = None) -> Any:
        until = None if within_s is None else time.monotonic() + within_s
        while not ray.wait([ref], timeout=_SLOW_POLL_S)[0]:
            self._check()
            if until is not None and time.monotonic() > until:
                raise GetTimeoutError(f"slot {self.slot} did not answer in {within_s:g} s")
        return ray.get(ref)

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled(f"slot {self.slot} is not wanted any more")

    def _remove(self) -> None:
        if self._actor is not None:
            leftovers.kill(self._actor)
        if self._group is not None:
            remove_placement_group(self._group)
