"""What crosses the wire between a member and the membership server: one JSON object a line.

    member                                  server
    Key, Hello                         ->   checks the secret, then the identity
                                       <-   AskSeat, of a few, where the server does not know their generation
    OwnSeat                            ->
                                       <-   Welcome, or Refusal and the end of the connection
    Join                               ->
                                       <-   Seating, when the generation closes
    Formed                             ->   it has its process group
    Unreachable                        ->   it cannot talk to some of its peers, in forming that or in a step
    Beat(number), every beat_s         ->
                                       <-   Heard(number), at once: it may commit for a while (commit_lease.py)
                                       <-   LostPeers, Over: at once, when the generation is over unplanned
                                       <-   Proposal(step): let this generation end after that step
    Answer                             ->
                                       <-   Confirm, when all have said yes; else Cancel
    Notice                             ->   it must go soon: a Proposal follows, in which it leaves
    Goodbye                            ->

The end of the connection is a message too, if the member's side has made it: its process is dead.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
import time
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from thinwire.workers.membership.seating import Roster, Turnover
from thinwire.workers.membership.seats import LONGEST_REASON, Doing, Identity, Name, Seat, Standing, Whole

T = TypeVar("T")
SEND_S = 10.0
"""A peer that takes nothing for so long, or whose host acknowledges nothing, is gone."""
LONGEST_KEY_BYTES = 1024
"""Of the first line, from whom nobody knows yet."""
LONGEST_LINE_BYTES = 1 << 20
"""A seat of a thousand members takes a quarter of it."""

Reason = Annotated[str, Field(max_length=2 * LONGEST_REASON)]


class BadLine(ValueError):
    """The peer does not speak this protocol."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Key(_Message):
    """The shared secret, before anything else is read."""

    kind: Literal["key"] = "key"
    secret: str


class Hello(_Message):
    """Who comes. seated: in which generation, the last that it knows; 0 in none."""

    kind: Literal["hello"] = "hello"
    identity: Identity
    seated: Whole = 0


class OwnSeat(_Message):
    """It was asked."""

    kind: Literal["own_seat"] = "own_seat"
    seat: Seat


class Join(_Message):
    """It is ready for the generation that follows `after`, the last that it knows; 0 for none.

    signature: what it is to train, in words; None where nobody compares it. floor: the highest generation that is
    known from anything that outlives the server, such as a checkpoint; the next one has a larger number.
    """

    kind: Literal["join"] = "join"
    after: Whole
    standing: Standing
    signature: dict[Name, Reason] | None = None
    floor: Whole = 0


class Formed(_Message):
    """It has the process group of this generation."""

    kind: Literal["formed"] = "formed"
    generation: Whole


class Unreachable(_Message):
    """It cannot talk to these ranks of this generation, in forming its group or since. ranks: why, in words."""

    kind: Literal["unreachable"] = "unreachable"
    generation: Whole
    ranks: dict[Whole, Reason]


class Beat(_Message):
    """It lives.

    number: from 1, of this beat. step: the last committed one; seconds: the longest step of this generation. doing:
    what it is at, where that has not moved for a while.
    """

    kind: Literal["beat"] = "beat"
    number: Whole
    step: Whole | None
    seconds: Annotated[float, Field(ge=0)]
    doing: Doing | None = None


class Answer(_Message):
    """To a proposal. step: where its loop is."""

    kind: Literal["answer"] = "answer"
    number: Whole
    yes: bool
    step: Whole | None


class Notice(_Message):
    """It has to go soon, and asks to leave at the next boundary."""

    kind: Literal["notice"] = "notice"
    reason: Reason


class Goodbye(_Message):
    """It leaves for good: at a clean end, or because it failed."""

    kind: Literal["goodbye"] = "goodbye"
    reason: Reason
    clean: bool


class Welcome(_Message):
    """The hello was taken."""

    kind: Literal["welcome"] = "welcome"


class Refusal(_Message):
    """There is no way back for this id."""

    kind: Literal["refusal"] = "refusal"
    verdict: Literal["refused", "fenced", "dismissed"]
    why: str


class Heard(_Message):
    """The beat of this number was heard."""

    kind: Literal["heard"] = "heard"
    number: int


class AskSeat(_Message):
    """This server does not know your generation: tell your seat."""

    kind: Literal["ask_seat"] = "ask_seat"


class Seating(_Message):
    """The generation has closed, and this is your seat.

    On the wire it has one of the two: roster is for whom the server knows to have no seat of the generation before.
    """

    kind: Literal["seating"] = "seating"
    rank: Whole
    roster: Roster | None = None
    change: Turnover | None = None

    @property
    def generation(self) -> int:
        """Of the seat."""
        return self._told.generation

    @property
    def seat(self) -> Seat:
        """Where it was made, the whole of it."""
        assert self.roster is not None
        return self.roster.seat(self.rank)

    def seat_after(self, known: Seat | None) -> Seat:
        """The seat, for who knows that one. Raises BadLine where it does not follow from that."""
        try:
            if self.change is None:
                return self.seat
            if known is None:
                raise ValueError(f"the change of generation {self.change.base} came to a member of none")
            return self.change.roster(known).seat(self.rank)
        except ValueError as error:
            raise BadLine(f"this member cannot tell its seat: {error}") from None

    @property
    def _told(self) -> Roster | Turnover:
        told = self.change or self.roster
        if told is None:
            raise BadLine("a seating came without seats")
        return told

    def line(self) -> bytes:
        """As it crosses the wire. What is the same for all members is encoded once."""
        told = self._told
        field = b"roster" if isinstance(told, Roster) else b"change"
        return b'{"kind":"seating","rank":%d,"%s":%s}' % (self.rank, field, told.json_bytes)


class LostPeers(_Message):
    """Members of this generation are gone. ranks: why, in words."""

    kind: Literal["lost_peers"] = "lost_peers"
    generation: int
    ranks: dict[Whole, str]


class Over(_Message):
    """Nobody is known to be lost, but a member has stopped for a regroup that was not planned."""

    kind: Literal["over"] = "over"
    generation: int
    why: str


class Proposal(_Message):
    """Let this generation end after `step`. leaving: the receiver is to leave then."""

    kind: Literal["proposal"] = "proposal"
    number: int
    generation: int
    step: int
    leaving: bool
    reason: str


class Confirm(_Message):
    """All have said yes: the generation ends there."""

    kind: Literal["confirm"] = "confirm"
    number: int


class Cancel(_Message):
    """It does not end there."""

    kind: Literal["cancel"] = "cancel"
    number: int


FromMember = Hello | OwnSeat | Join | Formed | Unreachable | Beat | Answer | Notice | Goodbye
FromServer = Welcome | Refusal | AskSeat | Heard | Seating | LostPeers | Over | Proposal | Confirm | Cancel

key: TypeAdapter[Key] = TypeAdapter(Key)
from_member: TypeAdapter[FromMember] = TypeAdapter(Annotated[FromMember, Field(discriminator="kind")])
from_server: TypeAdapter[FromServer] = TypeAdapter(Annotated[FromServer, Field(discriminator="kind")])


def encoded(message: BaseModel) -> bytes:
    """The line that crosses the wire."""
    line = message.line() if isinstance(message, Seating) else message.model_dump_json().encode()
    return line + b"\n"


class Lines:
    """One connection, its lines bounded in length and, where asked, in time. Any thread may write, one may read."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._writing = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
        if sys.platform == "linux":  # a host that vanished does not acknowledge; a stopped process's host does
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_S * 1000))

    def write(self, message: BaseModel) -> None:
        """Send one message. Raises OSError if the connection is gone or stuck."""
        line = encoded(message)
        with self._writing:
            self._socket.sendall(line)

    def read(self, model: TypeAdapter[T], longest_bytes: int, until: float | None = None) -> T | None:
        """The next message, by `until` on the monotonic clock; None at the end of the connection.

        Raises OSError if the connection breaks or `until` has come, and BadLine.
        """
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > longest_bytes:
                raise BadLine(f"a line is longer than {longest_bytes} bytes: the peer does not speak this protocol")
            self._socket.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
            received = self._socket.recv(1 << 16)
            if not received:
                return None
            self._buffer += received
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if len(line) > longest_bytes:
            raise BadLine(f"a line is longer than {longest_bytes} bytes: the peer does not speak this protocol")
        try:
            return model.validate_json(line)
        except ValueError as error:
            raise BadLine(f"a line of {len(line)} bytes is no message of this protocol: {_first(error)}") from None

    def end(self) -> None:
        """Close for both directions; a reader sees the end. What was written still arrives."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Give the socket back. By the thread that reads."""
        self._socket.close()


def _first(error: ValueError) -> str:
    """What is wrong, without what was received: it may hold a secret."""
    errors = getattr(error, "errors", None)
    found = errors(include_input=False, include_url=False)[0] if errors else {"msg": "not JSON", "loc": ()}
    return f"{'.'.join(str(place) for place in found['loc']) or 'line'}: {found['msg']}"
