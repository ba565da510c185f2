"""The driver of a job: what Ray Jobs runs.  python -m thinwire.workers.main --run-dir RUNS/ID --attempt 1

Reads job.json from the run folder, runs a Ray Train job over the workers that the spec asks for, and exits 0 where
the run succeeded; otherwise failure.json says why and the exit status is 1, or 3 where nobody has said why.

In a cluster that shares no folder with the service it is started by --service URL --job ID --attempt N --ticket T. It
exchanges the ticket for the job, makes a run folder of its own, and sends its log to the service.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from thinwire.contract import logs
from thinwire.contract.places import Room, never_fits, uses_gpus
from thinwire.contract.reports import Event, EventKind, Failure, WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.script import ScriptRecipe, runtime_environment
from thinwire.contract.spec import JobSpec, ScriptSpec, Workers, read_accepted
from thinwire.contract.tls import from_word
from thinwire.contract.traces import OfJob
from thinwire.workers.driver_lines import DriverLines
from thinwire.workers.elastic.failures import JobFailed
from thinwire.workers.elastic.worker_side import Failed
from thinwire.workers.nodes import interface_variables, refuse_unfit_nodes
from thinwire.workers.run_place import ClaimRefused, Credentials, Place, claim
from thinwire.workers.telemetry.reporter import Reporter
from thinwire.workers.telemetry.trackers.of_job import say_end
from thinwire.workers.worker import ADOPT_S, ALONE_S, failure_of, train_worker

logger = logging.getLogger(__name__)


BEGAN = time.time()
"""When this process began."""
NO_REASON = 3
"""Exit status of a run that ended without saying how: the service tries again, as after a kill."""
SUPERSEDED = "RunSuperseded"
"""The error of telemetry.reporter, by name: a driver imports no torch."""
MEMBERSHIP_LOOK_S = 0.5
"""Between two questions to the membership."""
START_S = 20.0
"""A job that starts is said to wait only after so long: its workers are being started."""
KEPT_PACKAGE_S = 10 * 365 * 86400
"""A script's package is there for as long as its Ray."""
ENDED_S = 5.0
"""The same for a tracker to take that a signal has ended the job: Ray kills the driver after ten."""
LAST_WORDS_S = 10.0
"""At the end of a job the service has so long to take what it has not heard yet; the run folder has it."""


def main(arguments: list[str] | None = None) -> int:
    """Run the job of a run folder. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="thinwire.workers.main", description=__doc__.split("\n\n")[0])
    parser.add_argument("--run-dir", type=Path, help="the job's folder, holding job.json")
    parser.add_argument("--service", help="the service's URL, where it shares no folder with this machine")
    parser.add_argument("--job", help="with --service: the job's ID")
    parser.add_argument("--ticket", help="with --service: of this attempt; it is worth nothing afterwards")
    parser.add_argument(
        "--service-ca", default="", help="with --service: the CA that it is trusted by, as base64 of PEM"
    )
    parser.add_argument("--package", help="with --service: sha256 of the script's package, which is fetched there")
    parser.add_argument(
        "--script-of-workers",
        action="store_true",
        help="what the script needs is given to the job's workers alone: the cluster has not been told of it",
    )
    parser.add_argument("--attempt", type=int, default=1, help="which submission of the job this is")
    options = parser.parse_args(arguments)
    if (options.run_dir is None) == (options.service is None) or (options.service and not options.ticket):
        parser.error("give --run-dir; or --service, --job, --attempt and --ticket")
    logs.set_up()
    attempt, name = options.attempt, None
    if options.service is None:
        place = Place(options.run_dir.resolve(), attempt)
    else:
        try:
            ca = from_word(options.service_ca)
            claimed = claim(options.service, options.job, options.ticket, ca=ca)
        except ClaimRefused as error:
            logger.error("claim_refused reason=%s", error)
            return NO_REASON
        attempt, name = claimed.attempt, claimed.unique_name
        place = Place.of_its_own(Credentials(claimed.job, claimed.token, options.service, ca), attempt)
    with place:
        place.send_log()
        brings = Brought(options.package) if options.script_of_workers or options.package else None
        return _run(place, attempt, name, brings)


@dataclass(frozen=True, slots=True)
class Brought:
    """A script that comes to the job's workers alone: on a head no code of a user runs. package: its sha256."""

    package: str | None = None

    def environment(self, recipe: ScriptRecipe, place: Place) -> dict[str, Any]:
        """Ray's runtime environment of a worker; Ray is up. Raises: ServiceError, PackageDiffers, OSError."""
        from ray._private.runtime_env.packaging import pin_runtime_env_uri
        from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

        found = runtime_environment(recipe.working_dir, recipe.pip, recipe.env_vars)
        if self.package is not None:
            zipped = {"working_dir": str(place.package(self.package))}
            found |= upload_working_dir_if_needed(zipped, include_gitignore=False)
            # Ray drops it with the last worker that has it, and the next one would not find it.
            pin_runtime_env_uri(found["working_dir"], expiration_s=KEPT_PACKAGE_S)
        return found


def _run(place: Place, attempt: int, name: str | None, brought: Brought | None) -> int:
    """Train, and find out how it ended. Returns the exit status. name: of the job in Ray, where not its id."""
    job: dict[str, Any] = {}
    spec: JobSpec | None = None
    trace = OfJob(job, attempt, "driver")
    try:
        job = json.loads(place.folder.job.read_text())
        trace = OfJob(job, attempt, "driver")
        os.environ[logs.VARIABLE] = form = logs.of_environment(job.get("log_format"))
        logs.set_up(form, fields={"job_id": job["job_id"], "attempt": attempt})
        spec = read_accepted(job["spec"])
        try:
            up = partial(trace.past, "driver up", BEGAN)
            fit(spec, name or job["job_id"], place, attempt, brought, up)
        except SystemExit:  # a signal has ended it
            trace.past("attempt", BEGAN, error="ended by a signal")
            trace.close(ENDED_S)
            say_end(spec, job, "cancelled", ENDED_S)
            raise
    except Exception as error:
        logger.exception("job_failed")
        failure = _in_short(error)
        if failure.kind == SUPERSEDED:  # the run is that of the newer attempt
            return NO_REASON
        place.fail(failure)
    kept = place.failure()
    trace.past("attempt", BEGAN, error=None if kept is None else f"{kept.kind}: {kept.message}")
    trace.close()
    if kept is not None:
        logger.error("job_failed kind=%s message=%s", kept.kind, kept.message)
        if spec is not None:
            say_end(spec, job, "failed")
        return 1
    if not place.has_succeeded():
        logger.error("job_ended_without_summary reason=rank 0 was lost as it wrote it; a further attempt will")
        return NO_REASON
    return 0


def fit(
    spec: JobSpec,
    name: str,
    place: Place,
    attempt: int,
    brought: Brought | None = None,
    on_up: Callable[[], None] = lambda: None,
) -> None:
    """Run the Ray Train job to its end: in place, or with restarts of all workers from the checkpoint.

    name: of the job in Ray. brought: the script, where the cluster has not been told of it. on_up: called when Ray is
    there.
    Raises: what Ray Train raises once spec.workers.max_restarts is used up.
    """
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # a lost worker is noticed sooner
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # the Train page of the dashboard shows the run
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # one line a rank is not a duplicate
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # workers stay where Ray has unpacked the job's package
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # or it logs again what a script prints
    import ray
    from ray.train import FailureConfig, RunConfig

    log_is_text = logs.of_environment() == "text"
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "local")
        # Ray Train's own actors look for their cluster again; where the machine runs another Ray they must not guess.
        given = {} if address == "local" else {"RAY_ADDRESS": address}
        of_log = {} if log_is_text else {logs.VARIABLE: "json"}  # to all processes of the job
        environment: dict[str, Any] = {"env_vars": {**given, **of_log}} if given or of_log else {}
        ray.init(address=address, runtime_env=environment, configure_logging=log_is_text)
    if not log_is_text:
        DriverLines({"job_id": place.run_dir.name, "attempt": attempt}).take_over()
    on_up()
    interface = spec.network.interface
    of_worker: dict[str, Any] = {}
    if brought is not None and isinstance(spec, ScriptSpec):
        of_worker = brought.environment(spec.recipe, place)
    refuse_unfit_nodes(interface, of_worker)
    if interface is not None:
        of_worker["env_vars"] = {**of_worker.get("env_vars", {}), **interface_variables(interface)}
    wanted, resources = wanted_workers(place, spec.workers), ray.cluster_resources()
    workers = spec.workers.model_copy(update={"min": wanted.min, "max": wanted.max})
    room = Room(cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)))
    _refuse_too_many(workers, room)
    use_gpu = uses_gpus(workers, room.gpus)
    fit_how = _fit_in_place if workers.elastic == "in_place" else _fit_with_restarts
    credentials = place.credentials

    def train_function(config: dict[str, Any]) -> Failed | None:
        return train_worker(config, credentials)

    fit_how(
        spec.model_copy(update={"workers": workers}),
        name,
        place,
        use_gpu,
        interface,
        # What the dashboard shows of a run has its configuration in it: credentials go another way.
        train_function=train_function,
        train_loop_config={"run_dir": str(place.run_dir), "attempt": attempt},
        run_config=RunConfig(
            name=name,
            storage_path=str(place.folder.ray),
            failure_config=FailureConfig(max_failures=spec.workers.max_restarts),
            worker_runtime_env=of_worker or None,
        ),
    )


def wanted_workers(place: Place, workers: Workers) -> WantedWorkers:
    """What is wanted now; what the spec says where that cannot be found out."""
    return place.wanted() or WantedWorkers(min=workers.min, max=workers.max, revision=0)


class WantedFollower:
    """Looks now and then what is wanted, in a thread, and hands on what has changed. `pass_on` may raise; then again.

    first: what is known already.
    """

    def __init__(self, place: Place, first: WantedWorkers, pass_on: Callable[[WantedWorkers], None]) -> None:
        self._place, self._known, self._pass_on = place, first, pass_on
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-wanted", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closing.wait(self._place.wanted_look_s):
            now = self._place.wanted()
            if now is None or now == self._known:
                continue
            try:
                self._pass_on(now)
            except Exception:  # whatever Ray raises: the actor is being started again; it is tried again
                logger.warning("wanted_workers_untold min=%d max=%d", now.min, now.max, exc_info=True)
                continue
            logger.info("wanted_workers min=%d max=%d revision=%d", now.min, now.max, now.revision)
            self._known = now


@dataclass(frozen=True, slots=True)
class Waiting:
    """For how many workers, and since which step."""

    have: int
    least: int
    step: int


def waiting(snapshot: dict[str, Any], begun_s: float) -> Waiting | None:
    """What the membership's snapshot says of it, so long after the driver has begun."""
    if snapshot["status"] != "waiting for workers" or (not snapshot["generation"] and begun_s < START_S):
        return None
    return Waiting(snapshot["joined"], snapshot["limits"]["min"], snapshot["last_step"])


KINDS = {
    "minority": EventKind.MEMBERSHIP_MINORITY,
    "gave_up": EventKind.MEMBERSHIP_GAVE_UP,
    "waited_for": EventKind.WORKER_STUCK,
    "stands_still": EventKind.STALLED,
}
"""Of what happens at the membership: others have gone on without members that had committed steps, or without any; a
worker is waited for, or the whole job stands still (membership/stuck.py)."""


def happened(snapshot: dict[str, Any]) -> list[Event]:
    """What the membership's snapshot says of that."""
    return [
        Event(
            kind=KINDS[one["kind"]],
            step=one["fields"]["step"],
            time=one["time"],
            fields={"generation": one["generation"], **{k: v for k, v in one["fields"].items() if k != "step"}},
        )
        for name in ("given_up", "still")  # missing where an earlier version has started the membership
        for one in snapshot.get(name, ())
    ]


class MembershipWatch:
    """Reports that a job waits for workers or stands still, and what its membership has given up: no worker may be
    left, or none may be able to say it.

    Looks every MEMBERSHIP_LOOK_S, in a thread, and reports what has changed: in the run folder, and to the service,
    also through an outage of it. What the driver of an earlier attempt has reported it does not report again.

    look: the membership's snapshot; None where nobody answers. A later sample or `regrouped` ends the waiting.
    """

    def __init__(self, place: Place, look: Callable[[], dict[str, Any] | None]) -> None:
        self._reporter, self._look = Reporter.in_place(place), look
        self._began = time.monotonic()
        self._told: Waiting | None = None
        self._known = _reported_before(place.folder)
        self._unseen = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinwire-waiting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closing.set()
        self._thread.join(5.0)
        self._reporter.close(timeout_s=LAST_WORDS_S)

    def _run(self) -> None:
        while not self._closing.wait(MEMBERSHIP_LOOK_S):
            try:
                snapshot = self._look()
            except Exception:  # whatever Ray raises: the actor is being started again, or has gone
                if not self._unseen:
                    logger.warning("membership_unseen", exc_info=True)
                self._unseen = True
                continue
            self._unseen = False
            if snapshot is None:
                continue
            now = waiting(snapshot, time.monotonic() - self._began)
            if now is not None and now != self._told:
                self._tell(now)
            self._told = now
            for event in happened(snapshot):
                if _key(event) not in self._known:
                    self._known.add(_key(event))
                    logger.warning("%s step=%d %s", event.kind, event.step, event.fields.get("told", event.fields))
                    self._reporter.publish(event)

    def _tell(self, now: Waiting) -> None:
        logger.warning("waiting_for_workers have=%d min=%d step=%d", now.have, now.least, now.step)
        fields: dict[str, JsonValue] = {"have": now.have, "min": now.least}
        self._reporter.publish(
            Event(kind=EventKind.WAITING_FOR_WORKERS, step=now.step, time=time.time(), fields=fields)
        )


def _key(event: Event) -> tuple[str, float]:
    return event.kind, event.time


def _reported_before(folder: RunFolder) -> set[tuple[str, float]]:
    """Of events.jsonl, without a line that was torn. Empty where it cannot be read."""
    try:
        lines = folder.events.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    reported = set()
    for line in lines:
        with suppress(ValidationError):
            reported.add(_key(Event.model_validate_json(line)))
    return reported


def _fit_in_place(
    spec: JobSpec,
    job: str,
    place: Place,
    use_gpu: bool,
    interface: str | None,
    train_function: Callable[..., Any],
    **how: Any,
) -> None:
    """Workers come and go one by one, and the others keep their processes."""
    import ray

    from thinwire.workers.elastic import leftovers
    from thinwire.workers.elastic.membership_actor import ensure_membership
    from thinwire.workers.elastic.trainer import ElasticTrainer
    from thinwire.workers.membership.seats import Limits
    from thinwire.workers.signature import known_before

    workers = spec.workers
    attempt: int = how["train_loop_config"]["attempt"]
    trainer = ElasticTrainer(
        train_function,
        job=job,
        secret=_membership_secret(place.folder),
        limits=Limits(workers.min, workers.max),
        resources_per_worker=_resources(use_gpu, workers.per_box),
        use_gpu=use_gpu,
        lease_s=ADOPT_S,
        alone_s=ALONE_S,
        grace_s=workers.grace_s,
        attempt=attempt,
        interface=interface,
        known=known_before(spec),
        **how,
    )

    def pass_on(now: WantedWorkers) -> None:
        ray.get(ensure_membership(trainer.plan).set_limits.remote(now.min, now.max), timeout=30)

    def look() -> dict[str, Any] | None:
        membership = leftovers.actor(trainer.plan, trainer.plan.membership)
        return None if membership is None else ray.get(membership.snapshot.remote(), timeout=10)

    first = WantedWorkers(min=workers.min, max=workers.max, revision=0)
    follower = WantedFollower(place, first, pass_on)
    watch = MembershipWatch(place, look)
    try:
        trainer.fit()
    finally:
        watch.close()
        follower.close()


def _fit_with_restarts(
    spec: JobSpec,
    job: str,
    place: Place,
    use_gpu: bool,
    interface: str | None,
    train_function: Callable[..., Any],
    **how: Any,
) -> None:
    """Ray Train's own way: whenever a worker is lost all start again, from the checkpoint."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    workers = spec.workers
    TorchTrainer(
        train_function,
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo", timeout_s=120),
        scaling_config=ScalingConfig(
            num_workers=workers.max if workers.min == workers.max else (workers.min, workers.max),
            use_gpu=use_gpu,
            resources_per_worker=_resources(use_gpu),
        ),
        **how,
    ).fit()


def _resources(use_gpu: bool, processes: int = 1) -> dict[str, float]:
    return {"CPU": processes, **({"GPU": processes} if use_gpu else {})}


def _membership_secret(folder: RunFolder) -> str:
    """What only workers of this job know: made of its token, so that a new driver of the job knows it too."""
    if folder.token.exists():
        return hashlib.sha256(b"membership " + folder.token.read_text().strip().encode()).hexdigest()
    return secrets.token_hex(32)  # a run without a service, which has one driver


def _refuse_too_many(workers: Workers, room: Room) -> None:
    """A job that can never start must say so. Raises: ValueError where the cluster is too small for workers.min."""
    if (wrong := never_fits(workers, room)) is not None:
        path, value, allowed = wrong
        raise ValueError(f"{path} = {value} must be {allowed}")


def _in_short(error: Exception) -> Failure:
    """What a person should read of an error of Ray Train: which worker ended how, not the stack."""
    of_job = getattr(error, "controller_failure", None)
    if isinstance(of_job, JobFailed):
        return Failure(kind=of_job.kind[:64], message=of_job.message[:4000], step=of_job.step or None)
    causes = getattr(error, "worker_failures", None)
    if not causes:
        return failure_of(error)
    last = "; ".join(f"rank {rank}: {str(cause).strip().splitlines()[-1]}" for rank, cause in sorted(causes.items()))
    own = (getattr(cause, "_base_exc", cause) for cause in causes.values())  # Ray Train wraps what a worker raised
    superseded = any(type(cause).__name__ == SUPERSEDED for cause in own)
    return Failure(
        kind=SUPERSEDED if superseded else type(error).__name__,
        message=f"workers were lost more often than workers.max_restarts allows. Last: {last}"[:4000],
    )


if __name__ == "__main__":
    sys.exit(main())
