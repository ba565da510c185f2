"""Where a worker waits for its peers, and how each proves that it is one.

A peer proves that it knows the job's secret and means the same generation, and has it proved to itself, before anything
else is said. Nothing that crosses the wire tells the secret; what is said after that can be read and changed by
anybody on the network, as all that the process group sends.

    who asks                                     who is asked
    generation, rank, challenge            ->
                                           <-    challenge, proof
    proof                                  ->
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct

CHALLENGE_BYTES = 16
_HELLO = struct.Struct(f"!8sQI{CHALLENGE_BYTES}s")
_MAGIC = b"thinwire"
BACKLOG = 512
"""Peers that have come while this worker is not forming a group: they wait in the kernel."""


class Stranger(Exception):
    """Who has come is no peer of this generation, or does not know the secret."""


class Door:
    """A port of this worker's own address, from first to last: peers learn it with the seats (seats.Identity).

    host: where peers reach this worker. secret: the job's. Raises OSError where it cannot listen there.
    """

    def __init__(self, host: str, secret: str) -> None:
        self.host, self._secret = host, secret.encode()
        self.listener = socket.create_server((host, 0), backlog=BACKLOG)
        self.port: int = self.listener.getsockname()[1]

    def close(self) -> None:
        """Listen no more. May be called twice."""
        self.listener.close()

    async def ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int, own: int, peer: int
    ) -> None:
        """Prove to that peer who comes, and have it proved who is there. Raises Stranger, OSError, EOFError."""
        mine = secrets.token_bytes(CHALLENGE_BYTES)
        writer.write(_HELLO.pack(_MAGIC, generation, own, mine))
        theirs = await reader.readexactly(CHALLENGE_BYTES)
        pair = (generation, own, peer, mine + theirs)
        if not hmac.compare_digest(await reader.readexactly(_PROOF_BYTES), self._proof(b"asked", *pair)):
            raise Stranger("who answers at its port does not know the secret of this job")
        writer.write(self._proof(b"asks", *pair))

    async def answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, generation: int, own: int, size: int
    ) -> int:
        """The rank of the peer that has come, once it has proved it. Raises Stranger, OSError, EOFError."""
        magic, of, peer, theirs = _HELLO.unpack(await reader.readexactly(_HELLO.size))
        if magic != _MAGIC or of != generation or peer >= size or peer == own:
            raise Stranger("it speaks of another generation, or is no worker")
        mine = secrets.token_bytes(CHALLENGE_BYTES)
        pair = (generation, peer, own, theirs + mine)
        writer.write(mine + self._proof(b"asked", *pair))
        if not hmac.compare_digest(await reader.readexactly(_PROOF_BYTES), self._proof(b"asks", *pair)):
            raise Stranger("it does not know the secret of this job")
        return int(peer)

    def _proof(self, who: bytes, generation: int, asks: int, asked: int, challenges: bytes) -> bytes:
        said = b"%s %d %d %d " % (who, generation, asks, asked)
        return hmac.digest(self._secret, said + challenges, hashlib.sha256)


_PROOF_BYTES = hashlib.sha256().digest_size
