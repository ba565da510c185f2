"""A rank joins a group, its first or the next: what all go on from is agreed on, and given to those that lack it.

What one survivor has done and another has not is done again: reports and checkpoints of a step are the same.

A run that has saved nothing so far begins afresh, with given weights, or at a checkpoint of another job. Given weights
are read by each worker before it joins the others, so that their checksum is in its signature: one that has another
file is refused. A checkpoint is read when all have joined: rank 0 says which one, as at a resume. The run then saves at
once, before its first step. As soon as that checkpoint is whole nobody needs the start any more: a restart goes on from
it, and a worker that comes later takes the checksum from it and reads no file. Until then a restart begins at the start
again.

The size of buckets of a job is what suits the network at its first start; then the same at every restart. Scales end
where buckets do, so with another size a restarted run would go on from the same state, but not bit-equal.

    buckets.json    in the run's folder, by rank 0: the size, the network it was chosen for, ranks and elements
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from thinwire.comm import PeerLost
from thinwire.comm.bucket_size import measured_bucket
from thinwire.comm.calls import calls_of
from thinwire.comm.groups.texts import gather_texts, texts_if_they_differ
from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.protocol import Group
from thinwire.comm.wire.network import NO_FULL_STEPS, FullSteps
from thinwire.contract.files import write_whole
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import ScriptSpec, TrainSpec
from thinwire.contract.start import Start
from thinwire.optim.engine.shares import agree_on_load
from thinwire.optim.regroup import Regrouped, regroup_all
from thinwire.workers.checkpoints import CheckpointId, CheckpointRefused, CheckpointStore
from thinwire.workers.checkpoints.snapshot import Content
from thinwire.workers.membership.seats import Seat
from thinwire.workers.plan.asked import run_of_job, run_of_optimizer
from thinwire.workers.plan.schedule import full_steps
from thinwire.workers.ranks import Alone
from thinwire.workers.replicas import ranks_that_differ
from thinwire.workers.saving import of_shard, on_all, registered_in, restore, restored
from thinwire.workers.session.body import Bodies
from thinwire.workers.session.known_network import known_network
from thinwire.workers.session.registered import State
from thinwire.workers.session.training import ScriptError, Surroundings, Training
from thinwire.workers.weights import Given, StartRefused, fill, opened, refuse_misfits

logger = logging.getLogger(__name__)
T = TypeVar("T")

SIGNED = "start"
"""The field of the signature, and of the plain values of the run's checkpoints."""
TRIES = 5
"""Another job that goes on removes its older checkpoints while they are read."""
DIGITS = 16
"""Of the checksum, as of the others in a signature."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker has done: the last step committed, reported, attended to. due: an evaluation waits.

    left_out: how many of the steps the optimizer has not counted, such as those of a gradient that was not finite.
    last: the last step of the run, where it is known by now.
    """

    step: int
    reported: int
    attended: int
    due: bool
    left_out: int = 0
    last: int | None = None

    @classmethod
    def common(cls, known: list[Progress], step: int | None) -> Self:
        """From where all go on, by what each has reported, the optimizer having made `step` steps.

        None: of several optimizers, which are at the step of the rank that has come furthest.
        """
        left_out = max((one.left_out for one in known), default=0)
        return cls(
            step + left_out if step is not None else max((one.step for one in known), default=0),
            min((one.reported for one in known), default=0),
            min((one.attended for one in known), default=0),
            any(one.due for one in known),
            left_out,
            max((one.last for one in known if one.last is not None), default=None),
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """The training over the new group, what the optimizer says of it, and the progress that all go on from.

    redone: committed steps of some survivor that will be run again.
    """

    training: Training
    change: Regrouped
    progress: Progress
    redone: int

    @property
    def begins(self) -> bool:
        """Has nobody a state, so that the run is resumed or begins?"""
        return self.change.source is None

    def fields(self, seat: Seat | None) -> dict[str, JsonValue]:
        """For the event: who is there, who was lost, and what of the state."""
        change = self.change
        return {
            "world_size": self.training.group.size,
            "reason": seat.reason if seat else None,
            "lost": [f"worker {one.slot} (rank {one.rank}): {one.why}" for one in seat.lost] if seat else [],
            "received": list(change.received),
            "rolled_forward": list(change.rolled_forward),
            "redone": self.redone,
            "local_steps_lost": change.local_steps_lost,
            "server_error_lost": list(change.server_lost),
            "error_rebuilt": list(change.rebuilt),
            "error_lost_norm_unrebuilt": change.unrebuilt_norm,
            "error_norm": change.residual_norm,
        }


def join(
    around: Surroundings,
    training: Training,
    group: Group,
    progress: Progress | None,
    bodies: Bodies | None = None,
) -> Joined:
    """Go on over `group`. Collective. progress: None for a newcomer. bodies: None of a loop that draws no batch. Where

    no rank has made the batch that was lost last, steps that stood in it are taken back; where one has, they count.

    An optimizer over fixed ranks that has made steps, or belongs to no job, or has buckets of the size that suits the
    network, stays as the script has made it.
    Raises: ScriptError where ranks do not belong together; PeerLost, WireMismatch, and then all is as before.
    """
    optimizer, device = training.optimizer, training.device
    all_n = _gather_progress(group, progress, device)
    known = [one for one in all_n if one is not None]
    _refuse_other_data(training, group)
    size = None
    if not known and (around.ranks.elastic or (around.spec is not None and not optimizer.num_steps)):
        size = _bucket(around, training, group)
        size = int(around.ranks.box.share("the size of buckets", str(size))[0])
    has_other_size = size is not None and any(one.bucket_elements != size for one in training.optimizers)
    is_laid_out_anew = around.ranks.elastic or has_other_size
    steps = [-1 if one is None else one.step for one in all_n]
    if bodies is not None and progress is not None and progress.step == max(steps):
        bodies.take_back()
    source = steps.index(max(steps)) if known else 0
    lacking = [rank for rank, step in enumerate(steps) if rank != source and (step != max(steps) or not known)]
    given = _given_by(training, group, source, lacking)
    around.ranks.box.share("regroup()")
    if is_laid_out_anew:
        has_state = progress is not None
        change = regroup_all(training.optimizers, group, has_state=has_state, bucket_elements=size, buffers=())
    else:
        change = Regrouped(optimizer.num_steps, None)
        for one in training.optimizers:
            if one.group.size != group.size:
                raise ScriptError(
                    f"the {type(one).__name__} was made for {one.group.size} ranks, and there are {group.size}: make "
                    "it inside of `with session() as run:`, with group=run.group"
                )
    if given is not None:  # not before: a rank with only half of a step would not know which half
        training.registered.load(*given)
    if bodies is not None:
        bodies.let_go()
    now = Progress.common(known, change.step if len(training.optimizers) == 1 else None)
    redone = max(0, max((one.step for one in known), default=0) - now.step)
    return Joined(replace(training, group=group), change, now, redone)


def _gather_progress(group: Group, progress: Progress | None, device: torch.device) -> list[Progress | None]:
    """Of all ranks, by rank; None for a newcomer. Collective. Raises: PeerLost."""
    own = None if progress is None else list(asdict(progress).values())
    known = [json.loads(text) for text in gather_texts(group, json.dumps(own).encode(), device)]
    return [None if one is None else Progress(*one) for one in known]


def _refuse_other_data(training: Training, group: Group) -> None:
    """Collective. Raises: ScriptError, alike on every rank; PeerLost."""
    texts = texts_if_they_differ(group, training.words, training.device)
    if texts is None:
        return
    strangers = [rank for rank, text in enumerate(texts) if text != texts[0]]
    raise ScriptError(
        f"rank {_listed(strangers)} does not draw the samples that rank 0 draws, or has registered other objects: rank "
        f"{strangers[0]} has {texts[strangers[0]]}; rank 0 has {texts[0]}. Give all ranks the same files, arguments, "
        "Python and packages"
    )


def _given_by(training: Training, group: Group, source: int, lacking: list[int]) -> State | None:
    """What the source has registered, where this rank lacks it. Collective. Raises: PeerLost."""
    if not lacking:
        return None
    with calls_of(group).within("the registered objects of a script"):
        return training.registered.give(group, (source, *lacking), training.device)


def _bucket(around: Surroundings, training: Training, group: Group) -> int:
    """The size of a new run's buckets. Collective. Raises: PeerLost; OSError."""
    if around.spec is not None and around.spec.bucket_elements is not None:
        return around.spec.bucket_elements
    numel = max(one.space.layout.num_live for one in training.optimizers)
    directory = around.run.directory if around.ranks.box.rank == 0 else None  # a box has that of its first process
    return kept_bucket(directory, group, numel, training.device, _full_steps(around.spec, training))


def _full_steps(spec: TrainSpec | ScriptSpec | None, training: Training) -> FullSteps:
    """Of the run, as `thinwire plan` takes them: buckets are made for those too."""
    try:
        if isinstance(spec, TrainSpec):
            return full_steps(run_of_job(spec))
        largest = max(training.optimizers, key=lambda one: one.space.layout.num_live)
        return full_steps(run_of_optimizer(largest, training.feed.last))
    except ValueError as error:
        logger.warning("buckets_for_compressed_steps_alone reason=%r", str(error))
        return NO_FULL_STEPS


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def kept_bucket(
    run_dir: Path | None, group: Group, numel: int, device: torch.device, full: FullSteps = NO_FULL_STEPS
) -> int:
    """Elements of a bucket, alike on every rank. Collective. run_dir: None: not kept, and the default.

    full: of the job's steps.
    Raises: PeerLost; OSError on rank 0 where the folder cannot be written.
    """
    if run_dir is None or group.size == 1:
        return DEFAULT_BUCKET
    file = RunFolder(run_dir).buckets
    kept = _kept_size(file, group.size, numel) if group.rank == 0 else 0
    known = torch.tensor([kept], dtype=torch.int64, device=device)
    group.broadcast_(known)
    if int(known):
        return int(known)
    size, network = measured_bucket(group, numel, device, full, known_network(group, device))
    if group.rank == 0 and network is not None:
        logger.info(
            "buckets_chosen elements=%d of=%d latency_us=%.0f mbyte_per_s=%.1f",
            size,
            numel,
            1e6 * network.latency_s,
            network.bytes_per_s / 1e6,
        )
        chosen = {
            "bucket_elements": size,
            "elements": numel,
            "ranks": group.size,
            "latency_s": network.latency_s,
            "bytes_per_s": network.bytes_per_s,
            "rows": network.rows,
        }
        write_whole(file, json.dumps(chosen, indent=2) + "\n")
    return size


def _kept_size(file: Path, ranks: int, numel: int) -> int:
    """What the file says; 0 where there is none for so many ranks and elements, or it is damaged."""
    if not file.exists():
        return 0
    try:
        found = json.loads(file.read_text())
        alike = (found["ranks"], found["elements"]) == (ranks, numel)
        return int(found["bucket_elements"]) if alike else 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("buckets_unreadable path=%s reason=%r: they are chosen anew", file, error)
        return 0


class StartRefusedElsewhere(PeerLost):
    """Another rank cannot begin; the others do without it."""


class Origin:
    """Of one worker. start: None for a run that begins afresh. own: the run's own checkpoints; None: it keeps none."""

    def __init__(self, start: Start | None, own: CheckpointStore | None) -> None:
        self._start, self._own = start, own
        self._digest: str | None = None
        self._has_filled = False
        self._at = ""

    @property
    def signed(self) -> dict[str, str]:
        """What a worker's signature says of given weights."""
        return {} if self._digest is None else {SIGNED: f"weights #{self._digest[:DIGITS]}"}

    @property
    def kept(self) -> dict[str, object]:
        """What the run's own checkpoints say of them."""
        return {} if self._digest is None else {SIGNED: self._digest}

    @property
    def facts(self) -> dict[str, Any]:
        """Where the run has begun, for people."""
        only_weights = self._start is None or self._start.only_weights
        return {"where": self._at, "what": "weights" if only_weights else "everything"}

    def look(self, training: Training) -> None:
        """Before this worker joins: the model <- given weights, unless the run has saved something. Local.

        Raises: StartRefused.
        """
        if self._start is None or self._start.weights is None:
            return
        self._digest = self._known()
        if self._digest is None:
            self._fill(training, self._start.weights)

    def begin(self, training: Training) -> int | None:
        """Begin the run with it, on all ranks. Returns the last step that counts; None: it begins afresh. Collective.

        Raises: StartRefused, where all ranks have it on all; PeerLost where another rank alone has it.
        """
        if self._start is None:
            return None
        if self._start.weights is not None:
            return self._begin_with(self._start.weights, training)
        if self._start.checkpoints is None:
            raise StartRefused(
                f"start.job = {self._start.job}: the service alone knows where its checkpoints lie; submit the job to "
                "the service, or name start.checkpoints"
            )
        try:
            store = CheckpointStore(self._start.checkpoints, keep=1)
        except ValueError as error:
            raise StartRefused(f"start.checkpoints: {error}") from error
        which, content = self._read(store, training)
        self._at = store.address(which)
        return self._go_on_from(which, content, training, only_weights=self._start.only_weights)

    def _begin_with(self, weights: str, training: Training) -> int:
        _on_all(training, lambda: None if self._has_filled else self._fill(training, weights))
        assert self._digest is not None
        strangers = ranks_that_differ(training.group, bytes.fromhex(self._digest), training.device)
        if strangers:
            raise StartRefused(
                f"start.weights = {weights}: what rank {_listed(strangers)} has read is not what rank 0 has "
                f"(here, rank {training.group.rank}: #{self._digest[:DIGITS]}); give all machines the same file"
            )
        self._at = weights
        return 0

    def _fill(self, training: Training, weights: str) -> None:
        with opened(weights) as given:
            self._digest = fill(training, given)
        self._has_filled = True
        logger.info("start_weights where=%s sha256=%s", weights, self._digest)

    def _known(self) -> str | None:
        """The checksum that the newest of the run's own checkpoints has; None where there is none."""
        try:
            said = {} if self._own is None else self._own.newest_plain()
        except OSError as error:  # the resume will see to it
            logger.warning("checkpoints_not_read reason=%s", error)
            return None
        known = said.get(SIGNED)
        return known if isinstance(known, str) else None

    def _read(self, store: CheckpointStore, training: Training) -> tuple[CheckpointId, Content]:
        """The checkpoint that rank 0 finds; a newer one where the other job removes that meanwhile. Collective."""
        tried: list[CheckpointId] = []
        while True:
            which = self._found(store, training)
            try:
                return which, _on_all(training, partial(_load_whole, store, which, training.device))
            except (StartRefused, StartRefusedElsewhere):
                if which in tried or len(tried) == TRIES:
                    raise
                tried.append(which)

    def _found(self, store: CheckpointStore, training: Training) -> CheckpointId:
        """Which one, on all ranks alike. Collective. Raises: StartRefused, alike."""
        found_here = json.dumps(self._look_for(store) if training.group.rank == 0 else None)
        found = json.loads(gather_texts(training.group, found_here.encode(), training.device)[0])
        if isinstance(found, str):
            raise StartRefused(found)
        return CheckpointId(*found)

    def _look_for(self, store: CheckpointStore) -> CheckpointId | str:
        """Which one, or why there is none."""
        assert self._start is not None
        step, where = self._start.step, store.storage.address("")
        try:
            which = store.newest_whole(step)
            steps = [] if which is not None else sorted({one.step for one in store.sound()})
        except OSError as error:
            return f"start.checkpoints = {where} cannot be read: {error}"
        if which is not None:
            return which
        wanted = "" if step is None else f" of step {step}"
        if step is not None and steps:
            wanted += f", and whole ones of steps {_listed(steps)}"
        whose = "the job" if self._start.job is None else f"job {self._start.job}"
        return (
            f"start.checkpoints = {where} has no whole checkpoint{wanted}: {whose} has saved none there, or it was "
            "deleted, or removed when newer ones were saved (checkpoint.keep); name another one"
        )

    def _go_on_from(self, which: CheckpointId, content: Content, training: Training, *, only_weights: bool) -> int:
        """All ranks have it. Raises: StartRefused, alike; PeerLost."""
        weights = {name: x for name, x in restored(content)["model"].items() if isinstance(x, Tensor)}
        given = Given.of(self._at, weights)
        if only_weights:
            if not weights:
                raise StartRefused(f"{self._at} has no weights by name: its script had registered no module")
            fill(training, given)
            return 0
        try:
            training.registered.refuse_others(registered_in(content))
            if weights:
                refuse_misfits(given, training.registered.model_tensors())
            restore(content, training)
        except StartRefused:
            raise
        except (ValueError, RuntimeError) as error:
            raise StartRefused(
                f"{self._at} cannot be gone on from: {error}. To begin with its weights alone, with an optimizer that "
                "has seen nothing, say start.what = weights"
            ) from error
        for optimizer in training.optimizers:
            agree_on_load(optimizer)
        return which.step


def _load_whole(store: CheckpointStore, which: CheckpointId, device: torch.device) -> Content:
    return of_shard(store.load(which, device), Alone())


def _on_all(training: Training, read: Callable[[], T]) -> T:
    """Do it on every rank. Collective.

    Raises: StartRefused where this rank cannot; StartRefusedElsewhere where others alone cannot.
    """
    found = on_all(training, read, StartRefused, CheckpointRefused, OSError)
    if found.error is not None:
        raise StartRefused(found.why) from found.error
    if found.failed:
        raise StartRefusedElsewhere(f"rank {found.failed[0]} cannot begin: {found.why}", ranks=found.failed)
    return cast(T, found.value)
