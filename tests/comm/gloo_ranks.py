"""Real processes over gloo on the loopback interface, each running one piece of source."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

PREAMBLE = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
import torch.distributed.nn.functional
from thinwire.comm import PeerLost, TorchGroup
rank, size, folder, timeout_s = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
torch.set_num_threads(1)

def join(tcp_store_on_rank_0=False, backend="gloo"):
    if tcp_store_on_rank_0:
        port_file = os.path.join(folder, "port")
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
            with open(port_file + ".new", "w") as file:
                file.write(str(store.port))
            os.rename(port_file + ".new", port_file)
        else:
            while not os.path.exists(port_file):
                time.sleep(0.01)
            store = dist.TCPStore("127.0.0.1", int(open(port_file).read()), size, False)
    else:
        store = dist.FileStore(os.path.join(folder, "store"), size)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)

def say(name, text):
    with open(os.path.join(folder, f"{rank}.{name}"), "w") as file:
        file.write(str(text))
"""


def start(source: str, size: int, folder: Path, timeout_s: float = 30.0) -> list[subprocess.Popen[bytes]]:
    """Start `size` processes that run `source` after the preamble: rank, size, folder, join() and say() are there."""
    program = PREAMBLE + textwrap.dedent(source)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, str(r), str(size), str(folder), str(timeout_s)], env=environment
        )
        for r in range(size)
    ]


def said(folder: Path, rank: int, name: str) -> str:
    """What a rank said under this name."""
    return (folder / f"{rank}.{name}").read_text()
