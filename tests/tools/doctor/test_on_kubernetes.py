"""The doctor in pods: a RayJob that is made, waited for, read and removed, with KubeRay's part played."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubeapi.client import configuration, write_kubeconfig
from tests.kubeapi.faults import LoseAnswer
from tests.kubeapi.kinds import PODS, RAYCLUSTERS, RAYJOBS
from tests.kubeapi.operator import Operator
from tests.kubeapi.server import KubeApi
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


def look(api: KubeApi, operator: Operator, said: str | None, end: str = "SUCCEEDED") -> Examination:
    """Examine two pods. said: what the doctor prints on the head."""

    def sleep(seconds: float) -> None:
        operator.step()
        for pod in api.store.all(PODS):
            labels = pod["metadata"]["labels"]
            if labels.get("ray.io/node-type") == "head" and said is not None:
                api.store.logs["default", pod["metadata"]["name"], "ray-head"] = said.encode()
        for job in api.store.all(RAYJOBS):
            operator.jobs.end(job["metadata"]["name"], end, "its message")  # type: ignore[attr-defined]

    order = Order(Questions(), (), 0.0, 60.0, lambda what, done: None, sleep)
    return examine_pods(Kube(configuration(api), "default"), 2, order, spec=None, template=None, image=None)


def test_pods_are_examined_and_nothing_of_them_is_left(api: KubeApi) -> None:
    expected = Examination(boxes=(BoxReport(where="10.0.0.1:1"),))
    found = look(api, operator := Operator(api.store), f"head\n{LOG_MARK}{expected.model_dump_json()}\n")
    assert found == expected
    operator.settle()
    assert (api.store.all(RAYJOBS), api.store.all(RAYCLUSTERS), api.store.all(PODS)) == ([], [], [])


def test_a_create_without_an_answer_leaves_no_rayjob(api: KubeApi) -> None:
    api.faults.tell(LoseAnswer(), when=lambda request: request.verb == "create")
    with pytest.raises(NotExamined, match="does not answer, asked to create"):
        look(api, Operator(api.store), None)
    assert api.store.all(RAYJOBS) == []


def test_an_end_without_an_examination_shows_the_end_of_the_output(api: KubeApi) -> None:
    with pytest.raises(NotExamined, match=r"(?s)FAILED: its message.*No module named thinwire") as raised:
        look(api, Operator(api.store), "a\nNo module named thinwire", "FAILED")
    assert "image must have thinwire" in str(raised.value)
    with pytest.raises(NotExamined, match="SUCCEEDED"):
        look(api, Operator(api.store), "nothing of a doctor")


def test_pods_that_find_no_place_are_the_reason_when_the_time_is_up(api: KubeApi) -> None:
    operator = Operator(api.store)
    told: list[str] = []

    why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}

    def unschedulable(pod: Any) -> Any:
        return {**pod, "status": {"conditions": [why]}}

    def sleep(seconds: float) -> None:
        operator.step()
        for pod in api.store.all(PODS):
            api.store.update(PODS, "default", pod["metadata"]["name"], unschedulable, "status")

    order = Order(Questions(), (), 0.0, 1.0, lambda what, done: told.append(what), sleep)
    with pytest.raises(NotExamined, match=r"PENDING after 1 s \(pod .*Unschedulable: 0/3 nodes"):
        examine_pods(Kube(configuration(api), "default"), 2, order, spec=None, template=None, image=None)
    operator.settle()
    assert api.store.all(RAYJOBS) == []


def test_the_command_says_what_is_missing(
    api: KubeApi, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--kubernetes", "--peers", "a"])
    assert "give one" in capsys.readouterr().err
    api.rights.deny("create", "rayjobs")
    kubeconfig = str(write_kubeconfig(api, tmp_path / "config"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", kubeconfig)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--kubernetes", "--pods", "3"])
    assert "create" in capsys.readouterr().err


def test_a_server_that_is_busy_now_and_then_is_asked_again(api: KubeApi, capsys: Any) -> None:
    expected = Examination(boxes=(BoxReport(where="10.0.0.1:1"),))
    api.faults.refuse(429, times=2, when=lambda request: request.verb == "get" and request.resource == "rayjobs")
    api.faults.refuse(503, times=1, when=lambda request: request.subresource == "log")
    api.faults.refuse(500, times=1, when=lambda request: request.verb == "delete")
    found = look(api, Operator(api.store), f"{LOG_MARK}{expected.model_dump_json()}\n")
    assert found == expected
    assert "kubectl delete rayjob tw-doctor-" in capsys.readouterr().err
