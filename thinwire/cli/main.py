"""The command `thinwire`: a thin layer over the client of the REST API.

Every expected error ends as one message on stderr, with a code of `exit_codes`. Tables go to stdout, and so does
--json, for programs.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from thinwire.cli import exit_codes
from thinwire.cli.commands import Commands
from thinwire.contract.job_names import PROJECT_VARIABLE

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What comes of writing to a disk that is full, or fails; of any other error of the system a trace is shown."""

app = typer.Typer(
    cls=Commands,
    name="thinwire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    epilog=exit_codes.in_help(),
    help="Train models over thin wires: submit jobs, watch them, end them.\n\n"
    "The commands find the service through its folder, THINWIRE_HOME (default: the user's data folder), or through "
    "THINWIRE_URL and THINWIRE_TOKEN. Start with `thinwire quickstart`, or with `thinwire serve` in one terminal and "
    "`thinwire submit examples/quickstart.yaml --watch` in another.",
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # which takes longer than to start

        typer.echo(f"thinwire {version('thinwire')}")
        raise typer.Exit


@app.callback()
def every(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    project: Annotated[
        str | None,
        typer.Option(envvar=PROJECT_VARIABLE, help="Whose jobs: for who has a token for all projects."),
    ] = None,
) -> None:
    """What can be said before any command."""
    if project and os.environ.get(PROJECT_VARIABLE) != project:
        before = {PROJECT_VARIABLE: os.environ[PROJECT_VARIABLE]} if PROJECT_VARIABLE in os.environ else {}
        os.environ[PROJECT_VARIABLE] = project  # where the client looks
        context.call_on_close(lambda: (os.environ.pop(PROJECT_VARIABLE, None), os.environ.update(before)))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; leaves by SystemExit with the exit code. arguments: default is sys.argv[1:]."""
    if os.environ.get("THINWIRE_TOKEN", "").strip() and not os.environ.get("THINWIRE_URL", "").strip():
        _complain("warning: THINWIRE_TOKEN is not used, because THINWIRE_URL is not set; the token is the home's")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            app(args=None if arguments is None else list(arguments), prog_name="thinwire")
    except exit_codes.Ended as error:
        _complain(str(error))
        sys.exit(error.code)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _complain(f"{error.filename or 'what was asked for'} cannot be written: {error.strerror}")
        sys.exit(exit_codes.FAILURE)
    except Exception as error:
        from thinwire.client import errors

        if not isinstance(error, errors.ClientError):
            raise
        _complain(str(error))
        sys.exit(exit_codes.WRONG_INPUT if isinstance(error, errors.OF_INPUT) else exit_codes.FAILURE)
    sys.exit(exit_codes.SUCCESS)


def _warn(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    from thinwire.client.errors import TokenEndsSoon

    _complain(f"warning: {message}" if category is TokenEndsSoon else f"{category.__name__}: {message}")


def _complain(message: str) -> None:
    from thinwire.cli.screen import complain  # most commands have nothing to complain of

    complain(message)


if __name__ == "__main__":
    main()
