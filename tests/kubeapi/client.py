"""The official Python client, pointed at the API server for tests."""

from __future__ import annotations

from pathlib import Path

import kubernetes.client
import urllib3
import yaml

from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import Object


def configuration(server: KubeApi) -> kubernetes.client.Configuration:
    """With the server's token; nothing is tried again by itself."""
    found = kubernetes.client.Configuration()
    found.host = server.url
    found.api_key = {"authorization": f"Bearer {server.token}"}
    found.retries = urllib3.Retry(0)
    return found


def kubeconfig(server: KubeApi, namespace: str = "default") -> Object:
    """What the file that KUBECONFIG names is to hold: one context, of this server and namespace."""
    context = {"cluster": "tests", "user": "tests", "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": {"server": server.url}}],
        "users": [{"name": "tests", "user": {"token": server.token}}],
        "contexts": [{"name": "tests", "context": context}],
    }


def write_kubeconfig(server: KubeApi, file: Path, namespace: str = "default") -> Path:
    """That file."""
    file.write_text(yaml.safe_dump(kubeconfig(server, namespace)))
    return file
