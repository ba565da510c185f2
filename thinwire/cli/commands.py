"""The commands of `thinwire`, each imported only when it is called; ours, and those of other packages.

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
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from thinwire.cli.exit_codes import Ended
from thinwire.cli.extras import install_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "thinwire.commands"
OWN_COMMANDS = {
    "serve": ("serve:serve", "Run the service in the foreground, until Ctrl-C or SIGTERM."),
    "submit": ("submit:submit", "Submit a job and print its ID."),
    "up": ("up:up", "Make this machine a box of a Ray cluster, and keep it one: Ray that ends is started again."),
    "down": ("up:down", "End Ray on this box, with all that runs in it, and see that nothing is left."),
    "manifest": (
        "submit:manifest",
        "Print the RayJob that a service with the launcher kuberay makes of a job file. Nothing is started.",
    ),
    "jobs": ("jobs:jobs", "List the newest jobs, newest first, that are all of what the options say."),
    "show": (
        "show:show",
        "Show jobs: state and reason, progress, summary, folder, and the page in the Ray dashboard.",
    ),
    "watch": (
        "watch:watch_command",
        "Watch a job live until its end: phase, step, loss, throughput, bytes on the wire, time to go.",
    ),
    "logs": ("watch:logs", "Print what the job's processes wrote."),
    "events": (
        "events:events",
        "Print what has happened to a job, or to all jobs: states, deaths and joins, checkpoints, wishes for workers.",
    ),
    "audit": (
        "people:audit",
        "Show who has changed what, newest first: submissions, changes, cancels, deletions, tokens. For operators.",
    ),
    "login": (
        "sign_on:login",
        "Sign on for a service with your account at its issuer (OpenID Connect), in any browser.",
    ),
    "logout": ("sign_on:logout", "Forget the sign-on for a service on this machine, and end it at the issuer."),
    "quotas": ("projects:quotas", "Show what your project uses of what it may, and you in it."),
    "plan": (
        "plan:plan",
        "Predict, before a job is started, whether compression pays: step time, bytes and the gain over the whole run.",
    ),
    "what-if": (
        "what_if:what_if",
        "Predict a run on a cluster that you do not have: seconds, bytes and cost, by every method.",
    ),
    "migrate": (
        "migrate:migrate",
        "Turn a DeepSpeed configuration into the lines of a training loop, or into a job file.",
    ),
    "fetch": ("fetch:fetch", "Fetch the weights of a job's newest checkpoint, as model.safetensors."),
    "dashboard": ("dashboard:dashboard", "Open a job's page in Ray's dashboard, signed in."),
    "picture": ("summary:picture", "Draw the losses of a job, and what it sent beside fp32 and bf16, as a PNG."),
    "resize": ("resize:resize", "Change how many workers a job may have, while it runs."),
    "validate": (
        "drafts:validate",
        "Ask the service what it would make of a job file, and whether that would start now. No job is made.",
    ),
    "clone": ("drafts:clone", "Submit a job again, with changes, and print the ID of the new one."),
    "cancel": ("jobs:cancel", "Ask for the end of jobs. Their checkpoints stay."),
    "delete": (
        "jobs:delete",
        "Delete jobs that are over, with their folders: checkpoints, history, logs. "
        "A checkpoint.store elsewhere stays.",
    ),
    "label": ("jobs:label", "Set labels of a job, or take some away. It may be over."),
    "wait": (
        "jobs:wait",
        "Wait until jobs are over, and print how each has ended. For scripts: it says nothing else.",
    ),
    "top": ("jobs:top", "Show the jobs that are not over, as they go: a live table. Ctrl-C ends it."),
    "compare": (
        "compare:compare",
        "Compare the losses of several jobs at the same step, after the same seconds, or after the same bytes.",
    ),
    "quickstart": (
        "quickstart:quickstart",
        "Run a first job from start to end: service, job, live display, summary, results; then stop what was started.",
    ),
    "bench": ("bench:app", "Measure the kernels, collectives, the exchange and whole training steps."),
    "doctor": ("doctor:app", "Say what is wrong with boxes and the links between them, and what to change."),
    "drill": ("drill:app", "Run a real job on this machine, kill its workers at random, and print what that costs."),
    "lab": (
        "lab:app",
        "Several machines on slow Ethernet, in a box: network namespaces of this one, with links of limited rate.",
    ),
    "token": (
        "people:tokens",
        "Tokens for people and programs: make, list, revoke; and rotate the operator's own. For operators.",
    ),
    "people": (
        "people:people",
        "People who come by an issuer of OpenID Connect: list, block, take again, release a name. For operators.",
    ),
    "project": (
        "projects:projects",
        "Projects: teams that share the service, each with its own jobs. Operators of all projects make them.",
    ),
}
"""Name, where it is in this folder, and its help in the list of all commands: a test holds it against its own."""
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


class CommandMissing(Ended):
    """A command of another package cannot run here; the message says what to install or whom to tell."""


def other_commands() -> list[EntryPoint]:
    """Those of the group, in order of name. None replaces one of ours."""
    from importlib.metadata import entry_points  # not at the top: our own need it not, and it takes as long as they

    found = {point.name: point for point in entry_points(group=GROUP)}
    return [found[name] for name in sorted(found)]


def work(name: str) -> Any:
    """The function that does what our command `name` shows. Raises ModuleNotFoundError."""
    return _named(WORK[name])


@cache
def own_command(name: str, markup: Any) -> Any:
    """One of ours, as Typer makes it of its function or its Typer. Raises ModuleNotFoundError."""
    return _made(name, _named(f"thinwire.cli.{OWN_COMMANDS[name][0]}"), markup)


class Commands(TyperGroup):
    """A group that knows names and help of its commands, and makes the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, words) in OWN_COMMANDS.items():
            self.add_command(TyperCommand(name, help=words))
        self._others: dict[str, EntryPoint] | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all, ours first."""
        return [*OWN_COMMANDS, *(name for name in self._of_others() if name not in OWN_COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command; of ours what the list of all shows of it. None where there is none."""
        if cmd_name not in OWN_COMMANDS and cmd_name in self._of_others():
            return self._joined(self._of_others()[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, and what is left of the line. Raises CommandMissing."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in OWN_COMMANDS:
            try:
                command = own_command(name, self.rich_markup_mode)
            except ModuleNotFoundError as error:
                raise missing_module(error, name) from error
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Call it. Raises CommandMissing where it finds that a module of another package is missing."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise missing_module(error, ctx.invoked_subcommand) from error

    def _of_others(self) -> dict[str, EntryPoint]:
        if self._others is None:
            self._others = {point.name: point for point in other_commands()}
            for point in (self._others[name] for name in self._others if name in OWN_COMMANDS):
                logger.warning("command_ignored name=%s entry_point=%s reason=own_command", point.name, point.value)
        return self._others

    def _joined(self, point: EntryPoint) -> Any:
        try:
            found = point.load()
        except ModuleNotFoundError as error:
            return _not_available(point.name, missing_module(error, point.name, point))
        except Exception as error:
            logger.debug("command_broken name=%s entry_point=%s", point.name, point.value, exc_info=error)
            reason = f"{point.value} cannot be imported ({type(error).__name__}: {error}): tell its authors"
        else:
            if isinstance(found, typer.Typer):
                return _made(point.name, found, self.rich_markup_mode)
            reason = f"{point.value} is a {type(found).__name__}, not a typer.Typer: tell its authors"
        return _not_available(point.name, CommandMissing(f"`thinwire {point.name}` is not available: {reason}"))


def missing_module(error: ModuleNotFoundError, command: str | None, point: EntryPoint | None = None) -> Exception:
    """The error as a person should read it: which command needs which module, and what to install.

    The error itself where the module is ours, in a fault of ours: there is nothing that the user could install.
    """
    if point is None and (error.name is None or error.name.partition(".")[0] == "thinwire"):
        return error
    distribution = point.dist.name if point is not None and point.dist is not None else "thinwire"
    if distribution == "thinwire":
        remedy = install_line(command, error.name or "")
    else:
        remedy = f"pip install '{distribution}{'[' + ','.join(point.extras) + ']' if point and point.extras else ''}'"
    name = f"`thinwire {command}`" if command else "it"
    return CommandMissing(f"{name} needs the Python module {error.name!r}, which is not installed: {remedy}")


def _named(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)


def _made(name: str, found: Any, markup: Any) -> Any:
    """The command that Typer makes of a function or a Typer; a Typer of one command is that command."""
    around = typer.Typer(rich_markup_mode=markup, add_completion=False)
    around.callback()(lambda: None)
    if not isinstance(found, typer.Typer):
        around.command(name)(found)
    elif len(found.registered_commands) == 1 and not found.registered_groups and found.registered_callback is None:
        only = found.registered_commands[0]
        assert only.callback is not None
        around.command(name, help=only.help, epilog=only.epilog, context_settings=only.context_settings)(only.callback)
    else:
        around.add_typer(found, name=name)
    return typer.main.get_group(around).commands[name]


def _not_available(name: str, error: Exception) -> Any:
    """A command that takes any words, and says why it cannot run."""

    def not_available() -> None:
        raise error

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return TyperCommand(
        name,
        help=f"Not available: {error}",
        callback=not_available,
        context_settings=settings,
        add_help_option=False,
    )
