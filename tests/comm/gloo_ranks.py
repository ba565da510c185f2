"""Real processes over gloo on the loopback interface, each running one piece of source.

They are forked (tests/forked.py): imports are most of what a short rank costs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

from tests.forked import FORKSERVER

PREAMBLE = """
import datetime, gc, os, signal, sys, time
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


class Rank:
    """A process that was started, with what tests need of subprocess.Popen."""

    def __init__(self, program: str, arguments: list[str]) -> None:
        self._process = FORKSERVER.Process(target=_run, args=(program, arguments), daemon=True)
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; that of a signal is negative. Raises: subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


def _run(program: str, arguments: list[str]) -> None:
    gc.freeze()  # modules stay: a collection that walks through them takes a fifth of a second, and copies their pages
    sys.argv = ["-c", *arguments]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    code = 0
    try:
        exec(compile(program, "<rank>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - printed, as the interpreter does
        traceback.print_exc()
        code = 1
    # As a program ends, with the interpreter and what is static taken down: multiprocessing would leave by os._exit.
    ctypes.pythonapi.Py_Exit(code)


def start(source: str, size: int, folder: Path, timeout_s: float = 60.0) -> list[Rank]:
    """Start `size` processes that run `source` after the preamble: rank, size, folder, join() and say() are there."""
    program = PREAMBLE + textwrap.dedent(source)
    return [Rank(program, [str(r), str(size), str(folder), str(timeout_s)]) for r in range(size)]


def said(folder: Path, rank: int, name: str) -> str:
    """What a rank said under this name."""
    return (folder / f"{rank}.{name}").read_text()
