"""The Jobs client against answers that Ray 2.60 was seen to give."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from thinwire.contract.places import Room
from thinwire.service.launch.protocol import Code, LauncherError, LaunchState
from thinwire.service.launch.ray_jobs import MESSAGE_CHARS, RayJobs

TAKEN = """Traceback (most recent call last):
  File "job_manager.py", line 553, in submit_job
ValueError: Job with submission_id sub-1 already exists. Please use a different submission_id.
.
"""
NO_AGENT = "No available agent to submit job, please try again later."


def client(handler: Callable[[httpx.Request], httpx.Response]) -> RayJobs:
    return RayJobs("http://127.0.0.1:1", "a-token", httpx.MockTransport(handler))


def job(status: str, message: str | None = None) -> httpx.Response:
    return httpx.Response(200, json={"status": status, "message": message, "submission_id": "sub-1", "new_field": 1})


def refused(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"])
def test_each_status_of_ray_has_its_state(status):
    found = client(lambda _: job(status, "its words")).status("sub-1")
    assert (found.state, found.message) == (LaunchState(status), "its words")


@pytest.mark.parametrize(
    ("nodes", "state"),
    [
        (httpx.Response(200, json={"data": {"result": {"result": [{"node_id": "n1", "state": "DEAD"}]}}}), "ABSENT"),
        (httpx.Response(200, json={"data": {"result": {"result": [{"node_id": "n2", "state": "DEAD"}]}}}), "RUNNING"),
        (httpx.Response(500, text="GCS is away"), "RUNNING"),
        (httpx.Response(200, text="<html>"), "RUNNING"),
    ],
)
def test_a_run_is_lost_whose_node_is_dead_whatever_its_job_is_said_to_be(nodes, state):
    asked = []

    def ray(request):
        asked.append(request.url.path)
        found = {"status": "RUNNING", "message": None, "driver_node_id": "n1"}
        return nodes if request.url.path == "/api/v0/nodes" else httpx.Response(200, json=found)

    jobs = client(ray)
    assert [jobs.status("sub-1").state for _ in range(2)] == [LaunchState(state)] * 2
    assert asked == ["/api/jobs/sub-1", "/api/v0/nodes", "/api/jobs/sub-1"]


NODES = [
    {"node_id": "n1", "state": "ALIVE", "resources_total": {"CPU": 4.0, "GPU": 8.0, "memory": 1e9}},
    {"node_id": "n2", "state": "ALIVE", "resources_total": {"memory": 1e9}},
    {"node_id": "n3", "state": "ALIVE", "resources_total": {"CPU": 4.0}},
    {"node_id": "n4", "state": "DEAD", "resources_total": {"CPU": 64.0}},
]


def unit(name: str, state: str = "CREATED", **resources: float) -> dict[str, object]:
    return {"name": name, "state": state, "bundles": [{"unit_resources": {"CPU": 1.0, **resources}}] * 2}


def listed(found: list[dict[str, object]]) -> httpx.Response:
    return httpx.Response(200, json={"data": {"result": {"result": found}}})


def cluster(usage: dict[str, list[float]] | None) -> Callable[[httpx.Request], httpx.Response]:
    """Of which we hold four CPUs; usage: what its autoscaler counts as taken; None where that is the second version."""
    groups = [unit("us.a/u0/1"), unit("us.a/u1/1"), unit("us.a/u2/1", "PENDING"), unit("they.b/u0/1", GPU=1.0)]
    status = None if usage is None else {"loadMetricsReport": {"usage": usage}}

    def ray(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/v0/nodes":
            return listed(NODES)
        if request.url.path == "/api/v0/placement_groups":
            return listed(groups)
        return httpx.Response(200, json={"data": {"clusterStatus": status}})

    return ray


def test_the_room_is_what_living_nodes_have_a_gpu_without_a_cpu_is_none():
    assert client(cluster(None)).room() == Room(cpus=8, gpus=4)


@pytest.mark.parametrize(
    ("usage", "cpus", "gpus"),
    [
        ({"CPU": [7.0, 8.0], "GPU": [2.5, 8.0]}, 3, 3),  # tasks and actors of others as well
        ({"CPU": [2.0, 8.0]}, 0, 0),  # counted before we took more
        (None, 2, 2),
    ],
)
def test_what_others_hold_is_what_is_taken_and_not_ours(usage, cpus, gpus):
    assert client(cluster(usage)).room("us.") == Room(cpus=8, gpus=4, others_cpus=cpus, others_gpus=gpus)


def test_what_has_just_been_given_back_counts_as_nobody_elses(monkeypatch):
    """Ray counts what is taken now and then: what was ours a moment ago is still in it."""
    jobs, now = client(cluster({"CPU": [4.0, 8.0]})), [100.0]
    monkeypatch.setattr("thinwire.service.launch.ray_jobs.time.monotonic", lambda: now[0])
    assert jobs.room("us.").others_cpus == 0
    for later, held in ((6.0, 0), (12.0, 0), (18.0, 0), (24.0, 4), (40.0, 4)):
        now[0] = 100.0 + later
        assert jobs.room("nobody.").others_cpus == held, later


@pytest.mark.parametrize(
    "answer", [httpx.Response(500, text="GCS is away"), httpx.Response(200, text="{}"), listed([])]
)
def test_a_ray_that_does_not_say_what_it_has_is_asked_again(answer):
    with pytest.raises(LauncherError, match="asked again"):
        client(lambda _: answer).room()


def test_an_unknown_submission_is_absent():
    assert client(lambda _: httpx.Response(404, text="no")).status("sub-1").state is LaunchState.ABSENT


@pytest.mark.parametrize(
    "handler",
    [
        refused,
        lambda _: httpx.Response(500, text="Traceback\nRuntimeError: GCS is away"),
        lambda _: httpx.Response(401, text="Unauthorized: Missing authentication token"),
        lambda _: httpx.Response(200, text="<html>"),
        lambda _: job("PAUSED"),
    ],
)
def test_what_cannot_be_trusted_is_unknown_with_a_reason(handler):
    found = client(handler).status("sub-1")
    assert found.state is LaunchState.UNKNOWN
    assert found.message


def test_a_closed_client_is_unknown_not_an_exception():
    jobs = client(lambda _: job("RUNNING"))
    jobs.close()
    assert jobs.status("sub-1").state is LaunchState.UNKNOWN


def test_a_long_message_keeps_its_two_ends():
    found = client(lambda _: job("FAILED", "start " + "x" * 30000 + " end")).status("sub-1")
    assert len(found.message) < MESSAGE_CHARS + 10
    assert found.message.startswith("start")
    assert found.message.endswith("end")


def test_every_request_carries_the_token_in_its_header():
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(404)

    client(handler).status("sub-1")
    assert seen[0].headers["Authorization"] == "Bearer a-token"
    assert "a-token" not in str(seen[0].url)


def test_submit_sends_our_id_and_nothing_else_of_ours():
    bodies: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(404)
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"job_id": "sub-1", "submission_id": "sub-1"})

    client(handler).submit("sub-1", "true", {"name": "n"})
    assert bodies == [{"submission_id": "sub-1", "entrypoint": "true", "metadata": {"name": "n"}}]


def test_submit_of_a_known_id_asks_and_posts_nothing():
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.method == "GET"
        return job("RUNNING")

    client(handler).submit("sub-1", "true", {})


def test_submit_of_a_script_gives_ray_the_package_and_names_it(tmp_path):
    seen: list[tuple[str, str, bytes]] = []
    code = Code(tmp_path / "p.zip", "ab", None, ("einops",), {"A": "1"})
    code.package.write_bytes(b"zip")

    def ray(request):
        seen.append((request.method, request.url.path, request.read()))
        return httpx.Response(404 if request.method == "GET" else 200, json={})

    client(ray).submit("sub-1", "run", {}, code)
    assert [one[:2] for one in seen[1:3]] == [(m, "/api/packages/gcs/_ray_pkg_ab.zip") for m in ("GET", "PUT")]
    assert seen[2][2] == b"zip"
    wanted = {"working_dir": "gcs://_ray_pkg_ab.zip", "pip": ["einops"], "env_vars": {"A": "1"}}
    assert json.loads(seen[3][2])["runtime_env"] == wanted


def test_a_package_that_ray_has_is_not_sent_and_one_that_it_refuses_is_told(tmp_path):
    code = Code(tmp_path / "p.zip", "ab", None, (), {})
    code.package.write_bytes(b"zip")
    sent: list[str] = []

    def ray(has: int, takes: int):
        def answer(request):
            if "packages" not in request.url.path:
                return httpx.Response(404 if request.method == "GET" else 200, json={})
            sent.append(request.method)
            return httpx.Response(has if request.method == "GET" else takes, text="Traceback\nValueError: too large")

        return client(answer)

    ray(200, 500).submit("sub-1", "run", {}, code)
    assert sent == ["GET"]
    with pytest.raises(LauncherError, match=r"did not take the package _ray_pkg_ab.zip of 3 bytes \(500: .*too large"):
        ray(404, 500).submit("sub-1", "run", {}, code)


def test_a_folder_on_all_machines_is_named_as_one(tmp_path):
    bodies: list[bytes] = []

    def ray(request):
        bodies.append(request.read())
        return httpx.Response(404 if request.method == "GET" else 200, json={})

    client(ray).submit("sub-1", "run", {}, Code(None, None, "/srv/code", (), {}))
    assert json.loads(bodies[-1])["runtime_env"] == {"working_dir": "local:///srv/code"}


@pytest.mark.parametrize("lost", [False, True])
def test_a_refused_or_lost_submit_that_ray_recorded_is_a_success(lost):
    posted: list[bool] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return job("PENDING") if posted else httpx.Response(404)
        posted.append(True)
        if lost:
            raise httpx.ReadTimeout("timed out")
        return httpx.Response(500, text=TAKEN)

    client(handler).submit("sub-1", "true", {})
    assert posted


def test_a_submit_that_ray_did_not_take_raises_with_its_words():
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404) if request.method == "GET" else httpx.Response(500, text=NO_AGENT)

    with pytest.raises(LauncherError, match="No available agent"):
        client(handler).submit("sub-1", "true", {})


def test_a_submit_waits_for_the_agent_of_a_young_head():
    answers = [httpx.Response(500, text=NO_AGENT), httpx.Response(500, text=NO_AGENT), httpx.Response(200, json={})]

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404) if request.method == "GET" else answers.pop(0)

    client(handler).submit("sub-1", "true", {})
    assert answers == []


@pytest.mark.parametrize("answer", [httpx.Response(200, json={"stopped": False}), httpx.Response(404, text="no")])
def test_stopping_what_is_over_or_absent_is_a_success(answer):
    asked = []
    client(lambda request: asked.append(request.url.path) or answer).stop("sub-1")
    assert asked == ["/api/jobs/sub-1/stop"]


def test_stop_raises_when_ray_is_away():
    with pytest.raises(LauncherError, match="stop job sub-1"):
        client(refused).stop("sub-1")
