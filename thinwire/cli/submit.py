"""`thinwire submit`: a job file, or a script with its folder, in one line; and `thinwire manifest`.

`thinwire submit train.py` and a job file whose recipe is a script with a relative working_dir end in the same: a
package that the service has, and its hash in recipe.package.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue

from thinwire.cli.job_file import JobFileError, explain_rejection, read_job_file, read_job_spec
from thinwire.cli.jobs import labels_in
from thinwire.cli.packing import Unpackable, folder_of, packed_job
from thinwire.cli.screen import note
from thinwire.cli.setting import changes_of
from thinwire.cli.watch import watch_to_end
from thinwire.client import Client, Rejected, Unreachable
from thinwire.contract.job_names import fitting_name
from thinwire.contract.labels import in_metadata
from thinwire.contract.merge_patch import merged
from thinwire.contract.spec import ScriptSpec

_OF_SCRIPTS = "Scripts"
SetOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="In the place of what the file says, such as optimizer.lr=1e-3; null: the default. Repeat it.",
    ),
]
LabelOptions = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="A label, by which jobs are found again; repeat it."),
]


class Option(JobFileError):
    """An option of the command line cannot be read; the message names it."""


def submit(
    file: Annotated[
        Path,
        typer.Argument(
            help="A script, train.py; or a job as YAML or JSON: see examples/quickstart.yaml; - reads it from standard "
            "input."
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: what the script is called with.")] = None,
    follow: Annotated[
        bool, typer.Option("--watch", help="Watch the job until its end. Exit code 0 if it SUCCEEDED, else 1.")
    ] = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(help="A second submit with the same key and file finds the first job. Default: a new key."),
    ] = None,
    settings: SetOptions = None,
    label: LabelOptions = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="So many workers, no more and no fewer.", rich_help_panel=_OF_SCRIPTS)
    ] = None,
    least: Annotated[
        int | None,
        typer.Option("--min", min=1, help="The fewest workers; with fewer the job waits.", rich_help_panel=_OF_SCRIPTS),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option("--max", min=1, help="The most workers, even if more would fit.", rich_help_panel=_OF_SCRIPTS),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The job's name. Default: the script's.", rich_help_panel=_OF_SCRIPTS)
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(
            help="In the queue: low, normal, high, or a number from -100 to 100. Default: normal, 0.",
            rich_help_panel=_OF_SCRIPTS,
        ),
    ] = None,
    checkpoint_store: Annotated[
        str | None,
        typer.Option(
            help="Where checkpoints go: a folder that all boxes share, or a URL.", rich_help_panel=_OF_SCRIPTS
        ),
    ] = None,
    working_dir: Annotated[
        Path | None,
        typer.Option(help="The folder that is sent along. Default: the script's own.", rich_help_panel=_OF_SCRIPTS),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="ID[@STEP]",
            help="Go on from a checkpoint of another job, the newest or the one of that step.",
            rich_help_panel=_OF_SCRIPTS,
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="With --from: the model alone, from step 0 with a fresh optimizer.",
            rich_help_panel=_OF_SCRIPTS,
        ),
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Begin with the weights of a safetensors file, which all boxes see under this path, or a URL.",
            rich_help_panel=_OF_SCRIPTS,
        ),
    ] = None,
    pip: Annotated[
        list[str] | None,
        typer.Option(help="A requirement that each box installs; repeat it.", rich_help_panel=_OF_SCRIPTS),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE for the script's environment; everybody sees it; repeat it.", rich_help_panel=_OF_SCRIPTS
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=env:VARIABLE or NAME=file:/path: the script's environment, read on each box; repeat it.",
            rich_help_panel=_OF_SCRIPTS,
        ),
    ] = None,
) -> None:
    """Submit a job and print its ID.

    With a script, its folder is packed and sent along, without what .gitignore and .rayignore leave out. The service
    checks the job before anything starts. If it refuses it, the command prints each problem with its path, its value
    and what is allowed (exit code 2).

    Examples: `thinwire submit train.py --workers 4 -- --lr 1e-3`, `thinwire submit train.py --from other-3f`,
    `thinwire submit examples/quickstart.yaml --set steps=60 --set optimizer.lr=1e-3 --label team=vision --watch`
    """
    of_scripts = {
        "--workers": workers,
        "--min": least,
        "--max": most,
        "--name": name,
        "--priority": priority,
        "--checkpoint-store": checkpoint_store,
        "--from": origin,
        "--weights-only": weights_only or None,
        "--weights": weights,
        "--working-dir": working_dir,
        "--pip": pip,
        "--env": env,
        "--secret": secret,
    }
    if idempotency_key == "":
        raise Option("--idempotency-key is empty: give a key, or leave the option out, and each submit is a new job")
    if file.is_dir():
        raise Option(f"{file} is a folder: name the script in it, as in `thinwire submit {file / 'train.py'}`")
    if file.suffix == ".py":
        job, folder = script_job(
            file,
            working_dir,
            arguments or (),
            name=name,
            priority=priority,
            workers=_workers(workers, least, most),
            store=checkpoint_store,
            start=_start(origin, weights, weights_only=weights_only),
            pip=pip or (),
            env=env or (),
            secrets=secret or (),
        )
        local: Path | None = folder
    else:
        given = [option for option, value in of_scripts.items() if value not in (None, [])] + (arguments or [])
        if given:
            raise Option(
                f"{', '.join(given)}: only for a script, whose name ends in .py, and {file} is read as a job file: "
                "write it there"
            )
        job = read_job_file(file)
        local = None
    job = changed(job, settings, label)
    local = local or folder_of(job, file)
    _submit(file, job, local, idempotency_key or uuid.uuid4().hex, follow=follow)


def changed(
    job: dict[str, JsonValue], settings: Sequence[str] | None, labels: Sequence[str] | None
) -> dict[str, JsonValue]:
    """The job with what `--set` and `--label` say. Raises JobFileError, typer.BadParameter."""
    job = merged(job, changes_of(settings or ()))
    if not labels:
        return job
    known = job.get("labels")
    return {**job, "labels": {**(known if isinstance(known, dict) else {}), **labels_in(labels)}}


def _workers(workers: int | None, least: int | None, most: int | None) -> dict[str, int]:
    if workers is not None and (least is not None or most is not None):
        raise Option("--workers sets both --min and --max: give it, or those")
    if least is not None and most is not None and least > most:
        raise Option(f"--min {least} is more than --max {most}: no number of workers is within both")
    limits = {"min": least if workers is None else workers, "max": most if workers is None else workers}
    if limits["max"] is None and least is not None:
        limits["max"] = least
    return {limit: value for limit, value in limits.items() if value is not None}


def _start(origin: str | None, weights: str | None, *, weights_only: bool) -> dict[str, JsonValue]:
    """The field `start` of the job. Raises: Option."""
    if origin is None and weights_only:
        raise Option("--weights-only goes with --from: it says what is taken of that job's checkpoint")
    if origin is not None and weights is not None:
        raise Option("--from and --weights: a job begins with one of them")
    if weights is not None:
        return {"weights": weights if "://" in weights else str(Path(weights).absolute())}
    if origin is None:
        return {}
    job, at, step = origin.partition("@")
    if not job or (at and not step.isdecimal()):
        raise Option(f"--from {origin} must be ID or ID@STEP, such as my-model-3f@500")
    return {
        "job": job,
        **({"step": int(step)} if at else {}),
        **({"what": "weights"} if weights_only else {}),
    }


def _submit(file: Path, job: dict[str, JsonValue], folder: Path | None, key: str, *, follow: bool) -> None:
    with Client() as client:
        start = job.get("start")
        if file.suffix == ".py" and isinstance(start, dict) and isinstance(start.get("job"), str):
            job = {**job, "start": {**start, "job": client.resolve(str(start["job"])).id}}
        if folder is not None:
            job = packed_job(client, job, folder)
        try:
            accepted = client.submit(job, key)
        except Rejected as error:
            raise explain_rejection(file, str(error), error.problems) from error
        except Unreachable as error:
            raise Unreachable(f"{error}\nTo try again without a second job, add: --idempotency-key {key}") from error
        typer.echo(accepted.id)
        if follow:
            watch_to_end(client, accepted)
            return
    why = f" ({accepted.reason})" if accepted.reason else ""
    note(
        f"{accepted.name} is {accepted.state}{why}. Next: `thinwire watch {accepted.id}`, `thinwire logs {accepted.id} "
        "-f`."
    )


def script_job(
    script: Path,
    working_dir: Path | None,
    arguments: Sequence[str],
    *,
    name: str | None,
    priority: str | None = None,
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
    job: dict[str, JsonValue] = {
        "name": (fitting_name(script.stem) or "job") if name is None else name,
        "recipe": recipe,
    }
    if priority is not None:
        job["priority"] = int(priority) if priority.removeprefix("-").isdecimal() else priority
    if workers:
        job["workers"] = dict(workers)
    if store is not None:
        job["checkpoint"] = {"store": store}
    if start:
        job["start"] = dict(start)
    return job, folder


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


def manifest(
    file: Annotated[Path, typer.Argument(help="A job file, as for `thinwire submit`.", show_default=False)],
    template: Annotated[
        Path | None,
        typer.Option(
            help="A RayJob to fill in. Default: the service's own, or $THINWIRE_KUBERAY_TEMPLATE.",
            envvar="THINWIRE_KUBERAY_TEMPLATE",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Of head and workers. Default: those of the template.", envvar="THINWIRE_KUBERAY_IMAGE"),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Of the RayJob.", envvar="THINWIRE_KUBERAY_NAMESPACE")] = "default",
    added: Annotated[
        Path | None,
        typer.Option(
            help="A file with what is added to the pods, as kuberay.pods of the chart.", envvar="THINWIRE_KUBERAY_PODS"
        ),
    ] = None,
) -> None:
    """Print the RayJob that a service with the launcher kuberay makes of a job file. Nothing is started.

    For reading, and as the beginning of a template of your own (docs/kubernetes.md). The words in capitals, such as
    TICKET, are filled in by the service when it submits an attempt: a RayJob applied by hand would be refused by it.

    Example: `thinwire manifest examples/quickstart.yaml | kubectl apply --dry-run=server -f -`
    """
    from thinwire.service.launch.driver import command_line, script_of_workers
    from thinwire.service.launch.kuberay.manifest import Attempt, TemplateRefused, printed, rayjob, read_template
    from thinwire.service.launch.protocol import Code

    job = read_job_file(file)
    packed = folder_of(job, file) is not None  # by `thinwire submit`
    if packed:
        asked = job["recipe"]
        assert isinstance(asked, dict)
        job = {**job, "recipe": {**asked, "working_dir": None, "package": "0" * 64}}
    spec = read_job_spec(file, job)
    words: list[str] = []
    job_id = f"{spec.name}-SUFFIX"
    if isinstance(spec, ScriptSpec):
        recipe = spec.recipe
        sha256 = "SHA256" if packed else recipe.package
        words = script_of_workers(Code(None, sha256, recipe.working_dir, recipe.pip, recipe.env_vars))
    try:
        made = rayjob(
            read_template(template, image, added),
            Attempt(
                service_id="SERVICE",
                submission_id=job_id,
                entrypoint=command_line("URL", job_id, 1, "TICKET", words),
                metadata={"job_id": job_id, "job_name": spec.name, "attempt": "1", **in_metadata(spec.labels)},
                spec=spec,
                least=spec.workers.min,
                most=spec.workers.max,
                namespace=namespace,
            ),
        )
    except TemplateRefused as error:
        raise JobFileError(str(error)) from None
    typer.echo(printed(made), nl=False)
