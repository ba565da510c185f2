"""The commands `thinwire token` and `thinwire audit`: who may use the service, and who has changed what."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from thinwire.cli.quantities import duration_s, time_text
from thinwire.cli.screen import complain, complain_of, note, print_columns
from thinwire.client import Client, Rejected
from thinwire.contract.people import AuditLine, AuditList, NewToken, Role, TokenItem, TokenList
from thinwire.contract.projects import EVERY

tokens = typer.Typer(
    no_args_is_help=True,
    help="Tokens for people and programs: make, list, revoke; and rotate the operator's own. For operators.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON as the REST API gives it, for programs.")]


@tokens.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose it is: anna, ci, prometheus.")],
    role: Annotated[
        Role,
        typer.Option(help="viewer: reads. user: does everything to jobs. operator: hands out tokens, reads the audit."),
    ] = Role.USER,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="It expires after so long: 30d, 12h, 52w. Default: never.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(hidden=True, help="The same in days, as earlier versions had it.")
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="Whose jobs it sees and changes; '*' for those of all. Default: your own.")
    ] = None,
) -> None:
    """Make a token, and print it: this once. The service keeps its SHA-256 alone.

    Example: `thinwire token create anna --expires 90d > anna.token`
    """
    if expires is not None:
        if days is not None:
            complain("--expires and --days say the same: give one")
            raise typer.Exit(2)
        try:
            days = duration_s(expires) / 86_400.0
        except ValueError as error:
            complain(f"--expires: {error}")
            raise typer.Exit(2) from None
    try:
        asked = NewToken(name=name, role=role, days=days, project=project)
        with Client() as client:
            made = client.create_token(asked)
    except ValidationError as error:
        complain_of(error)
        raise typer.Exit(2) from None
    except Rejected as error:
        complain(str(error))
        raise typer.Exit(2) from None
    typer.echo(made.token)
    until = f"until {time_text(made.expires_at)}" if made.expires_at else "until it is revoked"
    whose = "of all projects" if made.project == EVERY else f"of the project {made.project}"
    note(
        f"{made.name} has the role {made.role} {whose}, {until}. The token above is not shown again. It is used with "
        "THINWIRE_URL and THINWIRE_TOKEN, or as 'Authorization: Bearer'."
    )


@tokens.command("list")
def list_tokens(as_json: AsJson = False) -> None:
    """List everybody's tokens: role, when made and by whom, last used, how long valid. Not the texts."""
    with Client() as client:
        found = client.tokens()
    if as_json:
        typer.echo(TokenList(tokens=found).model_dump_json(indent=2))
        return
    if not found:
        note("No tokens but the operator's, in the home. Next: `thinwire token create NAME`.")
        return
    rows = [("NAME", "ROLE", "PROJECT", "CREATED", "BY", "LAST USED", "STATE")]
    rows += [
        (
            token.name,
            str(token.role),
            token.project,
            time_text(token.created_at),
            token.created_by,
            time_text(token.last_used_at) if token.last_used_at else "-",
            _state(token),
        )
        for token in found
    ]
    print_columns(rows)


@tokens.command("move")
def move(
    name: Annotated[str, typer.Argument(help="As `thinwire token list` shows it.")],
    project: Annotated[str, typer.Argument(help="Whose jobs it sees and changes from now on; '*' for those of all.")],
) -> None:
    """Let a token be for another project from now on. The jobs of its owner stay where they are, and go on.

    Example: `thinwire token move anna vision`
    """
    with Client() as client:
        moved = client.move_token(name, project)
    note(f"The token {moved.name} is for {'all projects' if project == EVERY else f'the project {project}'} now.")


@tokens.command("revoke")
def revoke(name: Annotated[str, typer.Argument(help="As `thinwire token list` shows it.")]) -> None:
    """Refuse a token from now on. The jobs of its owner go on.

    Example: `thinwire token revoke anna`
    """
    with Client() as client:
        client.revoke_token(name)
    note(f"The token {name} is refused from now on. Jobs that were submitted with it go on.")


@tokens.command("rotate")
def rotate() -> None:
    """Put a new operator's token into the home of the service, which goes on. The old one is refused at once.

    It prints the new one. The commands on the service's machine read it from the home at each call, and so does
    Prometheus with a `credentials_file`; people with a copy need the new one. Nothing happens to people's tokens and
    to jobs.

    Example: `thinwire token rotate > operator.token`
    """
    with Client() as client:
        token = client.rotate_token()
    typer.echo(token)
    note(
        "The operator's token is the one above, and in the file 'token' of the service's home. The one before is "
        "refused from now on. Nothing happens to people's tokens and to jobs."
    )


def audit(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The most lines.")] = 50,
    who: Annotated[str | None, typer.Option(help="Only what this one has asked for.")] = None,
    job_id: Annotated[str | None, typer.Option("--job", metavar="ID", help="Only what was asked of this job.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show who has changed what, newest first: submissions, changes, cancels, deletions, tokens. For operators.

    Example: `thinwire audit --who anna`
    """
    with Client() as client:
        lines = client.audit(limit, who=who, job_id=job_id)
    if as_json:
        typer.echo(AuditList(lines=lines).model_dump_json(indent=2))
        return
    if not lines:
        note("No such change is known.")
        return
    rows = [("TIME", "WHO", "ROLE", "WHAT", "JOB", "ABOUT", "FROM", "RESULT")]
    print_columns(rows + [_row(line) for line in lines])


def _row(line: AuditLine) -> tuple[str, ...]:
    done = "done" if line.status < 400 else "refused"
    return (
        time_text(line.time),
        line.who,
        str(line.role or "-"),
        line.what,
        line.job_id or "-",
        line.about or "-",
        line.address or "-",
        f"{done} ({line.status})",
    )


def _state(token: TokenItem) -> str:
    if token.revoked_at:
        return f"revoked {time_text(token.revoked_at)}"
    if token.expires_at is None:
        return "valid"
    return f"{'valid until' if token.valid else 'expired'} {time_text(token.expires_at)}"
