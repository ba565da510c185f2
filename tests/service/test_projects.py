"""Projects: who has one sees, changes and learns nothing of another, whichever route is asked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Depends
from sqlalchemy.exc import OperationalError

from tests.service.control_plane_harness import STORE, Service, sample, spec
from tests.service.test_packages_api import BYTES, put, sha, zipped
from thinwire.contract.people import EXPIRES_HEADER
from thinwire.contract.places import Room
from thinwire.contract.projects import Limits, ProjectSettings, Used
from thinwire.service.auth import person
from thinwire.service.jobs.hub import Hub
from thinwire.service.launch.protocol import LaunchState

DAY_S = 86_400.0
NOBODYS = "nobodys-000000"


class Two:
    """A service with two projects. What belongs to `theirs` has the word zebra in it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        for name in ("zebra", "mine", "calm"):
            assert service.client.post("/v1/projects", json={"name": name}).status_code == 201
        self.them = service.person("zebra-anna", project="zebra")
        self.me = service.person("bert", "operator", project="mine")
        self.calm = service.person("carla", "operator", project="calm")  # who asks for nothing by its name
        answer = service.client.post("/v1/jobs", json=spec(name="zebra", labels={"of": "zebra"}), headers=self.them)
        self.their_job = str(answer.json()["id"])
        service.turn()
        service.launcher.put(self.their_job, LaunchState.RUNNING)
        service.turn()
        service.post(
            self.their_job,
            samples=[sample(1)],
            events=[{"kind": "checkpoint_saved", "step": 1, "time": 1.0, "fields": {"path": "zebra"}}],
        )
        service.register(self.their_job, 0)
        data = zipped({"train.py": b"print('zebra')\n"})
        self.their_package = sha(data)
        self.their_zip = data
        assert (
            service.client.put(f"/v1/packages/{sha(data)}", content=data, headers={**BYTES, **self.them}).status_code
            == 201
        )

    def ask(self, method: str, path: str, headers: dict[str, str], **more: Any) -> tuple[int, str]:
        """Status and text, without what is of each request alone."""
        answer = self.service.client.request(method, path, headers=headers, **more)
        return answer.status_code, re.sub(r'"request_id":"[^"]*"', "", answer.text)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    started = Service(tmp_path_factory.mktemp("two") / "home", changes_burst=10_000)
    yield Two(started)
    started.close()


BODIES: dict[str, Any] = {
    "/v1/jobs": spec(),
    "/v1/jobs:validate": spec(),
    "/v1/tokens": {"name": "new"},
    "/v1/projects": {"name": "new"},
}
REST = {"rank": "0", "folder": "step-1", "file": "manifest.json"}


def operations(service: Service) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in service.client.get("/openapi.json").json()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_of_what_is_anothers_every_route_says_what_it_says_of_nothing(two: Two) -> None:
    asked = 0
    for method, path, operation in operations(two.service):
        if not {"job_id", "sha256"} & set(re.findall(r"{(\w+)}", path)):
            continue
        files = {"name": "summary.json"}
        query = {one["name"]: 1 for one in operation.get("parameters", ()) if one["in"] == "query" and one["required"]}
        told = []
        for job_id, sha256 in ((two.their_job, two.their_package), (NOBODYS, "0" * 64)):
            url = path.format(**REST, **files, job_id=job_id, sha256=sha256)
            more: dict[str, Any] = {"json": BODIES.get(path, {})} if method in ("POST", "PATCH") else {}
            status, text = two.ask(method, url, two.me, params=query, **more)
            told.append((status, text.replace(job_id, "ID").replace(sha256, "ID")))
        assert told[0] == told[1], (method, path)
        assert told[0][0] in ({403, 404} if "job_id" in path else {404, 415}), (method, path, told[0])
        asked += 1
    assert asked >= 20
    assert two.service.state(two.their_job) == "RUNNING"


def test_no_list_stream_or_metric_names_what_is_anothers(two: Two) -> None:
    asked = 0
    for method, path, operation in operations(two.service):
        if method != "GET" or "{" in path or path in ("/", "/docs", "/readyz", "/healthz"):
            continue
        follow = {one["name"] for one in operation.get("parameters", ())} & {"follow"}
        query: dict[str, Any] = {"follow": "false", "after": "0"} if follow else {}
        status, text = two.ask(method, path, two.calm, params=query)
        assert status in (200, 403), (path, text)
        assert "zebra" not in text, path
        assert two.their_package not in text, path
        if {one["name"] for one in operation.get("parameters", ())} & {"project"}:
            foreign, nobodys = (two.ask(method, path, two.me, params={**query, "project": p}) for p in ("zebra", "no"))
            assert foreign[0] == 404, path
            assert foreign[1].replace("zebra", "no") == nobodys[1], path
            assert "zebra" in two.ask(method, path, two.them, params=query)[1] or path in (
                "/v1/metrics/targets",
                "/v1/audit",
                "/v1/tokens",
                "/v1/packages",
            ), path
        asked += 1
    assert asked >= 8
    for path in ("/v1/audit", "/v1/tokens", "/v1/metrics/targets"):  # they are there, for who may see them
        assert "zebra" in two.service.client.get(path).text, path
    assert two.their_package in two.service.client.get("/v1/packages", headers=two.them).text


def test_a_route_that_asks_for_no_project_is_refused_to_whoever_has_one(two: Two) -> None:
    router = APIRouter(dependencies=[Depends(person)])

    @router.get("/v1/forgotten")
    def forgotten() -> dict[str, str]:
        return {"all": "secrets"}

    two.service.app.include_router(router)
    try:
        status, text = two.ask("GET", "/v1/forgotten", two.me)
        assert (status, "for the project mine" in text) == (403, True)
        assert two.service.client.get("/v1/forgotten").status_code == 200
    finally:
        two.service.app.router.routes.pop()


def test_nobody_begins_with_what_is_anothers(two: Two) -> None:
    client, place = two.service.client, two.service.run_dir(two.their_job) / "checkpoints"

    def refused(**changes: Any) -> str:
        answer = client.post("/v1/jobs", json=spec(**changes), headers=two.me)
        assert answer.status_code == 422, answer.text
        return str(answer.json()["problems"][0]["message"])

    assert refused(start={"job": two.their_job}) == refused(start={"job": NOBODYS})
    for path in (str(place), f"file://{place}", str(place / ".." / "checkpoints")):
        assert "must be the place of a job here" in refused(start={"checkpoints": path})
    recipe = {"name": "script", "entry": "train.py", "package": two.their_package}
    body = {"name": "s", "recipe": recipe}
    answer = client.post("/v1/jobs", json=body, headers=two.me)
    assert "keeps no package of this hash" in answer.json()["problems"][0]["message"]
    # A hash is not enough to have it: it has to be sent, and is then there for both.
    sent = client.put(f"/v1/packages/{two.their_package}", content=b"", headers={**BYTES, **two.me})
    assert sent.status_code == 422, sent.text
    sent = client.put(f"/v1/packages/{two.their_package}", content=two.their_zip, headers={**BYTES, **two.me})
    assert sent.status_code == 201
    assert client.post("/v1/jobs", json=body, headers=two.me).status_code == 202
    assert client.get(f"/v1/packages/{two.their_package}", headers=two.them).status_code == 200


@pytest.mark.parametrize("store", ["file", "s3://bucket/all"])
def test_nobody_begins_with_what_anothers_job_saves_in_a_store(two: Two, tmp_path: Path, store: str) -> None:
    client, place = two.service.client, str(tmp_path / "all") if store == "file" else store
    body = spec(name="zebra", checkpoint={"store": place})
    job_id = client.post("/v1/jobs", json=body, headers=two.them).json()["id"]
    saved = f"{place}/{job_id}/step-00000010-000000000001"
    if store == "file":
        Path(saved).mkdir(parents=True)
        (Path(saved) / "manifest.json").write_text("{}")
        (tmp_path / "link").symlink_to(tmp_path / "all")
        ways = (f"{place}/{job_id}", f"file://{place}//{job_id}/", f"{tmp_path}/link/{job_id}/.")
        ways += (f"simplecache::file://{place}/{job_id}", f"simplecache::file://{two.service.run_dir(two.their_job)}")
        copy = f"{tmp_path}/copies/{job_id}"
    else:
        ways = (f"{place}/{job_id}", f"s3a://bucket//all/{job_id}/?region=x", f"simplecache::{place}/./{job_id}")
        copy = f"s3://other/{job_id}"

    def told(start: dict[str, str], who: dict[str, str]) -> str:
        answer = client.post("/v1/jobs:validate", json=spec(start=start), headers=who)
        return "" if answer.status_code == 200 else str(answer.json()["problems"][0]["message"])

    for way in ways:
        assert "must be the place of a job here" in told({"checkpoints": way}, two.me), way
        assert "must be the place of a job here" in told({"weights": f"{way}/model.safetensors"}, two.me), way
    assert "must be the place of a job here" not in told({"checkpoints": ways[0]}, two.them)
    assert "must be the place of a job here" not in told({"checkpoints": copy}, two.me)


def test_a_stream_of_all_jobs_is_of_the_projects(two: Two) -> None:
    async def given() -> tuple[list[str], list[str]]:
        hub = Hub(two.service.plane.db)
        async with hub.joined(None, "mine") as mine, hub.joined(None) as of_all:
            answer = two.service.client.post("/v1/jobs", json=spec(name="zebra"), headers=two.them)
            assert answer.status_code == 202
            own = two.service.client.post("/v1/jobs", json=spec(name="own"), headers=two.me).json()["id"]
            told: tuple[list[str], list[str]] = ([], [])
            while own not in told[0] or own not in told[1]:
                for reader, names in zip((mine, of_all), told, strict=True):
                    names += [one.job_id for one in await reader.take(0.1)]
            return told

    mine, of_all = asyncio.run(given())
    assert not [name for name in mine if name.startswith("zebra")]
    assert [name for name in of_all if name.startswith("zebra")]


def test_a_key_that_was_used_in_another_project_makes_another_job(service: Service) -> None:
    service.client.post("/v1/projects", json={"name": "vision"})
    anna = service.person("anna")
    key = {"Idempotency-Key": "one"}
    first = service.client.post("/v1/jobs", json=spec(), headers={**anna, **key}).json()
    moved = service.client.patch("/v1/tokens/anna", json={"project": "vision"})
    assert (moved.status_code, moved.json()["project"]) == (200, "vision")
    assert service.client.get(f"/v1/jobs/{first['id']}", headers=anna).status_code == 404  # from the next request on
    second = service.client.post("/v1/jobs", json=spec(), headers={**anna, **key}).json()
    assert (first["project"], second["project"]) == ("default", "vision")
    again = service.client.post("/v1/jobs", json=spec(), headers={**anna, **key}).json()
    assert again["id"] == second["id"]
    assert [one["about"] for one in service.client.get("/v1/audit").json()["lines"] if one["what"] == "move_token"] == [
        "anna comes",
        "anna leaves",
    ]


def test_a_projects_audit_has_what_those_of_all_projects_do_in_it_and_names_no_other(two: Two) -> None:
    client, service = two.service.client, two.service
    service.person("moving", project="mine")
    job_id = str(client.post("/v1/jobs", json=spec(), headers=two.me).json()["id"])
    data = zipped({"train.py": b"print('mine')\n"})
    put = client.put(f"/v1/packages/{sha(data)}?project=mine", content=data, headers=BYTES)
    assert put.status_code == 201, put.text
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 409
    assert client.patch("/v1/projects/mine", json={"weight": 0}).status_code == 422
    assert client.patch("/v1/tokens/moving", json={"project": "zebra"}).status_code == 200
    assert client.patch("/v1/tokens/moving", json={"project": "mine"}).status_code == 200
    assert client.delete("/v1/tokens/moving").status_code == 204
    lines = client.get("/v1/audit?who=operator", headers=two.me).json()["lines"]
    assert [(one["what"], one["status"]) for one in lines][:6] == [
        ("revoke_token", 204),
        ("move_token", 200),
        ("move_token", 200),
        ("change_project", 422),
        ("delete", 409),
        ("put_package", 201),
    ]
    assert "zebra" not in str(lines)


def test_a_project_is_not_held_by_a_token_that_has_expired(service: Service) -> None:
    service.client.post("/v1/projects", json={"name": "brief"})
    service.person("anna", project="brief", days=1.0)
    assert service.client.delete("/v1/projects/brief").status_code == 409
    service.clock.pass_(DAY_S + 1)
    assert service.client.delete("/v1/projects/brief").status_code == 204


def test_a_job_that_is_over_is_no_matter_of_quotas(service: Service) -> None:
    anna = limited(service, limits={"workers": 2})
    job_id = str(service.client.post("/v1/jobs", json=spec(), headers=anna).json()["id"])
    service.client.post(f"/v1/jobs/{job_id}/cancel", headers=anna)
    answer = service.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"max": 8}}, headers=anna)
    assert (answer.status_code, answer.json()["code"]) == (409, "job_over")


def test_a_job_that_would_take_gpus_with_a_smaller_minimum_is_held_to_their_quota(service: Service) -> None:
    service.launcher.has_room = Room(cpus=8, gpus=2)
    service.turn()
    anna = limited(service, limits={"gpus": 0})
    body = spec(workers={"min": 4, "max": 4}, global_batch=64)
    job_id = str(service.client.post("/v1/jobs", json=body, headers=anna).json()["id"])
    answer = service.client.patch(f"/v1/jobs/{job_id}", json={"workers": {"min": 2}}, headers=anna)
    assert "uses 0 of 0 gpus, and this asks for 4 more" in answer.text


def test_a_project_with_anything_in_it_stays(service: Service) -> None:
    client = service.client
    assert client.delete("/v1/projects/default").status_code == 409
    assert client.delete("/v1/projects/none").status_code == 404
    client.post("/v1/projects", json={"name": "vision"})
    assert client.post("/v1/projects", json={"name": "vision"}).json()["code"] == "project_exists"
    anna = service.person("anna", project="vision")
    job_id = str(client.post("/v1/jobs", json=spec(), headers=anna).json()["id"])
    answer = client.delete("/v1/projects/vision")
    assert (answer.status_code, "1 jobs, 1 tokens and no packages" in answer.json()["message"]) == (409, True)
    assert client.get(f"/v1/jobs/{job_id}", headers=anna).status_code == 200
    client.post(f"/v1/jobs/{job_id}/cancel")
    service.turn(3)
    assert client.delete(f"/v1/jobs/{job_id}").status_code == 204
    client.delete("/v1/tokens/anna")
    assert client.delete("/v1/projects/vision").status_code == 204
    for path, body in (("/v1/jobs?project=vision", spec()), ("/v1/tokens", {"name": "c", "project": "vision"})):
        assert client.post(path, json=body).json()["code"] == "project_not_found"
    # Who takes the name has nothing of what was under it.
    service.clock.pass_(1.0)
    client.post("/v1/projects", json={"name": "vision"})
    eve = service.person("eve", "operator", project="vision")
    lines = client.get("/v1/audit", headers=eve).json()["lines"]
    assert [(line["what"], line["about"]) for line in lines] == [
        ("create_token", "eve:operator"),
        ("create_project", "vision"),
    ]
    assert [one["name"] for one in client.get("/v1/tokens", headers=eve).json()["tokens"]] == ["eve"]
    assert {"submit", "delete_project"} <= {line["what"] for line in client.get("/v1/audit").json()["lines"]}


def test_who_is_of_a_project_makes_no_token_beyond_it(two: Two) -> None:
    for wanted in ("zebra", "*", "no"):
        status, text = two.ask("POST", "/v1/tokens", two.me, json={"name": "eve", "project": wanted})
        assert (status, "project_not_found" in text) == (404, True)
    status, _ = two.ask("PATCH", "/v1/tokens/bert", two.me, json={"project": "*"})
    assert status == 403
    assert two.ask("DELETE", "/v1/tokens/zebra-anna", two.me)[0] == 404
    made = two.service.client.post("/v1/tokens", json={"name": "carl", "role": "operator"}, headers=two.me).json()
    assert made["project"] == "mine"
    whole = two.service.client.post("/v1/tokens", json={"name": "dora", "role": "operator"}).json()
    assert whole["project"] == "*"


def test_a_token_says_before_it_ends_that_it_will(service: Service) -> None:
    anna = service.person("anna", days=10.0)
    assert EXPIRES_HEADER not in service.client.get("/v1/jobs", headers=anna).headers
    service.clock.pass_(4 * DAY_S)
    answer = service.client.get("/v1/jobs", headers=anna)
    assert answer.headers[EXPIRES_HEADER] == "2027-01-25T08:00:00+00:00"
    assert service.client.get("/v1/session", headers=anna).json()["token_expires_at"] == "2027-01-25T08:00:00Z"
    assert EXPIRES_HEADER not in service.client.get("/v1/jobs").headers  # the operator's own has no end
    line = 'thinwire_service_token_expires_at_seconds{project="default",token="anna"} 1.800864e+09'
    assert line in service.client.get("/metrics").text
    signed_in = service.client.post("/v1/session", headers=anna)
    cookie = {"Cookie": signed_in.headers["set-cookie"].partition(";")[0], "Authorization": ""}
    plain = {name: value for name, value in cookie.items() if name == "Cookie"}
    with service.client as client:
        client.headers.pop("Authorization")
        assert client.get("/v1/jobs", headers=plain).status_code == 200
        service.clock.pass_(6 * DAY_S + 1)
        for headers in (plain, anna):
            answer = client.get("/v1/jobs", headers=headers)
            assert (answer.status_code, "run out" in answer.text or "expired on" in answer.text) == (401, True)


def limited(service: Service, **limits: Any) -> dict[str, str]:
    service.client.post("/v1/projects", json={"name": "vision"})
    answer = service.client.patch("/v1/projects/vision", json=limits)
    assert answer.status_code == 200, answer.text
    return service.person("anna", project="vision")


def test_a_quota_refuses_before_anything_is_made_and_says_what_is_used(service: Service) -> None:
    anna = limited(service, limits={"workers": 6, "queued_jobs": 2}, person_limits={"gpus": 3})
    ask = service.client.post

    def workers(count: int, **more: Any) -> dict[str, Any]:
        return spec(workers={"min": 1, "max": count, **more}, global_batch=64)

    first = str(ask("/v1/jobs", json=workers(4), headers=anna).json()["id"])
    answer = ask("/v1/jobs", json=workers(3), headers=anna)
    assert (answer.status_code, answer.json()["code"]) == (409, "quota_reached")
    assert "project vision uses 4 of 6 workers, and this asks for 3 more: ask for fewer" in answer.json()["message"]
    assert ask("/v1/jobs:validate", json=workers(3), headers=anna).json()["code"] == "quota_reached"
    script = {"name": "script", "entry": "train.py", "working_dir": "/x"}
    boxes = {"recipe": script, "workers": {"min": 1, "max": 2, "per_box": 2, "device": "gpu"}}
    answer = ask("/v1/jobs", json=boxes, headers=anna)
    assert "asks for 4 more" in answer.json()["message"]  # processes, not boxes
    service.client.patch("/v1/projects/vision", json={"limits": {"workers": None}})
    answer = ask("/v1/jobs", json=boxes, headers=anna)
    assert "anna in project vision uses 0 of 3 gpus, and this asks for 4 more" in answer.json()["message"]
    service.client.patch("/v1/projects/vision", json={"limits": {"workers": 6}})
    resized = service.client.patch(f"/v1/jobs/{first}", json={"workers": {"max": 7}}, headers=anna)
    assert resized.json()["code"] == "quota_reached"
    assert service.job(first)["wanted_workers"]["max"] == 4
    assert service.client.patch(f"/v1/jobs/{first}", json={"workers": {"max": 2}}, headers=anna).status_code == 200
    # Lowered below what is used: what there is goes on, and may shrink.
    lower = service.client.patch("/v1/projects/vision", json={"limits": {"workers": 1}})
    assert lower.json()["limits"] == {**Limits().model_dump(), "workers": 1, "queued_jobs": 2}
    service.turn()
    service.launcher.put(first, LaunchState.RUNNING)
    service.turn()
    assert service.state(first) == "RUNNING"
    assert service.client.patch(f"/v1/jobs/{first}", json={"workers": {"max": 1}}, headers=anna).status_code == 200
    quotas = service.client.get("/v1/quotas", headers=anna).json()["quotas"]
    assert [(one["project"], one["person"], one["used"]["running_jobs"]) for one in quotas][:2] == [
        ("vision", None, 1),
        ("vision", "anna", 1),
    ]
    assert (
        'thinwire_service_quota_limit{project="vision",resource="workers"} 1.0' in service.client.get("/metrics").text
    )


def test_a_job_that_running_jobs_lets_wait_says_so_and_what_is_used(service: Service) -> None:
    anna = limited(service, limits={"running_jobs": 2}, person_limits={"running_jobs": 1})
    bert = service.person("bert", project="vision")
    reasons = [service.client.post("/v1/jobs", json=spec(), headers=who).json()["reason"] for who in (anna, anna, bert)]
    assert reasons == [
        None,
        "anna in project vision has 0 of 1 running_jobs, and 1 more wait: it starts when it is its turn",
        "project vision has 0 of 2 running_jobs, and 2 more wait: it starts when it is its turn",
    ]
    service.turn()
    waiting = service.client.post("/v1/jobs", json=spec(), headers=bert).json()
    assert waiting["reason"].startswith("project vision has 2 of 2 running_jobs")
    service.client.patch(
        "/v1/projects/vision", json={"limits": {"running_jobs": None}, "person_limits": {"running_jobs": None}}
    )
    service.turn(2)
    assert service.job(waiting["id"])["reason"] is None


def test_nobody_keeps_or_reads_in_the_folder_of_anothers_job(two: Two, tmp_path: Path) -> None:
    theirs = two.service.run_dir(two.their_job)
    link = tmp_path / "link"
    link.symlink_to(theirs / "checkpoints")
    script = {"recipe": {"name": "script", "entry": "train.py", "working_dir": f"{link}/.."}, "steps": 1}
    for changes, path in (
        (spec(checkpoint={"store": str(link)}), "checkpoint.store"),
        (spec(checkpoint={"store": f"file://{theirs}/../{two.their_job}/x"}), "checkpoint.store"),
        (script, "recipe.working_dir"),
        (spec(data={"source": "text-file", "path": str(theirs / "job.json")}), "data.path"),
        (spec(data={"source": "text-file", "path": str(theirs.parent / NOBODYS / "job.json")}), "data.path"),
    ):
        answer = two.service.client.post("/v1/jobs:validate", json=changes, headers=two.me)
        problem = answer.json()["problems"][0]
        assert (problem["path"], "must not be in the folder of a job" in problem["message"]) == (path, True), problem
        assert "zebra" not in problem["message"]
    assert two.service.client.post("/v1/jobs:validate", json=spec(checkpoint={"store": str(link)})).status_code == 422
    twice = [("Thinwire-Project", "mine"), ("Thinwire-Project", "calm"), *two.me.items()]
    assert "given twice" in two.service.client.get("/v1/jobs", headers=twice).text
    mine = two.service.client.post(
        "/v1/jobs:validate", json=spec(checkpoint={"store": str(link)}), headers=two.them
    )  # their own
    assert mine.status_code == 200, mine.text


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    """A service on each kind of database."""
    url = request.getfixturevalue("new_database")() if request.param == "postgresql" else None
    started = Service(tmp_path / "home", database_url=url)
    yield started
    started.close()


def test_of_submissions_at_once_as_many_pass_as_may(either: Service) -> None:
    service = either
    anna = limited(service, limits={"queued_jobs": 3})
    assert service.client.get("/v1/jobs/a%00b", headers=anna).status_code in (404, 422)

    def submit(index: int) -> int:
        return int(service.client.post("/v1/jobs", json=spec(), headers=anna).status_code)

    with ThreadPoolExecutor(8) as pool:
        statuses = sorted(pool.map(submit, range(8)))
    assert statuses == [202] * 3 + [409] * 5
    job_ids = [one["id"] for one in service.client.get("/v1/jobs", headers=anna).json()["jobs"]]
    service.client.patch("/v1/projects/vision", json={"limits": {"workers": 8}})

    def grow(job_id: str) -> int:
        body = {"workers": {"max": 4}}
        return int(service.client.patch(f"/v1/jobs/{job_id}", json=body, headers=anna).status_code)

    with ThreadPoolExecutor(3) as pool:  # of 2 workers each: one may have two more, and no other
        assert sorted(pool.map(grow, job_ids)) == [200, 409, 409]


def test_packages_and_what_is_kept_are_held_to_the_quota(service: Service) -> None:
    data = zipped()
    anna = limited(service, limits={"package_bytes": len(data) + 10, "kept_bytes": 2000})
    headers = {**BYTES, **anna}
    assert service.client.put(f"/v1/packages/{sha(data)}", content=data, headers=headers).status_code == 201
    other = zipped({"train.py": b"print(2)\n"})
    answer = service.client.put(f"/v1/packages/{sha(other)}", content=other, headers=headers)
    assert (answer.status_code, "package_bytes" in answer.text) == (409, True)
    assert put(service, other).status_code == 201  # of another project
    job_id = str(service.client.post("/v1/jobs", json=spec(), headers=anna).json()["id"])
    events = [{"kind": "note", "step": 1, "time": float(n), "fields": {"x": "y" * 300}} for n in range(9)]
    assert service.post(job_id, events=events).status_code == 204
    assert service.post(job_id, events=[{"kind": "note", "step": 2, "time": 1.0}]).status_code == 413
    answer = service.client.post("/v1/jobs", json=spec(), headers=anna)
    assert (answer.status_code, "kept_bytes" in answer.text) == (409, True)


def test_a_project_names_the_priorities_and_queues_of_its_jobs(far: Service) -> None:
    far.launcher.name = "kuberay"
    anna = limited(far, priorities=["low", "normal"], kueue_queues=["team-a"], kueue_priorities=["batch"])
    queue = {"kueue": {"queue": "team-a"}}

    def status(**changes: Any) -> tuple[int, str]:
        answer = far.client.post("/v1/jobs", json=spec(**STORE, **changes), headers=anna)
        return answer.status_code, answer.json().get("problems", [{"path": ""}])[0]["path"] if answer.is_error else ""

    assert status(**queue) == (202, "")
    assert status(**queue, priority="low") == (202, "")
    assert status(**queue, priority="high") == (422, "priority")
    assert status(**queue, priority=1) == (422, "priority")
    assert status() == (422, "kueue.queue")
    assert status(kueue={"queue": "team-b"}) == (422, "kueue.queue")
    assert status(kueue={"queue": "team-a", "priority": "top"}) == (422, "kueue.priority")
    assert status(kueue={"queue": "team-a", "priority": "batch"}) == (202, "")
    assert far.client.post("/v1/jobs", json=spec(**STORE, priority="urgent"), headers=anna).status_code == 422


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": 0},
        {"weight": -1.0},
        {"weight": "2"},
        {"weight": 1e300},
        {"limits": {"workers": -1}},
        {"limits": {"workers": 1.5}},
        {"limits": {"workers": True}},
        {"limits": {"gpu": 1}},
        {"limits": 3},
        {"priorities": []},
        {"priorities": ["urgent"]},
        {"kueue_queues": ["A B"]},
        {"name": "other"},
        {"limits": {"workers": 10**30}},
    ],
)
def test_what_cannot_be_said_of_a_project_changes_nothing(two: Two, changes: dict[str, Any]) -> None:
    before = two.service.client.get("/v1/projects", params={"project": "mine"}).json()
    answer = two.service.client.patch("/v1/projects/mine", json=changes)
    assert answer.status_code == 422, answer.text
    assert answer.json()["problems"][0]["path"].split(".")[0] == next(iter(changes))
    assert two.service.client.get("/v1/projects", params={"project": "mine"}).json() == before


def test_limits_and_what_is_used_are_of_the_same_things() -> None:
    assert Limits.model_fields.keys() == Used.model_fields.keys()
    assert ProjectSettings().limits == Limits()


def test_a_database_that_is_gone_while_it_is_asked_lets_nobody_in(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise OperationalError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(two.service.plane.projects, "refuse_foreign", gone)
    assert two.ask("GET", f"/v1/jobs/{two.their_job}", two.me)[0] == 503
    assert two.ask("GET", f"/v1/jobs/{two.their_job}", two.them)[0] == 503


def test_a_service_without_a_word_of_projects_is_as_it_was(service: Service, tmp_path: Path) -> None:
    job_id = service.submit(**STORE)
    assert service.job(job_id)["project"] == "default"
    anna = service.person("anna", "viewer")
    assert service.client.get(f"/v1/jobs/{job_id}", headers=anna).status_code == 200
    assert [one["name"] for one in service.client.get("/v1/projects", headers=anna).json()["projects"]] == ["default"]
