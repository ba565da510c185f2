"""A script's ranks as `torchrun --standalone` starts them, but forked from a process that has imported everything.

Of a run of half a minute imports are the larger part: ten seconds of a core on each rank, and five of torchrun's.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["benchmarks.papers.loaded"])


class RankFailed(Exception):
    """A rank has ended otherwise than well; the message says how, and its output says why."""


def run(script: Path, words: Sequence[str], ranks: int) -> None:
    """Run the script as so many ranks of this machine, with one thread each, until all have ended.

    Raises: RankFailed as soon as one of them fails; the others are ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["OMP_NUM_THREADS"] = "1"  # before the first one is forked
    started = [FORKSERVER.Process(target=_rank, args=(script, words, rank, ranks, port)) for rank in range(ranks)]
    try:
        for process in started:
            process.start()
        left = {process.sentinel: process for process in started}
        while left:
            for ended in wait(list(left)):
                process = left.pop(ended)  # type: ignore[arg-type]
                process.join()
                if process.exitcode:
                    which = f"rank {started.index(process)} ended with {process.exitcode}"
                    raise RankFailed(f"{' '.join((script.name, *words))}: {which}")
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
                process.join()


def _rank(script: Path, words: Sequence[str], rank: int, ranks: int, port: int) -> None:
    os.environ.update(
        {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _end_with_parent() -> None:
    """A command that was killed leaves no rank that goes on."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
