"""A real Prometheus that scrapes a service and its workers, and is asked what people ask who watch a job."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Protocol

import httpx

from tests.deploy.queries import filled_in, of_dashboards, of_rules
from tests.deploy.rendering import ROOT
from tests.service.control_plane_harness import wait_until

DEPLOYED = ROOT / "deploy/prometheus"


class Scraped(Protocol):
    """A service that runs, with Ray's token in its home."""

    home: Path

    @property
    def url(self) -> str:
        """Where it answers."""

    def ray(self) -> str:
        """host:port of the dashboard of its Ray."""


class Prometheus:
    """A real one, with the plain configuration and the rules of deploy/prometheus; each second instead of each 15."""

    def __init__(self, program: str, folder: Path, server: Scraped) -> None:
        self._folder = folder
        self._configuration = (DEPLOYED / "prometheus.yml").read_text()
        for name in ("recording.yaml", "alerts.yaml"):
            (folder / name).write_text((DEPLOYED / name).read_text().replace("interval: 15s", "interval: 1s"))
        self._write(server)
        self._log_path = folder / "prometheus.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdout=log,
                stderr=log,
            )
        self.unanswered = {**of_dashboards(), **of_rules()}

    def begin(self) -> None:
        address = wait_until(self._address, "Prometheus listens", 60)
        self._client = httpx.Client(base_url=f"http://{address}", timeout=60)  # one connection for a hundred queries

    def look_at(self, server: Scraped) -> None:
        """The service has another port now."""
        self._write(server)
        self._process.send_signal(signal.SIGHUP)

    def _write(self, server: Scraped) -> None:
        text = self._configuration.replace("interval: 15s", "interval: 1s")
        for old, new in (
            ("127.0.0.1:8400", server.url.removeprefix("http://")),
            ("127.0.0.1:8265", server.ray()),
            ("/etc/thinwire/token", str(server.home / "token")),
            ("/etc/thinwire/ray-token", str(server.home / "ray" / "auth_token")),
        ):
            assert old in text
            text = text.replace(old, new)
        (self._folder / "prometheus.yml").write_text(text)

    def _address(self) -> str | None:
        found = re.search(r"Listening on.*address=(\S+:[1-9]\d*)", self._log_path.read_text())
        return found and found.group(1)

    def ask(self, query: str) -> list[dict]:
        answer = self._client.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def ask_all(self, job_id: str) -> bool:
        """Each query that had no answer yet. Have all had one?"""
        for where, query in list(self.unanswered.items()):
            if self.ask(filled_in(query, job_id, "20s")):
                del self.unanswered[where]
        return not self.unanswered

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
