"""`thinwire migrate`: a DeepSpeed configuration in the words of thinwire. Nothing heavy is imported.

What each key becomes is in migrate_keys.py; here it is read, and written as a training loop or as a job file.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from thinwire.cli.exit_codes import FAILURE, WRONG_INPUT
from thinwire.cli.job_file import STDIN, named_file
from thinwire.cli.migrate_keys import Migration, Rates, migration_of
from thinwire.cli.migrate_reading import ConfigRefused, Said, Verdict, shown
from thinwire.cli.screen import complain, note
from thinwire.contract.spec import read_spec
from thinwire.service.problems import problems_of_spec

LARGEST_FILE = 1 << 20
"""Bytes. A configuration has a few hundred."""
HEADS = {
    Verdict.TAKEN: "Taken over:",
    Verdict.IGNORED: "Not needed:",
    Verdict.OPEN: "NOT KNOWN:",
    Verdict.NONE: "WITHOUT A COUNTERPART:",
    Verdict.UNKNOWN: "UNKNOWN:",
}


class Form(StrEnum):
    """What is printed."""

    SCRIPT = "script"
    JOB = "job"


def migrate(
    file: Annotated[
        Path, typer.Argument(help="DeepSpeed's configuration; - reads it from standard input.", show_default=False)
    ],
    form: Annotated[Form, typer.Option("--as", help="script: lines of a training loop; job: a job file.")] = (
        Form.SCRIPT
    ),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps of the run. [default: the scheduler's, where it says it]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="An object with each key's verdict, and the lines, for programs.")
    ] = False,
) -> None:
    """Turn a DeepSpeed configuration into the lines of a training loop, or into a job file.

    The lines go to stdout. What became of each key goes to stderr: taken over and as what, not needed and why, not
    known ("auto") and what stands in its place, without a counterpart and why, unknown. Exit code 1 if a key is of the
    last three, 2 if the file is no configuration. DeepSpeed's checkpoints are loaded by
    thinwire.integrations.deepspeed (docs/from-deepspeed.md).

    Example: `thinwire migrate ds_config.json --as job --steps 10000 > job.yaml`
    """
    try:
        found = migration_of(read_config(file), steps)
        lines = as_script(found) if form is Form.SCRIPT else as_job(found)
    except (ConfigRefused, RecursionError) as error:
        why = error if isinstance(error, ConfigRefused) else "holds objects inside one another, more than can be read"
        complain(f"{named_file(file)}: {why}")
        raise typer.Exit(WRONG_INPUT) from None
    if as_json:
        keys = [{"key": s.key, "value": s.value, "verdict": s.verdict.value, "words": s.words} for s in found.said]
        typer.echo(json.dumps({"keys": keys, "whole": found.is_whole, form.value: lines}, indent=2))
    else:
        typer.echo(lines, nl=False)
        note("\n".join(report(found.said)))
    if not found.is_whole:
        raise typer.Exit(FAILURE)


def report(said: list[Said]) -> Iterator[str]:
    """The keys by what became of them, those that need a person last."""
    for verdict, head in HEADS.items():
        of_it = [one for one in said if one.verdict is verdict]
        if of_it:
            yield head
            yield from (f"  {one.key} = {shown(one.value)}: {one.words}" for one in of_it)


def read_config(file: Path) -> dict[str, Any]:
    """The object in the file, JSON or Hjson as far as comments and commas go. Raises: ConfigRefused."""
    try:
        if file == STDIN:
            content = sys.stdin.buffer.read(LARGEST_FILE + 1)
        else:
            with file.open("rb") as opened:
                content = opened.read(LARGEST_FILE + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigRefused(f"cannot be read: {why}") from error
    if len(content) > LARGEST_FILE:
        raise ConfigRefused(f"has more than {LARGEST_FILE} bytes: no DeepSpeed configuration is so long")
    try:
        document = json.loads(_plain_json(text), object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
        raise ConfigRefused(f"is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigRefused(f"holds {shown(document)}: must be an object of DeepSpeed's keys")
    return document


_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def _plain_json(text: str) -> str:
    """Without comments and commas before a closing bracket, which Hjson, that DeepSpeed reads, allows."""
    for pattern in (_STRING_OR_COMMENT, _STRING_OR_COMMA):
        text = pattern.sub(lambda match: match[0] if match[0].startswith('"') else "", text)
    return text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ConfigRefused(f"has the key {shown(name)} twice: DeepSpeed refuses that too")
        found[name] = value
    return found


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ConfigRefused(f"holds {text}: numbers must be finite")
    return number


def as_script(found: Migration) -> str:
    """The lines of a training loop, which run where `model`, `data`, `loss_of` and `total_steps` are the user's."""
    names = [
        found.optimizer,
        *(["LambBounds"] if found.bounds else []),
        *(["ZeroOneSchedule"] if found.schedule else []),
    ]
    lines = [
        *(["import math", ""] if found.rates and (found.rates.is_log or found.rates.shape == "cosine") else []),
        "import torch",
        "",
        f"from thinwire.optim import {', '.join(sorted(names))}",
        "",
        "# in the place of deepspeed.init_distributed() and deepspeed.initialize(...)",
        'torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
    ]
    if found.dtype == "bfloat16":
        lines.append("model = model.to(torch.bfloat16)")
    options = {**found.options}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    lines += [f"optimizer = {found.optimizer}(", "    model.parameters(),", "    model=model,"]
    lines += [f"    {name}={value!r}," for name, value in options.items()]
    for name, call, values in (("bounds", "LambBounds", found.bounds), ("schedule", "ZeroOneSchedule", found.schedule)):
        if values:
            lines.append(f"    {name}={call}({', '.join(f'{key}={value!r}' for key, value in values.items())}),")
    lines.append(")")
    if found.rates is not None:
        lines += ["", *_rates_lines(found.rates)]
    if found.scaler is not None:
        lines.append('device = "cuda" if torch.cuda.is_available() else "cpu"')
        arguments = ", ".join(f"{name}={value!r}" for name, value in found.scaler.items())
        lines.append(f"scaler = torch.amp.GradScaler(device, {arguments})")
    return "\n".join([*lines, "", *_loop_lines(found)]) + "\n"


def _rates_lines(rates: Rates) -> list[str]:
    """As DeepSpeed's schedulers: what LambdaLR multiplies the peak by before the step after `step` of them."""
    rise = f"math.log(step) / math.log({rates.warmup})" if rates.is_log else f"(step - 1) / {rates.warmup}"
    first = f"{rates.lowest!r} + {1 - rates.lowest!r} * {rise}" if rates.lowest else rise
    lines = [
        "def factor(step):  # of the learning rate, by the steps that are done; DeepSpeed counts from -1",
        "    if step == 0:",
        f"        return {0.0 if rates.shape == 'cosine' else rates.lowest!r}",
        f"    if step <= {rates.warmup}:",
        f"        return {first}",
    ]
    if rates.shape == "constant":
        lines.append("    return 1.0")
    elif rates.shape == "linear":
        assert rates.total is not None
        length = max(1, rates.total - rates.warmup)
        down = f"max(0.0, ({rates.total} - (step - 1)) / {length})"
        lines.append(
            f"    return {rates.lowest!r} + {1 - rates.lowest!r} * {down}" if rates.lowest else f"    return {down}"
        )
    else:
        assert rates.total is not None
        length = max(1, rates.total - rates.warmup)
        lines.append(f"    done = min(1.0, (step - {rates.warmup}) / {length})")
        lines.append(f"    return {rates.last!r} + {1 - rates.last!r} * (1 + math.cos(math.pi * done)) / 2")
    return [*lines, "", "", "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)"]


def _loop_lines(found: Migration) -> list[str]:
    batch = "" if found.micro_batch is None else f", of batch_size={found.micro_batch}"
    loss = "loss_of(model, batch)" if found.micro_steps == 1 else f"loss_of(model, batch) / {found.micro_steps}"
    indent, lines = "    ", []
    if found.micro_steps > 1:
        lines += [f"for micro_batches in data:  # {found.micro_steps} batches of a DataLoader{batch}, on each rank"]
    else:
        lines += [f"for batch in data:  # a DataLoader{batch}, on each rank"]
    lines.append(f"{indent}optimizer.zero_grad()")
    inner = indent
    if found.micro_steps > 1:
        lines.append(f"{indent}for batch in micro_batches:")
        inner += "    "
    if found.scaler is not None:
        lines += [f"{inner}with torch.autocast(device_type=device, dtype=torch.float16):", f"{inner}    loss = {loss}"]
        lines += [f"{inner}scaler.scale(loss).backward()  # engine.backward(loss)"]
        lines += [f"{indent}scaler.step(optimizer)  # engine.step()", f"{indent}scaler.update()"]
    else:
        lines += [f"{inner}loss = {loss}", f"{inner}loss.backward()  # engine.backward(loss)"]
        lines += [f"{indent}optimizer.step()  # engine.step()"]
    return lines + ([f"{indent}scheduler.step()"] if found.rates is not None else [])


def as_job(found: Migration) -> str:
    """A job file of a recipe of ours with that optimizer. Adds to what is said. Raises: ConfigRefused."""
    job = _job(found)
    try:
        read_spec(job)
    except ValidationError as error:
        problems = [f"{problem.path}: {problem.message}" for problem in problems_of_spec(error)]
        raise ConfigRefused("as a job: " + "; ".join(problems)) from error
    head = (
        "# A job of a recipe of thinwire, with the optimizer and the batches of the DeepSpeed configuration. A model\n"
        "# of your own is a script: `thinwire migrate --as script`, and docs/your-script.md.\n"
    )
    return head + yaml.safe_dump(job, sort_keys=False, default_flow_style=None)


def _job(found: Migration) -> dict[str, Any]:
    options = dict(found.options)
    steps = options.pop("total_steps", None) or (found.rates.total if found.rates else None)
    if steps is None:
        raise ConfigRefused("a job needs its steps, which the configuration does not say: give --steps")
    if found.global_batch is None:
        raise ConfigRefused("a job needs its global batch: train_batch_size is not given")
    if found.named is None:
        raise ConfigRefused("the optimizer has no counterpart: see --as script")
    if (clip := options.pop("max_grad_norm", None)) is not None:
        _lost(found, "gradient_clipping", clip, "a recipe of ours does not clip; a script does")
    if "betas" in options:
        options["betas"] = list(options["betas"])
    if (freeze := options.pop("var_freeze_step", None)) is not None:
        options["var_freeze"] = freeze
    bounds = {name: value for name, value in found.bounds.items() if name in _job_bounds(found.named)}
    job: dict[str, Any] = {"name": "from-deepspeed", "steps": steps, "global_batch": found.global_batch}
    if found.workers:
        job["workers"] = {**found.workers}
        job["workers"].setdefault("max", job["workers"].get("min", 1))
    if found.dtype == "bfloat16":
        job["precision"] = "bfloat16"
    elif found.dtype == "float16":
        _lost(found, "fp16.enabled", True, "a recipe of ours has float32 or bfloat16; a script has float16")
    job["optimizer"] = {"name": found.named, **options, **bounds, **found.schedule}
    if found.rates is None:
        job["lr_schedule"] = {"warmup": 1, "decay": "constant"}
        return job
    rates = found.rates
    if rates.is_log:
        _lost(found, "scheduler.params.warmup_type", "log", "a recipe's rate rises evenly")
    if rates.shape == "linear":
        _lost(found, "scheduler.type", "WarmupDecayLR", "a recipe's rate stays or falls as a cosine; it falls as one")
    if rates.lowest:
        _lost(found, "scheduler.params.warmup_min_lr", rates.lowest, "a recipe's rate rises from nothing")
    decay = "constant" if rates.shape == "constant" else "cosine"
    last = {} if decay == "constant" else {"final_fraction": rates.last}
    job["lr_schedule"] = {"warmup": min(rates.warmup, steps), "decay": decay, **last}
    return job


def _job_bounds(named: str) -> tuple[str, ...]:
    trust = ("max_coeff", "min_coeff")
    return trust if named == "lamb" else (*trust, "coeff_beta", "factor_max", "factor_min", "factor_threshold")


def _lost(found: Migration, key: str, value: Any, words: str) -> None:
    """What a job cannot take over stands in the place of what was said of the key for a script."""
    found.said[:] = [one for one in found.said if one.key != key]
    found.said.append(Said(key, value, Verdict.NONE, words))
