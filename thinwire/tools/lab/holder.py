"""The processes that hold a lab's namespaces, and what ends them.

This file is a program of its own, standard library only: the lab starts it and speaks to it over a socket. It becomes
two processes and one more for every host and for the switch:

    owner (any Python)
      keeper      in the machine's PID namespace; waits for init
        init      process 1 of a PID namespace of the lab; starts and reaps every command that runs in the lab
          switch  holds a network and a mount namespace, does nothing
          host 0  the same
          ...

Nothing has a name in a file system, so nothing can be left behind there. When process 1 of a PID namespace ends, the
kernel kills all others in it, daemons of daemons too; a network namespace without processes ends, and its interfaces
with it. init ends when the owner closes the socket, when the owner ends (a pidfd says so: a forked child of the owner
may still hold the socket), or when the keeper ends (PR_SET_PDEATHSIG). A SIGKILL of any of these ends
the lab.

Requests are one-byte messages with file descriptors, the first of which holds JSON (no limit on its size):

    {"op": "spawn", "namespace": k, "argv": [...], "env": {...}, "cwd": "/..."} + stdin, stdout, stderr, status
    {"op": "signal", "pid": p, "signal": s}          to the process group of a command that was spawned
    {"op": "detach"}                                 from now on the end of the owner is no reason to end

`status` is the write end of a pipe of that command alone: "pid P", then perhaps "error ...", then "exit CODE".
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
PR_SET_PDEATHSIG = 1

REQUEST_FDS = 5
CANNOT_EXECUTE = 127

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Arguments: marker of the lab, the owner's PID and birth (for others to read), namespaces, the socket's number."""
    _marker, owner_pid, _birth, num_namespaces, control_fd = sys.argv[1:]
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    try:
        owner = os.pidfd_open(int(owner_pid))
        _call("unshare(CLONE_NEWPID)", _libc.unshare, CLONE_NEWPID)
        init = os.fork()
    except OSError as error:
        _give_up(control, error)
    if init == 0:
        try:
            _Init(control, owner, int(num_namespaces)).serve()
        except Exception as error:  # noqa: BLE001 - the last words of a process that has no other place for them
            _give_up(control, error)
        os._exit(0)
    control.close()
    os.close(owner)
    os.waitpid(init, 0)


class _Init:
    """Process 1 of the lab."""

    def __init__(self, control: socket.socket, owner: int, num_namespaces: int) -> None:
        self._control, self._owner = control, owner
        self._status: dict[int, int] = {}
        _call("prctl(PR_SET_PDEATHSIG)", _libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _call("unshare(CLONE_NEWNS)", _libc.unshare, CLONE_NEWNS)
        _mount(None, "/", None, MS_REC | MS_SLAVE)
        _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        if os.path.isdir("/dev/shm"):
            # Its own, as names made from PIDs would meet those of the machine's processes; what is left in it goes too.
            _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        self._namespaces = [self._make_namespace(k) for k in range(num_namespaces)]

    def serve(self) -> None:
        """Do what the owner asks for, until there is a reason to end."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        poll = select.poll()
        for fd in (woken, self._owner, self._control.fileno()):
            poll.register(fd, select.POLLIN)
        detached = False
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._owner in ready:
                return
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if self._control.fileno() not in ready:
                continue
            message, fds, _, _ = socket.recv_fds(self._control, 16, REQUEST_FDS, socket.MSG_CMSG_CLOEXEC)
            if not message:
                if not detached:
                    return
                poll.unregister(self._control.fileno())
                continue
            request = _read_json(fds[0])
            if request["op"] == "spawn":
                self._spawn(request, fds[1:])
            elif request["op"] == "signal":
                self._signal(request["pid"], request["signal"])
            elif request["op"] == "detach":
                detached = True
                poll.unregister(self._owner)
                self._control.send(b'{"detached": true}')

    def _make_namespace(self, k: int) -> tuple[int, int]:
        """Fork the process that holds namespace k; give descriptors of its mount and its network namespace."""
        made, say_made = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _call("unshare(CLONE_NEWNET | CLONE_NEWNS)", _libc.unshare, CLONE_NEWNET | CLONE_NEWNS)
                _mount_sys()
                os.write(say_made, b"!")
                self._control.send(json.dumps({"namespace": k, "pid": os.getpid()}).encode())
            except OSError as error:
                _give_up(self._control, error)
            for fd in (made, say_made, self._owner):
                os.close(fd)
            self._control.close()
            while True:
                signal.pause()
        os.close(say_made)
        if not os.read(made, 1):
            os._exit(1)  # it has said why
        os.close(made)
        return os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)

    def _spawn(self, request: dict[str, Any], fds: list[int]) -> None:
        *standard, status = fds
        pid = os.fork()
        if pid == 0:
            what = "a process"
            try:
                os.setsid()
                for namespace in self._namespaces[request["namespace"]]:
                    _call("setns", _libc.setns, namespace, 0)
                what = request["cwd"]
                os.chdir(what)  # after setns, which goes to the root
                for number, fd in enumerate(standard):
                    os.dup2(fd, number)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that
                what = request["argv"][0]
                os.execvpe(request["argv"][0], request["argv"], request["env"])
            except OSError as error:
                _say(status, f"error {what}: {error.strerror or error}")
            except Exception as error:  # noqa: BLE001 - the process ends here, and no one else would hear of it
                _say(status, f"error {what}: {error}")
            finally:
                os._exit(CANNOT_EXECUTE)
        _say(status, f"pid {pid}")
        self._status[pid] = status
        for fd in standard:
            os.close(fd)

    def _signal(self, pid: int, number: int) -> None:
        if pid not in self._status:
            return  # it has ended, and its number may be another's
        try:
            os.killpg(pid, number)
        except ProcessLookupError:  # before its setsid
            os.kill(pid, number)

    def _reap(self) -> None:
        """Note who ended, and end what it left in its process group; daemons with a session of their own stay."""
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            status = self._status.pop(ended.si_pid, None)
            if status is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(ended.si_pid, signal.SIGKILL)  # not reaped yet: the number is still its own
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                _say(status, f"exit {code}")
                os.close(status)
            os.waitpid(ended.si_pid, 0)


def _say(status: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the owner may not want to know
        os.write(status, f"{text}\n".encode())


def _mount_sys() -> None:
    """A /sys that shows this network namespace's interfaces, and the machine's control groups as before."""
    cgroups = "/sys/fs/cgroup"
    before = os.open(cgroups, os.O_PATH | os.O_DIRECTORY) if os.path.ismount(cgroups) else None
    _mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if before is not None:
        if os.path.isdir(cgroups):
            _mount(f"/proc/self/fd/{before}", cgroups, None, MS_BIND | MS_REC)
        os.close(before)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    what = f"mount {kind or ''} on {target}"
    _call(what, _libc.mount, encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def _call(what: str, function: Any, *arguments: Any) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _read_json(fd: int) -> dict[str, Any]:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        request: dict[str, Any] = json.load(file)
    return request


def _give_up(control: socket.socket, error: Exception) -> NoReturn:
    """Tell the owner why, and end."""
    detail = {
        "error": f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else traceback.format_exc(),
        "errno": error.errno if isinstance(error, OSError) else None,
    }
    try:
        control.send(json.dumps(detail).encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
