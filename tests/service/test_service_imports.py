"""The service stands without torch, ray, numpy and cupy; where no trace is asked for without OpenTelemetry's SDK."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "ray", "numpy", "cupy"}:
            raise ImportError(f"{name} is blocked in this test")
        return None

sys.meta_path.insert(0, Blocker())
import thinwire.service.main
import thinwire.service.server
import thinwire.service.server
import tempfile, pathlib
from thinwire.service.config import Settings
with tempfile.TemporaryDirectory() as home:
    settings = Settings(home=pathlib.Path(home), launcher="fake")
    launcher = thinwire.service.server.make_launcher(settings)
    app = thinwire.service.main.create_app(settings, launcher)
    app.state.plane.db.upgrade()
    app.openapi()
absent = {"torch", "ray", "numpy", "cupy", "opentelemetry.sdk", "opentelemetry.exporter"}
print("stands", sorted(absent & sys.modules.keys()))
"""


def test_the_service_imports_and_migrates_without_torch_ray_and_numpy() -> None:
    ended = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith("stands []")
