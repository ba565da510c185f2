"""The command: sudo python -m benchmarks.sharded PART. Boxes that FSDP2 shards a GPT over, beside its own replication.

A lab of two hosts with a link of 1 Gbit/s each, and two ranks on each. FSDP2 shards the model inside of a box. Between
boxes: HSDP, which is FSDP2's own all-reduce of each shard in bf16 and in fp32 with torch's fused AdamW; and ours.

    exchange    gradients of shards are handed over: seconds from there to the updated shards, nothing else
    steps       whole steps, forward and backward too, where ours overlap as HSDP does
    run         a whole run of each method, from making it to its last step: bytes and loss

The first two take turns in one process a rank. For `exchange` HSDP is the all-reduces alone, one a module and all of
them on their way at once, of gradients that are in their type already; torch's AdamW has plain tensors.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.marked_lines import tell
from benchmarks.provenance import ROOT, TEXT
from benchmarks.ranks import Turns, count, keep, load_named, orders_given, run_ranks
from benchmarks.report import made_by, pipes
from benchmarks.wire.cases import LOADS, Load
from thinwire.optim import Muon, OneBitAdam, OneBitMuon
from thinwire.tools.lab import Lab, LabSpec
from thinwire.workers.recipes.gpt import build

RESULTS = ROOT / "benchmarks" / "results" / "sharded"
BOXES, RANKS_OF_A_BOX = 2, 2
WIDTHS = {"hsdp_bf16": torch.bfloat16, "hsdp_fp32": torch.float32}
"""What HSDP reduces in, by method."""
OURS: dict[str, Any] = {"onebit_adam": OneBitAdam, "onebit_muon": OneBitMuon, "muon": Muon}
STANDARD = ("hsdp_bf16", "hsdp_fp32", "onebit_adam", "onebit_muon")
LR = 1e-3
BATCH = 4
SETTLES = 2
"""Turns of each method that are not counted: a warm-up of one step is in the first."""
LAST = 20
"""Of a run's steps, over which its loss is taken."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Orders:
    """What the parent wants of each rank. answers: a folder with a file for each request to read the counters."""

    part: str
    load: str
    methods: list[str]
    turns: int
    steps: int
    answers: str


@app.command()
def main(
    part: Annotated[str, typer.Argument(help="exchange, steps or run.")],
    load: Annotated[str, typer.Option(help="Whose GPT, of benchmarks/wire/cases.py.")] = "gpt-25m",
    turns: Annotated[int, typer.Option(help="Of each method, after those that are not counted; a run is one.")] = 5,
    steps: Annotated[int, typer.Option(help="Of a turn.")] = 2,
    rate: Annotated[float, typer.Option(help="Of each host's link, Mbit/s.")] = 1000.0,
    methods: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join([*WIDTHS, *OURS])}.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
) -> None:
    """Measure, print the figures, and write a file of the part's name. Needs root, for the lab."""
    chosen = list(methods or STANDARD)
    if part not in PARTS or set(chosen) - {*WIDTHS, *OURS}:
        raise typer.BadParameter(f"{part}, --methods {chosen}: see --help for what there is")
    shape = asdict(load_named(load))
    spec = LabSpec(hosts=BOXES, rate_mbit=rate, ranks_per_host=RANKS_OF_A_BOX)
    with Lab(spec) as lab, TemporaryDirectory(prefix="thinwire-sharded-") as answers:
        read = Turns(lab, Path(answers))
        orders = Orders(part, load, chosen, 1 if part == "run" else turns, steps, answers)
        made = run_ranks(lab, "benchmarks.sharded", orders, read, 3000)
    found = {"network": asdict(spec), "load": shape, "steps": steps, "turns": read.turns}
    keep(out, f"{part}-{load}-{rate:g}mbit", {**found, "figures": figures(read.turns), **made})
    (out / "README.md").write_text(table(out))


def table(out: Path) -> str:
    """What is kept in a folder, in Markdown."""
    lines = ["# Sharded boxes", "", f"{BOXES} hosts of the lab with {RANKS_OF_A_BOX} ranks each; what is run: "]
    lines[-1] += "[benchmarks/sharded.py](../../sharded.py). Seconds: medians over turns, the least and the most."
    for path in sorted(out.glob("*.json")):
        kept = json.loads(path.read_text())
        load = kept["load_average"]
        shown = [
            [
                method,
                f"{of['seconds_a_step']:.3f} ({' to '.join(f'{x:.3f}' for x in of['seconds_least_most'])})",
                f"{of['times_as_fast']:.2f} ({' to '.join(f'{x:.2f}' for x in of['times_as_fast_least_most'])})",
                str(of.get("processor_ms_a_rank", "")),
                f"{of['sent_bytes_a_parameter']:.4f}",
                *(f"{of.get(f'{other}_bytes_over_its', float('nan')):.2f}" for other in WIDTHS),
                f"{of['loss']:.4f}" if "loss" in of else "",
            ]
            for method, of in kept["figures"].items()
        ]
        first = shown[0][0]
        columns = [
            "",
            "s a step",
            f"times as fast as {first}",
            "ms of processor a rank",
            "bytes of a host a parameter and step",
        ]
        columns += [*(f"{other}'s bytes over its" for other in WIDTHS), "loss"]
        made = f"{made_by(kept)}; load average {load['before'][0]:.1f} before, {load['after'][0]:.1f} after."
        what = f"`python {' '.join(kept['argv'])}` {made} Turns of {kept['steps']} steps."
        lines += ["", f"## {path.stem}", "", what, "", *pipes(columns, shown)]
    notes = out / "notes.md"  # written by hand
    return "\n".join([*lines, *(["", notes.read_text().rstrip()] if notes.exists() else []), ""])


def figures(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each method seconds a step and bytes that a host sends for a parameter and step, medians over turns; and how
    many times the first method's are its: of seconds turn by turn.
    """
    found: dict[str, Any] = {}
    of = {method: [turn for turn in turns if turn["method"] == method] for method in dict.fromkeys(_methods(turns))}
    base = next(iter(of.values()))
    for method, mine in of.items():
        seconds = sorted(turn["seconds"] / turn["steps"] for turn in mine)
        ratios = sorted(b["seconds"] / m["seconds"] for b, m in zip(base, mine, strict=True))
        found[method] = {
            "turns": len(mine),
            "seconds_a_step": round(statistics.median(seconds), 4),
            "seconds_least_most": [round(seconds[0], 4), round(seconds[-1], 4)],
            "times_as_fast": round(statistics.median(ratios), 2),
            "times_as_fast_least_most": [round(ratios[0], 2), round(ratios[-1], 2)],
            **_processor(mine),
            "sent_bytes_a_parameter": round(_sent(mine), 4),
            **{f"{other}_bytes_over_its": round(_sent(of[other]) / _sent(mine), 2) for other in WIDTHS if other in of},
            **({"loss": round(mine[-1]["loss"], 4)} if mine[-1]["loss"] is not None else {}),
            "alike": all(turn["alike"] for turn in mine),
        }
    return found


def _methods(turns: list[dict[str, Any]]) -> list[str]:
    return [turn["method"] for turn in turns]


def _processor(turns: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of processor that a rank uses in a step, the median; of turns that were not asked nothing."""
    each = [1e3 * turn["processor"] / turn["steps"] for turn in turns if "processor" in turn]
    return {"processor_ms_a_rank": round(statistics.median(each), 1)} if each else {}


def _sent(turns: list[dict[str, Any]]) -> float:
    """Bytes that a host sends for a parameter and step, the mean over hosts."""
    each = [statistics.mean(turn["sent_bytes"]) / turn["parameters"] / turn["steps"] for turn in turns]
    return float(statistics.median(each))


class Whole:
    """A sharded GPT and its optimizer, which train on text. total: steps of the run; None: a warm-up of one step."""

    def __init__(self, method: str, load: Load, mesh: DeviceMesh, total: int | None) -> None:
        self.load, self.losses = load, list[Tensor]()
        self._bytes = torch.from_numpy(np.fromfile(TEXT, dtype=np.uint8))
        self._step = 0
        if method in WIDTHS:
            self.model = sharded(load, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=WIDTHS[method]))
            self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.1, fused=True)
            return
        self.model = sharded(load, mesh["shard"])
        warmup = {} if method != "onebit_adam" else {"warmup": 1} if total is None else {"total_steps": total}
        self.optimizer = OURS[method](
            self.model.parameters(), lr=LR, weight_decay=0.1, model=self.model, overlap=True,
            group=mesh["replicate"].get_group(), **warmup,
        )  # fmt: skip

    def prepare(self) -> Any:
        """A batch of windows, each rank's own."""
        self._step += 1
        generator = torch.Generator().manual_seed(1000 * self._step + dist.get_rank())
        width = self.load.recipe.context + 1
        at = torch.randint(0, len(self._bytes) - width, (BATCH, 1), generator=generator) + torch.arange(width)
        windows = self._bytes[at].long()
        return windows[:, :-1], windows[:, 1:]

    def step(self, batch: Any) -> None:
        """Forward, backward, exchange, update."""
        loss = self.model(*batch)
        loss.backward()
        self.losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()


class Handed(Whole):
    """Ours, whose gradients are handed over."""

    def __init__(self, method: str, load: Load, mesh: DeviceMesh, total: int | None) -> None:
        super().__init__(method, load, mesh, total)
        self._given = [_drawn(p.to_local()) for p in self.model.parameters()]  # type: ignore[attr-defined]

    def prepare(self) -> Any:
        """Gradients of this rank's shards, new ones, as FSDP leaves them."""
        self._step += 1
        factor = _factor(self._step)
        return [
            DTensor.from_local(factor * given, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())  # type: ignore[attr-defined]
            for given, p in zip(self._given, self.model.parameters(), strict=True)
        ]

    def step(self, batch: Any) -> None:
        """Exchange and update. Hooks send what they are given."""
        _Reduced.apply(torch.zeros((), requires_grad=True), list(self.model.parameters()), batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Reduced(torch.autograd.Function):
    """A backward that gives each shard its gradient, and calls hooks, as FSDP does when it has reduced it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, params: list[Any], grads: list[Tensor]) -> Tensor:
        ctx.pairs = list(zip(params, grads, strict=True))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        for param, grad in reversed(ctx.pairs):
            param.grad = grad
            for hook in (param._post_accumulate_grad_hooks or {}).values():
                hook(param)
        ctx.pairs.clear()
        return dx, None, None


class HandedHsdp:
    """HSDP's exchange and update: of each module's shards one all-reduce."""

    def __init__(self, method: str, load: Load, mesh: DeviceMesh) -> None:
        self.model, self.losses = sharded(load, mesh["shard"]), list[Tensor]()
        self._group, self._dtype, self._step = mesh["replicate"].get_group(), WIDTHS[method], 0
        modules = [*self.model.blocks, self.model]  # type: ignore[misc]
        seen: set[nn.Parameter] = set()
        self._shards: list[list[nn.Parameter]] = []
        for module in modules:
            params = [p for p in module.parameters() if p not in seen]
            seen.update(params)
            self._shards.append([nn.Parameter(p.to_local().detach().clone()) for p in params])
        self._given = [_drawn(torch.cat([p.detach().view(-1) for p in shards])) for shards in self._shards]
        every = [p for shards in self._shards for p in shards]
        self.optimizer = torch.optim.AdamW(every, lr=LR, weight_decay=0.1, fused=True)

    def prepare(self) -> Any:
        """Of each module its gradients in one piece, in the type that they are reduced in."""
        self._step += 1
        factor = _factor(self._step)
        return [(factor * given).to(self._dtype) for given in self._given]

    def step(self, batch: Any) -> None:
        """Exchange and update."""
        pending = [dist.all_reduce(flat, group=self._group, async_op=True) for flat in batch]
        for shards, flat, each in zip(self._shards, batch, pending, strict=True):
            each.wait()
            mean = flat.div_(BOXES).float()
            for param, part in zip(shards, mean.split([p.numel() for p in shards]), strict=True):
                param.grad = part.view(param.shape)
        self.optimizer.step()
        self.optimizer.zero_grad()


def sharded(load: Load, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The GPT of a load, block by block and then the rest."""
    model = build(load.recipe, seed=1)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _drawn(like: Tensor) -> Tensor:
    return 1e-3 * torch.randn(like.shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def _factor(step: int) -> float:
    return float(torch.randn((), generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())))


def _handed(method: str, load: Load, mesh: DeviceMesh, total: int | None) -> Any:
    return HandedHsdp(method, load, mesh) if method in WIDTHS else Handed(method, load, mesh, total)


PARTS: dict[str, Callable[[str, Load, DeviceMesh, int | None], Any]] = {
    "exchange": _handed,
    "steps": Whole,
    "run": Whole,
}


def rank(orders: Orders) -> None:
    """One rank of a box."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    mesh = init_device_mesh("cpu", (BOXES, RANKS_OF_A_BOX), mesh_dim_names=("replicate", "shard"))
    load, make = LOADS[orders.load], PARTS[orders.part]
    if orders.part == "run":
        for number, method in enumerate(orders.methods):
            count(orders.answers, f"before-{number}")
            began, spent = time.perf_counter(), time.process_time()
            made = make(method, load, mesh, orders.steps)
            for _ in range(orders.steps):
                made.step(made.prepare())
            took = time.perf_counter() - began, time.process_time() - spent
            _tell(orders, number, method, made, *took, settles=False)
    else:
        every = {method: make(method, load, mesh, None) for method in orders.methods}
        for number in range((SETTLES + orders.turns) * len(every)):
            method = orders.methods[number % len(every)]
            made, seconds, processor = every[method], 0.0, 0.0
            count(orders.answers, f"before-{number}")
            for _ in range(orders.steps):
                batch = made.prepare()
                dist.barrier()
                began, spent = time.perf_counter(), time.process_time()
                made.step(batch)
                dist.barrier()
                seconds += time.perf_counter() - began
                processor += time.process_time() - spent
            _tell(orders, number, method, made, seconds, processor, settles=number < SETTLES * len(every))
    dist.destroy_process_group()


def _tell(
    orders: Orders, number: int, method: str, made: Any, seconds: float, processor: float, *, settles: bool
) -> None:
    """Tell of a turn; do the boxes have the same parameters, bit for bit, is looked at when its bytes are counted.

    processor: seconds of it that this process used; of all of them the mean is told.
    """
    count(orders.answers, f"after-{number}")
    losses = torch.stack(made.losses[-LAST:]).mean() if made.losses else torch.zeros(())
    dist.all_reduce(losses)
    used = torch.tensor(processor, dtype=torch.float64)
    dist.all_reduce(used)
    params = [p for group in made.optimizer.param_groups for p in group["params"]]
    bits = [(p.to_local() if isinstance(p, DTensor) else p).detach().view(torch.int32) for p in params]
    own = torch.stack([x.sum(dtype=torch.int64) for x in bits]).sum().view(1)
    sums = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, own)
    if dist.get_rank() == 0:
        tell(
            turn=number, method=method, seconds=seconds, steps=orders.steps, settles=settles,
            processor=float(used) / dist.get_world_size(),
            loss=float(losses) / dist.get_world_size() if made.losses else None,
            alike=len(set(map(int, sums))) <= RANKS_OF_A_BOX,
            parameters=sum(p.numel() for p in made.model.parameters()),
        )  # fmt: skip


if __name__ == "__main__":
    given = orders_given(Orders)
    app() if given is None else rank(given)
