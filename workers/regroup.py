"""Training goes on with the ranks of another generation: the optimizer's state, and what the run has done so far."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.comm.groups.texts import gather_texts
from thinwire.comm.protocol import Group
from thinwire.optim.regroup import Regrouped, regroup
from thinwire.workers.bucket_choice import kept_bucket
from thinwire.workers.build import Training, refuse_other_data


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker has done: the last step committed, reported, attended to. due: an evaluation waits."""

    step: int
    reported: int
    attended: int
    due: bool


@dataclass(frozen=True, slots=True)
class Joined:
    """The training over the new group, what the optimizer says of it, and the progress that all go on from.

    redone: committed steps of some survivor that will be run again.
    """

    training: Training
    change: Regrouped
    progress: Progress
    redone: int


def regroup_training(
    training: Training, group: Group, run_dir: Path, progress: Progress | None, bucket_elements: int | None
) -> Joined:
    """Go on over `group`. Collective. progress: None for a newcomer. bucket_elements: as the spec has it.

    What one survivor has done and another has not is done again: reports and checkpoints of a step are the same.
    Raises: PeerLost, WireMismatch, DataError; then everything is as before.
    """
    device = training.device
    own = None if progress is None else [progress.step, progress.reported, progress.attended, progress.due]
    all_n = [json.loads(text) for text in gather_texts(group, json.dumps(own).encode(), device)]
    refuse_other_data(group, training.data, device)
    known = [Progress(*one) for one in all_n if one is not None]
    numel = training.optimizer.space.layout.num_live
    size = None if known else bucket_elements or kept_bucket(run_dir, group, numel, device)
    change = regroup(
        training.optimizer,
        group,
        has_state=progress is not None,
        bucket_elements=size,
        buffers=training.model.buffers(),
    )
    common = Progress(
        change.step,
        min((one.reported for one in known), default=0),
        min((one.attended for one in known), default=0),
        any(one.due for one in known),
    )
    redone = max(0, max((one.step for one in known), default=0) - change.step)
    return Joined(replace(training, group=group), change, common, redone)
