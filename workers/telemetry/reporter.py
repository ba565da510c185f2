"""What one rank tells the world while it trains: every rank its metrics, rank 0 the history too.

A run without a service (a test, a benchmark, a loop under torchrun) uses `Silent`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import JsonValue

from thinwire.comm.wire.link_classes import exchange_boxes
from thinwire.contract.remote_run import KEPT_FILES, KeptFile
from thinwire.contract.reports import Event, EventKind, Failure, Sample
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.summary import Summary
from thinwire.workers.telemetry.delivery import Heartbeat, Poster, ServiceClient, ServiceError
from thinwire.workers.telemetry.exporter import WorkerMetrics
from thinwire.workers.telemetry.history import History, keep_event, read
from thinwire.workers.telemetry.link_bytes import LinkBytes
from thinwire.workers.telemetry.remote import RemoteRun
from thinwire.workers.telemetry.wire_meter import WireMeter, wire_meter

if TYPE_CHECKING:
    import torch

    from thinwire.comm.protocol import Group

logger = logging.getLogger(__name__)

RECENT = 200
"""Samples of which a worker remembers what it would have told: many more than a rank 0 can have untold."""
DELIVER_S = 60.0
"""How long the end of a run waits for a service that does not answer."""


class RunSuperseded(Exception):
    """A newer attempt of this job writes the run folder now; this one must not."""


class Reporter(Protocol):
    """Where the training loop says what happened. Never blocks for long; no trouble of the service fails a run.

    ranks_here: ranks that share this worker's box, itself included, as far as is known.
    """

    ranks_here: int

    def seated(self, group: Group, device: torch.device) -> None:
        """This worker trains with these ranks from here on. Collective. Raises: PeerLost."""

    def went_back(self, step: int) -> None:
        """History after `step` comes again: a peer was lost that had told it, or had not yet."""

    def resumed(self, step: int) -> None:
        """The run goes on from `step`; later history is void, all of it where `step` is 0: a fresh start."""

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """New history, this rank's training windows so far, and its bytes by purpose so far."""

    def whole(self) -> None:
        """The run has come to its end, and its history is needed. On rank 0; may take as long as the service does."""

    def regrouped(self, step: int, generation: int, seconds: float, lost_norm: float, **fields: JsonValue) -> None:
        """The run goes on with other ranks, after so long; lost_norm: what error memory has lost, about."""

    def gave_up(self, steps: int) -> None:
        """So many steps that some worker had committed are run again, in a change of ranks or a resume."""

    def saves_every(self, steps: int) -> None:
        """So many steps lie between two checkpoints; 0: the job saves none by itself."""

    def step_parts(self, seconds: Mapping[str, float]) -> None:
        """Of the steps that this worker has committed so far, by part (step_parts.py)."""

    def waits(self, last_share: float | None, mean_s: float | None, slowest: tuple[int, float] | None = None) -> None:
        """Of the recent steps: the share in which this worker came last, and how long it waited; the worker with the
        largest share, and that. None: not known."""

    def waits_for_membership(self, step: int, *, waits: bool) -> None:
        """No step after this one may count before the membership is heard of again; or it was."""

    def event(self, kind: EventKind, step: int, **fields: JsonValue) -> None:
        """Something that happened once."""

    def close(
        self,
        summary: Summary | None = None,
        failure: Failure | None = None,
        timeout_s: float = DELIVER_S,
    ) -> None:
        """Deliver what is left, with the last word, and end; give up after `timeout_s`."""


class Silent:
    """A reporter that keeps the samples and tells nobody."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.ranks_here = 1

    def seated(self, group: Group, device: torch.device) -> None:
        """Nothing."""

    def went_back(self, step: int) -> None:
        """As resumed."""
        self.samples = [sample for sample in self.samples if sample.step <= step]

    def resumed(self, step: int) -> None:
        """Drop what came after `step`."""
        self.samples = [sample for sample in self.samples if sample.step <= step]

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """Keep them."""
        self.samples.extend(samples)

    def whole(self) -> None:
        """It is."""

    def regrouped(self, step: int, generation: int, seconds: float, lost_norm: float, **fields: JsonValue) -> None:
        """An event."""
        self.event(
            EventKind.REGROUPED,
            step,
            generation=generation,
            seconds=seconds,
            error_lost_norm=lost_norm,
            **fields,
        )

    def gave_up(self, steps: int) -> None:
        """Nothing."""

    def saves_every(self, steps: int) -> None:
        """Nothing."""

    def step_parts(self, seconds: Mapping[str, float]) -> None:
        """Nothing."""

    def waits(self, last_share: float | None, mean_s: float | None, slowest: tuple[int, float] | None = None) -> None:
        """Nothing."""

    def waits_for_membership(self, step: int, *, waits: bool) -> None:
        """An event."""
        if waits:
            self.event(EventKind.WAITING_FOR_MEMBERSHIP, step)

    def event(self, kind: EventKind, step: int, **fields: JsonValue) -> None:
        """Nothing."""

    def close(
        self,
        summary: Summary | None = None,
        failure: Failure | None = None,
        timeout_s: float = DELIVER_S,
    ) -> None:
        """Nothing."""


class ServiceReporter:
    """Metrics and a registration on every worker; rank 0 also writes history.jsonl and posts to the service."""

    def __init__(
        self,
        run_dir: Path,
        job_id: str,
        rank: int,
        attempt: int | Callable[[], int],
        address: str,
        *,
        adopt_s: float = 0.0,
        remote: RemoteRun | None = None,
    ) -> None:
        """`rank`: what this worker is called, for as long as it lives: its slot where ranks change.

        `attempt`: see ServiceClient.
        `address`: the network address on which this worker's metrics are served.
        `adopt_s`: how long a later attempt may take to adopt this worker.
        `remote`: where the run folder is this process's own. Whoever is rank 0 then fetches what others have told, and
        tells again what this process still knows; what the next one needs is left with the service.

        Where the folder is shared, whoever becomes rank 0 tells what the one before had not told when it was lost.
        """
        self.ranks_here = 1
        self._wire: WireMeter | None = None
        self._last_step: int | None = None
        self._metrics = WorkerMetrics(job_id, rank)
        self._metrics.start_http_server(addr=address)
        self._client = ServiceClient(run_dir, rank, attempt, adopt_s=adopt_s)
        self._heartbeat = Heartbeat(self._client, self._metrics.address)
        self._run_dir = run_dir
        self._history: History | None = None
        self._poster: Poster | None = None
        self._remote = remote
        self._recent: deque[Sample] = deque(maxlen=RECENT)
        self._left: set[KeptFile] = set()
        self._links = LinkBytes()
        self._committed_s = 0.0
        self._rounds_skipped = 0
        self._compression_ratio: float | None = None

    def seated(self, group: Group, device: torch.device) -> None:
        """Rank 0 writes and posts from here on; one worker a box measures its wire, where its environment asks for it.

        Collective, whoever is asked: which nodes measure is each node's own affair. Raises: PeerLost.
        """
        boxes = exchange_boxes(group, device=device)
        self.ranks_here = len(boxes.ranks_in(boxes.of_rank[group.rank].id))
        self._wire = wire_meter(group.stats, boxes, group.rank)
        self._links.seated(group.stats, boxes, group.rank)
        self._metrics.leads(leads=group.rank == 0)
        self._client.leads = group.rank == 0  # the next heartbeat tells the service
        if group.rank == 0 and self._history is None:
            self._begin_to_tell()

    def _begin_to_tell(self) -> None:
        path = RunFolder(self._run_dir).history
        self._history = History(path)
        self._poster = Poster(self._client, leave=None if self._remote is None else self._leave_files)
        told = {sample.step for sample in read(path)} if self._remote is None else set()
        for sample in self._recent:  # the rank 0 before may not have told it any more
            if sample.step in told:
                continue
            self._history.append(sample)
            self._poster.add_sample(sample)

    def whole(self) -> None:
        """Bring into the history what ranks 0 of other machines have told, as far as the service has it."""
        if self._remote is None or self._history is None:
            return
        try:
            self._history.fill(self._remote.history())
        except ServiceError as error:
            logger.error("history_not_whole reason=%r: the summary counts what this worker has seen", str(error))

    def _leave_files(self) -> None:
        """Leave with the service what is there of the files that it keeps, each once. In the poster's thread."""
        assert self._remote is not None
        for name in KEPT_FILES:
            if name not in self._left and (self._run_dir / name).exists():
                self._remote.leave(name)
                self._left.add(name)

    def _forget_after(self, step: int) -> None:
        while self._recent and self._recent[-1].step > step:
            self._recent.pop()

    def went_back(self, step: int) -> None:
        """Drop the history after `step`, if there is any."""
        self._forget_after(step)
        if self._history is not None and (self._last_step is None or self._last_step > step):
            self._history.truncate_after(step)
            self._last_step = step

    def resumed(self, step: int) -> None:
        """Drop the history after `step`."""
        self._forget_after(step or -1)
        if self._history is not None:
            self._history.truncate_after(step or -1)
        if step:
            self.event(EventKind.RESUMED, step)

    def steps(self, samples: Sequence[Sample], num_samples: int, sent_bytes: Mapping[str, int]) -> None:
        """Write, post and export. Raises: RunSuperseded once the service has said so."""
        if self._poster is not None and self._poster.superseded:
            raise RunSuperseded("the service runs a newer attempt of this job; this one ends without a word")
        for sample in samples:
            if self._history is not None:
                self._history.append(sample)
            if self._poster is not None:
                self._poster.add_sample(sample)
            self._recent.append(sample)
            self._committed_s += sample.step_seconds
            self._rounds_skipped += sample.skipped_round
            self._compression_ratio = sample.compression_ratio or self._compression_ratio
        last = samples[-1]
        self._last_step = last.step
        self._metrics.update(
            step=last.step,
            phase=last.phase,
            world_size=last.world_size,
            loss=last.loss,
            step_seconds=last.step_seconds,
            predicted_step_seconds=last.predicted_step_seconds,
            samples_per_second=last.samples_per_second,
            compression_ratio=self._compression_ratio,
            samples_total=num_samples,
            wire_bytes_total=sent_bytes,
            rounds_skipped_total=self._rounds_skipped,
            validation_loss=last.validation_loss,
            health=last.health,
            reported={name: value for sample in samples for name, value in (sample.reported or {}).items()},
            wire=None if self._wire is None else self._wire.account(),
            link_bytes_total=self._links.by_link(),
            committed_step_seconds_total=self._committed_s,
        )

    def regrouped(self, step: int, generation: int, seconds: float, lost_norm: float, **fields: JsonValue) -> None:
        """Export it, and tell it as an event."""
        self._metrics.regrouped(generation, seconds, lost_norm)
        self.event(
            EventKind.REGROUPED,
            step,
            generation=generation,
            seconds=seconds,
            error_lost_norm=lost_norm,
            **fields,
        )

    def gave_up(self, steps: int) -> None:
        """Export it."""
        self._metrics.gave_up(steps)

    def saves_every(self, steps: int) -> None:
        """Export it."""
        self._metrics.saves_every(steps)

    def step_parts(self, seconds: Mapping[str, float]) -> None:
        """Export it."""
        self._metrics.step_parts(seconds)

    def waits(self, last_share: float | None, mean_s: float | None, slowest: tuple[int, float] | None = None) -> None:
        """Export it."""
        self._metrics.waits(last_share, mean_s, slowest)

    def waits_for_membership(self, step: int, *, waits: bool) -> None:
        """Export it, and tell it as an event."""
        self._metrics.waits_for_membership(waits=waits)
        if waits:
            self.event(EventKind.WAITING_FOR_MEMBERSHIP, step)

    def event(self, kind: EventKind, step: int, **fields: JsonValue) -> None:
        """Post it, and write it into the run folder. A disk that refuses is logged."""
        if kind is EventKind.CHECKPOINT_SAVED:
            self._metrics.checkpoint_saved()
        if self._poster is None:
            return
        told = Event(kind=kind, step=step, time=time.time(), fields=fields)
        self._poster.add_event(told)
        keep_event(self._run_dir, told)

    def close(
        self,
        summary: Summary | None = None,
        failure: Failure | None = None,
        timeout_s: float = DELIVER_S,
    ) -> None:
        """Post the rest with the last word, end the registration, stop serving metrics."""
        if self._poster is not None:
            last_word = summary.as_json() if summary is not None else None
            self._poster.close(summary=last_word, failure=failure, timeout_s=timeout_s)
        self._heartbeat.close()
        self._client.close()
        if self._history is not None:
            self._history.close()
        self._metrics.close()
