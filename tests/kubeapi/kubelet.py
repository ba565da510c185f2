"""A scheduler and a kubelet, played: pods come up in a few steps, or have the trouble that a test gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from tests.kubeapi.happenings import happened
from tests.kubeapi.kinds import PODS, Object
from tests.kubeapi.store import Deletion, Store, now

Which = Callable[[Object], bool]
NODE: Final = "node-1"
UNSCHEDULABLE: Final = (
    "0/3 nodes are available: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 2 "
    "Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 1 Preemption is not helpful for "
    "scheduling, 2 No preemption victims found for incoming pod."
)


@dataclass(frozen=True)
class Trouble:
    """What keeps pods from running. how: they get no node, or their image cannot be pulled, or they never end."""

    how: Literal["unschedulable", "image", "lingers"]
    which: Which = lambda pod: True
    message: str = UNSCHEDULABLE


class PlayedKubelet:
    """Moves each pod on by one state a step. `troubles` may be changed at any time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.troubles: list[Trouble] = []

    def step(self) -> None:
        """Every pod, once."""
        for pod in self._store.all(PODS):
            self._move(pod)

    def fail(
        self, pod: Object, reason: str = "Evicted", message: str = "The node was low on resource: memory."
    ) -> None:
        """The pod is over, as after an eviction: KubeRay deletes it and makes another."""

        def failed(found: Object) -> Object:
            found["status"] |= {"phase": "Failed", "reason": reason, "message": message}
            return found

        self._store.update(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], failed, "status")

    def _move(self, pod: Object) -> None:
        metadata, status = pod["metadata"], pod.get("status", {})
        if "deletionTimestamp" in metadata:
            if self._trouble("lingers", pod) is None:
                self._store.delete(PODS, metadata["namespace"], metadata["name"], Deletion(grace_s=0))
        elif status.get("phase") == "Pending":
            if not pod["spec"].get("nodeName"):
                self._schedule(pod)
            else:
                self._begin(pod)

    def _trouble(self, how: str, pod: Object) -> Trouble | None:
        return next((one for one in self.troubles if one.how == how and one.which(pod)), None)

    def _schedule(self, pod: Object) -> None:
        trouble = self._trouble("unschedulable", pod)
        if trouble is not None:
            refuse_node(self._store, pod, trouble.message)
        else:
            bind(self._store, pod, NODE)

    def _begin(self, pod: Object) -> None:
        trouble = self._trouble("image", pod)
        if trouble is None:
            ready(self._store, pod, "10.0.0.7")
            return
        image = pod["spec"]["containers"][0]["image"]
        why = (
            f'failed to pull and unpack image "docker.io/library/{image}": failed to resolve reference '
            f'"docker.io/library/{image}": pull access denied, repository does not exist or may require authorization'
        )
        waits = [one["state"]["waiting"]["reason"] for one in pod["status"].get("containerStatuses", ())]
        if "ErrImagePull" not in waits and "ImagePullBackOff" not in waits:
            reason, message, event = "ErrImagePull", why, f'Failed to pull image "{image}": {why}'
        else:
            reason, event = "ImagePullBackOff", "Error: ImagePullBackOff"
            message = f'Back-off pulling image "{image}": ErrImagePull: {why}'
        not_ready = {"status": "False", "reason": "ContainersNotReady"}
        waiting = {"waiting": {"reason": reason, "message": message}}
        set_status(self._store, pod, {"Ready": not_ready}, waiting)
        happened(self._store, pod, "Warning", "Failed", event, "kubelet", "Pulling")


def set_status(
    store: Store,
    pod: Object,
    conditions: dict[str, Object],
    state: Object | None = None,
    phase: str = "Pending",
    ip: str = "",
) -> None:
    """Write a pod's status: these conditions beside the others, and this state of all its containers."""

    def change(found: Object) -> Object:
        status = found.setdefault("status", {})
        known = {one["type"]: one for one in status.get("conditions", ())}
        for name, value in conditions.items():
            if known.get(name, {}).get("status") != value["status"]:
                value = {"lastTransitionTime": now()} | value
            known[name] = known.get(name, {}) | {"type": name} | value
        status |= {"phase": phase, "conditions": list(known.values())}
        if ip:
            status |= {"podIP": ip, "startTime": now()}
        if state is not None:
            status["containerStatuses"] = [
                {
                    "name": one["name"],
                    "image": one["image"],
                    "imageID": "",
                    "ready": "running" in state,
                    "restartCount": 0,
                    "state": copy.deepcopy(state),
                }
                for one in found["spec"]["containers"]
            ]
        return found

    store.update(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], change, "status")


def bind(store: Store, pod: Object, node: str) -> None:
    """The pod is given this node, and its containers are being made."""
    metadata = pod["metadata"]

    def change(found: Object) -> Object:
        found["spec"]["nodeName"] = node
        return found

    store.update(PODS, metadata["namespace"], metadata["name"], change)
    words = f"Successfully assigned {metadata['namespace']}/{metadata['name']} to {node}"
    happened(store, pod, "Normal", "Scheduled", words, "default-scheduler", "Binding")
    set_status(store, pod, {"PodScheduled": {"status": "True"}}, {"waiting": {"reason": "ContainerCreating"}})


def refuse_node(store: Store, pod: Object, message: str) -> None:
    """There is no node for the pod: the condition and the event that say so."""
    wrong = {"status": "False", "reason": "Unschedulable", "message": message}
    set_status(store, pod, {"PodScheduled": wrong})
    happened(store, pod, "Warning", "FailedScheduling", message, "default-scheduler", "Scheduling")


def ready(store: Store, pod: Object, ip: str) -> None:
    """The pod runs, and its probes answer."""
    conditions = {name: {"status": "True"} for name in ("Initialized", "Ready", "ContainersReady")}
    set_status(store, pod, conditions, {"running": {"startedAt": now()}}, "Running", ip)
