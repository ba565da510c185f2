"""What the API server for tests holds: objects of one namespace, one rising resourceVersion, and their history.

Every write keeps the same rules, from a client over HTTP or from a test that plays KubeRay. Objects that it hands out
are copies.
"""

from __future__ import annotations

import copy
import random
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from tests.deploy.schemas import NEWEST, complaints

Object = dict[str, Any]
NAMESPACE: Final = "default"
_KEPT_BY_SERVER: Final = ("uid", "creationTimestamp", "deletionTimestamp", "resourceVersion", "name", "namespace")


@dataclass(frozen=True)
class Kind:
    """A resource, as paths (`rayjobs`) and objects (`RayJob`) name it."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def resource(self) -> str:
        """As messages name it: rayjobs.ray.io, pods."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        """As objects have it: ray.io/v1, v1."""
        return f"{self.group}/{self.version}" if self.group else self.version


RAYJOBS: Final = Kind("ray.io", "v1", "rayjobs", "RayJob")
RAYCLUSTERS: Final = Kind("ray.io", "v1", "rayclusters", "RayCluster")
WORKLOADS: Final = Kind("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
PODS: Final = Kind("", "v1", "pods", "Pod")
EVENTS: Final = Kind("", "v1", "events", "Event")
POLICIES: Final = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
KINDS: Final = (RAYJOBS, RAYCLUSTERS, WORKLOADS, PODS, EVENTS, POLICIES)


@dataclass
class Refused(Exception):
    """A request that fails. reason: as a Status of Kubernetes names it; "": the body is `message`, as plain text."""

    code: int
    reason: str
    message: str
    details: Object = field(default_factory=dict)

    def status(self) -> Object:
        """The Status object (k8s.io/apimachinery, pkg/api/errors)."""
        fixed = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**fixed, "message": self.message, "reason": self.reason, "details": self.details, "code": self.code}


def too_old(wanted: int, oldest: int) -> Refused:
    """The history does not go back so far."""
    return Refused(410, "Expired", f"too old resource version: {wanted} ({oldest})")


@dataclass(frozen=True)
class Change:
    """One change of one object. before: None where it is new; after: None where it is gone; at_s: time.monotonic."""

    version: int
    kind: Kind
    before: Object | None
    after: Object | None
    at_s: float


class Store:
    """All objects."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.logs: dict[tuple[str, str], bytes] = {}
        """What containers have written: by pod and container."""
        self.created: list[tuple[Kind, Object]] = []
        """Everything that was ever made."""
        self.version, self._forgotten = 1, 1
        self._objects: dict[tuple[Kind, str], Object] = {}
        self._history: list[Change] = []

    # reading

    def get(self, kind: Kind, name: str) -> Object:
        """The object. Raises Refused with 404."""
        with self.changed:
            return copy.deepcopy(self._found(kind, name))

    def find(self, kind: Kind, name: str) -> Object | None:
        """The object, or None."""
        with self.changed:
            return copy.deepcopy(self._objects.get((kind, name)))

    def all(self, kind: Kind, matches: Callable[[Object], bool] = lambda _: True) -> list[Object]:
        """All of a kind, by name."""
        with self.changed:
            found = sorted(name for of, name in self._objects if of == kind)
            return [copy.deepcopy(one) for name in found if matches(one := self._objects[kind, name])]

    def since(self, version: int) -> list[Change]:
        """All changes after this version, in order. Raises Refused with 410 where they are not held any more."""
        with self.changed:
            if version < self._forgotten:
                raise too_old(version, self._forgotten)
            return [change for change in self._history if change.version > version]

    def compact(self) -> None:
        """Forget all changes so far, as a restart or etcd's compaction does: older watches have to list again."""
        with self.changed:
            self._history.clear()
            self._forgotten = self.version
            self.changed.notify_all()

    # writing

    def create(self, kind: Kind, body: Object) -> Object:
        """Store a new object. Raises Refused: 409 where it is there, 422 where KubeRay's CRD does not take it."""
        made = {"apiVersion": kind.api_version, "kind": kind.kind} | copy.deepcopy(body)
        metadata = made.setdefault("metadata", {})
        if "generateName" in metadata:
            metadata["name"] = metadata["generateName"] + random_suffix()
        metadata["namespace"] = NAMESPACE
        if kind.group == "ray.io" and (wrong := complaints(made, NEWEST)):
            raise Refused(422, "Invalid", f'{kind.kind} "{metadata["name"]}" is invalid: {", ".join(wrong)}')
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp}
        with self.changed:
            if (kind, metadata["name"]) in self._objects:
                words = f'{kind.resource} "{metadata["name"]}" already exists'
                raise Refused(409, "AlreadyExists", words, details={"name": metadata["name"], "kind": kind.plural})
            self.created.append((kind, made))
            return self._put(kind, None, made)

    def update(self, kind: Kind, name: str, change: Callable[[Object], Object]) -> Object:
        """Store change(object), which gets a copy. Raises Refused: 404, 409 for another version than the newest."""
        with self.changed:
            old = self._found(kind, name)
            new = change(copy.deepcopy(old))
            if new["metadata"].get("resourceVersion") not in (None, old["metadata"]["resourceVersion"]):
                why = "the object has been modified; please apply your changes to the latest version and try again"
                raise conflict(kind, name, why)
            kept = {key: old["metadata"][key] for key in _KEPT_BY_SERVER if key in old["metadata"]}
            new["metadata"] = new["metadata"] | kept
            if new == old:  # nothing is written, and no watch is told
                return copy.deepcopy(old)
            if "deletionTimestamp" in kept and kind is not PODS and not new["metadata"].get("finalizers"):
                self._remove(kind, new)  # its last finalizer kept it
                return new
            return self._put(kind, old, new)

    def delete(self, kind: Kind, name: str, uid: str | None = None, *, at_once: bool = False) -> Object | None:
        """Delete it with what it owns, or mark it where finalizers or a node keep it: as it is then, None where it is
        gone. at_once: of a pod, its node has ended it. Raises Refused: 404; 409 where it has another uid.
        """
        with self.changed:
            old = self._found(kind, name)
            if uid not in (None, old["metadata"]["uid"]):
                raise conflict(kind, name, f"the UID in the precondition ({uid}) does not match the UID in record")
            on_node = kind is PODS and "nodeName" in old["spec"] and not at_once
            if not old["metadata"].get("finalizers") and not on_node:
                self._remove(kind, old)
                return None
            new = copy.deepcopy(old)
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            if new["metadata"].setdefault("deletionTimestamp", stamp) == old["metadata"].get("deletionTimestamp"):
                return new
            return self._put(kind, old, new)

    # how it is done

    def _found(self, kind: Kind, name: str) -> Object:
        found = self._objects.get((kind, name))
        if found is None:
            raise Refused(404, "NotFound", f'{kind.resource} "{name}" not found')
        return found

    def _put(self, kind: Kind, old: Object | None, new: Object) -> Object:
        self._note(kind, old, new)
        self._objects[kind, new["metadata"]["name"]] = new
        return copy.deepcopy(new)

    def _remove(self, kind: Kind, old: Object) -> None:
        """Take it out, with what it owns: Kubernetes' collector of garbage, without its delay."""
        del self._objects[kind, old["metadata"]["name"]]
        self._note(kind, old, None)
        for (of, name), one in list(self._objects.items()):
            owners = one["metadata"].get("ownerReferences", ())
            if (of, name) in self._objects and any(owner["uid"] == old["metadata"]["uid"] for owner in owners):
                self.delete(of, name)

    def _note(self, kind: Kind, before: Object | None, after: Object | None) -> None:
        """A change, with the version that it gives the object; of one that is gone, in a copy."""
        self.version += 1
        if after is not None:
            after["metadata"]["resourceVersion"] = str(self.version)
        elif before is not None:
            before = before | {"metadata": before["metadata"] | {"resourceVersion": str(self.version)}}
        self._history.append(Change(self.version, kind, before, after, time.monotonic()))
        self.changed.notify_all()


def conflict(kind: Kind, name: str, why: str) -> Refused:
    """A 409 that is no AlreadyExists."""
    return Refused(409, "Conflict", f'Operation cannot be fulfilled on {kind.resource} "{name}": {why}')


def random_suffix() -> str:
    """Five letters, as Kubernetes and KubeRay append them to a name."""
    return "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))
