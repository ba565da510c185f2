"""A worker's connection to the membership, made again for ever: what a member's Link does, as events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.workers.membership.simulator.network import Connection
from thinwire.workers.membership import messages as m
from thinwire.workers.membership.member import CONNECT_S, FIRST_RETRY_S, LAST_RETRY_S

if TYPE_CHECKING:
    from tests.workers.membership.simulator.job import Job
    from tests.workers.membership.simulator.worker import Worker


class Link:
    """Of one worker."""

    def __init__(self, job: Job, worker: Worker) -> None:
        self._job, self._worker = job, worker
        self.connection: Connection | None = None
        self._welcomed = False
        self._closing = False
        self._retry_s = FIRST_RETRY_S
        self._began = 0.0
        worker.after(0.01, "read", self._connect)

    def say(self, message: Any) -> bool:
        """False if nothing was sent."""
        if self.connection is None or not self._welcomed:
            return False
        return self._write(self.connection, message)

    def stop(self) -> None:
        """Connect no more; what was sent arrives."""
        self._closing = True
        if self.connection is not None:
            self.connection.close(self.connection.client)

    def reset(self) -> None:
        """Something on the way ends it for one side, or for both."""
        connection = self.connection
        if connection is not None:
            which = self._job.chance.choice(["client", "server", "both"])
            if which != "server":
                connection.reset(connection.client, "its connection broke: Connection reset by peer")
            if which != "client":
                connection.reset(connection.server, "its connection broke: Connection reset by peer")

    def _write(self, connection: Connection, message: Any) -> bool:
        try:
            connection.send(connection.client, message)
        except OSError:
            return False  # the thread that reads learns it
        return True

    def _connect(self) -> None:
        if self._closing:
            return
        self._began = self._job.clockwork.now
        self._knock()

    def _knock(self) -> None:
        job, worker = self._job, self._worker
        if job.network.both(worker.machine, job.head):
            worker.after(2 * job.network.delay(), "read", self._open)
        elif job.clockwork.now - self._began < CONNECT_S:
            worker.after(1.0, "read", self._knock)  # TCP tries again by itself
        else:
            self._failed("timed out")

    def _open(self) -> None:
        job, server = self._job, self._job.server
        if server is None or not server.alive:
            self._failed("refused")
            return
        connection = self.connection = Connection(job.network, job.clockwork, self._worker, server)
        connection.client.heard = lambda message: self._hear(connection, message)
        connection.client.ended = lambda why, how: self._failed(why, connection)
        server.accept(connection)
        with self._worker.state.changed:
            hello = self._worker.state.hello()
        self._write(connection, hello)
        self._worker.after(CONNECT_S, "read", lambda: self._not_welcomed(connection))

    def _not_welcomed(self, connection: Connection) -> None:
        if self.connection is connection and not self._welcomed:
            connection.close(connection.client)
            self._failed("no welcome came", connection)

    def _hear(self, connection: Connection, message: Any) -> None:
        if self.connection is not connection:
            return
        if isinstance(message, m.Welcome):
            self._welcomed = True
        for answer in self._worker.state.heard(message):
            self._write(connection, answer)
        if isinstance(message, m.Refusal):
            self.stop()
        self._worker.heard()

    def _failed(self, why: str, connection: Connection | None = None) -> None:
        if connection is not self.connection:
            return
        self.connection, self._welcomed = None, False
        if self._closing:
            return
        self._worker.state.cut()
        self._worker.heard()
        if self._job.clockwork.now - self._began > LAST_RETRY_S:
            self._retry_s = FIRST_RETRY_S
        self._worker.after(self._retry_s * self._job.chance.uniform(0.5, 1.0), "read", self._connect)
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
