"""What collectives take in the lab, by algorithm, size and hosts; the lines fitted to them, and what these miss.

    sudo .venv/bin/python -m benchmarks.collectives                    # all three sets, eight minutes
    sudo .venv/bin/python -m benchmarks.collectives --only 100mbit     # one of them: 100mbit, 1gbit, chain
    .venv/bin/python -m benchmarks.collectives --table-only            # README and picture again, from the files

Each set is a file of `thinwire bench collectives`, a world for each number of hosts; `thinwire plan --collectives`
reads them. Nothing else should run on the machine meanwhile. The picture is of the pipelined chain: its time against
the number of ranks, measured, and predicted by T = (M/C + n - 2)(alpha + C/B) with the alpha and B of two hosts.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.provenance import CODE, ROOT, provenance
from benchmarks.report import made_by, pipes
from thinwire.cli.plan import GOODPUT
from thinwire.comm.wire.network import Network
from thinwire.contract.collectives import BROADCAST, CHAIN, TITLES, Algorithm, Collectives, Timing, World, read
from thinwire.contract.plan import ms
from thinwire.tools.collectives.algorithms import cost_of
from thinwire.tools.collectives.asked import SIZES, Asked, size_text
from thinwire.tools.collectives.run import run
from thinwire.tools.lab import LabSpec

RESULTS = ROOT / "benchmarks" / "results" / "collectives"
PICTURE, MADE = "chain.svg", "made.json"
CHAIN_BYTES = 4 << 20
"""Of the vector in the picture."""
MISS = 0.15
"""As benchmarks.plan has it."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Set:
    """Worlds of one file. hosts: a world each."""

    rate_mbit: float
    hosts: tuple[int, ...]
    algorithms: tuple[str, ...] = tuple(TITLES)
    sizes: tuple[int, ...] = SIZES

    @property
    def delay_s(self) -> float:
        """One way: the lab's default."""
        return LabSpec(hosts=2, rate_mbit=self.rate_mbit).delay_ms / 1e3


SETS = {
    "100mbit": Set(100.0, (2, 3, 4)),
    "1gbit": Set(1000.0, (2, 3, 4)),
    "chain": Set(100.0, (2, 3, 4, 6, 8), (BROADCAST, CHAIN), SIZES[:-1]),
}


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    only: Annotated[str | None, typer.Option(help=f"One set: {', '.join(SETS)}.")] = None,
    seconds: Annotated[float, typer.Option(help="For each number of hosts; larger sizes are left out.")] = 60.0,
    turns: Annotated[int, typer.Option(help="Of each algorithm at each size.")] = 5,
    table_only: Annotated[bool, typer.Option("--table-only", help="Run nothing.")] = False,
) -> None:
    """Measure the sets, and write README and picture of what is there."""
    if only is not None and only not in SETS:
        raise typer.BadParameter(f"{only!r}: there are {', '.join(SETS)}", param_hint="--only")
    for name in () if table_only else [only] if only else SETS:
        _measure(name, out, seconds, turns)
    write(out)


def _measure(name: str, out: Path, seconds: float, turns: int) -> None:
    one, file, before = SETS[name], out / f"{name}.json", os.getloadavg()
    file.unlink(missing_ok=True)
    for hosts in one.hosts:
        lab = LabSpec(hosts=hosts, rate_mbit=one.rate_mbit)
        asked = Asked(one.sizes, turns, seconds, algorithms=one.algorithms, device="cpu", lab=lab, out=file)
        run(asked, lambda what, done: typer.echo(f"{name}: {what}", err=True))
    made = out / MADE
    kept = json.loads(made.read_text()) if made.exists() else {}
    code = (*CODE, "thinwire/tools/collectives", "thinwire/contract/collectives.py")
    kept[name] = {"load_average": {"before": before, "after": os.getloadavg()}, **asdict(provenance(code))}
    made.write_text(json.dumps(kept, indent=1) + "\n")


def write(out: Path) -> None:
    """README.md and the picture, from the files."""
    found = {name: read(out / f"{name}.json") for name in SETS if (out / f"{name}.json").exists()}
    made = json.loads((out / MADE).read_text())
    lines = [
        "# Collectives in the lab",
        "",
        "`sudo .venv/bin/python -m benchmarks.collectives`. Hosts are network namespaces of one machine, a rank each, "
        "by gloo; a time is the median of turns, of the slowest rank. *missed by* is the worst of the sizes that the "
        "line was not fitted to, predicted over measured, less 1. Every turn is in the JSON files.",
        "",
        *(f"* {name}: {made_by(made[name])}; load {_load(made[name])}" for name in found),
        "",
    ]
    for name, one in found.items():
        lines += _section(name, one)
    if "chain" in found:
        (out / PICTURE).write_text(picture(found["chain"]))
        lines += _chain(found["chain"])
    (out / "README.md").write_text("\n".join(lines).rstrip() + "\n")
    typer.echo(f"wrote {out / 'README.md'}")


def _load(made: dict[str, dict[str, list[float]]]) -> str:
    """Beside the two cores: before the set, and after it."""
    return " to ".join(f"{made['load_average'][when][0]:.1f}" for when in ("before", "after"))


def _section(name: str, found: Collectives) -> list[str]:
    lines = [f"## {name}: {found.link}", ""]
    for world in found.worlds:
        sizes = sorted({one.vector_bytes for line in world.algorithms.values() for one in line.timings})
        columns = ["algorithm", *map(size_text, sizes), "alpha", "1/beta, MB/s", "missed by", "median miss"]
        rows = [_row(TITLES[key], line) for key, line in world.algorithms.items()]
        lines += [
            f"{world.ranks} ranks, chain in pieces of {size_text(world.piece_bytes)}:",
            "",
            *pipes(columns, rows),
            "",
        ]
        if world.left_out:
            lines += [f"Left out for want of time: {', '.join(map(size_text, world.left_out))}.", ""]
    checked = list(_checked(found))
    missed = [one for one in checked if abs(one[2].error) > MISS]
    lines += [
        f"Of {len(checked)} sizes that no line was fitted to, {len(checked) - len(missed)} are within {MISS:.0%}. By "
        f"the rate alone ({GOODPUT} of it, the lab's delay a round) {_by_rate(SETS[name], found)} of all sizes are. "
        "The misses of the lines:",
        "",
        *pipes(
            ("ranks", "algorithm", "size", "measured", "predicted", "less 1"),
            [
                [str(n), TITLES[key], size_text(t.vector_bytes), ms(t.median_s), ms(t.predicted_s), f"{t.error:+.0%}"]
                for n, key, t in missed
            ],
        ),
        "",
    ]
    return lines


def _row(title: str, line: Algorithm) -> list[str]:
    misses = [abs(one.error) for one in line.timings if not one.fitted]
    worst = line.worst
    missed = "-" if worst is None else f"{worst.error:+.0%} at {size_text(worst.vector_bytes)}"
    median = f"{statistics.median(misses):.0%}" if misses else "-"
    times = [ms(one.median_s) for one in line.timings]
    return [title, *times, ms(line.alpha_s), f"{1e-6 / line.beta_s:.3g}", missed, median]


def _checked(found: Collectives) -> Iterator[tuple[int, str, Timing]]:
    for world in found.worlds:
        for key, line in world.algorithms.items():
            yield from ((world.ranks, key, one) for one in line.timings if not one.fitted)


def _by_rate(asked: Set, found: Collectives) -> str:
    """How many sizes a plan by --rate would have within MISS."""
    near, number = 0, 0
    for world in found.worlds:
        network = Network(world.ranks, asked.delay_s, GOODPUT * asked.rate_mbit * 1e6 / 8)
        for key, line in world.algorithms.items():
            for one in line.timings:
                cost = cost_of(key, world.ranks, one.vector_bytes, world.per_machine, world.piece_bytes)
                near += abs(network.seconds(cost) / one.median_s - 1) <= MISS
                number += 1
    return f"{near} of {number}"


def _points(found: Collectives, name: str) -> list[tuple[int, Timing, float]]:
    """Ranks, what they took for CHAIN_BYTES, and what two of them predict."""
    first, points = found.worlds[0].algorithms[name], []
    for world in found.worlds:
        at = [one for one in world.algorithms[name].timings if one.vector_bytes == CHAIN_BYTES]
        points += [(world.ranks, one, _predicted(name, world, first)) for one in at]
    return points


def _predicted(name: str, world: World, line: Algorithm) -> float:
    network = Network(world.ranks, line.latency_s, line.bytes_per_s)
    return network.seconds(cost_of(name, world.ranks, CHAIN_BYTES, 1, world.piece_bytes))


def _chain(found: Collectives) -> list[str]:
    rows = [
        [TITLES[name], str(ranks), ms(timing.median_s), ms(predicted), f"{predicted / timing.median_s - 1:+.1%}"]
        for name in (CHAIN, BROADCAST)
        for ranks, timing, predicted in _points(found, name)
    ]
    piece = size_text(found.worlds[0].piece_bytes)
    return [
        "## The chain's time against its length",
        "",
        f"{size_text(CHAIN_BYTES)} bytes from rank 0 to all, in pieces of {piece}: T = (M/C + n - 2)(alpha + C/B), "
        "with alpha and B fitted between two hosts: three and more are predicted by a line that has not seen them.",
        "",
        f"![Seconds against ranks, measured and predicted]({PICTURE})",
        "",
        *pipes(("algorithm", "ranks", "measured", "predicted from two", "less 1"), rows),
    ]


def picture(found: Collectives) -> str:
    """Seconds against ranks as SVG: points measured, from the fastest turn to the slowest; lines predicted."""
    left, right, top, bottom = 60, 560, 50, 300
    series = {name: _points(found, name) for name in (CHAIN, BROADCAST)}
    most_s = 1.1 * max(max(*one.seconds, predicted) for points in series.values() for _, one, predicted in points)
    ranks = [world.ranks for world in found.worlds]

    def x(n: float) -> float:
        return round(left + (right - left) * (n - 1) / max(ranks), 1)

    def y(seconds: float) -> float:
        return round(bottom - (bottom - top) * seconds / most_s, 1)

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 600 350" role="img" aria-labelledby="t d" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<title id="t">A pipelined chain beside a binomial tree</title>',
        f'<desc id="d">Seconds against ranks, {found.link}: points measured, lines predicted from two hosts.</desc>',
        "<style>",
        " .page{fill:#ffffff}.chain{fill:#1f4e79;stroke:#1f4e79}.broadcast{fill:#d9822b;stroke:#d9822b}",
        " text{fill:#17212b}",
        " .g{stroke:#9aa7b4;stroke-width:.5} polyline{fill:none!important;stroke-width:1.5} text{stroke:none}",
        " @media (prefers-color-scheme: dark){.page{fill:#10161d}.chain{fill:#5b9bd5;stroke:#5b9bd5}",
        " text{fill:#e8eef4}}",
        "</style>",
        '<rect class="page" width="600" height="350"/>',
        f'<text x="10" y="20">{size_text(CHAIN_BYTES)} from one rank to all, {found.link}</text>',
        '<text x="10" y="36">points: measured, fastest to slowest turn; lines: predicted from two hosts</text>',
        f'<text x="{right - 40}" y="{bottom + 34}">ranks</text>',
    ]
    for n in ranks:
        lines.append(f'<text x="{x(n) - 3}" y="{bottom + 18}">{n}</text>')
    for tick in range(5):
        at = most_s * tick / 4.4
        lines.append(f'<line class="g" x1="{left}" x2="{right}" y1="{y(at)}" y2="{y(at)}"/>')
        lines.append(f'<text x="8" y="{y(at) + 4}">{at:.2f} s</text>')
    for name, points in series.items():
        path = " ".join(f"{x(n)},{y(predicted)}" for n, _, predicted in points)
        lines.append(f'<polyline class="{name}" points="{path}"/>')
        for n, timing, _ in points:
            low, high = y(min(timing.seconds)), y(max(timing.seconds))
            lines.append(f'<line class="{name}" x1="{x(n)}" x2="{x(n)}" y1="{low}" y2="{high}"/>')
            lines.append(f'<circle class="{name}" cx="{x(n)}" cy="{y(timing.median_s)}" r="3.5"/>')
        n, _, predicted = points[-1]
        lines.append(f'<text x="{x(n) - 60}" y="{y(predicted) - 10}">{TITLES[name].removeprefix("copy: ")}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    app()
