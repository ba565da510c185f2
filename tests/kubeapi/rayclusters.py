"""KubeRay's controller of RayClusters, played, with Ray's autoscaler: pods up to the replicas that are asked for.

Source: KubeRay 1.7.0, ray-operator/controllers/ray/raycluster_controller.go, reconcilePods and calculateStatus. As
there, a pod that is ending still counts: its replacement is made when it is gone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

from tests.kubeapi import kuberay_pods
from tests.kubeapi.answers import Refused, forbidden
from tests.kubeapi.happenings import happened
from tests.kubeapi.kinds import PODS, RAYCLUSTERS, RAYJOBS, SECRETS, SERVICES, Kind, Object
from tests.kubeapi.kuberay_pods import CLUSTER, GROUP, NODE_TYPE
from tests.kubeapi.kuberay_rules import is_autoscaling
from tests.kubeapi.store import Store, now

COMPONENT: Final = "raycluster-controller"
Demand = Callable[[Object, Object], int]
"""Of a RayCluster and one of its groups: how many workers Ray's autoscaler wants. It is held to the group's limits."""


class RayClusters:
    """Reconciles each RayCluster once a step. quota: of a pod, why the namespace's quota refuses it, or None."""

    def __init__(self, store: Store, demand: Demand | None = None) -> None:
        self._store = store
        self.demand = demand or self.most_while_it_runs
        self.quota: Callable[[Object], str | None] = lambda pod: None

    def step(self) -> None:
        """Every RayCluster, once."""
        for cluster in self._store.all(RAYCLUSTERS):
            if "deletionTimestamp" not in cluster["metadata"]:
                self._reconcile(cluster)

    def pods(self, cluster: Object, node: str | None = None, group: str | None = None) -> list[Object]:
        """Pods of a cluster, those that are ending with them."""

        def is_own(pod: Object) -> bool:
            labels = pod["metadata"].get("labels", {})
            own = labels.get(CLUSTER) == cluster["metadata"]["name"]
            return own and node in (None, labels.get(NODE_TYPE)) and group in (None, labels.get(GROUP))

        return self._store.all(PODS, cluster["metadata"]["namespace"], is_own)

    def head(self, cluster: Object) -> Object | None:
        """Its head pod."""
        return next(iter(self.pods(cluster, "head")), None)

    def most_while_it_runs(self, cluster: Object, group: Object) -> int:
        """All that the group may have, from when the cluster's job runs."""
        for owner in cluster["metadata"].get("ownerReferences", ()):
            rayjob = self._store.find(RAYJOBS, cluster["metadata"]["namespace"], owner["name"])
            if rayjob is not None and rayjob.get("status", {}).get("jobStatus") == "RUNNING":
                return int(group["maxReplicas"])
        return int(group["replicas"])

    def _reconcile(self, cluster: Object) -> None:
        self._make_once(SERVICES, kuberay_pods.service(cluster, cluster))
        if kuberay_pods.needs_secret(cluster):
            self._make_once(SECRETS, kuberay_pods.secret(cluster), cluster)
        if is_autoscaling(cluster["spec"]):
            cluster = self._scale(cluster)
        failure = self._reconcile_pods(cluster)
        self._note(cluster, failure)

    def _make_once(self, kind: Kind, body: Object, cluster: Object | None = None) -> None:
        owner = cluster or body
        namespace = owner["metadata"].get("namespace", "default")
        if self._store.find(kind, namespace, body["metadata"]["name"]) is None:
            self._store.create(kind, namespace, body)

    # Ray's autoscaler

    def _scale(self, cluster: Object) -> Object:
        """Patch replicas as the demand is; name whom to delete where there are too many."""
        if (head := self.head(cluster)) is None or head["status"].get("phase") != "Running":
            return cluster
        metadata = cluster["metadata"]
        # Asked before the store is held: a real Ray takes its time.
        wants = {group["groupName"]: self.demand(cluster, group) for group in cluster["spec"]["workerGroupSpecs"]}

        def scaled(found: Object) -> Object:
            for group in found["spec"].get("workerGroupSpecs", ()):
                wanted = max(group["minReplicas"], min(wants[group["groupName"]], group["maxReplicas"]))
                workers = self.pods(found, "worker", group["groupName"])
                names = {pod["metadata"]["name"] for pod in workers}
                strategy = group.setdefault("scaleStrategy", {})
                leaving = [name for name in strategy.get("workersToDelete", ()) if name in names]
                stays = [pod for pod in workers if pod["metadata"]["name"] not in leaving]
                stays.sort(key=lambda pod: int(pod["metadata"]["resourceVersion"]))
                leaving += [pod["metadata"]["name"] for pod in stays[wanted:]]
                group["replicas"] = wanted
                strategy["workersToDelete"] = leaving
                if not leaving:
                    group.pop("scaleStrategy")
            return found

        return self._store.update(RAYCLUSTERS, metadata["namespace"], metadata["name"], scaled)

    # the controller

    def _reconcile_pods(self, cluster: Object) -> tuple[str, str] | None:
        """Bring the pods to what the cluster asks for: reason and message of what stopped it, or None."""
        try:
            heads = self.pods(cluster, "head")
            if not heads:
                self._create(cluster, cluster["spec"]["headGroupSpec"], "head")
            elif self._delete_if_over(cluster, heads[0], "head"):
                return None
            for group in cluster["spec"].get("workerGroupSpecs", ()):
                self._reconcile_group(cluster, group)
        except Refused as refused:
            reason = "FailedCreateHeadPod" if not self.pods(cluster, "head") else "FailedCreateWorkerPod"
            return reason, refused.message
        return None

    def _reconcile_group(self, cluster: Object, group: Object) -> None:
        workers = self.pods(cluster, "worker", group["groupName"])
        if [pod for pod in workers if self._delete_if_over(cluster, pod, "worker")]:
            return
        named = (group.get("scaleStrategy") or {}).get("workersToDelete", ())
        for pod in workers:
            if pod["metadata"]["name"] in named and "deletionTimestamp" not in pod["metadata"]:
                self._delete(cluster, pod, "worker", "Deleted pod {0}")
        left = [pod for pod in workers if pod["metadata"]["name"] not in named]
        wanted = 0 if group.get("suspend") else _desired(group)
        for _ in range(wanted - len(left)):
            self._create(cluster, group, "worker")
        if not is_autoscaling(cluster["spec"]):  # with it, only the autoscaler says who goes
            for pod in left[: max(0, len(left) - wanted)]:
                self._delete(cluster, pod, "worker", "Deleted Pod {0}")

    def _create(self, cluster: Object, group: Object, node: kuberay_pods.NodeType) -> None:
        body, metadata = kuberay_pods.pod(cluster, group, node), cluster["metadata"]
        word = "Head" if node == "head" else "Worker"
        try:
            if (why := self.quota(body)) is not None:
                name = body["metadata"]["generateName"] + "x7k2p"
                raise forbidden(PODS, name, why)
            made = self._store.create(PODS, metadata["namespace"], body)
        except Refused as refused:
            where = f"{metadata['namespace']}/{metadata['name']}"
            words = f"Failed to create {node} Pod for the cluster {where}, {refused.message}"
            if node == "head":
                words = f"Failed to create head Pod {metadata['namespace']}/, {refused.message}"
            happened(self._store, cluster, "Warning", f"FailedToCreate{word}Pod", words, COMPONENT, "Create")
            raise
        words = f"Created {node} Pod {metadata['namespace']}/{made['metadata']['name']}"
        happened(self._store, cluster, "Normal", f"Created{word}Pod", words, COMPONENT, "Create")

    def _delete_if_over(self, cluster: Object, pod: Object, node: str) -> bool:
        phase = pod["status"].get("phase")
        if phase not in ("Failed", "Succeeded"):
            return False
        policy = pod["spec"].get("restartPolicy", "Always")
        words = (
            f"Deleted {node} Pod {{0}}; Pod status: {phase}; Pod restart policy: {policy}; Ray container terminated "
        )
        self._delete(cluster, pod, node, words + "status: nil")
        return True

    def _delete(self, cluster: Object, pod: Object, node: str, words: str) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self._store.delete(PODS, namespace, name)
        reason = "DeletedHeadPod" if node == "head" else "DeletedWorkerPod"
        happened(self._store, cluster, "Normal", reason, words.format(f"{namespace}/{name}"), COMPONENT, "Delete")

    def _note(self, cluster: Object, failure: tuple[str, str] | None) -> None:
        """Write the status, where it says something else than before."""
        metadata = cluster["metadata"]
        pods, groups = self.pods(cluster), cluster["spec"].get("workerGroupSpecs", ())
        workers = [pod for pod in pods if pod["metadata"]["labels"][NODE_TYPE] == "worker"]
        desired = sum(map(_desired, groups))
        all_run = bool(pods) and all(_runs(pod) for pod in pods)

        def change(found: Object) -> Object:
            status: Object = copy.deepcopy(found.get("status") or {})
            status["observedGeneration"] = found["metadata"]["generation"]
            counts = {
                "readyWorkerReplicas": sum(map(_runs, workers)),
                "availableWorkerReplicas": sum(pod["status"].get("phase") == "Running" for pod in workers),
                "desiredWorkerReplicas": desired,
                "minWorkerReplicas": sum(group["minReplicas"] for group in groups),
                "maxWorkerReplicas": sum(group["maxReplicas"] for group in groups),
            }
            for name, count in counts.items():  # a count of 0 is left out, as Go's omitempty does
                status.pop(name, None)
                if count:
                    status[name] = count
            if failure is None and len(pods) == desired + 1 and all_run:
                status["state"] = "ready"
            self._note_head(found, status)
            _set_conditions(status, self.head(cluster), all_run, failure)
            if status != (found.get("status") or {}):
                status["lastUpdateTime"] = now()
            return found | {"status": status}

        self._store.update(RAYCLUSTERS, metadata["namespace"], metadata["name"], change, "status")

    def _note_head(self, cluster: Object, status: Object) -> None:
        name = kuberay_pods.head_service_name(cluster["metadata"]["name"])
        status["head"] = {"serviceName": name}
        if (head := self.head(cluster)) is not None:
            status["head"] |= {"podName": head["metadata"]["name"]}
            if ip := head["status"].get("podIP"):
                status["head"] |= {"podIP": ip, "serviceIP": ip}


def _desired(group: Object) -> int:
    """Replicas within their limits, times hosts."""
    if group.get("suspend"):
        return 0
    replicas = max(group["minReplicas"], min(group["replicas"], group["maxReplicas"]))
    return int(replicas * group.get("numOfHosts", 1))


def _runs(pod: Object) -> bool:
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", ())}
    return pod["status"].get("phase") == "Running" and conditions.get("Ready") == "True"


def _set_conditions(status: Object, head: Object | None, all_run: bool, failure: tuple[str, str] | None) -> None:
    known: dict[str, Object] = {one["type"]: one for one in status.get("conditions", ())}

    def put(name: str, holds: bool, reason: str, message: str) -> None:
        value: dict[str, Any] = {"type": name, "status": str(holds), "reason": reason, "message": message}
        old = known.get(name, {})
        moved = old.get("status") != value["status"]
        known[name] = value | {"lastTransitionTime": now() if moved else old["lastTransitionTime"]}

    if failure is not None:
        put("ReplicaFailure", True, *failure)
    else:
        known.pop("ReplicaFailure", None)
    if head is None:
        put("HeadPodReady", False, "HeadPodNotFound", "Head Pod not found")
    elif _runs(head):
        put("HeadPodReady", True, "HeadPodRunningAndReady", "")
    else:
        put("HeadPodReady", False, "ContainersNotReady", "containers with unready status: [ray-head]")
    if known.get("RayClusterProvisioned", {}).get("status") != "True":
        if all_run:
            words = ("AllPodRunningAndReadyFirstTime", "All Ray Pods are ready for the first time")
        else:
            words = ("RayClusterPodsProvisioning", "RayCluster Pods are being provisioned for first time")
        put("RayClusterProvisioned", all_run, *words)
    status["conditions"] = list(known.values())
