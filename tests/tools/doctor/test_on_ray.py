"""The nodes of a Ray cluster, through a Ray job; and what is said where that cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from thinwire.cli.doctor import app
from thinwire.service.launch.local import LocalLauncher
from thinwire.tools.doctor.clusters import NotExamined, Order, examine_cluster
from thinwire.tools.doctor.examination import LOG_MARK, BoxReport, Examination
from thinwire.tools.doctor.facts import Questions

URL = "http://head:8265"


@pytest.mark.ray
@pytest.mark.slow
def test_the_nodes_of_a_cluster_are_examined_by_a_job(local_launcher: LocalLauncher, tmp_path: Path) -> None:
    assert local_launcher._serving is not None
    url, token = local_launcher._serving[0].url, local_launcher._head.token_path
    words = ["--address", url, "--token-file", str(token), "--python", sys.executable, "--store", str(tmp_path)]
    said = CliRunner().invoke(app, [*words, "--store", "memory://nowhere", "--json"])
    document = json.loads(said.stdout)
    (box,) = document["boxes"]
    assert box["facts"]["versions"]["ray"]
    assert box["facts"]["stores"] == {"memory://nowhere": None}
    assert str(tmp_path) in [folder["path"] for folder in box["facts"]["folders"]]
    assert said.exit_code == document["exit_code"]


@pytest.mark.slow
def test_the_actors_of_two_nodes_visit_each_other() -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from thinwire.tools.doctor.examination import examine
    from thinwire.tools.doctor.on_ray import Node

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address)
        boxes = [Node(node, b"a secret of sixteen and more") for node in ray.nodes()]
        seen = examine(boxes, Questions(), seconds=0.2)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [box.connect for box in seen.boxes] == ["ok", "ok"]
    assert [call.visit.connect for call in seen.calls] == ["ok", "ok"]
    assert seen.calls[0].visit.there_mbit


class Head:
    """Ray's Jobs API, as far as the doctor uses it."""

    def __init__(self, log: str, *states: str) -> None:
        self.log, self.states = log, list(states)
        self.entrypoint, self.stopped = "", False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/api/version":
            return httpx.Response(200, json={})
        if path.endswith("/logs"):
            return httpx.Response(200, json={"logs": self.log})
        if path.endswith("/stop"):
            self.stopped = True
            return httpx.Response(200, json={"stopped": True})
        if request.method == "POST":
            self.entrypoint = json.loads(request.content)["entrypoint"]
            return httpx.Response(200, json={})
        if not self.entrypoint:
            return httpx.Response(404)
        return httpx.Response(200, json={"status": self.states.pop(0) if len(self.states) > 1 else self.states[0]})

    def examine(self, limit_s: float = 60.0) -> Examination:
        order = Order(Questions(), (7000,), 0.5, limit_s, lambda what, done: None, lambda s: None)
        return examine_cluster(URL, "secret", order, transport=httpx.MockTransport(self))


def test_the_last_marked_line_of_the_log_is_the_examination() -> None:
    seen = Examination(boxes=(BoxReport(where="10.0.0.1:1"),))
    head = Head(f"noise\n{LOG_MARK}{seen.model_dump_json()}\nmore noise\n", "PENDING", "RUNNING", "SUCCEEDED")
    assert head.examine() == seen
    assert head.entrypoint.startswith('"${THINWIRE_PYTHON:-python}" -m thinwire.tools.doctor.on_ray ')
    assert "--ports 7000" in head.entrypoint
    assert "secret" not in head.entrypoint


def test_a_job_that_fails_or_does_not_end_is_told_and_stopped() -> None:
    with pytest.raises(NotExamined, match="No module named 'thinwire'"):
        Head("Traceback\nModuleNotFoundError: No module named 'thinwire'", "FAILED").examine()
    stuck = Head("", "PENDING")
    with pytest.raises(NotExamined, match="is PENDING after 0 s"):
        stuck.examine(limit_s=0.0)
    assert stuck.stopped


def test_a_cluster_that_cannot_be_reached_is_exit_code_2() -> None:
    said = CliRunner().invoke(app, ["--address", "http://127.0.0.1:9"])
    assert said.exit_code == 2
    assert "does not answer" in said.stderr
