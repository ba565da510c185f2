"""What a process holds: threads by name, open files by what they are, memory as malloc counts it. Asked by a signal.

The number of a look comes in `looks`; the process writes what it holds to `look-NUMBER-PID.json` beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.workers.loop import elastic_job

STATES = {
    "01": "ESTABLISHED",
    "06": "TIME_WAIT",
    "08": "CLOSE_WAIT",
    "0A": "LISTEN",
    "02": "SYN_SENT",
    "04": "FIN_WAIT1",
}


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        ("arena", ctypes.c_size_t),
        *((f"_{number}", ctypes.c_size_t) for number in range(3)),
        ("hblkhd", ctypes.c_size_t),
        *((f"_{number}", ctypes.c_size_t) for number in range(3, 5)),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def watched_work(run_dir: Path, *rest: object) -> None:
    """elastic_job._work of a worker that answers looks."""
    answer_looks(run_dir)
    elastic_job._work(run_dir, *rest)


def look(job: elastic_job.ElasticJob, slots: Collection[int], number: int) -> dict[int, dict[str, Any]]:
    """By slot, what each of these holds, after it has had time to let go of its last group."""
    time.sleep(3.0)
    (job.run_dir / "looks").write_text(str(number))
    files = {slot: job.run_dir / f"look-{number}-{job.workers[slot].pid}.json" for slot in slots}
    for slot in slots:
        job.kill(slot, signal.SIGUSR1)
    job.until(lambda: all(file.exists() for file in files.values()))
    return {slot: json.loads(file.read_text()) for slot, file in files.items()}


def answer_looks(run_dir: Path) -> None:
    """Write down what this process holds at each SIGUSR1. In its main thread, which must run Python now and then."""
    signal.signal(signal.SIGUSR1, lambda *_: _write(run_dir))


def _write(run_dir: Path) -> None:
    number = int((run_dir / "looks").read_text())
    part = run_dir / f"look-{number}-{os.getpid()}.part"
    part.write_text(json.dumps(held(), indent=1))
    part.rename(part.with_suffix(".json"))


def held() -> dict[str, object]:
    """Of this process, now. Lets go of nothing: what only a collection of garbage would free is counted."""
    import torch

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo2
    counted = libc.mallinfo2()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return {
        "threads": dict(Counter(_native_threads())),
        "python_threads": dict(Counter(one.name.rstrip("0123456789-") for one in threading.enumerate())),
        "files": dict(Counter(open_files())),
        "resident": resident(),
        "malloc_in_use": counted.uordblks + counted.hblkhd,
        "malloc_free": counted.fordblks,
        "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()),
        "objects": dict(Counter(type(one).__qualname__ for one in gc.get_objects()).most_common(60)),
        "collections": [one["collections"] for one in gc.get_stats()],
    }


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _native_threads() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended since it was listed
            found.append((task / "comm").read_text().strip())
    return found


def open_files() -> list[str]:
    """What each is, in words that do not differ from one to the next of its kind."""
    sockets = {}
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            sockets[fields[9]] = STATES.get(fields[3], fields[3])
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            to = os.readlink(entry)
        except FileNotFoundError:  # the one by which they are listed
            continue
        if to.startswith("socket:["):
            to = "tcp " + sockets[to[8:-1]] if to[8:-1] in sockets else "other socket"
        elif to.startswith("pipe:["):
            to = "pipe"
        found.append(to)
    return found
