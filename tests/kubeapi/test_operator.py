"""KubeRay's operator as the tests play it: the states of a RayJob, in KubeRay's order and words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kubernetes_validate.utils import validate

from tests.deploy.schemas import NEWEST
from tests.kubeapi.answers import Refused
from tests.kubeapi.kinds import EVENTS, PODS, RAYCLUSTERS, RAYJOBS, SECRETS, SERVICES, WORKLOADS, Object
from tests.kubeapi.kubelet import PlayedKubelet, Trouble
from tests.kubeapi.kueue import ELASTIC, NO_QUOTA, QUEUE, Kueue
from tests.kubeapi.operator import Operator
from tests.kubeapi.ray_jobs import PlayedJobs
from tests.kubeapi.store import Store

Make = Callable[..., Object]


class Played:
    """An operator, and a RayJob `a` of it."""

    def __init__(self, rayjob: Object) -> None:
        self.store = Store()
        self.jobs = PlayedJobs()
        self.kubelet = PlayedKubelet(self.store)
        self.operator = Operator(self.store, self.jobs, self.kubelet)
        self.store.create(RAYJOBS, "default", rayjob)

    @property
    def status(self) -> Object:
        return self.store.get(RAYJOBS, "default", "a").get("status", {})

    def until(self, deployment: str, job: str | None = None) -> Object:
        """Step until the RayJob says so; its status."""
        for _ in range(40):
            now = (self.status.get("jobDeploymentStatus", ""), self.status.get("jobStatus"))
            if now[0] == deployment and job in (None, now[1]):
                return self.status
            self.operator.step()
        raise AssertionError(f"{deployment} {job} did not come; it is {self.status}")

    def states(self) -> list[tuple[str, str]]:
        """What the RayJob has been through, each once."""
        found: list[tuple[str, str]] = []
        for change in self.store.since(self.first):
            if change.kind is RAYJOBS and change.after is not None:
                status = change.after.get("status", {})
                state = (status.get("jobDeploymentStatus", ""), status.get("jobStatus", ""))
                if not found or found[-1] != state:
                    found.append(state)
        return found

    @property
    def first(self) -> int:
        """The version before the RayJob was made."""
        return next(c.version for c in self.store.since(1) if c.kind is RAYJOBS) - 1

    def pods(self, node: str) -> list[Object]:
        return self.store.all(PODS, "default", lambda pod: pod["metadata"]["labels"]["ray.io/node-type"] == node)

    def cluster(self) -> Object:
        return self.store.get(RAYCLUSTERS, "default", self.status["rayClusterName"])

    def told(self, reason: str) -> list[str]:
        return [one["message"] for one in self.store.all(EVENTS) if one["reason"] == reason]


def test_a_job_goes_through_the_states_of_kuberay_to_its_end(rayjob: Make) -> None:
    play = Played(rayjob("a", {"team": "x"}, ttlSecondsAfterFinished=0, rayClusterSpec=_with_token(rayjob)))
    running = play.until("Running", "RUNNING")
    cluster = play.cluster()
    assert cluster["metadata"]["name"].startswith("a-")
    assert len(cluster["metadata"]["name"]) == len("a-12345")
    assert cluster["metadata"]["labels"] == {
        "team": "x",
        "ray.io/originated-from-cr-name": "a",
        "ray.io/originated-from-crd": "RayJob",
        "ray.io/job-submission-mode": "HTTPMode",
    }
    assert cluster["status"]["state"] == "ready"
    assert running["dashboardURL"] == f"{cluster['metadata']['name']}-head-svc.default.svc.cluster.local:8265"
    assert running["jobId"].startswith("a-")
    assert (len(play.pods("head")), len(play.pods("worker"))) == (1, 2)
    assert len(play.store.all(SERVICES)) == 2
    assert play.store.get(SECRETS, "default", cluster["metadata"]["name"])["data"]["auth_token"]
    for pod in play.store.all(PODS):
        validate(pod, NEWEST, strict=True)
    play.jobs.end("a")
    ended = play.until("Complete", "SUCCEEDED")
    assert ended["endTime"]
    assert ended["rayJobInfo"]["endTime"]
    assert (ended["succeeded"], ended["failed"]) == (1, 0)
    play.operator.settle()
    assert play.store.all(RAYCLUSTERS) == play.store.all(PODS) == play.store.all(SECRETS) == []
    assert play.states() == [
        ("", ""),
        ("Initializing", ""),
        ("Running", ""),
        ("Running", "PENDING"),
        ("Running", "RUNNING"),
        ("Complete", "SUCCEEDED"),
    ]
    assert play.jobs.submitted == ["a"]


def _with_token(rayjob: Make) -> Object:
    spec: Object = rayjob("a")["spec"]["rayClusterSpec"]
    return spec | {"authOptions": {"mode": "token"}}


def test_a_job_that_fails_says_why_and_is_tried_again_as_often_as_told(rayjob: Make) -> None:
    play = Played(rayjob("a", backoffLimit=1))
    play.until("Running", "RUNNING")
    first = play.status["rayClusterName"]
    play.jobs.end("a", "FAILED", "Job entrypoint command failed with exit code 1")
    play.until("Retrying")
    failed = play.until("Failed", "FAILED")
    assert (failed["reason"], failed["message"]) == ("AppFailed", "Job entrypoint command failed with exit code 1")
    assert failed["failed"] == 2
    assert failed["rayClusterName"] != first
    assert play.jobs.submitted == ["a", "a"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"suspend": True, "shutdownAfterJobFinishes": False}, "is not allowed to be suspended"),
        ({"backoffLimit": -1}, "backoffLimit must be a positive integer"),
        ({"activeDeadlineSeconds": 0}, "activeDeadlineSeconds must be a positive integer"),
        ({"runtimeEnvYAML": "a: ["}, "failed to unmarshal RuntimeEnvYAML"),
        ({"name": "a" * 48}, "no more than 47 characters"),
        ({"name": "1a"}, "a valid DNS1035 label"),
        ({"workers": {"minReplicas": 5}}, "has minReplicas 5 greater than maxReplicas 4"),
        ({"cluster": {"authOptions": {"mode": "token"}, "rayVersion": ""}}, "RayVersion was not specified"),
        ({"cluster": {"authOptions": {"mode": "token"}, "rayVersion": "2.40.0"}}, "minimum Ray version is 2.52.0"),
        ({"cluster": {"authOptions": {"mode": "token", "enableK8sTokenAuth": True}}}, "not supported for RayJob"),
    ],
)
def test_what_kuberay_refuses_makes_no_cluster(rayjob: Make, spec: Object, words: str) -> None:
    name = spec.pop("name", "a")
    workers, cluster = spec.pop("workers", {}), spec.pop("cluster", {})
    made = rayjob(name, **spec)
    made["spec"]["rayClusterSpec"] |= cluster
    made["spec"]["rayClusterSpec"]["workerGroupSpecs"][0] |= workers
    play = Played(made)
    play.operator.settle()
    status = play.store.get(RAYJOBS, "default", name)["status"]
    assert (status["jobDeploymentStatus"], status["reason"]) == ("ValidationFailed", "ValidationFailed")
    assert words in status["message"]
    assert play.store.all(RAYCLUSTERS) == []
    [event] = play.store.all(EVENTS)
    assert event["type"] == "Warning"
    assert words in event["message"]


def test_pods_without_a_node_wait_and_say_what_the_scheduler_says(rayjob: Make) -> None:
    play = Played(rayjob("a"))
    play.kubelet.troubles = [
        Trouble("unschedulable", lambda pod: pod["metadata"]["labels"]["ray.io/node-type"] == "worker")
    ]
    for _ in range(20):
        play.operator.step()
    assert play.status["jobDeploymentStatus"] == "Initializing"
    for pod in play.pods("worker"):
        [condition] = pod["status"]["conditions"]
        assert (condition["type"], condition["status"], condition["reason"]) == (
            "PodScheduled",
            "False",
            "Unschedulable",
        )
        assert "2 Insufficient nvidia.com/gpu" in condition["message"]
    events = [one for one in play.store.all(EVENTS) if one["reason"] == "FailedScheduling"]
    assert len(events) == 2
    assert all(event["series"]["count"] > 5 for event in events)
    play.kubelet.troubles = []
    play.until("Running", "RUNNING")


def test_an_image_that_is_not_there_backs_off(rayjob: Make) -> None:
    play = Played(rayjob("a"))
    play.kubelet.troubles = [Trouble("image")]
    for _ in range(10):
        play.operator.step()
    [head] = play.pods("head")
    waiting = head["status"]["containerStatuses"][0]["state"]["waiting"]
    assert waiting["reason"] == "ImagePullBackOff"
    assert 'Back-off pulling image "ray:1"' in waiting["message"]
    assert any("pull access denied" in words for words in play.told("Failed"))


def test_a_quota_that_is_used_up_makes_no_pod(rayjob: Make) -> None:
    play = Played(rayjob("a"))
    words = "exceeded quota: lab, requested: limits.cpu=4, used: limits.cpu=8, limited: limits.cpu=10"
    play.operator.clusters.quota = lambda pod: words if "worker" in pod["metadata"]["generateName"] else None
    for _ in range(10):
        play.operator.step()
    assert play.pods("worker") == []
    assert any(words in said and "is forbidden" in said for said in play.told("FailedToCreateWorkerPod"))
    [failure] = [one for one in play.cluster()["status"]["conditions"] if one["type"] == "ReplicaFailure"]
    assert (failure["status"], failure["reason"]) == ("True", "FailedCreateWorkerPod")
    play.operator.clusters.quota = lambda pod: None
    play.until("Running", "RUNNING")
    assert "ReplicaFailure" not in [one["type"] for one in play.cluster()["status"]["conditions"]]


def test_a_lost_pod_is_made_anew_when_it_is_gone(rayjob: Make) -> None:
    play = Played(rayjob("a"))
    play.until("Running", "RUNNING")
    lost = play.pods("worker")[0]
    play.kubelet.troubles = [Trouble("lingers")]
    play.store.delete(PODS, "default", lost["metadata"]["name"])
    play.operator.settle()
    assert len(play.pods("worker")) == 2  # what is ending counts
    play.kubelet.troubles = []
    play.operator.settle()
    names = [pod["metadata"]["name"] for pod in play.pods("worker")]
    assert len(names) == 2
    assert lost["metadata"]["name"] not in names
    play.kubelet.fail(play.pods("worker")[0])
    play.operator.settle()
    assert [pod["status"]["phase"] for pod in play.pods("worker")] == ["Running"] * 2
    assert play.status["jobStatus"] == "RUNNING"
    assert play.jobs.submitted == ["a"]


def test_a_lost_head_forgets_the_job_and_it_is_submitted_again(rayjob: Make) -> None:
    play = Played(rayjob("a"))
    play.until("Running", "RUNNING")
    play.kubelet.fail(play.pods("head")[0])
    play.operator.settle()
    assert play.jobs.submitted == ["a", "a"]
    assert play.status["jobStatus"] == "RUNNING"


def test_new_limits_of_the_cluster_change_its_pods(rayjob: Make) -> None:
    made = rayjob("a")
    made["spec"]["rayClusterSpec"] |= {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2"}}
    play = Played(made)
    play.until("Running", "RUNNING")
    play.operator.settle()
    assert len(play.pods("worker")) == 4  # maxReplicas: the job wants all it can have
    assert [one["name"] for one in play.pods("head")[0]["spec"]["containers"]] == ["ray-head", "autoscaler"]

    def limit(most: int) -> None:
        def change(found: Object) -> Object:
            found["spec"]["workerGroupSpecs"][0]["maxReplicas"] = most
            return found

        name = play.cluster()["metadata"]["name"]
        play.store.update(RAYCLUSTERS, "default", name, change)
        play.operator.settle()

    kept = {pod["metadata"]["name"] for pod in play.pods("worker")}
    limit(5)
    assert kept < {pod["metadata"]["name"] for pod in play.pods("worker")}
    assert play.cluster()["status"]["desiredWorkerReplicas"] == 5
    limit(2)
    assert len(play.pods("worker")) == 2
    assert "scaleStrategy" not in play.cluster()["spec"]["workerGroupSpecs"][0]
    assert play.store.get(RAYJOBS, "default", "a")["metadata"]["generation"] == 1


def test_a_deleted_job_is_stopped_and_takes_everything_along(rayjob: Make) -> None:
    play = Played(rayjob("a"))
    job_id = play.until("Running", "RUNNING")["jobId"]
    play.store.delete(RAYJOBS, "default", "a")
    assert play.store.find(RAYJOBS, "default", "a") is not None  # its finalizer
    play.operator.settle()
    assert play.jobs.stopped == [job_id]
    assert play.store.all(RAYJOBS) == play.store.all(RAYCLUSTERS) == play.store.all(PODS) == []


def test_a_deadline_ends_a_job_for_good(rayjob: Make) -> None:
    play = Played(rayjob("a", activeDeadlineSeconds=10_000, backoffLimit=3))
    play.until("Running", "RUNNING")

    def long_ago(found: Object) -> Object:
        found["status"]["startTime"] = "2020-01-01T00:00:00Z"
        return found

    play.store.update(RAYJOBS, "default", "a", long_ago, "status")
    failed = play.until("Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert failed["message"].startswith("The RayJob has passed the activeDeadlineSeconds. StartTime: 2020-01-01")


def test_kueue_holds_a_job_until_it_is_admitted(rayjob: Make) -> None:
    play = Played(rayjob("other"))
    kueue = Kueue(play.store)
    play.store.create(RAYJOBS, "default", rayjob("a", {QUEUE: "lab"}, suspend=True))
    play.store.create(RAYJOBS, "default", rayjob("b", {QUEUE: "nowhere"}, suspend=True))
    kueue.step()
    play.until("Suspended")
    said = {
        one["metadata"]["ownerReferences"][0]["name"]: one["status"]["conditions"][0]
        for one in play.store.all(WORKLOADS)
    }
    assert (said["a"]["status"], said["a"]["reason"], said["a"]["message"]) == ("False", "Pending", NO_QUOTA)
    assert (said["b"]["reason"], said["b"]["message"]) == ("Inadmissible", "LocalQueue nowhere doesn't exist")
    kueue.admit("a")
    play.until("Running", "RUNNING")
    assert play.store.get(RAYJOBS, "default", "b")["status"]["jobDeploymentStatus"] == "Suspended"


def test_kueue_refuses_an_autoscaler_unless_the_job_is_elastic(rayjob: Make) -> None:
    store = Store()
    Kueue(store)
    made = rayjob("a", {QUEUE: "lab"}, suspend=True)
    made["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] = True
    with pytest.raises(Refused, match="a kueue managed job should not use autoscaling") as raised:
        store.create(RAYJOBS, "default", made)
    assert raised.value.code == 403
    made["metadata"]["annotations"] = {ELASTIC: "true"}
    store.create(RAYJOBS, "default", made)


def test_an_operator_that_runs_by_itself_raises_what_went_wrong(rayjob: Make) -> None:
    class Broken:
        def step(self) -> None:
            raise RuntimeError("the kubelet is broken")

    store = Store()
    operator = Operator(store, kubelet=Broken())
    with pytest.raises(RuntimeError, match="kubelet is broken"), operator.running(every_s=0.01):
        assert operator.stopped.wait(30)
