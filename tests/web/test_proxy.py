"""Behind a real nginx that cuts what is silent: the page and the command line read on, and lose or double nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import missing
from tests.service.control_plane_harness import wait_until
from tests.service.test_tls import free_port
from thinwire.client import Client
from thinwire.client.servers import Server
from thinwire.client.streams import follow
from thinwire.service.launch.protocol import LaunchState

if TYPE_CHECKING:
    from tests.web.browser import Desk

pytestmark = pytest.mark.slow

CUTS_S = 2
"""Of silence, at which nginx ends a stream: 60 where nobody sets it, and the service says something every 15."""
CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location = /thinwire {{ return 301 /thinwire/; }}
    proxy_set_header Host $http_host;
    proxy_set_header X-Forwarded-For $remote_addr;
    proxy_set_header X-Forwarded-Proto $scheme;
    location /thinwire/ {{ proxy_pass http://127.0.0.1:{behind}/; }}
    location ~ ^/thinwire/(.*/(events|logs/stream))$ {{
      proxy_pass http://127.0.0.1:{behind}/$1$is_args$args;
      proxy_read_timeout {cuts}s;
    }}
  }}
}}
"""


@contextmanager
def nginx(behind: int, folder: Path) -> Iterator[str]:
    """Its URL. behind: the service's port."""
    program = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    if program is None:
        missing("nginx is not installed: apt install nginx-light")
    port = free_port()
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port, behind=behind, cuts=CUTS_S))
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}/thinwire/"
        finally:
            process.terminate()


def test_streams_that_a_proxy_cuts_are_read_on(desk: Desk, tmp_path: Path) -> None:
    from tests.web.browser import samples

    job_id = desk.running(name="cut", steps=300)
    hub, write = desk.service.plane.hub, desk.service.launcher.write_log
    told: list[str] = []
    opened: list[float] = []
    with ExitStack() as stack:
        url = stack.enter_context(nginx(desk.live.port, tmp_path))
        home = {**os.environ, "THINWIRE_URL": url, "THINWIRE_TOKEN": desk.service.token}
        command = [sys.executable, "-m", "thinwire.cli.main", "logs", job_id, "--follow"]
        logs = stack.enter_context(subprocess.Popen(command, env=home, stdout=subprocess.PIPE, text=True))
        stack.callback(logs.kill)

        def read() -> None:
            with Client(Server(url, desk.service.token)) as client:
                for one in follow(client, job_id, "events", opened=lambda answer: opened.append(time.monotonic())):
                    if one.event == "event" and one.data["kind"] == "noted":
                        told.append(str(one.data["fields"]["words"]))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        page = desk.signed_in(f"#/jobs/{job_id}", url=url)
        page.get_by_role("heading", level=1, name=job_id).wait_for()
        log = page.context.new_page()
        log.goto(f"{url}#/jobs/{job_id}/logs")

        def say(at: int) -> None:
            write(job_id, f"line {at}\n")
            event = {"kind": "noted", "step": at, "time": time.time(), "fields": {"words": f"word {at}"}}
            desk.post(job_id, samples=samples(at, at), events=[event])

        # Some is said while all read, some while those that were cut have not come back.
        for at in range(1, 13):
            count = len(opened)
            if at % 3 == 0:
                wait_until(lambda: not hub._readers, "all are cut")
            elif at % 3 == 1:
                wait_until(lambda before=count: len(opened) > before or hub._readers, "one reads")
            say(at)
            page.get_by_text(f"{at}/300").first.wait_for()
            log.get_by_text(f"line {at}\n").wait_for()
        page.goto(f"{url}#/jobs/{job_id}/events")
        page.get_by_text("word 12").wait_for()
        desk.end(job_id, LaunchState.SUCCEEDED)
        reader.join(60.0)
        assert not reader.is_alive()
        out = logs.communicate(timeout=60)[0]
        log.locator(".state.SUCCEEDED").wait_for()
    lines, words = [f"line {at}" for at in range(1, 13)], [f"word {at}" for at in range(1, 13)]
    assert len(opened) > 2, "nothing was cut"
    assert told == words
    assert [one for one in out.splitlines() if one.startswith("line")] == lines
    assert [one for one in log.get_by_role("log").inner_text().split("\n") if one.startswith("line")] == lines
    assert page.get_by_role("row").filter(has_text="word ").count() == len(words)
    assert desk.complaints == []


LIVES = """async ([seconds, says]) => {
  const { Stream } = await import(new URL("stream.js", document.querySelector("script").src));
  const waited = [], own = { fetch: fetch.bind(window), timeout: setTimeout.bind(window), now: performance.now };
  let now = 0;
  performance.now = () => now;
  window.setTimeout = (then, ms) => {
    if (![2, 4, 8, 16, 32, 60].includes(ms / 1000)) return own.timeout(then, ms); // what else the page waits for
    waited.push(ms);
    return own.timeout(then, 0);
  };
  window.fetch = async (address, options) => {
    if (address !== "/none") return own.fetch(address, options);
    const body = new ReadableStream({
      start(controller) { if (says) controller.enqueue(new TextEncoder().encode(": here\\n\\n")); },
      pull(controller) { now += 1000 * seconds; controller.close(); },
    }, { highWaterMark: 0 });
    return new Response(body, { headers: { "Content-Type": "text/event-stream" } });
  };
  const stream = new Stream(() => "/none", () => {}, () => {}, () => {});
  try {
    while (waited.length < 6) await new Promise((resolve) => own.timeout(resolve, 1));
  } finally {
    stream.stop();
    window.fetch = own.fetch; window.setTimeout = own.timeout; performance.now = own.now;
  }
  return waited.slice(0, 6).map((ms) => ms / 1000);
}"""


@pytest.mark.parametrize(
    ("seconds", "says", "waits"),
    [
        (11, True, [2, 2, 2, 2, 2, 2]),
        (9, True, [2, 4, 8, 16, 32, 60]),
        (60, False, [2, 4, 8, 16, 32, 60]),  # a proxy that keeps what it is to pass on
    ],
)
def test_a_stream_that_has_lived_is_opened_again_soon_and_another_ever_more_seldom(
    desk: Desk, seconds: int, says: bool, waits: list[int]
) -> None:
    assert desk.signed_in().evaluate(LIVES, [seconds, says]) == waits
