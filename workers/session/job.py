"""What a worker of a job runs in its session: the loop of a built-in recipe, or a script of the user's own.

A script runs as `python train.py ...` would run it: as __main__, with its folder as the current one and its own folder
first in sys.path. However it ends, the owner of the job hears of it: what the script itself did comes first, and
nothing of what called it.

The loop of a recipe is an ordinary script too: thinwire.train.train() runs the same one where there is no job.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from thinwire.comm import CommError, PeerLost, SoloGroup
from thinwire.comm.protocol import Group
from thinwire.contract.reports import Failure
from thinwire.contract.script import ScriptRecipe, SecretSource
from thinwire.contract.spec import ScriptSpec, TrainSpec
from thinwire.contract.summary import Summary
from thinwire.workers.data.feed import let_go_of_connections
from thinwire.workers.data.order import share
from thinwire.workers.error_words import as_failure, in_words, words_of
from thinwire.workers.membership.state import MembershipError
from thinwire.workers.ranks import Ranks, RunEnded
from thinwire.workers.recipe import Recipe, moved
from thinwire.workers.recipes import recipe_of
from thinwire.workers.session.session import Session, begin, placed
from thinwire.workers.session.training import Left, Run, ScriptError, Surroundings
from thinwire.workers.telemetry.reporter import Reporter

logger = logging.getLogger(__name__)

EVALUATION_SAMPLES = 32
"""Samples evaluated at a time, so that memory does not grow with the validation set."""
MOST_FRAMES = 20
"""Of a traceback in a failure: the first are the script's own."""
MOST_WORDS = 2000
"""Characters of the error itself in a failure, so that its traceback finds room too."""
_SHORTEST_SECRET = 6
"""Characters of a value that is not shown in a failure."""
_LONGEST = 500
"""Characters of a line of stderr that are kept."""


def run_job(
    spec: TrainSpec | ScriptSpec, run: Run, ranks: Ranks, device: torch.device, reporter: Reporter
) -> Summary | None:
    """Train to the end, going on from the newest whole checkpoint of the run's folder. Collective.

    Returns the summary, for which rank 0's history.jsonl must be in the folder; None on the other ranks.
    Raises: whatever this worker cannot go on with, such as DataError, ScriptError, NonFiniteInput, NonFiniteLoss,
    ReplicasDiffer and what a script raises, with the last checkpoint kept; where the ranks are elastic the others are
    informed first, and go on. PeerLost where the ranks are fixed, after which a restart goes on from the checkpoint;
    MembershipError where they are elastic and there is no place for this worker any more: Dismissed, where it was asked
    to leave and has handed over; RunEnded, where another worker has failed for good.
    """
    group: Group = SoloGroup() if ranks.elastic else ranks.form(0, False, {})
    around = Surroundings(ranks, device, run, reporter, spec.checkpoint, group, spec, spec.start)
    with placed(around) as begun:
        try:
            if isinstance(spec, ScriptSpec):
                run_script(spec.recipe, begun)
            else:
                with begin() as session:
                    train(recipe_of(spec), session)
        except Left as left:
            raise left.reason from None
        except BaseException as error:
            is_known = isinstance(error, MembershipError | RunEnded) or any(one.failure_reported for one in begun)
            if ranks.elastic and not is_known:
                words = in_words(error)
                ranks.fail(without_secrets(words, spec.recipe) if isinstance(spec, ScriptSpec) else words)
            if not ranks.elastic and group.size > 1 and tells_of_a_peer(error):
                raise PeerLost(f"the script's own collective failed: {error}") from error
            raise
    return begun[0].summary


def train(recipe: Recipe, run: Session) -> nn.Module:
    """Train it to its last step, and return the model."""
    dataset, samples = recipe.dataset(), recipe.validation()
    model = recipe.model().to(run.device)
    params = model.named_parameters() if recipe.takes_names else model.parameters()
    optimizer = recipe.optimizer(params, run.group)
    run.register(model=model, optimizer=optimizer)
    if samples is not None:
        run.evaluate_every(
            recipe.evaluate_every,
            lambda: part_of_validation(recipe, model, samples, run.group, run.device, run.look),
        )
    batches = run.batches(dataset, global_batch=recipe.global_batch, steps=recipe.steps, seed=recipe.seed)
    recipe.rehearse(model, optimizer, run.device)
    for batch in batches:
        # Before backward: what 0/1 Adam sends in it has the rate in it.
        set_rate(optimizer, recipe.lr(run.step_number + 1))
        loss = partial(recipe.loss, model, moved(batch, run.device))
        run.step(loss if optimizer.takes_closure else loss())
    return model


def set_rate(optimizer: torch.optim.Optimizer, rate: float | None) -> None:
    """Of all parameter groups. None: they keep theirs."""
    if rate is not None:
        for param_group in optimizer.param_groups:
            param_group["lr"] = rate


def _no_look() -> None:
    pass


@torch.no_grad()
def part_of_validation(
    recipe: Recipe,
    model: nn.Module,
    samples: Sequence[Any],
    group: Group,
    device: torch.device,
    look: Callable[[], None] = _no_look,
) -> float:
    """Of a rank, computed over its share of the samples: the mean over ranks is the mean loss over the samples. Local.

    look: called now and then on the way. Raises: what `look` raises.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    try:
        for number, batch in shared_out(samples, group):
            look()
            total += recipe.loss(model, moved(batch, device)).double() * number
    finally:
        model.train()
    return float(total * (group.size / len(samples)))


def shared_out(samples: Sequence[Any], group: Group) -> Iterator[tuple[int, Any]]:
    """This rank's samples, some at a time: how many, and their batch."""
    mine = share(len(samples), group.rank, group.size)
    for at in range(mine.start, mine.stop, EVALUATION_SAMPLES):
        some = range(at, min(at + EVALUATION_SAMPLES, mine.stop))
        yield len(some), default_collate([samples[i] for i in some])


def run_script(recipe: ScriptRecipe, begun: list[Session]) -> None:
    """Run it to its end. begun: the sessions that it has begun by then.

    Modifies: the environment, the current folder and sys.argv of this process, until it is over.
    Raises: what the script raises; ScriptError where it ends without having trained.
    """
    with as_main(recipe, folder_of(recipe)) as entry:
        end = run_entry(entry)
    _refuse_untrained(begun, end)


def tells_of_a_peer(error: BaseException) -> bool:
    """Is it what torch.distributed raises in a collective of the script's own where another rank has gone?

    Gloo and NCCL say it in a RuntimeError, in Python below torch/distributed or out of a backward.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, CommError | ScriptError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    in_collective = bool(frames) and "torch/distributed/" in frames[-1].filename
    return in_collective or isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def failure_of_script(error: BaseException, recipe: ScriptRecipe, step: int | None = None) -> Failure:
    """In words for the owner of the job: the error, and where in the script. step: the last that was committed."""
    words = without_secrets(_in_words(error, recipe), recipe)
    words = _as_the_owner_sees(words, recipe)  # a loader's process puts its traceback into them
    if len(words) > MOST_WORDS:
        words = f"{words[:MOST_WORDS]}... ({len(words)} characters; all of them are in the log)"
    where = where_in_script(error, recipe)
    return as_failure(error, words if not where else f"{words}\n{where}", step)


def _in_words(error: BaseException, recipe: ScriptRecipe) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: install it on every box, or name it under recipe.pip of the job"
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).strip()
    return words_of(error) or type(error).__name__


def where_in_script(error: BaseException, recipe: ScriptRecipe) -> str:
    """The traceback from the script's first line on; empty where none of it is the script's."""
    frames = traceback.extract_tb(error.__traceback__)
    entry = str(_root(recipe) / recipe.entry)
    first = next((i for i, frame in enumerate(frames) if frame.filename == entry), None)
    if first is None:
        return ""
    return _as_the_owner_sees("".join(traceback.format_list(frames[first : first + MOST_FRAMES])).rstrip(), recipe)


def without_secrets(words: str, recipe: ScriptRecipe) -> str:
    """With the names of the job's secrets in place of their values: a client's error may tell the URL with its token.

    A failure is stored, and shown to all who may see the job. What is short would be found in any text.
    """
    for name in recipe.secrets:
        value = os.environ.get(name, "")
        if len(value) >= _SHORTEST_SECRET:
            words = words.replace(value, f"*** (the secret {name})")
    return words


def _as_the_owner_sees(trace: str, recipe: ScriptRecipe) -> str:
    """Its files as seen from the folder that was packed: where that lies on a box says nothing to its owner."""
    return trace.replace(f'File "{_root(recipe)}{os.sep}', 'File "')


def _root(recipe: ScriptRecipe) -> Path:
    return Path.cwd() if recipe.working_dir is None else Path(recipe.working_dir)


def folder_of(recipe: ScriptRecipe) -> Path:
    """Where its files are on this box. Raises: ScriptError where they are not."""
    folder = _root(recipe)
    if not (folder / recipe.entry).is_file():
        raise ScriptError(
            f"recipe.entry = {recipe.entry!r} is no file below {folder} on this box"
            + ("" if recipe.working_dir is None else ": recipe.working_dir is a folder that every box has")
        )
    return folder


@contextmanager
def as_main(recipe: ScriptRecipe, folder: Path) -> Iterator[Path]:
    """Inside, this process looks as if python had been called with the script."""
    entry = folder / recipe.entry
    before = os.getcwd(), sys.argv, list(sys.path)
    os.environ.update({name: _secret(name, source) for name, source in recipe.secrets.items()})
    os.chdir(folder)
    sys.argv, sys.path[:0] = [str(entry), *recipe.args], [str(entry.parent)]
    _keep_connections_from_children()
    try:
        yield entry
    finally:
        os.chdir(before[0])
        sys.argv, sys.path[:] = before[1], before[2]


def _secret(name: str, source: SecretSource) -> str:
    """Its value on this box. Raises: ScriptError where the box has none; never with a value in it."""
    if source.env is not None:
        if source.env not in os.environ:
            raise ScriptError(f"recipe.secrets.{name}: the environment of Ray on this box has no {source.env}")
        return os.environ[source.env]
    assert source.file is not None
    try:
        return Path(source.file).read_text().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise ScriptError(f"recipe.secrets.{name}: {source.file} on this box: {reason}") from None


@dataclass(frozen=True, slots=True)
class End:
    """How a script ended that raised nothing: what it gave to sys.exit(), None where it came to its end.

    last_line: what it wrote last to stderr; argparse says there what is wrong with the arguments.
    """

    code: int | str | None
    last_line: str

    @property
    def words(self) -> str:
        """In words."""
        return "the script " + ("came to its end" if self.code is None else f"called sys.exit({self.code!r})")

    @property
    def last_words(self) -> str:
        """Of a script that says by its status that it has failed; empty where there are none."""
        failed = self.code not in (None, 0) and self.last_line
        return f". The last line of its stderr: {self.last_line}" if failed else ""


def run_entry(entry: Path) -> End:
    """Run it to its end. A process that it forks ends here too. Raises: what it raises but SystemExit."""
    seen, own = _LastLine(sys.stderr), os.getpid()
    try:
        with redirect_stderr(cast(TextIO, seen)):
            runpy.run_path(str(entry), run_name="__main__")
    except BaseException as error:
        if os.getpid() != own:
            _end_a_fork(error)
        if not isinstance(error, SystemExit):
            raise
        return End(0 if error.code is None else error.code, seen.line)
    if os.getpid() != own:
        _end_a_fork(None)
    return End(None, seen.line)


def _end_a_fork(error: BaseException | None) -> NoReturn:
    """End a process that the script has forked, before it does what only the worker may, such as tell how it ended."""
    code = error.code if isinstance(error, SystemExit) else error
    if code is not None and not isinstance(code, int):
        traceback.print_exception(error)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


class _LastLine:
    """A stream that keeps the last line that is written to it which is not empty, and hands everything on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._open, self._last = stream, "", ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's own."""
        *whole, self._open = (self._open + text[-_LONGEST:]).split("\n")
        self._open = self._open[-_LONGEST:]
        self._last = next((line for line in reversed(whole) if line.strip()), self._last)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As the stream's own."""
        for line in lines:
            self.write(line)

    @property
    def line(self) -> str:
        """The last one, where it is long its end."""
        return (self._open if self._open.strip() else self._last).strip()[-_LONGEST:]


def _refuse_untrained(begun: list[Session], end: End) -> None:
    """Raises: ScriptError where the script has ended and training has not."""
    if not begun:
        if end.code not in (None, 0):
            raise ScriptError(f"{end.words} before its session began{end.last_words}")
        raise ScriptError(
            f"{end.words} without a session: write `with thinwire.train.session() as run:` and loop over "
            "run.batches(...); a script that is not to be trained with is no job"
        )
    if begun[0].has_finished and end.code in (None, 0):
        return
    if not begun[0].has_begun:
        raise ScriptError(
            f"{end.words} and never drew a batch: loop over run.batches(...), inside of session(){end.last_words}"
        )
    raise ScriptError(f"{end.words} {begun[0].progress}{end.last_words}")


_watched: list[int] = []
"""The process in which forks are watched, once."""


def _keep_connections_from_children() -> None:
    """A child that a script forks has none of this worker's connections: or it would hide its death from the others."""
    if not _watched:
        _watched.append(os.getpid())
        os.register_at_fork(after_in_child=let_go_of_connections)
