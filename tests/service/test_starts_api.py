"""A job that starts from another one: where its checkpoints lie, and what is refused at the submission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.service.control_plane_harness import STORE, Service, spec


def put(folder: Path, step: int, *, whole: bool = True, generation: int = 7) -> None:
    """What a checkpoint of this step looks like."""
    made = folder / f"step-{step:08d}-{generation:012x}"
    made.mkdir(parents=True)
    (made / ("manifest.json" if whole else "shard-00000-of-00001.json")).write_text("{}")


def saved(service: Service, job_id: str, step: int, place: str) -> None:
    """The job tells that it has saved one."""
    fields = {"path": f"{place}/{job_id}/step-{step:08d}-{7:012x}"}
    event = {"kind": "checkpoint_saved", "step": step, "time": float(step), "fields": fields}
    assert service.post(job_id, events=[event]).status_code == 204


def problem(service: Service, **changes: Any) -> tuple[str, Any, str]:
    """The one thing that is wrong with a submission."""
    answer = service.client.post("/v1/jobs", json=spec(**changes))
    assert answer.status_code == 422, answer.text
    (found,) = answer.json()["problems"]
    return found["path"], found["value"], found["message"]


def test_the_service_says_where_the_checkpoints_of_a_job_lie(service: Service) -> None:
    first = service.submit()
    own = service.run_dir(first) / "checkpoints"
    put(own, 20)
    put(own, 40)
    put(own, 60, whole=False)
    second = service.job(service.submit(start={"job": first}))
    assert second["spec"]["start"] == {
        "job": first,
        "checkpoints": str(own),
        "weights": None,
        "step": None,
        "what": None,
    }
    third = service.submit(start=second["spec"]["start"] | {"step": 20, "what": "weights"})
    assert service.job(third)["spec"]["start"]["step"] == 20


def test_the_same_request_again_is_the_same_job_though_its_start_was_found(service: Service) -> None:
    first = service.submit()
    put(service.run_dir(first) / "checkpoints", 20)
    body, key = spec(start={"job": first}), {"Idempotency-Key": "once"}
    answers = [service.client.post("/v1/jobs", json=body, headers=key).json()["id"] for _ in range(2)]
    assert answers[0] == answers[1]


def test_what_there_is_not_cannot_be_started_from(service: Service) -> None:
    assert problem(service, start={"job": "none-3f"})[:2] == ("start.job", "none-3f")
    first = service.submit()
    own = service.run_dir(first) / "checkpoints"
    put(own, 60, whole=False)
    path, value, words = problem(service, start={"job": first})
    assert (path, value) == ("start.job", first)
    assert "must have a whole checkpoint, and has none" in words
    put(own, 20)
    path, value, words = problem(service, start={"job": first, "step": 60})
    assert (path, value) == ("start.step", 60)
    assert words.endswith("has a whole checkpoint: 20")
    put(own, 100)
    path, value, words = problem(service, start={"job": first})
    assert (path, value) == ("steps", 100)
    assert "must be more than 100" in words
    service.submit(start={"job": first, "step": 20})
    service.submit(start={"job": first, "what": "weights"})


def test_a_path_is_looked_at_where_the_workers_run_on_this_machine(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    path, value, words = problem(service, start={"weights": str(file)})
    assert (path, value) == ("start.weights", str(file))
    assert "No such file" in words
    assert "such as FOLDER/model.safetensors" in problem(service, start={"weights": str(tmp_path)})[2]
    file.write_bytes(b"x")
    service.submit(start={"weights": str(file)})
    service.submit(start={"weights": "s3://bucket/model.safetensors"})
    assert problem(service, start={"checkpoints": str(tmp_path)})[0] == "start.checkpoints"
    put(tmp_path, 20)
    service.submit(start={"checkpoints": str(tmp_path)})


def test_of_a_store_elsewhere_the_service_knows_what_the_job_has_told(far: Service) -> None:
    first = far.running(**STORE)
    assert problem(far, **STORE, start={"job": first})[0] == "start.job"
    saved(far, first, 40, "s3://bucket/checkpoints")
    second = far.job(far.submit(**STORE, start={"job": first}))
    assert second["spec"]["start"]["checkpoints"] == f"s3://bucket/checkpoints/{first}"
    assert problem(far, **STORE, start={"job": first, "step": 20})[0] == "start.step"


def test_a_place_that_not_all_machines_reach_is_refused(far: Service) -> None:
    far.launcher.own_cluster = True  # as it was when the first job was made
    first = far.submit()
    put(far.run_dir(first) / "checkpoints", 20)
    far.launcher.own_cluster = False
    path, value, words = problem(far, **STORE, start={"job": first})
    assert (path, value) == ("start.job", first)
    assert words.startswith(f"the checkpoints of {first} lie in {far.run_dir(first)}")
    assert "every machine of the cluster reaches" in words
    for start in ({"weights": "/home/me/model.safetensors"}, {"checkpoints": "file:///home/me/a"}):
        ((name, place),) = start.items()
        assert problem(far, **STORE, start=start)[:2] == (f"start.{name}", place)
    far.submit(**STORE, start={"weights": "/shared/model.safetensors"})
    far.submit(**STORE, start={"checkpoints": "/shared/a"})
