"""Members for tests: in threads, or as processes that can be killed. Time-outs are small; nothing sleeps blindly."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, TypeVar

from thinwire.workers.membership.attendance import Timing
from thinwire.workers.membership.member import Member
from thinwire.workers.membership.seats import Identity, Limits, Seat, Standing
from thinwire.workers.membership.server import MembershipServer

T = TypeVar("T")
SECRET = "a secret of the tests only"
BEAT_S = 0.05


def eventually(ask: Callable[[], T], within_s: float = 60.0) -> T:
    """What ask() says, as soon as it is true."""
    until = time.monotonic() + within_s
    while not (answer := ask()):
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.005)
    return answer


def later(call: Callable[[], T]) -> Future[T]:
    """What call() gives or raises, from a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - carried to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def identity(slot: int, id: str = "") -> Identity:
    return Identity(id or uuid.uuid4().hex, slot, "127.0.0.1", os.getpid(), f"node{slot}")


def newcomer() -> Standing:
    return Standing(None, None, 0, False)


def standing(seat: Seat, step: int = 0) -> Standing:
    return Standing(seat.generation, seat.rank, step, True)


class Job:
    """A server and members of it; all are closed at the end of the test."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.members: list[Member] = []
        self._servers: list[MembershipServer] = []
        self._processes: list[Process] = []
        self.server: MembershipServer

    def serve(self, least: int, most: int, **settings: Any) -> MembershipServer:
        """settings: fields of Timing, and arguments of the server."""
        given = {"start_wait_s": 0.2, "beat_timeout_s": 5.0, "join_timeout_s": 5.0, "adopt_s": 2.0, "return_s": 0.5}
        given |= settings
        timing = Timing(**{field.name: given.pop(field.name) for field in fields(Timing) if field.name in given})
        self.server = MembershipServer(Limits(least, most), SECRET, timing, on_event=self.events.append, **given)
        self._servers.append(self.server)
        return self.server

    def member(self, slot: int, id: str = "", secret: str = SECRET) -> Member:
        member = Member(lambda: self.server.address, secret, identity(slot, id), beat_s=BEAT_S)
        self.members.append(member)
        return member

    def seated(self, *slots: int) -> tuple[list[Member], list[Seat]]:
        """Members of these slots, in the order of their ranks, and their seats in one generation."""
        members = [self.member(slot) for slot in slots]
        return members, self.join(members, [newcomer()] * len(members))

    def join(self, members: list[Member], standings: list[Standing]) -> list[Seat]:
        calls = [later(lambda m=m, s=s: m.join(s, 5.0)) for m, s in zip(members, standings, strict=True)]
        seats = [call.result(6.0) for call in calls]
        for member in members:
            member.formed()
        return seats

    def process(self, slot: int, *, step_s: float = 0.01) -> Process:
        process = Process(self.server.address, slot, step_s)
        self._processes.append(process)
        return process

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def close(self) -> None:
        for process in self._processes:
            process.end()
        for member in self.members:
            member.close()
        for server in self._servers:
            server.close()


class Process:
    """A member in a process of its own, that trains for ever; see `__main__` below. It says what happens to it."""

    def __init__(self, address: tuple[str, int], slot: int, step_s: float) -> None:
        command = [sys.executable, "-m", "tests.workers.membership.members", str(address[1]), str(slot), str(step_s)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self.popen.pid
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, what: str, within_s: float = 10.0) -> dict[str, Any]:
        """The next thing of that name that it says."""
        until = time.monotonic() + within_s
        while True:
            said = self._said.get(timeout=max(until - time.monotonic(), 0.001))
            if said["what"] == what:
                return said

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as stream:
            for line in stream:
                self._said.put(json.loads(line))


def _say(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, **fields}), flush=True)


def _train(port: int, slot: int, step_s: float) -> None:
    member = Member(lambda: ("127.0.0.1", port), SECRET, identity(slot), beat_s=BEAT_S)
    mine, step = newcomer(), 0
    _say("up")
    while True:
        try:
            seat = member.join(mine)
        except Exception as error:  # noqa: BLE001 - the test reads it
            _say("ended", error=type(error).__name__, why=str(error))
            return
        step = max(step, *(seated.standing.step for seated in seat.members), 0)
        lost = [gone.slot for gone in seat.lost]
        member.formed()
        _say("seat", generation=seat.generation, rank=seat.rank, size=seat.size, reason=seat.reason, lost=lost)
        while member.over is None:
            step += 1
            if member.wait_over(step_s) is None and member.at_boundary(step) is not None:
                break
        else:
            _say("over", why=member.over, at=time.time())
        mine = standing(seat, step)


if __name__ == "__main__":
    _train(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
