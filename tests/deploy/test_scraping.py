"""A job whose worker lies: what a real Prometheus, with the plain configuration, makes of what it serves."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from tests.conftest import missing
from tests.deploy.rendering import ROOT
from tests.service.control_plane_harness import wait_until

FORGED = """\
thinwire_step{job_id="mine",rank="0"} 7
thinwire_loss{job_id="others",rank="3",node="box-z",job="thinwire-service",instance="a:1"} 1 1000
thinwire_service_jobs{state="RUNNING"} 99
thinwire_service_launcher_ready{job_id="others"} 0
ALERTS{alertname="AllIsLost"} 1
kube_pod_info{pod="x"} 1
up{job="thinwire-service"} 0
"""
MANY = "".join(f'thinwire_reported{{job_id="mine",rank="0",name="n{number}"}} 1\n' for number in range(500))


@contextmanager
def served(pages: dict[str, tuple[str, str]]) -> Iterator[str]:
    """host:port that answers these paths, each with a type and a text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, text = pages[self.path]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def group(address: str, job_id: str, rank: str) -> dict[str, object]:
    labels = {"job_id": job_id, "rank": rank, "node": "box-a", "attempt": "1"}
    return {"targets": [address], "labels": {f"__meta_thinwire_{name}": value for name, value in labels.items()}}


def test_a_job_can_neither_speak_for_another_nor_for_the_service_nor_fill_prometheus(tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        missing("prometheus is not installed: apt install prometheus")
    text = (ROOT / "deploy/prometheus/prometheus.yml").read_text().replace("interval: 15s", "interval: 1s")
    (tmp_path / "token").write_text("token")
    kind = "text/plain; version=0.0.4"
    with (
        served({"/metrics": (kind, FORGED)}) as worker,
        served({"/metrics": (kind, MANY)}) as large,
        served(
            {
                "/v1/metrics/targets": (
                    "application/json",
                    json.dumps([group(worker, "mine", "0"), group(large, "big", "0")]),
                )
            }
            | {"/metrics": (kind, 'thinwire_service_jobs{state="RUNNING"} 1\n')}
        ) as service,
    ):
        text = text.replace("127.0.0.1:8400", service).replace("/etc/thinwire/token", str(tmp_path / "token"))
        text = re.sub(r"\n  # Ray's own metrics.*", "\n", text, flags=re.DOTALL).replace("rule_files", "# rule_files")
        (tmp_path / "prometheus.yml").write_text(text)
        log = tmp_path / "log"
        command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        with log.open("wb") as output:
            process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stdout=output, stderr=output)
        try:
            found = wait_until(
                lambda: re.search(r"Listening on.*address=(\S+:[1-9]\d*)", log.read_text()), "it listens"
            )

            def ask(query: str) -> list[dict[str, str]]:
                answer = httpx.get(f"http://{found[1]}/api/v1/query", params={"query": query}, timeout=30).json()
                return [{**one["metric"], "value": one["value"][1]} for one in answer["data"]["result"]]

            wait_until(lambda: len(ask('up{job="thinwire-workers"}')) == 2 and ask("thinwire_service_jobs"), "a scrape")
            mine = {"job": "thinwire-workers", "instance": worker, "node": "box-a", "job_id": "mine", "rank": "0"}
            wait_until(lambda: ask("thinwire_step"), "a sample")
            assert ask("thinwire_step") == [mine | {"__name__": "thinwire_step", "value": "7"}]
            assert ask("thinwire_loss") == [mine | {"__name__": "thinwire_loss", "value": "1"}]
            assert [one["value"] for one in ask("thinwire_service_jobs")] == ["1"]
            assert ask("thinwire_service_launcher_ready") == ask("ALERTS") == ask("kube_pod_info") == []
            assert [one["value"] for one in ask('up{job="thinwire-service"}')] == ["1"]
            assert ask('{job_id="others"}') == ask("thinwire_reported") == []
            assert [one["value"] for one in ask('up{job_id="big"}')] == ["0"]  # more than a worker has
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
