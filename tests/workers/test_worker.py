"""How a worker's end is told: in words, whole or not at all, the first cause standing."""

import io
import json
import logging
import sys
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from ray._private.utils import Unbuffered

from thinwire.contract.places import Room, uses_gpus
from thinwire.contract.reports import Failure
from thinwire.contract.spec import TrainSpec, Workers
from thinwire.workers import main as driver
from thinwire.workers.elastic.failures import JobFailed
from thinwire.workers.run_place import Place
from thinwire.workers.telemetry.reporter import RunSuperseded
from thinwire.workers.worker import failure_of, train_worker


def test_a_worker_can_print_an_error_that_names_a_file_whose_name_is_no_utf8(tmp_path, monkeypatch):
    Place(tmp_path).fail(Failure(kind="A", message="the worker ends as soon as it has begun"))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", Unbuffered(io.TextIOWrapper(written, encoding="utf-8")))  # as Ray does it
    monkeypatch.setattr(logging.root, "handlers", [])
    assert train_worker({"run_dir": str(tmp_path), "attempt": 1}) is None
    logging.getLogger("x").error("failed", exc_info=FileNotFoundError("t\udce9.txt"))
    assert b"FileNotFoundError: t\\udce9.txt" in written.getvalue()


def test_a_spec_error_is_told_by_its_field():
    with pytest.raises(ValidationError) as raised:
        TrainSpec.model_validate({"steps": 0, "global_batch": 1, "optimizer": {"name": "adam"}})
    assert failure_of(raised.value).message == "steps: Input should be greater than or equal to 1 (got 0)"


def test_a_driver_whose_job_file_is_bad_ends_with_the_reason(tmp_path):
    job = {"job_id": "j", "name": "j", "created_at": 0.0, "spec": {"steps": 0}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert driver.main(["--run-dir", str(tmp_path)]) == 1
    assert "steps" in Failure.model_validate_json((tmp_path / "failure.json").read_text()).message


def test_lost_workers_are_told_without_a_stack():
    class Lost(Exception):
        worker_failures = {1: SimpleNamespace(__str__=lambda self: "x")}  # noqa: RUF012

    Lost.worker_failures = {1: RuntimeError("Traceback ...\n  File x\nActorDiedError: the worker died")}
    failure = driver._in_short(Lost())
    assert failure.message.endswith("Last: rank 1: ActorDiedError: the worker died")
    assert "Traceback" not in failure.message


def test_an_error_of_the_jobs_is_told_in_its_own_words(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from ray.train import ControllerError

    failure = driver._in_short(ControllerError(JobFailed("DataError", "cannot read /x", 7)))
    assert (failure.kind, failure.message, failure.step) == ("DataError", "cannot read /x", 7)


@pytest.mark.parametrize("elastic", ["in_place", "restart"])
def test_an_attempt_that_was_superseded_leaves_no_failure_to_the_newer_one(tmp_path, monkeypatch, elastic):
    pytest.importorskip("ray")
    from ray.train import ControllerError, WorkerGroupError
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    def superseded(*_):
        error = RunSuperseded("the service runs a newer attempt")
        if elastic == "restart":
            raise WorkerGroupError("one failed", {1: UserExceptionWithTraceback(error, "Traceback ...")})
        raise ControllerError(JobFailed(type(error).__name__, str(error), 7))

    spec = {"steps": 8, "global_batch": 2, "optimizer": {"name": "adam", "lr": 1e-3}}
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "j", "created_at": 0.0, "spec": spec}))
    monkeypatch.setattr(driver, "fit", superseded)
    assert driver.main(["--run-dir", str(tmp_path)]) == driver.NO_REASON
    assert not (tmp_path / "failure.json").exists()


def test_gpus_are_used_where_there_are_enough_and_missed_with_a_reason():
    assert uses_gpus(Workers(min=2, max=2), 2)
    assert not uses_gpus(Workers(min=2, max=2), 1)
    assert not uses_gpus(Workers(device="cpu"), 8)
    with pytest.raises(ValueError, match=r"workers.min = 2 must be at most 1 with workers.device = gpu"):
        driver._refuse_too_many(Workers(min=2, max=2, device="gpu"), Room(cpus=8, gpus=1))
    with pytest.raises(ValueError, match=r"workers.device = gpu must be cpu or auto: the cluster has no GPU"):
        driver._refuse_too_many(Workers(device="gpu"), Room(cpus=8, gpus=0))


def test_a_job_that_the_cluster_can_never_start_is_told_so():
    driver._refuse_too_many(Workers(min=8, max=20), Room(cpus=8, gpus=0))
    with pytest.raises(ValueError, match=r"workers.min = 9 must be at most 8: .*the cluster has 8; lower"):
        driver._refuse_too_many(Workers(min=9, max=9), Room(cpus=8, gpus=0))


def test_a_run_that_ends_without_its_summary_has_not_succeeded(tmp_path, monkeypatch):
    spec = {"steps": 8, "global_batch": 2, "optimizer": {"name": "adam", "lr": 1e-3}}
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "j", "created_at": 0.0, "spec": spec}))
    monkeypatch.setattr(driver, "fit", lambda *_: None)
    assert driver.main(["--run-dir", str(tmp_path)]) == driver.NO_REASON
    assert not (tmp_path / "failure.json").exists()  # so that the service tries again
    (tmp_path / "summary.json").write_text("{}")
    assert driver.main(["--run-dir", str(tmp_path)]) == 0
