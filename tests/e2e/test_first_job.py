"""A real job through everything: REST, SQLite, Ray, gloo, telemetry, Prometheus; and what kills do to it."""

import os
import re
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import missing
from tests.deploy.queries import OF_SCRIPTS_ALONE, WIRE_INTERFACE, of_dashboards, of_rules
from tests.deploy.real_prometheus import Prometheus
from tests.e2e.conftest import Server, wait_for
from thinwire.contract.metric_names import most_series

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

LONG = {"steps": 280, "recipe": {"layers": 2, "width": 192, "heads": 4, "context": 128}}
"""Steps enough that a kill or a scrape falls into the middle."""
FOLLOWED = {**LONG, "steps": 450}
"""And after the kill of a worker, and when another is seen in its place, that of the server too: on a quick machine 280
steps were over before."""


def assert_whole(server: Server, job: dict, steps: int) -> None:
    """A run that succeeded: every step once, replicas equal, one bit on the wire, results in its folder."""
    assert job["state"] == "SUCCEEDED", job["reason"]
    summary = job["summary"]
    assert summary["state"] == "SUCCEEDED"
    assert summary["steps"] == steps
    assert summary["world_size"] == 2
    assert summary["replicas_bit_equal"] is True
    sent = summary["payload_bytes"]
    assert sent["compressed_phase_fp32"] / sent["compressed_phase"] == pytest.approx(32, rel=0.02)
    assert summary["loss"]["validation_last"] < summary["loss"]["validation_first"] - 2
    samples = server.history(job["id"])["samples"]
    assert [s["step"] for s in samples] == list(range(steps + 1))
    assert samples[-1]["payload_bytes_total"] == sent["sent"]
    for name in ("summary.json", "loss.png", "history.jsonl"):
        assert (Path(job["run_dir"]) / name).stat().st_size > 0
    assert any((Path(job["run_dir"]) / "tensorboard").glob("events.out.tfevents.*"))


@pytest.fixture(scope="module")
def prometheus(server, tmp_path_factory):
    """One that finds the workers through the service; None where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    found = Prometheus(program, tmp_path_factory.mktemp("prometheus"), server)
    try:
        found.begin()
        yield found
    finally:
        found.close()


def pids(server, job_id, number):
    """Of the processes that have been this worker."""
    return [int(pid) for pid in re.findall(rf"worker_started number={number} pid=(\d+)", server.logs(job_id))]


def regroups(server, job_id):
    """What was told of each."""
    return [e["fields"] for e in server.history(job_id)["events"] if e["kind"] == "regrouped"]


@dataclass
class Followed:
    """A long job that has ended: one of its two workers was killed, and when another was in its place the service."""

    job: dict[str, Any]
    killed_at_step: int
    """The service; the worker at step 45 or soon after."""
    scraped: dict[str, list[dict]]
    """What Prometheus said before that, by query."""
    series: int
    """How many the job had in Prometheus before that."""
    on_the_train_page: list[set[int]]
    """Pids of the workers that live, each time that they were others."""


RATIO = "thinwire_compression_ratio"
QUERIES = (
    "thinwire_phase{phase='compressed'} == 1",
    "thinwire_wire_bytes_total > 0",
    "up{job='thinwire-service'} == 1",
    "up{job='ray'} == 1",
    "ray_node_cpu_count",
)


def rays_token(server):
    return (server.home / "ray" / "auth_token").read_text().strip()


def on_the_train_page(server, job_id) -> set[int]:
    """Pids of the workers of a job that live, as Ray's dashboard shows them; none where it does not know the job."""
    headers = {"Authorization": f"Bearer {rays_token(server)}"}
    answer = server.client.get(f"http://{server.ray()}/api/train/v2/runs/v1", headers=headers)
    runs = answer.json()["train_runs"] if answer.status_code == 200 else []
    return {
        worker["pid"]
        for run in runs
        if run["job_details"] and run["job_details"]["submission_id"] == job_id
        for attempt in run["attempts"]
        for worker in attempt["workers"]
        if worker["status"] == "ALIVE"
    }


@pytest.fixture(scope="module")
def followed(server, prometheus) -> Followed:
    """One job for all of these laws, as a job takes half a minute to start."""
    server.call("POST", "/v1/tokens", json={"name": "a-week", "role": "viewer", "days": 7})  # of one is told how long
    job_id = server.submit(**FOLLOWED)

    def both_compressed():
        assert server.job(job_id)["state"] not in ("FAILED", "SUCCEEDED"), server.job(job_id)["reason"]
        series = prometheus.ask(f'{RATIO}{{job_id="{job_id}"}}')
        return series if len(series) == 2 and all(float(s["value"][1]) > 25 for s in series) else None

    scraped, series = {}, 0
    if prometheus is not None:
        scraped = {RATIO: wait_for("Prometheus knows both workers' compression ratio", both_compressed)}
        scraped |= {query: wait_for(query, lambda query=query: prometheus.ask(query), 60) for query in QUERIES}
    server.wait_for_step(job_id, 45)
    if prometheus is not None:
        prometheus.ask_all(job_id)
        counted = prometheus.ask(f'count({{__name__=~"thinwire_.+", job_id="{job_id}", rank!=""}})')
        series = int(counted[0]["value"][1])
    shown, restarted_at = [on_the_train_page(server, job_id)], None
    os.kill(pids(server, job_id, 1)[0], signal.SIGKILL)
    while server.job(job_id)["state"] == "RUNNING":
        if prometheus is not None:
            prometheus.ask_all(job_id)
        if (now := on_the_train_page(server, job_id)) != shown[-1]:
            shown.append(now)
        another = len(shown) > 1 and len(shown[-1]) == 2
        if restarted_at is None and another and regroups(server, job_id):
            restarted_at = server.job(job_id)["progress"]["step"]
            server.kill()
            server.start()
            if prometheus is not None:
                prometheus.look_at(server)
        time.sleep(0.5)
    return Followed(server.wait_for_end(job_id), restarted_at or FOLLOWED["steps"], scraped, series, shown)


@pytest.mark.parametrize("query", [RATIO, *QUERIES])
def test_a_real_prometheus_scrapes_the_service_and_the_workers_of_a_job(followed, query):
    if not followed.scraped:
        missing("prometheus is not installed: apt install prometheus")
    assert followed.scraped[query]


def test_a_real_prometheus_is_told_the_compression_of_each_rank(followed):
    if not followed.scraped:
        missing("prometheus is not installed: apt install prometheus")
    series = followed.scraped[RATIO]
    assert sorted(s["metric"]["rank"] for s in series) == ["0", "1"]
    # 31.7, or 29.8 in each 16th step, which tells the others the largest errors too (workers.shadow).
    assert all(29.0 < float(s["value"][1]) < 32.2 for s in series), series


def test_a_job_has_no_more_series_than_are_told(prometheus, followed):
    """Asked while a job of two ran; and when it is over there are none."""
    if prometheus is None:
        missing("prometheus is not installed: apt install prometheus")
    assert 20 < followed.series <= most_series(2)

    def gone():
        return not prometheus.ask(f'{{__name__=~"thinwire_.+", job_id="{followed.job["id"]}", rank!=""}}')

    wait_for("the series of workers that have ended go away", gone, 60)


@pytest.mark.parametrize("where", [*of_dashboards(), *of_rules()])
def test_every_query_of_every_dashboard_and_rule_has_an_answer_of_a_real_job(prometheus, followed, where):
    if prometheus is None:
        missing("prometheus is not installed: apt install prometheus")
    if not WIRE_INTERFACE and "wire_" in {**of_dashboards(), **of_rules()}[where] and where in prometheus.unanswered:
        pytest.skip("this machine has no interface but loopback")
    assert (where in prometheus.unanswered) == (where in OF_SCRIPTS_ALONE)


def test_a_killed_control_plane_follows_the_job_to_its_end_when_it_is_back(server, followed):
    assert followed.killed_at_step < FOLLOWED["steps"]
    assert_whole(server, followed.job, FOLLOWED["steps"])
    assert followed.job["attempt"] == 1
    assert not [e for e in server.history(followed.job["id"])["events"] if e["kind"] == "resumed"]


def rays_answer(server, job, **headers):
    """What the Ray dashboard says of the job."""
    dashboard = job["dashboard_url"].split("/#/")[0]
    return httpx.get(f"{dashboard}/api/jobs/{job['id']}", headers=headers)


def test_the_ray_job_has_the_same_id(server, followed):
    assert followed.job["dashboard_url"].endswith(f"/#/jobs/{followed.job['id']}")
    answer = rays_answer(server, followed.job, Authorization=f"Bearer {rays_token(server)}")
    assert answer.json()["submission_id"] == followed.job["id"]


def test_the_ray_dashboard_refuses_who_has_no_token(server, followed):
    assert rays_answer(server, followed.job).status_code == 401


def test_no_token_is_shown_by_ray_or_by_a_log(server, followed):
    answer = rays_answer(server, followed.job, Authorization=f"Bearer {rays_token(server)}")
    told = answer.text + server.logs(followed.job["id"]) + (server.home / "server.log").read_text()
    for secret in ((Path(followed.job["run_dir"]) / "token").read_text().strip(), rays_token(server), server.token):
        assert secret not in told


def test_the_train_page_of_rays_dashboard_shows_the_workers_of_now(server, followed):
    (survivor,) = pids(server, followed.job["id"], 0)
    dead, newcomer = pids(server, followed.job["id"], 1)[:2]
    assert followed.on_the_train_page[0] == {survivor, dead}
    assert {survivor, newcomer} in followed.on_the_train_page


def test_a_killed_worker_costs_no_step(server, followed):
    assert_whole(server, followed.job, FOLLOWED["steps"])
    events = server.history(followed.job["id"])["events"]
    assert not [e for e in events if e["kind"] == "resumed"]
    first = next(e for e in events if e["kind"] == "regrouped")
    assert first["fields"]["world_size"] == 2
    assert first["fields"]["redone"] == 0
    assert first["step"] >= 45


def test_when_a_worker_is_killed_the_other_keeps_its_process(server, followed):
    assert followed.job["attempt"] == 1
    assert len(pids(server, followed.job["id"], 0)) == 1
    assert len(pids(server, followed.job["id"], 1)) > 1


@dataclass
class Resized:
    """What was seen of a job that was resized, bereft, notified and cancelled, one after another."""

    first: list[int]
    by_resizes: list[dict] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    waits: dict | None = None
    handover: dict | None = None
    state: str = ""


@pytest.fixture(scope="module")
def resized(server) -> Resized:
    """One after another, on one job: what is waited for and does not come is named by `wait_for`."""
    job_id = server.submit(**{**LONG, "steps": 20000})
    server.wait_for_step(job_id, 20)
    seen = Resized([pids(server, job_id, number)[0] for number in (0, 1)])
    for least, most in ((2, 3), (2, 2)):
        server.call("PATCH", f"/v1/jobs/{job_id}", json={"workers": {"min": least, "max": most}})
        wait_for(f"{most} workers", lambda most=most: server.job(job_id)["world_size"] == most)
    seen.by_resizes = regroups(server, job_id)
    seen.kept = [pids(server, job_id, number) for number in (0, 1)]
    assert all(os.path.exists(f"/proc/{pid}") for pid in seen.first)
    os.kill(seen.first[1], signal.SIGKILL)  # one that left is not the end of the job: who dies later is replaced
    seen.waits = wait_for("it to wait", lambda: server.job(job_id)["waiting_for_workers"])
    server.call("PATCH", f"/v1/jobs/{job_id}", json={"workers": {"min": 1}})
    wait_for("the end of that", lambda: server.job(job_id)["waiting_for_workers"] is None)
    wait_for("a replacement", lambda: len(pids(server, job_id, 1)) == 2)
    wait_for("2 workers", lambda: server.job(job_id)["world_size"] == 2)
    os.kill(pids(server, job_id, 1)[1], signal.SIGTERM)  # a notice: it hands over first
    seen.handover = wait_for("the handover", lambda: [e for e in regroups(server, job_id) if "SIGTERM" in e["reason"]])[
        0
    ]
    wait_for("a worker in its place", lambda: len(pids(server, job_id, 1)) == 3)
    server.call("POST", f"/v1/jobs/{job_id}/cancel")
    seen.state = server.wait_for_end(job_id)["state"]
    workers = [pid for number in (0, 1, 2) for pid in pids(server, job_id, number)]
    wait_for("all workers are gone", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers))
    return seen


@pytest.mark.slow
def test_a_running_job_grows_and_shrinks_on_request_without_a_loss(resized):
    assert [fields["world_size"] for fields in resized.by_resizes] == [3, 2]
    assert all(fields["error_lost_norm"] == 0 and not fields["lost"] for fields in resized.by_resizes)
    assert all(fields["redone"] == 0 for fields in resized.by_resizes)


@pytest.mark.slow
def test_who_stays_through_a_resize_keeps_its_process(resized):
    assert resized.kept == [[pid] for pid in resized.first]


@pytest.mark.slow
def test_a_job_below_its_minimum_waits_until_less_is_asked(resized):
    assert resized.waits == {"have": 1, "min": 2}


@pytest.mark.slow
def test_a_worker_that_gets_notice_hands_over_before_it_goes(resized):
    told = resized.handover
    assert (told["world_size"], told["lost"], told["error_lost_norm"]) == (1, [], 0)


@pytest.mark.slow
def test_a_cancelled_job_ends_with_all_its_workers(resized):
    assert resized.state == "CANCELLED"


@pytest.mark.slow
def test_with_restarts_a_killed_worker_costs_the_steps_since_the_checkpoint_and_the_loss_is_the_same(server):
    workers = {**LONG.get("workers", {}), "min": 2, "max": 2, "elastic": "restart"}
    job_id = server.submit(**{**LONG, "workers": workers})
    server.wait_for_step(job_id, 45)
    os.kill(pids(server, job_id, 1)[0], signal.SIGKILL)
    job = server.wait_for_end(job_id)
    assert_whole(server, job, LONG["steps"])
    assert job["attempt"] == 1
    resumed = [e for e in server.history(job_id)["events"] if e["kind"] == "resumed"]
    assert len(resumed) == 1
    assert resumed[0]["step"] >= 40
    assert resumed[0]["step"] % 20 == 0
    other = server.wait_for_end(server.submit(**LONG))
    ours, theirs = (one["summary"]["loss"]["validation_last"] for one in (job, other))
    assert ours == pytest.approx(theirs, abs=0.05)


@pytest.mark.slow
def test_a_loss_that_explodes_ends_the_job_with_the_reason_and_keeps_the_checkpoint(server):
    rate = {"name": "onebit_adam", "lr": 1e30, "warmup": 24}
    job_id = server.submit(optimizer=rate, checkpoint={"every_steps": 1}, lr_schedule={"warmup": 60})
    job = server.wait_for_end(job_id)
    assert job["state"] == "FAILED"
    assert "NaN or infinity" in job["reason"] or "loss is" in job["reason"]
    assert "Traceback" not in job["reason"]
    assert job["attempt"] == 1


@pytest.mark.slow
def test_data_that_is_missing_ends_a_job_that_begins_but_not_one_that_trains(server, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(Path("tests/data/tinyshakespeare.txt").read_bytes())
    data = {"source": "text-file", "path": str(text)}
    job_id = server.submit(**{**LONG, "data": data, "workers": {"min": 1, "max": 2}})
    server.wait_for_step(job_id, 10)
    text.unlink()  # those that train have it in memory
    os.kill(pids(server, job_id, 1)[0], signal.SIGKILL)
    wait_for("the next worker of the slot fails", lambda: "worker_failed slot=1" in server.logs(job_id))
    assert "kind=DataError message=cannot read" in server.logs(job_id)
    job = server.wait_for_end(job_id)
    assert job["state"] == "SUCCEEDED", job["reason"]
    assert (job["summary"]["steps"], job["summary"]["world_size"]) == (LONG["steps"], 1)

    text.write_bytes(Path("tests/data/tinyshakespeare.txt").read_bytes())
    job_id = server.submit(data=data)
    text.unlink()  # the service has seen it; workers take seconds to start
    job = server.wait_for_end(job_id)
    assert job["state"] == "FAILED"
    assert job["reason"].startswith(f"DataError: cannot read {text}")
    assert job["attempt"] == 1


@pytest.mark.slow
def test_a_killed_driver_is_followed_by_one_that_adopts_the_workers(server):
    workers = {"min": 2, "max": 2}
    job_id = server.submit(**{**LONG, "steps": 1500, "workers": workers})
    server.wait_for_step(job_id, 20)
    before = [pids(server, job_id, number)[0] for number in (0, 1)]
    drivers = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and f"runs/{job_id}" in (entry / "cmdline").read_bytes().decode()
    ]
    for pid in drivers:
        os.kill(pid, signal.SIGKILL)
    wait_for("a further attempt", lambda: server.job(job_id)["attempt"] == 2, 60)
    step = server.job(job_id)["progress"]["step"]
    server.wait_for_step(job_id, step + 100)
    assert all(os.path.exists(f"/proc/{pid}") for pid in before)
    events = server.history(job_id)["events"]
    assert not [e for e in events if e["kind"] in ("resumed", "regrouped")]
    server.call("POST", f"/v1/jobs/{job_id}/cancel")
    server.wait_for_end(job_id)
    wait_for("the workers are gone", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in before), 60)
