"""The command `thinwire fetch`: the trained weights of a job, from wherever its checkpoints lie."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer

from thinwire.cli.commands import work
from thinwire.cli.job_ids import JobId
from thinwire.cli.quantities import bytes_text
from thinwire.cli.screen import complain, note
from thinwire.client import Client, NotFound
from thinwire.contract.jobs import CheckpointFiles, CheckpointList, Job
from thinwire.contract.run_folder import RunFolder, checkpoints_in
from thinwire.contract.weights import Fetched, FetchFailed

TRIES = 3
"""A run that goes on removes its older checkpoints while they are read."""
_MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{12})")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Fetching(Protocol):
    """workers.weights.fetch."""

    def __call__(self, where: str, target: Path) -> Fetched:
        """Raises FetchFailed."""


def fetch(
    job_id: JobId,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder for the files. Default: one with the job's ID, here.")
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="The newest checkpoint as well, as the workers have written it.")
    ] = False,
) -> None:
    """Fetch the weights of a job's newest checkpoint, as model.safetensors.

    The checkpoints are read from the job's checkpoint.store, or through the service where it names none. Any job has
    weights that has saved a checkpoint, whether it goes on, has ended or has failed.

    Example: `thinwire fetch quickstart-3f --to model`
    """
    do_fetch: Fetching = work("fetch")  # first: what is not installed here need not be downloaded for
    with Client() as client:
        job = client.resolve(job_id)
        target = to or Path(job.id)
        if target.exists() and not target.is_dir():
            complain(f"--to {target} is a file: name a folder, or one to be made")
            raise typer.Exit(2)
        try:
            with _checkpoints(client, job, target, keep=checkpoint) as where:
                found = do_fetch(where, target)
        except FetchFailed as error:
            complain(str(error))
            raise typer.Exit(1) from None
    note(
        f"{job.name}, step {found.step}: {found.tensors} tensors, {found.parameters:,} elements, "
        f"{bytes_text(found.bytes)}."
    )
    typer.echo(found.path)


@contextmanager
def _checkpoints(client: Client, job: Job, target: Path, *, keep: bool) -> Iterator[str]:
    """A path or URL where the job's checkpoints can be read. keep: a copy of the newest stays in the target folder.

    Raises: FetchFailed, ClientError.
    """
    known = client.checkpoints(job.id)
    if known.store is not None:
        if keep:
            raise FetchFailed(f"the checkpoints lie in {known.store} already: copy {job.id} from there")
        yield checkpoints_in(known.store, job.id)
        return
    own = RunFolder(Path(job.run_dir)).checkpoints
    if own.is_dir() and not keep:  # the service's machine is this one
        yield str(own)
        return
    folder = target / "checkpoints"
    if keep:
        _download(client, job.id, known, folder)
        yield str(folder)
        return
    with tempfile.TemporaryDirectory(prefix="thinwire-fetch-") as temporary:
        _download(client, job.id, known, Path(temporary))
        yield temporary


def _download(client: Client, job_id: str, known: CheckpointList, folder: Path) -> None:
    """Copy the newest whole checkpoint into a folder. Raises: FetchFailed, ClientError."""
    for left in reversed(range(TRIES)):
        newest = max((one for one in known.checkpoints if _whole(one)), key=_age, default=None)
        if newest is None:
            raise FetchFailed(
                f"job {job_id} has no whole checkpoint yet: see checkpoint.every_steps in `thinwire show`"
            )
        size = sum(file.bytes for file in newest.files)
        note(f"Fetching checkpoint {newest.folder}, {bytes_text(size)}.")
        try:
            for file in newest.files:
                client.checkpoint_file(job_id, newest.folder, file.name, folder / newest.folder / file.name)
        except OSError as error:
            raise FetchFailed(f"{error.filename or folder} cannot be written: {error.strerror}") from error
        except NotFound:
            if not left:
                raise
            known = client.checkpoints(job_id)
        else:
            return


def _whole(one: CheckpointFiles) -> bool:
    """The names come from a service: they become paths here."""
    names = [file.name for file in one.files]
    return bool(_FOLDER.fullmatch(one.folder)) and _MANIFEST in names and all(map(_NAME.fullmatch, names))


def _age(one: CheckpointFiles) -> tuple[int, int]:
    match = _FOLDER.fullmatch(one.folder)
    assert match is not None
    return int(match[2], 16), int(match[1])
