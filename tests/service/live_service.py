"""The service of the harness behind a real port, found by its home as a user's server is; and what its job would do."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.service.control_plane_harness import Service, wait_until
from thinwire.service.jobs.job_folder import ServiceAt
from thinwire.service.launch.protocol import LaunchState

SUMMARY: dict[str, Any] = {
    "state": "SUCCEEDED",
    "steps": 100,
    "frozen_at": 20,
    "world_size": 2,
    "parameters": 2_300_000,
    "replicas_bit_equal": True,
    "loss": {"train_first": 5.61, "train_last": 2.31, "validation_first": 5.55, "validation_last": 2.41},
    "payload_bytes": {
        "sent": 207_000_000,
        "warmup_phase": 184_000_000,
        "compressed_phase": 23_000_000,
        "compressed_phase_fp32": 736_000_000,
        "fp32": 920_000_000,
        "bf16": 460_000_000,
        "checkpoints": 18_400_000,
        "control": 4_096,
    },
    "compression_ratio": {"compressed_phase": 32.0, "overall": 4.44},
    "seconds": {
        "total": 100.0,
        "startup": 10.0,
        "forward_backward": 60.0,
        "optimizer": 20.0,
        "evaluation": 5.0,
        "checkpoint": 3.0,
        "other": 2.0,
    },
    "attempts": 1,
    "a key of a later version": {"x": 1},
}


class Listening:
    """An application that answers on a port of loopback, 0: a free one, from a thread. options: of uvicorn."""

    def __init__(self, app: Any, port: int = 0, **options: Any) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, **{"lifespan": "off", **options}))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, "the server listens")
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Answer what is under way, then end."""
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


class LiveService:
    """A Service that listens on loopback. `home` is what THINWIRE_HOME has to be."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.home = service.home
        self._listening: Listening | None = None

    def listen(self, port: int = 0) -> None:
        """Answer on this port, 0: a free one; write server.json, and tell the runs."""
        found = self._listening = Listening(self.service.app, port, timeout_graceful_shutdown=1)
        self.port = found.port
        (self.home / "server.json").write_text(json.dumps({"url": found.url, "pid": os.getpid()}))
        self.service.plane.jobs._folders.service = ServiceAt(found.url)
        self.service.plane.jobs.rewrite_service_urls()

    def vanish(self) -> None:
        """Stop answering and leave server.json behind, as a server does that is killed."""
        if self._listening is not None:
            self._listening.stop()

    def finish(self, job_id: str, state: LaunchState = LaunchState.SUCCEEDED, message: str = "") -> None:
        """Let the cluster end the job; one that fails has said why, as a worker does."""
        if state is LaunchState.FAILED:
            failure = {"kind": "RuntimeError", "message": message}
            (self.service.run_dir(job_id) / "failure.json").write_text(json.dumps(failure))
        self.service.launcher.put(job_id, state, message)
        self.service.turn(2)

    def write_results(self, job_id: str) -> None:
        """What rank 0 leaves in the run folder."""
        folder = self.service.run_dir(job_id)
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
        (folder / "loss.png").write_bytes(b"\x89PNG")
        (folder / "history.jsonl").write_text("{}\n")


@contextmanager
def live_service(home: Path) -> Iterator[LiveService]:
    """A live service on an empty home."""
    service = Service(home)
    live = LiveService(service)
    live.listen()
    try:
        yield live
    finally:
        live.vanish()
        service.close()
