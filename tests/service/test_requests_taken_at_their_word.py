"""A request means what it says: nothing misspelt is passed over, nothing given twice, no number that is no number."""

from __future__ import annotations

import re
from urllib.parse import urljoin, urlsplit

import pytest

from tests.service.control_plane_harness import Service, sample, spec
from thinwire.service.jobs.repository import JobRow, SampleRow


@pytest.mark.parametrize(
    ("query", "path", "words"),
    [
        ("most=3", "most", "no such query parameter; this takes limit, state, label"),
        ("limit=3&limit=4", "limit", "given 2 times"),
        ("text=a&text=b", "text", "given 2 times"),
    ],
)
def test_a_query_that_is_not_known_is_refused(shared_service: Service, query: str, path: str, words: str) -> None:
    answer = shared_service.client.get(f"/v1/jobs?{query}")
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"] == path
    assert words in answer.json()["problems"][0]["message"]


def test_no_route_passes_over_a_name_in_its_query(shared_service: Service) -> None:
    """Each that takes any looks at all of them: one that is misspelt or given twice is refused."""
    document = shared_service.client.get("/openapi.json").json()["paths"]
    asked = [
        path.format(job_id="none", name="none", sha256="0" * 64, rank=0, folder="a", file="b")
        for path, methods in document.items()
        if any(one["in"] == "query" for one in methods.get("get", {}).get("parameters", ()))
    ]
    assert len(asked) > 15
    for path in asked:
        answer = shared_service.client.get(f"{path}?misspelt=1")
        assert (answer.status_code, "there is no such query parameter" in answer.text) == (422, True), answer.text
    twice = shared_service.client.get("/metrics?project=default&project=none")
    assert (twice.status_code, "is given 2 times" in twice.text) == (422, True)


def test_a_query_that_is_a_list_may_repeat_its_name(service: Service) -> None:
    job = service.submit()
    answer = service.client.get(f"/v1/jobs/{job}/metrics?event_kind=job_submitting&event_kind=resumed")
    assert [event["kind"] for event in answer.json()["events"]] == ["job_submitting"]


def test_two_idempotency_keys_are_refused(service: Service) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b"), ("Content-Type", "application/json")]
    answer = service.client.post("/v1/jobs", json=spec(), headers=headers)
    assert answer.status_code == 422
    assert "given 2 times" in answer.json()["message"]
    assert service.client.get("/v1/jobs").json()["jobs"] == []


def test_allow_names_every_method_of_a_path(shared_service: Service) -> None:
    for path, methods in (("/v1/jobs", "GET, POST"), ("/v1/jobs/x", "DELETE, GET, PATCH"), ("/healthz", "GET")):
        answer = shared_service.client.request("PUT", path)
        assert (answer.status_code, answer.headers["Allow"]) == (405, methods)
        assert methods in answer.json()["message"]


def test_the_page_of_the_api_loads_nothing_from_elsewhere(shared_service: Service) -> None:
    client = shared_service.client
    page = client.get("/docs", headers={"Authorization": ""})
    assert page.status_code == 200
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert loaded
    for address in loaded:
        assert not urlsplit(address).netloc, address
        assert client.get(urljoin("/docs", address), headers={"Authorization": ""}).status_code == 200
    assert client.get("/docs/files/../../v1/jobs", headers={"Authorization": ""}).status_code in (401, 404)


def test_a_key_that_is_retried_after_an_upgrade_with_a_new_default_finds_its_job(service: Service) -> None:
    first = service.client.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": "k"})
    with service.plane.db.write() as session:  # as an older version would have written it
        row = session.get(JobRow, first.json()["id"])
        assert row is not None
        row.spec = {name: value for name, value in row.spec.items() if name != "bucket_elements"}
    again = service.client.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    other = service.client.post("/v1/jobs", json=spec(steps=101), headers={"Idempotency-Key": "k"})
    assert other.status_code == 409


def test_a_list_is_read_in_pages_and_says_little_of_each(service: Service) -> None:
    ids = []
    for _ in range(5):
        ids.append(service.submit())
        service.clock.pass_(0 if len(ids) == 2 else 1)  # two of one moment
    seen: list[str] = []
    before = ""
    while True:
        page = service.client.get(f"/v1/jobs?limit=2{before}").json()
        assert not {"spec", "summary"} & page["jobs"][0].keys()
        assert page["jobs"][0]["steps"] == 100
        seen += [job["id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    assert sorted(seen) == sorted(ids)
    assert len(set(seen)) == 5
    assert service.client.get("/v1/jobs?before=nosuch").json()["problems"][0]["path"] == "before"


def test_a_row_of_another_version_is_shown_as_such_and_spoils_no_other(service: Service) -> None:
    ours, theirs = service.running(), service.running()
    service.post(theirs, samples=[sample(3)])
    with service.plane.db.write() as session:
        row = session.get(JobRow, theirs)
        assert row is not None
        assert row.newest_sample is not None
        row.spec = {**row.spec, "colour": "red", "workers": {**row.spec["workers"], "spot": True}}
        row.newest_sample = {**row.newest_sample, "sample": {**row.newest_sample["sample"], "phase": "lukewarm"}}
        row.summary = {"text": "half \ud800 pair"}
    listed = {job["id"]: job for job in service.client.get("/v1/jobs").json()["jobs"]}
    assert listed[ours]["unreadable"] is None
    assert "lukewarm" in listed[theirs]["unreadable"] or "phase" in listed[theirs]["unreadable"]
    assert listed[theirs]["steps"] == 100
    shown = service.client.get(f"/v1/jobs/{theirs}").json()
    assert shown["spec"] is None
    assert "another version" in shown["unreadable"]
    assert shown["summary"] == {"text": "half ? pair"}


def test_a_history_is_read_in_pages_and_passes_over_what_it_cannot_read(service: Service) -> None:
    job = service.running()
    service.post(job, samples=[sample(step) for step in range(10)])
    with service.plane.db.write() as session:
        row = session.get(SampleRow, (job, 5))
        assert row is not None
        row.sample = {**row.sample, "phase": "lukewarm"}
    url = f"/v1/jobs/{job}/metrics"
    first = service.client.get(f"{url}?limit=4").json()
    assert ([one["step"] for one in first["samples"]], first["next_after_step"]) == ([0, 1, 2, 3], 3)
    second = service.client.get(f"{url}?limit=10&after_step=3").json()
    assert ([one["step"] for one in second["samples"]], second["unreadable"]) == ([4, 6, 7, 8, 9], 1)
    assert second["next_after_step"] is None
