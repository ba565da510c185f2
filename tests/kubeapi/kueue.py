"""Kueue, played: a Workload for each RayJob of a queue, which waits until a test admits it, and takes it back."""

from __future__ import annotations

import uuid
from typing import Final

from tests.kubeapi.answers import Refused
from tests.kubeapi.kinds import RAYJOBS, WORKLOADS, Kind, Object
from tests.kubeapi.kuberay_pods import owned_by
from tests.kubeapi.kuberay_rules import is_autoscaling
from tests.kubeapi.store import Store, now

QUEUE: Final = "kueue.x-k8s.io/queue-name"
ELASTIC: Final = "kueue.x-k8s.io/elastic-job"
PREEMPTED: Final = (
    "Preempted to accommodate a workload (UID: 0a1b, JobUID: 2c3d) due to prioritization in the ClusterQueue"
)
NO_QUOTA: Final = (
    "couldn't assign flavors to pod set head: insufficient unused quota for cpu in flavor default-flavor, 2 more needed"
)


class Kueue:
    """queues: the LocalQueues that there are. It also refuses, as Kueue's webhook does, jobs that it cannot count."""

    def __init__(self, store: Store, queues: frozenset[str] = frozenset({"lab"})) -> None:
        self._store, self.queues = store, queues
        store.admission.append(self._review)

    def step(self) -> None:
        """Note every RayJob of a queue that waits."""
        for rayjob in self._store.all(RAYJOBS):
            if self._queue(rayjob) and rayjob["spec"].get("suspend") and self._workload(rayjob) is None:
                self._note(rayjob)

    def admit(self, name: str, namespace: str = "default") -> None:
        """There is room now: the RayJob is let go."""
        rayjob = self._store.get(RAYJOBS, namespace, name)
        workload = self._workload(rayjob)
        assert workload is not None, f"Kueue has not seen {name} yet: step() first"
        queue = workload["spec"]["queueName"]
        conditions = [
            _condition("QuotaReserved", True, "QuotaReserved", f"Quota reserved in ClusterQueue {queue}"),
            _condition("Admitted", True, "Admitted", "The workload is admitted"),
        ]
        self._set(workload, conditions)

        def let_go(found: Object) -> Object:
            found["spec"]["suspend"] = False
            return found

        self._store.update(RAYJOBS, namespace, name, let_go)

    def preempt(self, name: str, namespace: str = "default") -> None:
        """Others are to have its machines: the RayJob is suspended, and waits in its queue again."""
        rayjob = self._store.get(RAYJOBS, namespace, name)
        workload = self._workload(rayjob)
        assert workload is not None, f"Kueue has not seen {name} yet: step() first"
        conditions = [
            _condition("QuotaReserved", False, "Pending", PREEMPTED),
            _condition("Admitted", False, "NoReservation", "The workload has no reservation"),
            _condition("Evicted", True, "Preempted", PREEMPTED),
            _condition("Requeued", True, "Preempted", PREEMPTED),
        ]
        self._set(workload, conditions)

        def hold(found: Object) -> Object:
            found["spec"]["suspend"] = True
            return found

        self._store.update(RAYJOBS, namespace, name, hold)

    def _note(self, rayjob: Object) -> None:
        metadata, queue = rayjob["metadata"], self._queue(rayjob)
        body = {
            "metadata": {
                "name": f"rayjob-{metadata['name']}-{uuid.uuid4().hex[:5]}",
                "labels": {"kueue.x-k8s.io/job-uid": metadata["uid"]},
                "ownerReferences": owned_by(rayjob),
            },
            "spec": {"queueName": queue, "active": True},
        }
        workload = self._store.create(WORKLOADS, metadata["namespace"], body)
        reason, words = "Pending", NO_QUOTA
        if queue not in self.queues:
            reason, words = "Inadmissible", f"LocalQueue {queue} doesn't exist"
        self._set(workload, [_condition("QuotaReserved", False, reason, words)])

    def _review(self, kind: Kind, made: Object) -> None:
        """Raises Refused."""
        if kind is not RAYJOBS or not self._queue(made):
            return
        spec, wrong = made["spec"], []
        if is_autoscaling(spec["rayClusterSpec"]) and made["metadata"].get("annotations", {}).get(ELASTIC) != "true":
            path = "spec.rayClusterSpec.enableInTreeAutoscaling"
            wrong.append(f"{path}: Invalid value: true: a kueue managed job should not use autoscaling")
        if not spec.get("shutdownAfterJobFinishes"):
            path = "spec.shutdownAfterJobFinishes"
            wrong.append(f"{path}: Invalid value: false: a kueue managed job should delete the cluster after finishing")
        if wrong:
            words = wrong[0] if len(wrong) == 1 else f"[{', '.join(wrong)}]"
            message = f'admission webhook "vrayjob.kb.io" denied the request: {words}'
            raise Refused(403, "Forbidden", message)

    def _queue(self, rayjob: Object) -> str:
        return str((rayjob["metadata"].get("labels") or {}).get(QUEUE, ""))

    def _workload(self, rayjob: Object) -> Object | None:
        uid = rayjob["metadata"]["uid"]

        def is_its(found: Object) -> bool:
            return any(owner["uid"] == uid for owner in found["metadata"].get("ownerReferences", ()))

        return next(iter(self._store.all(WORKLOADS, rayjob["metadata"]["namespace"], is_its)), None)

    def _set(self, workload: Object, conditions: list[Object]) -> None:
        metadata = workload["metadata"]
        self._store.update(
            WORKLOADS,
            metadata["namespace"],
            metadata["name"],
            lambda found: found | {"status": {"conditions": conditions}},
            "status",
        )


def _condition(name: str, holds: bool, reason: str, message: str) -> Object:
    return {"type": name, "status": str(holds), "reason": reason, "message": message, "lastTransitionTime": now()}
