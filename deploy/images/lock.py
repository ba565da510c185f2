"""Write service.lock, worker.lock and sbom.lock: every package of each image, and of the tool that lists them, with the
version that pip chooses today.

    .venv/bin/python deploy/images/lock.py

For Linux and this Python. torch is locked without saying for which device its build is: install.sh takes either.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent
ROOT = IMAGES.parents[1]
SBOM_TOOL = "cyclonedx-bom"
"""Writes what is in an image as CycloneDX, the format of OWASP, whose own tool it is."""
EXTRAS = {"service": "service,postgresql,kubernetes", "worker": "worker,s3"}


def lock(requirement: str) -> str:
    """The lines of a lock: what pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        pip += ["--constraint", str(ROOT / "constraints.txt"), "--report", str(report), requirement]
        subprocess.run(pip, check=True)
        chosen = [found["metadata"] for found in json.loads(report.read_text())["install"]]
    pins = {
        found["name"].lower(): found["version"].partition("+")[0] for found in chosen if found["name"] != "thinwire"
    }
    # Of torch's CUDA build: its metadata pins them, and the CPU build has none.
    names = [name for name in sorted(pins) if not name.startswith(("nvidia-", "cuda-", "triton"))]
    return "".join(f"{name}=={pins[name]}\n" for name in names)


if __name__ == "__main__":
    for image, extras in EXTRAS.items():
        (IMAGES / f"{image}.lock").write_text(f"# Written by lock.py: thinwire[{extras}].\n{lock(f'{ROOT}[{extras}]')}")
    (IMAGES / "sbom.lock").write_text(f"# Written by lock.py: {SBOM_TOOL}.\n{lock(SBOM_TOOL)}")
