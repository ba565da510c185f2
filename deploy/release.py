"""A release: wheel, source distribution, chart and the context of the images, out of a tag, checked outside of it.

    make version VERSION=0.2.0                 writes the version wherever it stands, and its heading in CHANGELOG.md
    git commit -am "Version 0.2.0" && git tag v0.2.0
    make release VERSION=0.2.0                 dist/0.2.0/ with SHA256SUMS and NOTES.md

Everything is built twice, in two folders with the files of the tag and nothing else, and must be the same bytes: so
whoever has the tag can build it and compare. What is not as it must be is refused before anything is written.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$")
NUMBER = r"(\d+\.\d+\.\d+)"
PLACES: dict[str, tuple[str, ...]] = {
    "pyproject.toml": (rf'(?m)^version = "{NUMBER}"$',),
    "thinwire/__init__.py": (rf'(?m)^__version__ = "{NUMBER}"$',),
    "deploy/chart/Chart.yaml": (rf"(?m)^version: {NUMBER}$", rf'(?m)^appVersion: "{NUMBER}"$'),
    "deploy/images/service.Dockerfile": (rf"-t thinwire-service:{NUMBER} ",),
    "deploy/images/worker.Dockerfile": (rf"-t thinwire-worker:{NUMBER} ",),
    "deploy/manifests/thinwire.yaml": (
        rf'app.kubernetes.io/version: "{NUMBER}"',
        rf"image: thinwire-service:{NUMBER}\b",
    ),
    "service/launch/kuberay/rayjob.yaml": (rf"image: thinwire-worker:{NUMBER}\b",),
    "docs/kubernetes.md": (rf"thinwire-(?:service|worker):{NUMBER}\b", rf"image\.tag={NUMBER}\b"),
}
"""Where the version stands, by file: each pattern is there at least once."""
CHANGELOG = "CHANGELOG.md"
HEADING = "# {version}"
"""What begins a version in CHANGELOG.md. What stands above the first is not released."""


class ReleaseRefused(Exception):
    """What is to be released is not as it must be; the message says what, and what to do."""


def stated(root: Path) -> dict[str, list[str]]:
    """The versions that stand in each file of PLACES. Raises: ReleaseRefused where there is none."""
    found: dict[str, list[str]] = {}
    for name, patterns in PLACES.items():
        text = (root / name).read_text()
        for pattern in patterns:
            versions = re.findall(pattern, text)
            if not versions:
                raise ReleaseRefused(f"{name} has no version where {pattern!r} looks for it: see PLACES")
            found.setdefault(name, []).extend(versions)
    return found


def write_version(root: Path, version: str) -> None:
    """Put the version into all places, and its heading into CHANGELOG.md. Modifies the files of PLACES.

    Raises: ReleaseRefused where the files say a later one, or CHANGELOG.md has nothing that is not released.
    """
    number, newest = _checked(version), max(_checked(one) for found in stated(root).values() for one in found)
    if number < newest:
        raise ReleaseRefused(f"VERSION = {version}: the files say {'.'.join(map(str, newest))}, which is later")
    changes, heading = root / CHANGELOG, HEADING.format(version=version)
    text = changes.read_text()
    if heading not in text.splitlines():
        before, first, after = text.partition("\n## ")
        if (above := re.findall(rf"(?m)^# {NUMBER}$", before)) or not first:
            since = f" since {above[0]}" if above else ""
            raise ReleaseRefused(
                f"{CHANGELOG} says of no change{since}: write what has changed above, below a ## of its own"
            )
        changes.write_text(f"{before.rstrip()}\n\n{heading}\n{first}{after}")
    for name, patterns in PLACES.items():
        path = root / name
        text = path.read_text()
        for pattern in patterns:
            text = re.sub(pattern, lambda match: match[0].replace(match[1], version), text)
        path.write_text(text)


def notes(root: Path, version: str) -> str:
    """What CHANGELOG.md says of the version. Raises: ReleaseRefused where it says nothing."""
    heading, lines, inside = HEADING.format(version=version), [], False
    for line in (root / CHANGELOG).read_text().splitlines():
        if line.startswith("# "):
            inside = line == heading
        elif inside:
            lines.append(line)
    text = "\n".join(lines).strip()
    if not re.search(r"^[*-] ", text, flags=re.MULTILINE):
        raise ReleaseRefused(
            f"{CHANGELOG} has no entry below a heading {heading!r}: `make version VERSION={version}` writes it above "
            "what has changed"
        )
    return f"# Thinwire {version}\n\n{text}\n"


def _checked(version: str) -> tuple[int, ...]:
    match = VERSION.match(version)
    if match is None:
        raise ReleaseRefused(f"VERSION = {version!r}: must be three numbers, such as 0.2.0")
    return tuple(map(int, match.groups()))


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseRefused(f"git {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def refuse_unfit(root: Path, version: str) -> None:
    """The tree is clean, the tag is at HEAD and newer than those before it, and all files say the version.

    Raises: ReleaseRefused.
    """
    number, tag = _checked(version), f"v{version}"
    if changed := _git(root, "status", "--porcelain"):
        raise ReleaseRefused(f"the tree has changes that are not committed:\n{changed}\ncommit or remove them")
    tags = _git(root, "tag", "--list").split()
    if tag not in tags:
        raise ReleaseRefused(f"there is no tag {tag}: a release is what a tag names. `git tag {tag}` puts it at HEAD")
    of_tag, head = _git(root, "rev-list", "-n", "1", tag), _git(root, "rev-parse", "HEAD")
    if of_tag != head:
        raise ReleaseRefused(f"the tag {tag} is at {of_tag[:12]} and HEAD at {head[:12]}: `git checkout {tag}`")
    before = [one for one in _git(root, "tag", "--merged", "HEAD").split() if one != tag]
    newest = max((_checked(one[1:]) for one in before if one[:1] == "v" and VERSION.match(one[1:])), default=(0, 0, 0))
    if number <= newest:
        raise ReleaseRefused(
            f"VERSION = {version}: must be above {'.'.join(map(str, newest))}, which is tagged before it"
        )
    other = {name: sorted(set(found) - {version}) for name, found in stated(root).items() if set(found) != {version}}
    if other:
        lines = [f"  {name}: {', '.join(found)}" for name, found in other.items()]
        raise ReleaseRefused(
            "\n".join([f"these files do not say {version}:", *lines, f"`make version VERSION={version}`"])
        )
    notes(root, version)


@dataclass(frozen=True, slots=True)
class Built:
    """The files of a release."""

    sdist: Path
    wheel: Path
    chart: Path
    images: Path

    def __iter__(self) -> Iterator[Path]:
        return iter((self.sdist, self.wheel, self.chart, self.images))


def build(root: Path, version: str, out: Path) -> Built:
    """All files of a release, of what HEAD has, into a new folder. Raises: ReleaseRefused."""
    out.mkdir(parents=True)
    epoch = _git(root, "log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory(prefix="thinwire-release-") as folder:
        source = Path(folder) / "source"
        source.mkdir()
        archive = subprocess.run(["git", "-C", root, "archive", "HEAD"], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(source, filter="tar")
        environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch, "PYTHONDONTWRITEBYTECODE": "1"}

        def run(*words: str | Path, cwd: Path) -> None:
            _run(words, cwd, environment)

        made = Path(folder) / "made"
        run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", made, source, cwd=Path(folder))
        sdist = repacked(next(made.glob("*.tar.gz")), out, int(epoch))
        unpacked = Path(folder) / "unpacked"
        with tarfile.open(sdist) as files:
            files.extractall(unpacked, filter="data")
        top = next(unpacked.iterdir())
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, top, cwd=Path(folder))
        run(_helm(), "package", source / "deploy/chart", "--destination", made, cwd=Path(folder))
        chart = repacked(made / f"thinwire-{version}.tgz", out, int(epoch))
        images = out / f"thinwire-{version}-images.tar.gz"
        write_archive(images, list(_of_images(source)), int(epoch))
        return Built(sdist, next(out.glob("*.whl")), chart, images)


def _helm() -> Path:
    return Path(sys.executable).parent / "helm"


def _run(words: Iterable[str | Path], cwd: Path, environment: dict[str, str]) -> str:
    words = [str(word) for word in words]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseRefused(f"{' '.join(words)} has failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


Entry = tuple[tarfile.TarInfo, bytes]


def repacked(archive: Path, out: Path, epoch: int) -> Path:
    """The archive with the same files and nothing of when and by whom it was made, in the folder `out`."""
    with tarfile.open(archive) as files:
        entries = [
            (one, found.read() if (found := files.extractfile(one)) and one.isreg() else b"")
            for one in files.getmembers()
        ]
    path = out / archive.name
    write_archive(path, entries, epoch)
    return path


def write_archive(path: Path, entries: Iterable[Entry], epoch: int) -> None:
    """A .tar.gz of these, in order of name, all of one time and of nobody."""
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as files,
    ):
        for one, content in sorted(entries, key=lambda entry: entry[0].name):
            clean = tarfile.TarInfo(one.name)
            clean.type, clean.linkname, clean.size, clean.mtime = one.type, one.linkname, len(content), epoch
            clean.mode = 0o755 if one.isdir() or one.mode & 0o100 else 0o644
            files.addfile(clean, io.BytesIO(content))


def _of_images(source: Path) -> Iterable[Entry]:
    """What .dockerignore leaves of the tree: docker build -f deploy/images/service.Dockerfile - < FILE."""
    wanted = [line[1:] for line in (source / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for path in sorted(one for name in wanted for one in _below(source / name)):
        info = tarfile.TarInfo(str(path.relative_to(source)))
        info.mode = path.lstat().st_mode
        if path.is_symlink():
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            yield info, b""
        else:
            yield info, path.read_bytes()


def _below(path: Path) -> Iterable[Path]:
    if path.is_symlink() or path.is_file():
        return [path]
    return [one for one in path.rglob("*") if one.is_symlink() or one.is_file()]


def digests(files: Iterable[Path]) -> dict[str, str]:
    """sha256 of each file, by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def install(wheel: Path, at: Path) -> Path:
    """The `bin` of a new environment with the wheel in it, over the packages of this one, which bring no thinwire."""
    venv.create(at, symlinks=True)
    python = at / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-compile", wheel], check=True)
    site = next((at / "lib").glob("python*/site-packages"))
    # After its own: and the files *.pth in those folders, such as that of the clone, are not read.
    folders = [path for path in map(Path, sys.path) if path.name == "site-packages"]
    (site / "packages_of_the_release.pth").write_text("".join(f"{folder}\n" for folder in folders))
    return at / "bin"


OPENAPI = """
from pathlib import Path
from thinwire.service.config import Settings
from thinwire.service.main import create_app
from thinwire.service.server import make_launcher
settings = Settings(home=Path("home").absolute(), launcher="fake")
print(create_app(settings, make_launcher(settings)).openapi()["info"]["version"])
"""


def check(built: Built, version: str) -> None:
    """Each file works in a folder that has nothing to do with the clone, and says the version.

    Raises: ReleaseRefused.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-outside-") as folder:
        outside = Path(folder)
        bin_ = install(built.wheel, outside / "environment")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "THINWIRE"))}
        environment |= {"HOME": folder, "PYTHONDONTWRITEBYTECODE": "1"}

        def said(what: str, expected: str, *words: str | Path) -> None:
            found = _run(words, outside, environment)
            if expected not in found:
                raise ReleaseRefused(f"{what} says {found.strip()[-200:]!r}: must say {expected!r}")

        said("the wheel's command", f"thinwire {version}", bin_ / "thinwire", "--version")
        said("the OpenAPI document", version, bin_ / "python", "-c", OPENAPI)
        said("the chart", f"thinwire-service:{version}", _helm(), "template", "thinwire", built.chart)
    with tarfile.open(built.images) as files:
        names = set(files.getnames())
    needed = {"pyproject.toml", "deploy/images/install.sh", "deploy/images/service.Dockerfile", "thinwire/comm"}
    if missing := needed - names:
        raise ReleaseRefused(f"{built.images.name} has no {sorted(missing)}: see .dockerignore")


def release(root: Path, version: str, out: Path, say: Callable[[str], None]) -> None:
    """Build, compare, check and write a release into out/VERSION. Raises: ReleaseRefused; then nothing is there."""
    refuse_unfit(root, version)
    place = out / version
    with tempfile.TemporaryDirectory(prefix="thinwire-release-") as folder:
        say("building ...")
        first, again = (build(root, version, Path(folder) / name) for name in ("first", "again"))
        sums = digests(first)
        if sums != digests(again):
            other = [name for name, one in digests(again).items() if sums.get(name) != one]
            raise ReleaseRefused(f"two builds of one commit differ in {other}: something in them is of the machine")
        say("checking outside of the clone ...")
        check(first, version)
        texts = {
            "NOTES.md": notes(root, version),
            "SHA256SUMS": "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())),
        }
        if place.exists():
            there = place / "SHA256SUMS"
            if there.is_file() and there.read_text() == texts["SHA256SUMS"]:
                say(f"{place} has it already")
                return
            raise ReleaseRefused(f"{place} is there and has something else: move it away")
        for name, text in texts.items():
            (Path(folder) / "first" / name).write_text(text)
        out.mkdir(parents=True, exist_ok=True)
        whole = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=out))
        try:
            shutil.copytree(Path(folder) / "first", whole, dirs_exist_ok=True)
            whole.chmod(0o755)
            whole.rename(place)
        except BaseException:
            shutil.rmtree(whole, ignore_errors=True)
            raise
    say(texts["SHA256SUMS"] + f"in {place}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("version", help="three numbers, such as 0.2.0")
    parser.add_argument("--write", action="store_true", help="write the version into the files, and build nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the release")
    asked = parser.parse_args()
    try:
        if asked.write:
            write_version(ROOT, asked.version)
        else:
            release(ROOT, asked.version, asked.out, lambda text: print(text, flush=True))  # noqa: T201 - a command
    except ReleaseRefused as error:
        sys.exit(f"no release: {error}")


if __name__ == "__main__":
    main()
