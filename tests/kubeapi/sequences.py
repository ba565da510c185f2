"""What KubeRay 1.7 and Kueue write of a RayJob and of what belongs to it, by a test's own hand.

Source of the order: ray-operator/controllers/ray/rayjob_controller.go, Reconcile, in HTTPMode.
"""

from __future__ import annotations

from typing import Any, Final

from tests.kubeapi.store import PODS, RAYCLUSTERS, RAYJOBS, WORKLOADS, Object, Store

FINALIZER: Final = "ray.io/rayjob-finalizer"
QUEUE: Final = "kueue.x-k8s.io/queue-name"
STARTS: Final = (("Initializing", ""), ("Running", ""), ("Running", "PENDING"), ("Running", "RUNNING"))
"""jobDeploymentStatus and jobStatus from the creation to a job that runs."""
SUSPENDS: Final = (("Suspending", "RUNNING"), ("Suspended", ""))
"""After spec.suspend became true. At the second the RayCluster is gone, and the status has neither it nor a job id."""
RESUMES: Final = (("", ""), *STARTS)
"""After spec.suspend became false again: a new RayCluster, and a new start of the job in it."""
NO_QUOTA: Final = (
    "couldn't assign flavors to pod set head: insufficient unused quota for cpu in flavor default-flavor, 2 more needed"
)
PREEMPTED: Final = (
    "Preempted to accommodate a workload (UID: 0a1b, JobUID: 2c3d) due to prioritization in the ClusterQueue"
)


def cluster_name(rayjob: Object) -> str:
    """Of the RayCluster that these sequences make for it."""
    return f"{rayjob['metadata']['name']}-abcde"


def say(store: Store, rayjob: Object, deployment: str, of_ray: str = "", **status: Any) -> None:
    """What KubeRay writes into its status; a RayCluster comes with the first word, and goes with `Suspended`."""
    cluster = cluster_name(rayjob)
    said = {"jobDeploymentStatus": deployment, "jobStatus": of_ray, "rayClusterName": cluster, **status}
    is_there = store.find(RAYCLUSTERS, cluster) is not None
    if deployment in ("", "Suspended"):
        said = {"jobDeploymentStatus": deployment, "startTime": "2027-01-01T00:00:00Z"}
        if is_there:
            store.delete(RAYCLUSTERS, cluster)
    elif not is_there and deployment not in ("Complete", "Failed"):
        labels = rayjob["metadata"].get("labels", {})
        metadata = {"name": cluster, "labels": labels, "ownerReferences": owned_by(rayjob)}
        store.create(RAYCLUSTERS, {"metadata": metadata, "spec": rayjob["spec"]["rayClusterSpec"]})
    store.update(RAYJOBS, rayjob["metadata"]["name"], lambda one: {**one, "status": said})


def pod(store: Store, rayjob: Object, name: str, node: str = "worker", **status: Any) -> None:
    """A pod of the RayJob's cluster with this status, made where it is not there."""
    labels = {"ray.io/cluster": cluster_name(rayjob), "ray.io/node-type": node}
    body = {"metadata": {"name": name, "labels": labels, "ownerReferences": owned_by(rayjob)}}
    if store.find(PODS, name) is None:
        store.create(PODS, {**body, "spec": {"containers": [{"name": f"ray-{node}", "image": "a:1"}]}})
    store.update(PODS, name, lambda one: {**one, "status": status})


def hold(store: Store, rayjob: Object, is_held: bool) -> None:
    """spec.suspend, as Kueue or a person writes it: what is held has no pods."""
    store.update(RAYJOBS, rayjob["metadata"]["name"], lambda one: {**one, "spec": {**one["spec"], "suspend": is_held}})


def queue(store: Store, rayjob: Object, why: str = NO_QUOTA) -> None:
    """Kueue has looked at the RayJob, and has no room for it."""
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": why}
    metadata = {"name": f"rayjob-{rayjob['metadata']['name']}", "ownerReferences": owned_by(rayjob)}
    store.create(WORKLOADS, {"metadata": metadata, "status": {"conditions": [condition]}})


def owned_by(owner: Object) -> list[Object]:
    """The reference that makes a thing go with its owner."""
    metadata = owner["metadata"]
    named = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}
    return [{**named, "controller": True, "blockOwnerDeletion": True}]
