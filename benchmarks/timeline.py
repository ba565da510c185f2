"""The command: python -m benchmarks.timeline. What backward, encode, wire, serve and descend do in one step, drawn.

Two hosts of the lab, a link of a given rate, 1-bit Adam with max_grad_norm; one step is recorded when some have gone
by. It writes spans (JSON) and a picture (SVG) of rank 0. Only this command looks: it stands around methods of one
optimizer, and the product has nothing of it. Then the same step is timed in turns, with clipping and without.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from benchmarks.provenance import ROOT, provenance
from thinwire.comm import TorchGroup
from thinwire.contract.files import write_whole
from thinwire.optim import OneBitAdam

RESULTS = ROOT / "benchmarks" / "results" / "timeline"
PICTURE = ROOT / "docs" / "pictures" / "step.svg"
LAYERS, WIDTH, BATCH = 10, 768, 512
BUCKET = WIDTH * WIDTH
STEPS_BEFORE, TURNS, STEPS_A_TURN = 6, 12, 2
BOUND = 1e-3
"""Far below the norms that come, so that every step clips."""
LANES = ("backward", "shorten", "encode", "to servers", "serve", "to all", "wait", "descend")
WAYS = {"no clipping": (None, True), "clipping": (BOUND, True), "clipping in step()": (BOUND, False)}
"""max_grad_norm and overlap."""


@dataclass(frozen=True, slots=True)
class Span:
    """bucket: None where it is of all. In seconds from the beginning of backward."""

    lane: str
    bucket: int | None
    start: float
    stop: float


class Recorder:
    """Stands around what one optimizer calls, and notes when."""

    def __init__(self, optimizer: OneBitAdam) -> None:
        self.spans: list[Span] = []
        coder, overlap, clipping = optimizer.reduce._coder, optimizer.overlap, optimizer.clipping
        self._around(coder, "encode", "encode", lambda k, *_: k)
        self._around(coder, "serve", "serve", lambda k, *_: k)
        self._around(clipping, "_shorten", "shorten", lambda bound, k, runs: k)
        self._around(overlap, "complete", "wait", lambda *_: None)
        self._around(optimizer, "update", "descend", lambda *_: None)
        self._on_the_way(coder, "send", "to servers")
        self._on_the_way(coder, "pass_on", "to all")

    def note(self, lane: str, bucket: int | None, start: float, stop: float | None = None) -> None:
        """One span, which ends now where no end is given."""
        self.spans.append(Span(lane, bucket, start, time.perf_counter() if stop is None else stop))

    def _around(self, of: Any, name: str, lane: str, bucket: Callable[..., int | None]) -> None:
        call = getattr(of, name)

        def noted(*given: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*given)
            finally:
                self.note(lane, bucket(*given), start)

        setattr(of, name, noted)

    def _on_the_way(self, coder: Any, name: str, lane: str) -> None:
        call = getattr(coder, name)

        def noted(k: int) -> Any:
            start = time.perf_counter()
            found = call(k)
            for pending in found if isinstance(found, tuple) else (found,):
                pending._work.get_future().then(lambda _: self.note(lane, k, start))
            return found

        setattr(coder, name, noted)

    def of_step(self, began: float) -> list[Span]:
        """What was noted since, in seconds from then; update without what it waited for."""
        spans = [one for one in self.spans if one.start >= began]
        waited = max((one.stop for one in spans if one.lane == "wait"), default=began)
        own = [Span(s.lane, s.bucket, max(s.start, waited), s.stop) if s.lane == "descend" else s for s in spans]
        return [Span(s.lane, s.bucket, s.start - began, s.stop - began) for s in sorted(own, key=lambda s: s.start)]


class Run:
    """A model of LAYERS square matrices and its optimizer on this rank."""

    def __init__(self, group: TorchGroup, bound: float | None, overlap: bool) -> None:
        torch.manual_seed(1)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        made = OneBitAdam.sized(BUCKET)
        self.optimizer = made(
            self.model.parameters(), lr=1e-4, group=group, warmup=2, max_grad_norm=bound, overlap=overlap
        )
        self.x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(group.rank))

    def step(self) -> tuple[float, float, float]:
        """Returns when backward began, when it had ended, and when step() had."""
        self.optimizer.zero_grad()
        loss: Tensor = (self.model(self.x) - self.x.roll(1, 1)).square().mean()
        began = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        ended = time.perf_counter()
        self.optimizer.step()
        return began, ended, time.perf_counter()


def child() -> None:
    """One rank: a recorded step, then turns. Rank 0 prints both as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = TorchGroup.apart()
    drawn = Run(group, BOUND, overlap=True)
    for _ in range(STEPS_BEFORE):
        drawn.step()
    recorder = Recorder(drawn.optimizer)
    drawn.step()
    dist.barrier()
    began, ended, over = drawn.step()
    recorder.note("backward", None, began, ended)
    dist.barrier()
    spans = recorder.of_step(began)
    told = drawn.optimizer.stats()["overlapped"]
    runs = {way: Run(group, *settings) for way, settings in WAYS.items()}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(TURNS + 2):
        for way, run in runs.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                run.step()
            dist.barrier()
            if turn >= 2:  # the first compressed steps
                found[way].append((time.perf_counter() - start) / STEPS_A_TURN)
    if group.rank == 0:
        told["step_s"] = over - began
        print(json.dumps({"spans": [asdict(one) for one in spans], "overlapped": told, "step_s": found}), flush=True)
    dist.destroy_process_group()


def picture(spans: Sequence[Span], rate_mbit: float) -> str:
    """The spans as SVG, a row for each lane; buckets shade by turns."""
    left, right, row, top, scale = 100, 800, 30, 40, max(one.stop for one in spans)
    lanes = [lane for lane in LANES if any(one.lane == lane for one in spans)]
    high = top + row * len(lanes) + 30

    def x(seconds: float) -> float:
        return round(left + (right - left) * seconds / scale, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {high}" role="img" aria-labelledby="t d" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<title id="t">One compressed step</title>',
        f'<desc id="d">Rows of bars over time: {", ".join(lanes)}. Two hosts, {rate_mbit:g} Mbit/s. Buckets are '
        "shortened, encoded and sent while backward runs.</desc>",
        "<style>",
        " .a{fill:#1f4e79}.b{fill:#7fa3c7}.c{fill:#d9822b} text{fill:#17212b} .g{stroke:#9aa7b4;stroke-width:.5}",
        " @media (prefers-color-scheme: dark){.a{fill:#5b9bd5}.b{fill:#33597d}text{fill:#e8eef4}}",
        "</style>",
        f'<text x="10" y="20">One step of 1-bit Adam, {LAYERS} layers of {WIDTH} x {WIDTH}, two hosts, '
        f"{rate_mbit:g} Mbit/s, max_grad_norm, overlap; a shade a bucket</text>",
    ]
    tick = next(t for t in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1e9) if scale / t <= 12)
    for i in range(int(scale / tick) + 1):
        at = x(i * tick)
        lines.append(f'<path class="g" d="M{at} {top - 4}V{high - 26}"/>')
        lines.append(f'<text x="{at}" y="{high - 10}" text-anchor="middle">{1000 * i * tick:g} ms</text>')
    for r, lane in enumerate(lanes):
        y = top + r * row
        lines.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{lane}</text>')
        for one in spans:
            if one.lane == lane:
                at, wide = x(one.start), max(round(x(one.stop) - x(one.start), 1), 0.8)
                shade = "c" if one.bucket is None else "ab"[one.bucket % 2]
                lines.append(f'<rect class="{shade}" x="{at}" y="{y + 4}" width="{wide}" height="{row - 12}"/>')
    return "\n".join([*lines, "</svg>", ""])


def main(
    rate: Annotated[float, typer.Option(min=1, help="Mbit/s of each host's link.")] = 100.0,
    out: Annotated[Path, typer.Option(help="Folder of the spans.")] = RESULTS,
    drawn: Annotated[Path, typer.Option("--picture", help="Where the picture goes.")] = PICTURE,
) -> None:
    """Record, draw, and time in turns. Half a minute; makes network namespaces, so as root."""
    from thinwire.tools.lab import Lab, LabSpec

    with Lab(LabSpec(hosts=2, rate_mbit=rate)) as lab:
        ended = lab.run([sys.executable, "-m", "benchmarks.timeline"], env={"TIMELINE_RANK": "1"}).check()
    found = json.loads(ended.stdout[0].strip().splitlines()[-1])
    spans = [Span(**one) for one in found["spans"]]
    times = {way: median(values) for way, values in found["step_s"].items()}
    ratios = [a / b for a, b in zip(found["step_s"]["clipping"], found["step_s"]["no clipping"], strict=True)]
    found |= {"rate_mbit": rate, "median_s": times, "clipping_over_none": median(ratios), **asdict(provenance())}
    out.mkdir(parents=True, exist_ok=True)
    drawn.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out / "step.json", json.dumps(found, indent=1) + "\n")
    write_whole(drawn, picture(spans, rate))
    typer.echo(json.dumps({key: found[key] for key in ("overlapped", "median_s", "clipping_over_none", "commit")}))


if __name__ == "__main__":
    if "TIMELINE_RANK" in os.environ:
        child()
    else:
        typer.run(main)
