"""422: what is wrong with a request, by field, with the value and what is allowed; and 413."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, spec
from thinwire.contract.jobs import BODY_LIMIT_BYTES
from thinwire.contract.spec import TextFile
from thinwire.service.bodies import TELEMETRY_LIMIT_BYTES
from thinwire.workers.data.corpus import DataError, Windows, load_corpus

ONEBIT = {"name": "onebit_adam"}
NO_FILE = {"source": "text-file", "path": "/no/such"}


@pytest.mark.parametrize(
    ("changes", "path", "value", "words"),
    [
        ({"stepz": 1}, "stepz", 1, "no such field; did you mean steps?"),
        ({"workers": {"min": 3, "max": 2}}, "workers.min", 3, "at most workers.max = 2"),
        ({"data": NO_FILE}, "data.path", "/no/such", "no such file"),
        ({"data": NO_FILE | {"path": "a.txt"}}, "data.path", "a.txt", "absolute"),
        ({"data": NO_FILE | {"path": "/usr"}}, "data.path", "/usr", "regular file"),
        ({"data": NO_FILE | {"path": "/dev/zero"}}, "data.path", "/dev/zero", "regular file"),
    ],
)
def test_a_wrong_spec_is_told_by_field(
    shared_service: Service, changes: dict[str, Any], path: str, value: Any, words: str
) -> None:
    answer = shared_service.client.post("/v1/jobs", json=spec(**changes))
    assert answer.status_code == 422, answer.text
    body = answer.json()
    assert body["code"] == "invalid_request"
    assert [problem["path"] for problem in body["problems"]] == [path]
    assert body["problems"][0]["value"] == value
    assert words in body["problems"][0]["message"]
    assert path in body["message"]
    assert shared_service.client.get("/v1/jobs").json()["jobs"] == []
    assert not (shared_service.home / "runs").exists()


@parametrize(
    ("content", "words"),
    [
        (b"{", 'not JSON: Expecting property name enclosed in double quotes, at character 1"'),
        (b"", "a JSON body is required"),
        (b"[1]", "must be a mapping of fields, a JSON object"),
        (b"\xff", ""),
    ],
    usual=[0],
)
def test_a_body_that_is_no_spec_is_refused(service: Service, content: bytes, words: str) -> None:
    answer = service.client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert words in answer.text


def test_values_that_json_cannot_hold_are_shown_as_text(service: Service) -> None:
    content = b'{"steps": NaN, "global_batch": 8, "optimizer": {"name": "adam"}, "name": "A"}'
    answer = service.client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert {problem["path"] for problem in answer.json()["problems"]} == {"steps", "name"}


def test_what_is_not_finite_is_told_by_field(service: Service) -> None:
    content = b'{"steps": 8, "global_batch": 8, "optimizer": {"name": "adam", "lr": NaN}}'
    answer = service.client.post("/v1/jobs", content=content, headers={"Content-Type": "application/json"})
    (problem,) = answer.json()["problems"]
    assert problem == {"path": "optimizer.lr", "value": "nan", "message": "must be a finite number above 0"}


@parametrize("media", ["application/x-www-form-urlencoded", "text/plain", None], usual=[0, 2])
def test_a_body_that_is_not_called_as_its_route_wants_is_told_what_to_send(
    shared_service: Service, media: str | None
) -> None:
    """Over every route that takes a body: one that is added joins."""
    document = shared_service.client.get("/openapi.json").json()
    asked = 0
    for path, item in document["paths"].items():
        for method, operation in item.items():
            wants = next(iter(operation.get("requestBody", {}).get("content", ())), None)
            # Reports are the jobs' own, and read by their form alone; a claim takes a ticket first.
            if wants is None or path.endswith(("/claim", "/telemetry", "/workers/{rank}")):
                continue
            at = path.replace("{sha256}", "0" * 64).replace("{name}", "loss.png")
            query = {one["name"]: 1 for one in operation.get("parameters", ()) if one["in"] == "query"}
            headers = {} if media is None else {"Content-Type": media}
            answer = shared_service.client.request(method, at, params=query, content=b"x", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type"), (method, path)
            assert f"Content-Type: {wants}" in answer.json()["message"]
            assert (media or "without a Content-Type") in answer.json()["message"]
            asked += 1
    assert asked >= 5


@parametrize(
    "media", ["application/json; charset=utf-8", "Application/JSON", "application/merge-patch+json"], usual=[0]
)
def test_every_kind_of_json_is_taken(service: Service, media: str) -> None:
    content = json.dumps(spec()).encode()
    assert service.client.post("/v1/jobs", content=content, headers={"Content-Type": media}).status_code == 202


def test_a_long_value_is_not_sent_back_whole(service: Service) -> None:
    (problem,) = service.client.post("/v1/jobs", json=spec(name="x" * 10_000)).json()["problems"]
    assert len(problem["value"]) < 300


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/" + "x" * 5000])
def test_a_path_that_no_system_takes_is_refused(service: Service, path: str) -> None:
    answer = service.client.post("/v1/jobs", json=spec(data={"source": "text-file", "path": path}))
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["path"] == "data.path"


def test_an_empty_data_file_is_refused(service: Service, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    answer = service.client.post("/v1/jobs", json=spec(data={"source": "text-file", "path": str(empty)}))
    assert "empty" in answer.json()["problems"][0]["message"]


def test_a_data_file_that_is_too_short_for_the_context_is_refused_with_the_sizes(
    service: Service, tmp_path: Path
) -> None:
    text = tmp_path / "short.txt"
    text.write_bytes(b"x" * 1000)
    answer = service.client.post("/v1/jobs", json=spec(data={"source": "text-file", "path": str(text)}))
    (problem,) = answer.json()["problems"]
    assert problem["path"] == "data.path"
    for words in ("1000 bytes", "900 for training", "100 for validation", "at least 129", "recipe.context = 128"):
        assert words in problem["message"]


@parametrize("fraction", [0.05, 0.1, 0.5, 0.9], usual=[1])
@parametrize("size", [10, 17, 85, 170, 171], usual=[1, 3, 4])
def test_a_data_file_is_refused_exactly_where_the_workers_would(
    service: Service, tmp_path: Path, size: int, fraction: float
) -> None:
    context, text = 16, tmp_path / "text"
    text.write_bytes(b"x" * size)
    data = {"source": "text-file", "path": str(text), "validation_fraction": fraction}
    answer = service.client.post("/v1/jobs", json=spec(data=data, recipe={"context": context}))
    try:
        corpus = load_corpus(TextFile.model_validate(data))
        Windows(corpus, context)
        Windows(corpus, context, "validation")
    except DataError:
        assert answer.status_code == 422
    else:
        assert answer.status_code == 202


def test_query_parameters_are_told_by_name(service: Service) -> None:
    (problem,) = service.client.get("/v1/jobs/x/logs", params={"offset": "-1"}).json()["problems"]
    assert problem["path"] == "offset"


def test_a_body_above_the_limit_is_too_large(service: Service) -> None:
    answer = service.client.post("/v1/jobs", content=b" " * (BODY_LIMIT_BYTES + 1))
    assert answer.status_code == 413
    assert answer.json()["code"] == "body_too_large"
    assert str(BODY_LIMIT_BYTES) in answer.json()["message"]


def test_a_chunked_body_is_counted(service: Service) -> None:
    chunks = (b" " * 65536 for _ in range(BODY_LIMIT_BYTES // 65536 + 1))
    assert service.client.post("/v1/jobs", content=chunks).status_code == 413


def test_a_body_at_the_limit_is_read(service: Service) -> None:
    padding = b" " * (BODY_LIMIT_BYTES - 2)
    answer = service.client.post("/v1/jobs", content=b"{}" + padding, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


def test_telemetry_may_be_larger(service: Service) -> None:
    job_id = service.running()
    url, headers = f"/v1/jobs/{job_id}/telemetry", {**service.job_headers(job_id), "Content-Type": "application/json"}
    padding = b" " * (BODY_LIMIT_BYTES + 1)
    assert service.client.post(url, content=b'{"attempt": 1}' + padding, headers=headers).status_code == 204
    assert service.client.post(url, content=b" " * (TELEMETRY_LIMIT_BYTES + 1), headers=headers).status_code == 413
