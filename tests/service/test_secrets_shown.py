"""Nobody who may look at a job reads a secret of it: not in the job, not in a refusal, an event, a log or the audit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tests.service.control_plane_harness import STORE, Service, spec
from thinwire.contract.redaction import HIDDEN
from thinwire.contract.spec import read_spec
from thinwire.service.jobs.repository import JobRow
from thinwire.service.jobs.service import without_secrets
from thinwire.service.launch.protocol import LaunchState, read_part

SECRET = "hunter2"
SCRIPT = {"name": "script", "entry": "train.py", "working_dir": "/srv/code"}


def script(**recipe: Any) -> dict[str, Any]:
    return {"recipe": SCRIPT | recipe}


def test_arguments_and_signed_urls_run_as_they_were_given_and_are_shown_without_their_secrets(service: Service) -> None:
    given = ["--password", SECRET, f"--url=https://h/x?token={SECRET}", "--lr", "1e-3"]
    start = {"weights": f"https://b.example/m.safetensors?X-Amz-Signature={SECRET}"}
    answer = service.client.post("/v1/jobs", json=script(args=given) | {"start": start})
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    viewer = service.person("vera", "viewer")
    for text in (answer.text, service.client.get(f"/v1/jobs/{job_id}", headers=viewer).text):
        assert SECRET not in text
    shown = service.job(job_id)["spec"]
    assert shown["recipe"]["args"] == ["--password", HIDDEN, f"--url=https://h/x?token={HIDDEN}", "--lr", "1e-3"]
    assert read_spec(shown)  # a client reads it as any other
    assert SECRET in (service.run_dir(job_id) / "job.json").read_text()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("body", "path"),
    [
        (script(env_vars={"PGPASSWORD": SECRET}), "recipe.env_vars.PGPASSWORD"),
        (script(env_vars={"GITHUB_PAT": SECRET}), "recipe.env_vars.GITHUB_PAT"),
        (script(env_vars={"DATABASE_URL": f"postgres://me:{SECRET}@db/a"}), "recipe.env_vars.DATABASE_URL"),
        (script(pip=[f"git+https://me:{SECRET}@git.example/r"]), "recipe.pip.0"),
        (script(password=SECRET), "recipe.password"),
        (script(args=f"--password {SECRET}"), "recipe.args"),
        (spec(checkpoint={"store": f"s3://KEY:AB/{SECRET}@bucket/a"}), "checkpoint.store"),
        (spec(checkpoint={"store": f"s3://bucket/a?secret_key={SECRET}"}), "checkpoint.store"),
        (spec(checkpoint={"store": {"url": f"s3://KEY:{SECRET}@bucket/a"}}), "checkpoint.store"),
        (spec(api_key=SECRET), "api_key"),
    ],
)
def test_a_refusal_does_not_repeat_the_secret(service: Service, body: dict[str, Any], path: str) -> None:
    answer = service.client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert path in [problem["path"] for problem in answer.json()["problems"]]
    assert SECRET not in answer.text


def test_a_job_of_an_earlier_version_is_shown_without_the_secret_and_goes_on(service: Service) -> None:
    job_id = service.submit(**STORE)
    old = script(env_vars={"PGPASSWORD": SECRET}) | {"checkpoint": {"store": f"s3://K:A/{SECRET}@bucket/a"}}
    old |= {"steps": None, "workers": {"min": 1, "max": 1}}
    with service.plane.db.write() as session:
        session.execute(update(JobRow).where(JobRow.id == job_id).values(spec=old))
    job = service.job(job_id)
    assert (job["unreadable"], job["spec"]["recipe"]["env_vars"]) == (None, {"PGPASSWORD": HIDDEN})
    assert SECRET not in service.client.get(f"/v1/jobs/{job_id}").text
    assert SECRET not in service.client.get(f"/v1/jobs/{job_id}/checkpoints").text


def test_a_shown_job_that_is_sent_again_is_refused_by_the_place_of_the_secret(service: Service) -> None:
    job_id = service.client.post("/v1/jobs", json=script(args=["--password", SECRET])).json()["id"]
    answer = service.client.post("/v1/jobs", json=service.job(job_id)["spec"])
    assert answer.status_code == 422
    (problem,) = answer.json()["problems"]
    assert problem["path"] == "recipe.args.1"
    assert "shown in the place of a secret" in problem["message"]


def test_what_a_job_says_is_shown_without_secrets(service: Service) -> None:
    job_id = service.running()
    fields = {"url": f"s3://K:{SECRET}@b", "env": {"PGPASSWORD": SECRET}, "tokens": 4096}
    service.post(job_id, events=[{"kind": "started_from", "step": 0, "time": 1.0, "fields": fields}])
    service.post(job_id, summary={"command": f"train.py --password {SECRET}"})
    told = service.client.get(f"/v1/jobs/{job_id}/metrics").json()["events"]
    (event,) = [one for one in told if one["kind"] == "started_from"]
    assert event["fields"] == {"url": f"s3://{HIDDEN}@b", "env": {"PGPASSWORD": HIDDEN}, "tokens": 4096}
    assert service.job(job_id)["summary"] == {"command": f"train.py --password {HIDDEN}"}
    text = json.dumps({"command": f"train.py --password {SECRET}", "env": {"PGPASSWORD": SECRET}})
    kept, own = f"/v1/jobs/{job_id}/files/summary.json", service.job_headers(job_id)
    left = service.client.put(
        f"{kept}?attempt=1", content=text, headers=own | {"Content-Type": "application/octet-stream"}
    )
    assert left.status_code in (200, 204), left.text
    shown = service.client.get(kept, headers=service.person("vera", "viewer")).json()
    assert shown == {"command": f"train.py --password {HIDDEN}", "env": {"PGPASSWORD": HIDDEN}}
    failed = service.running()
    service.post(failed, failure={"kind": "Error", "message": f"cannot open s3://K:{SECRET}@bucket/a"})
    service.launcher.put(failed, LaunchState.FAILED)
    service.turn(2)
    assert f"cannot open s3://{HIDDEN}@bucket/a" in service.job(failed)["reason"]
    assert SECRET not in service.client.get(f"/v1/jobs/{failed}/metrics").text


KEY = f"-----BEGIN PRIVATE KEY-----\nMII{SECRET}a\n{SECRET}b\n-----END PRIVATE KEY-----"
LOG = f"begin\nopen s3://KEY:{SECRET}@bucket/a\npassword={SECRET} tokens=4096\nend of it, \u00e9\n{KEY}\n" * 3


@pytest.mark.few(2)
@pytest.mark.parametrize("limit", [7, 16, 50, 1000])
def test_a_log_is_read_without_its_secrets_in_parts_of_any_size_and_from_any_place(limit: int, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    read = partial(read_part, tmp_path / "log")
    size = (tmp_path / "log").stat().st_size
    shown = LOG.replace(f"KEY:{SECRET}", HIDDEN).replace(KEY, HIDDEN).replace(SECRET, HIDDEN)
    for start in range(0, size, 3):
        text, offset = "", start
        while (chunk := without_secrets(read, offset, limit)).next_offset > offset:
            text, offset = text + chunk.text, chunk.next_offset
        assert offset == size
        assert SECRET not in text
        assert shown.endswith(text) or HIDDEN in text
    parts, offset = "", 0
    while (chunk := without_secrets(read, offset, limit)).next_offset > offset:
        parts, offset = parts + chunk.text, chunk.next_offset
    assert parts == shown


def test_a_refusal_names_no_secret_that_stands_where_a_name_belongs(service: Service) -> None:
    token = "hf_" + "a1B2" * 5
    refused = service.client.post("/v1/jobs", json={**spec(), token: 1})
    assert refused.status_code == 422
    assert [problem["path"] for problem in refused.json()["problems"]] == [HIDDEN]
    assert token not in refused.text
    missing = service.client.get(f"/v1/nothing/{token}")
    assert missing.status_code == 404
    assert token not in missing.text


def test_a_line_of_the_audit_fits_whatever_the_method_is_called(service: Service) -> None:
    """PostgreSQL takes no longer one, and the line would be in the log alone."""
    assert service.client.request("Z" * 100, "/v1/nothing", headers=service.person("vera", "viewer")).status_code == 404
    [line] = service.client.get("/v1/audit", params={"who": "vera"}).json()["lines"]
    assert line["what"] == "Z" * 64


def test_the_audit_has_no_token_that_was_given_for_a_name(service: Service) -> None:
    token = "twp_" + "a1" * 20
    service.client.delete(f"/v1/tokens/{token}")
    assert token not in service.client.get("/v1/audit").text
