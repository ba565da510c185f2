"""What we ask of every object beyond its schema: each policy yields a sentence for each object that breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.deploy.rendering import Object
from thinwire.contract.spec import Workers
from thinwire.service.server import OPEN_REQUESTS_S

RAY_PORTS = {6379, 8265, 10001}
"""Of a head: store, dashboard, client."""
METRICS_PORT = 8080
"""Ray's, which asks for no token."""
RAY_POD = {"ray.io/is-ray-node": "yes"}

Policy = Callable[[list[Object]], Iterator[str]]


def pods(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """Each pod's spec, with what to call it."""
    for each in found:
        if each["kind"] == "Deployment":
            yield f"Deployment {each['metadata']['name']}", each["spec"]["template"]["spec"]
        if each["kind"] in ("RayJob", "RayCluster"):
            cluster = ray_cluster(each)
            yield f"{each['kind']}: head", cluster["headGroupSpec"]["template"]["spec"]
            for group in cluster.get("workerGroupSpecs", []):
                yield f"{each['kind']}: {group['groupName']}", group["template"]["spec"]


def containers(found: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Each container, with what to call it and the spec of its pod."""
    for name, pod in pods(found):
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            yield f"{name}: {container['name']}", container, pod


def ray_cluster(found: Object) -> Any:
    """The specification of the cluster, of a RayJob or a RayCluster."""
    return found["spec"]["rayClusterSpec"] if found["kind"] == "RayJob" else found["spec"]


def nobody_is_root(found: list[Object]) -> Iterator[str]:
    """No user 0, no further rights, no capabilities, system calls filtered; the service writes no root file system."""
    for name, container, pod in containers(found):
        of_pod, own = pod.get("securityContext", {}), container.get("securityContext", {})
        if not of_pod.get("runAsNonRoot") or not of_pod.get("runAsUser") or own.get("runAsUser") == 0:
            yield f"{name} may run as root"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{name} may gain rights"
        if own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{name} has capabilities"
        if of_pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{name} may make every system call"
        if name.startswith("Deployment") and not own.get("readOnlyRootFilesystem"):
            yield f"{name} may write its image"


def nothing_of_the_host(found: list[Object]) -> Iterator[str]:
    """No name space, port or folder of the node."""
    for name, pod in pods(found):
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(field):
                yield f"{name} has {field}"
        for volume in pod.get("volumes", []):
            if "hostPath" in volume:
                yield f"{name} mounts a folder of the node"
    for name, container, _ in containers(found):
        if any("hostPort" in port for port in container.get("ports", [])):
            yield f"{name} listens on a port of the node"


def images_are_fixed(found: list[Object]) -> Iterator[str]:
    """A tag other than latest, or a digest."""
    for name, container, _ in containers(found):
        if not re.search(r"(:(?!latest$)[\w.-]+|@sha256:[0-9a-f]{64})$", container["image"]):
            yield f"{name} has an image that changes: {container['image']}"


def resources_are_bounded(found: list[Object]) -> Iterator[str]:
    """Requests and limits, of CPU and memory."""
    for name, container, _ in containers(found):
        for kind in ("requests", "limits"):
            if not {"cpu", "memory"} <= set(container.get("resources", {}).get(kind, {})):
                yield f"{name} has no {kind} of cpu and memory"


def the_service_is_probed(found: list[Object]) -> Iterator[str]:
    """Alive by /healthz, which waits for nothing; ready by /readyz, as the owner is, and who hands on to it."""
    for name, container, _ in containers(found):
        if not name.endswith(": thinwire"):
            continue
        ports = {port["name"] for port in container["ports"]}
        for probe, path in {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}.items():
            get = container.get(f"{probe}Probe", {}).get("httpGet", {})
            if get.get("path") != path or get.get("port") not in ports:
                yield f"{name} has no {probe} probe of {path}"


def graces_fit(found: list[Object]) -> Iterator[str]:
    """The service: open requests, then its end. A worker: what a job gives it by default, and then Ray's end."""
    needed = {"Deployment": 4 * OPEN_REQUESTS_S, "RayJob": Workers.model_fields["grace_s"].default + 15}
    for name, pod in pods(found):
        least = needed.get(re.split(r"[ :]", name)[0], 0)
        if not name.endswith(": head") and pod.get("terminationGracePeriodSeconds", 30) < least:
            yield f"{name} has less than {least:g} s for its end"


def ray_asks_for_its_token(found: list[Object]) -> Iterator[str]:
    """Whoever reaches a Ray without a token runs code in it."""
    for each in found:
        if each["kind"] in ("RayJob", "RayCluster") and ray_cluster(each).get("authOptions", {}).get("mode") != "token":
            yield f"{each['kind']} has no authOptions.mode: token"


def ray_is_exposed_nowhere(found: list[Object]) -> Iterator[str]:
    """No Service of ours that leads out or to Ray, no Ingress to anything but the API, none that KubeRay would make."""
    names = {each["metadata"]["name"] for each in found if each["kind"] == "Service"}
    for each in found:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            if spec.get("type", "ClusterIP") != "ClusterIP" or "externalIPs" in spec:
                yield f"Service {each['metadata']['name']} leads out of the cluster"
            if any(label.startswith("ray.io/") for label in spec["selector"]):
                yield f"Service {each['metadata']['name']} leads to Ray"
            if RAY_PORTS & {port.get("targetPort", port["port"]) for port in spec["ports"]}:
                yield f"Service {each['metadata']['name']} has a port of Ray"
        if each["kind"] == "Ingress":
            for path in (path for rule in spec["rules"] for path in rule["http"]["paths"]):
                backend = path["backend"]["service"]
                if backend["name"] not in names or backend["port"] != {"name": "http"}:
                    yield f"Ingress leads to {backend['name']}"
            if not spec.get("tls"):
                yield "Ingress without TLS"
        if each["kind"] in ("RayJob", "RayCluster"):
            head = ray_cluster(each)["headGroupSpec"]
            kind = head.get("headService", {}).get("spec", {}).get("type", head.get("serviceType", "ClusterIP"))
            if head.get("enableIngress") or kind != "ClusterIP":
                yield f"{each['kind']} leads out of the cluster"


def networks_are_closed(found: list[Object]) -> Iterator[str]:
    """Ray's pods are guarded, and each port of theirs is open to those alone that need it; so is the API."""
    policies = [each["spec"] for each in found if each["kind"] == "NetworkPolicy"]
    guarded = [policy["podSelector"] for policy in policies]
    launcher = next(
        (
            env["value"]
            for _, pod, _ in containers(found)
            for env in pod.get("env", ())
            if env["name"] == "THINWIRE_LAUNCHER"
        ),
        None,
    )
    if launcher == "kuberay" and {"matchLabels": RAY_POD} not in guarded:
        yield "no policy for the pods of Ray"
    if not any(one.get("matchLabels", {}).get("app.kubernetes.io/name") == "thinwire" for one in guarded):
        yield "no policy for the API"
    for policy in policies:
        labels = policy["podSelector"].get("matchLabels", {})
        if "Ingress" not in policy["policyTypes"] and not any(
            "Ingress" in other["policyTypes"] and other["podSelector"].get("matchLabels", {}).items() <= labels.items()
            for other in policies
        ):
            yield "a policy that lets everything in"
        of_ray = labels == RAY_POD
        for rule in policy.get("ingress", ()):
            if not rule.get("from") or {} in rule["from"]:
                yield "a port that is open to all"
                continue
            if not of_ray:
                continue
            ours = labels == RAY_POD and rule["from"] == [{"podSelector": policy["podSelector"]}]
            if not rule.get("ports") and not ours:
                yield "all ports of Ray are open to pods that are not Ray's"
            prometheus = len(rule["from"]) == 1 and "podSelector" not in rule["from"][0]
            if not prometheus and any(opens(port, METRICS_PORT) for port in rule.get("ports", [])):
                yield "the metrics of Ray are open to others than Prometheus"
            for ray_port in RAY_PORTS:
                for port in rule.get("ports", []):
                    if opens(port, ray_port) and not all("podSelector" in peer for peer in rule["from"]):
                        yield f"port {ray_port} of Ray is open to whole namespaces"
                    if opens(port, ray_port) and ray_port != 8265:
                        yield f"port {ray_port} of Ray is open to pods that are not Ray's"


def opens(port: Object, number: int) -> bool:
    """Does this entry of a policy let the port through?"""
    return bool(port["port"] <= number <= port.get("endPort", port["port"]))


def rights_are_few(found: list[Object]) -> Iterator[str]:
    """Roles of one namespace, nothing by wildcard, no Secrets; an API token only where the launcher needs it."""
    for each in found:
        if each["kind"].startswith("Cluster"):
            yield f"{each['kind']} reaches beyond a namespace"
        if each["kind"] != "Role":
            continue
        for rule in each["rules"]:
            if "*" in (*rule["apiGroups"], *rule["resources"], *rule["verbs"]):
                yield "a rule with *"
            for resource in {"secrets", "configmaps", "pods/exec", "roles"} & set(rule["resources"]):
                yield f"a right to {resource}"
            if "pods" in rule["resources"] and not set(rule["verbs"]) <= {"get", "list", "watch"}:
                yield "a right to change pods"
    roles = any(each["kind"] == "Role" for each in found)
    for name, pod in pods(found):
        if name.startswith("Deployment") and pod.get("automountServiceAccountToken", True) != roles:
            yield f"{name} has a token of the Kubernetes API without a role, or a role without the token"


def tokens_are_the_autoscalers(found: list[Object]) -> Iterator[str]:
    """No container of Ray that runs what a user sends has a token of the Kubernetes API."""
    for name, pod in pods(found):
        if name.startswith("Deployment"):
            continue
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name} has the token of its account in every container"
        tokens = {
            volume["name"]
            for volume in pod.get("volumes", ())
            if any("serviceAccountToken" in source for source in volume.get("projected", {}).get("sources", ()))
        }
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            if any(mount["name"] in tokens for mount in container.get("volumeMounts", ())):
                yield f"{name}: {container['name']} has a token of the Kubernetes API"


def jobs_live_apart(found: list[Object]) -> Iterator[str]:
    """The pods of jobs are not where the service, its Secrets and its database are."""
    own = {each["metadata"]["namespace"] for each in found if each["kind"] == "Deployment"}
    for each in found:
        if each["kind"] == "Role" and each["metadata"]["namespace"] in own:
            yield f"jobs run in the namespace of the service, {each['metadata']['namespace']}"


def drains_go_on(found: list[Object]) -> Iterator[str]:
    """A budget lets one of several go, and the only one always."""
    several = any(each["kind"] == "Deployment" and each["spec"]["replicas"] > 1 for each in found)
    for each in found:
        if each["kind"] == "PodDisruptionBudget" and not (several and each["spec"].get("maxUnavailable") == 1):
            yield f"PodDisruptionBudget {each['metadata']['name']} would not let the one pod go"


def users_reach_who_answers(found: list[Object]) -> Iterator[str]:
    """One replica also while its launcher does not answer; of several those that are ready, which hand on to it."""
    replicas = [each["spec"]["replicas"] for each in found if each["kind"] == "Deployment"]
    for each in found:
        if each["kind"] == "Service" and each["spec"].get("publishNotReadyAddresses", False) != (replicas == [1]):
            yield "users reach one that answers nothing, or not the one that cannot launch"


def versions_do_not_meet(found: list[Object]) -> Iterator[str]:
    """The old version ends before the new one migrates; several replicas share PostgreSQL."""
    for each in found:
        if each["kind"] != "Deployment":
            continue
        if each["spec"]["strategy"]["type"] != "Recreate":
            yield "the old version runs while the new one migrates the database"
        environment = {env["name"]: env for env in each["spec"]["template"]["spec"]["containers"][0]["env"]}
        if each["spec"]["replicas"] > 1 and "THINWIRE_DATABASE_URL" not in environment:
            yield "several replicas with SQLite"
        if "valueFrom" not in environment.get("THINWIRE_DATABASE_URL", {"valueFrom": None}):
            yield "the password of the database is in the manifest"


POLICIES: tuple[Policy, ...] = (
    nobody_is_root,
    nothing_of_the_host,
    images_are_fixed,
    resources_are_bounded,
    the_service_is_probed,
    graces_fit,
    ray_asks_for_its_token,
    ray_is_exposed_nowhere,
    networks_are_closed,
    rights_are_few,
    tokens_are_the_autoscalers,
    jobs_live_apart,
    drains_go_on,
    users_reach_who_answers,
    versions_do_not_meet,
)


def broken(found: list[Object]) -> list[str]:
    """All that is wrong with these objects, together one deployment."""
    return [sentence for policy in POLICIES for sentence in policy(found)]
