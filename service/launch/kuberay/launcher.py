"""The launcher of Kubernetes: each attempt of a job is a RayJob in one namespace, named by its submission.

What the service knows of RayJobs and their RayClusters it has from a watch, so that asking costs no call: `status`
answers from that. The truth is the API server's and the database's: a service that starts again lists what is there,
and finds its own by the label with its id. KubeRay makes the pods, Ray's autoscaler asks for more of them, and the
driver, which runs on the head, fetches all else from the service with its ticket, as in any standing cluster.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from thinwire.contract.files import read_plain
from thinwire.contract.reports import WantedWorkers
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import read_accepted
from thinwire.service.launch.driver import driver_command, script_of_workers
from thinwire.service.launch.kuberay.kube import POLICIES, WATCH_SILENT_S, Expired, Kube, KubeError, connect
from thinwire.service.launch.kuberay.manifest import (
    LABEL_SERVICE,
    QUEUE,
    Attempt,
    Template,
    TemplateRefused,
    policy,
    rayjob,
    rayjob_name,
    read_template,
    resized,
)
from thinwire.service.launch.kuberay.pods import Object
from thinwire.service.launch.kuberay.states import cluster_of, ended_at, is_over, status_of, why_waiting
from thinwire.service.launch.protocol import (
    LOG_PART_BYTES,
    Code,
    Launcher,
    LauncherError,
    LaunchState,
    LaunchStatus,
    LogChunk,
    NoLog,
)

logger = logging.getLogger(__name__)

LOOK_S: Final = 3.0
"""Between two looks for what pods wait for."""
KEPT_S: Final = 3600.0
"""A RayJob that is over stays for so long once the service knows, for `kubectl get rayjobs`."""
KEPT_UNASKED_S: Final = 86400.0
"""And for so long after its end where nobody has asked for that, as of jobs that were over before this service started;
yet KEPT_S at least from when it was first seen: what ended while no service ran is asked for soon."""
MOST_FILE_BYTES: Final = 4 << 20
"""Of job.json and workers.json."""
RETRY_S, MOST_RETRY_S = 1.0, 15.0
"""Between two lists or watches that fail: at first, and at most."""
_POD_CLUSTER: Final = "ray.io/cluster"


class KubeRayLauncher(Launcher):
    """Jobs run in KubeRay.

    namespace: of the RayJobs; None: that of the service's pod, or of kubectl's context. template: a RayJob of your own.
    image: of head and workers, in the place of the template's. pods: a file with what is added to the pods. apart: each
    RayJob has a NetworkPolicy that keeps its pods from those of others.
    """

    name = "kuberay"
    own_cluster = False

    def __init__(
        self,
        namespace: str | None = None,
        template: Path | None = None,
        image: str | None = None,
        connect: Callable[[str | None], Kube] = connect,
        *,
        pods: Path | None = None,
        apart: bool = False,
    ) -> None:
        self._pods_file, self._apart = pods, apart
        self._namespace, self._template_file, self._image, self._connect = namespace, template, image, connect
        self._template: Template | None = None
        self._service_id = ""
        self._kube: Kube | None = None
        self._jobs: Watched | None = None
        self._clusters: Watched | None = None
        self._waits: dict[str, str] = {}
        self._seen_over: dict[str, float] = {}
        self._over_since: dict[str, float] = {}
        self._unanswered: set[str] = set()
        """Names of RayJobs whose create nobody has confirmed: they may be there, and the watch may be behind."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, service_id: str = "") -> None:
        """Read the template, ask for rights and KubeRay, and list what is there. Raises LauncherError."""
        self._service_id = service_id
        try:
            self._template = read_template(self._template_file, self._image, self._pods_file)
        except TemplateRefused as error:
            raise LauncherError(str(error)) from error
        kube = self._connect(self._namespace)
        try:
            if (missing := kube.missing(*(POLICIES,) * self._apart)) is not None:
                raise LauncherError(missing)
            selector = f"{LABEL_SERVICE}={service_id}"
            jobs, clusters = Watched(kube, "rayjobs", selector), Watched(kube, "rayclusters", selector)
            try:
                jobs.start()
                clusters.start()
            except BaseException:
                jobs.close()
                raise
        except BaseException:
            kube.close()
            raise
        self._kube, self._jobs, self._clusters = kube, jobs, clusters
        self._thread = threading.Thread(target=self._look_around, name="thinwire-kuberay", daemon=True)
        self._thread.start()
        logger.info("kuberay_found url=%s namespace=%s rayjobs=%d", kube.url, kube.namespace, len(jobs.all()))

    def close(self) -> None:
        """Follow no more. The RayJobs go on; started again, the service finds them."""
        self._closing.set()
        for watched in (self._jobs, self._clusters):
            if watched is not None:
                watched.close()
        if self._kube is not None:
            self._kube.close()

    def ready(self) -> str | None:
        """None when jobs can be submitted, else the reason they cannot."""
        if self._jobs is None:
            return "it has not started"
        return self._silence(self._jobs)

    def submit(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> None:
        """Create the RayJob of the submission; one that is there is a success. What is left of an earlier attempt goes
        first: a suspended one would be let go again. Raises LauncherError.
        """
        kube, jobs = self._started()
        body = self.manifest(submission_id, run_dir, attempt, metadata, code)
        name = body["metadata"]["name"]
        self.remove_earlier(metadata["job_id"], attempt)
        self._unanswered.add(name)
        kube.create("rayjobs", body)
        if (found := kube.get("rayjobs", name)) is not None:
            jobs.put(found)
            if self._apart:  # behind it, for it goes with it: until then its pods reach nothing of one another
                kube.create("networkpolicies", policy(found))
        self._unanswered.discard(name)

    def remove_earlier(self, job_id: str, attempt: int) -> None:
        """Delete the RayJobs of this job's attempts before this one that are not over. Raises LauncherError."""
        kube, jobs = self._started()
        for one in jobs.all():
            if _is_earlier(one, job_id, attempt) and not is_over(one):
                kube.delete("rayjobs", one["metadata"]["name"], one["metadata"].get("uid"))
                logger.info("rayjob_replaced name=%s by_attempt=%d", one["metadata"]["name"], attempt)

    def manifest(
        self, submission_id: str, run_dir: Path, attempt: int, metadata: Mapping[str, str], code: Code | None = None
    ) -> Object:
        """The RayJob that `submit` creates. Raises LauncherError."""
        kube, _ = self._started()
        assert self._template is not None, "read when it started"
        folder = RunFolder(run_dir)
        try:
            spec = read_accepted(json.loads(read_plain(folder.job, MOST_FILE_BYTES))["spec"])
            wanted = WantedWorkers.model_validate_json(read_plain(folder.workers, MOST_FILE_BYTES))
        except (OSError, ValueError, KeyError) as error:
            raise LauncherError(f"the run folder {run_dir} cannot be read: {error}") from error
        return rayjob(
            self._template,
            Attempt(
                service_id=self._service_id,
                submission_id=submission_id,
                entrypoint=driver_command(run_dir, attempt, metadata, script_of_workers(code)),
                metadata=metadata,
                spec=spec,
                least=wanted.min,
                most=wanted.max,
                namespace=kube.namespace,
                apart=self._apart,
            ),
        )

    def status(self, submission_id: str) -> LaunchStatus:
        """What the RayJob says, as the API server has last reported it; UNKNOWN while that is silent."""
        if self._jobs is None:
            return LaunchStatus(LaunchState.UNKNOWN, "the launcher has not started")
        if (silence := self._silence(self._jobs)) is not None:
            return LaunchStatus(LaunchState.UNKNOWN, silence)
        name = self._name(submission_id)
        found = self._jobs.get(name)
        if found is None and name in self._unanswered:
            try:
                found = self._ask_for(name)
            except KubeError as error:
                return LaunchStatus(LaunchState.UNKNOWN, str(error))
        if found is None:
            return LaunchStatus(LaunchState.ABSENT)
        status = status_of(found)
        if is_over(found):
            self._seen_over.setdefault(name, time.time())
        elif (wait := self._waits.get(name)) is not None:
            return replace(status, waits_for=wait)
        return status

    def _ask_for(self, name: str) -> Object | None:
        """The RayJob, whose create had no answer, as the API server says now. Raises KubeError."""
        kube, jobs = self._started()
        if (found := kube.get("rayjobs", name)) is not None:
            jobs.put(found)
        self._unanswered.discard(name)
        return found

    def cancel(self, submission_id: str) -> None:
        """Delete the RayJob: KubeRay stops its driver, then its pods end. Over or absent is a success.

        Raises: LauncherError.
        """
        kube, jobs = self._started()
        found = jobs.get(self._name(submission_id))
        if found is not None and "deletionTimestamp" not in found["metadata"]:
            kube.delete("rayjobs", found["metadata"]["name"], found["metadata"].get("uid"))

    def resize(self, submission_id: str, least: int, most: int) -> None:
        """Give the RayCluster of the submission these limits, where it has others: KubeRay hands no change of a RayJob
        on. Raises LauncherError.
        """
        kube, jobs = self._started()
        assert self._clusters is not None, "it has started"
        found = jobs.get(self._name(submission_id))
        name = None if found is None or is_over(found) else cluster_of(found)
        cluster = None if name is None else self._clusters.get(name)
        if cluster is None or "deletionTimestamp" in cluster["metadata"]:
            return
        if (patch := resized(cluster, least, most)) is not None:
            if not kube.patch("rayclusters", cluster["metadata"]["name"], patch):
                logger.info("raycluster_moved name=%s; the next turn looks again", cluster["metadata"]["name"])
                return
            logger.info("raycluster_resized name=%s min=%d max=%d", cluster["metadata"]["name"], least, most)

    def logs(self, submission_id: str, offset: int, limit: int = LOG_PART_BYTES) -> LogChunk:
        """None: the driver sends its log itself, and what it did not send went with its pod. Raises NoLog."""
        raise NoLog(f"the log of {submission_id} is kept as far as its driver has sent it; the rest was in its pod")

    def dashboard_url(self, submission_id: str) -> str | None:
        """The job's page in the dashboard of its own Ray, at an address inside of Kubernetes."""
        found = None if self._jobs is None else self._jobs.get(self._name(submission_id))
        status = {} if found is None or is_over(found) else found.get("status") or {}
        if not status.get("dashboardURL"):
            return None
        return f"http://{status['dashboardURL']}/#/jobs/{status.get('jobId', '')}"

    # what it does by itself

    def _look_around(self) -> None:
        """Find out what pods wait for, and remove RayJobs that have been over for long."""
        while not self._closing.wait(LOOK_S):
            try:
                self._waits = self._what_waits()
                self._remove_old()
            except KubeError as error:  # what was found before holds on; `ready` says more
                logger.debug("look_failed error=%s", error)
            except Exception:  # an object of a form that nobody foresaw
                logger.exception("look_failed")

    def _what_waits(self) -> dict[str, str]:
        """Name of a RayJob -> what its pods wait for."""
        kube, jobs = self._started()
        waiting = [one for one in jobs.all() if self._waits_for_something(one)]
        if not waiting:
            return {}
        clusters = [name for one in waiting if (name := cluster_of(one)) is not None]
        pods = kube.pods(f"{_POD_CLUSTER} in ({','.join(sorted(clusters))})") if clusters else []
        queued = any(QUEUE in one["metadata"].get("labels", {}) for one in waiting)
        workloads = kube.workloads() if queued else []
        warnings, now = kube.warnings(), time.time()
        found = {}
        for one in waiting:
            own = [pod for pod in pods if pod["metadata"]["labels"].get(_POD_CLUSTER) == cluster_of(one)]
            if (why := why_waiting(one, own, warnings, workloads, now)) is not None:
                found[one["metadata"]["name"]] = why
        return found

    def _waits_for_something(self, one: Object) -> bool:
        if is_over(one):
            return False
        if "deletionTimestamp" in one["metadata"] or status_of(one).state is not LaunchState.RUNNING:
            return True
        assert self._clusters is not None, "it has started"
        cluster = self._clusters.get(cluster_of(one) or "")
        counts = {} if cluster is None else cluster.get("status") or {}
        return int(counts.get("readyWorkerReplicas") or 0) < int(counts.get("desiredWorkerReplicas") or 0)

    def _remove_old(self) -> None:
        kube, jobs = self._started()
        now, names = time.time(), set()
        for one in jobs.all():
            name = one["metadata"]["name"]
            names.add(name)
            if not is_over(one) or "deletionTimestamp" in one["metadata"]:
                continue
            seen = self._seen_over.get(name)
            first = self._over_since.setdefault(name, now)
            unasked_s = now - ended_at(one, otherwise=first)
            if (seen is not None and now - seen > KEPT_S) or (now - first > KEPT_S and unasked_s > KEPT_UNASKED_S):
                kube.delete("rayjobs", name, one["metadata"].get("uid"))
                logger.info("rayjob_removed name=%s", name)
        for known in (self._seen_over, self._over_since):
            for gone in known.keys() - names:
                known.pop(gone, None)

    def _silence(self, jobs: Watched) -> str | None:
        """Why what was last reported cannot be trusted any more."""
        silent_s = jobs.silent_s()
        if silent_s is not None and silent_s <= WATCH_SILENT_S:
            return None
        return f"the Kubernetes API has said nothing for {silent_s or 0:.0f} s; {jobs.why() or 'its watch is silent'}"

    def _name(self, submission_id: str) -> str:
        return rayjob_name(self._service_id, submission_id)

    def _started(self) -> tuple[Kube, Watched]:
        if self._kube is None or self._jobs is None:
            raise LauncherError("the launcher has not started; the service's log says why")
        return self._kube, self._jobs


def _is_earlier(rayjob: Object, job_id: str, attempt: int) -> bool:
    """Of the same job, and of an attempt before this one?"""
    said = rayjob["spec"].get("metadata") or {}
    number = str(said.get("attempt", ""))
    return said.get("job_id") == job_id and number.isdecimal() and int(number) < attempt


class Watched:
    """All objects of a kind that are the service's, as the API server has reported them: listed once, then watched.

    A list gives all, and the version that they are of; a watch gives what has changed since. Where the server has
    forgotten that version (410 Gone) all are listed again. Without an answer the objects stay as they were last seen,
    and `silent_s` says for how long: nothing is taken for gone that has not been reported to be.
    """

    def __init__(self, kube: Kube, plural: str, selector: str) -> None:
        self._kube, self._plural, self._selector = kube, plural, selector
        self._objects: dict[str, Object] = {}
        self._put_at: dict[str, float] = {}
        self._version = ""
        """All changes up to this one are known; "": they must be listed."""
        self._lock = threading.Lock()
        """Of the three above."""
        self._stop = threading.Event()
        self._heard: float | None = None
        self._why = "it has not been listed yet"
        self._thread = threading.Thread(target=self._run, name=f"thinwire-{plural}", daemon=True)

    def start(self) -> None:
        """List them, then begin to follow. Raises KubeError."""
        self._list()
        self._thread.start()

    def close(self) -> None:
        """Follow no more. The thread ends with the watch that it is in."""
        self._stop.set()

    def silent_s(self) -> float | None:
        """Seconds since the server last said something of them; None before the first list."""
        heard = self._heard
        return None if heard is None else time.monotonic() - heard

    def why(self) -> str:
        """Why the server is silent, as far as is known."""
        return self._why

    def get(self, name: str) -> Object | None:
        """The object; None where there is none."""
        with self._lock:
            return self._objects.get(name)

    def all(self) -> list[Object]:
        """All of them."""
        with self._lock:
            return list(self._objects.values())

    def put(self, found: Object) -> None:
        """One that was just made or asked for, unless a newer one, or its end, is known."""
        name = found["metadata"]["name"]
        with self._lock:
            if _is_known(found, self._version):
                return
            self._put_at[name] = time.monotonic()
            if name not in self._objects:
                self._objects[name] = found

    def _run(self) -> None:
        wait_s = RETRY_S
        while not self._stop.is_set():
            try:
                if not self._version:
                    self._list()
                self._follow()
                wait_s = RETRY_S
            except Expired:
                logger.info("watch_expired kind=%s", self._plural)
                self._forget()
            except KubeError as error:
                if self._stop.is_set():
                    return
                if str(error) != self._why:
                    logger.warning("watch_failed kind=%s error=%s", self._plural, error)
                self._why = str(error)
                if error.status not in (None, 429):
                    # It answers, and not this: after a restore it may never come to the version that was listed.
                    self._forget()
            except Exception as error:  # what a server may send has no end; the thread must not have one for it
                logger.exception("watch_failed kind=%s", self._plural)
                self._why = f"{type(error).__name__}: {error}"
                self._forget()
            # Not all at once, when the server comes back.
            self._stop.wait(wait_s * random.uniform(0.5, 1.5))
            wait_s = min(2 * wait_s, MOST_RETRY_S)

    def _forget(self) -> None:
        """Where the watch was: they are listed next."""
        with self._lock:
            self._version = ""

    def _list(self) -> None:
        began = time.monotonic()
        found, version = self._kube.all(self._plural, self._selector)
        with self._lock:
            listed = {one["metadata"]["name"]: one for one in found}
            # What came to be while the list was made may not be in it.
            self._put_at = {name: at for name, at in self._put_at.items() if at >= began}
            put = {name: self._objects[name] for name in self._put_at if name in self._objects}
            later = {name: one for name, one in put.items() if not _is_known(one, version)}
            self._objects, self._version = later | listed, version
        self._note()

    def _follow(self) -> None:
        """One watch, to its end."""
        for kind, found in self._kube.watch(self._plural, self._selector, self._version):
            with self._lock:
                self._version = found["metadata"]["resourceVersion"]
                if kind in ("ADDED", "MODIFIED"):
                    self._objects[found["metadata"]["name"]] = found
                elif kind == "DELETED":
                    self._objects.pop(found["metadata"]["name"], None)
            self._note()
            if self._stop.is_set():
                return
        self._note()

    def _note(self) -> None:
        self._heard, self._why = time.monotonic(), ""


def _is_known(found: Object, version: str) -> bool:
    """Has a watch that is at this version reported what became of this object since?

    Relied on: versions of one kind rise as whole numbers. Kubernetes promises that since 1.35; before, it calls them
    opaque, and they are the revisions of etcd. Where they are no numbers, nothing is known: False.
    """
    own = found["metadata"].get("resourceVersion", "")
    return own.isdecimal() and version.isdecimal() and int(own) <= int(version)
