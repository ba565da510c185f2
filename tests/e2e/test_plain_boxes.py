"""docs/plain-boxes.md as it stands, run as a script on three hosts of a lab: from the clone to a job trained on all, to
another token for Ray and the same job once more.

Each host has files of its own, /etc, /opt, /root, /tmp and /var, laid over the machine's. The packages that pip would
download are there already. In the place of systemctl and scp are programs of tests/.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab_boxes import BUCKET, STORE_PORT, Host, keep_store
from tests.conftest import missing
from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from thinwire.tools.lab import Lab, LabSpec
from thinwire.tools.lab.network import INTERFACE

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("namespaces"),
]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plain-boxes.md"
NAMES = ("box-a", "box-b", "box-c")
OVERLAID = ("/etc", "/opt", "/root", "/var")
SITE = "/opt/packages"
"""Where a host finds what pip would download: the unit's user may not read every home."""


def blocks(page: str) -> list[tuple[list[str], str]]:
    """Each block of commands, and on which boxes it is typed."""
    found = re.findall(r"<!-- on: (.*?) -->\n```\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    return [(on.split(), commands) for on, commands in found]


def test_every_block_of_the_page_says_where_it_is_typed() -> None:
    page = PAGE.read_text()
    assert len(re.findall(r"^```$", page, flags=re.MULTILINE)) == 2 * len(blocks(page))
    assert blocks(page)[0][0] == ["settings"]
    assert {name for on, _ in blocks(page)[1:] for name in on} == set(NAMES)


def settings(commands: str, values: dict[str, str]) -> str:
    """The block of settings with the values of the lab; the names are the page's."""
    names = re.findall(r"(?<=[ ])([A-Z_]+)=", re.sub(r"#.*", "", commands))
    assert set(names) == set(values)
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())


class Box(Host):
    """A machine as it comes: with the packages that pip would download, and no thinwire."""

    def __init__(self, lab: Lab, number: int) -> None:
        super().__init__(lab, number)
        over = "/tmp/over{0}"
        for folder in OVERLAID:
            above = over.format(folder)
            how = f"lowerdir={folder},upperdir={above}/upper,workdir={above}/work"
            self.run(f"mkdir -p {above}/upper {above}/work && mount -t overlay overlay -o {how} {folder}")
        # The interpreter may lie in root's home, which the unit's user may not enter.
        self.run(f"chmod 755 /root /tmp && chmod 1777 /tmp && mkdir -p {SITE} /run/credentials")
        import torch

        self.run(f"mount --bind {Path(torch.__file__).parents[1]} {SITE}")
        self.write("/tmp/bin/systemctl", f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/deploy/systemctl.py "$@"\n')
        self.write("/tmp/bin/scp", '#!/bin/sh\nexec cp -p "/tmp/sent/${1##*:}" "$2"\n')
        self.run("chmod 755 /tmp/bin /tmp/bin/*")
        self.env |= {
            "PATH": f"/tmp/bin:{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": SITE,
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip takes what is there, and does not look for setuptools
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }

    def type(self, commands: str, within_s: float) -> str:
        """As a person does, in a shell that stops at the first failure."""
        return self.run(f"exec bash -euo pipefail -c {shlex.quote(commands)}", within_s=within_s)

    def journal(self) -> str:
        return self.run("tail -n 60 /tmp/journal/*.log; tail -n 30 /var/lib/thinwire-box/head.log", check=False)


@pytest.fixture(scope="module")
def boxes() -> Iterator[list[Box]]:
    for name, extra in (("ray", "worker"), ("moto", "dev"), ("s3fs", "dev")):
        if importlib.util.find_spec(name) is None:
            missing(f"{name} is not installed: pip install 'thinwire[{extra}]'")
    with Lab(LabSpec(hosts=3, rate_mbit=1000)) as lab:
        yield [Box(lab, number) for number in range(3)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the page clones, as a bundle: the tree as it is now, committed or not."""
    tree = tmp_path_factory.mktemp("source")

    def git(*words: str, given: bytes = b"", where: Path = tree) -> bytes:
        return subprocess.run(["git", *words], cwd=where, input=given, stdout=subprocess.PIPE, check=True).stdout

    listed = git("ls-files", "-z", "-co", "--exclude-standard", where=ROOT)
    packed = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=listed, stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x"], cwd=tree, input=packed.stdout, check=True)
    git("init", "-q", "-b", "main")
    git("add", "-A")
    git("-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-q", "-m", "as it is now")
    git("bundle", "create", "-q", "all", "HEAD", "main")
    return (tree / "all").read_bytes()


def test_the_page_makes_a_cluster_that_trains_on_all_three(boxes: list[Box], source: bytes) -> None:
    keep_store(boxes[0])
    values = {
        "HEAD": boxes[0].address,
        "INTERFACE": INTERFACE,
        "SOURCE": "/tmp/source",
        "BUCKET": BUCKET,
        "AWS_ENDPOINT_URL": f"http://{boxes[0].address}:{STORE_PORT}",
        "AWS_ACCESS_KEY_ID": "lab",
        "AWS_SECRET_ACCESS_KEY": "lab",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    page, rotation = PAGE.read_text().split("\n## 7. ")
    [(_, given), *steps] = blocks(page)
    mine = settings(given, values)
    for box in boxes:
        box.run("base64 -d > /tmp/source", base64.b64encode(source).decode())

    def type_all(steps: list[tuple[list[str], str]]) -> str:
        """What the last of them printed."""
        said = ""
        for on, commands in steps:
            typed = [boxes[NAMES.index(name)] for name in on]
            if "scp" in commands:  # what the network would carry
                token = boxes[0].run("cat /etc/thinwire/ray_token")
                for box in typed:
                    box.write("/tmp/sent/etc/thinwire/ray_token", token)
            text = f"{mine}\ncd /\n{commands}"
            with ThreadPoolExecutor() as beside:  # in a terminal for each
                said = [*beside.map(lambda box, text=text: box.type(text, 600.0), typed)][-1]
        return said

    try:
        said = type_all(steps)
        old = boxes[0].run("cat /etc/thinwire/ray_token")
        assert ray_answers(boxes[0], old) == "200"
        type_all(blocks(rotation))
        new = boxes[0].run("cat /etc/thinwire/ray_token")
        assert [ray_answers(boxes[0], token) for token in (old, new)] == ["403", "200"]
        again = type_all(steps[-1:])
    except AssertionError as error:
        raise AssertionError(f"{error}\n" + "\n".join(f"{b.address}: {b.journal()}" for b in boxes)) from error
    assert re.search(r"first-\w+ +first +SUCCEEDED +60/60 .* anna$", said, flags=re.MULTILINE), said
    assert len(re.findall(r"^first-\w+ +first +SUCCEEDED +60/60 ", again, flags=re.MULTILINE)) == 2, again
    job, _ = asked(boxes[0], "jobs")["jobs"]
    shown = asked(boxes[0], f"jobs/{job['id']}")["summary"]
    assert (shown["world_size"], shown["replicas_bit_equal"]) == (3, True)
    log = boxes[0].run(f"cat {job['run_dir']}/logs/attempt-1.log")
    assert all(f"host='{box.address}'" in log for box in boxes)
    # As the units say: nothing runs as root, and nothing secret can be read by others.
    for box in boxes:
        assert box.run("ps -eo user:20,args | grep -E '[r]aylet|[t]hinwire (up|serve)' | grep ^root", check=False) == ""
        assert box.run("find /etc/thinwire -type f -perm /077 ! -name box.env ! -name service.env", check=False) == ""
    for box in boxes[1:]:
        box.type("systemctl stop thinwire-box", within_s=150.0)
    boxes[0].type("systemctl stop thinwire; systemctl stop thinwire-head", within_s=150.0)
    for box in boxes:
        assert [pid for name in ("ray::", "raylet", "gcs_server") for pid in box.processes(name)] == []


def ray_answers(box: Box, token: str) -> str:
    """The status with which Ray's dashboard answers who shows this token."""
    box.write("/tmp/header", f"Authorization: Bearer {token.strip()}")
    return box.run(
        f"curl -s -o /dev/null -w '%{{http_code}}' -H @/tmp/header http://{box.address}:8265/api/jobs/"
    ).strip()


def asked(box: Box, path: str) -> Any:
    """What the service answers its operator."""
    header = '-H "Authorization: Bearer $(cat /var/lib/thinwire/token)"'
    return json.loads(box.run(f"curl -sf {header} 'http://{box.address}:8400/v1/{path}'"))
