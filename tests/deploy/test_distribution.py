"""The wheel and the source distribution: everything is in them, and they work away from the clone."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import pytest

from deploy.release import install
from tests.extras import ROOT, STEPS
from tests.once import once

pytestmark = pytest.mark.timeout(600)


@dataclass
class Built:
    """What `python -m build` made: the source distribution of a copy of the clone, and the wheel of that."""

    source: Path
    sdist: Path
    wheel: Path

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as files:
            name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(files.read(name))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(*map(Path, once(tmp_path_factory, "distribution", _build)))


def _build(folder: Path) -> list[str]:
    source, out = folder / "source", folder / "dist"
    unwanted = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(".git", "results", *unwanted))
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source], check=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return [str(path) for path in (source, sdist, wheel)]


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel in it, over the packages of this one, from which no thinwire comes."""
    return Path(once(tmp_path_factory, "installed", lambda folder: str(install(built.wheel, folder))))


def away(installed: Path, folder: Path, *words: str | Path) -> str:
    """What the command says, run in a folder that has nothing to do with the clone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "THINWIRE"))}
    environment |= {"HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [installed / words[0], *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def package_files(root: Path) -> set[str]:
    """All files below thinwire/, through its links."""
    found = (Path(folder) / name for folder, _, names in os.walk(root / "thinwire", followlinks=True) for name in names)
    return {str(path.relative_to(root)) for path in found if path.suffix != ".pyc"}


def test_every_file_of_the_package_is_in_both(built):
    with zipfile.ZipFile(built.wheel) as files:
        in_wheel = {name for name in files.namelist() if ".dist-info/" not in name}
    with tarfile.open(built.sdist) as files:
        names = {member.name.partition("/")[2] for member in files.getmembers() if member.isfile()}
    expected = package_files(built.source)
    assert in_wheel == expected
    assert {name for name in names if name.startswith("thinwire/")} == expected
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_the_metadata_can_be_read_on_a_package_index(built):
    metadata = built.metadata()
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "from thinwire.optim import OneBitAdam" in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")] == []
    addresses = [line.partition(", ")[2] for line in metadata.get_all("Project-URL")]
    assert addresses
    assert [address for address in addresses if not address.startswith("https://")] == []
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert {"optim", "worker", "service", "all"} <= set(metadata.get_all("Provides-Extra"))


FILES = """
from importlib.resources import files
from pathlib import Path

import thinwire
from thinwire.comm.kernels.cuda import int8, kernels
from thinwire.optim.kernels import lamb, updates
from thinwire.service.launch.kuberay.manifest import read_template

assert Path(thinwire.__file__).is_relative_to({environment!r}), thinwire.__file__
assert (files("thinwire") / "py.typed").is_file()
assert all("__global__" in source() for source in (int8.source, kernels.source, lamb.source, updates.source))
read_template(None)
"""

SERVICE = """
from pathlib import Path

from thinwire.service.config import Settings
from thinwire.service.main import create_app
from thinwire.service.server import make_launcher

settings = Settings(home=Path("home").absolute(), launcher="fake")
app = create_app(settings, make_launcher(settings))
app.state.plane.db.upgrade()
assert "/v1/jobs" in app.openapi()["paths"]
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("source", [FILES, STEPS, SERVICE], ids=["files", "optimizer", "service"])
def test_what_is_installed_works_away_from_the_clone(installed, tmp_path, source):
    away(installed, tmp_path, "python", "-c", source.replace("{environment!r}", repr(str(installed.parent))))


@pytest.mark.slow
def test_the_command_line_works_away_from_the_clone(installed, tmp_path):
    assert "quickstart" in away(installed, tmp_path, "thinwire", "--help")
    first_job = away(
        installed, tmp_path, "python", "-c", "from thinwire.cli.quickstart import first_job; print(first_job())"
    ).strip()
    assert Path(first_job).is_relative_to(installed.parent)
    assert "kind: RayJob" in away(installed, tmp_path, "thinwire", "manifest", first_job)
