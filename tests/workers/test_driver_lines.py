"""What Ray hands a driver of its workers' output: one object a line, whatever a script prints."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from thinwire.contract.logs import as_line, iso
from thinwire.workers import driver_lines
from thinwire.workers.driver_lines import DriverLines

JOB = {"job_id": "mine", "attempt": 2}


def printed(*batches: dict[str, Any]) -> list[dict[str, Any]]:
    out = io.StringIO()
    lines = DriverLines(JOB, out)
    for batch in batches:
        lines(batch)
    assert out.getvalue().isascii()
    return [json.loads(line, parse_constant=pytest.fail) for line in out.getvalue().splitlines()]


def of(pid: int, *lines: str, **more: Any) -> dict[str, Any]:
    return {"pid": pid, "ip": "10.0.0.2", "lines": list(lines), "is_err": False, "actor_name": "ElasticWorker", **more}


def logged(**fields: Any) -> str:
    return as_line({"time": iso(1.0), "level": "INFO", "logger": "thinwire.workers.worker", **fields})


def test_a_line_of_a_log_goes_on_as_it_is_and_what_is_printed_has_the_rank_of_its_process() -> None:
    line = logged(job_id="mine", rank=1, event="worker_started")
    before, log, after, other, error = printed(
        of(7, "before", line, "after"),
        of(8, "of another"),
        of(7, "gloo says", is_err=True),
    )
    assert log == json.loads(line)
    assert (before["message"], before["rank"], before["logger"]) == ("before", None, "stdout")
    assert (after["rank"], after["pid"], after["node"], after["process"]) == (1, 7, "10.0.0.2", "ElasticWorker")
    assert other["rank"] is None
    assert (error["rank"], error["level"], error["logger"]) == (1, "WARNING", "stderr")
    assert {one["job_id"] for one in (before, log, after, other, error)} == {"mine"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        '{"time": "',
        '{"time": "x"}',
        '{"time": "x", "level": 1, "logger": ' + "[" * 100_000,
        '{"time": "1", "level": NaN, "logger": "x", "job_id": "mine", "a\ud800": -Infinity}',
        '{"time": "\ud800", "level": "I", "logger": "x", "job_id": "mine"}',
        "\x1b[31mred\x07\r\x00",
        "\ud800 half",
        "password=hunter2",
        "x" * 1_000_000,
    ],
    ids=range(11),
)
def test_whatever_a_script_prints_is_one_object(line: str) -> None:
    (found,) = printed(of(1, line))
    assert {"time", "level", "logger", "job_id"} <= found.keys()
    assert "hunter2" not in json.dumps(found)


def test_what_a_script_prints_in_the_name_of_another_job_is_of_its_own() -> None:
    (found,) = printed(of(1, logged(job_id="theirs", attempt=9, event="job_failed", rank=[1])))
    assert (found["job_id"], found["attempt"]) == ("mine", 2)


def test_it_takes_the_place_of_rays_own() -> None:
    ray = pytest.importorskip("ray._private.ray_logging")
    dispatcher = ray.global_worker_stdstream_dispatcher
    before, theirs = dispatcher.handlers, list[Any]()
    dispatcher.handlers = [(driver_lines.HANDLER, theirs.append)]
    try:
        out = io.StringIO()
        DriverLines(JOB, out).take_over()
        dispatcher.emit(of(1, "a line"))
        assert theirs == []
        assert json.loads(out.getvalue())["message"] == "a line"
    finally:
        dispatcher.handlers = before
