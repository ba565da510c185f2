"""A job of a script, made of a command line; and the folder of a script, brought to the service.

`thinwire submit train.py` and a job file whose recipe is a script with a relative working_dir end in the same: a
package that the service has, and its hash in recipe.package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from thinwire.cli.client import Client
from thinwire.cli.job_file import JobFileError
from thinwire.cli.packing import Listing, Packed, Unpackable, list_folder, pack
from thinwire.cli.quantities import bytes_text
from thinwire.cli.screen import note

LARGE_BYTES = 5 << 20
"""Above it the progress is shown."""
_MOST_NAMED = 5


class Option(JobFileError):
    """An option of the command line cannot be read; the message names it."""


def script_job(
    script: Path,
    working_dir: Path | None,
    arguments: Sequence[str],
    *,
    name: str | None,
    workers: Mapping[str, int],
    store: str | None,
    start: Mapping[str, JsonValue],
    pip: Sequence[str],
    env: Sequence[str],
    secrets: Sequence[str],
) -> tuple[dict[str, JsonValue], Path]:
    """The job as JSON, without its package, and the folder to pack. Raises: Option, Unpackable."""
    folder = script.parent if working_dir is None else working_dir
    try:
        entry = script.resolve(strict=True).relative_to(folder.resolve(strict=True)).as_posix()
    except OSError as error:
        raise Unpackable(f"{error.filename or script} cannot be read: {error.strerror}") from error
    except ValueError:
        raise Unpackable(f"{script} does not lie in {folder}: --working-dir names a folder above the script") from None
    recipe: dict[str, JsonValue] = {"name": "script", "entry": entry, "args": list(arguments)}
    if pip:
        recipe["pip"] = list(pip)
    if env:
        recipe["env_vars"] = dict(_pair(one, "--env", "NAME=VALUE") for one in env)
    if secrets:
        recipe["secrets"] = dict(_secret(one) for one in secrets)
    job: dict[str, JsonValue] = {"name": _named(script) if name is None else name, "recipe": recipe}
    if workers:
        job["workers"] = dict(workers)
    if store is not None:
        job["checkpoint"] = {"store": store}
    if start:
        job["start"] = dict(start)
    return job, folder


def folder_of(job: Mapping[str, JsonValue], job_file: Path) -> Path | None:
    """The folder on this machine that a job file names; None where it names none, or one on the boxes."""
    recipe = job.get("recipe")
    if not isinstance(recipe, dict) or recipe.get("name") != "script":
        return None
    folder = recipe.get("working_dir")
    if not isinstance(folder, str) or recipe.get("package") is not None or folder.startswith("/"):
        return None
    return job_file.parent / folder


def packed_job(client: Client, job: Mapping[str, JsonValue], folder: Path) -> dict[str, JsonValue]:
    """The job with a package of the folder, which the service has now. Tells on stderr what it does.

    Raises: Unpackable, ClientError.
    """
    listing = list_folder(folder)
    recipe = job["recipe"]
    assert isinstance(recipe, dict)
    _check_entry(listing, recipe.get("entry"))
    with _progress("packing", listing.size) as packing:
        packed = pack(listing, packing)
    with packed.file:
        note(_told(listing, packed))
        if client.has_package(packed.sha256):
            note("The service has this package already.")
        else:
            with _progress("uploading", packed.size) as uploading:
                client.put_package(packed.sha256, packed.file, packed.size, uploading)
    kept = {field: value for field, value in recipe.items() if field != "working_dir"}
    return {**job, "recipe": {**kept, "package": packed.sha256}}


def _check_entry(listing: Listing, entry: JsonValue) -> None:
    if entry in {one.name for one in listing.entries} or not isinstance(entry, str):
        return
    for left_out in listing.left_out:
        if entry == left_out or entry.startswith(f"{left_out}/"):
            raise Unpackable(
                f"{listing.folder / left_out} is left out by .gitignore or .rayignore, and {entry} with it"
            )
    raise Unpackable(f"there is no file {entry} in {listing.folder}: recipe.entry is the script, seen from its folder")


def _told(listing: Listing, packed: Packed) -> str:
    files = sum(not entry.name.endswith("/") for entry in listing.entries)
    text = (
        f"Packed {files} {'file' if files == 1 else 'files'} of {listing.folder}: {bytes_text(listing.size)}, "
        f"{bytes_text(packed.size)} as a zip."
    )
    if not listing.left_out:
        return text
    more = f" and {len(listing.left_out) - _MOST_NAMED} more" if len(listing.left_out) > _MOST_NAMED else ""
    return f"{text} Left out: {', '.join(listing.left_out[:_MOST_NAMED])}{more}."


@contextmanager
def _progress(what: str, size: int) -> Iterator[_Advance]:
    """A bar on stderr for what is large, where somebody looks."""
    if size < LARGE_BYTES or not sys.stderr.isatty():
        yield _Advance(None)
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(what, total=size)
        yield _Advance(shown)


class _Advance:
    """Tells a progress bar that so many bytes more are done; nobody where there is none."""

    def __init__(self, shown: Progress | None) -> None:
        self._shown = shown

    def __call__(self, size: int) -> None:
        if self._shown is not None:
            self._shown.advance(self._shown.task_ids[0], size)


def _named(script: Path) -> str:
    name = re.sub(r"[^a-z0-9.-]+", "-", script.stem.lower()).strip(".-")
    return name[:63].strip(".-") or "job"


def _pair(given: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not name or not equals:
        raise Option(f"{option} {given!r} must be {form}")
    return name, value


def _secret(given: str) -> tuple[str, JsonValue]:
    form = "NAME=env:VARIABLE or NAME=file:/a/path, which each box reads for itself"
    name, equals, source = given.partition("=")
    kind, colon, where = source.partition(":")
    if not name or not equals or not colon or kind not in ("env", "file"):
        # Not the value: a person who mistook the option may have written the secret itself.
        raise Option(f"--secret {name if equals else ''}=... must be {form}")
    return name, {kind: where}
