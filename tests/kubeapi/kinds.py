"""The kinds of objects that the API server for tests knows, and the fields by which each can be selected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Object = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A resource. has_status: its status is a subresource, which a write of the object itself leaves as it is.
    fields: what fieldSelector may name beside metadata.name and metadata.namespace.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = True
    fields: tuple[str, ...] = ()

    @property
    def resource(self) -> str:
        """As messages name it: rayjobs.ray.io, pods."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        """As objects have it: ray.io/v1, v1."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def is_custom(self) -> bool:
        """Does a CustomResourceDefinition define it?"""
        return bool(self.group)

    def selectable(self) -> tuple[str, ...]:
        """Paths that fieldSelector may name."""
        return ("metadata.name", "metadata.namespace", *self.fields)


RAYJOBS: Final = Kind("ray.io", "v1", "rayjobs", "RayJob")
RAYCLUSTERS: Final = Kind("ray.io", "v1", "rayclusters", "RayCluster")
WORKLOADS: Final = Kind("kueue.x-k8s.io", "v1beta1", "workloads", "Workload")
PODS: Final = Kind(
    "", "v1", "pods", "Pod", fields=("spec.nodeName", "spec.restartPolicy", "status.phase", "status.podIP")
)
SERVICES: Final = Kind("", "v1", "services", "Service")
SECRETS: Final = Kind("", "v1", "secrets", "Secret", has_status=False, fields=("type",))
NAMESPACES: Final = Kind("", "v1", "namespaces", "Namespace", namespaced=False, fields=("status.phase",))
EVENTS: Final = Kind(
    "",
    "v1",
    "events",
    "Event",
    has_status=False,
    fields=(
        *(f"involvedObject.{part}" for part in ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion")),
        "involvedObject.fieldPath",
        "reason",
        "reportingComponent",
        "source",
        "type",
    ),
)
KINDS: Final = (RAYJOBS, RAYCLUSTERS, WORKLOADS, PODS, SERVICES, SECRETS, NAMESPACES, EVENTS)
GROUPS: Final = frozenset(kind.group for kind in KINDS if kind.is_custom)
