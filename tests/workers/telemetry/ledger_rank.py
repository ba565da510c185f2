"""One rank of the ledger's test in the lab: exchanges for some steps, then says what its ledger holds, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
import torch.distributed as dist

from thinwire.comm.codecs.sign import SignCodec
from thinwire.comm.exchange.reducer import flat_reducer
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.layout import VectorLayout
from thinwire.comm.wire.link_classes import exchange_boxes
from thinwire.workers.telemetry.ledger import Ledger


def main() -> None:
    numel, compressed_steps, full_steps = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = TorchGroup()
    ledger = Ledger(group.stats, exchange_boxes(group))
    layout = VectorLayout.single(numel)
    reducer = flat_reducer(group, layout, SignCodec(), torch.empty(0))
    memory = reducer.new_memory()
    x_N = torch.randn(layout.numel, generator=torch.Generator().manual_seed(group.rank))
    x_N[numel:] = 0
    reducer.broadcast_(x_N.clone())
    for _ in range(full_steps):
        reducer.full_(x_N.clone())
    for _ in range(compressed_steps):
        reducer.compressed_(x_N.clone(), memory)
    said = {
        "boxes": [asdict(box) for box in ledger.boxes.of_rank],
        "calls": [[*call, times] for call, times in ledger.calls().items()],
        "own_bytes": sum(entry.num_bytes for entry in ledger.entries([group.rank])),
        "sent_bytes": group.stats.sent_bytes,
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
