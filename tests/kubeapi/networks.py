"""The network of a host of a lab, entered by a thread of this process: its sockets are then of that host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NETWORK: Final = 0x40000000  # CLONE_NEWNET
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def network_of(pid: int) -> Iterator[None]:
    """Be in the network namespace of this process until the block ends. Of this thread alone. Raises OSError."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        theirs = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            _enter(theirs)
        finally:
            os.close(theirs)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(own)


def processes_in(pid: int) -> Iterator[int]:
    """All processes of the network namespace of this one, but itself."""
    network = os.readlink(f"/proc/{pid}/ns/net")
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int(entry.name) != pid and os.readlink(entry / "ns/net") == network:
                yield int(entry.name)
        except OSError:  # it has ended
            continue


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns into a network namespace: " + os.strerror(ctypes.get_errno()))
