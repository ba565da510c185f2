"""Each fault of the API server for tests, seen by the official client, and what it must leave as it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import kubernetes.client
import kubernetes.watch
import pytest
import urllib3
from kubernetes.client.rest import ApiException

from tests.kubeapi.faults import USUAL, BadWatch, Hang, LoseAnswer, LoseRequest, Request
from tests.kubeapi.kinds import RAYJOBS, Object
from tests.kubeapi.server import KubeApi

RAY = ("ray.io", "v1", "default", "rayjobs")
Make = Callable[..., Object]


@pytest.fixture
def custom(client: kubernetes.client.ApiClient) -> kubernetes.client.CustomObjectsApi:
    return kubernetes.client.CustomObjectsApi(client)


def _watch(custom: Any, version: str = "0", **how: Any) -> Iterator[Object]:
    return iter(
        kubernetes.watch.Watch().stream(
            custom.list_namespaced_custom_object, *RAY, resource_version=version, **{"timeout_seconds": 20} | how
        )
    )


def _until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, "it did not come to hold"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(429, "TooManyRequests"), (500, "InternalError"), (503, "ServiceUnavailable"), (410, "Expired")],
)
def test_requests_are_refused_as_often_as_told(
    custom: Any, server: KubeApi, rayjob: Make, code: int, reason: str
) -> None:
    server.faults.refuse(code, times=2, when=lambda request: request.verb == "create", retry_after_s=1)
    custom.list_namespaced_custom_object(*RAY)
    for _ in range(2):
        with pytest.raises(ApiException, match=reason) as raised:
            custom.create_namespaced_custom_object(*RAY, rayjob("a"))
        assert raised.value.status == code
        assert raised.value.headers["Retry-After"] == "1"
    assert server.store.all(RAYJOBS) == []
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    assert [request.verb for request, _ in server.faults.met] == ["create"] * 2


@pytest.mark.parametrize(("fault", "left"), [(LoseRequest(), 0), (LoseAnswer(), 1)])
def test_a_lost_request_is_not_done_and_a_lost_answer_is(
    custom: Any, server: KubeApi, rayjob: Make, fault: Any, left: int
) -> None:
    server.faults.tell(fault, when=lambda request: request.is_write)
    with pytest.raises(urllib3.exceptions.HTTPError):
        custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    assert len(server.store.all(RAYJOBS)) == left


def test_a_request_hangs_until_its_client_gives_up(custom: Any, server: KubeApi) -> None:
    server.faults.tell(Hang(60.0))
    with pytest.raises(urllib3.exceptions.HTTPError, match="timed out"):
        custom.list_namespaced_custom_object(*RAY, _request_timeout=0.3)
    custom.list_namespaced_custom_object(*RAY)


def test_a_watch_closes_after_so_many_events(custom: Any, server: KubeApi, rayjob: Make) -> None:
    for name in ("a", "b", "c"):
        custom.create_namespaced_custom_object(*RAY, rayjob(name))
    server.faults.tell(BadWatch("close", after_events=2))
    response = custom.list_namespaced_custom_object(*RAY, watch=True, _preload_content=False)
    assert len(response.data.splitlines()) == 2


def test_a_watch_is_cut_in_the_middle_of_a_line(custom: Any, server: KubeApi, rayjob: Make) -> None:
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    server.faults.tell(BadWatch("cut", after_events=1))
    response = custom.list_namespaced_custom_object(*RAY, watch=True, _preload_content=False)
    lines: list[bytes] = []
    with pytest.raises(urllib3.exceptions.ProtocolError):
        lines.extend(response.stream())
    assert b"".join(lines).endswith(b'"kin')


def test_a_silent_watch_stays_open_and_nothing_comes(custom: Any, server: KubeApi, rayjob: Make) -> None:
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    server.faults.tell(BadWatch("silence", after_events=1))
    events = _watch(custom, _request_timeout=(5, 0.5))
    assert next(events)["object"]["metadata"]["name"] == "a"
    custom.create_namespaced_custom_object(*RAY, rayjob("b"))
    with pytest.raises(urllib3.exceptions.HTTPError, match="timed out"):
        next(events)


def test_a_watch_is_told_that_its_version_is_gone(custom: Any, server: KubeApi, rayjob: Make) -> None:
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    server.faults.tell(BadWatch("gone", after_events=1))
    events = _watch(custom)
    next(events)
    with pytest.raises(ApiException) as raised:
        next(events)
    assert raised.value.status == 410


def test_a_slow_watch_is_late_and_loses_nothing(custom: Any, server: KubeApi, rayjob: Make) -> None:
    server.faults.tell(BadWatch("late", late_s=0.6))
    events = _watch(custom, str(server.store.version))
    made_at_s: dict[str, float] = {}

    def make() -> None:
        for name in ("a", "b", "c"):
            made_at_s[name] = time.monotonic()
            custom.create_namespaced_custom_object(*RAY, rayjob(name))

    maker = threading.Thread(target=make)
    maker.start()
    for name in ("a", "b", "c"):
        assert next(events)["object"]["metadata"]["name"] == name
        assert time.monotonic() - made_at_s[name] >= 0.6
    maker.join()


def test_a_server_that_is_gone_comes_back_on_its_port_with_its_objects(
    custom: Any, server: KubeApi, rayjob: Make
) -> None:
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    events = _watch(custom, str(server.store.version))
    ended = threading.Event()

    def follow() -> None:
        with pytest.raises((urllib3.exceptions.HTTPError, StopIteration)):
            next(events)
        ended.set()

    follower = threading.Thread(target=follow)
    follower.start()
    port = server.port
    server.faults.gone(0.5)
    with pytest.raises(urllib3.exceptions.HTTPError):
        custom.get_namespaced_custom_object(*RAY, "a")
    assert ended.wait(30), "the watch did not end with its server"
    follower.join()

    def is_back() -> bool:
        try:
            custom.get_namespaced_custom_object(*RAY, "a")
        except urllib3.exceptions.HTTPError:
            return False
        return True

    _until(is_back)
    assert server.port == port


def test_after_a_restart_old_versions_are_gone(custom: Any, server: KubeApi, rayjob: Make) -> None:
    version = custom.list_namespaced_custom_object(*RAY)["metadata"]["resourceVersion"]
    custom.create_namespaced_custom_object(*RAY, rayjob("a"))
    server.faults.restart()
    with pytest.raises(ApiException) as raised:
        next(_watch(custom, version))
    assert raised.value.status == 410
    listed = custom.list_namespaced_custom_object(*RAY)
    assert [one["metadata"]["name"] for one in listed["items"]] == ["a"]


def test_a_seed_draws_the_same_faults_again(server: KubeApi) -> None:
    def drawn(seed: int) -> list[object]:
        server.faults.draw(seed, share=0.5)
        return [server.faults.meet(Request(verb, "ray.io", "rayjobs")) for verb in ("list", "watch", "create") * 20]

    first = drawn(7)
    assert first == drawn(7)
    assert first != drawn(8)
    assert {type(fault) for fault in first if fault} == {type(fault) for fault in USUAL}
    server.faults.mend()
    assert server.faults.meet(Request("list", "ray.io", "rayjobs")) is None
