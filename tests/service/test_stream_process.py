"""Streams of the real process: over a restart, of a reader that reads nothing, of logs, and with PostgreSQL."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from tests.service.control_plane_harness import Service, spec, wait_until
from tests.service.live_service import LiveService, live_service
from tests.service.test_server_process import Server
from thinwire.client import Client, Unauthorized, server_of
from thinwire.client import Server as ClientServer
from thinwire.client.streams import Parser, follow
from thinwire.contract.streams import Told
from thinwire.service.db import Database
from thinwire.service.jobs import streams, told
from thinwire.service.jobs.repository import EventRow, JobRepository

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    with live_service(tmp_path_factory.mktemp("live") / "home") as started:
        yield started


def test_a_log_is_followed_by_bytes_to_its_end(live: LiveService) -> None:
    job_id = live.service.running()
    log = "one\r\n\x1b[31mtwo\x1b[0m \u00e4\U0001f600\n"
    live.service.launcher.submissions[job_id].log = log
    path = f"/v1/jobs/{job_id}/logs/stream"
    for offset in range(len(log.encode())):
        answer = live.service.client.get(path, params={"offset": offset, "follow": "false"})
        parts = Parser().of(answer.content)
        text = "".join(str(part.data["text"]) for part in parts)
        assert text == log.encode()[offset:].decode("utf-8", "replace")
        assert parts[-1].id == str(len(log.encode()))
    live.finish(job_id)
    with Client(lambda: server_of(live.home)) as client:
        heard = list(follow(client, job_id, "logs/stream"))
    assert [one.event for one in heard] == ["log", "end"]
    again = live.service.client.get(path, headers={"Last-Event-ID": heard[-1].id})
    assert again.status_code == 204
    for wrong in ("x", "-1", "9" * 18):
        assert live.service.client.get(path, headers={"Last-Event-ID": wrong}).status_code == 422


def test_a_log_that_is_gone_is_said(live: LiveService) -> None:
    job_id = live.service.submit()
    live.service.client.post(f"/v1/jobs/{job_id}/cancel")
    live.service.turn(2)
    assert live.service.client.get(f"/v1/jobs/{job_id}/logs/stream").status_code == 410
    assert live.service.client.get("/v1/jobs/none/logs/stream").status_code == 404


def test_who_goes_away_leaves_nothing_behind(live: LiveService) -> None:
    job_id = live.service.running()
    plane = live.service.plane
    with ExitStack() as stack:
        client = stack.enter_context(Client(lambda: server_of(live.home)))
        paths = ((None, "events"), (job_id, "events"), (job_id, "logs/stream"))
        parts = [stack.enter_context(client.stream(of, what, {})).iter_bytes() for of, what in paths]
        assert all(next(part).startswith(b"id: ") for part in parts)
        wait_until(lambda: len(plane.hub._readers) == 2, "two are in the hub", timeout_s=60)
        assert plane.stream_slots._of == {"operator": 3}
    wait_until(lambda: not plane.hub._readers and not plane.stream_slots._of, "all are forgotten", timeout_s=60)


def test_a_token_that_is_revoked_ends_its_streams(live: LiveService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.05)
    job_id = live.service.running()
    token = live.service.person("guest", "viewer")["Authorization"].removeprefix("Bearer ")
    url = server_of(live.home).url
    with ExitStack() as stack:
        client = stack.enter_context(Client(lambda: ClientServer(url, token)))
        paths = ((None, "events"), (job_id, "events"), (job_id, "logs/stream"))
        parts = [stack.enter_context(client.stream(of, what, {})).iter_bytes() for of, what in paths]
        for part in parts:
            next(part)
        assert live.service.client.delete("/v1/tokens/guest").is_success
        for part in parts:
            list(part)  # to its end, which is whole
        with pytest.raises(Unauthorized):
            next(follow(client, None, "events"))


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_they_stand(live: LiveService, tmp_path: Path) -> None:
    job_id = live.service.submit()
    (tmp_path / ".thinwire").symlink_to(live.home)
    blocks = dict(
        re.findall(r"<!-- run: events (\w+) -->\n```\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    )
    asked = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", blocks["curl"]], cwd=tmp_path, capture_output=True, check=True
    )
    mine = [one for one in Parser().of(asked.stdout) if one.data["job_id"] == job_id]
    assert [one.data["state"] for one in mine] == ["SUBMITTING"]
    program = subprocess.Popen(
        [sys.executable, "-u", "-c", blocks["python"]],
        env={**os.environ, "THINWIRE_HOME": str(live.home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        wait_until(lambda: program.stdout.readline().split()[-1:] == [job_id], "it prints the job", timeout_s=60)  # type: ignore[union-attr]
    finally:
        program.kill()
        program.wait()


@pytest.mark.slow
def test_readers_go_on_over_restarts_of_the_process_without_a_loss(tmp_path: Path) -> None:
    """Killed twice and ended once, while jobs are submitted and a reader follows all of them."""
    home, met, over = tmp_path / "home", list[Told](), threading.Event()

    def listen() -> None:
        with Client(lambda: server_of(home)) as client:
            for one in follow(client, None, "events", {"after": "0"}):
                met.append(one)
                if over.is_set():
                    return

    server = Server(home, running_s=0.3)
    reader = threading.Thread(target=listen, daemon=True)
    made = list[str]()
    try:
        for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, None):
            with server.ready() as client:
                if not reader.is_alive():
                    reader.start()
                for _ in range(5):
                    made.append(client.post("/v1/jobs", json=spec()).json()["id"])
                    time.sleep(0.1)
            if how is not None:
                server.end(how)
                server = Server(home, running_s=0.3)
        with server.ready() as client:

            def states() -> list[str]:
                return [one["state"] for one in client.get("/v1/jobs").json()["jobs"]]

            wait_until(lambda: set(states()) <= {"SUCCEEDED", "FAILED"}, "all are over", timeout_s=120)
            text = client.get("/v1/events", params={"after": 0, "follow": "false"}).content
            expected = [one.id for one in Parser().of(text)]
            wait_until(lambda: met and met[-1].id == expected[-1], "the reader has met the last", timeout_s=60)
            over.set()
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGTERM)
    assert [one.id for one in met] == expected
    assert {one.data["job_id"] for one in met} == set(made)


def is_open(made: socket.socket) -> bool:
    """Does the other side, on this machine, hold it? It is not told that it does not: there is no room for that."""
    (_, port), (_, server) = made.getsockname(), made.getpeername()
    ends = (f":{server:04X}", f":{port:04X}")
    lines = (one.split() for one in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any((here[-5:], there[-5:], state) == (*ends, "01") for _, here, there, state, *_ in lines)


@pytest.mark.slow
def test_a_reader_that_reads_nothing_is_closed_in_seconds_and_others_are_told(tmp_path: Path) -> None:
    home = tmp_path / "home"
    server, seen, over = Server(home), list[Told](), threading.Event()

    def listen(job_id: str) -> None:
        with Client(lambda: server_of(home)) as mine:
            for one in follow(mine, job_id, "events"):
                seen.append(one)
                if over.is_set():
                    return

    try:
        with server.ready() as client, socket.socket() as deaf:
            job_id = client.post("/v1/jobs", json=spec()).json()["id"]
            wait_until(lambda: client.get(f"/v1/jobs/{job_id}").json()["state"] == "RUNNING", "it runs")
            token = (home / "runs" / job_id / "token").read_text().strip()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", client.base_url.port))
            head = f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: a\r\n"
            deaf.sendall(f"{head}Authorization: {client.headers['authorization']}\r\n\r\n".encode())
            threading.Thread(target=listen, args=(job_id,), daemon=True).start()
            assert is_open(deaf)
            steps = 0
            until = time.monotonic() + 120
            while is_open(deaf) and time.monotonic() < until:
                large = {"kind": "told", "time": 1.0, "fields": {"x": "y" * 12_000}}
                events = [{**large, "step": steps + n} for n in range(40)]
                headers = {"Authorization": f"Bearer {token}"}
                body = {"attempt": 1, "events": events}
                assert client.post(f"/v1/jobs/{job_id}/telemetry", json=body, headers=headers).status_code == 204
                steps += len(events)
                time.sleep(0.5)
            assert not is_open(deaf)

            def heard() -> list[Any]:
                return [one.data["step"] for one in seen if one.event == "event"]

            wait_until(lambda: len(heard()) >= steps, "the other reader has all", timeout_s=120)
            over.set()
            assert heard() == list(range(steps))
    finally:
        server.end(signal.SIGTERM)


@pytest.mark.slow
def test_with_postgresql_no_reader_steps_over_a_number_that_is_committed_later(
    tmp_path: Path, new_database: Callable[[], str]
) -> None:
    """Many transactions at once, some of them slow, some rolled back; the reader is another process to the database."""
    url = new_database()
    service, reader = Service(tmp_path / "home", database_url=url), Database(url)
    jobs = [service.running() for _ in range(6)]
    stop, made = threading.Event(), [0] * len(jobs)

    def write(number: int) -> None:
        chance = random.Random(number)
        for step in range(10**6):
            if stop.is_set():
                return
            event = {"kind": "told", "step": step, "time": float(step), "fields": {}}
            with suppress(ZeroDivisionError), service.plane.db.write() as session:
                repository = JobRepository(session)
                repository.lock(jobs[number])
                repository.put_events(jobs[number], 1, [event])
                time.sleep(chance.random() * 0.01)
                if chance.random() < 0.2:
                    raise ZeroDivisionError
                made[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    met, position, known = list[int](), 0, 1
    try:
        while sum(made) < 300 or any(thread.is_alive() for thread in threads) or position < known:
            if sum(made) >= 300:
                stop.set()
            with reader.read() as session:
                found = told.page(session, position, None)
            met += [message.number for message in found.messages]
            position = found.upto
            with reader.read() as session:
                known, _ = told.numbers(session)
        with reader.read() as session:
            assert met == list(session.scalars(select(EventRow.id).order_by(EventRow.id)))
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        reader.close()
        service.close()
