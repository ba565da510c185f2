"""Commands in a lab's namespaces, started, followed and ended by its owner: the owner's side of holder.py."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.tools.lab.spec import LabError

START_TIME_LIMIT_S = 30.0
END_TIME_LIMIT_S = 10.0
COMMAND_TIME_LIMIT_S = 30.0
LOOK_S = 1.0
_HOLDER = Path(__file__).with_name("holder.py")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Namespace:
    """The process that holds one host or the switch. inner_pid: its PID in the lab; pid: on the machine."""

    inner_pid: int
    pid: int


class HostProcess:
    """One command in a namespace of a lab."""

    def __init__(self, holder: Holder, status_fd: int) -> None:
        self._holder, self._status_fd, self._text = holder, status_fd, ""
        self.inner_pid = 0
        self.returncode: int | None = None
        """None while it runs; negative: ended by that signal, as in subprocess."""
        self.error = ""
        """Why it could not be executed, where it could not."""

    def fileno(self) -> int:
        """A descriptor to wait for in a selector: readable when poll() may have news. Closed when it has ended."""
        return self._status_fd

    def poll(self) -> int | None:
        """The return code, None while it runs. Raises: LabError where the lab has ended."""
        while self.returncode is None and readable([self._status_fd], 0.0):
            read = os.read(self._status_fd, 4096).decode()
            if not read:
                self._close(-signal.SIGKILL)
                break
            self._text += read
            *lines, self._text = self._text.split("\n")
            for line in lines:
                word, _, rest = line.partition(" ")
                if word == "pid":
                    self.inner_pid = int(rest)
                elif word == "error":
                    self.error = rest
                else:
                    self._close(int(rest))
        return self.returncode

    def wait(self, time_limit_s: float | None = None) -> int:
        """Wait for its end. Raises: TimeoutError."""
        until = None if time_limit_s is None else time.monotonic() + time_limit_s
        while (code := self.poll()) is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"still running after {time_limit_s} s")
            readable([self._status_fd], left)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to it and its process group; nothing where it has ended."""
        while self.poll() is None and not self.inner_pid:
            readable([self._status_fd], None)
        if self.returncode is None:
            self._holder.request({"op": "signal", "pid": self.inner_pid, "signal": int(number)})

    def _close(self, returncode: int) -> None:
        self.returncode = returncode
        os.close(self._status_fd)
        self._status_fd = -1


class Holder:
    """The processes that hold a lab's namespaces. Its end, however it comes, is theirs."""

    def __init__(self, lab_id: str, num_namespaces: int) -> None:
        """Start them. Raises: LabError, and leaves nothing behind."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # to learn the holders' PIDs on this machine
        self._control.settimeout(START_TIME_LIMIT_S)
        arguments = [f"thinwire-lab-{lab_id}", os.getpid(), birth(os.getpid()), num_namespaces, theirs.fileno()]
        with theirs:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HOLDER), *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Ctrl-C is the owner's to handle
            )
        try:
            found = dict(self._ready() for _ in range(num_namespaces))
        except BaseException:
            self.close()
            raise
        self.namespaces = [found[k] for k in range(num_namespaces)]

    @property
    def pid(self) -> int:
        """PID of the keeper: with it the lab ends."""
        return self._keeper.pid

    def spawn(
        self,
        namespace: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        cwd: str | None = None,
    ) -> HostProcess:
        """Start a command. stdin, stdout, stderr: descriptors that it gets copies of. cwd: default is the owner's."""
        request = {
            "op": "spawn",
            "namespace": namespace,
            "argv": list(argv),
            "env": dict(env),
            "cwd": cwd or os.getcwd(),
        }
        status, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            self.request(request, stdin, stdout, stderr, theirs)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(theirs)
        return HostProcess(self, status)

    def output(self, namespace: int, argv: Sequence[str], text: str = "") -> str:
        """What a short command prints, given `text` on stdin. Raises: LabError with its words where it fails."""
        return self.outputs([namespace], argv, [text])[0]

    def outputs(self, namespaces: Sequence[int], argv: Sequence[str], texts: Sequence[str]) -> list[str]:
        """The same in several namespaces at once."""
        what = f"`{' '.join(argv)}`"
        running, said, failed = [], [], []
        with contextlib.ExitStack() as files:
            for namespace, text in zip(namespaces, texts, strict=True):
                given, printed = (
                    files.enter_context(os.fdopen(os.memfd_create(name), "w+b")) for name in ("in", "out")
                )
                given.write(text.encode())
                given.seek(0)
                fds = given.fileno(), printed.fileno(), printed.fileno()
                running.append((self.spawn(namespace, argv, os.environ, *fds, cwd="/"), printed))
            for process, printed in running:
                try:
                    code = process.wait(COMMAND_TIME_LIMIT_S)
                except TimeoutError as error:
                    process.signal(signal.SIGKILL)
                    raise LabError(f"{what} did not end: {error}") from None
                printed.seek(0)
                said.append(printed.read().decode(errors="replace"))
                if code != 0:
                    failed.append(f"{what} ended with {code}: {process.error or said[-1].strip()}")
        if failed:
            raise LabError(failed[0])
        return said

    def request(self, request: Mapping[str, Any], *fds: int) -> None:
        """Send a request to the lab's init. Safe from several threads. Raises: LabError where the lab has ended."""
        body = os.memfd_create("request", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(body), "wb") as file:
                file.write(json.dumps(request).encode())
            socket.send_fds(self._control, [b"!"], [body, *fds])
        except OSError as error:
            raise LabError(f"the lab has ended ({error.strerror})") from error
        finally:
            os.close(body)

    def detach(self) -> None:
        """Let it outlive this process; `lab down` or the end of the keeper ends it. The holder is of no use then."""
        self.request({"op": "detach"})
        self._receive()
        self._control.close()

    def wait(self) -> None:
        """Wait for the end of the lab.

        Looked for again and again: a signal that comes just before a system call does not end it, so that a Ctrl-C
        at that moment would not be heard.
        """
        end_fd = os.pidfd_open(self._keeper.pid)
        try:
            while not readable([end_fd], LOOK_S):
                pass
        finally:
            os.close(end_fd)
        self._keeper.wait()

    def close(self) -> None:
        """End every process of the lab, and with them the namespaces. May be called twice."""
        self._control.close()
        try:
            self._keeper.wait(END_TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _ready(self) -> tuple[int, Namespace]:
        said, pid = self._receive()
        if "error" in said:
            raise LabError(_explained(said["error"], said["errno"]))
        return said["namespace"], Namespace(said["pid"], pid)

    def _receive(self) -> tuple[dict[str, Any], int]:
        """A message of the lab, and the PID of its sender on this machine."""
        space = socket.CMSG_SPACE(_CREDENTIALS.size)
        try:
            message, ancillary, _, _ = self._control.recvmsg(1 << 16, space)
        except TimeoutError:
            raise LabError(f"the lab's processes did not start within {START_TIME_LIMIT_S:.0f} s") from None
        if not message:
            raise LabError(f"the lab's first process ended before it was ready (exit code {self._keeper.poll()})")
        pid = _CREDENTIALS.unpack(ancillary[0][2])[0]
        said: dict[str, Any] = json.loads(message)
        return said, pid


def readable(fds: Iterable[int], time_limit_s: float | None) -> set[int]:
    """Those descriptors that can be read, or have ended, as soon as there is one; none when the time is over."""
    poll = select.poll()  # select.select() knows only the first 1024 descriptors
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if time_limit_s is None else max(0.0, time_limit_s) * 1e3)}


def birth(pid: int) -> str:
    """When a process began, in clock ticks since boot: with the PID, a name that is never given again."""
    # The name of the program, in brackets, may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _explained(error: str, number: int | None) -> str:
    if number == errno.EPERM:
        return (
            f"this process may not make namespaces ({error}): it needs the capabilities CAP_SYS_ADMIN and "
            "CAP_NET_ADMIN; in a container: docker run --privileged"
        )
    if number in (errno.EINVAL, errno.ENOSYS):
        return f"this kernel cannot make a lab's namespaces ({error}): it needs CONFIG_NET_NS and CONFIG_PID_NS"
    if number == errno.ENOSPC:
        return f"the limit of namespaces is reached ({error}): see /proc/sys/user/max_net_namespaces"
    return f"the lab's namespaces could not be made: {error}"
