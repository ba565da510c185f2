"""A release out of a tag: what is unfit is refused, and two builds of one commit are the same bytes."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from deploy import release as made
from deploy.release import PLACES, ReleaseRefused, build, check, digests, notes, refuse_unfit, stated, write_version
from tests.extras import ROOT


def test_all_files_say_one_version():
    assert len({version for found in stated(ROOT).values() for version in found}) == 1


def git(root: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *who, "-C", root, *words], check=True, capture_output=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the files that hold the version, all of them committed, at v0.1.0."""
    root = tmp_path / "clone"
    for name in (*PLACES, "CHANGELOG.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    write_version(root, "0.1.0")
    git(root.parent, "init", "-q", str(root))
    git(root, "add", "-A")
    git(root, "commit", "-qm", "all")
    git(root, "tag", "v0.1.0")
    return root


def released(root: Path, version: str) -> None:
    changes = root / "CHANGELOG.md"
    changes.write_text(f"# Changelog\n\n## In {version}\n\n* New.\n\n{changes.read_text().removeprefix('# Changelog')}")
    write_version(root, version)
    git(root, "commit", "-qam", f"Version {version}")
    git(root, "tag", f"v{version}")


def refused(root: Path, version: str, said: str) -> None:
    with pytest.raises(ReleaseRefused, match=re.escape(said)):
        refuse_unfit(root, version)


def test_a_tag_whose_files_say_it_is_fit(clone):
    released(clone, "0.2.0")
    refuse_unfit(clone, "0.2.0")
    assert {version for found in stated(clone).values() for version in found} == {"0.2.0"}


def test_what_is_unfit_is_refused_with_what_to_do(clone):
    refused(clone, "0.2", "must be three numbers")
    refused(clone, "0.2.0; rm -rf /", "must be three numbers")
    refused(clone, "0.2.0", "there is no tag v0.2.0")
    git(clone, "tag", "v0.2.0")
    refused(clone, "0.2.0", "pyproject.toml: 0.1.0")
    git(clone, "tag", "-d", "v0.2.0")
    git(clone, "branch", "before")
    released(clone, "0.2.0")
    git(clone, "tag", "-f", "v0.2.0", "before")
    refused(clone, "0.2.0", "and HEAD at")
    git(clone, "tag", "-f", "v0.2.0")
    refuse_unfit(clone, "0.2.0")
    (clone / "left.txt").write_text("behind")
    refused(clone, "0.2.0", "left.txt")
    (clone / "left.txt").unlink()
    with pytest.raises(ReleaseRefused, match=re.escape("the files say 0.2.0, which is later")):
        write_version(clone, "0.1.9")
    git(clone, "tag", "v0.1.9")
    refused(clone, "0.1.9", "must be above 0.2.0")


def test_the_notes_are_the_section_of_the_version_alone(clone):
    changes = clone / "CHANGELOG.md"
    changes.write_text("# Changelog\n\nWords.\n\n## New\n\n* First.\n")
    write_version(clone, "0.2.0")
    text = changes.read_text()
    changes.write_text(text.replace("# 0.2.0", "## Not yet\n\n* Later.\n\n# 0.2.0") + "\n# 0.1.0\n\n* Old.\n")
    assert notes(clone, "0.2.0") == "# Thinwire 0.2.0\n\n## New\n\n* First.\n"
    write_version(clone, "0.2.0")
    assert changes.read_text().count("# 0.2.0") == 1, "a heading that is there stays where it is"
    with pytest.raises(ReleaseRefused, match=re.escape("no entry below a heading '# 0.3.0'")):
        notes(clone, "0.3.0")


def test_notes_that_are_released_do_not_become_those_of_the_next_version(clone):
    released(clone, "0.2.0")
    before = {name: (clone / name).read_bytes() for name in (*PLACES, "CHANGELOG.md")}
    with pytest.raises(ReleaseRefused, match=re.escape("of no change since 0.2.0")):
        write_version(clone, "0.3.0")
    assert {name: (clone / name).read_bytes() for name in before} == before
    changes = clone / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("# 0.2.0", "## New\n\n* Third.\n\n# 0.2.0"))
    write_version(clone, "0.3.0")
    assert notes(clone, "0.3.0") == "# Thinwire 0.3.0\n\n## New\n\n* Third.\n"


def test_an_archive_says_nothing_of_when_and_by_whom_it_was_made(tmp_path):
    found = []
    for name, mode in (("first", 0o600), ("second", 0o664)):
        folder = tmp_path / name
        folder.mkdir()
        for one in ("b", "a") if name == "first" else ("a", "b"):
            (folder / one).write_text(one)
            (folder / one).chmod(mode)
        with tarfile.open(folder / "x.tar.gz", "w:gz") as files:
            for one in sorted(folder.glob("?"), reverse=name == "first"):
                files.add(one, one.name)
        (folder / "out").mkdir()
        found.append(digests([made.repacked(folder / "x.tar.gz", folder / "out", 1_700_000_000)]))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_release_of_this_clone_is_built_checked_and_written_once(tmp_path, monkeypatch):
    root = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(ROOT), str(root))
    released(root, "9.9.9")
    said: list[str] = []
    made.release(root, "9.9.9", tmp_path / "dist", said.append)
    place = tmp_path / "dist" / "9.9.9"
    names = {path.name for path in place.iterdir()}
    wheel = "thinwire-9.9.9-py3-none-any.whl"
    assert names == {
        "NOTES.md",
        "SHA256SUMS",
        wheel,
        "thinwire-9.9.9.tar.gz",
        "thinwire-9.9.9.tgz",
        "thinwire-9.9.9-images.tar.gz",
    }
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=place, check=True)
    made.release(root, "9.9.9", tmp_path / "dist", said.append)
    assert "has it already" in said[-1]
    (place / "SHA256SUMS").write_text("")
    with pytest.raises(ReleaseRefused, match="has something else"):
        made.release(root, "9.9.9", tmp_path / "dist", said.append)
    built = build(root, "9.9.9", tmp_path / "again")
    with pytest.raises(ReleaseRefused, match="must say"):
        check(built, "9.9.8")
