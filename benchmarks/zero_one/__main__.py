"""The command: python -m benchmarks.zero_one. Loss of 0/1 Adam beside Adam's at equal steps, and which part costs what.

Two ranks as threads on one core, equal seeds. Each method runs at a constant rate, without being told how long the run
is; some also under a schedule of rates, with total_steps and lr_warmup_steps. Runs that the result has already are not
made again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.convergence.paired import interval, judge
from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import PILOT_SEED, ROOT
from benchmarks.zero_one.problems import PROBLEMS, Problem
from benchmarks.zero_one.runs import KNOWN, METHODS, Run, run

RESULTS = ROOT / "benchmarks" / "results" / "zero-one"
PILOT_RATES = (8e-3, 1.6e-2, 3.2e-2)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def cases(seeds: int) -> Iterator[tuple[Problem, str, bool, int, float]]:
    """(problem, method, told, seed, rate): the pilot of the rates, then seed after seed."""
    for problem in PROBLEMS.values():
        for rate in PILOT_RATES:
            yield problem, "adam", False, PILOT_SEED, rate
    for seed in range(seeds):
        for told in (False, True):
            for name in KNOWN if told else METHODS:
                if told or name not in ("default", "frozen-100"):  # within a dense start of 1000 steps they are Adam
                    for problem in PROBLEMS.values():
                        yield problem, name, told, seed, problem.lr


def table(runs: Sequence[Run]) -> list[str]:
    """A line a problem, a method and a kind of run: means over seeds, and the study's rule on the final loss."""
    lines = [
        "first: after a tenth of the run; last: at its end; nats. difference: of the last from Adam's, per cent of it,",
        "with the 95 % interval of its mean. ratio: bytes of a ring all-reduce in fp32 over bytes sent",
        "",
        f"{'':5} {'':38} {'first':>6} {'last':>6}  {'difference':>16}  {'verdict':10} {'ratio':>5}",
    ]
    compared = [one for one in runs if one.seed != PILOT_SEED]
    for problem in PROBLEMS:
        for told in (False, True):
            lines.append(f"{problem}, {'a schedule, and told of the run' if told else 'a constant rate, told nothing'}")
            for name, method in METHODS.items():
                own = {
                    one.seed: one for one in compared if (one.problem, one.method, one.told) == (problem, name, told)
                }
                dense = "adam-99" if name.endswith("-99") else "adam"
                base = {
                    one.seed: one for one in compared if (one.problem, one.method, one.told) == (problem, dense, told)
                }
                if own and set(own) <= set(base):
                    lines.append(_line(method.title, list(own.values()), [base[seed] for seed in own], name == dense))
    return lines


def _line(title: str, own: Sequence[Run], base: Sequence[Run], is_base: bool) -> str:
    means = [sum(one.curve[at] for one in own) / len(own) for at in (0, -1)]
    said, verdict = "", ""
    if not is_base:
        pairs = zip(own, base, strict=True)
        worse = interval([100 * (a.curve[-1] - b.curve[-1]) / b.curve[-1] for a, b in pairs])
        said, verdict = f"{worse.mean:+.1f} +- {worse.half:.1f}", str(judge(worse))
    sent = sum(one.sent_bytes for one in own)
    ratio = f"{sum(one.fp32_bytes for one in own) / sent:.1f}" if sent else "-"
    return f"{'':5} {title:38} {means[0]:6.3f} {means[1]:6.3f}  {said:>16}  {verdict:10} {ratio:>5}"


@app.command()
def main(
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the result: runs.json and table.txt.")] = RESULTS,
) -> None:
    """Run what is missing, one after another on one core: about ten minutes; then the table."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of warm-ups that end by the cap
    made_by, file = provenance(), out / "runs.json"
    out.mkdir(parents=True, exist_ok=True)
    runs = [Run(**one) for one in json.loads(file.read_text())["runs"]] if file.exists() else []
    done = {(one.problem, one.method, one.told, one.seed, one.lr) for one in runs}
    for problem, name, told, seed, rate in cases(seeds):
        if (problem.name, name, told, seed, rate) not in done:
            runs.append(run(problem, name, METHODS[name], seed, told=told, lr=rate, steps=problem.steps))
            typer.echo(f"{problem.name} {name} told={told} seed {seed} lr {rate:g}: {runs[-1].curve[-1]:.4f}")
            command = {"command": f"python -m benchmarks.zero_one --seeds {seeds}", **asdict(made_by)}
            file.write_text(json.dumps({**command, "runs": [asdict(one) for one in runs]}, indent=1) + "\n")
    lines = table(runs)
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    app()
