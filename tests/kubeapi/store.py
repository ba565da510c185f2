"""What the API server for tests holds: objects, one rising resourceVersion, and the history that watches are told.

It keeps the rules that every write goes by, whoever makes it: a client over HTTP, or a test that plays an operator.
Objects that it hands out are copies.
"""

from __future__ import annotations

import copy
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from tests.kubeapi import answers
from tests.kubeapi.kinds import NAMESPACES, PODS, Kind, Object
from tests.kubeapi.validity import check, with_defaults

_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
_KEPT_BY_SERVER: Final = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")
_FOREGROUND: Final = "foregroundDeletion"


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def random_suffix() -> str:
    """Five letters, as Kubernetes and KubeRay append them to a name."""
    return "".join(random.choices(_SUFFIX_LETTERS, k=5))


@dataclass(frozen=True)
class Change:
    """One change of one object. before: None where it is new; after: None where it is gone; at_s: time.monotonic."""

    version: int
    kind: Kind
    before: Object | None
    after: Object | None
    at_s: float


@dataclass(frozen=True)
class Deletion:
    """What a DELETE asks for. grace_s: of a pod; None, as the pod says."""

    policy: str = "Background"
    uid: str | None = None
    version: str | None = None
    grace_s: int | None = None


class Store:
    """All objects. kept: how many changes the history holds before it forgets the oldest."""

    def __init__(self, namespaces: tuple[str, ...] = ("default",), kept: int = 10_000) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.logs: dict[tuple[str, str, str], bytes] = {}
        """What containers have written: by namespace, pod and container."""
        self.admission: list[Callable[[Kind, Object], None]] = []
        """Each may refuse an object that is to be made, as a webhook does: by raising Refused."""
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._kinds = {NAMESPACES.resource: NAMESPACES}
        self._version, self._forgotten = 1, 1
        self._history: deque[Change] = deque()
        self._kept = kept
        for name in namespaces:
            self.create(NAMESPACES, None, {"metadata": {"name": name}, "status": {"phase": "Active"}})

    @property
    def version(self) -> int:
        """Of the newest change."""
        return self._version

    # reading

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        """The object. Raises Refused with 404."""
        with self.changed:
            return copy.deepcopy(self._found(kind, namespace, name))

    def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object, or None."""
        with self.changed:
            return copy.deepcopy(self._objects.get(_key(kind, namespace, name)))

    def all(
        self, kind: Kind, namespace: str | None = None, matches: Callable[[Object], bool] = lambda _: True
    ) -> list[Object]:
        """All of a kind, of one namespace or of every one, by name."""
        with self.changed:
            found = [(key, one) for key, one in self._objects.items() if key[0] == kind.resource]
            return [
                copy.deepcopy(one)
                for key, one in sorted(found, key=lambda item: item[0])
                if namespace in (None, key[1]) and matches(one)
            ]

    def since(self, version: int) -> list[Change]:
        """All changes after this version, in order. Raises Refused with 410 where they are not held any more."""
        with self.changed:
            if version < self._forgotten:
                raise answers.too_old(version, self._forgotten)
            return [change for change in self._history if change.version > version]

    def compact(self) -> None:
        """Forget all changes so far, as a restart or etcd's compaction does: who was not told has to list again."""
        with self.changed:
            self._history.clear()
            self._forgotten = self._version
            self.changed.notify_all()

    # writing

    def create(self, kind: Kind, namespace: str | None, body: Object) -> Object:
        """Store a new object. Raises Refused: 404 without its namespace, 409 where it is there, 400 and 422."""
        made = copy.deepcopy(body)
        made = {"apiVersion": kind.api_version, "kind": kind.kind} | made
        metadata = made.setdefault("metadata", {})
        if metadata.get("resourceVersion"):
            raise answers.bad_request("resourceVersion should not be set on objects to be created")
        if kind.namespaced:
            metadata["namespace"] = namespace
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + random_suffix()
        for field in (*_KEPT_BY_SERVER, "selfLink"):
            metadata.pop(field, None)
        if kind.has_status and kind is not NAMESPACES:
            made.pop("status", None)
        if kind is PODS:
            made["status"] = {"phase": "Pending"}
        check(kind, made)
        with_defaults(kind, made)
        for review in self.admission:
            review(kind, made)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if kind.is_custom:
            metadata["generation"] = 1
        with self.changed:
            if kind.namespaced and self.find(NAMESPACES, None, namespace or "") is None:
                raise answers.not_found(NAMESPACES, namespace or "")
            if _key(kind, namespace, metadata["name"]) in self._objects:
                raise answers.already_exists(kind, metadata["name"])
            return self._put(kind, None, made)

    def update(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        change: Callable[[Object], Object],
        subresource: str = "",
    ) -> Object:
        """Store change(object), which gets a copy. What names another version than the newest is refused with 409.

        subresource: "status" changes nothing but the status; "" all else. Raises Refused.
        """
        with self.changed:
            old = self._found(kind, namespace, name)
            new = change(copy.deepcopy(old))
            metadata = new.get("metadata") or {}
            if metadata.get("name", name) != name:
                raise answers.bad_request(
                    f"the name of the object ({metadata['name']}) does not match the name on the URL ({name})"
                )
            if metadata.get("uid") not in (None, old["metadata"]["uid"]):
                raise answers.conflict(
                    kind,
                    name,
                    f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: "
                    f"{old['metadata']['uid']}",
                )
            if metadata.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
                raise answers.was_modified(kind, name)
            new = self._merged(kind, old, new, subresource)
            if new == old:  # nothing is written, and no watch is told
                return copy.deepcopy(old)
            check(kind, new)
            if kind.is_custom and _spec(new) != _spec(old):
                new["metadata"]["generation"] = old["metadata"]["generation"] + 1
            # What was kept by its last finalizer goes with it; a pod still has its grace.
            ends = "deletionTimestamp" in new["metadata"] and not new["metadata"].get("finalizers")
            if ends and not new["metadata"].get("deletionGracePeriodSeconds"):
                return self._remove(kind, new)
            return self._put(kind, old, new)

    def delete(self, kind: Kind, namespace: str | None, name: str, wanted: Deletion | None = None) -> Object | None:
        """Delete it, or mark it where finalizers or a pod's grace keep it: the object as it is then, None where it is
        gone. What it owns goes with it. Raises Refused: 404; 409 where a precondition does not hold.
        """
        wanted = wanted or Deletion()
        with self.changed:
            old = self._found(kind, namespace, name)
            metadata = old["metadata"]
            for word, asked, found in (
                ("UID", wanted.uid, metadata["uid"]),
                ("ResourceVersion", wanted.version, metadata["resourceVersion"]),
            ):
                if asked is not None and asked != found:
                    raise answers.conflict(
                        kind, name, f"the {word} in the precondition ({asked}) does not match the {word} in record "
                        f"({found}). The object might have been deleted and then recreated"
                    )  # fmt: skip
            new = copy.deepcopy(old)
            grace_s = self._grace_s(kind, old, wanted)
            is_owner = any(self._owned(metadata["uid"]))
            if wanted.policy == "Orphan":
                for owned in list(self._owned(metadata["uid"])):
                    self._disown(owned, metadata["uid"])
            elif wanted.policy == "Foreground" and is_owner and _FOREGROUND not in metadata.get("finalizers", []):
                new["metadata"]["finalizers"] = [*metadata.get("finalizers", []), _FOREGROUND]
            if not new["metadata"].get("finalizers") and not grace_s:
                self._remove(kind, new)
                return None
            shorter = grace_s < metadata.get("deletionGracePeriodSeconds", grace_s + 1)
            if "deletionTimestamp" in metadata and not (kind is PODS and shorter):
                return copy.deepcopy(old)
            new["metadata"].setdefault("deletionTimestamp", now())
            new["metadata"]["deletionGracePeriodSeconds"] = grace_s
            if kind.is_custom:
                new["metadata"]["generation"] += 1
            self._put(kind, old, new)
            if wanted.policy == "Foreground":
                self._delete_owned(metadata["uid"])
            return copy.deepcopy(self._objects.get(_key(kind, namespace, name)))

    # how it is done

    def _found(self, kind: Kind, namespace: str | None, name: str) -> Object:
        found = self._objects.get(_key(kind, namespace, name))
        if found is None:
            raise answers.not_found(kind, name)
        return found

    def _put(self, kind: Kind, old: Object | None, new: Object) -> Object:
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        metadata = new["metadata"]
        self._objects[_key(kind, metadata.get("namespace"), metadata["name"])] = new
        self._tell(kind, old, new)
        return copy.deepcopy(new)

    def _remove(self, kind: Kind, old: Object) -> Object:
        """Take it out, with what it owns; its last state has the version of its end."""
        self._version += 1
        last = copy.deepcopy(old)
        last["metadata"]["resourceVersion"] = str(self._version)
        self._objects.pop(_key(kind, old["metadata"].get("namespace"), old["metadata"]["name"]), None)
        self._tell(kind, last, None)
        self._delete_owned(old["metadata"]["uid"])
        self._finish_foreground(old)
        return last

    def _tell(self, kind: Kind, before: Object | None, after: Object | None) -> None:
        self._kinds[kind.resource] = kind
        self._history.append(Change(self._version, kind, before, after, time.monotonic()))
        while len(self._history) > self._kept:
            self._forgotten = self._history.popleft().version
        self.changed.notify_all()

    def _merged(self, kind: Kind, old: Object, new: Object, subresource: str) -> Object:
        """What of the new object counts: all but the status, or nothing but the status."""
        if subresource == "status":
            merged = copy.deepcopy(old)
            merged.pop("status", None)
            if "status" in new:
                merged["status"] = new["status"]
            return with_defaults(kind, merged)
        if kind.has_status:
            new.pop("status", None)
            if "status" in old:
                new["status"] = copy.deepcopy(old["status"])
        new |= {"apiVersion": kind.api_version, "kind": kind.kind}
        metadata = new.setdefault("metadata", {})
        for field in (*_KEPT_BY_SERVER, "resourceVersion", "name", "namespace"):
            metadata.pop(field, None)
            if field in old["metadata"]:
                metadata[field] = old["metadata"][field]
        return with_defaults(kind, new)

    def _grace_s(self, kind: Kind, found: Object, wanted: Deletion) -> int:
        """Seconds that a pod on a node is left to end in; nothing else is left any, nor a pod that is over."""
        ended = found.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if kind is not PODS or not found.get("spec", {}).get("nodeName") or ended:
            return 0
        own = found["spec"].get("terminationGracePeriodSeconds", 30)
        return int(own if wanted.grace_s is None else wanted.grace_s)

    def _owned(self, uid: str) -> Iterator[tuple[Kind, Object]]:
        for (resource, _, _), one in list(self._objects.items()):
            if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", ())):
                yield self._kinds[resource], one

    def _delete_owned(self, uid: str) -> None:
        """Kubernetes' collector of garbage, without its delay."""
        for kind, one in list(self._owned(uid)):
            metadata = one["metadata"]
            others = [owner for owner in metadata["ownerReferences"] if owner["uid"] != uid]
            if any(self._is_there(owner["uid"]) for owner in others):
                self._disown((kind, one), uid)
            elif _key(kind, metadata.get("namespace"), metadata["name"]) in self._objects:
                self.delete(kind, metadata.get("namespace"), metadata["name"])

    def _is_there(self, uid: str) -> bool:
        return any(one["metadata"]["uid"] == uid for one in self._objects.values())

    def _disown(self, owned: tuple[Kind, Object], uid: str) -> None:
        kind, one = owned
        new = copy.deepcopy(one)
        new["metadata"]["ownerReferences"] = [
            owner for owner in one["metadata"]["ownerReferences"] if owner["uid"] != uid
        ]
        self._put(kind, one, new)

    def _finish_foreground(self, gone: Object) -> None:
        """Owners that waited for the last of what they own go, too."""
        for owner in gone["metadata"].get("ownerReferences", ()):
            for key, one in list(self._objects.items()):
                metadata = one["metadata"]
                waits = metadata["uid"] == owner["uid"] and _FOREGROUND in metadata.get("finalizers", ())
                if waits and not any(self._owned(owner["uid"])):
                    self.update(self._kinds[key[0]], metadata.get("namespace"), metadata["name"], _without_foreground)


def _without_foreground(found: Object) -> Object:
    found["metadata"]["finalizers"].remove(_FOREGROUND)
    return found


def _spec(found: Object) -> Object:
    return {key: value for key, value in found.items() if key not in ("metadata", "status")}


def _key(kind: Kind, namespace: str | None, name: str) -> tuple[str, str, str]:
    return kind.resource, (namespace or "") if kind.namespaced else "", name
