"""What of a folder goes into its package, and that the same content is the same package."""

from __future__ import annotations

import os
import socket
import subprocess
import zipfile
from pathlib import Path

import pytest

from thinwire.cli import packing
from thinwire.cli.packing import Unpackable, list_folder, pack
from thinwire.service.packages.store import check_zip


def made(folder: Path, *names: str, **contents: str) -> Path:
    """Files in the folder; a name with a slash at its end is an empty folder. contents: by the name without suffix."""
    for name in names:
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(contents.get(path.stem, name))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in list_folder(folder).entries)


def test_all_that_is_not_ignored_is_packed_and_unpacks_to_the_same(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", "train.py", "src/model.py", "out/", "data/words.txt", "tool.sh")
    (folder / "tool.sh").chmod(0o755)
    packed = pack(list_folder(folder))
    (tmp_path / "p.zip").write_bytes(packed.file.read())
    check_zip(tmp_path / "p.zip")  # the service takes it
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        assert archive.namelist() == ["data/words.txt", "out/", "src/model.py", "tool.sh", "train.py"]
        assert archive.read("src/model.py") == b"src/model.py"
        assert [archive.getinfo(name).external_attr >> 16 & 0o777 for name in ("tool.sh", "train.py")] == [0o755, 0o644]
    assert packed.size == (tmp_path / "p.zip").stat().st_size


def test_the_same_content_is_the_same_package_and_another_is_another(tmp_path: Path) -> None:
    one, other = (made(tmp_path / where, "b.py", "a/c.py", "z.py") for where in ("one", "other"))
    os.utime(other / "b.py", (1, 1))
    (other / "z.py").chmod(0o600)
    first, second = pack(list_folder(one)).sha256, pack(list_folder(other)).sha256
    assert first == second
    (other / "b.py").chmod(0o700)
    assert pack(list_folder(other)).sha256 != first
    (other / "b.py").chmod(0o600)
    (other / "b.py").write_text("else")
    assert pack(list_folder(other)).sha256 != first


def test_what_is_ignored_is_what_git_ignores(tmp_path: Path) -> None:
    everything = [
        *("train.py", "a.pt", "keep.pt", "build/x", "src/build/y", "src/model.py", "src/cache/z", "src/keep/cache/w"),
        *("logs/run.log", "logs/keep.log", "docs/a.md", "docs/b/c.md", "#odd", "trailing "),
    ]
    made(tmp_path, *everything)
    (tmp_path / ".gitignore").write_text("*.pt\n!keep.pt\n/build/\nlogs/*\n!logs/keep.log\n\\#odd\n# a comment\n")
    (tmp_path / "src" / ".gitignore").write_text("cache\n!/keep/cache\nmodel.py\n!model.py\n")
    (tmp_path / "docs" / ".gitignore").write_text("\ufeff**/c.md\n")  # as editors of Windows begin a file
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    listed = ["git", "ls-files", "--others", "--exclude-standard", "-z"]
    said = subprocess.run(listed, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert names(tmp_path) == sorted(said.strip("\0").split("\0"))
    assert "src/keep/cache/w" in said


def test_rayignore_leaves_out_more_and_takes_nothing_back(tmp_path: Path) -> None:
    made(tmp_path, "train.py", "big/data.bin", "a.pt")
    (tmp_path / ".gitignore").write_text("*.pt\n")
    (tmp_path / ".rayignore").write_text("big/\n!a.pt\n.*ignore\n")
    listing = list_folder(tmp_path)
    assert [entry.name for entry in listing.entries] == ["train.py"]
    assert listing.left_out == [".gitignore", ".rayignore", "a.pt", "big"]


def test_the_repository_around_the_folder_counts_and_what_it_leaves_out_as_a_whole_was_named(tmp_path: Path) -> None:
    made(
        tmp_path, ".git/HEAD", "examples/train.py", "examples/a.pt", "examples/b/x", "scratch/train.py", "scratch/a.pt"
    )
    (tmp_path / ".gitignore").write_text("*.pt\n/examples/b\nscratch/\n")
    made(tmp_path.parent, ".gitignore", gitignore="*.py")
    assert names(tmp_path / "examples") == ["train.py"]
    assert names(tmp_path / "scratch") == ["a.pt", "train.py"]


def test_what_git_takes_for_a_pattern_that_matches_nothing_leaves_nothing_out(tmp_path: Path) -> None:
    made(tmp_path, "train.py", "a.pt", "keep.pt", "b.log", "name", "c\x0c.txt")
    (tmp_path / ".gitignore").write_bytes(b"*.pt\n!\n! \nname\\\n\\\n!keep.pt\r\nb.log\\\\\\\nc\x0c.txt\n")
    assert list_folder(tmp_path).left_out == ["a.pt", "c\x0c.txt"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    asked = ["git", "-C", str(tmp_path), "status", "--porcelain", "--ignored", "-z"]
    told = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split("\0")
    assert sorted(line.removeprefix("!! ") for line in told if line.startswith("!!")) == ["a.pt", "c\x0c.txt"]


def test_histories_and_environments_are_never_packed(tmp_path: Path) -> None:
    made(tmp_path, "train.py", ".git/HEAD", ".venv/bin/python", "src/__pycache__/x.pyc", "src/m.py", ".env.example")
    assert names(tmp_path) == [".env.example", "src/m.py", "train.py"]


def test_a_link_inside_is_what_it_leads_to_and_one_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", "train.py", "real/x.py")
    (folder / "link.py").symlink_to("real/x.py")
    (folder / "linked").symlink_to("real")
    assert names(folder) == ["link.py", "linked/x.py", "real/x.py", "train.py"]
    made(tmp_path, "outside.txt")
    (folder / "out").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(Unpackable, match=r"the link .*/a/out leads to .*/outside.txt, out of the folder"):
        list_folder(folder)
    (folder / ".rayignore").write_text("out\n")
    assert "out" not in names(folder)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: (folder / "x").symlink_to("nowhere"), "leads to nothing"),
        (lambda folder: (folder / "x").symlink_to("x"), "leads to nothing"),
        (lambda folder: (folder / "x").symlink_to("."), "which it lies in"),
        (lambda folder: (folder / "x").symlink_to("/etc"), "out of the folder"),
        (lambda folder: os.mkfifo(folder / "x"), "is neither a file nor a folder"),
        (lambda folder: (folder / "a\nb").touch(), "cannot be printed: give it another name"),
        (lambda folder: (folder / "a\\b").touch(), "holds a backslash"),
        (lambda folder: os.open(os.fsencode(folder) + b"/\xff", os.O_CREAT), "is not UTF-8"),
        (lambda folder: (folder / ".gitignore").write_text("[z-a]\n"), r"\.gitignore: .* z-a .*: mend the pattern"),
    ],
)
def test_what_cannot_be_packed_is_told_with_its_name(tmp_path: Path, make: object, words: str) -> None:
    assert callable(make)
    make(made(tmp_path, "train.py"))
    with pytest.raises(Unpackable, match=words):
        list_folder(tmp_path)


def test_a_socket_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made(tmp_path, "train.py"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s")  # a long path would not fit
        with pytest.raises(Unpackable, match="is neither a file nor a folder"):
            list_folder(tmp_path)


def test_too_many_files_and_too_many_bytes_name_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "train.py", "data/a", "data/b", "data/c")
    (tmp_path / "data" / "a").write_bytes(os.urandom(3000))
    monkeypatch.setattr(packing, "MOST_ENTRIES", 2)
    with pytest.raises(Unpackable, match=r"has more than 2 files; .*The largest: data/ \(3.01 kB\)"):
        list_folder(tmp_path)
    monkeypatch.setattr(packing, "MOST_ENTRIES", 50)
    monkeypatch.setattr(packing, "MOST_BYTES", 1000)
    with pytest.raises(Unpackable, match=r"as a zip; a package may have 1 kB. The largest: data/ .*\.rayignore"):
        pack(list_folder(tmp_path))
    monkeypatch.setattr(packing, "MOST_UNPACKED_BYTES", 1000)
    with pytest.raises(Unpackable, match=r"has 3.02 kB; a package may have 1 kB"):
        list_folder(tmp_path)


def test_a_file_that_goes_while_it_is_packed_is_told(tmp_path: Path) -> None:
    listing = list_folder(made(tmp_path, "train.py"))
    (tmp_path / "train.py").unlink()
    with pytest.raises(Unpackable, match=r"train.py cannot be packed: No such file"):
        pack(listing)


def test_a_folder_that_is_none_is_told(tmp_path: Path) -> None:
    made(tmp_path, "train.py")
    with pytest.raises(Unpackable, match="is no folder"):
        list_folder(tmp_path / "train.py")
    with pytest.raises(Unpackable, match="missing cannot be read: No such file"):
        list_folder(tmp_path / "missing")
