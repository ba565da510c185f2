"""Events as the recorders of a cluster write them: one object for a happening, counted where it happens again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from tests.kubeapi.kinds import EVENTS, Object
from tests.kubeapi.store import Store, random_suffix


def happened(
    store: Store,
    about: Object,
    level: Literal["Normal", "Warning"],
    reason: str,
    message: str,
    component: str,
    action: str = "Reconcile",
) -> None:
    """Write, or count up, an event about an object. component: who says it, for instance kubelet."""
    metadata = about["metadata"]
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def is_same(event: Object) -> bool:
        is_about = event["involvedObject"].get("uid") == metadata["uid"]
        return is_about and (event["reason"], event["message"]) == (reason, message)

    with store.changed:
        for event in store.all(EVENTS, metadata["namespace"], is_same):
            store.update(EVENTS, metadata["namespace"], event["metadata"]["name"], lambda old: _again(old, stamp))
            return
        fields = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion")
        whole = {"kind": about["kind"], "apiVersion": about["apiVersion"]} | metadata
        body = {
            "metadata": {"name": f"{metadata['name']}.{random_suffix()}"},
            "involvedObject": {field: whole[field] for field in fields if field in whole},
            "type": level,
            "reason": reason,
            "message": message,
            "action": action,
            "source": {},
            "eventTime": stamp,
            "firstTimestamp": None,
            "lastTimestamp": None,
            "reportingComponent": component,
            "reportingInstance": f"{component}-0",
        }
        store.create(EVENTS, metadata["namespace"], body)


def _again(event: Object, stamp: str) -> Object:
    count = event.get("series", {"count": 1})["count"] + 1
    return event | {"series": {"count": count, "lastObservedTime": stamp}}
