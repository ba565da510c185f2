"""Dry steps of a script of the user's own, in processes of their own: the time of its forward and backward.

Only the script knows its model, its data and its loop. So `thinwire plan` runs it, as a job would, in a session whose
steps are timed and which then ends; as many at once as will share a machine. What is learned takes the place of what a
job file of a recipe says: forward and backward, the shapes of the parameters, the optimizer, the length of the run. The
methods' own work is then rehearsed on parameters of those shapes (OfShapes, rehearsal.py).

Such a process is this module. It says {"ready"} when the script has its first batch, goes on once all who share the
machine are ready, and then says {"learned"} or {"failed"}. It is ended from the inside as soon as enough is known, so
that a loop of a million steps costs what a few of them do.

In its session nothing is trained for long: a few steps of the script's own loop, timed, and then the end. The script
draws the batches that worker 0 of so many would draw, over a group of one, so nothing is sent. Nothing is reported,
evaluated or saved, whatever the loop asks for. Of each step it is timed

    from the batch to optimizer.step()      without the backward in it: forward, and what else the body does
    torch.autograd.backward in it           backward
    from optimizer.step() to the next draw  added to forward
    optimizer.step() itself, and the draw   not: the optimizer is rehearsed by each method, and loaders work ahead

When enough steps were timed `done` is called, in the draw of the next batch or where the loop is left, and does not
come back: the rest of the loop is not wanted, whatever it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from thinwire.comm import SoloGroup
from thinwire.contract.plan import PlanFailed
from thinwire.contract.script import ScriptRecipe
from thinwire.contract.spec import ScriptSpec
from thinwire.optim import FlatOptimizer
from thinwire.workers.data.feed import MapFeed, Share, StreamFeed
from thinwire.workers.plan.asked import ASSUMED_STEPS, length_of, run_of_optimizer
from thinwire.workers.plan.children import Children, Parent
from thinwire.workers.plan.schedule import RunSteps
from thinwire.workers.plan.ways import Busy, PlannedJob, Rehearsed
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.recipe import Recipe
from thinwire.workers.session.body import STEPLESS
from thinwire.workers.session.evaluation import Found
from thinwire.workers.session.job import End, as_main, folder_of, run_entry, where_in_script
from thinwire.workers.session.session import Session, placed
from thinwire.workers.session.training import Run, ScriptError, SessionFeed, Surroundings
from thinwire.workers.telemetry.reporter import Reporter

SETTLING = 2
"""Steps of a script before the first that is timed: they touch memory for the first time."""
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
    """What a script's dry steps have shown. shapes: of its trainable parameters, [[sizes], dtype].

    forward_s, backward_s: medians over `timed` steps. global_batch: samples of a step over all workers.
    run: a RunSteps, as JSON. knows_length: does the script say it, or is it assumed?
    """

    shapes: list[list[Any]]
    forward_s: float
    backward_s: float
    timed: int
    global_batch: int
    run: dict[str, Any]
    knows_length: bool
    overlap: bool

    @classmethod
    def of(
        cls,
        optimizer: FlatOptimizer[Any],
        last: int | None,
        global_batch: int,
        forward_s: float,
        backward_s: float,
        timed: int,
    ) -> Self:
        """By its optimizer, and its scheduler where that says so. last: steps of the whole run, where known."""
        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        shapes = [[list(param.shape), str(param.dtype).removeprefix("torch.")] for param in params]
        run, knows_length = asdict(run_of_optimizer(optimizer, last)), length_of(optimizer, last) is not None
        return cls(shapes, forward_s, backward_s, timed, global_batch, run, knows_length, optimizer.overlaps)

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
        return nn.ParameterList(
            [nn.Parameter(torch.zeros(sizes, dtype=dtype, device="cpu")) for sizes, dtype in self._shapes]
        )

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
    """Run the script `at_once` times beside one another, and return what the slowest has shown.

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
        with Children("the script", "thinwire.workers.plan.scripts", orders, environments) as children:
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
    """Of a process that is no rank, even where this one is: as that of a job's worker."""
    of_ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in of_ranks and not name.startswith(("TORCHELASTIC_", "THINWIRE_"))
    }
    return kept | ({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})


class DrySession(Session):
    """Of one script. Made by placed(around, make); `around` is of one rank, without checkpoints.

    workers: whose first one this is. steps: that are timed. begins: called once, before the first batch is given out.
    done: does not return.
    """

    def __init__(
        self,
        around: Surroundings,
        workers: int,
        steps: int,
        begins: Callable[[], None],
        done: Callable[[Learned], NoReturn],
    ) -> None:
        super().__init__(around)
        self._workers, self._wanted, self._meet, self._done = workers, steps, begins, done
        self._dry: _DryFeed | None = None
        self._clock = _Clock(around.device)

    @property
    def folder(self) -> Path:
        """One of its own: what a script keeps there goes with the dry steps."""
        return self._around.run.directory

    def evaluate_every(self, steps: int, evaluate: Callable[..., Found], data: Sized | None = None) -> None:
        """Nothing is evaluated."""

    def save(self) -> None:
        """Nothing is saved."""

    def batches(self, dataset: Any, **given: Any) -> Iterator[Any]:
        """As Session.batches, and each body is timed. Raises: ScriptError for several optimizers, too."""
        if len(self._optimizers) > 1:
            raise ScriptError(
                f"{len(self._optimizers)} optimizers are registered, and a forecast is of a run with one: rehearse the "
                "script with one of them, the largest, for the others add their bytes"
            )
        return self._timed(super().batches(dataset, **given))

    def __exit__(self, *error: Any) -> None:
        """The loop was left: what was timed so far has to do."""
        if error[0] is None:
            self._finish(1)
        super().__exit__(*error)

    def _fed(self, feed: MapFeed | StreamFeed) -> SessionFeed:
        self._dry = _DryFeed(feed, self._workers)
        return self._dry

    def _watch(self, optimizer: FlatOptimizer[Any]) -> None:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._course is None:
                raise ScriptError(
                    "optimizer.step() before run.batches(): of a loop that draws no batch from the session nobody "
                    "knows where its steps begin, and so what they compute"
                )
            this, *given = args
            closure = kwargs["closure"] if "closure" in kwargs else next(iter(given), None)
            if closure is None:
                self._clock.computed()
                return None

            def computed() -> Any:
                loss = closure()
                self._clock.computed()
                return loss

            return (this, computed), {}

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: self._clock.stepped())

    def _timed(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        clock = self._clock
        for drawn, batch in enumerate(batches, 1):
            if drawn == 1:
                self._meet()
            with clock.body():
                yield batch
            self._finish(self._wanted)
            if not clock.forward_s and drawn >= STEPLESS:
                raise ScriptError(
                    f"{drawn} batches without optimizer.step() of the registered optimizer: no step could be timed"
                )

    def _finish(self, steps: int) -> None:
        """The end, where so many were timed."""
        clock, dry, optimizer = self._clock, self._dry, self._optimizer
        timed = len(clock.forward_s) - SETTLING
        if timed < steps or dry is None or optimizer is None:
            return
        forward_s, backward_s = median(clock.forward_s[SETTLING:]), median(clock.backward_s[SETTLING:])
        self._done(Learned.of(optimizer, dry.known_last, dry.samples(1), forward_s, backward_s, timed))


class _DryFeed:
    """The shares of worker 0 of so many, again from the first where they end. data, drawing, length: of the feed."""

    def __init__(self, feed: MapFeed | StreamFeed, workers: int) -> None:
        self._feed, self._workers = feed, workers
        self.last: int | None = None
        self.known_last = feed.last
        self._samples = feed.samples(1)
        if workers > self._samples:
            raise ScriptError(f"{workers} workers for global_batch = {self._samples}: at least one sample a worker")

    @property
    def data(self) -> str:
        return self._feed.data

    @property
    def drawing(self) -> str:
        return self._feed.drawing

    @property
    def length(self) -> str:
        return self._feed.length

    def samples(self, step: int) -> int:
        """Of any step as of the first one: the last may be a smaller one."""
        return self._samples

    def shares(self, step: int, rank: int, size: int) -> Iterator[Share]:
        """Without an end. Raises: ValueError for a dataset that gives nothing."""
        while True:
            at = step
            for share in self._feed.shares(1, 0, self._workers):
                yield replace(share, step=step)
                step += 1
            if at == step:
                raise ValueError("the dataset gave no sample: no step can be timed")


class _Clock:
    """Times bodies in which the optimizer made a step; of each its forward and its backward, seconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self._began = self._backward = self._before = 0.0
        self._has_stepped = False

    @contextmanager
    def body(self) -> Iterator[None]:
        """From the batch to the next draw."""
        backward = torch.autograd.backward
        self._backward, self._before, self._has_stepped = 0.0, 0.0, False

        def timed(*args: Any, **kwargs: Any) -> None:
            began = self._now()
            backward(*args, **kwargs)
            self._backward += self._now() - began

        # Tensor.backward() calls it by this name, and so do trainers: no hook tells when backward begins.
        torch.autograd.backward = timed
        self._began = self._now()
        try:
            yield
        finally:
            torch.autograd.backward = backward
        if self._has_stepped:
            rest_s = self._now() - self._began
            self.forward_s.append(max(0.0, self._before + rest_s - self._backward))
            self.backward_s.append(self._backward)

    def computed(self) -> None:
        """optimizer.step() begins, or its closure has ended."""
        self._before += self._now() - self._began

    def stepped(self) -> None:
        """optimizer.step() is over."""
        self._has_stepped, self._began = True, self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _main(parent: Parent) -> None:
    orders = ScriptOrders(**parent.orders)
    spec = ScriptSpec.model_validate(orders.spec)
    device = torch.device(orders.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as a worker on a CPU: Ray gives it one
    else:
        torch.cuda.set_device(device)

    def meet() -> None:
        """Wait for all who share the machine; from then on end with the parent."""
        parent.say(ready=True)
        parent.wait()
        parent.end_with_it()

    def end(**message: Any) -> NoReturn:
        """The last word. No finaliser of the script's runs: nothing of it is to be kept."""
        parent.say(**message)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def make(around: Surroundings) -> Session:
        def done(learned: Learned) -> NoReturn:
            end(learned=asdict(learned))

        return DrySession(around, orders.workers, orders.steps, meet, done)

    group = SoloGroup()
    run = Run(Path(orders.folder), time.time())
    around = Surroundings(FixedRanks(group), device, run, Reporter(), None, group, spec)
    os.environ.update(spec.recipe.env_vars)
    with placed(around, make) as begun:
        try:
            with as_main(spec.recipe, folder_of(spec.recipe)) as entry:
                ended = run_entry(entry)
        except BaseException as error:  # noqa: BLE001 - the border of the process: the parent reports it
            end(failed=_as_words(error, spec.recipe))
        end(failed=_not_learned(begun, ended))


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
        return f"{end.words} before its session began{end.last_words}"
    if not begun:
        words = "write `with thinwire.train.session() as run:` and loop over run.batches(...)"
        return f"{end.words} without a session: {words}"
    if not begun[0].has_begun:
        return f"{end.words} and never drew a batch: loop over run.batches(...), inside of session(){end.last_words}"
    return (
        f"{end.words} after {begun[0].step_number} steps: {SETTLING + 1} are needed to time one, for the first "
        f"{SETTLING} touch memory for the first time{end.last_words}"
    )


if __name__ == "__main__":
    _main(Parent(sys.argv[1:]))
