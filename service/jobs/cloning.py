"""A job again: the spec of one, with changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue, ValidationError

from thinwire.contract.merge_patch import merged
from thinwire.contract.redaction import redacted_json
from thinwire.contract.spec import ScriptSpec, TrainSpec, read_accepted, read_spec
from thinwire.service.errors import InvalidRequest
from thinwire.service.jobs.repository import JobRow
from thinwire.service.problems import problems_of_spec


def cloned(row: JobRow, changes: Mapping[str, JsonValue], *, mine: bool) -> TrainSpec | ScriptSpec:
    """The spec of a job with these changes. mine: the job's own person asks; else what is secret in it is hidden, and
    has to be among the changes. Raises InvalidRequest.
    """
    spec = row.spec if mine else redacted_json(row.spec)
    try:
        # Only what is no default: where the changes name another optimizer, defaults of the one before would be unknown
        # fields of it.
        written = read_accepted(spec).model_dump(mode="json", exclude_defaults=True)
    except ValidationError as error:
        first = problems_of_spec(error)[0]
        words = f"cannot be cloned: it was written by another version of thinwire ({first.path}: {first.message})"
        raise InvalidRequest.at("job_id", row.id, words) from error
    start: Any = written.get("start")
    if start and start.get("job"):
        start.pop("checkpoints", None)  # the service looks anew where they lie
    try:
        return read_spec(merged({**written, "labels": dict(row.labels)}, changes))
    except ValidationError as error:
        raise InvalidRequest.of(problems_of_spec(error)) from error
    except RecursionError as error:
        raise InvalidRequest.at("", None, "the changes are nested more deeply than any field of a job") from error
