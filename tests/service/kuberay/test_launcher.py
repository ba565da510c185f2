"""Jobs of a service as RayJobs, from their creation to their end, through an API server that speaks as a real one."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import kubernetes.client
import kubernetes.config
import pytest

from tests.covering import parametrize
from tests.kubeapi.client import write_kubeconfig
from tests.kubeapi.faults import Fault, Request
from tests.kubeapi.server import KubeApi
from tests.kubeapi.store import RAYCLUSTERS, RAYJOBS, Object
from tests.service.control_plane_harness import STORE, wait_until
from tests.service.kuberay.harness import Counted, OnKubernetes
from thinwire.service.config import Settings
from thinwire.service.launch.kuberay.kube import connect
from thinwire.service.launch.protocol import LauncherError, LaunchState, NoLog

SUMMARY = {"state": "SUCCEEDED", "steps": 100}


def makes_a_rayjob(request: Request) -> bool:
    return (request.verb, request.resource) == ("create", "rayjobs")


def test_a_job_goes_from_submission_to_success(kube: OnKubernetes) -> None:
    job_id = kube.submit(workers={"min": 2, "max": 5})
    made = kube.rayjob(job_id)
    token = (kube.service.run_dir(job_id) / "token").read_text().strip()
    assert token not in json.dumps(made)
    assert f"--job {job_id} --attempt 1 --ticket " in made["spec"]["entrypoint"]
    group = made["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert (group["minReplicas"], group["maxReplicas"]) == (2, 5)
    kube.say(made, "Initializing")
    kube.service.turn()
    assert kube.service.state(job_id) == "PENDING"
    kube.say(made, "Running", "RUNNING", dashboardURL="head.default.svc:8265", jobId="x")
    kube.turn_until(lambda: kube.service.state(job_id) == "RUNNING", "the job runs")
    assert kube.service.job(job_id)["dashboard_url"] == "http://head.default.svc:8265/#/jobs/x"
    kube.service.post(job_id, summary=SUMMARY)
    kube.say(made, "Complete", "SUCCEEDED")
    kube.turn_until(lambda: kube.service.state(job_id) == "SUCCEEDED", "the job is over")
    assert len(kube.rayjobs()) == 1


def test_a_service_that_starts_again_finds_its_jobs_and_makes_none_twice(kube: OnKubernetes) -> None:
    pending, running = kube.submit(), kube.running()
    kube.restart()
    kube.turn_until(lambda: kube.service.state(running) == "RUNNING", "the job is followed")
    kube.say(kube.rayjob(pending), "Running", "RUNNING")
    kube.turn_until(lambda: kube.service.state(pending) == "RUNNING", "the other is, too")
    assert len(kube.rayjobs()) == 2
    assert kube.service.job(running)["attempt"] == 1


@pytest.mark.parametrize("fault", [Fault("lose answer"), Fault("lose request")])
def test_a_create_whose_answer_is_lost_makes_one_rayjob(kube: OnKubernetes, fault: Fault) -> None:
    kube.api.faults.add(fault, times=3, when=makes_a_rayjob)
    job_id = kube.submit()
    assert len(kube.rayjobs()) == 1
    assert kube.service.job(job_id)["attempt"] == 1


@parametrize("code", [429, 500, 503], usual=[0])
def test_a_refusal_is_the_reason_for_as_long_as_it_lasts(kube: OnKubernetes, code: int) -> None:
    kube.api.faults.refuse(code, times=10**6, when=makes_a_rayjob)
    job_id = kube.service.submit(checkpoint={"store": "s3://bucket/a"})
    kube.turn_until(lambda: str(code) in str(kube.service.job(job_id)["reason"]), "the reason")
    assert kube.rayjobs() == []
    kube.api.faults.mend()
    kube.turn_until(lambda: kube.service.state(job_id) == "PENDING", "the submission")
    assert len(kube.rayjobs()) == 1


def test_a_quota_that_changes_meanwhile_is_no_rayjob_that_is_there(kube: OnKubernetes) -> None:
    kube.api.faults.refuse(409, when=makes_a_rayjob, reason="Conflict")  # of a resourcequota
    job_id = kube.service.submit(**STORE)
    kube.service.turn()
    assert "409: Conflict" in kube.service.job(job_id)["reason"]
    kube.turn_until(lambda: kube.service.state(job_id) == "PENDING", "the submission")
    assert len(kube.rayjobs()) == 1


def test_a_cancel_finds_a_rayjob_whose_create_had_no_answer_and_that_no_watch_has_told(kube: OnKubernetes) -> None:
    kube.api.faults.add(Fault("silence"), times=10**6)
    kube.restart()
    kube.api.faults.add(Fault("lose answer"), when=makes_a_rayjob)
    job_id = kube.service.submit(**STORE)
    kube.service.turn()
    assert (kube.service.state(job_id), len(kube.rayjobs())) == ("SUBMITTING", 1)
    assert kube.service.client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    kube.turn_until(lambda: kube.rayjobs() == [], "the RayJob is deleted")


def test_a_start_that_fails_half_way_follows_nothing(api: KubeApi) -> None:
    before = set(threading.enumerate())
    api.faults.refuse(503, when=lambda request: (request.verb, request.resource) == ("list", "rayclusters"))
    with pytest.raises(LauncherError, match="503"):
        Counted(api).start("aaaa")

    def left() -> list[threading.Thread]:
        return [one for one in set(threading.enumerate()) - before if one.name.startswith("thinwire-ray")]

    wait_until(lambda: left() == [], "its threads end")


def test_a_job_is_followed_through_watches_that_end_break_and_expire(kube: OnKubernetes) -> None:
    job_id = kube.submit()
    kube.api.restart()  # 410 Gone: list again
    kube.say(kube.rayjob(job_id), "Running", "RUNNING")
    kube.turn_until(lambda: kube.service.state(job_id) == "RUNNING", "the job runs")
    kube.api.faults.draw(7, 0.5)
    for _ in range(20):
        kube.service.turn()
        time.sleep(0.05)
    kube.api.faults.mend()
    kube.say(kube.rayjob(job_id), "Complete", "SUCCEEDED")
    kube.turn_until(lambda: kube.service.state(job_id) == "SUCCEEDED", "the job is over")


def test_nothing_changes_while_the_api_is_gone(kube: OnKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.service.launch.kuberay.launcher.WATCH_SILENT_S", 0.5)
    job_id = kube.running()
    kube.api.go_away()
    wait_until(lambda: kube.launcher.ready() is not None, "its silence is told")
    assert kube.launcher.status(job_id).state is LaunchState.UNKNOWN
    assert "does not answer" in str(kube.launcher.ready())
    for _ in range(10):
        kube.service.turn()
    assert kube.service.job(job_id)["state"] == "RUNNING"
    kube.api.come_back()
    kube.turn_until(lambda: kube.launcher.ready() is None, "it is back")
    assert (kube.service.state(job_id), len(kube.rayjobs())) == ("RUNNING", 1)


def test_a_cancel_deletes_the_rayjob_and_waits_until_kuberay_has_let_it_go(kube: OnKubernetes) -> None:
    job_id = kube.running()
    kube.keep(job_id)
    assert kube.service.client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    kube.turn_until(lambda: "deletionTimestamp" in kube.rayjob(job_id)["metadata"], "the deletion")
    kube.service.turn(3)
    assert kube.service.state(job_id) == "CANCELLING"
    kube.let_go(job_id)
    kube.turn_until(lambda: kube.service.state(job_id) == "CANCELLED", "the end")
    assert kube.rayjobs() == []
    assert kube.api.store.all(RAYCLUSTERS) == []


def test_a_cancel_that_a_finalizer_keeps_says_so(kube: OnKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.service.launch.kuberay.states.LET_GO_S", -1.0)
    job_id = kube.running()
    kube.keep(job_id)
    kube.service.client.post(f"/v1/jobs/{job_id}/cancel")
    kube.turn_until(lambda: "rayjob-finalizer" in str(kube.service.job(job_id)["reason"]), "the reason")
    kube.let_go(job_id)
    kube.turn_until(lambda: kube.service.state(job_id) == "CANCELLED", "the end")
    assert kube.service.job(job_id)["reason"] is None


def test_a_rayjob_that_somebody_deletes_is_a_lost_attempt(kube: OnKubernetes) -> None:
    job_id = kube.running()
    kube.api.store.delete(RAYJOBS, kube.rayjob(job_id)["metadata"]["name"])
    kube.turn_until(lambda: kube.service.state(job_id) == "PENDING", "the next attempt")
    assert kube.service.job(job_id)["attempt"] == 2
    assert "--attempt 2" in kube.rayjob(job_id, 2)["spec"]["entrypoint"]


def test_a_change_of_workers_reaches_the_raycluster(kube: OnKubernetes) -> None:
    job_id = kube.running(workers={"min": 1, "max": 4})

    def limits() -> tuple[int, int]:
        group = kube.cluster(job_id)["spec"]["workerGroupSpecs"][0]
        return group["minReplicas"], group["maxReplicas"]

    assert kube.service.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"min": 2, "max": 6}}).status_code == 200
    kube.turn_until(lambda: limits() == (2, 6), "more")
    assert kube.service.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"min": 1, "max": 1}}).status_code == 200
    kube.turn_until(lambda: limits() == (1, 1), "fewer")
    version = kube.cluster(job_id)["metadata"]["resourceVersion"]
    kube.service.turn(5)
    assert kube.cluster(job_id)["metadata"]["resourceVersion"] == version


def test_a_resize_that_the_autoscaler_was_faster_than_is_tried_again(kube: OnKubernetes) -> None:
    job_id = kube.running(workers={"min": 1, "max": 4})
    name = kube.cluster(job_id)["metadata"]["name"]

    def grown(one: Object) -> Object:
        one["spec"]["workerGroupSpecs"][0]["replicas"] = 4
        return one

    kube.api.faults.add(Fault("late", late_s=1.0), times=100)  # the launcher hears late of what the cluster became
    kube.api.restart()
    kube.service.turn()
    kube.api.store.update(RAYCLUSTERS, name, grown)
    kube.service.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"min": 1, "max": 2}})
    kube.service.turn()
    assert kube.cluster(job_id)["spec"]["workerGroupSpecs"][0]["maxReplicas"] == 4  # or two pods with workers would end
    kube.service.turn(3)
    assert kube.cluster(job_id)["spec"]["workerGroupSpecs"][0]["maxReplicas"] == 4


def test_a_pod_that_cannot_be_scheduled_is_the_reason(kube: OnKubernetes) -> None:
    job_id = kube.submit()
    kube.say(kube.rayjob(job_id), "Initializing")
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}
    kube.pod(job_id, "worker-1", phase="Pending", conditions=[unschedulable])
    words = "pod worker-1: Unschedulable: no GPU"
    kube.turn_until(
        lambda: kube.service.job(job_id)["reason"] == f"waiting for the cluster: {words}", "the scheduler's words"
    )
    events = kube.service.client.get(f"/v1/jobs/{job_id}/metrics?event_kind=cluster_waits").json()["events"]
    assert [event["fields"]["reason"] for event in events] == [words]


def test_rayjobs_that_are_over_are_removed_when_the_service_knows(
    kube: OnKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = kube.running()
    kube.say(kube.rayjob(job_id), "Complete", "SUCCEEDED")
    kube.turn_until(lambda: kube.service.state(job_id) == "SUCCEEDED", "the job is over")
    time.sleep(0.5)
    assert len(kube.rayjobs()) == 1
    monkeypatch.setattr("thinwire.service.launch.kuberay.launcher.KEPT_S", 0.0)
    wait_until(lambda: kube.rayjobs() == [], "it is removed")
    with pytest.raises(NoLog):
        kube.launcher.logs(job_id, 0)


def test_a_rayjob_that_was_over_a_day_ago_is_removed_by_a_service_that_starts_again(
    kube: OnKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, young = kube.running(), kube.running()
    for job_id, ended in ((old, "2026-01-01T00:00:00Z"), (young, datetime.now(UTC).isoformat())):
        kube.say(kube.rayjob(job_id), "Complete", "SUCCEEDED", endTime=ended)
    for job_id in (old, young):
        kube.turn_until(lambda job_id=job_id: kube.service.state(job_id) == "SUCCEEDED", "the job is over")
    kube.restart()  # and does not ask about them again
    time.sleep(0.5)
    assert len(kube.rayjobs()) == 2, "not before the service has had the time to ask"
    monkeypatch.setattr("thinwire.service.launch.kuberay.launcher.KEPT_S", 0.5)
    wait_until(lambda: len(kube.rayjobs()) == 1, "it is removed")
    time.sleep(0.5)
    assert kube.rayjobs() == [kube.rayjob(young)]


def test_services_of_one_namespace_do_not_see_each_other(kube: OnKubernetes, tmp_path: Path) -> None:
    other = OnKubernetes(tmp_path / "other", kube.api)
    try:
        job_id = kube.running()
        assert kube.launcher.status(job_id).state is LaunchState.RUNNING
        assert other.launcher.status(job_id).state is LaunchState.ABSENT
    finally:
        other.close()


def test_rights_that_are_missing_are_named_at_the_start(api: KubeApi) -> None:
    for verb, resource in (("watch", "rayjobs"), ("patch", "rayclusters"), ("list", "events")):
        api.denied.add((verb, resource))
    with pytest.raises(LauncherError, match=r"watch rayjobs\.ray\.io, patch rayclusters\.ray\.io, list events"):
        Counted(api).start("aaaa")


def test_a_cluster_without_kuberay_and_an_api_that_is_away_are_told_at_the_start() -> None:
    bare = KubeApi()
    bare.has_kuberay = False
    with pytest.raises(LauncherError, match=r"install KubeRay"):
        Counted(bare).start("aaaa")
    bare.close()
    with pytest.raises(LauncherError, match="does not answer"):
        Counted(bare).start("aaaa")


def test_a_template_that_cannot_be_used_is_told_at_the_start(api: KubeApi, tmp_path: Path) -> None:
    (tmp_path / "rayjob.yaml").write_text("kind: Pod\n")
    with pytest.raises(LauncherError, match=r"rayjob\.yaml: it is no RayJob"):
        Counted(api, tmp_path / "rayjob.yaml").start("aaaa")


def test_no_way_to_an_api_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(LauncherError, match="KUBECONFIG"):
        connect(None)


@pytest.mark.parametrize("content", ["a: [", "- a", "\x00", "a: b", "clusters: 1\ncurrent-context: a"])
def test_a_kubeconfig_that_is_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    file = tmp_path / "config"
    file.write_text(content)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    with pytest.raises(LauncherError, match=r"no way to the Kubernetes API: .* set KUBECONFIG to the file"):
        connect(None)


@pytest.mark.parametrize("namespace", ["", None])
def test_a_context_with_an_empty_namespace_is_that_of_kubectl(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    file = write_kubeconfig(api, tmp_path / "config", namespace)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    assert connect(None).namespace == "default"


def test_the_files_of_a_pods_account_may_end_their_lines(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"token": f"{api.token}\n", "namespace": "default\n", "ca.crt": "a certificate\n"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr("thinwire.service.launch.kuberay.kube._NAMESPACE", tmp_path / "namespace")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    # The API server for tests speaks plain HTTP, and a pod's account goes over TLS.
    load = kubernetes.config.load_incluster_config

    def loaded(client_configuration: kubernetes.client.Configuration) -> None:
        load(client_configuration)
        client_configuration.host, client_configuration.ssl_ca_cert = api.url, None
        client_configuration.refresh_api_key_hook = None

    monkeypatch.setattr("kubernetes.config.load_incluster_config", loaded)
    kube = connect(None)
    try:
        assert (kube.namespace, kube.missing()) == ("default", None)
    finally:
        kube.close()


def test_the_launcher_asks_for_the_services_own_address(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="THINWIRE_PUBLIC_URL"):
        Settings(home=tmp_path, launcher="kuberay")
