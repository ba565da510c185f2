"""The run folder of a job: which file is where. The service writes it before it submits; the workers read and write it.

job.json       {"job_id", "name", "created_at": unix seconds, "spec": {...}}    written by the service, mode 0600
               and {"log_format": "json"} with logs of JSON, {"otlp_endpoint", "traceparent"} with traces
workers.json   a WantedWorkers: the limits that hold now, where job.json has those of the submission; mode 0600
token          the job's token, mode 0600; in no argument, environment variable, Ray metadata or log
service_url    where the service listens now; rewritten when the service starts again
service_ca     the certificates that it is trusted by, where they are not those of every machine; rewritten likewise
checkpoints/   written by the workers
script/        what a script keeps that draws no batch of the session: its own checkpoints
buckets.json   the size of buckets that the run keeps, written by rank 0 at its first start
history.jsonl  one Sample a line, written by rank 0
events.jsonl   one Event a line, written by rank 0, and by the driver while the job waits for workers
summary.json   a Summary, written by rank 0 at the end of a run that succeeded
tensorboard/   event files of TensorBoard, by rank 0, unless the job says otherwise
wandb/         offline runs of Weights & Biases, by rank 0, where the job asks for them
loss.png       loss and cumulative bytes over steps
failure.json   a Failure, written where a run ends for a reason that no restart can mend
logs/          of each attempt, what its driver has written: attempt-1.log; by the service, where a cluster of its own
               has no folder in common with it
ray/           what Ray Train keeps of the run

Where service and workers share no folder each process has one of its own, with what it was given and what it has
written itself; what they have to know of each other goes through the service (contract/remote_run.py).
"""

from __future__ import annotations

from pathlib import Path


class RunFolder:
    """The folder at `path`; it need not exist yet. Each attribute is the path of a file that may not exist either."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.json"
        self.workers = path / "workers.json"
        self.token = path / "token"
        self.service_url = path / "service_url"
        self.service_ca = path / "service_ca"
        self.checkpoints = path / "checkpoints"
        self.script = path / "script"
        self.buckets = path / "buckets.json"
        self.history = path / "history.jsonl"
        self.events = path / "events.jsonl"
        self.summary = path / "summary.json"
        self.picture = path / "loss.png"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"
        self.failure = path / "failure.json"
        self.logs = path / "logs"
        self.ray = path / "ray"

    def log_of(self, attempt: int) -> Path:
        """What the driver of this attempt, elsewhere, has sent of its log."""
        return self.logs / f"attempt-{attempt}.log"


def checkpoints_in(store: str, job_id: str) -> str:
    """Where a job's checkpoints are in its checkpoint.store: below that folder, or that URL's path.

    What a URL says after its path is for the client that opens it, as s3://bucket/a?endpoint_override=10.0.0.9:9000.
    """
    path, mark, settings = store.partition("?") if "://" in store else (store, "", "")
    return f"{path.rstrip('/')}/{job_id}{mark}{settings}"
