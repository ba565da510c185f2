"""A place is tried before a run trains for hours: a small file is written there, read and removed.

A place that refuses (no such bucket, no right to write, a full disk) will refuse each save too. One that does not
answer may only be away: it is asked again, for a bounded time.
"""

from __future__ import annotations

import errno
import queue
import secrets
import socket
import threading
import time

from thinwire.workers.checkpoints.names import checkpoints
from thinwire.workers.checkpoints.storage import Storage

AWAY_S = 40.0
"""How long a place may be away. Other ranks wait in a collective meanwhile, at most 60 s."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
_FILE, _CONTENT = "probe", b"Thinwire has looked whether checkpoints can be written here. This may be removed.\n"
_FOR_GOOD = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class StoreRefused(Exception):
    """The place takes no checkpoints. The message says which, what was refused, and what to do."""


class _Refusal(Exception):
    """What cannot be done there. for_good: to ask again is of no use."""

    def __init__(self, what: str, error: Exception, *, for_good: bool) -> None:
        super().__init__(what, error)
        self.what, self.error, self.for_good = what, error, for_good


def prove(storage: Storage, away_s: float = AWAY_S) -> None:
    """Ask the place, unless it holds a checkpoint of this run, which is proof enough. Takes away_s at most.

    Raises: StoreRefused.
    """
    until = time.monotonic() + away_s
    answers: queue.SimpleQueue[_Refusal | None] = queue.SimpleQueue()
    # In a thread of its own: a client may wait for a place that does not answer for much longer.
    threading.Thread(target=_ask, args=(storage, until, answers), name="storage-probe", daemon=True).start()
    last: _Refusal | None = _Refusal("answer", TimeoutError("not once"), for_good=False)
    while True:
        try:
            last = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        if last is None:
            return
        if last.for_good:
            break
    assert last is not None
    raise StoreRefused(_told(storage.address(""), last, away_s))


def _ask(storage: Storage, until: float, answers: queue.SimpleQueue[_Refusal | None]) -> None:
    """Give an answer after each try, until one is for good; None: it takes checkpoints."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            _try(storage)
        except _Refusal as refusal:
            answers.put(refusal)
            if refusal.for_good or time.monotonic() + pause_s > until:
                return
        else:
            answers.put(None)
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _try(storage: Storage) -> None:
    """Raises: _Refusal."""
    folder, what = f"probe-{secrets.token_hex(8)}", "be listed"
    try:
        if checkpoints(storage.folders()):
            return
        what = "be written to"
        storage.write(folder, _FILE, [_CONTENT])
        what = "be read"
        with storage.read(folder, _FILE) as stream:
            found = stream.read()
        if found != _CONTENT:
            raise OSError(f"{len(_CONTENT)} bytes were written, and {len(found)} other ones came back")
        what = "have a file removed"
        storage.remove(folder)
    except OSError as error:
        # A client without credentials says so in an error of its own, which is the cause here.
        for_good = error.errno in _FOR_GOOD or "Credentials" in type(error.__cause__).__name__
        raise _Refusal(what, error, for_good=for_good) from error
    except Exception as error:  # the border of the thread: a defect of a store's client is told too
        raise _Refusal(what, error, for_good=True) from error


def _told(address: str, refusal: _Refusal, away_s: float) -> str:
    error, host = refusal.error, socket.gethostname()
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, FileNotFoundError):
        todo = "make the bucket (a job makes none)"
    elif number in _FULL:
        todo = "make room there"
    elif refusal.for_good:
        todo = (
            "give the workers of this machine the right to list, write, read and delete there (credentials are those "
            "of the environment in which Ray was started)"
        )
    else:
        todo = f"it was asked for {away_s:g} s: look whether it runs, and whether this machine reaches it"
    return (
        f"no checkpoint could be saved: {address} cannot {refusal.what} from {host}: {type(error).__name__}: {error}; "
        f"{todo}, or name another checkpoint.store, and submit the job again"
    )
