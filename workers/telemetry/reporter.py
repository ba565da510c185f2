"""What one rank says of its run: every rank its metrics, rank 0 samples and events too, which sinks take.

    RunFiles   history.jsonl and events.jsonl of the run folder (history.py)
    Poster     the service, through outages of it (delivery.py)

A run that nobody watches (a test, a benchmark, a loop under torchrun) has a reporter without sinks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from pydantic import JsonValue

from thinwire.contract.reports import Event, EventKind, Failure, Sample
from thinwire.contract.summary import Summary
from thinwire.workers.run_place import Place
from thinwire.workers.telemetry.delivery import Poster
from thinwire.workers.telemetry.exporter import WorkerMetrics
from thinwire.workers.telemetry.history import RunFiles
from thinwire.workers.telemetry.service_client import ServiceClient

if TYPE_CHECKING:
    import torch

    from thinwire.comm.protocol import Group

logger = logging.getLogger(__name__)

RECENT = 200
"""Samples that a worker remembers for the case that it becomes rank 0: many more than one can have kept to itself."""
DELIVER_S = 60.0
"""How long the end of a run waits for a service that does not answer."""


class RunSuperseded(Exception):
    """A newer attempt of this job writes the run folder now; this one must not."""


class Sink(Protocol):
    """Takes what a process says of the run. No call blocks for long but `complete` and `close`."""

    @property
    def superseded(self) -> bool:
        """Is it known that a newer attempt of the job is running?"""

    def begin(self, seen: Sequence[Sample]) -> None:
        """This worker is rank 0 from here on. seen: recent samples; the rank 0 before may not have told all of them."""

    def samples(self, samples: Sequence[Sample]) -> None:
        """New history, in order of step."""

    def forget_after(self, step: int) -> None:
        """History after this step is void, and comes again."""

    def event(self, event: Event) -> None:
        """Something that happened once."""

    def complete(self) -> None:
        """The run has come to its end, and its whole history is needed."""

    def close(
        self, summary: dict[str, JsonValue] | None = None, failure: Failure | None = None, timeout_s: float = 0.0
    ) -> object:
        """Deliver what is left, with the last word, and end; give up after `timeout_s`."""


class Reporter:
    """Where the training loop says what happened. Never blocks for long; no trouble of the service fails a run.

    metrics: of this worker, which is scraped where they are served.
    """

    def __init__(self, sinks: Sequence[Sink] = (), metrics: WorkerMetrics | None = None) -> None:
        self._sinks = sinks
        self.metrics = metrics or WorkerMetrics()
        self._client: ServiceClient | None = None
        self._leads = False
        self._recent: deque[Sample] = deque(maxlen=RECENT)

    @classmethod
    def in_place(cls, place: Place, number: int = 0, *, adopt_s: float = 0.0) -> Self:
        """What it says goes into the run folder, and to the service where the run has one.

        number: what this worker is called, for as long as it lives: its slot where ranks change.
        adopt_s: how long a later attempt may take to adopt this worker.
        """
        client = place.new_client(number, adopt_s) if place.has_service else None
        files = RunFiles(place.run_dir, place.others_history)
        reporter = cls([files] if client is None else [files, Poster(client, leave=place.leave_files)])
        reporter._client = client
        return reporter

    def serve(self, job_id: str, number: int, address: str) -> None:
        """Serve this worker's metrics on that network address, and register them with the service. Raises OSError."""
        self.metrics = WorkerMetrics(job_id, number)
        self.metrics.serve(address, self._client)

    @property
    def ranks_here(self) -> int:
        """Ranks that share this worker's box, itself included, as far as is known."""
        return self.metrics.ranks_here

    def seated(self, group: Group, device: torch.device) -> None:
        """This worker trains with these ranks from here on, and rank 0 speaks for all.

        Collective where metrics are served, which has to be so on all ranks or on none. Raises: PeerLost.
        """
        self.metrics.seated(group, device)
        if group.rank == 0 and not self._leads:
            self._leads = True
            for sink in self._sinks:
                sink.begin(list(self._recent))

    def went_back(self, step: int) -> None:
        """History after `step` comes again: a peer was lost that had told it, or had not yet."""
        while self._recent and self._recent[-1].step > step:
            self._recent.pop()
        if self._leads:
            for sink in self._sinks:
                sink.forget_after(step)

    def resumed(self, step: int) -> None:
        """The run goes on from `step`; later history is void, all of it where `step` is 0: a fresh start."""
        self.went_back(step or -1)
        if step:
            self.event(EventKind.RESUMED, step)

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """New history, this rank's training windows so far, and its bytes by purpose so far.

        Raises: RunSuperseded once the service has said so.
        """
        if any(sink.superseded for sink in self._sinks):
            raise RunSuperseded("the service runs a newer attempt of this job; this one ends without a word")
        if self._leads:
            for sink in self._sinks:
                sink.samples(samples)
        self._recent.extend(samples)
        self.metrics.take(samples, num_samples, sent_bytes)

    def whole(self) -> None:
        """The run has come to its end, and its history is needed. On rank 0; may take as long as the service does."""
        for sink in self._sinks:
            sink.complete()

    def regrouped(self, step: int, generation: int, seconds: float, lost_norm: float, **fields: JsonValue) -> None:
        """The run goes on with other ranks, after so long; lost_norm: what error memory has lost, about."""
        self.metrics.add("thinwire_regroups_total", 1)
        self.metrics.update(
            {
                "thinwire_generation": generation,
                "thinwire_regroup_seconds": seconds,
                "thinwire_error_lost_norm": lost_norm,
            }
        )
        fields = {"generation": generation, "seconds": seconds, "error_lost_norm": lost_norm, **fields}
        self.event(EventKind.REGROUPED, step, **fields)

    def gave_up(self, steps: int) -> None:
        """So many steps that some worker had committed are run again, in a change of ranks or a resume."""
        self.metrics.add("thinwire_steps_given_up_total", steps)

    def saves_every(self, steps: int) -> None:
        """So many steps lie between two checkpoints; 0: the job saves none by itself."""
        self.metrics.update({"thinwire_checkpoint_interval_steps": steps or None})

    def step_parts(self, seconds: Mapping[str, float]) -> None:
        """Of the steps that this worker has committed so far, by part (step_parts.py)."""
        self.metrics.by_label("thinwire_step_part_seconds_total", seconds)

    def waits(self, last_share: float | None, mean_s: float | None, slowest: tuple[int, float] | None = None) -> None:
        """Of the recent steps: the share in which this worker came last, and how long it waited; the worker with the
        largest share, and that. None: not known, as of other ranks."""
        worker, share = (None, None) if slowest is None else slowest
        self.metrics.update(
            {
                "thinwire_last_ratio": last_share,
                "thinwire_exchange_wait_seconds": mean_s,
                "thinwire_slowest_ratio": share,
                "thinwire_slowest_worker": worker,
            }
        )

    def waits_for_membership(self, step: int, *, waits: bool) -> None:
        """No step after this one may count before the membership is heard of again; or it was."""
        self.metrics.update({"thinwire_waits_for_membership": waits})
        if waits:
            self.event(EventKind.WAITING_FOR_MEMBERSHIP, step)

    def event(self, kind: EventKind, step: int, **fields: JsonValue) -> None:
        """Something that happened once, to all ranks: rank 0 says it."""
        if kind is EventKind.CHECKPOINT_SAVED:
            self.metrics.checkpoint_saved()
        if self._leads:
            self.publish(Event(kind=kind, step=step, time=time.time(), fields=fields))

    def publish(self, event: Event) -> None:
        """The same of what this process alone knows, whichever rank it is."""
        for sink in self._sinks:
            sink.event(event)

    def close(
        self, summary: Summary | None = None, failure: Failure | None = None, timeout_s: float = DELIVER_S
    ) -> None:
        """Deliver what is left, with the last word, and end; give up after `timeout_s`."""
        last_word = summary.as_json() if summary is not None else None
        for sink in self._sinks:
            sink.close(last_word if self._leads else None, failure if self._leads else None, timeout_s)
        self.metrics.close()
        if self._client is not None:
            self._client.close()
