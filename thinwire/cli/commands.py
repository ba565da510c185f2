"""Commands of other packages, joined to `thinwire` by the entry-point group `thinwire.commands`.

An entry point names a `typer.Typer`; its name becomes the command's name:

    [project.entry-points."thinwire.commands"]
    lab = "thinwire.tools.lab.cli:app"

What a command of ours does may need torch and ray. The command line imports neither: it finds the function by name,
in the group `thinwire.work`, when the command is called.

A Typer with one command and no callback becomes a plain command (`thinwire drill --kill 3`), any other a group
(`thinwire lab up`). `thinwire --help` imports every module named here except our own, whose help is OWN_HELP: they
need torch. Import what is heavy inside the commands, not at the top of the module. A module that another one is missing
for shows as a command that says what to install.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from thinwire.cli.extras import install_line

GROUP, WORK_GROUP = "thinwire.commands", "thinwire.work"
OWN_WORK = {
    "drill": "thinwire.tools.drill.run:run",
    "chaos": "thinwire.tools.drill.chaos:run",
    "plan": "thinwire.workers.plan.run:run",
    "fetch": "thinwire.workers.weights:fetch",
}
"""What pyproject.toml declares: a checkout that was installed before may not know it yet."""
OWN_COMMANDS = {"doctor": "thinwire.cli.doctor:app"}
"""The same: those that came after others were installed."""
OWN_HELP = {
    "thinwire.cli.doctor:app": "Say what is wrong with boxes and links, before a job suffers from it.",
    "thinwire.tools.lab.cli:app": "Several machines on slow Ethernet, in a box: check, up, run, down.",
    "thinwire.cli.drill:app": "Kill workers of a real job, and see what it costs.",
    "thinwire.cli.bench:app": "Measure kernels, the exchange and whole training steps in a lab.",
}

logger = logging.getLogger(__name__)


class CommandMissing(Exception):
    """A command of another package cannot run here; the message says what to install or whom to tell."""


def installed_commands() -> list[EntryPoint]:
    """The entry points of the group, in order of name."""
    found = {name: EntryPoint(name, value, GROUP) for name, value in OWN_COMMANDS.items()}
    found |= {point.name: point for point in entry_points(group=GROUP)}
    return [found[name] for name in sorted(found)]


def work(name: str) -> Any:
    """The function that does what our command `name` shows. Raises ModuleNotFoundError, and CommandMissing."""
    declared = {point.name: point for point in entry_points(group=WORK_GROUP)}
    if name in OWN_WORK:
        declared.setdefault(name, EntryPoint(name, OWN_WORK[name], WORK_GROUP))
    if name not in declared:
        raise CommandMissing(f"nobody does the work of `thinwire {name}`: no entry point of {WORK_GROUP} has that name")
    return declared[name].load()


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
        elif called is None and point.value in OWN_HELP:
            app.command(point.name, help=OWN_HELP[point.value])(lambda: None)  # for the list only: nothing is called
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
