"""422: what is wrong with a request, by field, with the value and what is allowed; and 413."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.covering import parametrize
from tests.service.control_plane_harness import Service, spec
from thinwire.contract.jobs import BODY_LIMIT_BYTES, ErrorBody
from thinwire.contract.spec import TextFile
from thinwire.service.bodies import TELEMETRY_LIMIT_BYTES
from thinwire.workers.data.corpus import DataError, load_corpus
from thinwire.workers.data.windows import Windows

ONEBIT = {"name": "onebit_adam"}
FIELDS = st.sampled_from(
    ["name", "source", "optimizer", "data", "workers", "min", "max", "warmup", "betas", "path", "lr"]
)

CASES: list[tuple[str, dict[str, Any], str, Any, str]] = [
    ("unknown field", {"stepz": 1}, "stepz", 1, "no such field; did you mean steps? Allowed here: name, seed, steps"),
    ("near to a field", {"globalbatch": 8}, "globalbatch", 8, "did you mean global_batch?"),
    (
        "near in a tagged union",
        {"optimizer": {**ONEBIT, "weightdecay": 1}},
        "optimizer.weightdecay",
        1,
        "weight_decay?",
    ),
    ("unknown nested", {"workers": {"count": 2}}, "workers.count", 2, "allowed here: min, max, device"),
    ("unknown in a tagged union", {"optimizer": {**ONEBIT, "foo": 1}}, "optimizer.foo", 1, "warmup"),
    ("wrong type", {"steps": "many"}, "steps", "many", "must be a whole number at least 1 and at most 1000000000"),
    (
        "below",
        {"workers": {"min": 0, "max": 1}},
        "workers.min",
        0,
        "must be a whole number at least 1 and at most 4096",
    ),
    (
        "in a tuple",
        {"optimizer": {**ONEBIT, "betas": [0.9, 2]}},
        "optimizer.betas.1",
        2,
        "must be a number above 0 and below 1",
    ),
    (
        "a union that has no tag",
        {"optimizer": {**ONEBIT, "warmup": 1.5}},
        "optimizer.warmup",
        1.5,
        "must be one of auto, or a whole number at least 1, or a number above 0 and below 1",
    ),
    ("the same, by text", {"lr_schedule": {"warmup": "x"}}, "lr_schedule.warmup", "x", "must be a whole number"),
    ("unknown tag", {"optimizer": {"name": "adamw"}}, "optimizer.name", "adamw", "one of adam, lamb, onebit_adam"),
    ("no tag", {"optimizer": {}}, "optimizer.name", None, "one of adam, lamb, onebit_adam"),
    ("unknown source", {"data": {"source": "s3"}}, "data.source", "s3", "one of digits, python-stdlib, text-file"),
    ("missing in a union", {"data": {"source": "text-file"}}, "data.path", None, "required: text that is not empty"),
    ("min above max", {"workers": {"min": 3, "max": 2}}, "workers.min", 3, "at most workers.max = 2"),
    ("warm-up past the end", {"optimizer": {**ONEBIT, "warmup": 100}}, "optimizer.warmup", 100, "fewer than steps"),
    ("batch too small", {"workers": {"max": 9}}, "global_batch", 8, "at least one sample a worker"),
    ("width and heads", {"recipe": {"width": 100, "heads": 6}}, "recipe.width", 100, "a multiple of recipe.heads"),
    (
        "bad name",
        {"name": "../x"},
        "name",
        "../x",
        "lower-case letters, digits, dots and dashes, beginning and ending with",
    ),
    ("a fraction", {"steps": 2.5}, "steps", 2.5, "must be a whole number at least 1 and at most 1000000000"),
    ("no mapping", {"workers": 3}, "workers", 3, "must be a mapping of fields, such as {min: 1, max: 1}"),
    ("no tagged mapping", {"optimizer": "adam"}, "optimizer", "adam", "must be a mapping of fields whose name is one"),
    ("unknown recipe", {"recipe": {"name": "t5"}}, "recipe.name", "t5", "must be one of bert, gpt, resnet"),
    ("unknown without a tag", {"recipe": {"depth": 3}}, "recipe.depth", 3, "Allowed here: name, layers, width, heads"),
    ("no recipe", {"recipe": "gpt"}, "recipe", "gpt", "must be a mapping of fields whose name is one of bert, gpt"),
    (
        "text for images",
        {"recipe": {"name": "resnet"}},
        "data.source",
        "python-stdlib",
        "must be digits with recipe.name = resnet; python-stdlib is the default",
    ),
    (
        "images for text",
        {"data": {"source": "digits"}},
        "data.source",
        "digits",
        "must be python-stdlib or text-file with recipe.name = gpt (the default)",
    ),
    ("one literal", {"precision": "float16"}, "precision", "float16", "must be one of float32, bfloat16"),
    ("literals", {"lr_schedule": {"decay": "x"}}, "lr_schedule.decay", "x", "must be one of cosine, constant"),
    ("elasticity", {"workers": {"elastic": "no"}}, "workers.elastic", "no", "must be one of in_place, restart"),
    ("no time to stop", {"workers": {"grace_s": 0}}, "workers.grace_s", 0, "must be a number above 0"),
    ("a short list", {"optimizer": {**ONEBIT, "betas": [0.9]}}, "optimizer.betas.1", None, "required: a number above"),
    (
        "no list",
        {"optimizer": {**ONEBIT, "betas": 3}},
        "optimizer.betas",
        3,
        "must be a list of 2: a number at least 0",
    ),
    ("against a default", {"workers": {"min": 2}}, "workers.min", 2, "must be at most workers.max = 1 (the default)"),
    ("a default against a field", {"recipe": {"heads": 5}}, "recipe.width", 192, "heads = 5; 192 is the default"),
    ("relative path", {"data": {"source": "text-file", "path": "a.txt"}}, "data.path", "a.txt", "absolute"),
    ("missing file", {"data": {"source": "text-file", "path": "/no/such"}}, "data.path", "/no/such", "no such file"),
    ("a folder", {"data": {"source": "text-file", "path": "/usr"}}, "data.path", "/usr", "regular file"),
    ("a relative store", {"checkpoint": {"store": "a/b"}}, "checkpoint.store", "a/b", "an absolute path, or a URL"),
    ("true for a number", {"workers": {"max": True}}, "workers.max", True, "must be a whole number"),
    ("a text for a number", {"workers": {"min": "1"}}, "workers.min", "1", "must be a whole number"),
    (
        "bfloat16 and boxes",
        {"optimizer": {**ONEBIT, "variance": "bf16"}, "topology": "node_first"},
        "topology",
        "node_first",
        "must be flat with optimizer.variance = bf16",
    ),
    (
        "8 bits and boxes",
        {"optimizer": {**ONEBIT, "full_exchange": "int8"}, "topology": "node_first"},
        "topology",
        "node_first",
        "must be flat or auto with optimizer.full_exchange = int8",
    ),
    (
        "a norm of before",
        {"optimizer": {**ONEBIT, "scale": "l1"}},
        "optimizer.scale",
        "l1",
        "must be l2, or left out: scales of another norm are gone",
    ),
    (
        "bfloat16 of another optimizer",
        {"optimizer": {"name": "onebit_lamb", "error_memory": "bf16"}},
        "optimizer.error_memory",
        "bf16",
        "there is no such field; allowed here: ",
    ),
    ("a device", {"data": {"source": "text-file", "path": "/dev/zero"}}, "data.path", "/dev/zero", "regular file"),
]


@pytest.mark.parametrize(("changes", "path", "value", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
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


SCRIPT = {"name": "script", "entry": "train.py", "working_dir": "/srv/code"}


@pytest.mark.parametrize(
    ("body", "path", "value", "words"),
    [
        ({"recipe": SCRIPT | {"env_vars": {"1A": "x"}}}, "recipe.env_vars.1A", "1A", "must have a name of letters"),
        ({"recipe": SCRIPT | {"args": [1]}}, "recipe.args.0", 1, "must be text of 0 to 32768 characters"),
        (
            {"recipe": SCRIPT | {"entry": "../x"}},
            "recipe.entry",
            "../x",
            "must be a path inside of the script's folder",
        ),
        ({"recipe": SCRIPT | {"secrets": {"A": {"value": "y"}}}}, "recipe.secrets.A.value", "y", "here: env, file"),
        ({"recipe": SCRIPT | {"pip": ["-r x"]}}, "recipe.pip.0", "-r x", "not an option of pip"),
        (
            {"recipe": SCRIPT | {"pip": ["a", "git+https://me:hidden@host/x"]}},
            "recipe.pip.1",
            "git+https://***@host/x",
            "in ~/.netrc or pip.conf",
        ),
        ({"recipe": SCRIPT | {"package": "x"}}, "recipe.package", "x", "the sha256 of a package"),
        ({"recipe": {"name": "script"}}, "recipe.entry", None, "this field is required"),
        ({"recipe": SCRIPT, "optimizer": {}}, "optimizer", {}, "the script makes its own optimizer"),
        ({"recipe": SCRIPT, "stepz": 1}, "stepz", 1, "Allowed here: name, seed, steps, global_batch, bucket_elements"),
        ({"recipe": SCRIPT, "steps": 0}, "steps", 0, "must be a whole number at least 1"),
    ],
)
def test_a_wrong_job_of_a_script_is_told_by_field(
    shared_service: Service, body: dict[str, Any], path: str, value: Any, words: str
) -> None:
    answer = shared_service.client.post("/v1/jobs", json=body)
    assert answer.status_code == 422, answer.text
    (problem,) = answer.json()["problems"]
    assert (problem["path"], problem["value"]) == (path, value)
    assert words in problem["message"]
    assert "is the default" not in problem["message"]  # all that is refused here was written


def test_a_recipe_of_another_name_is_told_all_names(shared_service: Service) -> None:
    (problem,) = shared_service.client.post("/v1/jobs", json=spec(recipe={"name": "t5"})).json()["problems"]
    assert problem["message"] == "must be one of bert, gpt, resnet, script"


def test_all_problems_are_told_at_once(service: Service) -> None:
    wrong = spec(steps=0, workers={"min": 0, "max": 0}, optimizer={**ONEBIT, "lr": -1, "x": 1})
    paths = {problem["path"] for problem in service.client.post("/v1/jobs", json=wrong).json()["problems"]}
    assert paths == {"steps", "workers.min", "workers.max", "optimizer.lr", "optimizer.x"}


def test_all_impossible_combinations_are_told_at_once(service: Service) -> None:
    wrong = spec(workers={"min": 3, "max": 2}, optimizer={**ONEBIT, "warmup": 100})
    paths = {problem["path"] for problem in service.client.post("/v1/jobs", json=wrong).json()["problems"]}
    assert paths == {"workers.min", "optimizer.warmup"}


def test_a_missing_required_field_says_what_it_wants(service: Service) -> None:
    body = spec()
    del body["steps"]
    (problem,) = service.client.post("/v1/jobs", json=body).json()["problems"]
    assert problem["path"] == "steps"
    assert problem["value"] is None
    assert problem["message"] == "this field is required: a whole number at least 1 and at most 1000000000"


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


@parametrize(
    ("media", "content"),
    [
        ("application/x-www-form-urlencoded", b'{"steps": 1}'),
        ("application/yaml", b"steps: 1"),
        ("text/plain", b"x"),
        (None, b"{}"),
    ],
    usual=[0],
)
def test_a_body_that_is_not_called_json_is_told_what_to_send(
    service: Service, media: str | None, content: bytes
) -> None:
    headers = {} if media is None else {"Content-Type": media}
    answer = service.client.post("/v1/jobs", content=content, headers=headers)
    assert answer.status_code == 415
    assert answer.json()["code"] == "unsupported_media_type"
    assert "send Content-Type: application/json" in answer.json()["message"]
    assert (media or "without a Content-Type") in answer.json()["message"]


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(FIELDS, JSON, max_size=6) | JSON)
def test_whatever_json_comes_is_answered_and_never_an_internal_error(service: Service, body: Any) -> None:
    headers = {"Content-Type": "application/json"}
    content = json.dumps({**spec(), **body} if isinstance(body, dict) else body)
    answer = service.client.post("/v1/jobs", content=content, headers=headers)
    assert answer.status_code in (202, 422), answer.text
    if answer.status_code == 422:
        problems = ErrorBody.model_validate(answer.json()).problems
        assert problems
        assert len({problem.path for problem in problems}) == len(problems)
