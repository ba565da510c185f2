"""The command: python -m benchmarks.memory. Bytes a parameter of each optimizer, held and at their peaks.

Real processes over gloo, 34 million parameters. Every block of 64 KiB and more is a mapping of its own here
(MALLOC_MMAP_THRESHOLD_), so that what the C library's allocator has handed out (mallinfo2) is exact, whatever asked for
it: torch, numpy, gloo. Linux tells the most that was resident within a call (VmHWM, set back by clear_refs).

    held    by the allocator after the call, without the parameters and gradients that any optimizer has
    peak    the most resident within the call, all included
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.provenance import ROOT, provenance
from benchmarks.report import pipes
from thinwire.comm import SoloGroup, TorchGroup
from thinwire.comm.keeps import Keeps
from thinwire.optim import SGD, Adam, Lamb, Muon, OneBitAdam, OneBitLamb, OneBitMuon, ZeroOneAdam, ZeroOneSchedule
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.regroup import hand_over, regroup

RESULTS = ROOT / "benchmarks" / "results" / "memory"
SIZES = (1, 2, 4)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = [(4096, 4096), (4096,)] * 2
NARROW = [(4096, 256), (256,)] * 32
"""As many in matrices of which Newton-Schulz takes seconds; those of 4096 x 4096 take minutes a step."""
SMALL = [(64, 64), (64,)]
BUCKET = 1 << 21
"""Elements: 16 buckets, as the default size of 4 Mi makes of a model of 67 million."""
THRESHOLD = 1 << 16
LIMIT_S = 3000.0


class KeepingRows(OneBitAdam):
    """1-bit Adam as jobs have it, where rows of the last exchange are kept for the dead, from the first regroup on."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.keeps = Keeps.ROWS


ZERO_ONE = {"var_freeze_step": 5, "schedule": ZeroOneSchedule(dense_steps=2, local_step_scaler=2)}
OPTIMIZERS: dict[str, tuple[type[FlatOptimizer[Any]], dict[str, Any], int]] = {
    "SGD": (SGD, {}, 3),
    "Adam": (Adam, {}, 3),
    "LAMB": (Lamb, {}, 3),
    "1-bit Adam": (OneBitAdam, {"warmup": 3}, 6),
    "1-bit Adam rows kept": (KeepingRows, {"warmup": 3}, 6),
    "1-bit Adam both bf16": (OneBitAdam, {"warmup": 3, "narrow": ("variance", "error_memory")}, 6),
    "1-bit Adam variance bf16": (OneBitAdam, {"warmup": 3, "narrow": ("variance",)}, 6),
    "1-bit Adam error memory bf16": (OneBitAdam, {"warmup": 3, "narrow": ("error_memory",)}, 6),
    "1-bit LAMB": (OneBitLamb, {"warmup": 3}, 6),
    "0/1 Adam": (ZeroOneAdam, ZERO_ONE, 14),
    "Muon": (Muon, {}, 3),
    "1-bit Muon": (OneBitMuon, {}, 4),
    "1-bit Muon both bf16": (OneBitMuon, {"narrow": ("momentum", "error_memory")}, 4),
    "Adam in 8 bits": (Adam, {"full_exchange": "int8"}, 3),
    "LAMB in 8 bits": (Lamb, {"full_exchange": "int8"}, 3),
    "1-bit Adam in 8 bits": (OneBitAdam, {"warmup": 3, "full_exchange": "int8"}, 6),
    "1-bit Adam in 8 bits both bf16": (
        OneBitAdam,
        {"warmup": 3, "full_exchange": "int8", "narrow": ("variance", "error_memory")},
        6,
    ),
    "1-bit LAMB in 8 bits": (OneBitLamb, {"warmup": 3, "full_exchange": "int8"}, 6),
    "0/1 Adam in 8 bits": (
        ZeroOneAdam,
        {**ZERO_ONE, "full_exchange": "int8"},
        14,
    ),
}
"""Each with its settings and steps."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Moment:
    """One call, bytes a parameter. told: what stats() says is held."""

    call: str
    held: float
    peak: float
    told: float


@dataclass(frozen=True, slots=True)
class Case:
    """The moments of the rank that took the most in each."""

    optimizer: str
    ranks: int
    dtype: str
    moments: list[Moment]


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def mapped_bytes() -> int:
    """What the allocator has handed out in blocks of THRESHOLD and more. glibc 2.33 or later."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    return int(libc.mallinfo2().hblkhd)


def resident_bytes(what: str) -> int:
    """VmRSS: resident now. VmHWM: at most since forget_peak()."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{what}: not in /proc/self/status")


def forget_peak() -> None:
    """VmHWM <- VmRSS."""
    Path("/proc/self/clear_refs").write_text("5")


class Meter:
    """Bytes of this process above what it had before there was a model."""

    def __init__(self, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> None:
        gc.collect()
        self._mapped, self._resident = mapped_bytes(), resident_bytes("VmRSS")
        self._numel = sum(torch.Size(shape).numel() for shape in shapes)
        self._own = 4 if dtype == torch.float32 else 2
        self.moments: dict[str, Moment] = {}

    @contextmanager
    def around(self, name: Callable[[], str], optimizer: FlatOptimizer[Any]) -> Iterator[None]:
        """Measure what happens inside. The parameters' and gradients' own bytes are taken from what is held."""
        gc.collect()
        forget_peak()
        yield
        peak = (resident_bytes("VmHWM") - self._resident) / self._numel
        gc.collect()
        held = (mapped_bytes() - self._mapped) / self._numel - 2 * self._own
        found = Moment(name(), round(held, 2), round(peak, 2), optimizer.stats()["bytes_per_parameter"]["state"])
        before = self.moments.get(found.call)
        if before is None or before.peak < found.peak:
            self.moments[found.call] = found


def model(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters of these shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def fill_gradients(params: Sequence[torch.nn.Parameter]) -> None:
    """As a backward leaves them, in the memory that they have."""
    for param in params:
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.normal_()


def call_of(optimizer: FlatOptimizer[Any], before: dict[str, Any]) -> str:
    """What the last step was."""
    if optimizer.num_steps == 1:
        return "first step"
    if isinstance(optimizer, SGD | Adam | Lamb | Muon):
        return "step"
    if not optimizer.sends_in_full:
        return "compressed step"
    if before["frozen_at"] is None:
        synced = optimizer.stats().get("num_syncs", 0) > before.get("num_syncs", 0)
        return "compressed step before the freeze" if synced else "warm-up step"
    if "num_syncs" in before:
        return "sync" if optimizer.stats()["num_syncs"] > before["num_syncs"] else "local step"
    first = optimizer.num_steps == before["frozen_at"] + 1
    return "first compressed step" if first else "compressed step"


def train(optimizer: FlatOptimizer[Any], params: Sequence[torch.nn.Parameter], steps: int, meter: Meter | None) -> None:
    """Make steps, and measure each where there is a meter."""
    for _ in range(steps):
        fill_gradients(params)
        before = optimizer.stats()
        if meter is None:
            optimizer.step()
            continue
        with meter.around(lambda before=before: call_of(optimizer, before), optimizer):
            optimizer.step()


def measure(name: str, dtype: torch.dtype, group: TorchGroup | SoloGroup) -> list[Moment]:
    """All moments of this rank."""
    make, options, steps = OPTIMIZERS[name]
    small = model(SMALL, dtype)
    _through_everything(make(small, group=group, **options), small, steps, group, None)
    del small
    shapes = NARROW if issubclass(make, Muon | OneBitMuon) else SHAPES
    meter = Meter(dtype, shapes)
    params = model(shapes, dtype)
    optimizer = make.sized(BUCKET)(params, group=group, **options)
    train(optimizer, params, steps, meter)
    _through_everything(optimizer, params, 0, group, meter)
    if group.size > 1:
        others = TorchGroup(dist.new_group(list(range(group.size))))
        newcomer = group.rank == group.size - 1
        if newcomer:
            del optimizer, params
            gc.collect()
            params = model(shapes, dtype)
            optimizer = make.sized(BUCKET)(params, group=SoloGroup(), **options)
            fill_gradients(params)
        told = "regroup, by who comes" if newcomer else "regroup after a death"
        with meter.around(lambda: told, optimizer):
            regroup(optimizer, others, has_state=not newcomer)
        train(optimizer, params, 1, None)
    return list(meter.moments.values())


def _through_everything(
    optimizer: FlatOptimizer[Any],
    params: Sequence[torch.nn.Parameter],
    steps: int,
    group: TorchGroup | SoloGroup,
    meter: Meter | None,
) -> None:
    """Steps, then state_dict, the step after it, and a planned change. Without a meter: so that code is loaded."""
    meter = meter or Meter(params[0].dtype, [tuple(param.shape) for param in params])
    train(optimizer, params, steps, meter)
    with meter.around(lambda: "state_dict()", optimizer):
        optimizer.state_dict()
    fill_gradients(params)
    with meter.around(lambda: "step after state_dict()", optimizer):
        optimizer.step()
    if group.size > 1:
        same = TorchGroup(dist.new_group(list(range(group.size))))
        with meter.around(lambda: "planned regroup", optimizer):
            hand_over(optimizer)
            regroup(optimizer, same, has_state=True)
        train(optimizer, params, 1, None)  # holds R beside its errors
        train(optimizer, params, 1, meter)  # what is kept for the dead is there from now on


@app.command(hidden=True)
def rank(number: int, size: int, folder: Path, cases: list[str]) -> None:
    """One rank of these cases, a process of its own: writes what it has measured into the folder."""
    torch.set_num_threads(1)
    gc.freeze()  # modules stay: a collection that walks through them takes long
    group: TorchGroup | SoloGroup = SoloGroup()
    if size > 1:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        group = TorchGroup()
    found = {}
    for case in cases:
        name, dtype = case.split(",")
        found[case] = [asdict(one) for one in measure(name, DTYPES[dtype], group)]
    (folder / f"{number}.json").write_text(json.dumps(found))


def run_cases(names: Sequence[tuple[str, str]], size: int) -> Iterator[Case]:
    """These cases, on as many processes. Raises: RuntimeError where one of them fails."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(THRESHOLD), "GLOO_SOCKET_IFNAME": "lo"}
    cases = [",".join(name) for name in names]
    with TemporaryDirectory(prefix="thinwire-memory-") as folder:
        begin = [sys.executable, "-m", "benchmarks.memory", "rank"]
        commands = [[*begin, str(number), str(size), folder, *cases] for number in range(size)]
        started = [subprocess.Popen(command, env=env, cwd=ROOT) for command in commands]
        codes = [one.wait(LIMIT_S) for one in started]
        if any(codes):
            raise RuntimeError(f"{cases} on {size} ranks: exit codes {codes}; what they said is above")
        found = [json.loads((Path(folder) / f"{number}.json").read_text()) for number in range(size)]
    for case in cases:
        worst: dict[str, Moment] = {}
        for moment in (Moment(**one) for moments in found for one in moments[case]):
            if moment.call not in worst or worst[moment.call].peak < moment.peak:
                worst[moment.call] = moment
        name, dtype = case.split(",")
        yield Case(name, size, dtype, list(worst.values()))


def table(cases: Sequence[Case]) -> list[str]:
    """A line a moment, and beside a peak that of the largest step of the case."""
    columns = ("optimizer", "ranks", "parameters", "call", "held", "peak", "over a step's peak")
    rows = []
    for case in cases:
        step = max(one.peak for one in case.moments if one.call in MOST_STEPS)
        for one in case.moments:
            what = (case.optimizer, str(case.ranks), case.dtype, one.call)
            rows.append((*what, f"{one.held:.2f}", f"{one.peak:.2f}", f"{one.peak / step:.2f}"))
    return pipes(columns, rows)


MOST_STEPS = ("step", "compressed step", "sync")
"""What most steps are, or the largest of them."""


@app.command()
def run(
    out: Annotated[Path, typer.Option(help="Folder of the results: a file a case, and the table.")] = RESULTS,
    only: Annotated[str, typer.Option(help="Only cases whose name holds this, such as 1-bit-adam-2-fp32.")] = "",
) -> None:
    """Measure the cases, then write the table of all files: twenty minutes."""
    made_by = provenance()
    out.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        names = [(name, dtype) for name in OPTIMIZERS for dtype in DTYPES if only in _stem(name, size, dtype)]
        for case in run_cases(names, size) if names else ():
            made = {"command": "python -m benchmarks.memory run", **asdict(made_by)}
            file = out / f"{_stem(case.optimizer, size, case.dtype)}.json"
            file.write_text(json.dumps({**made, "case": asdict(case)}, indent=1) + "\n")
            typer.echo("\n".join(table([case])[2:]))
    cases = [_read(file) for file in sorted(out.glob("*.json"))]
    (out / "table.md").write_text("\n".join(table(cases)) + "\n")


def _stem(name: str, size: int, dtype: str) -> str:
    return f"{name}-{size}-{dtype}".lower().replace(" ", "-").replace("/", "")


def _read(file: Path) -> Case:
    found = json.loads(file.read_text())["case"]
    return Case(**{**found, "moments": [Moment(**one) for one in found["moments"]]})


if __name__ == "__main__":
    app()
