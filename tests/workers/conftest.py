import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.s3_server import s3_session
from tests.workers.telemetry.stub_service import TOKEN, Service
from thinwire.workers.telemetry.service_client import ServiceClient

__all__ = ["s3_session"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "j-1", "name": "x", "created_at": 1.0, "spec": {}}))
    (tmp_path / "token").write_text(TOKEN + "\n")
    service = Service(tmp_path)
    service.start()
    yield service
    service.stop()


@pytest.fixture
def client(service: Service) -> Iterator[ServiceClient]:
    client = ServiceClient(service.run_dir, rank=0, attempt=2, timeout_s=2.0)
    yield client
    client.close()
