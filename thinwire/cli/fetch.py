"""The command `thinwire fetch`: the trained weights of a job, from wherever its checkpoints lie."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from thinwire.cli.commands import work
from thinwire.cli.job_ids import JobId
from thinwire.cli.quantities import bytes_text
from thinwire.cli.screen import complain, note
from thinwire.client import Client, NotFound
from thinwire.contract.jobs import CheckpointFiles, CheckpointList, Job
from thinwire.contract.reports import Event, Sample
from thinwire.contract.run_folder import RunFolder, checkpoints_in
from thinwire.contract.weights import Fetched, FetchFailed

TRIES = 3
"""A run that goes on removes its older checkpoints while they are read."""
_MANIFEST = "manifest.json"
_FOLDER = re.compile(r"step-(\d{8,})-([0-9a-f]{12})")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Fetching(Protocol):
    """workers.weights.fetch."""

    def __call__(self, where: str, target: Path, *, replace: bool) -> Fetched:
        """Raises FetchFailed."""


class Writing(Protocol):
    """workers.telemetry.trackers.of_history.write_files."""

    def __call__(self, tool: str, job: Mapping[str, Any], items: Sequence[Sample | Event], target: Path) -> Path:
        """Raises FetchFailed."""


def fetch(
    job_id: JobId,
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder for the files. Default: one with the job's ID, here.")
    ] = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="The newest checkpoint as well, as the workers have written it.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Not the weights: the figures so far, as event files of TensorBoard.")
    ] = False,
    wandb: Annotated[
        bool, typer.Option("--wandb", help="Not the weights: the figures so far, as an offline run for `wandb sync`.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Put other weights in the place of those that are there.")
    ] = False,
) -> None:
    """Fetch the weights of a job's newest checkpoint, as model.safetensors.

    The checkpoints are read from the job's checkpoint.store, or through the service where it names none. Any job has
    weights that has saved a checkpoint, whether it goes on, has ended or has failed.

    With --tensorboard or --wandb it is what the service keeps of the job's figures, for runs whose workers share no
    folder with it. Asked again, scalars of TensorBoard begin anew.

    It says first where the files go. Weights that lie there stay, unless they are the same, or --force is given.

    Example: `thinwire fetch quickstart-3f --to model`
    """
    tools = [name for name, is_asked in (("tensorboard", tensorboard), ("wandb", wandb)) if is_asked]
    if tools and checkpoint:
        complain(f"--checkpoint goes with the weights, and --{tools[0]} is in their place: ask one after the other")
        raise typer.Exit(2)
    do_fetch: Fetching | None = None
    if not tools:  # first: what is not installed here need not be downloaded for
        do_fetch = work("fetch")
    with Client() as client:
        job = client.resolve(job_id)
        target = to or Path(job.id)
        if target.exists() and not target.is_dir():
            complain(f"--to {target} is a file: name a folder, or one to be made")
            raise typer.Exit(2)
        note(f"The files go to {target.absolute()}.")
        try:
            if do_fetch is None:
                _figures(client, job, target, tools)
                return
            with _checkpoints(client, job, target, keep=checkpoint) as where:
                found = do_fetch(where, target, replace=force)
        except FetchFailed as error:
            complain(str(error))
            raise typer.Exit(1) from None
    note(
        f"{job.name}, step {found.step}: {found.tensors} tensors, {found.parameters:,} elements, "
        f"{bytes_text(found.bytes)}."
    )
    typer.echo(found.path)


def _figures(client: Client, job: Job, target: Path, tools: Sequence[str]) -> None:
    """Write what the service keeps of a job's figures. Raises: FetchFailed, ClientError."""
    write: Writing = work("files")
    found = client.history(job.id)
    if not found.samples:
        raise FetchFailed(f"job {job.id} has made no step yet, as far as the service knows")
    items: list[Sample | Event] = [*found.samples, *found.events]
    told = {"job_id": job.id, "name": job.name, "spec": {} if job.spec is None else job.spec.model_dump(mode="json")}
    for tool in tools:
        where = write(tool, told, items, target)
        note(f"{job.name}: {len(found.samples):,} samples and {len(found.events):,} events.")
        typer.echo(where)


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
