"""The command: python -m benchmarks.rebuilt. What does the death of one of n ranks lose of R, by what the others keep?

Trains models of the convergence study with ranks as threads. At some steps of the compressed phase, for each rank in
turn, it asks what the others would hold of R if this one were gone, and compares with R of all: with thinwire's own
code (`nothing`, `rows`, `replica`), and with forms that were not built, worked out from what all ranks hold:

    outliers only, rows only     the two halves of `rows`
    fitted                       as `rows`, by least squares on the truth itself: what no constants can beat
    4, 8 kept rows               the same, with sums over the last 4, or 8, exchanges
    E dense, k steps old         a copy of each server error, brought up to date every k steps: exact, in 2 bits, in 1

Each figure is the norm of what R lacks, over that of R.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.convergence.provenance import provenance
from benchmarks.convergence.run_case import located
from benchmarks.convergence.study import RATES, ROOT, STEPS, case
from benchmarks.convergence.turns import Turns, run_in_turns
from thinwire.comm import Keeps
from thinwire.comm.exchange.rebuild import SERVER, WORKER
from thinwire.optim.engine import changing
from thinwire.optim.engine.state import error_memories
from thinwire.workers.build import build
from thinwire.workers.step import train_step
from thinwire.workers.telemetry.meter import Meter

RESULTS = ROOT / "benchmarks" / "results" / "rebuilt"
CASES = (
    ("gpt", "onebit_adam", 2, 32),
    ("gpt", "onebit_adam", 4, 32),
    ("gpt", "onebit_adam", 8, 32),
    ("gpt", "onebit_adam", 4, 8),
    ("gpt", "onebit_lamb", 4, 32),
    ("gpt", "zero_one_adam", 4, 32),
    ("resnet", "onebit_adam", 4, 32),
)
"""Task, method, ranks, global batch: 8 for noisier gradients."""
PROBES = (330, 460)
"""Steps; not multiples of the period of outliers, so that those have some age."""
AGES = (4, 16)
KEPT = (4, 8)
COLUMNS = (
    "nothing",
    "replica",
    "rows",
    "rows, told",
    "outliers only",
    "rows only",
    "fitted",
    *(f"{k} kept rows, fitted" for k in KEPT),
    *(f"E {how}, {age} old" for how in ("exact", "2 bits", "1 bit") for age in AGES),
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Of one rank after one step: worker error, server error, what was sent, the result; float[N], 0 where not its."""

    worker: Tensor
    server: Tensor
    sent: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Of one rank: the last exchanges, newest first; its share of R if that rank were gone; what it tells of itself."""

    seen: list[Seen]
    serves: Tensor
    outliers: Tensor
    shares: dict[int, Tensor]
    left: float


def probed(task: str, method: str, size: int, batch: int, steps: Sequence[int]) -> dict[int, list[Probe]]:
    """Train it; by step, what each rank saw."""
    torch.set_num_threads(1)
    rate = RATES[task]["lamb" if "lamb" in method else "adam"]
    spec = located(case(task, method, 0, STEPS, rate).spec)
    workers = spec.workers.model_copy(update={"min": 1, "max": size})
    spec = spec.model_copy(update={"global_batch": batch, "workers": workers})
    found: dict[int, dict[int, Probe]] = defaultdict(dict)

    def work(group: Turns) -> None:
        training, meter = build(spec, group, torch.device("cpu")), Meter(group.stats)
        optimizer = training.optimizer
        optimizer.keeps = Keeps.ROWS
        changing.connect(optimizer, group, optimizer.bucket_elements)
        history: deque[Seen] = deque(maxlen=max(*AGES, *KEPT) + 1)
        exchanges = 0
        for step in range(1, max(steps) + 1):
            train_step(training, step, meter)
            (memory,) = error_memories(optimizer.vectors).values()
            if memory.outliers.exchanges != exchanges:  # type: ignore[attr-defined]
                exchanges = memory.outliers.exchanges  # type: ignore[attr-defined]
                if any(at - 200 < step <= at for at in steps):
                    history.appendleft(_seen(memory))
            if step in steps:
                found[step][group.rank] = _probe(optimizer, memory, group, list(history))

    run_in_turns(size, work)
    return {step: [by_rank[rank] for rank in range(size)] for step, by_rank in found.items()}


def _seen(memory: Any) -> Seen:
    worker_N = memory.worker_N
    sent_N, out_N = torch.zeros_like(worker_N), torch.zeros_like(worker_N)
    for rows, worker, server in zip(memory._rows, memory.worker, memory.server, strict=True):
        sent_N[rows.span], out_N[rows.own] = worker.sent(rows.table), server.sent(rows.own_table)
    return Seen(worker_N, memory.share(1) - worker_N, sent_N, out_N)


def _probe(optimizer: Any, memory: Any, group: Turns, seen: list[Seen]) -> Probe:
    size, rank = group.size, group.rank
    serves = torch.zeros_like(seen[0].worker, dtype=torch.bool)
    for rows in memory._rows:
        serves[rows.own] = True
    outliers_N = torch.zeros_like(seen[0].worker)
    memory.outliers.add_(outliers_N, rank)
    shares = {}
    for dead in range(size):
        if dead != rank:
            by = 1 if dead == 0 else 0
            shares[dead] = optimizer.reduce.share(memory, size - 1, (dead,), rebuilt_by=by)
    server, worker = optimizer.reduce.left_squares(memory).tolist()
    return Probe(seen, serves, outliers_N, shares, server + worker / size**2)


def shares_lost(probes: list[Probe], dead: int) -> dict[str, float]:
    """By COLUMNS, where rank `dead` dies at this step."""
    size, gone = len(probes), probes[dead]
    rest = [one for at, one in enumerate(probes) if at != dead]
    now = [one.seen[0] for one in probes]
    whole_N = sum((one.worker for one in now), torch.zeros_like(now[0].worker)) / size + sum(
        (one.server for one in now), torch.zeros_like(now[0].worker)
    )
    norm = float(whole_N.norm())
    bar_N = _mean([one.seen[0].worker for one in rest])
    lacks_N = (now[dead].worker - bar_N) / size + now[dead].server  # with nothing
    on, size_of = gone.serves, float(norm)

    def told(lack_N: Tensor) -> float:
        return float(lack_N.norm()) / size_of

    def features(k: int) -> list[Tensor]:
        """bar C - out, and C_p - bar C, summed over the last k exchanges."""
        out_N = sum(one.seen[i].out for one in probes for i in range(k))
        bar = sum(_mean([one.seen[i].sent for one in rest]) for i in range(k))
        sent = sum(gone.seen[i].sent for i in range(k))
        assert isinstance(out_N, Tensor)
        return [bar - out_N, sent - bar]

    around_N, apart_N = features(1)
    by_rows_N = torch.where(on, SERVER * around_N, -(WORKER * apart_N + (1 - WORKER) * bar_N) / size)

    def fitted(ks: Sequence[int], known_N: Tensor) -> float:
        out_N = sum((one.seen[0].out for one in probes), torch.zeros_like(bar_N))
        own_N = _mean([one.seen[0].sent for one in rest])
        columns = [bar_N, own_N, out_N, gone.seen[0].sent]
        for k in ks:
            columns += features(k)
        total = 0.0
        for where, hidden in ((on, True), (~on, False)):
            allowed = [x for at, x in enumerate(columns) if not hidden or (at != 3 and (at < 4 or at % 2 == 0))]
            given, sought = torch.stack([x[where] for x in allowed], 1), (lacks_N - known_N)[where]
            total += float((sought - given @ _least_squares(given, sought)).square().sum())
        return total**0.5 / size_of

    found = {
        "nothing": told(lacks_N),
        "replica": told(lacks_N - now[dead].server),
        "rows": told(whole_N - sum((one.shares[dead] for one in rest), torch.zeros_like(whole_N))),
        "rows, told": mean(one.left for one in rest) ** 0.5 / size_of,
        "outliers only": told(lacks_N - gone.outliers),
        "rows only": told(lacks_N - by_rows_N),
        "fitted": fitted((), gone.outliers),
    }
    for k in KEPT:
        found[f"{k} kept rows, fitted"] = fitted((2, k), gone.outliers)
    for how, bits in (("exact", None), ("2 bits", 2), ("1 bit", 1)):
        for age in AGES:
            found[f"E {how}, {age} old"] = fitted((), torch.where(on, _quantized(gone.seen[age].server, bits), 0))
    return found


def _mean(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(dim=0)


def _least_squares(given: Tensor, sought: Tensor) -> Tensor:
    square = given.T @ given
    square += torch.eye(len(square)) * (1e-4 * square.diag().mean() + 1e-20)
    return torch.linalg.solve(square, given.T @ sought)


def _quantized(x_N: Tensor, bits: int | None) -> Tensor:
    """In so many bits, with a scale for 4096 elements; the best levels of a normal distribution. None: as it is."""
    if bits is None:
        return x_N
    parts = []
    for x_b in x_N.split(4096):
        scale = x_b.square().mean().sqrt() + 1e-20
        size_b = torch.full_like(x_b, 0.798) if bits == 1 else torch.where(x_b.abs() < 0.982 * scale, 0.453, 1.51)
        parts.append(x_b.sign() * size_b * scale)
    return torch.cat(parts)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    only: Annotated[str, typer.Option(help="Only cases whose name holds this.")] = "",
) -> None:
    """Run the cases that have no file yet: about two minutes each on a quiet core; then the table of all files."""
    made_by = provenance()
    out.mkdir(parents=True, exist_ok=True)
    for task, method, size, batch in CASES:
        name = f"{task}-{method}-{size}-batch-{batch}"
        if only not in name or (out / f"{name}.json").exists():
            continue
        deaths = []
        for step, probes in probed(task, method, size, batch, PROBES).items():
            deaths += [
                {"step": step, "rank": dead, **{key: round(x, 4) for key, x in shares_lost(probes, dead).items()}}
                for dead in range(size)
            ]
        made = {"command": "python -m benchmarks.rebuilt", **asdict(made_by), "case": name, "deaths": deaths}
        (out / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")
    lines = table([json.loads(file.read_text()) for file in sorted(out.glob("*.json"))])
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


def table(cases: Sequence[dict[str, Any]]) -> list[str]:
    """A line a form, a column a case: mean over deaths of what R lacks, in per cent of its norm."""
    names = [one["case"] for one in cases]
    lines = [
        f"({chr(97 + at)}) {name}, {len(one['deaths'])} deaths"
        for at, (name, one) in enumerate(zip(names, cases, strict=True))
    ]
    lines.append(f"{'':26}" + "".join(f"{'(' + chr(97 + at) + ')':>8}" for at in range(len(cases))))
    for column in COLUMNS:
        shares = [mean(death[column] for death in one["deaths"]) for one in cases]
        lines.append(f"{column:26}" + "".join(f"{100 * share:8.1f}" for share in shares))
    return lines


if __name__ == "__main__":
    app()
