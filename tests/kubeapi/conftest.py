"""An API server for each test, the official client of it, and a RayJob that its schema takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import kubernetes.client
import pytest

from tests.kubeapi.client import configuration
from tests.kubeapi.kinds import Object
from tests.kubeapi.server import KubeApi


@pytest.fixture
def server() -> Iterator[KubeApi]:
    """Running, with the namespace `default` and nothing in it."""
    found = KubeApi(bookmark_every_s=0.2)
    yield found
    found.close()


@pytest.fixture
def client(server: KubeApi) -> Iterator[kubernetes.client.ApiClient]:
    """It tries nothing again by itself."""
    with kubernetes.client.ApiClient(configuration(server)) as found:
        yield found


@pytest.fixture
def rayjob() -> Callable[..., Object]:
    """`rayjob("a", labels={...}, suspend=True)` is one with a head and one group of workers."""

    return _rayjob


def _rayjob(name: str, labels: dict[str, str] | None = None, **spec: object) -> Object:
    """spec: in the place of what it has, or beside it."""
    head = {"spec": {"containers": [{"name": "ray-head", "image": "ray:1"}]}}
    worker = {"spec": {"containers": [{"name": "ray-worker", "image": "ray:1"}], "terminationGracePeriodSeconds": 5}}
    group = {"groupName": "workers", "replicas": 2, "minReplicas": 2, "maxReplicas": 4, "template": worker}
    usual = {
        "entrypoint": "python train.py",
        "submissionMode": "HTTPMode",
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            "rayVersion": "2.60.0",
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": head},
            "workerGroupSpecs": [{**group, "rayStartParams": {"num-cpus": "1"}}],
        },
    }
    metadata = {"name": name, "labels": labels or {}}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": usual | spec}
