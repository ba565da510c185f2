"""`thinwire what-if`: a run on a cluster that nobody has, by every method. Nothing heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.commands import work
from thinwire.cli.plan import DEFAULT_LATENCY, GOODPUT, columns_text
from thinwire.cli.quantities import bytes_text, rate_mbit, time_ms
from thinwire.cli.screen import note
from thinwire.cli.what_if_picture import picture
from thinwire.contract.plan import hours, ms
from thinwire.contract.what_if import Answer, Answering, Disturbances, Outcome, WhatIf, WhatIfRefused

UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def what_if(
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")],
    rate: Annotated[
        str, typer.Option(help="What one machine's link carries, as iperf says: 4.1gbit, 940mbit; --nominal: its name.")
    ],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a machine; they share its link.")] = 1,
    model: Annotated[
        str | None, typer.Option(help="bert-large, gpt2, resnet-50 and others; `--model help` lists them.")
    ] = None,
    values: Annotated[str | None, typer.Option(help="Of a model by no name: 350m, 1.3b, 124439808.")] = None,
    flops: Annotated[str | None, typer.Option(help="Of one sample of it, forward and backward: 240g, 2.4e11.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens of a sample. [default: as its paper]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of one GPU in a pass.")] = 16,
    accumulate: Annotated[int, typer.Option(min=1, help="Passes of a step.")] = 1,
    device: Annotated[str, typer.Option(help="v100, a100, h100, h200, cpu.")] = "v100",
    compute: Annotated[
        str | None, typer.Option(help="Measured: forward and backward of a pass on one GPU, such as 92ms.")
    ] = None,
    update: Annotated[str | None, typer.Option(help="Measured: a step of the dense optimizer.")] = None,
    latency: Annotated[str, typer.Option(help="From machine to machine, one way.")] = DEFAULT_LATENCY,
    inside: Annotated[
        str | None, typer.Option(help="Between two GPUs of a machine, such as 336gbit. [default: the device's]")
    ] = None,
    nominal: Annotated[
        bool, typer.Option("--nominal", help="--rate is the link's name: frames take their share.")
    ] = False,
    topology: Annotated[str, typer.Option(help="auto (the faster), flat or node_first.")] = "auto",
    overlap: Annotated[bool, typer.Option(help="Does what is sent pass beside backward?")] = True,
    steps: Annotated[int | None, typer.Option(min=2, help="Of the run. [default: as the model's paper]")] = None,
    warmup: Annotated[
        float | None, typer.Option(help="Share of the run in full precision. [default: as each method's paper]")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Local steps of a round.")] = 32,
    methods: Annotated[str | None, typer.Option(help="Some of them, by commas. [default: all]")] = None,
    jitter: Annotated[float, typer.Option(help="Of a machine's time to compute: deviation over mean, 0.05.")] = 0.0,
    link_jitter: Annotated[float, typer.Option(help="The same of an exchange.")] = 0.0,
    stragglers: Annotated[
        str | None, typer.Option(help="CHANCE:TIMES, such as 0.001:3: in a step a machine takes 3 times as long.")
    ] = None,
    mtbf: Annotated[str | None, typer.Option(help="Mean time between deaths of one machine, such as 1000h.")] = None,
    regroup: Annotated[str, typer.Option(help="From a death until the others go on.")] = "10s",
    returns: Annotated[str, typer.Option("--return", help="Until another machine has taken its place.")] = "5m",
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    price: Annotated[float | None, typer.Option(help="Of a GPU hour, in any currency.")] = None,
    software: Annotated[
        str, typer.Option(help="thinwire, or deepspeed: the papers' own, as their InfiniBand rows show it.")
    ] = "thinwire",
    picture_file: Annotated[Path | None, typer.Option("--picture", help="Draw it too: an SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
) -> None:
    """Predict a run on a cluster that you do not have: seconds, bytes and cost, by every method.

    It is the model of `thinwire plan`, with the processors' part from a table of models and devices in place of
    measured steps, and with late machines, jitter and deaths over the whole run. It takes seconds, up to thousands of
    machines.

    **What to look at.** *x dense* is how many times as fast the whole run is as dense training in 16 bits, warm-up
    included. *from - to* is what the time may be, by how far measured steps were from predicted ones.

    What it was held against, what it leaves out and where it misses: docs/what-if.md.

    Examples: `thinwire what-if --nodes 64 --gpus 4 --rate 4.1gbit --model bert-large --batch 16`,
    `thinwire what-if --nodes 16 --gpus 8 --rate 25gbit --nominal --model gpt2-xl --device h100 --batch 8 --price 2.5`,
    `thinwire what-if --nodes 1000 --rate 1gbit --values 7b --compute 900ms --mtbf 2000h --picture run.svg`
    """
    answering: Answering = work("what_if")
    try:
        asked = WhatIf(
            nodes=nodes,
            gpus=gpus,
            bytes_per_s=_bytes_per_s(rate, "--rate") * (GOODPUT if nominal else 1.0),
            model=model,
            values=None if values is None else round(_number(values, "--values")),
            flops=None if flops is None else _number(flops, "--flops"),
            sequence=sequence,
            batch=batch,
            accumulate=accumulate,
            latency_s=_seconds(latency, "--latency"),
            inside_bytes_per_s=None if inside is None else _bytes_per_s(inside, "--inside"),
            device=device,
            topology=topology,
            overlap=overlap,
            steps=steps,
            warmup=warmup,
            every=every,
            compute_s=None if compute is None else _seconds(compute, "--compute"),
            update_s=None if update is None else _seconds(update, "--update"),
            methods=None if methods is None else tuple(one.strip() for one in methods.split(",")),
            price=price,
            software=software,
            disturbed=Disturbances(
                jitter,
                link_jitter,
                *_stragglers(stragglers),
                node_mtbf_s=None if mtbf is None else _seconds(mtbf, "--mtbf"),
                regroup_s=_seconds(regroup, "--regroup"),
                return_s=_seconds(returns, "--return"),
                seed=seed,
            ),
        )
        found = answering(asked)
    except WhatIfRefused as error:
        raise typer.BadParameter(str(error)) from error
    if picture_file is not None:
        try:
            picture_file.write_text(picture(found), encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{picture_file}: {error.strerror}", param_hint="--picture") from error
        note(f"drawn in {picture_file}")
    typer.echo(json.dumps(found.as_json()) if as_json else "\n".join(lines(found)))


def lines(found: Answer) -> list[str]:
    """The answer as people read it."""
    machines = f"{found.nodes} machines of " if found.nodes > 1 else ""
    run = f"{found.steps} steps of {found.global_batch} samples, {machines}{found.gpus} x {found.device}"
    link = f"{bytes_text(found.bytes_per_s)}/s of payload, {ms(found.latency_s)} a round"
    return [
        f"{found.model}: {found.values / 1e6:.4g} M values, {run}",
        f"link: {link}; forward and backward of a step: {ms(found.compute_s)}",
        "",
        *columns_text(_COLUMNS, [_row(one) for one in found.outcomes]),
        "",
        *(f"* {one}" for one in found.assumed),
    ]


_COLUMNS = (
    "method", "topology", "warm-up", "step", "over a link", "run", "from - to", "samples/s", "x dense", "cost",
)  # fmt: skip


def _row(one: Outcome) -> tuple[str, ...]:
    return (
        one.title,
        one.topology,
        "-" if one.dense_step_s is None else f"{one.warmup:.0f} x {ms(one.dense_step_s)}",
        ms(one.step_s),
        bytes_text(one.box_bytes),
        hours(one.run_s) + (f", {one.deaths} deaths" if one.deaths else ""),
        f"{hours(one.low_s)} - {hours(one.high_s)}",
        f"{one.samples_per_s:.4g}",
        f"{one.speedup:.2f}",
        "-" if one.cost is None else f"{one.cost:,.0f}",
    )


def _bytes_per_s(text: str, option: str) -> float:
    try:
        return rate_mbit(text) * 1e6 / 8
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def _seconds(text: str, option: str) -> float:
    """90ms, 10s, 5m, 1000h, 30d."""
    for unit in sorted(UNITS_S, key=len, reverse=True):
        number = text.strip().lower().removesuffix(unit)
        if number != text.strip().lower() and not number.endswith(("m", "u", "n")):
            try:
                return float(number) * UNITS_S[unit]
            except ValueError:
                break
    try:
        return time_ms(text) / 1e3
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} is not a time with its unit: 90ms, 10s, 5m, 1000h, 30d", param_hint=option
        ) from error


def _number(text: str, option: str) -> float:
    """350m, 1.3b, 240g, 2.4e11."""
    factors = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
    plain = text.strip().lower()
    try:
        return float(plain[:-1]) * factors[plain[-1]] if plain[-1:] in factors else float(plain)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a number: 350m, 1.3b, 240g, 2.4e11", param_hint=option) from error


def _stragglers(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, 1.0
    chance, colon, times = text.partition(":")
    try:
        if not colon:
            raise ValueError(text)
        return float(chance), float(times)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not CHANCE:TIMES, such as 0.001:3", param_hint="--stragglers") from error
