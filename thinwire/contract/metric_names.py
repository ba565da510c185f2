"""The metrics that every worker exports: name, unit, labels and help, declared once. Torch-free.

docs/operations.md lists them, which a test asks for, and `workers.telemetry.reporter` fills them. What adding one takes
is in docs/adding.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from thinwire.contract.reports import MOST_REPORTED, StepPart

PHASES = ("warmup", "compressed", "dense")
"""`dense` is the one phase of an optimizer that never compresses."""


STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)
"""Of the wall time of a step, which they add up to. `wire`: the exchange, as far as the step waits for it, also where
nobody is late. `slowest`: what this worker waits longer than the one that came last."""

LINKS = ("inside_box", "between_boxes")

MOST_SCRAPED = 32
"""Workers of a job that the service names to Prometheus (service.jobs.worker_reports): rank 0 and the first others.
So the number of a job's series has a bound that no number of workers changes."""
SERIES_OF_TARGET = 5
"""What Prometheus itself keeps of each target: up, scrape_duration_seconds, scrape_samples_scraped, ..."""


class Scope(StrEnum):
    """Who exports a metric: every worker, or the one alone that leads (rank 0), as it is the same on all."""

    WORKER = "worker"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of METRICS. `labels` come after job_id and rank, which every worker metric has.

    series: the most that one worker has of it, one for each value of its labels.

    rank: the worker's place in the job, its slot, where workers are replaced one by one (contract.reports).
    """

    name: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    series: int = 1
    scope: Scope = Scope.WORKER

    @property
    def kind(self) -> Literal["counter", "gauge"]:
        """The Prometheus type, which the name says."""
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("thinwire_phase", "", "1 for the phase the worker is in, 0 for the others", ("phase",), 3),
        Metric(
            "thinwire_compression_ratio",
            "ratio",
            "Payload bytes of an fp32 ring all-reduce over those sent, in the last step that sent something",
        ),
        Metric(
            "thinwire_rounds_skipped_total",
            "steps",
            "Steps in which this worker had peers and sent them nothing",
        ),
        Metric("thinwire_samples_total", "samples", "Training windows this worker has consumed"),
        Metric("thinwire_samples_per_second", "samples/s", "Global training throughput, all workers"),
        Metric("thinwire_step_seconds", "seconds", "Wall time of the last step"),
        Metric(
            "thinwire_step_part_seconds_total",
            "seconds",
            "Wall time of this worker's committed steps by part; on CPUs alone",
            ("part",),
            len(STEP_PARTS),
        ),
        Metric(
            "thinwire_committed_step_seconds_total",
            "seconds",
            "Wall time of the steps that were committed while this worker was there: its rate is the goodput",
        ),
        Metric(
            "thinwire_predicted_step_seconds",
            "seconds",
            "What the last step should have taken on the network as measured when the run began",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_last_ratio",
            "ratio",
            "Share of the last 200 steps in which the others waited for this worker",
        ),
        Metric(
            "thinwire_exchange_wait_seconds",
            "seconds",
            "Mean time that this worker waited for its exchange, in the last 200 steps",
        ),
        Metric(
            "thinwire_wire_bytes_total",
            "bytes",
            "Payload bytes this worker has sent, counted by the transport",
            ("purpose",),
            4,
        ),
        Metric(
            "thinwire_link_bytes_total",
            "bytes",
            "Payload bytes this worker has sent over this class of link, by the ledger",
            ("link",),
            len(LINKS),
        ),
        Metric(
            "thinwire_wire_counted_bytes_total",
            "bytes",
            "Bytes of frames that the interface THINWIRE_WIRE_INTERFACE of this worker's box has sent, by its counters",
        ),
        Metric(
            "thinwire_wire_predicted_bytes_total",
            "bytes",
            "Bytes of frames that the workers of this box have sent to other boxes, by the ledger, headers included",
        ),
        Metric(
            "thinwire_wire_unexplained_ratio",
            "ratio",
            "Difference of the counted and the predicted bytes of frames, without its sign, over the counted ones",
        ),
        Metric(
            "thinwire_slowest_ratio",
            "ratio",
            "The largest thinwire_last_ratio of all workers, also of those that are not scraped",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_slowest_worker",
            "",
            "The worker whose ratio that is, as the label rank would name it",
            scope=Scope.JOB,
        ),
        Metric("thinwire_world_size", "workers", "Workers in the communication group"),
        Metric(
            "thinwire_generation",
            "",
            "Number of the set of workers that trains now; that of a later set is larger",
        ),
        Metric("thinwire_regroups_total", "", "Changes of workers that this one has gone through"),
        Metric("thinwire_regroup_seconds", "seconds", "From the last change's begin to going on"),
        Metric(
            "thinwire_error_lost_norm",
            "",
            "Estimated 2-norm of the error memory that was lost with dead workers in the last change; 0 if planned",
        ),
        Metric(
            "thinwire_steps_given_up_total",
            "steps",
            "Steps that some worker had committed and that were run again, in the changes of workers of this one",
        ),
        Metric(
            "thinwire_waits_for_membership",
            "",
            "1 while this worker may commit no step, as the membership of its job was not heard of for 45 s, else 0",
        ),
        Metric(
            "thinwire_checkpoint_age_seconds",
            "seconds",
            "Since the last checkpoint became whole, or since this worker began to save",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_checkpoint_interval_steps",
            "steps",
            "Steps from one checkpoint to the next; absent where a job saves none by itself",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_loss",
            "nats",
            "Training loss of the last step, mean over the global batch",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_validation_loss",
            "nats",
            "Validation loss, last time it was taken",
            scope=Scope.JOB,
        ),
        Metric("thinwire_step", "steps", "Optimizer steps committed"),
        Metric(
            "thinwire_reported",
            "",
            "What a script has last reported by this name, mean over the global batch",
            ("name",),
            MOST_REPORTED,
            Scope.JOB,
        ),
        Metric(
            "thinwire_error_to_momentum_ratio",
            "ratio",
            "2-norm of what compression has left out so far over that of what one exchange gives",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_sign_density_ratio",
            "ratio",
            "Cosine between what was last compressed and its signs: 1 if all sizes are equal, 0.8 for Gaussian values",
            ("side",),
            2,
            Scope.JOB,
        ),
        Metric(
            "thinwire_max_step_ratio",
            "ratio",
            "Largest step of an element over the learning rate, before trust coefficients",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_variance_ratio",
            "ratio",
            "Change of the variance over the window of the automatic warm-up, which ends after 5 values above 0.96",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_floored_elements",
            "elements",
            "Elements whose variance the floor raised when it was frozen",
            scope=Scope.JOB,
        ),
        Metric(
            "thinwire_lamb_coefficient_ratio",
            "ratio",
            "Average trust coefficient of LAMB, over the tensors of the model",
            ("statistic",),
            3,
            Scope.JOB,
        ),
    )
}


def most_series(workers: int) -> int:
    """Series of a job of so many workers in Prometheus, at most; from MOST_SCRAPED workers on always the same."""
    of_worker = sum(metric.series for metric in METRICS.values() if metric.scope is Scope.WORKER)
    of_job = sum(metric.series for metric in METRICS.values() if metric.scope is Scope.JOB)
    return min(workers, MOST_SCRAPED) * (of_worker + SERIES_OF_TARGET) + of_job
