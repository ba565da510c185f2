"""What does a step of a script of the user's own compute? The script itself makes a few, in processes of its own.

Only the script knows its model, its data and its loop. So `thinwire plan` runs it, as a job would, in a session whose
steps are timed and which then ends (dry_script.py); as many at once as will share a machine. What is learned takes the
place of what a job file of a recipe says: forward and backward, the shapes of the parameters, the optimizer, the length
of the run. The methods' own work is then rehearsed on parameters of those shapes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.contract.plan import PlanFailed
from thinwire.contract.spec import ScriptSpec
from thinwire.workers.plan.children import Children
from thinwire.workers.plan.forecast import Busy, PlannedJob, Rehearsed
from thinwire.workers.plan.schedule import ASSUMED_STEPS, RunSteps
from thinwire.workers.recipe import Recipe

LIMIT_S = 900.0
"""Until all have drawn their first batch, and again until they have made their steps."""


@dataclass(frozen=True, slots=True)
class ScriptOrders:
    """Of one process. spec: as JSON. workers: of the job. steps: that are timed. folder: for what the script keeps."""

    spec: dict[str, Any]
    workers: int
    steps: int
    device: str
    folder: str


@dataclass(frozen=True, slots=True)
class Learned:
    """What a script's dry steps have told. shapes: of its trainable parameters, [[sizes], dtype].

    run: a RunSteps, as JSON. knows_length: does the script say it, or is it assumed? timed: dry steps that were.
    """

    shapes: list[list[Any]]
    forward_s: float
    backward_s: float
    timed: int
    global_batch: int
    run: dict[str, Any]
    knows_length: bool
    overlap: bool

    def as_job(self, spec: ScriptSpec) -> PlannedJob:
        """What a forecast asks of a job."""
        run, device = RunSteps(**self.run), spec.workers.device
        return PlannedJob(spec.name, run, self.global_batch, self.overlap, spec.bucket_elements, device)

    def assumed(self) -> list[str]:
        """What the script did not tell, and what stands in its place."""
        found = []
        if not self.knows_length:
            found.append(
                f"the script does not say how many steps the run has: {ASSUMED_STEPS} are assumed. Say steps= in "
                "run.batches(), or steps in the job's file"
            )
        falls = RunSteps(**self.run).floor < 1
        rates = "to fall in a cosine, as a scheduler is there" if falls else "to stay as it is"
        found.append(f"the learning rate is taken {rates}: only the script knows it; it matters to 0/1 Adam alone")
        found.append("forward has in it all that the loop does beside backward and optimizer.step(), but not the data")
        return found


class OfShapes(Recipe):
    """Parameters of given shapes, and next to nothing to compute: for what the optimizers do with a script's."""

    def __init__(self, shapes: Sequence[Sequence[Any]], global_batch: int) -> None:
        self._shapes = [(tuple(sizes), getattr(torch, dtype)) for sizes, dtype in shapes]
        self.global_batch = global_batch

    def model(self) -> nn.Module:
        """Zeros."""
        return nn.ParameterList([nn.Parameter(torch.zeros(sizes, dtype=dtype)) for sizes, dtype in self._shapes])

    def dataset(self) -> list[int]:
        """Nothing of it is used."""
        return [0]

    def loss(self, model: nn.Module, batch: object) -> Tensor:
        """The sum of all: each gradient is 1."""
        return torch.stack([param.float().sum() for param in model.parameters()]).sum()


def with_script(found: Rehearsed, learned: Learned) -> Rehearsed:
    """What was rehearsed on an OfShapes, with the script's forward and backward in place of its own."""
    own_s = found.forward_s + found.backward_s
    more_s = learned.forward_s + learned.backward_s - own_s

    def of(busy: Busy) -> Busy:
        # Kernels that launch in backward may take less than that beside it; never less than the script alone.
        least_s = learned.forward_s + learned.backward_s
        local_s = max(busy.local + more_s, least_s) if busy.local else 0.0
        return Busy(max(busy.full + more_s, least_s), max(busy.compressed + more_s, least_s), local_s)

    busy = {name: of(one) for name, one in found.busy.items()}
    return replace(found, forward_s=learned.forward_s, backward_s=learned.backward_s, busy=busy)


def slowest_of(all_n: Sequence[Learned]) -> Learned:
    """Ranks wait for the last one."""
    forward_s, backward_s = (max(getattr(one, name) for one in all_n) for name in ("forward_s", "backward_s"))
    return replace(all_n[0], forward_s=forward_s, backward_s=backward_s)


def dry_steps(
    spec: ScriptSpec,
    workers: int,
    at_once: int,
    steps: int,
    devices: Sequence[str],
    together: Callable[[], None] = lambda: None,
) -> Learned:
    """Run the script `at_once` times beside one another, and return what the slowest has told.

    devices: one for each. together: called when all are ready, before they make steps. Raises: PlanFailed, with the
    script's own traceback first. Ends what it started, also on Ctrl-C.
    """
    job, orders = spec.model_dump(mode="json"), []
    with tempfile.TemporaryDirectory(prefix="thinwire-plan-") as folder:
        for number in range(at_once):
            kept = Path(folder) / str(number)
            kept.mkdir()
            orders.append(asdict(ScriptOrders(job, workers, steps, devices[number], str(kept))))
        environments = [_environment(device) for device in devices[:at_once]]
        with Children("the script", "thinwire.workers.plan.dry_script", orders, environments) as children:
            for number in range(at_once):
                _answer(children, number, "ready", "drawn its first batch")
            together()
            children.go()
            all_n = [_answer(children, number, "learned", "made its dry steps") for number in range(at_once)]
    return slowest_of([Learned(**one) for one in all_n])


def _answer(children: Children, number: int, word: str, awaited: str) -> Any:
    """What that process says next, which is this. Raises: PlanFailed."""
    message = children.message(number, LIMIT_S, awaited)
    if word not in message:
        raise PlanFailed(f"the script cannot be rehearsed:\n{message.get('failed', message)}")
    return message[word]


def _environment(device: str) -> dict[str, str]:
    """Of a process that is no rank of anything, whoever started this one: as that of a job's worker."""
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in of_ranks and not name.startswith(("TORCHELASTIC_", "THINWIRE_"))
    }
    return kept | ({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})
