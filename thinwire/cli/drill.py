"""`thinwire drill`: kill workers of a real job, and see what it costs."""

from __future__ import annotations

import json
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.commands import work
from thinwire.cli.screen import complain, progress
from thinwire.tools.drill.asked import PICTURE_NAME, Account, Chaos, ChaosDrilling, Drill, DrillFailed, Drilling, Found


class OptimizerName(StrEnum):
    """Of a job file."""

    ONEBIT_ADAM = "onebit_adam"
    ONEBIT_LAMB = "onebit_lamb"
    ZERO_ONE_ADAM = "zero_one_adam"
    ONEBIT_SGD = "onebit_sgd"
    ONEBIT_MUON = "onebit_muon"
    ADAM = "adam"
    LAMB = "lamb"
    SGD = "sgd"
    MUON = "muon"
    LOCAL_STEPS = "local_steps"
    CADA = "cada"
    SKETCHED_SGD = "sketched_sgd"


class ShadowChoice(StrEnum):
    """Of a job file."""

    NOTHING = "nothing"
    ROWS = "rows"
    REPLICA = "replica"


app = typer.Typer(rich_markup_mode="markdown")


@app.command()
def drill(
    workers: Annotated[int, typer.Option(min=2, max=64, help="Workers of the job.")] = 4,
    kill_every: Annotated[float, typer.Option(min=1.0, help="Seconds from one kill to the next.")] = 30.0,
    minutes: Annotated[float, typer.Option(min=0.2, max=600.0, help="How many minutes the kills go on.")] = 5.0,
    optimizer: Annotated[
        OptimizerName, typer.Option(help="As optimizer.name in a job file.")
    ] = OptimizerName.ONEBIT_ADAM,
    shadow: Annotated[
        ShadowChoice, typer.Option(help="As workers.shadow: what workers keep of each other's error memory.")
    ] = ShadowChoice.ROWS,
    chaos: Annotated[
        bool,
        typer.Option(
            "--chaos",
            help="Not kills alone: whatever may happen, and each step checked. `--kill-every` then means nothing.",
        ),
    ] = False,
    kill_all: Annotated[
        bool, typer.Option("--kill-all", help="With --chaos: now and then all workers at once. Else one is spared.")
    ] = False,
    beside: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="With --chaos: folder of an earlier one with the same workers and optimizer. Its undisturbed run is "
            "compared with, as far as it goes, and none is trained.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the random choice of whom to kill, or of all faults.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs, figures and picture. [default: a new one where temporary files are]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Run a real job on this machine, kill its workers at random, and print what that costs.

    The drill starts a Ray of its own, trains a small GPT, and kills one worker (SIGKILL) every so many seconds. Then it
    trains the same job undisturbed up to the same step. It takes about twice the minutes, and touches nothing else.

    Goodput is the share of the time that is inside committed steps, with however many workers.

    With `--chaos` workers are killed alone, in pairs, in a regroup, in a save, as they give the state and as newcomers;
    they are stopped for 3, 15 and 40 s and woken, terminated, and their number is changed; the membership is killed.
    With root each worker runs in a network namespace, and the network is cut for as long: workers from all others, the
    membership from all, a pair, one direction only.
    Every step is checked against the same job undisturbed: who committed it, which samples it used, whether all
    replicas are equal. A violation is printed with the seed, and the exit status is 1.

    Examples: `thinwire drill --workers 4 --kill-every 30 --minutes 5`, `thinwire drill --chaos --minutes 20 --seed 7`
    """
    if not chaos and kill_every >= 60 * minutes:
        raise typer.BadParameter(
            f"{kill_every:g} s is not less than --minutes {minutes:g}: nobody would be killed",
            param_hint="--kill-every",
        )
    try:
        folder = out or Path(tempfile.mkdtemp(prefix="thinwire-drill-"))
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"{out}: {error.strerror}; name a folder that can be written", param_hint="--out"
        ) from error
    try:
        with progress("starting") as say:
            if chaos:
                run_chaos: ChaosDrilling = work("chaos")
                verdict = run_chaos(Chaos(workers, minutes, folder, optimizer, seed, shadow, kill_all, beside), say)
            else:
                run: Drilling = work("drill")
                found = run(Drill(workers, kill_every, minutes, folder, optimizer, seed, shadow), say)
    except DrillFailed as error:
        complain(f"the drill failed: {error}")
        raise typer.Exit(1) from error
    if chaos:
        _print(_verdict_lines(verdict), verdict.as_json() if as_json else None)
        if verdict.violations:
            raise typer.Exit(1)
    else:
        _print([*_lines(found), f"timeline: {folder / PICTURE_NAME}"], found.as_json() if as_json else None)


def _print(lines: list[str], whole: dict[str, Any] | None) -> None:
    for line in lines:
        typer.echo(line)
    if whole is not None:
        typer.echo(json.dumps(whole))


def _verdict_lines(found: Found) -> list[str]:
    kinds = ", ".join(f"{number} {kind}" for kind, number in found.faults.items())
    loss, theirs = ("not evaluated" if one is None else f"{one:.4f}" for one in (found.loss, found.loss_undisturbed))
    return [
        *([] if found.without_cuts is None else [f"the network was not cut: {found.without_cuts}"]),
        f"{sum(found.faults.values())} faults in {found.minutes:g} minutes: {kinds}",
        f"{found.committed} steps committed; {found.redone} of them run again though a holder lived; "
        f"resumed from a checkpoint {found.resumes} times",
        f"commits by two groups {found.commits_by_two}; steps with other samples {found.samples_wrong}; "
        f"steps after which replicas differ {found.replicas_differ}; healthy holders lost {found.holders_lost}",
        f"steps between two exchanges: {found.local_steps_lost} lost with their rank, {found.not_made} not made by it",
        f"validation loss {loss}; undisturbed {theirs}",
        *(f"grown: {words}" for words in found.grown),
        *(f"VIOLATION {words}" for words in found.violations),
    ]


def _lines(found: Account) -> list[str]:
    outside = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.outside_s.items())
    loss = "not evaluated" if found.final_loss is None else f"{found.final_loss:.4f}"
    theirs = "" if found.undisturbed_loss is None else f"; undisturbed {found.undisturbed_loss:.4f}"
    lost = "none" if found.error_lost.median is None else f"{found.error_lost.median:.1%}"
    return [
        f"goodput {found.goodput:.2%} with {found.kills} kills (undisturbed {found.undisturbed_goodput:.2%})",
        f"  outside of steps: {outside}",
        f"workers in the mean {found.mean_world_size:.2f}; {found.samples_per_second:.0f} samples/s "
        f"(undisturbed {found.undisturbed_samples_per_second:.0f})",
        f"committed steps run again: {found.steps_lost} of {found.steps}; local steps lost: {found.local_steps_lost}; "
        f"restarts from a checkpoint: {found.restarts}",
        f"from a kill to going on: median {found.regroup_s.median} s, worst {found.regroup_s.worst} s",
        f"from a kill to the end of the next step: median {found.next_step_s.median} s, "
        f"worst {found.next_step_s.worst} s",
        f"from a kill to all workers again: median {found.readmit_s.median} s, worst {found.readmit_s.worst} s",
        f"error memory lost with a worker: about {lost} of ||R||",
        f"validation loss {loss}{theirs}",
    ]
