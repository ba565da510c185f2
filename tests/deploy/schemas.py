"""Objects against the schemas of Kubernetes and of the CRDs of KubeRay and of Prometheus' operator.

A field that no schema knows is an error.

Not checked: the CRDs' CEL rules (x-kubernetes-validations), and whatever an API server does beyond its schemas.
"""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import kubernetes_validate.utils as kubernetes
from jsonschema import Draft202012Validator

from tests.deploy.rendering import Object

OLDEST, NEWEST = "1.29", "1.37"
DATA = Path(__file__).parents[1] / "data"
KUBERAY = {"RayJob": "kuberay/rayjobs.v1", "RayCluster": "kuberay/rayclusters.v1"}
OPERATOR = {
    "ServiceMonitor": "prometheus-operator/servicemonitors.v1",
    "PodMonitor": "prometheus-operator/podmonitors.v1",
    "PrometheusRule": "prometheus-operator/prometheusrules.v1",
    "ScrapeConfig": "prometheus-operator/scrapeconfigs.v1alpha1",
}
CRDS = {**KUBERAY, **OPERATOR}

# Read once a session: the definitions of one version are a megabyte.
kubernetes.schema_contents = functools.cache(kubernetes.schema_contents)


def complaints(found: Object, version: str) -> list[str]:
    """What this version of Kubernetes, KubeRay 1.7 or Prometheus' operator would not take, and where."""
    group, _, of = found["apiVersion"].partition("/")
    if group in ("ray.io", "monitoring.coreos.com"):
        if not CRDS.get(found["kind"], "").endswith(f".{of}"):
            return [f"{group} has no {found['kind']} in {of}"]
        return [f"{error.json_path}: {error.message}" for error in crd(found["kind"]).iter_errors(found)]
    try:
        kubernetes.validate(found, version, strict=True)
    except kubernetes.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


@functools.cache
def crd(kind: str) -> Draft202012Validator:
    """The validator of a kind of custom resource, strict."""
    packed = (DATA / f"{CRDS[kind]}.json.gz").read_bytes()
    return Draft202012Validator(_strict(json.loads(gzip.decompress(packed))))


def _strict(schema: Any) -> Any:
    """The same schema, where an object has no other fields than it names."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    new = {key: _strict(value) for key, value in schema.items()}
    named = isinstance(new.get("properties"), dict) and new.get("type") == "object"
    if named and not new.get("x-kubernetes-preserve-unknown-fields"):
        new.setdefault("additionalProperties", False)
    return new
