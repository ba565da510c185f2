"""What each Ray Train worker runs: joins the process group that Ray Train made, trains, and says how it ended."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from thinwire.workers.reports import Failure
from thinwire.workers.spec import TrainSpec

logger = logging.getLogger(__name__)

FAILURE_NAME = "failure.json"


def train_worker(config: dict[str, Any]) -> None:
    """Ray Train's train function. config: run_dir, attempt.

    An error that no restart can mend is written to failure.json, posted, and ends this function normally, so that Ray
    does not start the group again. PeerLost is raised: the group starts again and goes on from the checkpoint.
    """
    import ray.train
    import ray.train.torch
    import ray.util

    from thinwire.comm import PeerLost, TorchGroup
    from thinwire.comm.link_classes import exchange_boxes
    from thinwire.workers import report
    from thinwire.workers.loop import Run, train
    from thinwire.workers.reporter import RunSuperseded, ServiceReporter
    from thinwire.workers.wire_meter import wire_meter

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run_dir = Path(config["run_dir"])
    if (run_dir / FAILURE_NAME).exists():  # a peer has failed for good while this rank saw only that it was gone
        return
    job = json.loads((run_dir / "job.json").read_text())
    group = TorchGroup()
    run = Run(run_dir, created_at=job["created_at"], attempt=config["attempt"])
    address = ray.util.get_node_ip_address()
    device = ray.train.torch.get_device()
    # On every rank, asked for or not: which nodes measure their wire is each node's own affair.
    wire = wire_meter(group.stats, exchange_boxes(group, device=device), group.rank)
    reporter = ServiceReporter(run_dir, job["job_id"], group.rank, run.attempt, address, wire)
    logger.info("worker_started rank=%d world_size=%d pid=%d", group.rank, group.size, os.getpid())
    try:
        summary = train(TrainSpec.model_validate(job["spec"]), run, group, device, reporter)
        if group.rank == 0:
            report.write_report(run_dir, summary)
        reporter.close(summary=summary or None)
    except (PeerLost, RunSuperseded):
        reporter.close(timeout_s=2.0)  # a restart must not wait for a service that is away too
        raise
    except Exception as error:
        logger.exception("training_failed rank=%d", group.rank)
        failure = failure_of(error)
        write_failure(run_dir, failure)
        reporter.close(failure=failure)


def failure_of(error: BaseException) -> Failure:
    """An error in words for the owner of the job."""
    if isinstance(error, ValidationError):
        text = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
    else:
        text = str(error) or type(error).__name__
    return Failure(kind=type(error).__name__, message=text[:4000])


def write_failure(run_dir: Path, failure: Failure) -> None:
    """Write failure.json, whole or not at all; the first one written stands. Raises: OSError."""
    partial = run_dir / f".{FAILURE_NAME}.{os.getpid()}"
    partial.write_text(failure.model_dump_json(indent=2) + "\n")
    try:
        os.link(partial, run_dir / FAILURE_NAME)
    except FileExistsError:
        logger.info("failure_already_told path=%s", run_dir / FAILURE_NAME)
    finally:
        partial.unlink()
