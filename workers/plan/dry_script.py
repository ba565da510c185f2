"""The process in which a script of the user's own makes its dry steps.

    python -m thinwire.workers.plan.dry_script ORDERS      started by scripts.py

It answers on one pipe, a JSON object a line: {"ready"} when the script has its first batch, then {"learned"} or
{"failed"}. On another one it is told to go on, once all who share the machine are ready; where that one ends, it ends.
What the script prints goes where this process's output goes. It is ended from the inside as soon as enough is known, so
that a loop of a million steps costs what a few of them do.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from thinwire.comm import SoloGroup
from thinwire.contract.script import ScriptRecipe
from thinwire.contract.spec import ScriptSpec
from thinwire.workers.plan.run_steps import RunSteps, length_of
from thinwire.workers.plan.scripts import Learned, ScriptOrders
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.begin import placed
from thinwire.workers.session.dry import SETTLING, DrySession, DrySteps
from thinwire.workers.session.script import End, as_main, folder_of, run_entry, where_in_script
from thinwire.workers.session.session import Session
from thinwire.workers.session.surroundings import Run, Surroundings
from thinwire.workers.telemetry.reporter import Reporter


@dataclass(slots=True)
class _Pipes:
    """To the parent, and from it."""

    told: int
    answers: int

    def say(self, **message: Any) -> None:
        os.write(self.answers, json.dumps(message).encode() + b"\n")

    def meet(self) -> None:
        """Wait for all who share the machine; from then on end with the parent."""
        self.say(ready=True)
        if not os.read(self.told, 1):
            os._exit(1)
        threading.Thread(target=self._end_with_the_parent, daemon=True).start()

    def end(self, **message: Any) -> NoReturn:
        """The last word. No finaliser of the script's runs: nothing of it is to be kept."""
        self.say(**message)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _end_with_the_parent(self) -> None:
        while os.read(self.told, 1):
            pass
        os._exit(1)


def _main(told: str) -> None:
    orders = ScriptOrders(**json.loads(told))
    pipes = _Pipes(orders.told, orders.answers)
    spec = ScriptSpec.model_validate(orders.spec)
    device = torch.device(orders.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as a worker on a CPU: Ray gives it one
    else:
        torch.cuda.set_device(device)

    def done(steps: DrySteps) -> NoReturn:
        pipes.end(learned=asdict(learned(steps)))

    def make(around: Surroundings) -> Session:
        return DrySession(around, orders.workers, orders.steps, pipes.meet, done)

    group = SoloGroup()
    run = Run(Path(orders.folder), time.time())
    around = Surroundings(FixedRanks(group), device, run, Reporter(), None, group, spec)
    os.environ.update(spec.recipe.env_vars)
    with placed(around, make) as begun:
        try:
            with as_main(spec.recipe, folder_of(spec.recipe)) as entry:
                end = run_entry(entry)
        except BaseException as error:  # noqa: BLE001 - the border of the process: told to whoever started it
            pipes.end(failed=_as_words(error, spec.recipe))
        pipes.end(failed=_not_learned(begun, end))


def learned(steps: DrySteps) -> Learned:
    """What is known of the script by its dry steps, its optimizer, and its scheduler where that says so."""
    optimizer = steps.optimizer
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    return Learned(
        shapes=[[list(param.shape), str(param.dtype).removeprefix("torch.")] for param in params],
        forward_s=steps.forward_s,
        backward_s=steps.backward_s,
        timed=steps.timed,
        global_batch=steps.global_batch,
        run=asdict(RunSteps.of_optimizer(optimizer, steps.last)),
        knows_length=length_of(optimizer, steps.last) is not None,
        overlap=optimizer.overlaps,
    )


def _as_words(error: BaseException, recipe: ScriptRecipe) -> str:
    """The script's own traceback first, as Python would print it."""
    where = where_in_script(error, recipe)
    words = "".join(traceback.format_exception_only(error)).rstrip()
    if isinstance(error, ModuleNotFoundError):
        words += "\n`thinwire plan` runs the script in its own Python and makes no environment for it: install it here"
    return f"{where}\n{words}" if where else words


def _not_learned(begun: list[Session], end: End) -> str:
    """The script is over, and too little is known of it."""
    if not begun and end.code not in (None, 0):
        return f"{end.told} before its session began{end.last_words}"
    if not begun:
        words = "write `with thinwire.train.session() as run:` and loop over run.batches(...)"
        return f"{end.told} without a session: {words}"
    if not begun[0].has_begun:
        return f"{end.told} and never drew a batch: loop over run.batches(...), inside of session(){end.last_words}"
    return (
        f"{end.told} after {begun[0].step_number} steps: {SETTLING + 1} are needed to time one, for the first "
        f"{SETTLING} touch memory for the first time{end.last_words}"
    )


if __name__ == "__main__":
    _main(sys.argv[1])
