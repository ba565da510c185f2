"""What do full exchanges in few bits cost in loss? Runs of several lengths, rounding, error feedback, one by one.

    python -m benchmarks.few_bits               # four small tasks, five seeds, ten minutes of a core: results/few-bits
    python -m benchmarks.few_bits --table-only

Dense Adam on two ranks, every gradient of every step sent so: more than any warm-up sends. Beside fp32 stand bf16 and 8
bits as the optimizers send them; the other rows change one thing in the codec and are not offered. The tasks are those
of benchmarks.defaults at Adam's best rate there, the rule is the convergence study's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.convergence.paired import interval, judge
from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.study import ROOT
from benchmarks.defaults.runs import MAKE, run
from benchmarks.defaults.tasks import DEFAULTS_TASKS
from thinwire.comm.codecs import int8
from thinwire.comm.codecs.int8 import Int8Codec
from thinwire.comm.exchange import narrow_mean
from thinwire.comm.kernels import int8_reference
from thinwire.comm.kernels.int8_reference import LEVELS
from thinwire.optim import Adam
from thinwire.optim.engine.exchanges import Exchange, mean_gradient
from thinwire.optim.engine.optimizer import FlatOptimizer

RESULTS = ROOT / "benchmarks" / "results" / "few-bits"
TASKS = {"lstm": 1.6e-2, "rows": 1.6e-2, "saddle": 1.6e-2, "curriculum": 1.6e-2}
"""And Adam's best rate in results/defaults."""
SEEDS = 5


@dataclass(frozen=True, slots=True)
class Way:
    """wire: as full_exchange has it. block: values of a run. at_random: rounded up or down by chance, so that the mean
    is exact. forgets: what is left out is dropped.
    """

    title: str
    wire: str
    block: int = int8.DEFAULT_RUN
    at_random: bool = False
    forgets: bool = False


WAYS = {
    "fp32": Way("fp32", "fp32"),
    "bf16": Way("bf16, nearest, what is left out is dropped: as offered", "bf16"),
    "int8": Way("8 bits, runs of 256, nearest, error feedback: as offered", "int8"),
    "int8-64": Way("runs of 64", "int8", block=64),
    "int8-1024": Way("runs of 1024", "int8", block=1024),
    "int8-4096": Way("runs of 4096", "int8", block=4096),
    "int8-random": Way("runs of 256, stochastic rounding, error feedback", "int8", at_random=True),
    "int8-forgets": Way("runs of 256, nearest, what is left out is dropped", "int8", forgets=True),
    "int8-random-forgets": Way(
        "runs of 256, stochastic rounding, what is left out is dropped", "int8", at_random=True, forgets=True
    ),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """A run: its final validation loss in nats, and bytes of a ring in fp32 over bytes sent."""

    task: str
    way: str
    seed: int
    loss: float
    ratio: float


def rounded_at_random(generator: torch.Generator) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """int8_reference.encode, but between two whole numbers a value goes to either by chance: its mean is exact."""

    def encode(x_c: Tensor, scale_b: Tensor, q_c: Tensor, block: int) -> Tensor:
        missing = -x_c.numel() % block
        x_bk = torch.nn.functional.pad(x_c, (0, missing)).view(-1, block)
        peak_b = x_bk.abs().amax(1)
        scale_b.copy_(peak_b / LEVELS)
        by_b = torch.where(peak_b > 0, LEVELS / peak_b, 0)
        chance = torch.rand(x_bk.shape, generator=generator)
        q_bk = (x_bk * by_b.unsqueeze(1) + chance).floor_().clamp_(-LEVELS, LEVELS)
        q_c.copy_(q_bk.view(-1)[: x_c.numel()])
        return torch.isfinite(peak_b).all()

    return encode


@contextmanager
def sent_so(way: Way, seed: int) -> Iterator[None]:
    """Inside, means in 8 bits are sent in this way."""
    codecs = {**narrow_mean.CODECS, "int8": partial(Int8Codec, way.block)}
    with mock.patch.object(narrow_mean, "CODECS", codecs):
        if not way.at_random and not way.forgets:
            yield
            return
        begin = FlatOptimizer.begin_mean
        if way.forgets:

            def begin(self: FlatOptimizer[Any]) -> Exchange:
                return mean_gradient(self.reduce, self.space.g_N, None, self.full_exchange)

        with ExitStack() as patched:
            patched.enter_context(mock.patch.object(FlatOptimizer, "begin_mean", begin))
            if way.at_random:  # by the reference, whose passes all go through its encode
                encode = rounded_at_random(torch.Generator().manual_seed(seed))
                patched.enter_context(mock.patch.object(int8_reference, "encode", encode))
                patched.enter_context(mock.patch.object(int8, "_kernels_for", return_value=int8_reference))
            yield


def ended(task: str, name: str, seed: int) -> Ended:
    """Train it."""
    way = WAYS[name]
    MAKE[f"adam {name}"] = partial(Adam, full_exchange=way.wire)
    with sent_so(way, seed):
        found = run(DEFAULTS_TASKS[task], f"adam {name}", seed, TASKS[task])
    return Ended(task, name, seed, found.curve[-1], round(found.fp32_bytes / found.sent_bytes, 2))


def table(found: Sequence[Ended]) -> list[str]:
    """A row a task and a way: the paired difference from fp32 in per cent, its interval and the verdict."""
    lines = ["| task | sent as | loss | worse than fp32 by, % | verdict | fp32 / sent |", f"|{' --- |' * 6}"]
    for task in TASKS:
        base = {one.seed: one.loss for one in found if (one.task, one.way) == (task, "fp32")}
        for name, way in WAYS.items():
            own = [one for one in found if (one.task, one.way) == (task, name) and one.seed in base]
            if not own:
                continue
            mean = sum(one.loss for one in own) / len(own)
            told, verdict = "-", "-"
            if name != "fp32":
                worse = interval([100 * (one.loss / base[one.seed] - 1) for one in own])
                told, verdict = f"{worse.mean:+.2f} +- {worse.half:.2f}", str(judge(worse))
            lines.append(f"| {task} | {way.title} | {mean:.4f} | {told} | {verdict} | {own[0].ratio:.2f} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the table. Returns the exit code."""
    parser = argparse.ArgumentParser(description="What few bits cost in loss, one thing changed at a time.")
    parser.add_argument("--table-only", action="store_true", help="write the table of the runs that are there")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    given = parser.parse_args(arguments)
    file, made_by = given.out / "runs.json", provenance()
    kept = json.loads(file.read_text()) if file.exists() else {**asdict(made_by), "runs": []}
    found = [Ended(**one) for one in kept["runs"]]
    given.out.mkdir(parents=True, exist_ok=True)
    there = {(one.task, one.way, one.seed) for one in found}
    for seed in range(0 if given.table_only else given.seeds):
        for task in TASKS:
            for name in WAYS:
                if (task, name, seed) not in there:
                    found.append(ended(task, name, seed))
                    print(found[-1], flush=True)
                    kept["runs"] = [asdict(one) for one in found]
                    file.write_text(json.dumps(kept, indent=1) + "\n")
    hardware = ", ".join(f"{key} {value}" for key, value in (kept["hardware"] | kept["versions"]).items())
    head = f"# Full exchanges in few bits\n\n`python -m benchmarks.few_bits` at commit {kept['commit']}; {hardware}.\n"
    text = "\n".join([head, f"Adam, every step; {given.seeds} seeds, equal data.", "", *table(found), ""])
    (given.out / "README.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
