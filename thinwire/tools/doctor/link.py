"""Two doctors meet: a TCP connection on which both have proved that they know the secret.

    the one that listens   thinwire-doctor 1 NONCE
    the one that calls     {"nonce": NONCE, "proof": HMAC(secret, "caller" + both nonces)}
    the one that listens   {"proof": HMAC(secret, "listener" + both nonces)}, or {"refused": why} and the end

Neither tells the secret. After that the caller asks once, in a line of JSON. All frames are small until then, so that
a link that loses large ones is met, and can be named.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import socket
import time
from typing import Any

GREETING = "thinwire-doctor 1"
PATIENCE_S = 5.0
"""For an answer that takes the other side no time."""
SMALL_SEGMENT = 536
"""Payload of a TCP frame that every IPv4 network carries."""
LONGEST_LINE, LONGEST_GREETING = 1 << 20, 512
SHORTEST_SECRET = 16


class LinkError(Exception):
    """No doctor was met. kind: how it went, in words of one of the keys of findings.CONNECTS."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(words)
        self.kind = kind


def call(host: str, port: int, secret: bytes, *, small: bool = False) -> Link:
    """Connect, and prove on both sides. small: both sides send small frames only. Raises: LinkError."""
    try:
        link = Link(_connected(host, port, small))
    except OSError as error:
        raise refusal(error, f"{host}:{port}") from error
    try:
        link.greet(secret)
    except BaseException:
        link.close()
        raise
    return link


def _connected(host: str, port: int, small: bool) -> socket.socket:
    if not small:
        return socket.create_connection((host, port), timeout=PATIENCE_S)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    opened = socket.socket(family, kind, protocol)
    try:
        opened.settimeout(PATIENCE_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SMALL_SEGMENT)
        opened.connect(address)
    except BaseException:
        opened.close()
        raise
    return opened


def refusal(error: OSError, where: str) -> LinkError:
    """What a failed connect() means."""
    if isinstance(error, TimeoutError):
        return LinkError("silent", f"{where} does not answer: what is sent there vanishes")
    if isinstance(error, ConnectionRefusedError):
        return LinkError("refused", f"{where} refuses: nobody listens there, or a firewall says no")
    if isinstance(error, socket.gaierror):
        return LinkError("unknown name", f"{where}: the name means nothing here ({error.strerror})")
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM, errno.EINVAL):
        return LinkError("no route", f"{where} cannot be reached: {error.strerror}")
    return LinkError("failed", f"{where}: {error.strerror or error}")


class Link:
    """One connection. Closing it ends whatever was asked."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        opened.settimeout(PATIENCE_S)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def __enter__(self) -> Link:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End the connection. Safe to call twice."""
        self.socket.close()

    def greet(self, secret: bytes) -> None:
        """The caller's side. Raises: LinkError."""
        try:
            greeting, _, nonce = self.line().rpartition(" ")
            if greeting != GREETING:
                raise LinkError("stranger", f"who listens there is no doctor of this version: {greeting[:60]!r}")
            own = secrets.token_hex(16)
            self.say({"nonce": own, "proof": _proof(secret, "caller", nonce, own)})
            answer = self.heard()
        except TimeoutError as error:
            raise LinkError("mute", "it takes the connection and says nothing") from error
        except (OSError, ValueError) as error:
            raise LinkError("stranger", f"who listens there is no doctor of this version ({error})") from error
        if "refused" in answer:
            raise LinkError("wrong token", str(answer["refused"]))
        if not hmac.compare_digest(str(answer.get("proof")), _proof(secret, "listener", nonce, own)):
            raise LinkError("wrong token", "it does not know the token")

    def welcome(self, secret: bytes) -> bool:
        """The listener's side. False where the caller does not know the secret. Raises: OSError, ValueError."""
        nonce = secrets.token_hex(16)
        self.socket.sendall(f"{GREETING} {nonce}\n".encode())
        said = self.heard(LONGEST_GREETING)
        own = str(said.get("nonce"))
        if not hmac.compare_digest(str(said.get("proof")), _proof(secret, "caller", nonce, own)):
            self.say({"refused": "the tokens differ"})
            return False
        self.say({"proof": _proof(secret, "listener", nonce, own)})
        return True

    def say(self, message: dict[str, Any]) -> None:
        """Send a line. Raises: OSError."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def heard(self, most: int = LONGEST_LINE) -> dict[str, Any]:
        """The next line, of so many bytes at most. Raises: OSError, ValueError where it is not an object in JSON."""
        said = json.loads(self.line(most))
        if not isinstance(said, dict):
            raise ValueError(f"not an object: {said!r}"[:200])
        return said

    def line(self, most: int = LONGEST_LINE) -> str:
        """The next line without its end. The whole of it has the socket's time, so that nobody sends byte by byte.

        Raises: OSError; ValueError where it is no text, or longer.
        """
        patience_s = self.socket.gettimeout() or PATIENCE_S
        until = time.monotonic() + patience_s
        try:
            while b"\n" not in self._rest:
                self.socket.settimeout(max(0.001, until - time.monotonic()))
                came = self.socket.recv(1 << 16)
                if not came:
                    raise ConnectionResetError("the connection has ended")
                self._rest += came
                if len(self._rest) > most:
                    raise ValueError(f"a line of more than {most} bytes")
        finally:
            self.socket.settimeout(patience_s)
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def exactly(self, size: int) -> bytes:
        """The next `size` bytes. Raises: OSError."""
        while len(self._rest) < size:
            came = self.socket.recv(1 << 16)
            if not came:
                raise ConnectionResetError("the connection has ended")
            self._rest += came
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _proof(secret: bytes, who: str, nonce: str, other: str) -> str:
    return hmac.digest(secret, f"{who} {nonce} {other}".encode(), "sha256").hex()
