"""What the images are made of, without Docker: locks, the steps of the Dockerfiles, an install in a fresh folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.images.lock import CONSTRAINTS, EXTRAS, LINE, TOOLS, entries, of_cpu
from tests.deploy.rendering import ROOT, render
from tests.extras import asked as requirements

IMAGES = ROOT / "deploy/images"


LOCKS = {
    "service": ("service",),
    "worker": ("worker", "torch-cpu"),
    "cuda": ("worker", "torch-cuda"),
}
"""Of each image, by its device where it has one."""


def pins(*locks: str) -> dict[str, str]:
    """Name and version of each package of these locks."""
    lines = [line for lock in locks for line in entries((IMAGES / f"{lock}.lock").read_text())]
    return dict(pinned(line) for line in lines)


def pinned(line: str) -> tuple[str, str]:
    found = Requirement(line.split()[0])
    (specifier,) = found.specifier
    assert specifier.operator == "=="
    return canonicalize_name(found.name), specifier.version


def constraints() -> tuple[list[Requirement], dict[str, str]]:
    """The bounds that a person has written, and the versions that follow from them."""
    bounds, _, written = CONSTRAINTS.read_text().partition(LINE)
    return [Requirement(line.strip()) for line in entries(bounds)], dict(map(pinned, entries(written)))


def outdated(image: str, locked: dict[str, str]) -> Iterator[str]:
    """What pyproject.toml and constraints.txt ask for, and the lock does not give."""
    asked = requirements(*EXTRAS["worker" if image == "cuda" else image])
    names = {requirement.name for requirement in asked}
    asked += [requirement for requirement in constraints()[0] if requirement.name in names]
    for requirement in asked:
        version = locked.get(canonicalize_name(requirement.name))
        if version is None or version not in requirement.specifier:
            yield f"{requirement}: {version}"


def test_the_images_have_the_versions_that_the_tests_run_with():
    """The packages installed here are those of constraints.txt, and those of the locks."""
    _, tested = constraints()
    in_images = {name: version for locks in LOCKS.values() for name, version in pins(*locks).items()}
    of_device = {name for name in pins("torch-cuda") if name != "torch"}
    assert {name: version for name, version in in_images.items() if name not in of_device} == tested
    here = {name: version(name).partition("+")[0] for name in tested if name != "thinwire"}
    other = [f"{name} is {here[name]}, locked is {tested[name]}" for name in tested if here[name] != tested[name]]
    assert other == [], "pip install -c constraints.txt -e '.[all,vision,dev]', or python deploy/images/lock.py"


def test_every_file_that_an_image_installs_is_known_by_its_hash():
    for file in sorted(IMAGES.glob("*.lock")):
        found = entries(file.read_text())
        assert found, file.name
        assert [line for line in found if "--hash=sha256:" not in line] == []
    steps = (IMAGES / "install.sh").read_text()
    assert "--require-hashes" in steps
    assert steps.count("--requirement") == 1  # there, and of every lock
    assert "--no-build-isolation" in steps


def test_a_build_of_torch_for_cpus_that_nobody_has_looked_up_is_not_locked():
    assert of_cpu(pins("torch-cpu")["torch"]) in (IMAGES / "torch-cpu.lock").read_text()
    with pytest.raises(SystemExit, match=r"torch 99\.0\.0.*CPU_HASHES"):
        of_cpu("99.0.0")


@pytest.mark.parametrize("image", LOCKS)
def test_the_lock_gives_what_the_project_asks_for(image):
    locked = pins(*LOCKS[image])
    assert list(outdated(image, locked)) == [], "python deploy/images/lock.py"
    assert list(outdated(image, locked | {"httpx": "0.1"})) == ["httpx>=0.28: 0.1"]
    assert list(outdated(image, {name: locked[name] for name in locked if name != "typer"})) == ["typer>=0.15: None"]


def test_the_tools_that_make_an_image_are_locked_too():
    assert {canonicalize_name(Requirement(tool).name) for tool in TOOLS} <= pins("tools").keys()


def test_the_service_has_neither_torch_nor_ray_and_workers_no_web_framework():
    service, workers = (set(pins(*LOCKS[image])) for image in ("service", "worker"))
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
        assert pins(*LOCKS[image]).items() <= listed.items()
        assert "thinwire" in listed
    finally:
        shutil.rmtree(at, ignore_errors=True)  # a GB and a half


STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
while [ $# -gt 0 ]; do
  case $1 in
    --metadata-file) echo "{\\"containerimage.digest\\": \\"$DIGEST\\"}" > "$2" ;;
    create) echo box-1 ;;
    cp) echo '{"components": []}' > "$3" ;;
  esac
  shift
done
"""
BASE = f"python:3.11.13-slim-bookworm@sha256:{'b' * 64}"


@pytest.fixture
def publish(tmp_path):
    """publish.sh of a clone with one commit, with stand-ins of docker and cosign: how it ended, what it has called."""
    clone, programs = tmp_path / "clone", tmp_path / "bin"
    shutil.copytree(IMAGES, clone / "deploy/images")
    programs.mkdir()
    for name in ("docker", "cosign"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=clone, check=True)

    def run(tag="0.1.0", dirty=False, **environment):
        if dirty:
            (clone / "more").touch()
        calls = tmp_path / "calls"
        calls.write_text("")
        told = {"PYTHON": BASE, "DIGEST": f"sha256:{'d' * 64}", "CALLS": str(calls), **environment}
        told["PATH"] = f"{programs}:{os.environ['PATH']}"
        command = [clone / "deploy/images/publish.sh", "registry.example/ml", tag, tmp_path / "out"]
        done = subprocess.run(command, capture_output=True, text=True, env=told, check=False)
        return done, calls.read_text().splitlines(), tmp_path / "out"

    return run


def test_both_images_are_built_on_a_base_by_digest_signed_and_named_by_digest(publish):
    done, calls, out = publish()
    assert done.returncode == 0, done.stderr
    builds = [call for call in calls if call.startswith("docker buildx build")]
    assert len(builds) == 2
    for image, build in zip(EXTRAS, builds, strict=True):
        assert f"--file deploy/images/{image}.Dockerfile" in build
        assert f"--build-arg PYTHON={BASE}" in build
        assert "--provenance mode=max" in build
        name = f"registry.example/ml/thinwire-{image}@sha256:{'d' * 64}"
        assert calls.count(f"cosign sign --yes {name}") == 1
        assert f"cosign attest --yes --type cyclonedx --predicate {out}/{image}.cdx.json {name}" in calls
        assert (out / f"{image}.cdx.json").exists()
    rendered = render(["--values", str(out / "values.yaml")])
    assert f"image: registry.example/ml/thinwire-service@sha256:{'d' * 64}" in rendered
    assert f"registry.example/ml/thinwire-worker@sha256:{'d' * 64}" in rendered


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"PYTHON": "python:3.11.13-slim-bookworm"}, "PYTHON is 'python:3.11.13-slim-bookworm', it must be"),
        ({"PYTHON": ""}, "PYTHON is ''"),
        ({"tag": "latest"}, "the tag is latest"),
        ({"dirty": True}, "differs from its commit"),
    ],
)
def test_what_would_not_be_of_one_commit_and_one_base_is_not_built(publish, how, words):
    done, calls, _ = publish(**how)
    assert (done.returncode, calls) == (2, [])
    assert words in done.stderr


def test_a_build_without_a_digest_is_not_signed(publish):
    done, calls, _ = publish(DIGEST="")
    assert done.returncode == 2
    assert not [call for call in calls if call.startswith("cosign")]


def test_each_action_of_the_pipeline_is_pinned_to_a_commit():
    pipeline = yaml.safe_load((IMAGES / "publish.yaml").read_text())
    (job,) = pipeline["jobs"].values()
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action) for action in used), used
    assert (pipeline["permissions"], job["permissions"]["id-token"]) == ({"contents": "read"}, "write")


def test_a_device_that_torch_has_no_build_for_is_refused(tmp_path):
    done = subprocess.run(
        [IMAGES / "install.sh", "worker", tmp_path / "at", "tpu"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "the device is tpu, it must be cpu or cuda" in done.stderr) == (2, True)
