"""Where a job's figures may go."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from thinwire.contract.spec import read_spec
from thinwire.workers.signature import MAY_DIFFER

BASE = {"steps": 10, "global_batch": 2, "optimizer": {"name": "adam"}}


@pytest.mark.parametrize(
    "uri", ["http://10.0.0.9:5000", "https://mlflow.example/of/a/team", "http://[::1]:5000", "http://host"]
)
def test_a_tracking_server_has_an_address(uri: str) -> None:
    spec = read_spec({**BASE, "tracking": {"mlflow": {"uri": uri, "experiment": "a team's runs"}}})
    assert spec.tracking.mlflow is not None
    assert spec.tracking.mlflow.uri == uri


@pytest.mark.parametrize(
    ("tracking", "words"),
    [
        ({"mlflow": {"uri": "ftp://h"}}, "address of a tracking server"),
        ({"mlflow": {"uri": "http://"}}, "address of a tracking server"),
        ({"mlflow": {"uri": "http://h:99999"}}, "address of a tracking server"),
        ({"mlflow": {"uri": "http://h/a?x=1"}}, "address of a tracking server"),
        ({"mlflow": {"uri": "http://h/\x1b"}}, "address of a tracking server"),
        ({"mlflow": {"uri": "file:///etc"}}, "address of a tracking server"),
        ({"mlflow": {"uri": "http://[h"}}, "address of a tracking server"),
        ({"mlflow": {"uri": "http://me:hunter2@h"}}, "without credentials"),
        ({"mlflow": {"experiment": "a/../b"}}, "String should match pattern"),
        ({"mlflow": {"experiment": " a"}}, "String should match pattern"),
        ({"mlflow": {"experiment": "a\n"}}, "String should match pattern"),
        ({"mlflow": {"token": "x"}}, "Extra inputs"),
        ({"wandb": {"mode": "shared"}}, "Input should be"),
        ({"wandb": {"api_key": "x"}}, "Extra inputs"),
        ({"tensorboard": None}, "valid boolean"),
    ],
)
def test_what_is_refused_says_why_and_shows_no_secret(tracking: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as refused:
        read_spec({**BASE, "tracking": tracking})
    assert "hunter2" not in str(refused.value.errors()[0].get("ctx", ""))


def test_workers_of_one_run_may_be_tracked_differently() -> None:
    assert MAY_DIFFER["tracking"] is True
