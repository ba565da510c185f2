"""Lists in pages, and watches of a server that answers and does not do what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubeapi.client import configuration
from tests.kubeapi.faults import Request
from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import EVENTS, PODS, RAYJOBS
from tests.service.control_plane_harness import wait_until
from thinwire.service.launch.kuberay.kube import Expired, Kube, KubeError
from thinwire.service.launch.kuberay.launcher import Watched
from thinwire.service.launch.kuberay.manifest import read_template


@pytest.fixture
def kube(api: KubeApi, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    monkeypatch.setattr("thinwire.service.launch.kuberay.kube.PAGE", 2)
    found = Kube(configuration(api), "default")
    yield found
    found.close()


def names(found: list[dict[str, Any]]) -> list[str]:
    return sorted(one["metadata"]["name"] for one in found)


def test_pods_and_warnings_are_read_to_the_last_page(api: KubeApi, kube: Kube) -> None:
    for number in range(5):
        body = {"metadata": {"name": f"a{number}"}, "spec": {"containers": [{"name": "a", "image": "a:1"}]}}
        api.store.create(PODS, body)
        about = {"kind": "Pod", "name": f"a{number}", "namespace": "default"}
        event = {"metadata": {"name": f"a{number}"}, "involvedObject": about, "type": "Warning", "reason": "A"}
        api.store.create(EVENTS, event)
    assert names(kube.pods("")) == names(kube.warnings()) == [f"a{number}" for number in range(5)]


def test_a_server_that_forgets_the_rest_of_its_pages_gives_all_in_one(api: KubeApi, kube: Kube) -> None:
    for number in range(5):
        body = {**read_template(None).rayjob, "metadata": {"name": f"a{number}"}}
        api.store.create(RAYJOBS, body)
    asked: list[Request] = []

    def second(request: Request) -> bool:
        asked.append(request)
        return len(asked) == 2

    api.faults.refuse(410, when=second)
    found, _ = kube.all("rayjobs", "")
    assert names(found) == [f"a{number}" for number in range(5)]
    assert len(api.faults.met) == 1


class Restored:
    """An API server that was restored from a copy: what it gave a version of before is in its future."""

    def __init__(self, error: Exception) -> None:
        self.lists, self.watches, self._error = 0, 0, error

    def all(self, plural: str, selector: str) -> tuple[list[Any], str]:
        self.lists += 1
        return [], "900" if self.lists == 1 else "5"

    def watch(self, plural: str, selector: str, version: str) -> Iterator[Any]:
        self.watches += 1
        if version != "5":
            raise self._error
        yield "BOOKMARK", {"metadata": {"resourceVersion": "5"}}


def test_a_watch_from_a_version_that_never_comes_begins_with_a_list_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.service.launch.kuberay.launcher.RETRY_S", 0.01)
    server = Restored(KubeError("Too large resource version: 900, current: 5", 504))
    found = Watched(server, "rayjobs", "")  # type: ignore[arg-type]
    found.start()
    try:
        wait_until(lambda: server.lists == 2 and found.why() == "", "it is followed again")
    finally:
        found.close()


def test_a_server_that_expires_all_is_not_asked_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    server = Restored(Expired("watch"))
    monkeypatch.setattr(server, "all", lambda plural, selector: ([], "900"))
    found = Watched(server, "rayjobs", "")  # type: ignore[arg-type]

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        found.close()
        return True

    monkeypatch.setattr(found._stop, "wait", pause)
    found.start()
    wait_until(lambda: not found._thread.is_alive() or server.watches > 3, "it has paused")
    found.close()
    assert (len(pauses), server.watches) == (1, 1)


def test_an_answer_from_before_an_objects_end_does_not_bring_it_back(api: KubeApi, kube: Kube) -> None:
    watched = Watched(kube, "rayjobs", "")
    watched.start()
    try:
        api.store.create(RAYJOBS, {**read_template(None).rayjob, "metadata": {"name": "a"}})
        asked = kube.get("rayjobs", "a")
        assert asked is not None
        wait_until(lambda: watched.get("a"), "it is told")
        api.store.delete(RAYJOBS, "a")
        wait_until(lambda: watched.get("a") is None, "its end is told")
        watched.put(asked)
        assert watched.get("a") is None
        later = {"metadata": {"name": "b", "resourceVersion": str(api.store.version + 100)}}
        unknown = {"metadata": {"name": "c", "resourceVersion": "of another form"}}
        for one in (later, unknown):
            watched.put(one)
        assert names(watched.all()) == ["b", "c"]
    finally:
        watched.close()


class Slow:
    """An API server that is asked for other things while it lists: by then `a` has ended, and `b` has come since."""

    watched: Watched

    def all(self, plural: str, selector: str) -> tuple[list[Any], str]:
        for name, version in (("a", "5"), ("b", "11")):
            self.watched.put({"metadata": {"name": name, "resourceVersion": version}})
        return [], "10"

    def watch(self, plural: str, selector: str, version: str) -> Iterator[Any]:
        return iter(())


def test_what_came_to_be_while_a_list_was_made_stays_and_what_ended_before_it_goes() -> None:
    server = Slow()
    server.watched = Watched(server, "rayjobs", "")  # type: ignore[arg-type]
    server.watched.start()
    server.watched.close()
    assert names(server.watched.all()) == ["b"]
