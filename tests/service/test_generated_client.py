"""A client that openapi-python-client generates from the service's own document submits a job and reads it back."""

from __future__ import annotations

import compileall
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.control_plane_harness import spec
from tests.service.live_service import live_service

NAME = "generated_thinwire_client"


def test_a_generated_client_submits_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with live_service(tmp_path / "home") as live:
        document = live.service.client.get("/openapi.json").json()
        (tmp_path / "openapi.json").write_text(json.dumps(document))
        (tmp_path / "config.yaml").write_text("post_hooks: []\n")
        where = {"--path": "openapi.json", "--output-path": NAME, "--meta": "none", "--config": "config.yaml"}
        command = [
            sys.executable,
            "-c",
            "from openapi_python_client.cli import app; app()",
            "generate",
            "--fail-on-warning",
        ]
        said = subprocess.run(
            [*command, *(word for pair in where.items() for word in pair)], cwd=tmp_path, capture_output=True, text=True
        )
        assert said.returncode == 0, said.stdout + said.stderr
        assert "Warning" not in said.stdout
        operations = {
            re.sub("_+", "_", one["operationId"]) for path in document["paths"].values() for one in path.values()
        }
        assert {path.stem for path in tmp_path.glob(f"{NAME}/api/*/*_*.py")} - {"__init__"} == operations
        assert compileall.compile_dir(tmp_path / NAME, quiet=1)

        monkeypatch.syspath_prepend(tmp_path)
        client = importlib.import_module(NAME).AuthenticatedClient(
            base_url=f"http://127.0.0.1:{live.port}", token=live.service.token
        )
        models = importlib.import_module(f"{NAME}.models")
        submit: Any = importlib.import_module(f"{NAME}.api.jobs.submit_v1_jobs_post")
        asked = {**spec(), "recipe": {"name": "resnet", "widths": [8, 16, 32]}, "data": {"source": "digits"}}
        job = submit.sync(client=client, body=models.TrainSpec.from_dict(asked))
        assert isinstance(job, models.Job), job
        assert job.spec.to_dict()["recipe"]["widths"] == [8, 16, 32]
        show: Any = importlib.import_module(f"{NAME}.api.jobs.show_v1_jobs_job_id_get")
        assert show.sync(job.id, client=client).state == "SUBMITTING"
        wrong = submit.sync(client=client, body=models.TrainSpec.from_dict({**asked, "steps": 0}))
        assert [problem.path for problem in wrong.problems] == ["steps"]

        script = {"recipe": {"name": "script", "entry": "train.py", "working_dir": "/srv/x", "env_vars": {"A": "1"}}}
        taken = submit.sync(client=client, body=models.ScriptSpec.from_dict(script))
        assert isinstance(taken.spec, models.ScriptSpec), taken
        assert taken.spec.to_dict()["recipe"]["env_vars"] == {"A": "1"}
        assert taken.steps is None
