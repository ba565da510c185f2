"""Commands that are imported only when they are called: four of our own, and those of other packages.

Another package joins `thinwire` by the entry-point group `thinwire.commands`. An entry point names a `typer.Typer`; its
name becomes the command's name:

    [project.entry-points."thinwire.commands"]
    survey = "my_package.survey:app"

A Typer with one command and no callback becomes a plain command (`thinwire drill --kill 3`), any other a group
(`thinwire lab up`). `thinwire --help` imports every module named in the group, and none of our own: import what is
heavy inside the commands, not at the top of the module. A command whose module lacks another one says what to install.

What some commands of ours do needs torch and ray. The command line imports neither: `work` finds the function by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from thinwire.cli.extras import install_line

GROUP = "thinwire.commands"
OWN_COMMANDS = {
    "bench": (
        "thinwire.cli.bench:app",
        "Measure kernels, collectives, the exchange and whole training steps in a lab.",
    ),
    "doctor": ("thinwire.cli.doctor:app", "Say what is wrong with boxes and links, before a job suffers from it."),
    "drill": ("thinwire.cli.drill:app", "Kill workers of a real job, and see what it costs."),
    "lab": ("thinwire.cli.lab:app", "Several machines on slow Ethernet, in a box: check, up, run, down."),
}
"""Name, where it is, and its help in the list of all commands."""
WORK = {
    "drill": "thinwire.tools.drill.run:run",
    "chaos": "thinwire.tools.drill.chaos:run",
    "collectives": "thinwire.tools.collectives.run:run",
    "gpu": "thinwire.tools.gpu.run:main",
    "plan": "thinwire.workers.plan.run:run",
    "what_if": "thinwire.workers.plan.what_if:answer",
    "fetch": "thinwire.workers.weights:fetch",
    "files": "thinwire.workers.telemetry.trackers.of_history:write_files",
    "picture": "thinwire.workers.telemetry.history:picture",
    "compared": "thinwire.workers.telemetry.history:compared",
}
"""The function that does what a command shows."""

logger = logging.getLogger(__name__)


class CommandMissing(Exception):
    """A command of another package cannot run here; the message says what to install or whom to tell."""


def installed_commands() -> list[EntryPoint]:
    """Our own and those of the group, in order of name. Another package cannot replace ours."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    found |= {name: EntryPoint(name, value, GROUP) for name, (value, _) in OWN_COMMANDS.items()}
    return [found[name] for name in sorted(found)]


def work(name: str) -> Any:
    """The function that does what our command `name` shows. Raises ModuleNotFoundError."""
    return EntryPoint(name, WORK[name], GROUP).load()


def join_commands(
    app: typer.Typer, own: Collection[str], found: Iterable[EntryPoint], arguments: Sequence[str]
) -> None:
    """Add the commands that `arguments` may need to `app`.

    own: names of the app's own commands. They cannot be replaced, and calling one of them imports no other package.
    """
    called = called_command(arguments)
    if called in own:
        return
    for point in found:
        if point.name in own:
            logger.warning("command_ignored name=%s entry_point=%s reason=own_command", point.name, point.value)
        elif called is None and (listed := dict(OWN_COMMANDS.values()).get(point.value)) is not None:
            app.command(point.name, help=listed)(lambda: None)  # for the list only: nothing is called
        elif called is None or called == point.name:
            _join(app, point)


def called_command(arguments: Sequence[str]) -> str | None:
    """The command among the words of a command line, None where there is none."""
    return next((word for word in arguments if not word.startswith("-")), None)


def missing_module(error: ModuleNotFoundError, command: str | None, point: EntryPoint | None = None) -> CommandMissing:
    """The error as a person should read it: which command needs which module, and what to install."""
    name = f"`thinwire {command}`" if command else "it"
    remedy = _remedy(error.name or "", command, point)
    return CommandMissing(f"{name} needs the Python module {error.name!r}, which is not installed: {remedy}")


def _join(app: typer.Typer, point: EntryPoint) -> None:
    try:
        found = point.load()
    except ModuleNotFoundError as error:
        _join_missing(app, point, missing_module(error, point.name, point))
        return
    except Exception as error:
        logger.debug("command_broken name=%s entry_point=%s", point.name, point.value, exc_info=error)
        reason = f"{point.value} cannot be imported ({type(error).__name__}: {error}): tell its authors"
        _join_missing(app, point, CommandMissing(f"`thinwire {point.name}` is not available: {reason}"))
        return
    if not isinstance(found, typer.Typer):
        reason = f"{point.value} is a {type(found).__name__}, not a typer.Typer: tell its authors"
        _join_missing(app, point, CommandMissing(f"`thinwire {point.name}` is not available: {reason}"))
        return
    commands = found.registered_commands
    if len(commands) == 1 and not found.registered_groups and found.registered_callback is None:
        only = commands[0]
        if only.callback is not None:
            callback = only.callback
            app.command(point.name, help=only.help, epilog=only.epilog, context_settings=only.context_settings)(
                callback
            )
            return
    app.add_typer(found, name=point.name)


def _join_missing(app: typer.Typer, point: EntryPoint, error: CommandMissing) -> None:
    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(point.name, help=f"Not available: {error}", context_settings=settings, add_help_option=False)(
        _raiser(error)
    )


def _raiser(error: CommandMissing) -> Callable[[], None]:
    def not_available() -> None:
        raise error

    return not_available


def _remedy(module: str, command: str | None, point: EntryPoint | None) -> str:
    distribution = point.dist.name if point is not None and point.dist is not None else "thinwire"
    if distribution == "thinwire":
        return install_line(command, module)
    return f"pip install '{distribution}{'[' + ','.join(point.extras) + ']' if point and point.extras else ''}'"
