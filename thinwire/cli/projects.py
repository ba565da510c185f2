"""The commands `thinwire project` and `thinwire quotas`: teams that share a service, and what each may use."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import JsonValue, ValidationError

from thinwire.cli.people import AsJson
from thinwire.cli.quantities import bytes_text
from thinwire.cli.screen import complain, complain_of, note, print_columns
from thinwire.client import Client, Rejected
from thinwire.contract.projects import Limits, NewProject, ProjectList, Quota, QuotaList

projects = typer.Typer(
    no_args_is_help=True,
    help="Projects: teams that share the service, each with its own jobs. Operators of all projects make them.",
)

Name = Annotated[str, typer.Argument(help="Of the project.")]


@projects.command("list")
def list_projects(as_json: AsJson = False) -> None:
    """List the projects that you are of: weight, priorities, how many limits."""
    with Client() as client:
        found = client.projects()
    if as_json:
        typer.echo(ProjectList(projects=found).model_dump_json(indent=2))
        return
    rows = [("NAME", "WEIGHT", "PRIORITIES", "KUEUE QUEUES")]
    rows += [
        (one.name, f"{one.weight:g}", ",".join(one.priorities), ",".join(one.kueue_queues or ()) or "-")
        for one in found
    ]
    print_columns(rows)


@projects.command("create")
def create(name: Name) -> None:
    """Make a project. Then make tokens for it: `thinwire token create NAME --project PROJECT`.

    Example: `thinwire project create vision`
    """
    try:
        with Client() as client:
            client.create_project(NewProject(name=name))
    except ValidationError as error:
        complain_of(error)
        raise typer.Exit(2) from None
    note(f"There is a project {name} now. Next: `thinwire token create SOMEBODY --project {name}`.")


@projects.command("set")
def change(
    name: Name,
    weight: Annotated[float | None, typer.Option(help="Its share of the cluster, beside those of the others.")] = None,
    priority: Annotated[
        list[str] | None, typer.Option(help="Its jobs may have low, normal or high priority; repeat it.")
    ] = None,
    kueue_queue: Annotated[
        list[str] | None, typer.Option(help="A LocalQueue that its jobs may name; repeat it. '*': any.")
    ] = None,
    kueue_priority: Annotated[
        list[str] | None, typer.Option(help="A WorkloadPriorityClass that they may name; repeat it. '*': any.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help=f"NAME=NUMBER, or NAME=none, of {', '.join(Limits.model_fields)}; repeat it."),
    ] = None,
    person_limit: Annotated[
        list[str] | None, typer.Option(help="The same for each person in the project; repeat it.")
    ] = None,
) -> None:
    """Change what a project may have. What is not named stays. A limit below what is used ends nothing.

    Example: `thinwire project set vision --weight 2 --limit workers=32 --person-limit queued_jobs=10`
    """
    given: dict[str, JsonValue] = {
        "weight": weight,
        "priorities": _list(priority),
        "kueue_queues": _list(kueue_queue),
        "kueue_priorities": _list(kueue_priority),
        "limits": _limits(limit, "--limit"),
        "person_limits": _limits(person_limit, "--person-limit"),
    }
    changes = {key: None if value == ["*"] else value for key, value in given.items() if value is not None}
    if not changes:
        complain("say what is to be changed: `thinwire project set --help`")
        raise typer.Exit(2)
    with Client() as client:
        try:
            client.change_project(name, changes)
        except Rejected as error:
            lines = [f"  {problem.path}: {problem.message}" for problem in error.problems]
            complain("\n".join([f"{name} stays as it is:", *(lines or [f"  {error}"])]))
            raise typer.Exit(2) from None
    note(f"{name} is changed. `thinwire quotas` shows what it uses.")


@projects.command("delete")
def delete(name: Name) -> None:
    """Remove a project of which there are no jobs, tokens and packages any more.

    Example: `thinwire project delete vision`
    """
    with Client() as client:
        client.delete_project(name)
    note(f"There is no project {name} any more.")


def quotas(
    project: Annotated[str | None, typer.Option(help="Of this project alone. Default: of all that you are of.")] = None,
    person: Annotated[str | None, typer.Option(help="And of this person. Default: you.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what your project uses of what it may, and you in it.

    Example: `thinwire quotas --project vision --person anna`
    """
    with Client() as client:
        found = client.quotas(project, person)
    if as_json:
        typer.echo(QuotaList(quotas=found).model_dump_json(indent=2))
        return
    rows = [("PROJECT", "PERSON", *(name.replace("_", " ").upper() for name in Limits.model_fields))]
    print_columns(rows + [(one.project, one.person or "-", *_used(one)) for one in found])


def _used(quota: Quota) -> list[str]:
    used, limits = quota.used.model_dump(), quota.limits.model_dump()

    def text(name: str, value: int | None) -> str:
        return "-" if value is None else bytes_text(value) if name.endswith("_bytes") else str(value)

    return [f"{text(name, used[name])} of {text(name, limits[name])}" for name in limits]


def _list(given: list[str] | None) -> JsonValue:
    return None if not given else [word for one in given for word in one.split(",")]


def _limits(given: list[str] | None, option: str) -> JsonValue:
    found: dict[str, JsonValue] = {}
    for one in given or ():
        name, _, value = one.partition("=")
        if value != "none" and not (value.isascii() and value.isdecimal()):
            complain(f"{option} {one!r} must be NAME=NUMBER, or NAME=none for no limit")
            raise typer.Exit(2)
        found[name] = None if value == "none" else int(value)
    return found or None
