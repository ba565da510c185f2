"""What the images are made of, without Docker: locks, the steps of the Dockerfiles, an install in a fresh folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images.lock import EXTRAS, SBOM_TOOL
from tests.deploy.rendering import ROOT
from tests.extras import asked as requirements

IMAGES = ROOT / "deploy/images"


def pins(text: str) -> dict[str, str]:
    """Name and version of each package of a lock."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def outdated(image: str, locked: dict[str, str]) -> Iterator[str]:
    """What pyproject.toml and constraints.txt ask for, and the lock does not give."""
    asked = requirements(*EXTRAS[image].split(","))
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    names = {requirement.name for requirement in asked}
    asked += [requirement for requirement in map(Requirement, lines) if requirement.name in names]
    for requirement in asked:
        version = locked.get(canonicalize_name(requirement.name))
        if version is None or version not in requirement.specifier:
            yield f"{requirement}: {version}"


@pytest.mark.parametrize("image", EXTRAS)
def test_the_lock_gives_what_the_project_asks_for(image):
    locked = pins((IMAGES / f"{image}.lock").read_text())
    assert list(outdated(image, locked)) == [], "python deploy/images/lock.py"
    assert list(outdated(image, locked | {"httpx": "0.1"})) == ["httpx>=0.28: 0.1"]
    assert list(outdated(image, {name: locked[name] for name in locked if name != "typer"})) == ["typer>=0.15: None"]


def test_the_tool_that_lists_an_image_is_locked_too():
    assert canonicalize_name(SBOM_TOOL) in pins((IMAGES / "sbom.lock").read_text())


def test_the_service_has_neither_torch_nor_ray_and_workers_no_web_framework():
    service, workers = (set(pins((IMAGES / f"{image}.lock").read_text())) for image in ("service", "worker"))
    training, serving = {"torch", "ray", "numpy"}, {"fastapi", "sqlalchemy", "uvicorn"}
    assert (training & service, training - workers) == (set(), set())
    assert (serving & workers, serving - service) == (set(), set())


@pytest.mark.parametrize("image", EXTRAS)
def test_a_dockerfile_installs_by_the_script_and_ends_as_no_root(image):
    steps = re.findall(r"^([A-Z]+) (.*)$", (IMAGES / f"{image}.Dockerfile").read_text(), flags=re.MULTILINE)
    assert [argument for step, argument in steps if step == "FROM"] == ["${PYTHON} AS build", "${PYTHON}"]
    assert re.fullmatch(r"PYTHON=python:\d+\.\d+\.\d+-[a-z-]+", steps[0][1])
    assert [argument.split()[:2] for step, argument in steps if "install.sh" in argument] == [
        ["/src/deploy/images/install.sh", image]
    ]
    assert [argument for step, argument in steps if step == "USER"] == ["1000:1000"]
    copied = [argument for step, argument in steps if step == "COPY"]
    assert copied == [". /src", "--from=build /opt/thinwire /opt/thinwire"]


def context(to):
    """The files that .dockerignore lets through, in the folder."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            path = ROOT / line[1:]
            copy = shutil.copytree if path.is_dir() else shutil.copy
            (to / line[1:]).parent.mkdir(parents=True, exist_ok=True)
            copy(path, to / line[1:], **({"symlinks": True} if path.is_dir() else {}))
    return to


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("service", ["thinwire", "serve", "--help"]),
        ("worker", ["python", "-c", "import torch, ray, thinwire.workers.main, thinwire.optim"]),
    ],
)
def test_the_steps_of_an_image_install_what_its_command_needs(image, says, tmp_path):
    source = context(tmp_path / "src")
    index = subprocess.run(["pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False)
    environment = {**os.environ, "TORCH_INDEX": index.stdout.strip() or "https://download.pytorch.org/whl/cpu"}
    environment.pop("PYTHONPATH", None)
    at = tmp_path / "at"
    try:
        subprocess.run([source / "deploy/images/install.sh", image, at], env=environment, check=True)
        subprocess.run([at / "bin" / says[0], *says[1:]], env=environment, cwd=tmp_path, check=True)
        listed = {
            canonicalize_name(one["name"]): one["version"].partition("+")[0]
            for one in json.loads((at / "sbom.cdx.json").read_text())["components"]
        }
        assert pins((IMAGES / f"{image}.lock").read_text()).items() <= listed.items()
        assert "thinwire" in listed
    finally:
        shutil.rmtree(at, ignore_errors=True)  # a GB and a half


def test_a_device_that_torch_has_no_build_for_is_refused(tmp_path):
    done = subprocess.run(
        [IMAGES / "install.sh", "worker", tmp_path / "at", "tpu"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "the device is tpu, it must be cpu or cuda" in done.stderr) == (2, True)
