"""Can the members of a generation reach one another? Every pair proves it before a process group is begun, in both
directions; and a worker that waits for long in a collective asks again (Reach).

A process group connects all with all, and where one pair cannot connect it waits for that until its time-out, and names
an address at best. So each member first asks every other over a plain socket, its door, all at once. When all have
answered it, it says `ready` to all that have asked; when all have said `ready` to it, every pair has been tried from
both ends, and everybody knows. Whom a member cannot reach it reports to the membership, and waits for its decision, or
for the network: it goes on trying.

At the door a peer proves that it knows the job's secret and means the same generation, and has it proved to itself,
before anything else is said. Nothing that crosses the wire reveals the secret; what is said after that can be read and
changed by anybody on the network, as all that the process group sends.

    who asks                                     who is asked
    generation, rank, challenge            ->
                                           <-    challenge, proof
    proof                                  ->
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import logging
import random
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from thinwire.workers.membership.seats import Seat, worker_name
from thinwire.workers.membership.state import GenerationOver

logger = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often the membership's word is looked for."""
TRY_AGAIN_S = 0.1
MAX_STRANGERS = 64
"""Who has come and has not proved who it is. One more closes one of them, by lot: those that only hang keep nobody out.
Who is closed may come again."""
_READY = struct.Struct("!H")
CAN_ASK = sys.platform == "linux"
"""Elsewhere there are other names for what is set below, and a collective's time-out has to do."""
ANSWERED = (errno.ECONNREFUSED, errno.ECONNRESET)
"""The peer's system has answered, and its process is gone: the membership knows."""
CHALLENGE_BYTES = 16
BACKLOG = 512
"""Peers that have come while this worker is not forming a group: they wait in the kernel."""
_HELLO = struct.Struct(f"!8sQI{CHALLENGE_BYTES}s")
_MAGIC = b"thinwire"
_PROOF_BYTES = hashlib.sha256().digest_size


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


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. connect_s: until it is reported to the membership that there is no connection.

    try_s: for one try, then it is tried anew: where the first frame is lost TCP itself tries after 1, 3 and 7 s, and a
    network that was away for just over 3 s would be waited for until then.
    answer_s: for a peer that took the connection; its process may be busy. hello_s: for who comes, to say who it is.
    again_s: between two reports of the same, as the membership may have been restarted.
    """

    connect_s: float = 5.0
    try_s: float = 1.5
    answer_s: float = 20.0
    hello_s: float = 5.0
    again_s: float = 5.0


class Pairs:
    """One try of one member. Made and run in a thread that has no event loop.

    over: why the generation is over, None while it is not. unreachable: reports to the membership.
    """

    def __init__(
        self,
        seat: Seat,
        door: Door,
        over: Callable[[], str | None],
        unreachable: Callable[[dict[int, str]], None],
        patience: Patience | None = None,
    ) -> None:
        self._seat, self._door, self._over, self._unreachable = seat, door, over, unreachable
        self._patience = patience or Patience()
        self._peers = [rank for rank in range(seat.size) if rank != seat.rank]
        overdue_at = time.monotonic() + self._patience.connect_s
        self._calls = {rank: _Call(overdue_at) for rank in self._peers}
        self._to_serve = set(self._peers)
        self._all_answered, self._all_served = asyncio.Event(), asyncio.Event()
        self._strangers: list[asyncio.StreamWriter] = []

    def prove(self, port: int) -> int:
        """Wait until every pair is proved. port: what rank 0 passes to the others; returned on all.

        Raises GenerationOver as soon as the membership says so. Nothing is left running, and the door stays open.
        """
        return asyncio.run(self._prove(port))

    async def _prove(self, port: int) -> int:
        listener = self._door.listener.dup()  # a server closes what it listens on
        server = await asyncio.start_server(lambda r, w: self._serve(r, w, port), sock=listener, backlog=BACKLOG)
        asked = asyncio.gather(self._all_served.wait(), *(self._ask(rank) for rank in self._peers))
        report_at = 0.0
        try:
            while not asked.done():
                if (why := self._over()) is not None:
                    raise GenerationOver(f"generation {self._seat.generation} is over: {why}")
                now = time.monotonic()
                overdue = {rank: call.why for rank, call in self._calls.items() if call.why and now > call.overdue_at}
                if overdue and now > report_at:
                    logger.warning("peers_unreachable generation=%d ranks=%s", self._seat.generation, overdue)
                    self._unreachable(overdue)
                    report_at = now + self._patience.again_s
                await asyncio.wait([asked], timeout=LOOK_S)
            ports = dict(zip(self._peers, asked.result()[1:], strict=True))
            return ports.get(0, port)
        finally:
            asked.cancel()
            server.close()
            await asyncio.gather(asked, return_exceptions=True)

    async def _ask(self, rank: int) -> int:
        """Try until that peer has answered, and says that it is ready. Its port."""
        while True:
            try:
                return await self._ask_once(rank)
            except (OSError, EOFError, Stranger) as error:
                self._calls[rank].why = f"{self._name(rank)}: {str(error) or type(error).__name__}"
            await asyncio.sleep(TRY_AGAIN_S)

    async def _ask_once(self, rank: int) -> int:
        who, call, patience = self._seat.members[rank].identity, self._calls[rank], self._patience
        try:
            async with asyncio.timeout(min(patience.try_s, patience.connect_s)):
                # From the address that the others know it by.
                reader, writer = await asyncio.open_connection(who.host, who.port, local_addr=(self._door.host, 0))
        except TimeoutError:
            raise TimeoutError(f"no connection in {patience.try_s:g} s, nor in the tries before") from None
        try:
            if not call.connected:  # what is left is its process's part, which may be busy
                call.connected, call.overdue_at = True, time.monotonic() + patience.answer_s
            async with asyncio.timeout(patience.answer_s):
                await self._door.ask(reader, writer, self._seat.generation, self._seat.rank, rank)
            call.why = None
            if all(one.why is None for one in self._calls.values()):
                self._all_answered.set()
            return int(_READY.unpack(await reader.readexactly(_READY.size))[0])
        except TimeoutError:
            raise TimeoutError(f"it took the connection, and did not answer within {patience.answer_s:g} s") from None
        finally:
            writer.close()

    def _name(self, rank: int) -> str:
        who = self._seat.members[rank].identity
        return f"{worker_name(who)} at {who.host}:{who.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        try:
            peer = await self._meet(reader, writer)
            await self._all_answered.wait()
            writer.write(_READY.pack(port))
            await writer.drain()
            self._to_serve.discard(peer)
            if not self._to_serve:
                self._all_served.set()
        except (OSError, EOFError, TimeoutError, Stranger) as error:
            logger.info("peer_not_met generation=%d why=%r", self._seat.generation, str(error) or type(error).__name__)
        finally:
            writer.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.pop(random.randrange(len(self._strangers))).transport.abort()
        self._strangers.append(writer)
        try:
            async with asyncio.timeout(self._patience.hello_s):
                return await self._door.answer(reader, writer, self._seat.generation, self._seat.rank, self._seat.size)
        finally:
            if writer in self._strangers:
                self._strangers.remove(writer)


@dataclass(slots=True)
class _Call:
    """How it goes with one peer. overdue_at: when it is reported to the membership. why: None once it has answered."""

    overdue_at: float
    why: str | None = "it has not answered yet"
    connected: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds.

    waited_s: in one collective, before anybody is asked. unreachable_s: then a pair is reported; again_s: and again.
    connect_s: for a connection. asks_s: between two questions over one, which is closed where two had no answer.
    look_s: between two looks.
    """

    waited_s: float = 3.0
    unreachable_s: float = 10.0
    again_s: float = 5.0
    connect_s: float = 3.0
    asks_s: int = 2
    look_s: float = 0.25


class Reach:
    """Whether one worker that waits for its peers, in one generation, can still reach them. Asked only while it waits.

    A collective whose data are lost on the way waits for its time-out; the membership, which all can reach, sees
    nothing wrong. So a worker that has waited for waited_s holds a connection to the door of every peer of its
    generation. Its system asks by it, now and then, whether theirs is there (TCP's keepalive), and theirs answers,
    whatever the process does: one that computes, is stopped or hangs is reached. Nobody accepts such a connection
    before the next group forms, and one for each pair and generation is all that there is. A peer that it cannot reach
    for unreachable_s, by that connection or a new one, it reports to the membership, and again: that leaves one of such
    a pair out (stuck.py). Threads may call it. `close` before the next generation.

    host: this worker's own address, by which the others know it. report: to the membership: ranks, and why.
    """

    def __init__(
        self, seat: Seat, host: str, report: Callable[[dict[int, str]], None], times: Times | None = None
    ) -> None:
        self.times = times or Times()
        self._generation, self._report = seat.generation, report
        self._ways = {
            rank: _Way(host, (member.identity.host, member.identity.port), self.times)
            for rank, member in enumerate(seat.members)
            if rank != seat.rank
        }
        self._lock = threading.Lock()
        self._num_waits = 0
        self._waits, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """A collective has been waited for, for waited_s."""
        with self._lock:
            self._num_waits += 1
            if self._closed.is_set() or not CAN_ASK:
                return
            self._waits.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="thinwire-reach", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """It is over, in whatever way."""
        with self._lock:
            self._num_waits -= 1
            if not self._num_waits:
                self._waits.clear()

    def close(self) -> None:
        """Ask nobody any more. Safe to call twice."""
        with self._lock:
            self._closed.set()
            self._waits.set()  # for the thread to see it
        if self._thread is not None:
            self._thread.join(self.times.connect_s)  # it may be reporting, to a membership that takes nothing

    def _run(self) -> None:
        report_at = 0.0
        try:
            while not self._closed.is_set():
                now = time.monotonic()
                broken = {rank: why for rank, way in self._ways.items() if (why := way.look(now)) is not None}
                if broken and now >= report_at and self._num_waits and not self._closed.is_set():
                    logger.warning("peers_unreachable generation=%d ranks=%s", self._generation, broken)
                    self._report(broken)
                    report_at = now + self.times.again_s
                self._closed.wait(self.times.look_s)
                self._waits.wait()
        finally:
            for way in self._ways.values():
                way.close()


class _Way:
    """To one peer."""

    def __init__(self, host: str, to: tuple[str, int], times: Times) -> None:
        self._host, self._to, self._times = host, to, times
        self._socket: socket.socket | None = None
        self._connected = False
        self._began = 0.0
        self._unanswered_since: float | None = None
        self._why = ""

    def look(self, now: float) -> str | None:
        """Why the peer has not been reached for unreachable_s; None where it was."""
        if self._socket is None:
            self._open(now)
        else:
            self._see(now)
        since = self._unanswered_since
        return self._why if since is not None and now - since >= self._times.unreachable_s else None

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket, self._connected = None, False

    def _open(self, now: float) -> None:
        self._socket = asking = socket.socket(socket.AF_INET6 if ":" in self._to[0] else socket.AF_INET)
        self._began = now
        if self._unanswered_since is None:
            self._unanswered_since, self._why = now, "no answer yet"
        try:
            asking.setblocking(False)
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
                asking.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), self._times.asks_s)
            asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
            asking.bind((self._host, 0))
            self._take(asking.connect_ex(self._to), now)
        except OSError as error:
            self._take(error.errno or errno.EIO, now)

    def _see(self, now: float) -> None:
        asking = self._socket
        assert asking is not None
        if error := asking.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._take(error, now)
        elif not self._connected and _is_writable(asking):
            self._connected, self._unanswered_since = True, None
        elif not self._connected and now - self._began > self._times.connect_s:
            self._take(errno.ETIMEDOUT, now)

    def _take(self, error: int, now: float) -> None:
        """What the system says of the connection; 0 and EINPROGRESS: nothing yet."""
        if error in (0, errno.EINPROGRESS):
            return
        if self._connected and self._unanswered_since is None:  # the last answer came before the first of two questions
            self._unanswered_since = now - 3 * self._times.asks_s
        self.close()
        if error in ANSWERED:
            self._unanswered_since = None
        else:
            self._why = (
                f"it waits for its data, and {self._to[0]}:{self._to[1]} gives no answer ({errno.errorcode[error]})"
            )


def _is_writable(asking: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(asking, selectors.EVENT_WRITE)
        return bool(selector.select(0))
