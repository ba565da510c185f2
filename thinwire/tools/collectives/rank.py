"""One rank of a lab: measures with the others, and rank 0 tells what they have found.

python -m thinwire.tools.collectives.rank '{"sizes": [1024, 4096], ...}'      with RANK, WORLD_SIZE, MASTER_*
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from thinwire.comm.errors import CommError
from thinwire.comm.groups.distributed import TorchGroup
from thinwire.contract.collectives import World
from thinwire.tools.collectives.asked import Asked, BenchFailed, Say
from thinwire.tools.collectives.measure import characterise
from thinwire.tools.marked_lines import tell

COLLECTIVE_S = 120.0


@contextmanager
def _joined(wanted: str) -> Iterator[tuple[TorchGroup, torch.device, str]]:
    """A group of the ranks that this process's environment names, its device and backend."""
    if wanted == "gpu" and not torch.cuda.is_available():
        raise BenchFailed("--device gpu: torch sees no GPU here; use --device cpu")
    device, backend = torch.device("cpu"), "gloo"
    if wanted != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "nccl"
    torch.set_num_threads(1)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_S))
    try:
        yield TorchGroup(), device, dist.get_backend()
    finally:
        if own:
            dist.destroy_process_group()


def measured(asked: Asked, say: Say) -> World | None:
    """The world that this process is a rank of; None on all ranks but 0. Raises: BenchFailed."""
    try:
        with _joined(asked.device) as (group, device, backend):
            found = characterise(group, asked, device, backend, say if group.rank == 0 else lambda what, done: None)
            return found if group.rank == 0 else None
    except CommError as error:
        raise BenchFailed(f"{error}. Nothing is kept; start all ranks again") from error
    except (RuntimeError, ValueError) as error:  # of torch.distributed, where ranks do not find one another
        raise BenchFailed(f"the ranks did not meet: {error}") from error


def orders_of(asked: Asked) -> str:
    """As a rank's command line takes them."""
    return json.dumps(asdict(replace(asked, lab=None, out=None)))


def main() -> None:
    """Read the orders, measure, leave."""
    given = json.loads(sys.argv[1])
    code = 0
    try:
        asked = Asked(**{**given, "sizes": tuple(given["sizes"]), "algorithms": tuple(given["algorithms"])})
        world = measured(asked, lambda what, done: tell(doing=what, done=done))
        if world is not None:
            tell(world=asdict(world))
    except BenchFailed as error:
        tell(failed=str(error))
        code = 1
    sys.stdout.flush()
    os._exit(code)  # the threads of a process group of which a peer has failed may never end


if __name__ == "__main__":
    main()
