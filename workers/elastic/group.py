"""The worker group: Ray Train's, where the dead are replaced one by one and their number may change at any time.

The controller polls. Each poll takes in what arrived, asks the living, drops the dead and those that have left, starts
bring-ups for what is missing, asks the surplus to leave, and reports only the living to the controller, which stays
RUNNING. It hears of deaths in one case, when nobody is left of those that trained: then it starts all again, from the
checkpoint, as Ray Train does. While one lives the state lives, and the job waits for resources as long as it takes.
A worker whose train function ended with an error is gone too; where the error is the job's it ends (failures.py).

All state is touched by the controller's thread alone.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from ray._private.state import state as ray_state
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from ray.train.v2._internal.execution.worker_group.state import WorkerGroupState, _shutdown_workers
from ray.train.v2._internal.util import invoke_context_managers, time_monotonic
from ray.train.v2.api.exceptions import ControllerError
from ray.util.placement_group import remove_placement_group

from thinwire.workers.elastic import leftovers
from thinwire.workers.elastic.bring_up import Arrival, BringUp, ElasticWorker, NoCollectives, SilentNodes, Unit
from thinwire.workers.elastic.failures import Failure, Failures, JobFailed, Others, WorkerFailed, own_error
from thinwire.workers.elastic.membership_actor import Headcount, MembershipLink
from thinwire.workers.elastic.plan import Plan
from thinwire.workers.elastic.worker_side import Failed, Left

logger = logging.getLogger(__name__)


UNAVAILABLE_S = 20.0
UNANSWERED_S = 10.0
"""A poll takes milliseconds, and on a busy machine less than this."""
MEMBER_UNAVAILABLE_S = 60.0
"""As long as Ray lets a node be cut off from its head; by then no lease holds (workers/membership/commit_lease.py)."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a worker is gone. node_lives: its place can be filled again; else the node may be gone with it.

    answered: something has reported that it is gone; else the node may be silent, and Ray not know it.
    """

    why: str
    node_lives: bool = True
    answered: bool = True


class Health:
    """Which of Ray Train's answers to a poll mean that a worker is gone. Remembers since when one cannot be reached.

    A worker that Ray cannot reach may be alive, so that is death after UNAVAILABLE_S, or as soon as the membership has
    counted it out. One that still is a member may train while this host is cut off: it has MEMBER_UNAVAILABLE_S. Where
    a machine has vanished nothing reports it to Ray: a poll stays without an answer, and once the membership has
    counted that worker out too it has UNANSWERED_S. A worker whose process lives but that the membership has counted
    out long ago hangs: it must make room. An error of a train function is none of these: see failures.py.
    """

    def __init__(self, leave_s: float) -> None:
        self._leave_s = leave_s
        self._unavailable_since: dict[str, float] = {}

    def read(
        self, unit: Unit, status: Any, headcount: Headcount | None, unanswered_s: float = 0.0
    ) -> tuple[Any, Loss | None]:
        """The status as it counts, and why this worker is gone; None where it is not.

        unanswered_s: for how long the poll has been without an answer.
        """
        now = time.monotonic()
        error = status.error
        failure = error.health_check_failure if isinstance(error, WorkerHealthCheckFailedError) else None
        gone = None if headcount is None else headcount.gone.get(unit.slot)
        if gone is not None and gone.since_s > now - unit.started:
            gone = None  # its predecessor
        member = headcount is not None and unit.slot in headcount.seated
        if isinstance(failure, ActorUnavailableError):
            since = self._unavailable_since.setdefault(unit.name, now)
            if gone is not None:
                return status, Loss(f"unreachable, and no member any more ({gone.why})", False, answered=False)
            if now - since > (MEMBER_UNAVAILABLE_S if member else UNAVAILABLE_S):
                return status, Loss(f"unreachable for {now - since:.0f} s", False, answered=False)
            return WorkerStatus(running=True), None
        self._unavailable_since.pop(unit.name, None)
        if isinstance(failure, RayActorError):
            return status, Loss(_in_short(failure))
        if isinstance(error, WorkerHealthCheckTimeoutError):
            return status, Loss(_in_short(error), answered=False)
        if (
            status.running
            and unanswered_s > (UNANSWERED_S if gone is not None else MEMBER_UNAVAILABLE_S)
            and not member
        ):
            reason = "is not seated" if gone is None else gone.why
            return status, Loss(f"no answer for {unanswered_s:.0f} s, and no member ({reason})", answered=False)
        if status.running and gone is not None and gone.since_s > self._leave_s:
            why = f"its process goes on {gone.since_s:.0f} s after the membership counted it out ({gone.why})"
            return status, Loss(why)
        return status, None


def _in_short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:500]


@dataclass(frozen=True, slots=True)
class Decision:
    """Slots."""

    start: tuple[int, ...] = ()
    cancel: tuple[int, ...] = ()
    dismiss: tuple[int, ...] = ()


def decide(
    target: int, running: Collection[int], coming: dict[int, bool], ending: Collection[int], seated: Collection[int]
) -> Decision:
    """What brings the job to `target` workers.

    running: slots whose worker lives. coming: slots on their way, and whether they have their resources. ending: slots
    on their way that were cancelled. seated: slots of the present generation. The lowest free slots are started; what
    waits for resources is cancelled first, then the highest slots.
    """
    surplus = len(running) + len(coming) - target
    if surplus < 0:
        taken = {*running, *coming, *ending}
        missing = -surplus - len(ending)  # their slots are free in a moment
        free = (slot for slot in range(len(taken) + max(missing, 0)) if slot not in taken)
        return Decision(start=tuple(slot for slot, _ in zip(free, range(missing), strict=False)))
    cancel = sorted(coming, key=lambda slot: (coming[slot], -slot))[:surplus]
    asked_by_server = max(sum(slot in seated for slot in running) - target, 0)
    idle = sorted((slot for slot in running if slot not in seated), reverse=True)
    return Decision(cancel=tuple(cancel), dismiss=tuple(idle[: max(surplus - len(cancel) - asked_by_server, 0)]))


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


class ElasticStatePage(StateManagerCallback):  # type: ignore[misc]
    """Ray Train's, updated at each change of the workers."""

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


CANCEL_S = 5.0
DRAINS_S = 2.0
"""Between two looks at which nodes are being drained."""


class ElasticWorkerGroup(WorkerGroup):  # type: ignore[misc]
    """See the module. train_run_context.backend_config holds the plan."""

    _worker_cls = ElasticWorker
    _failures_of: ClassVar[dict[str, Failures]] = {}
    """By run: they count over full restarts too."""

    def __init__(self, train_run_context: Any, worker_group_context: Any, callbacks: Any = None) -> None:
        super().__init__(train_run_context, worker_group_context, callbacks)
        self.plan: Plan = train_run_context.backend_config.plan
        self._world_rank_to_ongoing_poll: dict[int, Any] = {}  # the base class's: type known to mypy here
        self._units: list[Unit] = []
        """In the order of the state's workers."""
        self._coming: dict[int, BringUp] = {}
        self._arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._failures = self._failures_of.setdefault(train_run_context.run_id, Failures(self.plan))
        self._link = MembershipLink(self.plan)
        self._health = Health(self.plan.leave_s)
        self.silent = SilentNodes()
        self._vacant: dict[int, tuple[str, Any]] = {}
        """Placement groups of the dead, by slot, with their names: the next worker of the slot takes them."""
        self._has_enough = False
        """Are there as many workers as the job needs, as far as is known?"""
        self._swept = False
        self._drains_seen_at = 0.0

    def __bool__(self) -> bool:
        """True without workers too, where the inherited __len__ would make it False for the controller."""
        return True

    # What bring_up.Starter asks.

    def resources(self) -> dict[str, float]:
        """Of one worker."""
        return dict(self._worker_group_context.resources_per_worker)

    def runtime_env(self) -> dict[str, Any]:
        """Of a worker's process."""
        environment: dict[str, Any] = self._get_worker_runtime_env(
            self._train_run_context.run_config.worker_runtime_env
        )
        return environment

    def initialise(self, worker: Any) -> None:
        """Make Ray Train's context in this worker, and what callbacks do at its start."""
        self._init_train_context([worker], NoCollectives())
        alone = ReplicaGroup([worker], self.resources(), [])
        for callback in self._replica_group_callbacks:
            if not isinstance(callback, ReportCallbackHandler):  # it belongs to the controller's thread: see _set_units
                callback.after_replica_group_start(alone)

    def train_function(self) -> Any:
        """What `run_train_fn` takes."""
        return self._worker_group_context.train_fn_ref

    # Start and end.

    def _start(self) -> None:
        """Adopt what lives; polls do the rest. Nothing waits for resources: the controller can be asked and stopped."""
        self._assert_inactive()
        living = leftovers.workers_of(self.plan)
        try:
            self._link.open(owner=self._train_run_context.run_id, living=len(living))
        except RayError as error:
            raise WorkerGroupStartupFailedError(f"the membership actor does not start: {error}") from error
        with invoke_context_managers([callback.on_worker_group_start for callback in self._callbacks]):
            for callback in self._callbacks:
                callback.before_worker_group_start(self._worker_group_context)
            self._worker_group_state = ElasticGroupState(time_monotonic(), Units(self._remove_units), [], None)
            for slot, handle in living.items():
                self._coming[slot] = BringUp(self, slot, self._arrivals, living=handle)
            logger.info("elastic_group_starts job=%s adopting=%s", self.plan.job, sorted(self._coming))
            for callback in self._callbacks:
                callback.after_worker_group_start(self)
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)

    def _remove_units(self) -> None:
        for coming in self._coming.values():
            coming.cancel()
        leftovers.remove_workers(self.plan)
        leftovers.remove_units(self.plan)
        for coming in self._coming.values():
            coming.join(CANCEL_S)
        leftovers.remove_workers(self.plan)  # what a bring-up made in between
        leftovers.remove_units(self.plan)
        self._coming.clear()
        self._units = []

    # Poll.

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """One round; see the module. Raises: ControllerError where a slot keeps dying, or the job has failed."""
        self._assert_active()
        try:
            self._take_arrivals()
            status = self._judge(self._poll_workers_and_collect_errors(timeout) if self._units else [])
        except JobFailed as error:
            raise ControllerError(error) from error  # which Ray Train does not try again
        if status.worker_statuses:  # of none, Ray Train's own callbacks know nothing to say
            for callback in self._callbacks:
                callback.after_worker_group_poll_status(status)
        self._latest_poll_status = status
        return status

    def _take_arrivals(self) -> None:
        came = []
        while not self._arrivals.empty():
            arrival = self._arrivals.get()
            self._coming.pop(arrival.slot, None)
            unit = arrival.unit
            if arrival.cancelled:
                continue
            if unit is None:
                logger.warning("bring_up_failed slot=%d why=%s", arrival.slot, arrival.why)
                # However long Ray has tried to make an environment, the worker has not lived.
                lived_s = 0.0 if arrival.no_environment else time.monotonic() - arrival.started
                self._failures.died(arrival.slot, lived_s, arrival.why, spared=self._has_enough)
                continue
            pid, node = unit.worker.metadata.pid, unit.worker.metadata.node_ip
            took_s = time.monotonic() - arrival.started
            what = "worker_adopted" if unit.adopted else "worker_started"
            logger.info("%s slot=%d pid=%d node=%s took_s=%.1f", what, unit.slot, pid, node, took_s)
            came.append(unit)
        if came:
            self._set_units([*self._units, *came])

    def _judge(self, statuses: list[Any]) -> WorkerGroupPollStatus:
        """The status for the controller, after those that are gone were dropped and others started."""
        headcount = self._link.headcount()
        if headcount is not None:
            self._has_enough = headcount.enough
            for unit in self._units:
                unit.seated |= unit.slot in headcount.seated
        kept: list[tuple[Unit, Any]] = []
        lost: list[tuple[Unit, Loss, Any]] = []
        failed: list[tuple[Unit, Failed]] = []
        left: list[tuple[Unit, Left]] = []
        for index, (unit, status) in enumerate(zip(self._units, statuses, strict=True)):
            counted, loss = self._health.read(unit, status, headcount, self._unanswered_s(index))
            own = own_error(counted)
            if loss is not None:
                lost.append((unit, loss, status))
            elif own is not None and headcount is None:  # whose it is is not known yet
                kept.append((unit, WorkerStatus(running=True)))
            elif own is not None:
                failed.append((unit, own))
            elif not counted.running and isinstance(counted.return_value, Left):
                left.append((unit, counted.return_value))
            else:
                kept.append((unit, counted))
        for unit, loss, _ in lost:
            logger.warning("worker_lost slot=%d pid=%d why=%s", unit.slot, unit.worker.metadata.pid, loss.why)
            self._link.bar(unit.slot, unit.worker.metadata.pid, f"its job's driver has given it up: {loss.why}")
            spared = self._has_enough and not unit.seated
            self._failures.died(unit.slot, time.monotonic() - unit.started, loss.why, spared=spared)
        if failed and headcount is not None:
            self._judge_failures(failed, kept, headcount)
        adopting = any(coming.adopts for coming in self._coming.values())
        trained = headcount is not None and headcount.generation > 0
        if (lost or failed) and not kept and not left and trained and not adopting:
            # All errors: Ray Train starts all again.
            ended = [status.error or WorkerHealthCheckTimeoutError(loss.why) for _, loss, status in lost] + [
                WorkerFailed(f"{own.kind}: {own.message}") for _, own in failed
            ]
            return WorkerGroupPollStatus(
                worker_statuses={i: WorkerStatus(running=False, error=error) for i, error in enumerate(ended)}
            )
        for unit, loss, _ in lost:
            leftovers.kill(unit.worker.actor)
            if not loss.answered:
                self.silent.suspect(unit.worker.metadata.node_id)
            if loss.node_lives and unit.group is not None:
                self._vacant[unit.slot] = (unit.name, unit.group)
            else:
                _free(unit.group)
        for unit, _ in failed:  # its machine may be what fails: Ray chooses one anew
            leftovers.kill(unit.worker.actor)
            _free(unit.group)
        for unit, how in left:
            logger.info("worker_left slot=%d pid=%d reason=%s", unit.slot, unit.worker.metadata.pid, how.reason)
            if how.fenced:
                self._failures.fenced(_failure(unit, Failed("Fenced", how.reason)))
            leftovers.kill(unit.worker.actor)
            _free(unit.group)
        if lost or failed or left:
            self._set_units([unit for unit, _ in kept])
        if headcount is not None and not adopting:
            try:
                self._steer(headcount, [unit for unit, status in kept if not status.running])
            except RayError as error:  # the controller would end the job; the head node may answer at the next poll
                logger.warning("steering_failed reason=%s", str(error).splitlines()[0])
        return WorkerGroupPollStatus(worker_statuses=dict(enumerate(status for _, status in kept)))

    def _unanswered_s(self, index: int) -> float:
        poll = self._world_rank_to_ongoing_poll.get(index)
        return 0.0 if poll is None else time_monotonic() - poll.start_time

    def _judge_failures(
        self, failed: list[tuple[Unit, Failed]], kept: list[tuple[Unit, Any]], headcount: Headcount
    ) -> None:
        """Say who has failed. Raises: JobFailed."""
        new = []
        for unit, own in failed:
            where = unit.worker.metadata
            logger.warning(
                "worker_failed slot=%d pid=%d host=%s node=%s step=%d kind=%s message=%s",
                *(unit.slot, where.pid, where.hostname, where.node_ip, own.step, own.kind, own.message),
            )
            new.append(_failure(unit, own))
        there = [unit.slot for unit, status in kept if status.running]
        there += [slot for slot, coming in self._coming.items() if coming.placed and not coming.cancelled]
        finished = any(not status.running for _, status in kept)
        self._failures.judge(new, Others(there, headcount.step, headcount.enough, finished, headcount.generation))

    def _set_units(self, units: list[Unit]) -> None:
        polls = self._world_rank_to_ongoing_poll
        index_of = {id(unit): i for i, unit in enumerate(self._units)}
        self._world_rank_to_ongoing_poll = {
            i: polls[index_of[id(unit)]] for i, unit in enumerate(units) if index_of.get(id(unit)) in polls
        }
        self._units = units
        self._worker_group_state = dataclasses.replace(
            self._worker_group_state, workers=[unit.worker for unit in units]
        )
        for callback in self._callbacks:
            if isinstance(callback, ReportCallbackHandler):
                callback.after_worker_group_start(self)  # its queues are by index
            elif isinstance(callback, ElasticStatePage):
                callback.workers_changed(self)

    # Steer.

    def _steer(self, headcount: Headcount, finished: list[Unit]) -> None:
        if not self._swept:  # all that lives has been adopted: what else there is belongs to nobody
            orphans = leftovers.remove_units(self.plan, keep={unit.name for unit in self._units})
            self._swept = True
            logger.info("elastic_group_runs slots=%s orphans=%d", sorted(u.slot for u in self._units), len(orphans))
        if finished:  # the others will too
            for coming in self._coming.values():
                coming.cancel()
        else:
            self._to_target(headcount)
            self._empty_drained_nodes()
        for _, group in self._vacant.values():
            _free(group)
        self._vacant.clear()

    def _to_target(self, headcount: Headcount) -> None:
        decision = decide(
            headcount.target,
            running=[unit.slot for unit in self._units],
            coming={slot: coming.placed for slot, coming in self._coming.items() if not coming.cancelled},
            ending=[slot for slot, coming in self._coming.items() if coming.cancelled],
            seated=headcount.seated,
        )
        for slot in decision.start:
            pause_s = self._failures.pause_s(slot)
            logger.info("bring_up slot=%d target=%d pause_s=%g", slot, headcount.target, pause_s)
            group = self._vacant.pop(slot, None)
            self._coming[slot] = BringUp(self, slot, self._arrivals, pause_s=pause_s, group=group)
        for slot in decision.cancel:
            logger.info("bring_up_cancelled slot=%d target=%d", slot, headcount.target)
            self._coming[slot].cancel()
        for slot in decision.dismiss:
            self._link.dismiss(slot, f"the job was shrunk to {headcount.target} workers")

    def _empty_drained_nodes(self) -> None:
        """Ask workers on nodes that will be taken away to leave. Where that is all of them, they save first."""
        now = time.monotonic()
        if now - self._drains_seen_at < DRAINS_S:
            return
        self._drains_seen_at = now
        draining = ray_state.get_draining_nodes()
        doomed = [unit.slot for unit in self._units if unit.worker.metadata.node_id in draining]
        for slot in doomed:
            self._link.dismiss(slot, "its node is being drained")


def _failure(unit: Unit, error: Failed) -> Failure:
    where = unit.worker.metadata
    return Failure(unit.slot, f"{where.hostname} ({where.node_ip})", error, time.monotonic())


def _free(group: Any) -> None:
    if group is not None:
        remove_placement_group(group)
