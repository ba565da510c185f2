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
            wrong = {"status": "False", "reason": "Unschedulable", "message": trouble.message}
            self._set(pod, conditions={"PodScheduled": wrong})
            happened(
                self._store, pod, "Warning", "FailedScheduling", trouble.message, "default-scheduler", "Scheduling"
            )
            return
        metadata = pod["metadata"]

        def bind(found: Object) -> Object:
            found["spec"]["nodeName"] = NODE
            return found

        self._store.update(PODS, metadata["namespace"], metadata["name"], bind)
        words = f"Successfully assigned {metadata['namespace']}/{metadata['name']} to {NODE}"
        happened(self._store, pod, "Normal", "Scheduled", words, "default-scheduler", "Binding")
        waiting = {"waiting": {"reason": "ContainerCreating"}}
        self._set(pod, conditions={"PodScheduled": {"status": "True"}}, state=waiting)

    def _begin(self, pod: Object) -> None:
        trouble = self._trouble("image", pod)
        if trouble is None:
            ready = {name: {"status": "True"} for name in ("Initialized", "Ready", "ContainersReady")}
            self._set(pod, conditions=ready, state={"running": {"startedAt": now()}}, phase="Running", ip="10.0.0.7")
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
        self._set(pod, conditions={"Ready": not_ready}, state={"waiting": {"reason": reason, "message": message}})
        happened(self._store, pod, "Warning", "Failed", event, "kubelet", "Pulling")

    def _set(
        self,
        pod: Object,
        conditions: dict[str, Object],
        state: Object | None = None,
        phase: str = "Pending",
        ip: str = "",
    ) -> None:
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

        self._store.update(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], change, "status")
