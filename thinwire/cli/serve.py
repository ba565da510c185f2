"""The command `thinwire serve`: the service, in the foreground."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer
from pydantic import ValidationError

from thinwire.cli.screen import complain, complain_of, note
from thinwire.contract import logs as log_lines
from thinwire.service.config import Settings
from thinwire.service.launch.protocol import LauncherError


class LauncherName(StrEnum):
    """What runs the jobs."""

    LOCAL = "local"
    RAY = "ray"
    KUBERAY = "kuberay"
    FAKE = "fake"


def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1, this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. Default: 0, a free one.")] = None,
    launcher: Annotated[
        LauncherName | None,
        typer.Option(
            help="local: a Ray of its own on this machine (default). ray: the cluster of THINWIRE_RAY_ADDRESS. "
            "kuberay: a RayJob in Kubernetes for each attempt. fake: runs nothing, for development."
        ),
    ] = None,
) -> None:
    """Run the service in the foreground, until Ctrl-C or SIGTERM.

    The service keeps everything in THINWIRE_HOME: the token, the database, the runs. The other commands find it there.
    If the service is killed, its jobs go on; started again, it follows them to their end.

    Example: `thinwire serve --port 8400`
    """
    # Not at the top: the other commands need no web server.
    from thinwire.service.server import ServeRefused
    from thinwire.service.server import serve as run_server

    given = {"host": host, "port": port, "launcher": launcher and launcher.value}
    try:
        settings = Settings.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        complain_of(error)
        raise typer.Exit(2) from None
    log_lines.set_up(settings.log_format, stream=sys.stderr)
    try:
        run_server(settings, on_started=lambda url: note(_welcome(settings, url)))
    except (ServeRefused, LauncherError) as error:
        complain(str(error))
        raise typer.Exit(1) from None


def _welcome(settings: Settings, url: str) -> str:
    return (
        f"Thinwire serves {settings.home} at {url}; documents at {url}/docs. Ctrl-C ends it.\n"
        "In another terminal, with the same THINWIRE_HOME: `thinwire submit examples/quickstart.yaml --watch`"
    )
