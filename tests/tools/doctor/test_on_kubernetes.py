"""The doctor in pods: a RayJob that is made, waited for, read and removed, with KubeRay's part played."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kubeapi.client import configuration, write_kubeconfig
from tests.kubeapi.faults import Fault
from tests.kubeapi.sequences import STARTS, pod, say
from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import PODS, RAYCLUSTERS, RAYJOBS
from thinwire.cli.main import main
from thinwire.service.launch.kuberay.kube import Kube
from thinwire.tools.doctor.clusters import NotExamined, Order
from thinwire.tools.doctor.examination import LOG_MARK, BoxReport, Examination
from thinwire.tools.doctor.facts import Questions
from thinwire.tools.doctor.pods import examine_pods


@pytest.fixture
def api() -> Iterator[KubeApi]:
    found = KubeApi()
    yield found
    found.close()


def look(api: KubeApi, said: str | None, end: str = "SUCCEEDED", **how: Any) -> Examination:
    """Examine two pods, in as many looks as their RayJob has states. said: what the doctor prints on the head."""
    states = iter((*STARTS, ("Failed" if end == "FAILED" else "Complete", end)))

    def sleep(seconds: float) -> None:
        [rayjob] = api.store.all(RAYJOBS)
        if (state := next(states, None)) is not None:
            say(api.store, rayjob, *state, message="its message")
        pod(api.store, rayjob, "head", "head", phase="Running")
        if said is not None:
            api.store.logs["head", "ray-head"] = said.encode()

    return examine(api, sleep, **how)


def examine(api: KubeApi, sleep: Callable[[float], None], limit_s: float = 60.0) -> Examination:
    order = Order(Questions(), (), 0.0, limit_s, lambda what, done: None, sleep)
    return examine_pods(Kube(configuration(api), "default"), 2, order, spec=None, template=None, image=None)


def test_pods_are_examined_and_nothing_of_them_is_left(api: KubeApi) -> None:
    expected = Examination(boxes=(BoxReport(where="10.0.0.1:1"),))
    found = look(api, f"head\n{LOG_MARK}{expected.model_dump_json()}\n")
    assert found == expected
    assert (api.store.all(RAYJOBS), api.store.all(RAYCLUSTERS), api.store.all(PODS)) == ([], [], [])


def test_a_create_without_an_answer_leaves_no_rayjob(api: KubeApi) -> None:
    api.faults.add(Fault("lose answer"), when=lambda request: request.verb == "create")
    with pytest.raises(NotExamined, match="does not answer, asked to create"):
        look(api, None)
    assert api.store.all(RAYJOBS) == []


def test_an_end_without_an_examination_shows_the_end_of_the_output(api: KubeApi) -> None:
    with pytest.raises(NotExamined, match=r"(?s)FAILED: its message.*No module named thinwire") as raised:
        look(api, "a\nNo module named thinwire", "FAILED")
    assert "image must have thinwire" in str(raised.value)
    with pytest.raises(NotExamined, match="SUCCEEDED"):
        look(api, "nothing of a doctor")


def test_pods_that_find_no_place_are_the_reason_when_the_time_is_up(api: KubeApi) -> None:
    why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}

    def sleep(seconds: float) -> None:
        [rayjob] = api.store.all(RAYJOBS)
        say(api.store, rayjob, "Initializing")
        pod(api.store, rayjob, "worker", phase="Pending", conditions=[why])

    with pytest.raises(NotExamined, match=r"PENDING after 1 s \(pod .*Unschedulable: 0/3 nodes"):
        examine(api, sleep, limit_s=1.0)
    assert api.store.all(RAYJOBS) == []


def test_the_command_says_what_is_missing(
    api: KubeApi, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--kubernetes", "--peers", "a"])
    assert "give one" in capsys.readouterr().err
    api.denied.add(("create", "rayjobs"))
    kubeconfig = str(write_kubeconfig(api, tmp_path / "config"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", kubeconfig)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--kubernetes", "--pods", "3"])
    assert "create" in capsys.readouterr().err


def test_a_server_that_is_busy_now_and_then_is_asked_again(api: KubeApi, capsys: Any) -> None:
    expected = Examination(boxes=(BoxReport(where="10.0.0.1:1"),))
    api.faults.refuse(429, times=2, when=lambda request: request.verb == "get" and request.resource == "rayjobs")
    api.faults.refuse(503, times=1, when=lambda request: request.resource == "pods/log")
    api.faults.refuse(500, times=1, when=lambda request: request.verb == "delete")
    found = look(api, f"{LOG_MARK}{expected.model_dump_json()}\n")
    assert found == expected
    assert "kubectl delete rayjob tw-doctor-" in capsys.readouterr().err
