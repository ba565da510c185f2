"""Threads and processes of the tests inside a lab's hosts: what opens a socket there is on that host's network."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

CLONE_NEWNET = 0x40000000


def enter(holder_pid: int) -> None:
    """This thread, and those that it starts from now on, are on the network of that host (Lab.host_pids)."""
    with open(f"/proc/{holder_pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def inside(holder_pid: int, call):
    """What call() returns, in a thread on that host."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(enter, holder_pid).result()
        return pool.submit(call).result()
