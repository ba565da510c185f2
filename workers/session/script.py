"""A script of the user's own, run in a worker of a job as `python train.py ...` would run it.

It runs as __main__, with its folder as the current one and its own folder first in sys.path. However it ends, the
owner of the job is told: what the script itself did comes first, and nothing of what called it.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.comm import CommError, PeerLost, SoloGroup
from thinwire.comm.protocol import Group
from thinwire.contract.reports import Failure
from thinwire.contract.script import ScriptRecipe, SecretSource
from thinwire.contract.spec import ScriptSpec
from thinwire.contract.summary import Summary
from thinwire.workers.course import Run
from thinwire.workers.data.feed import let_go_of_connections
from thinwire.workers.membership import MembershipError
from thinwire.workers.ranks import Ranks, RunEnded
from thinwire.workers.session.course import Left, Place, ScriptError
from thinwire.workers.session.place import placed
from thinwire.workers.session.session import Session
from thinwire.workers.telemetry.reporter import Reporter

logger = logging.getLogger(__name__)

MOST_FRAMES = 20
"""Of a traceback in a failure: the first are the script's own."""


def run_script(spec: ScriptSpec, run: Run, ranks: Ranks, device: torch.device, reporter: Reporter) -> Summary | None:
    """Run it to its end. Returns the summary on rank 0, None on the other ranks.

    Modifies: the environment, the current folder and sys.argv of this process, until it is over.
    Raises: what the script raises, the others having been told; ScriptError where it ends without having trained;
    PeerLost, MembershipError and RunEnded as workers.loop.train.
    """
    group: Group = SoloGroup() if ranks.elastic else ranks.form(0, False, {})
    place = Place(ranks, device, run, reporter, spec.checkpoint, group, spec, spec.start)
    with placed(place) as begun:
        try:
            with _as_main(spec.recipe, _folder(spec.recipe)) as entry:
                end = _run(entry)
            _refuse_untrained(begun, end)
        except Left as left:
            raise left.reason from None
        except BaseException as error:
            if (
                ranks.elastic
                and not isinstance(error, MembershipError | RunEnded)
                and not any(one.told for one in begun)
            ):
                ranks.fail(f"{type(error).__name__}: {error}")
            if not ranks.elastic and group.size > 1 and _tells_of_a_peer(error):
                raise PeerLost(f"the script's own collective failed: {error}") from error
            raise
    return begun[0].summary


def _tells_of_a_peer(error: BaseException) -> bool:
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
    words = _in_words(error, recipe)
    where = _where(error, recipe)
    text = words if not where else f"{words}\n{where}"
    return Failure(kind=type(error).__name__, message=text[:4000], step=step or None)


def _in_words(error: BaseException, recipe: ScriptRecipe) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}: install it on every box, or name it under recipe.pip of the job"
    if isinstance(error, SyntaxError):
        return _as_the_owner_sees("".join(traceback.format_exception_only(error)).strip(), recipe)
    return str(error) or type(error).__name__


def _where(error: BaseException, recipe: ScriptRecipe) -> str:
    """The traceback from the script's first line on; empty where none of it is the script's."""
    frames = traceback.extract_tb(error.__traceback__)
    name = Path(recipe.entry).name
    first = next((i for i, frame in enumerate(frames) if Path(frame.filename).name == name), None)
    if first is None:
        return ""
    return _as_the_owner_sees("".join(traceback.format_list(frames[first : first + MOST_FRAMES])).rstrip(), recipe)


def _as_the_owner_sees(trace: str, recipe: ScriptRecipe) -> str:
    """Its files as seen from the folder that was packed: where that lies on a box says nothing to its owner."""
    return trace.replace(f'File "{_root(recipe)}{os.sep}', 'File "')


def _root(recipe: ScriptRecipe) -> Path:
    return Path.cwd() if recipe.working_dir is None else Path(recipe.working_dir)


def _folder(recipe: ScriptRecipe) -> Path:
    """Where its files are on this box. Raises: ScriptError where they are not."""
    folder = _root(recipe)
    if not (folder / recipe.entry).is_file():
        raise ScriptError(
            f"recipe.entry = {recipe.entry!r} is no file below {folder} on this box"
            + ("" if recipe.working_dir is None else ": recipe.working_dir is a folder that every box has")
        )
    return folder


@contextmanager
def _as_main(recipe: ScriptRecipe, folder: Path) -> Iterator[Path]:
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


def _run(entry: Path) -> int | str | None:
    """Run it. Returns what it gave to sys.exit(), None where it came to its end. Raises: all else that it raises."""
    try:
        runpy.run_path(str(entry), run_name="__main__")
    except SystemExit as end:
        return 0 if end.code is None else end.code
    return None


def _refuse_untrained(begun: list[Session], end: int | str | None) -> None:
    """Raises: ScriptError where the script has ended and training has not."""
    how = "came to its end" if end is None else f"called sys.exit({end!r})"
    if not begun:
        raise ScriptError(
            f"the script {how} without a session: write `with thinwire.train.session() as run:` and loop over "
            "run.batches(...); a script that is not to be trained with is no job"
        )
    if begun[0].has_finished and end in (None, 0):
        return
    if not begun[0].has_begun:
        raise ScriptError(f"the script {how} and never drew a batch: loop over run.batches(...), inside of session()")
    raise ScriptError(f"the script {how} {begun[0].progress}")


_watched: list[int] = []
"""The process in which forks are watched, once."""


def _keep_connections_from_children() -> None:
    """A child that a script forks has none of this worker's connections: or it would hide its death from the others."""
    if not _watched:
        _watched.append(os.getpid())
        os.register_at_fork(after_in_child=let_go_of_connections)
