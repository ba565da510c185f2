"""What a box does for the doctor of another: it answers questions, swallows bytes, and visits others when asked to.

Only for callers that know the secret. It answers a datagram with a smaller one, and only where the datagram names a
session that such a caller has begun: nobody can use it to flood a third.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thinwire.tools.doctor.facts import Facts, Questions, look
from thinwire.tools.doctor.link import PATIENCE_S, Link
from thinwire.tools.doctor.probe import SESSION_BYTES, Target, count, send, visit

logger = logging.getLogger(__name__)

MOST_CALLS = 64
"""At once; one more waits in the kernel's queue until one has ended."""
_AGAIN_S = 0.1
MOST_TIMES, MOST_BYTES, MOST_SECONDS, MOST_PORTS = 1000, 1 << 20, 30.0, 64


class Listener:
    """Listens at a TCP port, and hears datagrams at another, until it is closed. Everything is in threads.

    secret: what a caller must know. clock: unix seconds. look: what this box says of itself.
    Raises: OSError where the port cannot be had.
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "",
        port: int = 0,
        *,
        clock: Callable[[], float] = time.time,
        look: Callable[[Questions], Facts] = look,
    ) -> None:
        self._secret, self._host, self._clock, self._look = secret, host, clock, look
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tcp = socket.create_server((host, port), family=self._family, backlog=MOST_CALLS)
        self._udp = socket.socket(self._family, socket.SOCK_DGRAM)
        self._udp.bind((host, 0))
        self.port = int(self._tcp.getsockname()[1])
        self._closed = threading.Event()
        self._sessions: set[bytes] = set()
        self._places = threading.Semaphore(MOST_CALLS)
        self._opened: list[socket.socket] = []
        self._left: list[Path] = []
        for work in (self._accept, self._echo):
            threading.Thread(target=work, name="thinwire-doctor", daemon=True).start()

    def close(self) -> None:
        """Listen no more, and take away what was left in folders."""
        self._closed.set()
        self._leave((), "")
        for one in (self._tcp, self._udp, *self._opened):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it
            one.close()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """What has an answer in JSON. Raises: ValueError, KeyError, TypeError where the question makes no sense.

        {"do": "look", "questions": Questions}             Facts
        {"do": "open", "ports": [...]}                     {"ports": {port: why not, "" where it listens}}
        {"do": "leave", "folders": [...], "name": "..."}   {"folders": those where that could be done}
        {"do": "visit", "target": Target, "seconds": s}    Visit
        """
        match question["do"]:
            case "look":
                return self._look(Questions.model_validate(question["questions"])).model_dump()
            case "open":
                return {"ports": self._open([int(port) for port in question["ports"]])}
            case "leave":
                return {"folders": self._leave([*map(str, question["folders"])], _plain(question["name"]))}
            case "visit":
                seconds = min(float(question["seconds"]), MOST_SECONDS)
                target = Target.model_validate(question["target"])
                return visit(target, self._secret, seconds=seconds, clock=self._clock).model_dump()
            case other:
                return {"error": f"this version cannot {str(other)[:60]!r}"}

    def _open(self, ports: Sequence[int]) -> dict[str, str]:
        """Listen at these ports too, 0 for one that the kernel chooses. Each one, and why not where it cannot be had.

        A caller that connects there is let in and heard no further. Those of an earlier call are closed.
        """
        while self._opened:
            self._opened.pop().close()
        found = {}
        for port in ports[:MOST_PORTS]:
            try:
                opened = socket.create_server((self._host, port), family=self._family)
            except OSError as error:
                found[str(port)] = error.strerror or str(error)
            else:
                self._opened.append(opened)
                found[str(opened.getsockname()[1])] = ""
        return found

    def _leave(self, folders: Sequence[str], name: str) -> list[str]:
        """Leave an empty file of this name in each folder, until the next call."""
        while self._left:
            self._left.pop().unlink(missing_ok=True)
        done = []
        for folder in folders:
            path = Path(folder) / name
            with contextlib.suppress(OSError):  # what is wrong with the folder is in the facts
                path.touch(exist_ok=False)
                self._left.append(path)
                done.append(folder)
        return done

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                opened, caller = self._tcp.accept()
            except OSError as error:
                self._places.release()
                if self._closed.wait(_AGAIN_S):
                    return
                logger.warning("doctor_call_not_taken error=%s", error)  # no more files, for one: it may pass
                continue
            threading.Thread(target=self._serve, args=(opened, caller[0]), name="thinwire-doctor", daemon=True).start()

    def _serve(self, opened: socket.socket, caller: str) -> None:
        try:
            with Link(opened) as link:
                if not link.welcome(self._secret):
                    logger.warning("doctor_call_refused from=%s reason=token", caller)
                    return
                self._serve_asked(link, link.heard())
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("doctor_call_ended from=%s error=%s", caller, error)
        finally:
            self._places.release()

    def _serve_asked(self, link: Link, asked: dict[str, Any]) -> None:
        """Raises: OSError, ValueError, KeyError, TypeError where the caller asks for what there is not, or goes."""
        match asked["do"]:
            case "tell the time":
                for _ in range(min(int(asked["times"]), MOST_TIMES)):
                    link.exactly(1)
                    link.socket.sendall(struct.pack("!d", self._clock()))
            case "swallow":
                link.exactly(min(int(asked["bytes"]), MOST_BYTES))
                link.say({})
            case "spill":
                link.socket.sendall(bytes(min(int(asked["bytes"]), MOST_BYTES)))
                link.socket.recv(1)  # it goes when it has all
            case "count":
                link.say({"mbit": count(link.socket)})
            case "send":
                send(link.socket, min(float(asked["seconds"]), MOST_SECONDS))
                link.socket.recv(1)
            case "hear datagrams":
                self._hear(link)
            case _:
                link.say(self.answer(asked))

    def _hear(self, link: Link) -> None:
        """Echo the datagrams of a new session until the caller goes."""
        session = secrets.token_bytes(SESSION_BYTES)
        self._sessions.add(session)
        try:
            link.say({"session": session.hex(), "port": self._udp.getsockname()[1]})
            link.socket.settimeout(4 * PATIENCE_S)
            link.socket.recv(1)
        finally:
            self._sessions.discard(session)

    def _echo(self) -> None:
        while True:
            try:
                came, sender = self._udp.recvfrom(1 << 16)
                if came[:SESSION_BYTES] in self._sessions and len(came) > SESSION_BYTES + 8:
                    self._udp.sendto(came[: SESSION_BYTES + 8], sender)
            except OSError:  # closed, or an answer that could not be sent
                if self._closed.wait(_AGAIN_S):
                    return


def _plain(name: object) -> str:
    """The name of a file in the very folder. Raises: ValueError."""
    if not isinstance(name, str) or (name and Path(name).name != name):
        raise ValueError(f"no name of a file: {name!r}"[:200])
    return name
