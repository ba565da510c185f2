"""Objects against the schemas of Kubernetes and of KubeRay's CRDs; a field that no schema knows is an error.

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
CRDS = Path(__file__).parents[1] / "data/kuberay"
KUBERAY = {"RayJob": "rayjobs", "RayCluster": "rayclusters"}

# Read once a session: the definitions of one version are a megabyte.
kubernetes.schema_contents = functools.cache(kubernetes.schema_contents)


def complaints(found: Object, version: str) -> list[str]:
    """What this version of Kubernetes, or KubeRay 1.7, would not take, and where."""
    if found["apiVersion"] == "ray.io/v1":
        return [f"{error.json_path}: {error.message}" for error in crd(found["kind"]).iter_errors(found)]
    try:
        kubernetes.validate(found, version, strict=True)
    except kubernetes.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


@functools.cache
def crd(kind: str) -> Draft202012Validator:
    """The validator of a kind of ray.io/v1, strict."""
    return Draft202012Validator(
        _strict(json.loads(gzip.decompress((CRDS / f"{KUBERAY[kind]}.v1.json.gz").read_bytes())))
    )


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
