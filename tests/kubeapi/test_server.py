"""The API server for tests answers the official client as a real one does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import kubernetes.client
import kubernetes.watch
import pytest
from kubernetes.client.rest import ApiException

from tests.kubeapi.kinds import EVENTS, PODS, RAYCLUSTERS, RAYJOBS, Object
from tests.kubeapi.server import KubeApi

RAY = ("ray.io", "v1", "default", "rayjobs")
Make = Callable[..., Object]


@pytest.fixture
def custom(client: kubernetes.client.ApiClient) -> kubernetes.client.CustomObjectsApi:
    return kubernetes.client.CustomObjectsApi(client)


def _refused(call: Callable[..., Any], *arguments: Any, **how: Any) -> Object:
    """The Status that the call is answered with."""
    with pytest.raises(ApiException) as raised:
        call(*arguments, **how)
    found: Object = json.loads(raised.value.body)
    assert found["kind"] == "Status"
    assert found["code"] == raised.value.status
    return found


def test_an_object_is_created_once_with_what_the_server_and_the_schema_add(custom: Any, rayjob: Make) -> None:
    made = custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    assert made["metadata"]["generation"] == 1
    assert made["metadata"]["uid"]
    assert made["metadata"]["creationTimestamp"].endswith("Z")
    assert made["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["numOfHosts"] == 1  # a default of the CRD
    assert "status" not in custom.create_namespaced_custom_object(*RAY, rayjob("b") | {"status": {"jobId": "x"}})
    again = _refused(custom.create_namespaced_custom_object, *RAY, rayjob("a"))
    assert (again["code"], again["reason"]) == (409, "AlreadyExists")
    assert again["message"] == 'rayjobs.ray.io "a" already exists'
    assert again["details"] == {"name": "a", "group": "ray.io", "kind": "rayjobs"}


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"submissionMode": "Post"}, 200, ""),  # KubeRay's schema has no list of modes; its operator refuses it
        ({"backoffLimit": "3"}, 422, "spec.backoffLimit in body must be of type integer"),
        ({"backOffLimit": 3}, 400, 'strict decoding error: unknown field "spec.backOffLimit"'),
    ],
)
def test_what_the_schema_of_the_crd_does_not_take_is_refused_by_field(
    custom: Any, rayjob: Make, change: Object, code: int, words: str
) -> None:
    if code == 200:
        custom.create_namespaced_custom_object(*RAY, rayjob("a", **change))
        return
    found = _refused(custom.create_namespaced_custom_object, *RAY, rayjob("a", **change))
    assert found["code"] == code
    assert words in found["message"]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"name": "A_b"}, "a lowercase RFC 1123 subdomain"),
        ({"name": "a", "labels": {"x": "not valid!"}}, "a valid label must be"),
        ({"name": "a", "labels": {"x": "v" * 64}}, "must be no more than 63 bytes"),
        ({"name": "a", "annotations": {"x": "v" * (256 * 1024)}}, "Too long"),
    ],
)
def test_metadata_that_kubernetes_does_not_take_is_refused(
    custom: Any, rayjob: Make, metadata: Object, words: str
) -> None:
    found = _refused(custom.create_namespaced_custom_object, *RAY, rayjob("a") | {"metadata": metadata})
    assert (found["code"], found["reason"]) == (422, "Invalid")
    assert words in found["message"]


def test_a_write_of_an_old_version_conflicts_and_one_that_changes_nothing_is_none(custom: Any, rayjob: Make) -> None:
    first = custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    first["spec"]["entrypoint"] = "python other.py"
    second = custom.replace_namespaced_custom_object(*RAY, "a", first)
    assert second["metadata"]["generation"] == 2
    conflict = _refused(custom.replace_namespaced_custom_object, *RAY, "a", first)
    assert (conflict["code"], conflict["reason"]) == (409, "Conflict")
    assert "the object has been modified" in conflict["message"]
    same = custom.replace_namespaced_custom_object(*RAY, "a", second)
    assert same["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


def test_the_status_is_written_apart_from_all_else(custom: Any, rayjob: Make) -> None:
    made = custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    made["status"] = {"jobId": "x"}
    made["spec"]["entrypoint"] = "python other.py"
    after = custom.replace_namespaced_custom_object_status(*RAY, "a", made)
    assert after["status"]["jobId"] == "x"
    assert after["spec"]["entrypoint"] == "python train.py"
    assert after["metadata"]["generation"] == 1
    after["status"] = {"jobId": "y"}
    assert custom.replace_namespaced_custom_object(*RAY, "a", after)["status"]["jobId"] == "x"


def _json_patch(custom: Any, name: str, patch: list[Object]) -> Object:
    """The client sends every patch of a custom object as a merge patch, unless it is told."""
    found: Object = custom.patch_namespaced_custom_object(
        *RAY, name, patch, _content_type="application/json-patch+json"
    )
    return found


def test_a_json_patch_applies_whole_or_not_at_all(custom: Any, rayjob: Make) -> None:
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    path = "/spec/rayClusterSpec/workerGroupSpecs/0"
    good = [
        {"op": "test", "path": f"{path}/groupName", "value": "workers"},
        {"op": "replace", "path": f"{path}/maxReplicas", "value": 8},
    ]
    changed = _json_patch(custom, "a", good)
    assert changed["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"] == 8
    bad = [{"op": "replace", "path": f"{path}/maxReplicas", "value": 9}, good[0] | {"value": "others"}]
    found = _refused(_json_patch, custom, "a", bad)
    assert (found["code"], found["reason"]) == (422, "Invalid")
    old = [{"op": "replace", "path": "/metadata/resourceVersion", "value": "1"}]
    assert _refused(_json_patch, custom, "a", old)["reason"] == "Conflict"
    now = custom.get_namespaced_custom_object(*RAY, "a")
    assert now == changed
    merged = custom.patch_namespaced_custom_object(*RAY, "a", {"metadata": {"labels": {"x": "1"}}})
    assert merged["metadata"]["labels"] == {"x": "1"}
    assert merged["metadata"]["generation"] == 2  # as after the patch of the spec


def test_a_list_is_selected_by_labels_and_paged_as_of_one_version(custom: Any, server: KubeApi, rayjob: Make) -> None:
    for number in range(5):
        custom.create_namespaced_custom_object(*RAY, rayjob(f"j{number}", {"n": str(number), "all": "yes"}))

    def names(selector: str) -> list[str]:
        found = custom.list_namespaced_custom_object(*RAY, label_selector=selector)["items"]
        return [one["metadata"]["name"] for one in found]

    assert names("n=1") == ["j1"]
    assert names("all=yes,n!=1,n notin (2, 3)") == ["j0", "j4"]
    assert names("n in (1,4),all") == ["j1", "j4"]
    assert names("!all") == []
    assert _refused(names, "n in 1")["reason"] == "BadRequest"

    first = custom.list_namespaced_custom_object(*RAY, limit=2)
    custom.delete_namespaced_custom_object(*RAY, "j4")
    second = custom.list_namespaced_custom_object(*RAY, limit=3, _continue=first["metadata"]["continue"])
    assert [one["metadata"]["name"] for one in first["items"] + second["items"]] == [f"j{n}" for n in range(5)]
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert "continue" not in second["metadata"]
    server.store.compact()
    custom.delete_namespaced_custom_object(*RAY, "j3")
    gone = _refused(custom.list_namespaced_custom_object, *RAY, limit=2, _continue=first["metadata"]["continue"])
    assert (gone["code"], gone["reason"]) == (410, "Expired")


def test_a_watch_is_told_every_change_and_bookmarks(custom: Any, server: KubeApi, rayjob: Make) -> None:
    version = custom.list_namespaced_custom_object(*RAY)["metadata"]["resourceVersion"]
    custom.create_namespaced_custom_object(*RAY, rayjob("a", {"own": "yes"}))
    custom.create_namespaced_custom_object(*RAY, rayjob("other"))
    custom.patch_namespaced_custom_object(*RAY, "a", {"spec": {"entrypoint": "python b.py"}})
    custom.patch_namespaced_custom_object(*RAY, "a", {"metadata": {"labels": {"own": "no"}}})
    custom.patch_namespaced_custom_object(*RAY, "a", {"metadata": {"labels": {"own": "yes"}}})
    custom.delete_namespaced_custom_object(*RAY, "a")
    events = list(
        kubernetes.watch.Watch().stream(
            custom.list_namespaced_custom_object,
            *RAY,
            label_selector="own=yes",
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=1,
        )
    )
    told = [event["type"] for event in events if event["type"] != "BOOKMARK"]
    assert told == ["ADDED", "MODIFIED", "DELETED", "ADDED", "DELETED"]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions)
    assert events[-1]["type"] == "BOOKMARK"
    assert events[-1]["object"]["metadata"]["resourceVersion"] == str(server.store.version)


def test_a_watch_of_a_version_that_is_forgotten_is_told_410(custom: Any, server: KubeApi, rayjob: Make) -> None:
    old = custom.list_namespaced_custom_object(*RAY)["metadata"]["resourceVersion"]
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    server.store.compact()
    watch = kubernetes.watch.Watch().stream(
        custom.list_namespaced_custom_object, *RAY, resource_version=old, timeout_seconds=5
    )
    with pytest.raises(ApiException, match="too old resource version") as raised:
        next(iter(watch))
    assert raised.value.status == 410


def test_a_deletion_waits_for_finalizers_and_takes_what_is_owned(custom: Any, server: KubeApi, rayjob: Make) -> None:
    made = custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": "a", "uid": made["metadata"]["uid"]}
    cluster = {"metadata": {"name": "a-12345", "ownerReferences": [owner]}, "spec": made["spec"]["rayClusterSpec"]}
    server.store.create(RAYCLUSTERS, "default", cluster)
    custom.patch_namespaced_custom_object(*RAY, "a", {"metadata": {"finalizers": ["ray.io/rayjob-finalizer"]}})
    wrong = _refused(custom.delete_namespaced_custom_object, *RAY, "a", body={"preconditions": {"uid": "of-another"}})
    assert (wrong["code"], wrong["reason"]) == (409, "Conflict")
    marked = custom.delete_namespaced_custom_object(*RAY, "a")
    assert marked["metadata"]["deletionTimestamp"]
    assert server.store.find(RAYCLUSTERS, "default", "a-12345") is not None
    custom.patch_namespaced_custom_object(*RAY, "a", {"metadata": {"finalizers": None}})
    assert _refused(custom.get_namespaced_custom_object, *RAY, "a")["message"] == 'rayjobs.ray.io "a" not found'
    assert server.store.find(RAYCLUSTERS, "default", "a-12345") is None


def test_a_pod_on_a_node_keeps_its_grace_and_others_go_at_once(
    client: kubernetes.client.ApiClient, server: KubeApi
) -> None:
    core = kubernetes.client.CoreV1Api(client)
    spec = {"containers": [{"name": "c", "image": "i"}], "terminationGracePeriodSeconds": 7}
    server.store.create(PODS, "default", {"metadata": {"name": "here"}, "spec": spec | {"nodeName": "node-1"}})
    server.store.create(PODS, "default", {"metadata": {"name": "pending"}, "spec": spec})
    core.delete_namespaced_pod("here", "default")
    core.delete_namespaced_pod("pending", "default")
    left = core.list_namespaced_pod("default").items
    assert [(pod.metadata.name, pod.metadata.deletion_grace_period_seconds) for pod in left] == [("here", 7)]
    core.delete_namespaced_pod("here", "default", grace_period_seconds=0)
    assert core.list_namespaced_pod("default").items == []


def test_events_are_selected_by_what_they_are_about(client: kubernetes.client.ApiClient, server: KubeApi) -> None:
    core = kubernetes.client.CoreV1Api(client)
    for name, kind in (("a", "Pod"), ("b", "RayJob")):
        about = {"kind": kind, "name": name, "namespace": "default"}
        body = {"metadata": {"name": f"{name}.1"}, "involvedObject": about, "reason": "R", "type": "Warning"}
        server.store.create(EVENTS, "default", body)
    found = core.list_namespaced_event("default", field_selector="involvedObject.kind=Pod,type=Warning").items
    assert [event.involved_object.name for event in found] == ["a"]
    refused = _refused(core.list_namespaced_event, "default", field_selector="colour=red")
    assert "field label not supported: colour" in refused["message"]


def test_a_pod_s_log_is_there_when_its_container_has_begun(
    client: kubernetes.client.ApiClient, server: KubeApi
) -> None:
    core = kubernetes.client.CoreV1Api(client)
    spec = {"containers": [{"name": "c", "image": "i"}]}
    server.store.create(PODS, "default", {"metadata": {"name": "p"}, "spec": spec})
    assert "is waiting to start: ContainerCreating" in _refused(core.read_namespaced_pod_log, "p", "default")["message"]

    def begin(pod: Object) -> Object:
        state = {"name": "c", "image": "i", "imageID": "", "ready": True, "restartCount": 0, "state": {"running": {}}}
        return pod | {"status": {"phase": "Running", "containerStatuses": [state]}}

    server.store.update(PODS, "default", "p", begin, "status")
    server.store.logs["default", "p", "c"] = b"one\ntwo\n"
    # As it was sent: the client of 36.0 makes the text of bytes.
    log = core.read_namespaced_pod_log("p", "default", tail_lines=1, _preload_content=False)
    assert log.data == b"two\n"


def test_rights_that_are_not_given_are_refused_and_told_of(
    client: kubernetes.client.ApiClient, server: KubeApi
) -> None:
    custom, reviews = kubernetes.client.CustomObjectsApi(client), kubernetes.client.AuthorizationV1Api(client)
    server.rights.deny("list", "rayjobs")
    found = _refused(custom.list_namespaced_custom_object, *RAY)
    assert (found["code"], found["reason"]) == (403, "Forbidden")
    assert 'cannot list resource "rayjobs" in API group "ray.io" in the namespace "default"' in found["message"]

    def allowed(verb: str) -> bool:
        wanted = {"namespace": "default", "group": "ray.io", "resource": "rayjobs", "verb": verb}
        review = reviews.create_self_subject_access_review({"spec": {"resourceAttributes": wanted}})
        return bool(review.status.allowed)

    assert (allowed("list"), allowed("watch")) == (False, True)


def test_no_token_or_another_is_refused(client: kubernetes.client.ApiClient, custom: Any) -> None:
    client.configuration.api_key = {"authorization": "another"}
    assert _refused(custom.list_namespaced_custom_object, *RAY)["reason"] == "Unauthorized"


def test_without_kuberay_its_paths_are_not_there(client: kubernetes.client.ApiClient, server: KubeApi) -> None:
    assert kubernetes.client.VersionApi(client).get_code().major == "1"
    groups = kubernetes.client.ApisApi(client).get_api_versions().groups
    assert "ray.io" in [group.name for group in groups]
    server.api.groups = frozenset()
    custom = kubernetes.client.CustomObjectsApi(client)
    with pytest.raises(ApiException) as raised:
        custom.list_namespaced_custom_object(*RAY)
    assert raised.value.status == 404
    assert "ray.io" not in [group.name for group in kubernetes.client.ApisApi(client).get_api_versions().groups]


def test_a_namespace_that_is_not_there_lists_nothing_and_takes_nothing(custom: Any, rayjob: Make) -> None:
    assert custom.list_namespaced_custom_object("ray.io", "v1", "nowhere", "rayjobs")["items"] == []
    found = _refused(custom.create_namespaced_custom_object, "ray.io", "v1", "nowhere", "rayjobs", rayjob("a"))
    assert found["message"] == 'namespaces "nowhere" not found'


def test_foreground_and_orphan_are_told_apart(custom: Any, server: KubeApi, rayjob: Make) -> None:
    for name in ("a", "b"):
        made = custom.create_namespaced_custom_object(*RAY, rayjob(name))
        owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": name, "uid": made["metadata"]["uid"]}
        body = {"metadata": {"name": f"{name}-1", "ownerReferences": [owner]}, "spec": made["spec"]["rayClusterSpec"]}
        server.store.create(RAYCLUSTERS, "default", body)
    custom.delete_namespaced_custom_object(*RAY, "a", propagation_policy="Foreground")
    custom.delete_namespaced_custom_object(*RAY, "b", propagation_policy="Orphan")
    assert server.store.all(RAYJOBS) == []
    assert [one["metadata"]["name"] for one in server.store.all(RAYCLUSTERS)] == ["b-1"]
