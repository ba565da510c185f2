"""Where a run begins that has saved nothing so far: afresh, with given weights, or at a checkpoint of another job.

Given weights are read by each worker before it joins the others, so that their checksum is in its signature: one
that has another file is refused. A checkpoint is read when all have joined: rank 0 says which one, as at a resume.

The run then saves at once, before its first step. As soon as that checkpoint is whole nobody needs the start any more:
a restart goes on from it, and a worker that comes later takes the checksum from it and reads no file. Until then a
restart begins at the start again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from thinwire.comm import PeerLost
from thinwire.comm.groups.texts import gather_texts
from thinwire.contract.start import Start
from thinwire.optim.engine.shares import agree_on_load
from thinwire.workers.checkpoints import CheckpointId, CheckpointRefused, CheckpointStore
from thinwire.workers.checkpoints.snapshot import Content
from thinwire.workers.given import Given, StartRefused, fill, opened, refuse_misfits
from thinwire.workers.replicas import ranks_that_differ
from thinwire.workers.saving import registered_in, restore, restored
from thinwire.workers.session.training import Training

logger = logging.getLogger(__name__)

SIGNED = "start"
"""The field of the signature, and of the plain values of the run's checkpoints."""
TRIES = 5
"""Another job that goes on removes its older checkpoints while they are read."""
DIGITS = 16
"""Of the checksum, as of the others in a signature."""


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
    def told(self) -> dict[str, Any]:
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
        held: dict[CheckpointId, Content] = {}
        tried: list[CheckpointId] = []

        def load(which: CheckpointId) -> None:
            held[which] = store.load(which, training.device)

        while True:
            which = self._found(store, training)
            try:
                _on_all(training, partial(load, which))
            except (StartRefused, StartRefusedElsewhere):
                if which in tried or len(tried) == TRIES:
                    raise
                tried.append(which)
            else:
                return which, held[which]
            held.clear()

    def _found(self, store: CheckpointStore, training: Training) -> CheckpointId:
        """Which one, on all ranks alike. Collective. Raises: StartRefused, alike."""
        told = json.dumps(self._look_for(store) if training.group.rank == 0 else None)
        found = json.loads(gather_texts(training.group, told.encode(), training.device)[0])
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
        agree_on_load(training.optimizer)
        return which.step


def _on_all(training: Training, read: Callable[[], None]) -> None:
    """Do it on every rank. Collective.

    Raises: StartRefused where this rank cannot; StartRefusedElsewhere where others alone cannot.
    """
    told = ""
    try:
        read()
    except (StartRefused, CheckpointRefused, OSError) as error:
        told = str(error) or type(error).__name__
        logger.warning("start_not_read reason=%s", told)
    answers = [text.decode(errors="replace") for text in gather_texts(training.group, told.encode(), training.device)]
    if told:
        raise StartRefused(told)
    failed = tuple(rank for rank, text in enumerate(answers) if text)
    if failed:
        raise StartRefusedElsewhere(f"rank {failed[0]} cannot begin: {answers[failed[0]]}", ranks=failed)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
