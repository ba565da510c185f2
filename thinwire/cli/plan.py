"""`thinwire plan`: whether compression pays for this job on this link. Nothing heavy is imported at the top."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import JsonValue, ValidationError

from thinwire.cli.commands import work
from thinwire.cli.job_file import JobFileError, read_job_file, read_job_spec
from thinwire.cli.packing import folder_of
from thinwire.cli.quantities import bytes_text, rate_mbit, time_ms
from thinwire.cli.screen import complain, note, progress
from thinwire.cli.submit import script_job
from thinwire.contract.collectives import RING, ROWS, CollectivesError, default_file, read
from thinwire.contract.plan import Link, MethodPlan, Plan, PlanFailed, Planning, PlanRequest, hours, ms
from thinwire.contract.spec import MOST_WORKERS, ScriptSpec

GOODPUT = 0.957
"""The most payload that frames of 1500 bytes leave of a link's rate."""
DEFAULT_LATENCY = "0.1ms"
LEAST_MBIT, MOST_MBIT, MOST_MS = 1e-3, 1e8, 60_000.0
"""Beyond these somebody has mistaken the unit."""


def plan(
    file: Annotated[
        Path, typer.Argument(help="A job file or a script, train.py, as for `thinwire submit`.", show_default=False)
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: what the script is called with.")] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Of one machine's link, such as 100mbit, 1gbit, 25gbit. Without it the link is measured."),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help="From machine to machine, one way, with --rate: 0.1ms, 50us. [default: 0.1ms]"),
    ] = None,
    doctor: Annotated[
        Path | None,
        typer.Option(help="What `thinwire doctor --peers ... --json` has printed: the slowest link in it."),
    ] = None,
    collectives: Annotated[
        Path | None,
        typer.Option(
            help="What `thinwire bench collectives` has kept, for as many workers. "
            "[default: what it kept of this machine's network, where it has and no link is given]"
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_WORKERS, help="Workers. [default: as many as were started as ranks, else workers.max]"
        ),
    ] = None,
    per_machine: Annotated[
        int, typer.Option(min=1, max=1024, help="So many of them share one machine: its link and its cores.")
    ] = 1,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Dry steps of each kind that are timed.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
    working_dir: Annotated[
        Path | None,
        typer.Option(help="The folder that a script runs in. Default: its own.", rich_help_panel="Scripts"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for a script's environment; repeat it.", rich_help_panel="Scripts"),
    ] = None,
) -> None:
    """Predict, before a job is started, whether compression pays: step time, bytes and the gain over the whole run.

    The job's own model makes a few dry steps on this machine (nothing is trained, nothing is kept), by each method.
    From that, the link and the job file follow the seconds and bytes of the run, with its warm-up, by dense training in
    fp32 and in bf16 and by 1-bit Adam, 1-bit LAMB and 0/1 Adam; of a job of SGD or Muon by that at one bit; and by
    local steps, which are advised only where the job asks for them. The last line says what to do, and why, the one
    before it which way is the first at the loss of a dense run.

    **The link.** Give it with `--rate` and `--latency`, or by what `thinwire doctor` (`--doctor`) or
    `thinwire bench collectives` (`--collectives`) has measured; then one machine is enough. Or start the command on all
    machines as torchrun starts a script, and it is measured between them, in about a second.

    **What to look at.** "step" is a step after the warm-up, "warm-up" one in it, which sends the gradient in full. A
    gain of 1.8 says that the run takes 1/1.8 of the time of dense training. Below 1.05 the advice is not to compress.
    "same loss" is the time to the loss at which dense training ends, where our studies have it.

    **A script** is run here, in this Python, as worker 0 of so many: it makes a few steps of its own loop, which are
    timed, and is ended.

    Run it on a quiet machine of the kind that the job will have. What is left out is in docs/plan.md.

    Examples: `thinwire plan job.yaml --rate 1gbit --workers 4`,
    `thinwire plan train.py --rate 1gbit --workers 4 -- --lr 1e-3`,
    `torchrun --nnodes 2 --rdzv-endpoint HEAD:29500 --no-python thinwire plan job.yaml` on each of two machines
    """
    spec = read_job_spec(file, _document(file, arguments or (), working_dir, env or ()))
    link = link_of(rate, latency, doctor)
    if collectives is not None and link is not None:
        raise typer.BadParameter("says what --rate and --doctor say; give one of them", param_hint="--collectives")
    request = PlanRequest(spec, link, workers, per_machine, steps)
    planned = _refuse_what_cannot_be(request)
    if link is None and planned > 1:
        request = replace(request, link=characterised(collectives, planned, per_machine))
    planning: Planning = work("plan")
    try:
        with progress("reading the job", transient=True) as say:
            found = planning(request, say)
    except PlanFailed as error:
        complain(f"no plan for {file}: {error}")
        raise typer.Exit(1) from error
    if found is not None:
        typer.echo(json.dumps(found.as_json()) if as_json else "\n".join(lines(found)))


def lines(found: Plan) -> list[str]:
    """The plan as people read it."""
    where = f"{found.workers} workers" if found.workers > 1 else "1 worker"
    if found.per_machine > 1:
        where += f", {found.per_machine} on a machine"
    cores = "GPUs" if found.cores is None else f"{found.cores:.3g} {'core' if found.cores == 1 else 'cores'} each"
    forward_backward = f"forward {ms(found.forward_s)}, backward {ms(found.backward_s)}"
    return [
        f"{found.job}: {found.elements / 1e6:.3g} M parameters, {found.steps} steps, {where}, {cores}",
        f"dry steps: {forward_backward}",
        f"link: {_link_text(found.link)}",
        f"buckets: {found.buckets}",
        "",
        *_table(found.methods),
        "",
        *(f"* {one}" for one in found.assumed),
        "",
        *([_soonest(found)] if found.workers > 1 else []),
        found.verdict,
    ]


def _soonest(found: Plan) -> str:
    """Which way is the first at the loss of a dense run, and what that stands on."""
    first, dense = found.method(found.soonest), min(found.methods[:2], key=lambda one: one.run_s)
    if first.same_loss_s is None or first is dense:
        return f"Soonest at the loss at which dense training ends: {dense.title}, after {hours(dense.run_s)}."
    return (
        f"Soonest at the loss at which dense training ends: {first.title}, after {hours(first.same_loss_s)} where "
        f"{dense.title} takes {hours(dense.run_s)}, by the steps that a small GPT took: try it on your model first."
    )


def _table(methods: tuple[MethodPlan, ...]) -> list[str]:
    columns = ("method", "warm-up", "step", "sent a step", "sent in all", "whole run", "x fp32", "x bf16", "same loss")
    rows = [
        (
            one.title,
            f"{one.warmup:.0f} x {ms(one.warmup_step_s)}" if one.warmup_step_s is not None else "-",
            ms(one.step_s),
            bytes_text(one.step_bytes),
            bytes_text(one.run_bytes),
            hours(one.run_s),
            f"{one.gain_fp32:.2f}",
            f"{one.gain_bf16:.2f}",
            hours(one.same_loss_s) if one.same_loss_s is not None else "-",
        )
        for one in methods
    ]
    return columns_text(columns, rows)


def columns_text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in which the first column stands to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in (columns, *rows))
    ]


def _document(
    file: Path, arguments: Sequence[str], working_dir: Path | None, env: Sequence[str]
) -> dict[str, JsonValue]:
    """The job as JSON; a script's with its folder on this machine. Raises: JobFileError, Unpackable."""
    if file.suffix == ".py":
        _refuse_no_python(file)
        nothing: dict[str, Any] = {"name": None, "workers": {}, "store": None, "start": {}, "pip": (), "secrets": ()}
        job, folder = script_job(file, working_dir, arguments, env=env, **nothing)
    else:
        given = [name for name, value in (("--working-dir", working_dir), ("--env", env)) if value] + list(arguments)
        if given:
            raise JobFileError(f"{', '.join(given)}: only for a script, and {file} is a job file: write it there")
        job = read_job_file(file)
        found = folder_of(job, file)
        if found is None:
            return job
        folder = found
    recipe = job["recipe"]
    assert isinstance(recipe, dict)
    if not folder.is_dir():
        raise JobFileError(f"{file}: recipe.working_dir = {recipe.get('working_dir')!r}: there is no folder {folder}")
    return {**job, "recipe": {**recipe, "working_dir": str(folder.resolve())}}


def _refuse_no_python(script: Path) -> None:
    """Raises: JobFileError for what cannot be read, and for what this Python could not run."""
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        raise JobFileError(f"{script} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        words = error.msg if isinstance(error, SyntaxError) else str(error)
        raise JobFileError(f"{script}{line} is no Python: {words}") from error


def _refuse_what_cannot_be(request: PlanRequest) -> int:
    """How many workers it is for. Raises: typer.BadParameter, JobFileError."""
    ranks = int(os.environ.get("WORLD_SIZE") or 1)
    workers = request.workers or (ranks if ranks > 1 else request.spec.workers.max)
    if request.spec.workers.per_box > 1:
        raise JobFileError(
            f"workers.per_box = {request.spec.workers.per_box}: a plan rehearses workers of one process, and shards no "
            f"model. `thinwire what-if --nodes {workers} --rate 1gbit --values 7b --compute 900ms` predicts boxes: say "
            "their number, the link of one, the values of the whole model, and forward and backward of a box, measured"
        )
    if workers % request.per_machine:
        raise typer.BadParameter(
            f"{workers} workers do not fill machines of {request.per_machine}", param_hint="--per-machine"
        )
    if isinstance(request.spec, ScriptSpec) and request.spec.recipe.package is not None:
        raise JobFileError(
            "recipe.package: the files of that script are with the service; `thinwire plan` runs it here: name its "
            "folder by recipe.working_dir"
        )
    if request.spec.global_batch is not None and workers > request.spec.global_batch:
        raise typer.BadParameter(
            f"{workers} for global_batch = {request.spec.global_batch}: each needs a sample", param_hint="--workers"
        )
    return workers


def _link_text(link: Link) -> str:
    if link.bytes_per_s == float("inf"):
        return link.source
    rows = ""
    if link.rows is not None:
        rows = f" in a ring; {bytes_text(link.rows[1])}/s, {ms(link.rows[0])} in all-to-all and all-gather"
    return f"{bytes_text(link.bytes_per_s)}/s of payload, {ms(link.latency_s)} a round{rows} ({link.source})"


def link_of(rate: str | None, latency: str | None, doctor: Path | None) -> Link | None:
    """The link that these options name; None where they name none. Raises: typer.BadParameter."""
    if doctor is not None:
        if rate is not None or latency is not None:
            raise typer.BadParameter("says what --rate and --latency say; give one of both", param_hint="--doctor")
        return _examined(doctor)
    if rate is None:
        if latency is not None:
            raise typer.BadParameter("is of a link that is given: it needs --rate", param_hint="--latency")
        return None
    try:
        megabits, milliseconds = rate_mbit(rate), time_ms(latency or DEFAULT_LATENCY)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--rate, --latency") from error
    if not LEAST_MBIT <= megabits <= MOST_MBIT:
        raise typer.BadParameter(f"{rate}: must be a link's, from 1kbit to 100000gbit", param_hint="--rate")
    if milliseconds > MOST_MS:
        raise typer.BadParameter(f"{latency}: must be at most 60s, one way", param_hint="--latency")
    return Link(1e-3 * milliseconds, GOODPUT * megabits * 1e6 / 8, f"given: {rate}, {latency or DEFAULT_LATENCY}")


def characterised(given: Path | None, workers: int, per_machine: int) -> Link | None:
    """What `thinwire bench collectives` has kept for so many; given: None: where it keeps it, if it has.

    None where that has nothing for these, and where ranks were started, which measure their own. Raises:
    typer.BadParameter.
    """
    file = given or default_file()
    if given is None and (int(os.environ.get("WORLD_SIZE") or 1) > 1 or not file.exists()):
        return None
    try:
        world = read(file).world(workers, per_machine, file)
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="--collectives") from error
    except CollectivesError as error:
        if given is None:
            note(f"{error}")
            return None
        raise typer.BadParameter(str(error), param_hint="--collectives") from error
    ring, rows = world.algorithms[RING], world.algorithms[ROWS]
    source = f"lines of {world.ranks} ranks in {file}, {world.measured}"
    return Link(ring.latency_s, ring.bytes_per_s, source, (rows.latency_s, rows.bytes_per_s))


def _examined(file: Path) -> Link:
    """The slowest direction of any link, with both busy as in an exchange, and the longest way of a small message."""
    from thinwire.tools.doctor.examination import Examination

    try:
        seen = Examination.model_validate_json(file.read_bytes())
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="--doctor") from error
    except ValidationError as error:
        raise typer.BadParameter(
            f"{file} is not what `thinwire doctor --json` prints: {error.errors()[0]['msg']}", param_hint="--doctor"
        ) from error
    visits = [call.visit for call in seen.calls]
    rates = [
        rate
        for visit in visits
        for rate in (visit.there_mbit, visit.back_mbit, visit.both_there_mbit, visit.both_back_mbit)
        if rate
    ]
    round_trips = [visit.round_trip_ms for visit in visits if visit.round_trip_ms is not None]
    if not rates or not round_trips:
        raise typer.BadParameter(
            f"{file} has no link that was measured: run `thinwire doctor --peers ... --json`, with --seconds above 0",
            param_hint="--doctor",
        )
    return Link(1e-3 * max(round_trips) / 2, min(rates) * 1e6 / 8, f"the slowest of {len(visits)} in {file}")
