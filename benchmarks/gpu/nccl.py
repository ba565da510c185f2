"""Collectives of an exchange over NCCL: with one rank in this process, and with one a GPU where there are more.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.gpu.nccl 25000000      what the second one runs

A rehearsal takes gloo and vectors of the CPU in NCCL's place.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.steps import OURS, Ours
from benchmarks.marked_lines import tell, told_in
from benchmarks.provenance import ROOT
from thinwire.comm import TorchGroup
from thinwire.comm.protocol import Group

TURNS = 10
SECONDS = 240.0


@contextmanager
def one_rank(backend: str) -> Iterator[TorchGroup]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
        try:
            yield TorchGroup()
        finally:
            dist.destroy_process_group()


def collectives(group: TorchGroup, numel: int, device: torch.device) -> list[dict[str, Any]]:
    """Seconds of each, by the wall clock, with nothing left to do on the device. Checks what they give."""
    row = max(8, numel // 8 // group.size // 8 * 8)
    rows_nB = torch.full((group.size, row), group.rank, dtype=torch.uint8, device=device)
    out_nB, x = torch.empty_like(rows_nB), torch.ones(numel, device=device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found = []
    calls = {
        "all_to_all of rows of signs": lambda: group.all_to_all(out_nB, rows_nB),
        "all_gather of rows of signs": lambda: group.all_gather(out_nB, rows_nB[0]),
        "mean of a gradient": lambda: group.mean_(x),
        "broadcast": lambda: group.broadcast_(x),
    }
    for name, call in calls.items():
        seconds = []
        for turn in range(2 + TURNS):
            wait()
            began = time.perf_counter()
            call()
            wait()
            if turn >= 2:
                seconds.append(time.perf_counter() - began)
        found.append({"values": numel, "collective": name, "ranks": group.size, "wall_seconds": seconds})
    expected = torch.arange(group.size, dtype=torch.uint8, device=device)
    if not torch.equal(out_nB[:, 0], expected) or not bool((x == 1).all()):
        raise RuntimeError(f"collectives over {group.size} ranks gave something else than they must")
    return found


def whole_steps(group: Group, numel: int, device: torch.device, one: Ours) -> dict[str, Any]:
    """Steps of one of ours over this group, by the wall clock."""
    turn = one.call(numel, device, group)
    seconds = []
    for _ in range(TURNS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        turn()
        torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - began) / one.steps)
    return {"values": numel, "step": one.name, "ranks": group.size, "wall_seconds": seconds}


def over_all_gpus(numel: int) -> list[dict[str, Any]]:
    """What a process a GPU has found. Raises: RuntimeError with the end of what they said."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    argv = [*launcher, str(torch.cuda.device_count()), "-m", "benchmarks.gpu.nccl", str(numel)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS)
    heard = [told for line in done.stdout.splitlines() if (told := told_in(line)[1]) is not None]
    if done.returncode or not heard:
        raise RuntimeError(f"{' '.join(argv[1:])} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    found: list[dict[str, Any]] = heard[0]["found"]
    return found


def main(numel: int) -> None:
    """One rank of several, a GPU each."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    try:
        group = TorchGroup()
        found = collectives(group, numel, device)
        found += [whole_steps(group, numel, device, one) for one in OURS]
        if group.rank == 0:
            tell(found=found)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
