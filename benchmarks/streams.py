"""The command: python -m benchmarks.streams. What do readers of streams cost the service?

One job on the launcher that runs nothing, whose rank 0 posts a sample and an event a second. Its stream is read by
nobody, then by so many readers at once (--readers), for --seconds each: what the service's processor and memory take,
how many messages every reader was given, whether any was missing or came twice, and how long after it was posted an
event came. Beside it what one poll costs that asks for as much, as `thinwire watch` did once a second; times the
readers that is what they would cost by polling.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import typer

from benchmarks.service import FOR_EVER, Load, Service, bearer, keep, made
from tests.service.control_plane_harness import sample, wait_until
from thinwire.client.streams import Parser
from thinwire.contract.streams import EVENT, Told

RESULT = Path(__file__).parent / "results" / "service" / "streams.json"
POLLS = 100


@dataclass
class Reader:
    """One stream, and what has come of it."""

    socket: socket.socket
    parser: Parser = field(default_factory=Parser)
    head: bytes = b""
    begun: bool = False
    told: list[tuple[float, Told]] = field(default_factory=list)

    def take(self) -> bool:
        """What has come; False where it has ended."""
        data = self.socket.recv(1 << 16)
        if not data:
            return False
        if not self.begun:
            self.head += data
            status, end, data = self.head.partition(b"\r\n\r\n")
            if not end:
                return True
            assert status.startswith(b"HTTP/1.1 200"), status
            self.begun = True
        # The lengths of HTTP's chunks are lines of no meaning to a stream of events.
        now = time.time()
        self.told += [(now, one) for one in self.parser.of(data)]
        return True


class Posts:
    """A sample and an event a second, from a thread."""

    def __init__(self, service: Service, job_id: str, token: str) -> None:
        self._service, self._job_id, self._token = service, job_id, token
        self._over = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._service.url, trust_env=False, timeout=60) as client:
            while not self._over.wait(1.0):
                self.count += 1
                now = time.time()
                body = {
                    "attempt": 1,
                    "samples": [
                        sample(self.count, at=now, lr=1e-3, step_seconds=1.0, world_size=8, payload_bytes=10**6)
                    ],
                    "events": [
                        {"kind": "checkpoint_saved", "step": self.count, "time": now, "fields": {"path": "p" * 80}}
                    ],
                }
                path = f"/v1/jobs/{self._job_id}/telemetry"
                client.post(path, json=body, headers=bearer(self._token)).raise_for_status()

    def end(self) -> None:
        """Post no more."""
        self._over.set()
        self._thread.join()


def head_of_stream(service: Service, job_id: str) -> bytes:
    """What a reader asks."""
    return (
        f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {service.operator}\r\n\r\n"
    ).encode()


def read(service: Service, job_id: str, count: int, seconds: float, cpu_s: Callable[[], float]) -> dict[str, Any]:
    """So many readers for so long, and what they cost."""
    selector = selectors.DefaultSelector()
    head = head_of_stream(service, job_id)
    rss_before, began, began_cpu = service.memory(), time.monotonic(), cpu_s()
    readers = []
    for _ in range(count):
        reader = Reader(socket.create_connection(service.address, timeout=30))
        reader.socket.sendall(head)
        readers.append(reader)
        selector.register(reader.socket, selectors.EVENT_READ, reader)

    def take(until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(min(left, 0.2)):
                assert key.data.take(), "a stream has ended"

    while not all(reader.told for reader in readers):
        take(time.monotonic() + 0.2)
    opened_s, opened_cpu_s = time.monotonic() - began, cpu_s() - began_cpu
    before, since, from_time = cpu_s(), time.monotonic(), time.time()
    take(since + seconds)
    took = time.monotonic() - since
    cores = (cpu_s() - before) / took
    lags: list[float] = []
    for reader in readers:
        ids = [int(one.id) for _, one in reader.told]
        assert ids == sorted(set(ids)), "twice, or out of order"
        mine = [(at, one) for at, one in reader.told if one.event == EVENT]
        steps = [int(str(one.data["step"])) for _, one in mine]
        assert steps == list(range(steps[0], steps[0] + len(steps))), "an event is missing"
        lags += [at - float(str(one.data["time"])) for at, one in mine if float(str(one.data["time"])) > from_time]
        reader.socket.close()
    lags.sort()
    return {
        "readers": count,
        "opened_after_s": round(opened_s, 2),
        "opened_cpu_ms_each": round(1e3 * opened_cpu_s / count, 2),
        "cores": round(cores, 3),
        "messages": sum(len(reader.told) for reader in readers),
        "lag_p50_s": round(lags[len(lags) // 2], 3) if lags else None,
        "lag_p99_s": round(lags[int(0.99 * len(lags))], 3) if lags else None,
        "rss_before_mib": rss_before,
        "rss_mib": service.memory(),
    }


def main(
    readers: Annotated[int, typer.Option(help="At once.")] = 500,
    seconds: Annotated[float, typer.Option(help="To measure each.")] = 20.0,
) -> None:
    """Read the streams of one job, print what that cost, and write it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    found = made() | {"command": f"python -m benchmarks.streams --readers {readers} --seconds {seconds:g}"}
    with TemporaryDirectory(ignore_cleanup_errors=True) as home:
        service = Service(
            Path(home), 4096, FOR_EVER, THINWIRE_STREAMS_OF_ONE=str(readers), THINWIRE_STREAMS=str(readers)
        )
        posts = None
        try:
            job_id, token = service.job()
            running = lambda: service.ask(f"/v1/jobs/{job_id}", service.operator).json()["state"] == "RUNNING"  # noqa: E731
            wait_until(running, "the job runs", timeout_s=60)
            posts = Posts(service, job_id, token)
            load = Load(service, 1, "")
            before, since = load.cpu_s(), time.monotonic()
            time.sleep(seconds)
            found["nobody"] = {"cores": round((load.cpu_s() - before) / (time.monotonic() - since), 3)}
            found["one"] = read(service, job_id, 1, seconds, load.cpu_s)
            found["many"] = read(service, job_id, readers, seconds, load.cpu_s)
            posts.end()
            load.ids = [job_id]
            paths = [f"/v1/jobs/{job_id}/metrics?after_step=1000000000&event_kind=resumed", f"/v1/jobs/{job_id}"]
            polls = [load.measured([lambda path=path: load.get(path)] * POLLS) for path in paths]  # type: ignore[misc]
            each_ms = round(sum(one["cpu_ms"] for one in polls), 2)
            found["a poll"] = {
                "cpu_ms": each_ms,
                f"cores of {readers} once a second": round(readers * each_ms / 1e3, 2),
            }
        finally:
            if posts is not None:
                posts.end()
            service.process.terminate()
            service.process.wait(60)
    print(json.dumps(found, indent=1), flush=True)
    print(f"load: {os.getloadavg()}")
    keep(found, RESULT)


if __name__ == "__main__":
    typer.run(main)
