"""Three boxes on this one: a lab of three hosts, Ray on each by `thinwire up`, a service, and a job on all three.

    sudo .venv/bin/python examples/three_boxes.py

Needs Linux, root and iproute2 (docs/lab.md). What is typed on real boxes is printed as it runs; docs/plain-boxes.md
has the same for three machines, under systemd. Nothing is left behind but the folder that the last line names.
"""

import contextlib
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from thinwire.tools.lab import Lab, LabSpec

FOLDER = Path(tempfile.mkdtemp(prefix="three-boxes-"))
JOB = f"""
name: three-boxes
steps: 40
global_batch: 12
recipe: {{layers: 2, width: 64, heads: 2, context: 64}}
optimizer: {{name: onebit_adam, lr: 0.002, warmup: 10}}
workers: {{min: 3, max: 3}}
evaluation: {{every_steps: 20, windows: 16}}
checkpoint: {{every_steps: 20, store: "file://{FOLDER}/checkpoints"}}
network: {{interface: eth0}}
"""


def on(lab: Lab, box: int, command: str, *, wait: bool = True) -> None:
    """Run a command on a box, which has a home of its own."""
    print(f"box {box}$ {command}", flush=True)
    home = FOLDER / f"box-{box}"
    home.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    known = {"PATH": path, "LANG": "C.UTF-8", "HOME": str(home), "RAY_memory_monitor_refresh_ms": "0"}
    argv = ["sh", "-c", command]
    with open(home / "service.log", "ab") as log:
        started = lab.start(box, argv, known, stdout=sys.stdout.fileno() if wait else log.fileno(), stderr=log.fileno())
    if wait and started.wait(600.0):
        sys.exit(f"box {box}: `{command}` failed; see {home}/service.log")


with Lab(LabSpec(hosts=3, rate_mbit=1000)) as lab:
    head = lab.addresses[0]
    url, token = f"http://{head}:8400", FOLDER / "box-0/.local/share/thinwire/box/auth_token"
    on(lab, 0, "thinwire up --head --interface eth0 --num-cpus 1")
    for box in (1, 2):
        on(lab, box, f"thinwire up --join {head}:6379 --token-file {token} --num-cpus 1")
    settings = {
        "THINWIRE_LAUNCHER": "ray",
        "THINWIRE_RAY_ADDRESS": f"http://{head}:8265",
        "THINWIRE_RAY_TOKEN_FILE": str(token),
        "THINWIRE_PUBLIC_URL": url,
        "THINWIRE_SHARED_FOLDERS": f'["{FOLDER}"]',
    }
    given = shlex.join(f"{name}={value}" for name, value in settings.items())
    on(lab, 0, f"env {given} thinwire serve --host {head} --port 8400", wait=False)
    (FOLDER / "job.yaml").write_text(JOB)
    until = time.monotonic() + 120.0
    while not (FOLDER / "box-0/.local/share/thinwire/server.json").exists():
        if time.monotonic() > until:
            sys.exit(f"the service has not begun; see {FOLDER}/box-0/service.log")
        time.sleep(0.5)
    on(lab, 0, f"thinwire submit {FOLDER}/job.yaml --watch")
    for box in (0, 1, 2):
        with contextlib.suppress(SystemExit):
            on(lab, box, "thinwire down")
print(f"all three have trained; {FOLDER} has what they wrote")
