"""What a submission would become, and a job again with changes."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from typing import Any

import pytest
from sqlalchemy import select

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, spec
from thinwire.contract.places import Room
from thinwire.contract.spec import TrainSpec
from thinwire.service.jobs.repository import JobRow
from thinwire.service.launch.protocol import LaunchState

SCRIPT: dict[str, Any] = {"recipe": {"name": "script", "entry": "train.py", "working_dir": "/srv/x"}}


def validated(service: Service, body: dict[str, Any], **headers: str) -> Any:
    return service.client.post("/v1/jobs:validate", json=body, headers=headers)


def cloned(service: Service, job_id: str, changes: dict[str, Any], **headers: str) -> Any:
    return service.client.post(f"/v1/jobs/{job_id}/clone", json=changes, headers=headers)


def test_a_draft_has_all_defaults_and_leaves_nothing(service: Service) -> None:
    body = spec(labels={"team": "vision"})
    draft = validated(service, body)
    assert draft.status_code == 200, draft.text
    assert draft.json()["spec"] == TrainSpec.model_validate(body).model_dump(mode="json")
    assert service.client.get("/v1/jobs").json()["jobs"] == []
    assert service.client.get("/v1/audit").json()["lines"] == []
    assert not list((service.home / "runs").glob("*"))


def test_a_draft_is_refused_as_the_submission_would_be(service: Service) -> None:
    missing = {"source": "text-file", "path": "/no/such/file"}
    wrong = ({"steps": 0}, spec(stepz=1), spec(data=missing), spec(kueue={"queue": "q"}))
    for body in (*wrong, {**SCRIPT, "start": {"job": "x"}}):
        asked, submitted = validated(service, body), service.client.post("/v1/jobs", json=body)
        assert asked.status_code == submitted.status_code == 422
        told = [(answer.json()["message"], answer.json()["problems"]) for answer in (asked, submitted)]
        assert told[0] == told[1]


@pytest.mark.slow
def test_it_takes_the_role_that_a_submission_takes(service: Service) -> None:
    viewer = service.person("eva", "viewer")
    assert validated(service, spec(), **viewer).status_code == 403


def test_a_draft_says_whether_it_would_start_now(service: Service) -> None:
    assert validated(service, spec()).json()["starts"] in ("handed_over", "unknown")
    service.turn()
    service.launcher.has_room = Room(cpus=4, gpus=0)
    service.turn()
    assert validated(service, spec(workers={"min": 4, "max": 4})).json()["starts"] == "now"
    holder = service.submit(workers={"min": 3, "max": 3})
    service.turn(2)
    draft = validated(service, spec(workers={"min": 2, "max": 2})).json()
    assert draft["starts"] == "queued"
    assert (draft["queue"]["position"], draft["queue"]["free"], draft["queue"]["needs"]) == (1, 1, 2)
    assert holder in draft["reason"]
    assert validated(service, spec(workers={"min": 1, "max": 1})).json()["starts"] == "now"
    never = validated(service, spec(workers={"min": 5, "max": 5}))
    assert (never.status_code, never.json()["problems"][0]["path"]) == (422, "workers.min")


def test_a_clone_without_changes_is_the_same_job_again(service: Service) -> None:
    body = spec(labels={"team": "vision"}, seed=3, recipe={"name": "bert"}, optimizer={"name": "adam", "lr": 1e-4})
    job_id = service.client.post("/v1/jobs", json=body).json()["id"]
    service.client.patch(f"/v1/jobs/{job_id}", json={"labels": {"team": "text"}, "workers": {"max": 2}})
    made = cloned(service, job_id, {})
    assert made.status_code == 202, made.text
    assert made.headers["location"] == f"/v1/jobs/{made.json()['id']}"
    assert made.json()["id"] != job_id
    assert made.json()["spec"] == service.job(job_id)["spec"]
    assert made.json()["labels"] == {"team": "text"}
    assert made.json()["wanted_workers"]["max"] == 1, "as it was submitted"
    assert service.client.get("/v1/audit").json()["lines"][0]["about"] == f"of {job_id}"


def test_a_clone_has_the_changes_and_all_else_as_it_was(service: Service) -> None:
    job_id = service.submit(seed=3, labels={"a": "1", "b": "2"})
    made = cloned(service, job_id, {"steps": 60, "optimizer": {"lr": 1e-3}, "labels": {"a": None}, "seed": None}).json()
    assert (made["spec"]["steps"], made["spec"]["seed"], made["labels"]) == (60, 0, {"b": "2"})
    assert (made["spec"]["optimizer"]["lr"], made["spec"]["optimizer"]["warmup"]) == (1e-3, 20)
    other = cloned(service, job_id, {"optimizer": {"name": "adam", "warmup": None}}).json()
    assert other["spec"]["optimizer"]["name"] == "adam"


@parametrize(
    ("changes", "path"),
    [
        ({"stepz": 1}, "stepz"),
        ({"optimizer": {"lrr": 1}}, "optimizer.lrr"),
        ({"steps": 0}, "steps"),
        ({"optimizer": None}, "optimizer"),
        ({"optimizer": {"warmup": 100}}, "optimizer.warmup"),
        ({"workers": 3}, "workers"),
    ],
    usual=[0, 3, 4],
)
def test_changes_that_make_no_job_are_told_by_field(service: Service, changes: dict[str, Any], path: str) -> None:
    job_id = service.submit()
    refused = cloned(service, job_id, changes)
    assert refused.status_code == 422, refused.text
    assert [problem["path"] for problem in refused.json()["problems"]] == [path]
    assert len(service.client.get("/v1/jobs").json()["jobs"]) == 1


def test_a_repeated_clone_with_the_same_key_is_the_same_job(service: Service) -> None:
    job_id = service.submit()
    key = {"Idempotency-Key": "k"}
    first, again = cloned(service, job_id, {"steps": 60}, **key), cloned(service, job_id, {"steps": 60}, **key)
    assert first.json()["id"] == again.json()["id"]
    assert cloned(service, job_id, {"steps": 61}, **key).json()["code"] == "idempotency_key_reused"


def test_nothing_can_be_made_of_a_job_that_is_gone_or_of_what_is_no_object(service: Service) -> None:
    assert cloned(service, "none-000000", {}).json()["code"] == "job_not_found"
    job_id = service.submit()
    url = f"/v1/jobs/{job_id}/clone"
    for wrong in (b"[]", b"3", b"", b'{"a":' * 500 + b"1" + b"}" * 500):
        answer = service.client.post(url, content=wrong, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, answer.text
    assert service.client.post(url, content=b"{}").status_code == 415
    patch = {"Content-Type": "application/merge-patch+json"}
    assert service.client.post(url, content=b"{}", headers=patch).status_code == 202


def package(service: Service) -> str:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("train.py", "print()")
    sha256 = hashlib.sha256(made.getvalue()).hexdigest()
    sent = {"Content-Type": "application/octet-stream"}
    service.client.put(f"/v1/packages/{sha256}", content=made.getvalue(), headers=sent).raise_for_status()
    return sha256


@pytest.mark.slow
def test_a_package_that_is_gone_is_told_in_words(service: Service) -> None:
    sha256 = package(service)
    body = {"recipe": {"name": "script", "entry": "train.py", "package": sha256}}
    job_id = service.client.post("/v1/jobs", json=body).json()["id"]
    assert cloned(service, job_id, {}).status_code == 202
    (service.home / "packages" / f"{sha256}.zip").unlink()
    refused = cloned(service, job_id, {}).json()
    assert refused["problems"][0]["path"] == "recipe.package"
    assert "PUT /v1/packages/" in refused["problems"][0]["message"]


def test_a_secret_goes_along_for_the_person_who_has_written_it_alone(service: Service) -> None:
    anna, otto = service.person("anna"), service.person("otto")
    recipe = {**SCRIPT["recipe"], "args": ["--api-key", "hunter2hunter2"]}
    job_id = service.client.post("/v1/jobs", json={"recipe": recipe}, headers=anna).json()["id"]
    assert "hunter2" not in service.client.get(f"/v1/jobs/{job_id}").text
    taken = cloned(service, job_id, {"recipe": {"working_dir": "/srv/of/otto"}}, **otto)
    assert (taken.status_code, taken.json()["problems"][0]["path"]) == (422, "recipe.args.1")
    named = cloned(service, job_id, {"recipe": {"args": ["--api-key", "ownownown"]}}, **otto)
    assert named.status_code == 202
    own = cloned(service, job_id, {}, **anna)
    assert own.status_code == 202
    with service.plane.db.read() as session:
        specs = {row.id: json.dumps(row.spec) for row in session.scalars(select(JobRow))}
    assert "hunter2" in specs[own.json()["id"]]
    assert "hunter2" not in specs[named.json()["id"]]


@pytest.mark.slow
def test_a_job_of_another_version_is_told_as_such(service: Service) -> None:
    job_id = service.submit()
    with service.plane.db.write() as session:
        row = session.get(JobRow, job_id)
        assert row is not None
        row.spec = {**row.spec, "colour": "red"}
    refused = cloned(service, job_id, {})
    assert refused.status_code == 422
    assert "another version" in refused.json()["message"]


@parametrize("what", ["everything", "weights"], usual=[0])
def test_a_clone_of_a_job_that_began_from_another_looks_anew_where_that_lies(service: Service, what: str) -> None:
    origin = service.running()
    folder = service.run_dir(origin) / "checkpoints" / f"step-00000050-{'0' * 12}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    service.launcher.put(origin, LaunchState.SUCCEEDED)
    service.turn(2)
    heir = service.submit(start={"job": origin, "what": what})
    made = cloned(service, heir, {"steps": 120})
    assert made.status_code == 202, made.text
    assert made.json()["spec"]["start"] == service.job(heir)["spec"]["start"]
