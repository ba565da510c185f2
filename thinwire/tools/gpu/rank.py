"""One rank, on its host: takes methods one after another, and rank 0 says on stdout what a step of each took.

    python -m thinwire.tools.gpu.rank '{"methods": ["none", "onebit_adam"], ...}'      with RANK, WORLD_SIZE, MASTER_*

NCCL refuses two ranks on one GPU only where both say that they are on the same host. With another NCCL_HOSTID each they
are hosts to it, and what they send goes over sockets. A method that raises ends this process: what NCCL still has in
flight would hold up the next. Whoever started the ranks starts them again with the methods that are left.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm import prepare_nccl
from thinwire.tools.gpu.methods import LeftOut, Training, checksum, make
from thinwire.tools.gpu.model import SIZES, Gpt, batch_of
from thinwire.tools.lab.counters import token_buckets
from thinwire.tools.lab.network import INTERFACE, tool
from thinwire.tools.marked_lines import tell

FEWEST_TURNS, MOST_TURNS, TURNS_S = 3, 10, 6.0
"""So many turns, or as many as fit into so long."""
COLLECTIVE_S = 120.0


@dataclass(frozen=True, slots=True)
class Orders:
    """methods: in this order. load: of model.SIZES. device: "cuda" or "cpu", over gloo. until: no method begins after

    that, on this machine's monotonic clock, which its processes share.
    """

    methods: tuple[str, ...]
    load: str
    device: str
    until: float


class Rank:
    """This process among its peers."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.size = orders, SIZES[orders.load]
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.box = int(os.environ["LOCAL_WORLD_SIZE"])
        self.device = torch.device(orders.device)
        if self.on_gpu:
            os.environ |= {"NCCL_HOSTID": f"thinwire-{self.rank}", "NCCL_IB_DISABLE": "1"}
            prepare_nccl()
            self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
            os.environ["LOCAL_RANK"] = str(self.device.index)  # by which libraries choose a GPU
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.on_gpu else "gloo", timeout=timedelta(seconds=COLLECTIVE_S))
        if self.rank == 0:
            tell(kind="machine", **_machine(self.device))

    @property
    def on_gpu(self) -> bool:
        """Else this is a rehearsal."""
        return self.orders.device == "cuda"

    def all_of(self, *values: float) -> torch.Tensor:
        """Values of all ranks, in float64: [ranks, values]. A barrier too. Outside of what is timed."""
        given = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = torch.empty(self.world, len(values), dtype=torch.float64, device=self.device)
        dist.all_gather_into_tensor(found.view(-1), given)
        return found.cpu()

    def wait(self) -> None:
        """Until the device has done all that was launched."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def run(self) -> None:
        """All methods for which there is time, and what was not."""
        for name in self.orders.methods:
            if self.all_of(time.monotonic() > self.orders.until)[0, 0]:  # by the clock of rank 0
                break
            self.say(kind="begin", method=name)
            try:
                row = self.measured(name)
            except LeftOut as error:
                self.say(kind="left_out", method=name, why=str(error))
                continue
            self.say(kind="row", method=name, **row)
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
        self.say(kind="end")

    def say(self, **told: Any) -> None:
        """Of rank 0 one line."""
        if self.rank == 0:
            tell(**told)

    def measured(self, name: str) -> dict[str, Any]:
        """Whole steps of one method."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        torch.manual_seed(0)
        model = Gpt(self.size).to(self.device)
        values = sum(parameter.numel() for parameter in model.parameters())
        training = make(name, model, self.device, self.size.batch, self.box)
        losses: list[float] = []
        for _ in range(training.settle):
            self.step(training, losses)
        while training.round_steps > 1 and not training.ours.at_sync:
            self.step(training, losses)
        turns: list[list[float]] = []
        sent, payload, began = self.sent_bytes(), self.payload(training), time.monotonic()
        while len(turns) < FEWEST_TURNS or (
            len(turns) < MOST_TURNS and not self.all_of(time.monotonic() - began > TURNS_S)[0, 0]
        ):
            turns.append([self.step(training, losses) for _ in range(training.round_steps)])
        steps = len(turns) * training.round_steps
        per_step = ((self.sent_bytes() - sent) / steps, (self.payload(training) - payload) / steps)
        peak = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else 0
        found = self.all_of(*per_step, peak, checksum(training), *(sum(turn) / len(turn) for turn in turns))
        # Ranks of one place in their boxes hold the same shard.
        every = self.box if training.sharded else 1
        together = [found[place::every, 3] for place in range(every)]
        told = {} if training.ours is None else training.ours.stats()
        return {
            "values": values,
            "ranks": self.world,
            "seconds": found[:, 4:].max(0).values.tolist(),
            "wire_bytes": float(found[0, 0]),
            "payload_bytes": None if training.ours is None else float(found[:, 1].max()),
            "peak_bytes": int(found[:, 2].max()),
            "replicas_equal": all(bool((each == each[0]).all()) for each in together),
            "losses": [round(loss, 4) for loss in losses],
            **{key: told[key] for key in ("phase", "topology", "full_exchange", "overlapped") if key in told},
        }

    def step(self, training: Training, losses: list[float]) -> float:
        """Seconds of one, which all ranks begin together."""
        x, y = batch_of(self.size, len(losses), self.rank, self.device)
        self.all_of(0.0)
        self.wait()
        began = time.perf_counter()
        with self.mixed():
            loss = training.forward(x, y)
        training.backward(loss)
        training.step()
        self.wait()
        took = time.perf_counter() - began
        losses.append(float(loss.detach()))
        return took

    def mixed(self) -> AbstractContextManager[Any]:
        """As people train on GPUs."""
        return torch.autocast("cuda", torch.bfloat16) if self.on_gpu else nullcontext()

    def payload(self, training: Training) -> int:
        """Bytes that ours says to have sent so far."""
        return 0 if training.ours is None else int(training.ours.stats()["sent_bytes"])

    def sent_bytes(self) -> int:
        """Bytes of frames that have left this host so far, of all of its ranks."""
        self.all_of(0.0)
        asked = [tool("tc"), "-s", "-j", "qdisc", "show"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        return int(token_buckets(said)[INTERFACE]["bytes"])


def _machine(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"gpu": None, "nccl": None}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"gpu": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count(), "nccl": nccl}


def argument(orders: Orders) -> str:
    """The orders as the command line takes them."""
    return json.dumps(asdict(orders))


def main() -> None:
    """Read the orders, run, leave."""
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    code = 0
    try:
        Rank(Orders(**json.loads(sys.argv[1]))).run()
    except Exception as error:  # noqa: BLE001 - told as the result of the method
        tell(kind="failed", error=f"{type(error).__name__}: {error}"[:1000], at=traceback.format_exc()[-3000:])
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the threads of a process group of which a peer has failed may never end


if __name__ == "__main__":
    main()
