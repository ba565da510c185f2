"""The API server for tests answers the official client as a real one does, and fails as it is told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import kubernetes.client
import kubernetes.watch
import pytest
import urllib3
from kubernetes.client.rest import ApiException

from tests.kubeapi.client import configuration
from tests.kubeapi.faults import Fault
from tests.kubeapi.sequences import FINALIZER, say
from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import EVENTS, RAYCLUSTERS, RAYJOBS, Object
from thinwire.service.launch.kuberay.manifest import read_template

RAY = ("ray.io", "v1", "default", "rayjobs")
JSON_PATCH = "application/json-patch+json"


@pytest.fixture
def server() -> Iterator[KubeApi]:
    found = KubeApi(bookmark_every_s=0.2)
    yield found
    found.close()


@pytest.fixture
def client(server: KubeApi) -> Iterator[kubernetes.client.ApiClient]:
    with kubernetes.client.ApiClient(configuration(server)) as found:
        yield found


@pytest.fixture
def custom(client: kubernetes.client.ApiClient) -> kubernetes.client.CustomObjectsApi:
    return kubernetes.client.CustomObjectsApi(client)


def rayjob(name: str, labels: dict[str, str] | None = None) -> Object:
    return {**read_template(None).rayjob, "metadata": {"name": name, "labels": labels or {}}}


def refused(call: Callable[..., Any], *arguments: Any, **how: Any) -> Object:
    """The Status that the call is answered with."""
    with pytest.raises(ApiException) as raised:
        call(*arguments, **how)
    found: Object = json.loads(raised.value.body)
    assert (found["kind"], found["code"]) == ("Status", raised.value.status)
    return found


def watch(custom: Any, version: str, **how: Any) -> Iterator[Object]:
    return iter(
        kubernetes.watch.Watch().stream(
            custom.list_namespaced_custom_object, *RAY, resource_version=version, **{"timeout_seconds": 5} | how
        )
    )


def names(custom: Any, **how: Any) -> list[str]:
    return [one["metadata"]["name"] for one in custom.list_namespaced_custom_object(*RAY, **how)["items"]]


def test_an_object_is_created_once_and_as_its_schema_has_it(custom: Any) -> None:
    made = custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    assert made["metadata"]["uid"]
    again = refused(custom.create_namespaced_custom_object, *RAY, rayjob("a"))
    assert (again["code"], again["reason"]) == (409, "AlreadyExists")
    wrong = rayjob("b")
    wrong["spec"]["backOffLimit"] = 3
    assert "backOffLimit" in refused(custom.create_namespaced_custom_object, *RAY, wrong)["message"]
    assert custom.get_namespaced_custom_object(*RAY, "a") == made


def test_a_namespace_that_is_not_there_is_an_empty_one_in_which_nothing_can_be_made(custom: Any) -> None:
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    absent = ("ray.io", "v1", "absent", "rayjobs")
    assert custom.list_namespaced_custom_object(*absent)["items"] == []
    assert refused(custom.get_namespaced_custom_object, *absent, "a")["message"] == 'rayjobs.ray.io "a" not found'
    made = refused(custom.create_namespaced_custom_object, *absent, rayjob("a"))
    assert (made["code"], made["message"]) == (404, 'namespaces "absent" not found')


def test_a_json_patch_applies_whole_or_not_at_all(custom: Any) -> None:
    made = custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    path = "/spec/rayClusterSpec/workerGroupSpecs/0"
    good = [
        {"op": "test", "path": f"{path}/groupName", "value": "workers"},
        {"op": "replace", "path": f"{path}/maxReplicas", "value": 8},
    ]
    changed = custom.patch_namespaced_custom_object(*RAY, "a", good, _content_type=JSON_PATCH)
    assert changed["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"] == 8
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    old = [{"op": "replace", "path": "/metadata/resourceVersion", "value": "1"}]
    for patch, code in (([good[1] | {"value": 9}, good[0] | {"value": "others"}], 422), (old, 409)):
        found = refused(custom.patch_namespaced_custom_object, *RAY, "a", patch, _content_type=JSON_PATCH)
        assert found["code"] == code
    assert custom.get_namespaced_custom_object(*RAY, "a") == changed


def test_a_list_is_selected_and_paged_as_of_one_version(client: Any, custom: Any, server: KubeApi) -> None:
    for number in range(5):
        custom.create_namespaced_custom_object(*RAY, rayjob(f"j{number}", {"n": str(number), "all": "yes"}))
    assert names(custom, label_selector="n=1") == ["j1"]
    assert names(custom, label_selector="n in (1,4),all=yes") == ["j1", "j4"]
    for name, kind in (("a", "Normal"), ("b", "Warning")):
        server.store.create(EVENTS, {"metadata": {"name": name}, "type": kind})
    events = kubernetes.client.CoreV1Api(client).list_namespaced_event(
        "default", field_selector="type=Warning", _preload_content=False
    )
    assert [one["metadata"]["name"] for one in json.loads(events.data)["items"]] == ["b"]

    first = custom.list_namespaced_custom_object(*RAY, limit=2)
    custom.delete_namespaced_custom_object(*RAY, "j4")
    second = custom.list_namespaced_custom_object(*RAY, limit=3, _continue=first["metadata"]["continue"])
    assert [one["metadata"]["name"] for one in first["items"] + second["items"]] == [f"j{n}" for n in range(5)]
    assert "continue" not in second["metadata"]
    server.store.compact()
    gone = refused(custom.list_namespaced_custom_object, *RAY, limit=2, _continue=first["metadata"]["continue"])
    assert (gone["code"], gone["reason"]) == (410, "Expired")


def test_a_watch_has_every_change_and_bookmarks(custom: Any, server: KubeApi) -> None:
    version = custom.list_namespaced_custom_object(*RAY)["metadata"]["resourceVersion"]
    custom.create_namespaced_custom_object(*RAY, rayjob("a", {"own": "yes"}))
    custom.create_namespaced_custom_object(*RAY, rayjob("other"))
    for label in ("yes", "no", "yes"):
        server.store.update(RAYJOBS, "a", lambda one, label=label: _labelled(one, own=label, n=label))  # type: ignore[misc]
    server.store.update(RAYJOBS, "a", lambda one: _labelled(one, own="yes", n="2"))
    custom.delete_namespaced_custom_object(*RAY, "a")
    events = list(watch(custom, version, label_selector="own=yes", allow_watch_bookmarks=True, timeout_seconds=1))
    kinds = [event["type"] for event in events if event["type"] != "BOOKMARK"]
    assert kinds == ["ADDED", "MODIFIED", "DELETED", "ADDED", "MODIFIED", "DELETED"]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(versions)
    assert (events[-1]["type"], versions[-1]) == ("BOOKMARK", server.store.version)


def _labelled(found: Object, **labels: str) -> Object:
    return {**found, "metadata": {**found["metadata"], "labels": labels}}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_watch_of_a_version_that_is_forgotten_ends_with_410(custom: Any, server: KubeApi, restarts: bool) -> None:
    old, port = custom.list_namespaced_custom_object(*RAY)["metadata"]["resourceVersion"], server.port
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    if restarts:
        server.restart()
    else:
        server.store.compact()
    with pytest.raises(ApiException, match="too old resource version") as raised:
        next(watch(custom, old))
    assert (raised.value.status, names(custom), server.port) == (410, ["a"], port)


def test_a_deletion_waits_for_finalizers_and_takes_what_is_owned(custom: Any, server: KubeApi) -> None:
    made = custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    say(server.store, made, "Initializing")
    finalizers = [{"op": "add", "path": "/metadata/finalizers", "value": [FINALIZER]}]
    custom.patch_namespaced_custom_object(*RAY, "a", finalizers, _content_type=JSON_PATCH)
    wrong = refused(custom.delete_namespaced_custom_object, *RAY, "a", body={"preconditions": {"uid": "of-another"}})
    assert (wrong["code"], wrong["reason"]) == (409, "Conflict")
    assert custom.delete_namespaced_custom_object(*RAY, "a")["metadata"]["deletionTimestamp"]
    assert len(server.store.all(RAYCLUSTERS)) == 1
    none = [{"op": "remove", "path": "/metadata/finalizers"}]
    custom.patch_namespaced_custom_object(*RAY, "a", none, _content_type=JSON_PATCH)
    assert refused(custom.get_namespaced_custom_object, *RAY, "a")["message"] == 'rayjobs.ray.io "a" not found'
    assert server.store.all(RAYCLUSTERS) == []


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("close", StopIteration),
        ("cut", urllib3.exceptions.ProtocolError),
        ("silence", urllib3.exceptions.ReadTimeoutError),
        ("gone", ApiException),
    ],
)
def test_a_watch_goes_bad_after_so_many_events(custom: Any, server: KubeApi, how: Any, error: Any) -> None:
    version = str(server.store.version)
    for name in ("a", "b"):
        custom.create_namespaced_custom_object(*RAY, rayjob(name))
    server.faults.add(Fault(how, after_events=1))
    events = watch(custom, version, _request_timeout=(5, 0.5))
    assert next(events)["object"]["metadata"]["name"] == "a"
    with pytest.raises(error):
        next(events)
