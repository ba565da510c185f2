"""What KubeRay makes of a RayCluster: its pods, Services and Secret, as 1.7 names and labels them.

Source: ray-operator/controllers/ray/common/pod.go and raycluster_controller.go. Left out: probes, init containers,
annotations, and the mounts that a test has no use for.
"""

from __future__ import annotations

import base64
import copy
import secrets
from typing import Any, Final, Literal

from tests.kubeapi.kinds import Object
from tests.kubeapi.kuberay_rules import is_autoscaling

CLUSTER, GROUP, NODE_TYPE = "ray.io/cluster", "ray.io/group", "ray.io/node-type"
HEAD_GROUP: Final = "headgroup"
GCS_PORT, DASHBOARD_PORT = 6379, 8265
NodeType = Literal["head", "worker"]


def owned_by(owner: Object) -> list[Object]:
    """The reference that makes a thing go with its owner."""
    metadata = owner["metadata"]
    named = {"name": metadata["name"], "uid": metadata["uid"], "controller": True, "blockOwnerDeletion": True}
    return [{"apiVersion": owner["apiVersion"], "kind": owner["kind"]} | named]


def head_service_name(owner: str) -> str:
    return f"{owner}-head-svc"


def service(owner: Object, cluster: Object) -> Object:
    """The Service of the head: of the RayCluster, or of the RayJob that it belongs to."""
    name, of_cluster = owner["metadata"]["name"], cluster["metadata"]["name"]
    ports = (("gcs-server", GCS_PORT), ("dashboard", DASHBOARD_PORT), ("client", 10001), ("metrics", 8080))
    selector = {CLUSTER: of_cluster, NODE_TYPE: "head", "app.kubernetes.io/created-by": "kuberay-operator"}
    metadata: Object = {"name": head_service_name(name), "ownerReferences": owned_by(owner)}
    metadata["labels"] = {CLUSTER: of_cluster, NODE_TYPE: "head"}
    listed = [{"name": word, "port": port, "targetPort": port, "protocol": "TCP"} for word, port in ports]
    return {"metadata": metadata, "spec": {"selector": selector, "ports": listed, "clusterIP": "None"}}


def needs_secret(cluster: Object) -> bool:
    """Does KubeRay make the token of this cluster?"""
    options = cluster["spec"].get("authOptions") or {}
    return options.get("mode") == "token" and not options.get("secretName")


def secret(cluster: Object) -> Object:
    """With a token that nobody else knows."""
    token = base64.b64encode(secrets.token_urlsafe(32).encode()).decode()
    metadata = {"name": cluster["metadata"]["name"], "ownerReferences": owned_by(cluster)}
    return {"metadata": metadata, "type": "Opaque", "data": {"auth_token": token}}


def pod(cluster: Object, group: Object, node: NodeType) -> Object:
    """A pod of this group: of `headGroupSpec`, or of one of `workerGroupSpecs`."""
    template, name = copy.deepcopy(group["template"]), cluster["metadata"]["name"]
    group_name = HEAD_GROUP if node == "head" else group["groupName"]
    prefix = name if node == "head" else f"{name}-{group_name}"
    metadata = template.get("metadata") or {}
    spec: Object = template["spec"]
    labels = {
        "ray.io/is-ray-node": "yes",
        "ray.io/identifier": f"{name}-{node}",
        "app.kubernetes.io/name": "kuberay",
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    fixed = {CLUSTER: name, NODE_TYPE: node, GROUP: group_name}
    found: Object = {"metadata": {"generateName": f"{prefix[:50]}-{node}-".lower()}, "spec": spec}
    found["metadata"]["labels"] = labels | (metadata.get("labels") or {}) | fixed
    found["metadata"]["annotations"] = metadata.get("annotations") or {}
    found["metadata"]["ownerReferences"] = owned_by(cluster)
    container = spec["containers"][0]
    container["env"] = [*container.get("env", ()), *_environment(cluster, group, node, container)]
    container["command"] = ["/bin/bash", "-c", "--"]
    container["args"] = [f"ulimit -n 65536; {start_command(cluster, group, node)} "]
    if node == "head" and is_autoscaling(cluster["spec"]):
        spec["containers"].append(_autoscaler(cluster, container["image"]))
    if (cluster["spec"].get("autoscalerOptions") or {}).get("version") == "v2":
        spec["restartPolicy"] = "Never"
    return found


def start_params(cluster: Object, group: Object, node: NodeType) -> dict[str, str]:
    """rayStartParams of a group, with what KubeRay adds to them."""
    found = dict(group.get("rayStartParams") or {})
    if node == "worker":
        found.setdefault("address", f"{_address(cluster)}:{GCS_PORT}")
    else:
        found.setdefault("dashboard-host", "0.0.0.0")
        if is_autoscaling(cluster["spec"]):
            found["no-monitor"] = "true"
    found.setdefault("metrics-export-port", "8080")
    found.setdefault("dashboard-agent-listen-port", "52365")
    found["block"] = "true"
    limits = (group["template"]["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    if "nvidia.com/gpu" in limits:
        found.setdefault("num-gpus", str(limits["nvidia.com/gpu"]))
    return found


def start_command(cluster: Object, group: Object, node: NodeType) -> str:
    """The line that KubeRay writes into the container's arguments."""
    words = ["ray start --head" if node == "head" else "ray start"]
    for key, value in sorted(start_params(cluster, group, node).items()):
        words.append(f"--{key}" if value == "true" else f"--{key}={value}")
    return "  ".join(words)


def _address(cluster: Object) -> str:
    metadata = cluster["metadata"]
    return f"{head_service_name(metadata['name'])}.{metadata['namespace']}.svc.cluster.local"


def _environment(cluster: Object, group: Object, node: NodeType, container: Object) -> list[Object]:
    set_already = {one["name"] for one in container.get("env", ())}
    ip = "127.0.0.1" if node == "head" else _address(cluster)
    found: list[Object] = []
    if node == "worker":
        found += [{"name": "FQ_RAY_IP", "value": ip}, {"name": "RAY_IP", "value": ip.split(".")[0]}]
    for name, path in (
        ("RAY_CLUSTER_NAME", f"metadata.labels['{CLUSTER}']"),
        ("RAY_CLUSTER_NAMESPACE", "metadata.namespace"),
        ("RAY_CLOUD_INSTANCE_ID", "metadata.name"),
        ("RAY_NODE_TYPE_NAME", f"metadata.labels['{GROUP}']"),
    ):
        found.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    found.append({"name": "KUBERAY_GEN_RAY_START_CMD", "value": start_command(cluster, group, node)})
    found += [{"name": "RAY_PORT", "value": str(GCS_PORT)}, {"name": "RAY_ADDRESS", "value": f"{ip}:{GCS_PORT}"}]
    found += _token(cluster)
    return [one for one in found if one["name"] not in set_already]


def _token(cluster: Object) -> list[Object]:
    options: dict[str, Any] = cluster["spec"].get("authOptions") or {}
    if options.get("mode") != "token":
        return []
    where = {"name": options.get("secretName") or cluster["metadata"]["name"], "key": "auth_token"}
    return [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": where}},
    ]


def _autoscaler(cluster: Object, image: str) -> Object:
    options = cluster["spec"].get("autoscalerOptions") or {}
    found: Object = {"name": "autoscaler", "image": options.get("image") or image, "env": _token(cluster)}
    found["command"] = ["/bin/bash", "-c", "--"]
    found["args"] = ["ray kuberay-autoscaler --cluster-name $(RAY_CLUSTER_NAME) --cluster-namespace default"]
    for field in ("resources", "securityContext"):
        if field in options:
            found[field] = options[field]
    return found
