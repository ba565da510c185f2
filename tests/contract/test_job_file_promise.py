"""docs/upgrades.md: a job file that an earlier version took is taken, and means the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from thinwire.contract.spec import read_spec

RECORD = Path(__file__).parents[1] / "data/job-files-0.1.0.yaml"
"""What version 0.1.0 had in examples/, and forms of before it, each with the defaults that it filled in."""


def differs(before: Any, now: Any, path: str = "") -> list[str]:
    """Where what was filled in then is not what is filled in now; what is new now is not looked at."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [one for key, value in before.items() for one in differs(value, now.get(key), f"{path}.{key}")]
    return [] if before == now else [f"{path}: {before!r} is {now!r}"]


def test_job_files_of_earlier_versions_are_read():
    recorded = yaml.safe_load(RECORD.read_text())
    assert len(recorded) >= 7
    for one in recorded:
        now = read_spec(one["file"]).model_dump(mode="json")
        assert differs(one["meant"], now) == [], one["file"]
    assert differs({"a": {"b": 1}}, {"a": {"b": 2}}) == [".a.b: 1 is 2"]
