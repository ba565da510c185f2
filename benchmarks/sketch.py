"""The command: python -m benchmarks.sketch. SGD by every codec, by factors and by a count-sketch, beside dense SGD.

A ResNet on digits, two ranks; each method at its own best of some rates, found with a seed that is not compared;
momentum 0.9, the schedule of jobs. Losing cases stay in the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.defaults.runs import OF_SGD
from benchmarks.one_bit_sgd import compare
from benchmarks.provenance import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "sketch"
METHODS = ("sgd", "onebit_sgd", *OF_SGD)
RATES = (0.03, 0.1, 0.3)
STEPS = 200


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    steps: Annotated[int, typer.Option(min=20, help="Of each run.")] = STEPS,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Run all, then write the table. Five minutes of one core."""
    compare("SGD by codecs, factors and a count-sketch", "sketch", METHODS, RATES, seeds, steps, out)


if __name__ == "__main__":
    typer.run(main)
