"""What an operator adds to the pods of all jobs, whatever their template: THINWIRE_KUBERAY_PODS, `kuberay.pods` of the
chart.

The fields are called as Kubernetes calls them. A job may ask for `secrets` by its own recipe.secrets, and for no others
of the namespace: which Secret and key each name leads to stands here alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from thinwire.contract.spec import JobSpec, ScriptSpec

Object = dict[str, Any]
Text = Annotated[str, StringConstraints(min_length=1)]
GPU = "nvidia.com/gpu"


class PodsRefused(Exception):
    """The file is none that could be added; the message says where and what to do."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Key(_Strict):
    """A key of a Secret or of a ConfigMap of the jobs' namespace."""

    name: Text
    key: Text


class Source(_Strict):
    """Where a variable comes from: one of both."""

    secretKeyRef: Key | None = None
    configMapKeyRef: Key | None = None

    @model_validator(mode="after")
    def _one(self) -> Source:
        if (self.secretKeyRef is None) == (self.configMapKeyRef is None):
            raise ValueError("must be a secretKeyRef or a configMapKeyRef, one of both")
        return self


class Places(_Strict):
    """On which nodes pods may be."""

    nodeSelector: dict[Text, str] = Field(default_factory=dict)
    tolerations: list[Object] = Field(default_factory=list)
    topologySpreadConstraints: list[Object] = Field(default_factory=list)


class Pods(_Strict):
    """What is added. gpu: to workers that have GPUs."""

    labels: dict[Text, str] = Field(default_factory=dict)
    annotations: dict[Text, str] = Field(default_factory=dict)
    imagePullSecrets: list[Text] = Field(default_factory=list)
    priorityClassName: Text | None = None
    env: list[Object] = Field(default_factory=list)
    volumes: list[Object] = Field(default_factory=list)
    volumeMounts: list[Object] = Field(default_factory=list)
    secrets: dict[Text, Source] = Field(default_factory=dict)
    head: Places = Places()
    workers: Places = Places()
    gpu: Places = Places()

    @model_validator(mode="after")
    def _named(self) -> Pods:
        for kind in ("env", "volumes", "volumeMounts"):
            for one in getattr(self, kind):
                if not isinstance(one.get("name"), str):
                    raise ValueError(f"{kind}: each has a name, and {one} has none")
        return self

    def add(self, cluster: Object, job: JobSpec) -> None:
        """Add it to head and workers of a RayCluster's specification, which is modified. What is there of the same name
        is replaced; labels and annotations of the template stay.
        """
        head, group = cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]
        for pod, places in ((head, self.head), (group, self.workers)):
            metadata, spec = mapping(pod, "metadata"), pod["spec"]
            for field, added in (("labels", self.labels), ("annotations", self.annotations)):
                if added:
                    metadata[field] = {**added, **(metadata.get(field) or {})}
            _append(spec, "imagePullSecrets", ({"name": name} for name in self.imagePullSecrets))
            if self.priorityClassName is not None:
                spec["priorityClassName"] = self.priorityClassName
            _append(spec, "volumes", self.volumes)
            box = spec["containers"][0]
            _append(box, "env", self.env)
            _append(box, "volumeMounts", self.volumeMounts, by="mountPath")
            _place(spec, places)
        box = group["spec"]["containers"][0]
        if any(GPU in (amounts or {}) for amounts in (box.get("resources") or {}).values()):
            _place(group["spec"], self.gpu)
        _append(box, "env", self._asked(job))

    def _asked(self, job: JobSpec) -> Iterable[Object]:
        """The variables of the list that the job's secrets come from."""
        if isinstance(job, ScriptSpec):
            asked = {source.env for source in job.recipe.secrets.values() if source.env is not None}
            for name in sorted(asked & self.secrets.keys()):
                yield {"name": name, "valueFrom": self.secrets[name].model_dump(exclude_none=True)}


def read_pods(path: Path) -> Pods:
    """The file's. Raises PodsRefused."""
    try:
        return Pods.model_validate(yaml.safe_load(path.read_text("utf-8")) or {})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise PodsRefused(f"THINWIRE_KUBERAY_PODS = {path}: {where}: {first['msg']}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PodsRefused(f"THINWIRE_KUBERAY_PODS = {path} cannot be read as YAML: {error}") from error


def _place(spec: Object, places: Places) -> None:
    if places.nodeSelector:
        mapping(spec, "nodeSelector").update(places.nodeSelector)
    for field in ("tolerations", "topologySpreadConstraints"):
        if added := getattr(places, field):
            spec[field] = [*(spec.get(field) or ()), *added]


def _append(parent: Object, field: str, added: Iterable[Object], by: str = "name") -> None:
    """What is there with the same name is replaced."""
    new = list(added)
    if new:
        names = {one.get(by) for one in new}
        parent[field] = [*(one for one in parent.get(field) or () if one.get(by) not in names), *new]


def mapping(parent: Object, name: str) -> Object:
    """The mapping in this field, made where there is none; a field with nothing behind its colon is null."""
    if parent.get(name) is None:
        parent[name] = {}
    found: Object = parent[name]
    return found
