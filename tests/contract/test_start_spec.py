"""What a job begins with, in its file: one of three, and no secret in it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from thinwire.contract.spec import ScriptSpec, TrainSpec, read_spec

TRAIN = {"steps": 2, "global_batch": 4, "optimizer": {"name": "adam"}}
SCRIPT = {"recipe": {"name": "script", "entry": "train.py", "working_dir": "/srv/code"}}


@pytest.mark.parametrize("job", [TRAIN, SCRIPT])
@pytest.mark.parametrize(
    "start",
    [
        {"weights": "/shared/model.safetensors"},
        {"weights": "s3://bucket/model.safetensors"},
        {"job": "a-3f"},
        {"job": "a-3f", "step": 0, "what": "weights"},
        {"checkpoints": "abfs://container@account.dfs.core.windows.net/a", "what": "everything"},
        {"job": "a-3f", "checkpoints": "/shared/a-3f", "step": 10},
    ],
)
def test_a_start_survives_json(job: dict[str, Any], start: dict[str, Any]) -> None:
    made = read_spec({**job, "start": start})
    assert isinstance(made, TrainSpec | ScriptSpec)
    assert made.start is not None
    assert made.start.model_dump(exclude_unset=True) == start
    assert made.start.only_weights == ("weights" in start or start.get("what") == "weights")
    assert read_spec(made.model_dump(mode="json")) == made


def test_without_one_a_job_begins_afresh() -> None:
    assert read_spec(TRAIN).start is None


@pytest.mark.parametrize(
    ("start", "path", "words"),
    [
        ({}, "start", "a file, {weights: /a/model.safetensors}, or a checkpoint, {job: ID}"),
        ({"step": 3}, "start", "or a checkpoint"),
        ({"weights": "/a", "job": "a-3f"}, "start.job", "left out with start.weights"),
        ({"weights": "/a", "checkpoints": "/b"}, "start.checkpoints", "left out with start.weights"),
        ({"weights": "/a", "step": 3}, "start.step", "left out with start.weights"),
        ({"weights": "/a", "what": "weights"}, "start.what", "left out with start.weights"),
        ({"weights": "model.safetensors"}, "start.weights", "an absolute path, or a URL"),
        ({"checkpoints": "runs/a"}, "start.checkpoints", "an absolute path, or a URL"),
        ({"checkpoints": "memory://a"}, "start.checkpoints", "no other sees"),
        ({"weights": "/a\0b"}, "start.weights", "without control characters"),
        ({"weights": "s3:/bucket/m"}, "start.weights", "two slashes behind the colon, such as s3://bucket"),
        ({"weights": "s3://AKIAX:verysecret@bucket/m"}, "start.weights", "without credentials"),
    ],
)
def test_what_cannot_stand_together_is_refused_with_its_path(start: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        read_spec({**TRAIN, "start": start})
    ((problem,),) = [error["ctx"]["problems"] for error in caught.value.errors()]
    assert problem["path"] == path
    assert words in problem["allowed"]
    assert "verysecret" not in str(problem)


@pytest.mark.parametrize("secret", ["AKIAX:verysecret@bucket/m", "AKIAX:very/secret+@bucket/m"])
def test_a_store_of_checkpoints_names_no_credentials_either(secret: str) -> None:
    with pytest.raises(ValidationError) as caught:
        read_spec({**TRAIN, "checkpoint": {"store": f"s3://{secret}"}})
    ((problem,),) = [error["ctx"]["problems"] for error in caught.value.errors()]
    assert (problem["path"], problem["value"]) == ("checkpoint.store", "s3://***@bucket/m")
    read_spec({**TRAIN, "checkpoint": {"store": "sftp://me@host/a"}})


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (" ", "without blanks"),
        ("/a ", "without blanks"),
        (" s3://bucket/a", "without blanks"),
        ("/a\nb", "control characters"),
        ("runs/a", "an absolute path, or a URL"),
        ("file:", "such as file:///a/folder"),
        ("file:/a", "such as file:///a/folder"),
        ("file://", "file:///a/folder"),
        ("file://a/b", "three slashes: file:///a/folder"),
        ("s3:/bucket/a", "such as s3://bucket/folder"),
        ("S3://bucket/a", "a scheme in lower case"),
        ("://bucket/a", "a scheme in lower case"),
        ("s3://", "a URL with a bucket: s3://bucket/folder"),
        ("s3:///a", "a URL with a bucket"),
        ("gs://?x=1", "a URL with a bucket"),
        ("hdfs:///", "a URL that says where"),
    ],
)
def test_a_store_that_can_be_none_is_refused_with_the_reason(store: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        read_spec({**TRAIN, "checkpoint": {"store": store}})
    ((problem,),) = [error["ctx"]["problems"] for error in caught.value.errors()]
    assert (problem["path"], problem["value"]) == ("checkpoint.store", store)
    assert words in problem["allowed"]


@pytest.mark.parametrize(
    "store",
    ["/", "/a b", "file:///a", "s3://bucket", "hdfs:///a", "simplecache::s3://bucket/a", "s3://bucket/a?region=eu-1"],
)
def test_other_stores_are_taken(store: str) -> None:
    assert read_spec({**TRAIN, "checkpoint": {"store": store}}).checkpoint.store == store
