"""The keeper: parent of a command whose descendants leave their session and group, and the end of all of them.

`python -m thinwire.service.launch.keeper` starts a command and stays. It is a session of its own, so it survives the
server that started it, and a subreaper, so a process whose parent dies becomes its child and never escapes. It ends
every descendant, removes the command's folder and exits when

* it gets SIGTERM, SIGINT or SIGHUP,
* the command ends,
* nobody touched the lease file for `--lease-s`: a server that does not come back leaks nothing.

If the keeper itself is killed, the command dies with it (PR_SET_PDEATHSIG); the rest is for `processes.belonging`.
Only the standard library, so that it starts in tens of milliseconds and stays small.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from thinwire.contract.files import write_whole
from thinwire.service.launch import processes

_log = logging.getLogger("thinwire.keeper")

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

TICK_S = 0.2
GRACE_S = 2.0
"""Between SIGTERM and SIGKILL. Ray itself would drain an idle node for up to 30 s."""
LIMIT_S = 30.0
"""A process that outlives SIGKILL this long hangs in the kernel; the keeper says so and goes."""

EXIT_ASKED, EXIT_COMMAND_ENDED, EXIT_LEASE_EXPIRED, EXIT_LEFT_SOME = 0, 3, 4, 5


def main(argv: Sequence[str] | None = None) -> int:
    """Keep the command until its end. Returns the exit code: one of the EXIT_ constants."""
    parser = argparse.ArgumentParser(prog="keeper", description=__doc__)
    parser.add_argument("--lease", type=Path, required=True, help="file whose modification time is watched")
    parser.add_argument("--lease-s", type=float, required=True, help="seconds without a touch after which all ends")
    parser.add_argument("--record", type=Path, required=True, help="JSON file: written at start, removed at the end")
    parser.add_argument("--facts", type=json.loads, default={}, help="JSON object that is added to the record")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--remove", type=Path, help="folder to remove at the end")
    parser.add_argument("--save", type=Path, nargs=2, metavar=("FROM", "TO"), help="copy if the command ends by itself")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s keeper %(message)s", stream=sys.stderr)

    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: asked.append(received))
    if os.getsid(0) != os.getpid():
        os.setsid()
    if sys.platform == "linux":
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    me = {"pid": os.getpid(), "birth": processes.birth_of(os.getpid()), **args.facts}
    write_whole(args.record, json.dumps(me, indent=1))
    command = subprocess.Popen(
        args.command,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )
    _log.info("command_started pid=%d lease_s=%g", command.pid, args.lease_s)
    code = _watch(command.pid, args.lease, args.lease_s, asked)

    left = processes.end(lambda: processes.descendants(os.getpid()), args.grace_s, LIMIT_S)
    _reap()
    if left:
        _log.error("processes_left pids=%s they outlived SIGKILL for %g s", [p.pid for p in left], LIMIT_S)
        return EXIT_LEFT_SOME  # the record and the folder stay, so that the next start tries again
    if args.save is not None and code == EXIT_COMMAND_ENDED:
        _save(*args.save)
    if args.remove is not None:
        shutil.rmtree(args.remove, onerror=_log_unremoved)
    args.record.unlink(missing_ok=True)
    _log.info("all_ended exit_code=%d", code)
    return code


def _watch(command_pid: int, lease: Path, lease_s: float, asked: list[int]) -> int:
    """Wait for a reason to end; returns its exit code."""
    touched, touched_at = _modified(lease), time.monotonic()
    while True:
        ended = _reap()
        if asked:
            _log.info("ending reason=signal number=%d", asked[0])
            return EXIT_ASKED
        if command_pid in ended:
            _log.info("ending reason=command_ended wait_status=%d", ended[command_pid])
            return EXIT_COMMAND_ENDED
        # Own monotonic clock, not the file's age: a suspended machine or a corrected clock must not end a job.
        if (modified := _modified(lease)) != touched:
            touched, touched_at = modified, time.monotonic()
        elif time.monotonic() - touched_at > lease_s:
            _log.info("ending reason=lease_expired lease_s=%g", lease_s)
            return EXIT_LEASE_EXPIRED
        time.sleep(TICK_S)


def _reap() -> dict[int, int]:
    """Collect the wait status of every child that has ended, adopted ones too."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _save(source: Path, target: Path) -> None:
    """Replace the folder `target` by a copy of `source`: what a command that nobody ended has to say."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, ignore_dangling_symlinks=True)
    except (OSError, shutil.Error) as error:
        _log.warning("not_saved source=%s error=%s", source, error)


def _log_unremoved(_function: object, path: str, error: object) -> None:
    _log.warning("not_removed path=%s error=%s", path, error)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent() -> None:
    """SIGKILL for this process when the thread ends that has started it. For preexec_fn; Linux only."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
