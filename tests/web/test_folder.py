"""The folder of a script, packed by the browser: what the CLI would pack of it, sent, and made into a job."""

from __future__ import annotations

import base64
import hashlib
import random
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

import pytest

from thinwire.cli.packing import list_folder, pack
from thinwire.contract import packages

if TYPE_CHECKING:
    from tests.web.browser import Desk

pytestmark = pytest.mark.slow

FILES = {
    "train.py": b"#!/usr/bin/env python\nprint('x')\n",
    "data/big.bin": random.Random(1).randbytes(3 << 20),
    "data/keep.csv": b"1,2\n",
    "data/.gitignore": "\ufeff*\r\n!*.csv\r\n!.gitignore\r\n".encode(),
    ".gitignore": b"# mine\n*.log\n/out/\n!kept.log\nsub/**/tmp\n[a-c].txt\n\\#odd\ntrailing \n",
    ".rayignore": b"ray-*\n",
    "a.txt": b"a",
    "d.txt": b"d",
    "#odd": b"",
    "trailing": b"t",
    "run.log": b"l",
    "kept.log": b"k",
    "out/o": b"o",
    "lib/out/o": b"o",
    "sub/x/y/tmp": b"t",
    "sub/x/y/not": b"n",
    "ray-1": b"r",
    "venv/lib/x.py": b"v",
    "lib/__pycache__/x.pyc": b"c",
    "lib/\u00fcn\u00ef.py": "\u00fc = 1\n".encode(),
    "with space/x.py": b"x" * 5000,
    "empty": b"",
}
READ_MODULE = "async name => Object.entries(await import(name)).filter(([, one]) => typeof one === 'number')"


def folder_of(place: Path) -> Path:
    place.mkdir()
    for name, content in FILES.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if content.startswith(b"#!") else 0o644)
    return place


def test_a_folder_is_packed_as_the_command_line_packs_it_and_made_into_a_job(desk: Desk, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "my folder")
    page = desk.signed_in("#/submit")
    chosen = page.get_by_label("and a script's folder")
    chosen.set_input_files(folder)
    page.get_by_role("status").filter(has_text="Sent ").wait_for()
    assert "Left out: " in page.get_by_role("status").filter(has_text="Sent ").inner_text()
    assert page.get_by_label("entry", exact=True).input_value() == "train.py"
    assert page.get_by_label("name", exact=True).first.input_value() == "train"
    sha256 = page.get_by_label("package", exact=True).input_value()
    [kept] = (desk.service.home / "packages").glob(f"{sha256}.zip")
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == sha256
    expected = pack(list_folder(folder))
    with expected.file, ZipFile(expected.file) as theirs, ZipFile(kept) as ours:
        assert ours.testzip() is None
        assert ours.namelist() == theirs.namelist()
        for one, other in zip(ours.infolist(), theirs.infolist(), strict=True):
            assert ours.read(one) == theirs.read(other)
            for what in ("date_time", "create_system", "external_attr", "compress_type", "flag_bits"):
                assert getattr(one, what) == getattr(other, what), (one.filename, what)
    chosen.set_input_files(folder)
    page.get_by_text("The service has this already:").wait_for()
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url("**/#/jobs/train-*")
    job = desk.service.job(page.url.rpartition("/")[2])
    assert job["spec"]["recipe"]["package"] == sha256
    assert desk.complaints == []


def test_what_is_no_package_is_refused_before_anything_is_sent(desk: Desk, tmp_path: Path) -> None:
    page = desk.signed_in("#/submit")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if "/packages/" in request.url else None)
    chosen = page.get_by_label("and a script's folder")
    for name, files, words in (
        ("nothing", {".gitignore": b"*\n"}, "All of nothing is left out"),
        ("odd", {"a\x01b.py": b"x"}, "cannot be printed"),
        ("zeros", {"zeros.bin": b"\0" * (101 << 20)}, "what becomes so small is no code"),
        ("large", {"a/large.bin": random.Random(2).randbytes(101 << 20), "train.py": b"x"}, "The largest: a/ (106 MB)"),
    ):
        folder = tmp_path / name
        for file, content in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        chosen.set_input_files(folder)
        page.get_by_role("alert").get_by_text(words).wait_for()
        assert chosen.input_value() == "", "the same folder, mended, could not be chosen again"
    assert sent == []
    assert desk.complaints == []


def test_the_limits_and_the_hash_are_those_of_the_service(desk: Desk) -> None:
    page = desk.page()
    limits = dict(page.evaluate(READ_MODULE, f"{desk.url}web/package.js"))
    assert limits == {name: getattr(packages, name) for name in ("MOST_BYTES", "MOST_ENTRIES", "MOST_UNPACKED_BYTES")}
    chance = random.Random(3)
    for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 1000, (1 << 20) - 9, 1 << 20, (1 << 20) + 57):
        content = chance.randbytes(size)
        hashed = page.evaluate(
            """async ([name, bytes]) => (await import(name)).sha256(new Blob([Uint8Array.from(atob(bytes),
               (one) => one.charCodeAt(0))]))""",
            [f"{desk.url}web/package.js", base64.b64encode(content).decode()],
        )
        assert hashed == hashlib.sha256(content).hexdigest(), size
