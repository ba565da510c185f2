"""The RayJob of an attempt: a template with a few fields filled in, and the changes of its RayCluster later.

The template is a whole RayJob that a person reads and changes (rayjob.yaml, or one's own). What a launcher must be able
to rely on is checked when it is read, not when the first job comes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import yaml

from thinwire.contract.labels import of_metadata, on_kubernetes
from thinwire.contract.spec import JobSpec
from thinwire.service.launch.kuberay.pods import GPU, Object, Pods, PodsRefused, mapping, read_pods

LABEL_SERVICE: Final = "thinwire/service"
"""Of RayJob and RayCluster: whose they are."""
SUBMISSION: Final = "thinwire/submission"
"""The annotation with the submission id, as the service knows it."""
QUEUE: Final = "kueue.x-k8s.io/queue-name"
PRIORITY: Final = "kueue.x-k8s.io/priority-class"
ELASTIC: Final = "kueue.x-k8s.io/elastic-job"
RUN: Final = "thinwire/run"
"""Of the pods of a RayJob that a NetworkPolicy of its own keeps from those of others: its name."""
END_OF_RAY_S: Final = 30
"""Beside workers.grace_s: the hand-over's own start, and Ray's end after it."""
LONGEST_NAME: Final = 47
"""Of a RayJob: KubeRay makes the names of its RayCluster and Services of it."""
TOKEN_VOLUME: Final = "autoscaler-token"
TOKEN_FOLDER: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where a client of the Kubernetes API looks for the account of its pod."""
_TOKEN: Final = [
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
]
"""What Kubernetes itself mounts there."""
_SLUG: Final = 20
_NOT_A_STRING: Final = re.compile(r"[yYnN]|[-+]?(\d[\d_]*)?\.?[\d_]*([eE][-+]?\d+)|[-+]?0o[0-7_]+")
"""To Go's YAML a truth, or a number with an exponent or in base 8; PyYAML writes these strings without quotes."""


class TemplateRefused(Exception):
    """The template is no RayJob that jobs can run in; the message says where and what to do."""


@dataclass(frozen=True, slots=True)
class Template:
    """A RayJob that passed `read_template`. It is never modified."""

    rayjob: Object
    image: str | None = None
    """In the place of the images of head and workers."""
    pods: Pods = field(default_factory=Pods)
    """Added to head and workers."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is filled in. entrypoint: a shell command line, which the cluster shows to its users: no secrets.

    apart: its pods have the label that `policy` keeps them from others by.
    """

    service_id: str
    submission_id: str
    entrypoint: str
    metadata: Mapping[str, str]
    spec: JobSpec
    least: int
    most: int
    namespace: str = "default"
    apart: bool = False


def rayjob_name(service_id: str, submission_id: str) -> str:
    """A DNS label of at most LONGEST_NAME characters that is this submission's alone, and tells people which it is."""
    slug = re.sub(r"[^a-z0-9]+", "-", submission_id.lower()).strip("-")[:_SLUG].strip("-")
    digest = hashlib.sha256(f"{service_id}.{submission_id}".encode()).hexdigest()[:12]
    return f"tw-{slug}-{digest}" if slug else f"tw-{digest}"


def read_template(path: Path | None, image: str | None = None, pods: Path | None = None) -> Template:
    """The template in this file; None: the service's own. pods: a file with what is added. Raises TemplateRefused."""
    named = "the service's own template" if path is None else f"the template {path}"
    try:
        text = files(__package__).joinpath("rayjob.yaml").read_text() if path is None else path.read_text("utf-8")
        # Read at each start, by libyaml in a sixteenth of the time; of a person's own the other shows the wrong line.
        quick = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        found = yaml.load(text, Loader=quick if path is None else yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TemplateRefused(f"{named} cannot be read as YAML: {error}") from error
    wrong = _wrong(found)
    if wrong is not None:
        raise TemplateRefused(f"{named}: {wrong}; begin with what `thinwire manifest` prints")
    try:
        return Template(found, image, Pods() if pods is None else read_pods(pods))
    except PodsRefused as error:
        raise TemplateRefused(str(error)) from error


def rayjob(template: Template, attempt: Attempt) -> Object:
    """The RayJob of this attempt, as it is created."""
    made = copy.deepcopy(template.rayjob)
    metadata, spec = mapping(made, "metadata"), made["spec"]
    metadata.pop("generateName", None)
    metadata["name"] = rayjob_name(attempt.service_id, attempt.submission_id)
    metadata["namespace"] = attempt.namespace
    labels = mapping(metadata, "labels")
    labels |= {LABEL_SERVICE: attempt.service_id, "app.kubernetes.io/managed-by": "thinwire"}
    annotations = mapping(metadata, "annotations")
    annotations[SUBMISSION] = attempt.submission_id
    _queue(spec, labels, annotations, attempt.spec)
    spec["entrypoint"] = attempt.entrypoint
    spec["jobId"] = f"{attempt.service_id}.{attempt.submission_id}"
    spec["metadata"] = dict(attempt.metadata)
    cluster = spec["rayClusterSpec"]
    head, group = cluster["headGroupSpec"]["template"]["spec"], cluster["workerGroupSpecs"][0]
    for one in (made, cluster["headGroupSpec"]["template"], group["template"]):
        mapping(mapping(one, "metadata"), "labels").update(_labels_of_job(attempt.metadata))
    least = attempt.least
    if _is_fixed(made):  # Kueue counts its pods once, when it admits it, and takes no autoscaler
        least = attempt.most
        cluster["enableInTreeAutoscaling"] = False
        cluster.pop("autoscalerOptions", None)
    group |= {"replicas": least, "minReplicas": least, "maxReplicas": attempt.most}
    pod = group["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = round(attempt.spec.workers.grace_s) + END_OF_RAY_S
    _device(group, attempt.spec.workers.device)
    _box(group, attempt.spec.workers.per_box)
    template.pods.add(cluster, attempt.spec)
    if attempt.apart:
        for one in (cluster["headGroupSpec"]["template"], group["template"]):
            one["metadata"]["labels"][RUN] = metadata["name"]
    _give_no_token(cluster)
    if template.image is not None:
        head["containers"][0]["image"] = pod["containers"][0]["image"] = template.image
    return made


def policy(made: Object) -> Object:
    """The NetworkPolicy that lets the pods of this RayJob, as the API server has it, be reached by one another.

    A policy cannot say "of the same job", so each job has one. It goes with its RayJob.
    """
    name, pods = made["metadata"]["name"], {"podSelector": {"matchLabels": {RUN: made["metadata"]["name"]}}}
    owner = {"apiVersion": made["apiVersion"], "kind": made["kind"], "name": name, "uid": made["metadata"]["uid"]}
    labels = {key: made["metadata"]["labels"][key] for key in (LABEL_SERVICE, "app.kubernetes.io/managed-by")}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": name,
            "namespace": made["metadata"]["namespace"],
            "labels": labels,
            "ownerReferences": [owner],
        },
        "spec": {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [copy.deepcopy(pods)]}]},
    }


def resized(cluster: Object, least: int, most: int) -> list[Object] | None:
    """The JSON patch that gives a RayCluster these limits; None where it has them, or what Kueue has admitted cannot
    change. least and most: workers.

    The upper limit does not go below what runs: Ray's autoscaler would end pods with workers in them. Workers that
    are dismissed leave idle pods, which it ends by itself; then the limit follows.
    """
    if _is_fixed(cluster):
        return None
    group = cluster["spec"]["workerGroupSpecs"][0]
    upper = max(most, int(group.get("replicas") or 0))
    now = (group.get("minReplicas"), group.get("maxReplicas"))
    if now == (least, upper):
        return None
    path = "/spec/workerGroupSpecs/0"
    return [
        # Of this group, however others have changed the list meanwhile.
        {"op": "test", "path": f"{path}/groupName", "value": group["groupName"]},
        # Had the autoscaler just asked for more pods, the upper limit would end them: the next turn looks again.
        *([{"op": "test", "path": f"{path}/replicas", "value": group["replicas"]}] if "replicas" in group else []),
        {"op": "add", "path": f"{path}/minReplicas", "value": least},
        {"op": "add", "path": f"{path}/maxReplicas", "value": upper},
    ]


def printed(made: Object) -> str:
    """As YAML, in the order in which people read it. Without anchors: what is used twice is written twice."""
    return yaml.dump(json.loads(json.dumps(made)), Dumper=_ForKubectl, sort_keys=False, width=120)


class _ForKubectl(yaml.SafeDumper):
    """Quotes strings that PyYAML reads as such and the YAML of Kubernetes does not."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _NOT_A_STRING.fullmatch(text) else None)


_ForKubectl.add_representer(str, _string)


def _labels_of_job(metadata: Mapping[str, str]) -> dict[str, str]:
    """What a person has written of the job, on what is made of it: for kubectl, cost reports and policies."""
    return {on_kubernetes(key): value for key, value in of_metadata(metadata).items()}


def _queue(spec: Object, labels: dict[str, str], annotations: dict[str, str], job: JobSpec) -> None:
    """Kueue admits it: it is created suspended, and Kueue lets it go."""
    kueue = job.kueue
    if kueue is None:
        return
    labels[QUEUE] = kueue.queue
    if kueue.priority is not None:
        labels[PRIORITY] = kueue.priority
    if kueue.elastic:
        annotations[ELASTIC] = "true"
    spec["suspend"] = True


def _is_fixed(found: Object) -> bool:
    """Does Kueue admit so many pods, and no others later? Of a RayJob, or of the RayCluster made of it."""
    metadata = found["metadata"]
    return QUEUE in metadata.get("labels", {}) and metadata.get("annotations", {}).get(ELASTIC) != "true"


def _device(group: Object, device: str) -> None:
    """One GPU a worker, none, or what the template has."""
    if device == "auto":
        return
    resources = mapping(group["template"]["spec"]["containers"][0], "resources")
    for kind in ("requests", "limits"):
        amounts = mapping(resources, kind)
        amounts.pop(GPU, None)
        if device == "gpu":
            amounts[GPU] = "1"
    group["rayStartParams"].pop("num-gpus", None)


def _box(group: Object, processes: int) -> None:
    """So many processes in a pod, each with what the template has for one: then a pod is a box, NVLink inside."""
    if processes == 1:
        return
    params = group["rayStartParams"]
    params["num-cpus"] = str(processes)
    if str(params.get("num-gpus", "")).isdecimal():
        params["num-gpus"] = str(int(params["num-gpus"]) * processes)
    resources = group["template"]["spec"]["containers"][0].get("resources") or {}
    for kind in ("requests", "limits"):
        for name, amount in (resources.get(kind) or {}).items():
            number, unit = re.fullmatch(r"([0-9.]+)(.*)", str(amount)).groups()  # type: ignore[union-attr] # _wrong looked
            resources[kind][name] = f"{(Decimal(number) * processes).normalize():f}{unit}"


def _give_no_token(cluster: Object) -> None:
    """Leave the token of the Kubernetes API to the autoscaler's container alone.

    KubeRay lets the account of a head's pod change pods and RayClusters of the namespace. Whoever runs code in a Ray
    can run it on its head, whatever the head has to offer, so what runs Ray must not have that account's token.
    """
    head = cluster["headGroupSpec"]["template"]["spec"]
    for pod in (head, *(group["template"]["spec"] for group in cluster["workerGroupSpecs"])):
        pod["automountServiceAccountToken"] = False
    if not cluster.get("enableInTreeAutoscaling"):
        return
    mounts = _list(mapping(cluster, "autoscalerOptions"), "volumeMounts")
    if not any(mount.get("mountPath", "").rstrip("/") == TOKEN_FOLDER for mount in mounts):
        mounts.append({"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True})
        _list(head, "volumes").append({"name": TOKEN_VOLUME, "projected": {"sources": copy.deepcopy(_TOKEN)}})


def _list(parent: Object, name: str) -> list[Any]:
    if parent.get(name) is None:
        parent[name] = []
    found: list[Any] = parent[name]
    return found


def _wrong(found: Any) -> str | None:
    """What of a template cannot be relied on, in a sentence."""
    if not isinstance(found, dict) or found.get("kind") != "RayJob" or found.get("apiVersion") != "ray.io/v1":
        return "it is no RayJob of ray.io/v1"
    spec = found.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("rayClusterSpec"), dict):
        return "spec.rayClusterSpec is missing"
    if (what := _nomapping(found, "metadata", "labels", "annotations")) is not None:
        return what
    if spec.get("submissionMode") != "HTTPMode":
        return f"spec.submissionMode is {spec.get('submissionMode')!r}, and must be HTTPMode"
    if spec.get("backoffLimit", 0) != 0:
        return f"spec.backoffLimit is {spec['backoffLimit']!r}, and must be 0: the service tries again by itself"
    if spec.get("shutdownAfterJobFinishes") is not True:
        return "spec.shutdownAfterJobFinishes must be true, or the pods of jobs that are over would stay"
    cluster = spec["rayClusterSpec"]
    if not isinstance(cluster.get("authOptions"), dict) or cluster["authOptions"].get("mode") != "token":
        return "spec.rayClusterSpec.authOptions.mode must be token: a Ray without one runs what anybody sends it"
    groups = cluster.get("workerGroupSpecs")
    if not isinstance(groups, list) or len(groups) != 1:
        return "spec.rayClusterSpec.workerGroupSpecs must have one group: the workers"
    for name, group in (("headGroupSpec", cluster.get("headGroupSpec")), ("workerGroupSpecs[0]", groups[0])):
        if not _has_container(group):
            return f"spec.rayClusterSpec.{name}.template.spec.containers must have a container with an image"
        if not isinstance(group.get("rayStartParams"), dict):
            return f"spec.rayClusterSpec.{name}.rayStartParams is missing; it may be {{}}"
    container = groups[0]["template"]["spec"]["containers"][0]
    if (what := _nomapping(container, "resources", "requests", "limits")) is not None:
        return f"spec.rayClusterSpec.workerGroupSpecs[0].template.spec.containers[0].{what}"
    for kind, amounts in (container.get("resources") or {}).items():
        for name, amount in (amounts or {}).items() if kind in ("requests", "limits") else ():
            if not re.fullmatch(r"(\d+\.?\d*|\.\d+)([a-zA-Z]{0,2}|[eE][-+]?\d+)", str(amount)):
                return (
                    "spec.rayClusterSpec.workerGroupSpecs[0].template.spec.containers[0].resources."
                    f"{kind}.{name} is {amount!r}, and must be a quantity such as 4 or 16Gi"
                )
    if str(cluster["headGroupSpec"]["rayStartParams"].get("num-cpus")) != "0":
        return 'spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus must be "0": no worker runs on the head'
    if groups[0]["rayStartParams"].get("num-cpus") != "1":
        return 'spec.rayClusterSpec.workerGroupSpecs[0].rayStartParams.num-cpus must be "1": of one process of a job'
    if not isinstance(groups[0].get("groupName"), str):
        return "spec.rayClusterSpec.workerGroupSpecs[0].groupName is missing"
    return None


def _nomapping(parent: Object, name: str, *inner: str) -> str | None:
    """Which of these fields has something else than a mapping, or nothing, in it."""
    found = parent.get(name)
    if found is not None and not isinstance(found, dict):
        return f"{name} is {found!r}, and must be a mapping"
    wrong = (f"{name}.{one}" for one in inner if not isinstance((found or {}).get(one) or {}, dict))
    return next((f"{one} must be a mapping" for one in wrong), None)


def _has_container(group: Any) -> bool:
    try:
        return isinstance(group["template"]["spec"]["containers"][0]["image"], str)
    except (KeyError, IndexError, TypeError):
        return False
