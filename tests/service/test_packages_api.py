"""PUT and GET /v1/packages: what is taken, what is refused, what goes again; and the jobs that name packages."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import shutil
import stat
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.covering import parametrize
from tests.service.control_plane_harness import Service
from thinwire.contract.packages import MOST_ENTRIES, MOST_UNPACKED_BYTES
from thinwire.service.launch.protocol import LaunchState
from thinwire.service.packages import store

HOUR_S = 3600.0
BYTES = {"Content-Type": "application/octet-stream"}


def zipped(files: dict[str, bytes] | None = None, change: Callable[[zipfile.ZipFile], None] | None = None) -> bytes:
    """A zip of these files, and of what `change` writes into it."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in ({"train.py": b"print(1)\n"} if files is None else files).items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # of no time: the same bytes again
        if change is not None:
            change(archive)
    return held.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(service: Service, data: bytes, name: str | None = None, content: Any = None) -> Any:
    body = data if content is None else content
    return service.client.put(f"/v1/packages/{name or sha(data)}", content=body, headers=BYTES)


def kept(service: Service) -> list[str]:
    """All that lies in the folder of packages."""
    folder = service.home / "packages"
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def script(service: Service, package: str, **changes: Any) -> Any:
    recipe = {"name": "script", "entry": "train.py", "package": package, **changes}
    return service.client.post("/v1/jobs", json={"recipe": recipe})


def test_a_package_is_taken_once_and_found_again(service: Service) -> None:
    data = zipped()
    assert service.client.get(f"/v1/packages/{sha(data)}").json()["code"] == "package_not_found"
    taken = put(service, data)
    assert (taken.status_code, taken.json()) == (201, {"sha256": sha(data), "bytes": len(data)})
    assert service.client.get(f"/v1/packages/{sha(data)}").json() == taken.json()
    again = put(service, data)
    assert (again.status_code, again.json()) == (200, taken.json())
    assert kept(service) == [f"{sha(data)}.zip"]
    assert stat.S_IMODE((service.home / "packages" / kept(service)[0]).stat().st_mode) == 0o600


def odd(name: str, **attributes: Any) -> bytes:
    """A zip with one entry that is written as it comes."""
    info = zipfile.ZipInfo("x")
    info.filename = info.orig_filename = name
    for field, value in attributes.items():
        setattr(info, field, value)
    return zipped(change=lambda archive: archive.writestr(info, b"x"))


def patched(data: bytes, *changes: tuple[bytes, int, bytes]) -> bytes:
    """Bytes written over, so far behind the last place of a signature."""
    made = bytearray(data)
    for signature, offset, value in changes:
        at = made.rindex(signature) + offset
        made[at : at + len(value)] = value
    return bytes(made)


def twice() -> bytes:
    def change(archive: zipfile.ZipFile) -> None:
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("train.py", b"2")

    return zipped(change=change)


LINK = (stat.S_IFLNK | 0o777) << 16
CENTRAL, END = b"PK\x01\x02", b"PK\x05\x06"
REFUSED: list[tuple[str, Callable[[], bytes], str]] = [
    ("nothing", lambda: b"", "is no zip: it has 0 bytes"),
    ("no zip", lambda: b"x" * 100, "does not end as a zip does"),
    ("half a zip", lambda: zipped({"train.py": os.urandom(5000)})[:3000], "does not end as a zip does"),
    ("an empty zip", lambda: zipped({}), "holds no file"),
    ("folders alone", lambda: zipped({"a/": b""}), "holds no file"),
    ("a comment", lambda: zipped(change=lambda one: setattr(one, "comment", b"hello")), "with a comment"),
    ("something before it", lambda: b"#!/bin/sh\n" + zipped(), "no part of the zip"),
    ("no directory", lambda: patched(zipped(), (CENTRAL, 0, b"XXXX")), "cannot be read as a zip"),
    ("a long directory", lambda: patched(zipped(), (END, 12, b"\xff\xff\xff\x7f")), "has a directory of"),
    ("a count of zip64", lambda: patched(zipped(), (END, 8, b"\xff\xff\xff\xff")), f"more than {MOST_ENTRIES}"),
    ("two disks", lambda: patched(zipped(), (END, 4, b"\x01")), "of several disks"),
    ("a way out", lambda: odd("../train.py"), "'../train.py' leads out of the folder"),
    ("a way out from inside", lambda: odd("a/../../x"), "leads out of the folder"),
    ("an absolute path", lambda: odd("/etc/passwd"), "'/etc/passwd' is an absolute path"),
    ("a drive", lambda: odd("C:x"), "is an absolute path"),
    ("backslashes", lambda: odd("..\\x"), "holds a backslash"),
    ("a dot", lambda: odd("./x"), "is not written in the shortest way"),
    ("two slashes", lambda: odd("a//x"), "is not written in the shortest way"),
    ("a NUL", lambda: odd("a\0b.py"), "cannot be printed"),
    ("an escape", lambda: odd("a\x1b[2Jb"), "cannot be printed"),
    ("a long name", lambda: odd("a/" * 600 + "x"), "is longer than 1024 bytes"),
    ("a long part", lambda: odd("a" * 300), "longer than 255 bytes"),
    ("a link", lambda: odd("link", external_attr=LINK), "'link' is a link"),
    ("a pipe", lambda: odd("pipe", external_attr=stat.S_IFIFO << 16), "is neither a file nor a folder"),
    ("lzma", lambda: odd("x", compress_type=zipfile.ZIP_LZMA), "is compressed by method 14"),
    ("encrypted", lambda: patched(zipped(), (CENTRAL, 8, b"\x01")), "is encrypted"),
    ("a name in another code", lambda: patched(zipped(), (CENTRAL, 46, b"\xe9")), "is not marked as UTF-8"),
    ("a name that is no UTF-8", lambda: patched(odd("é"), (CENTRAL, 46, b"\xff\xff")), "cannot be read as a zip"),
    ("a name twice", twice, "'train.py' is there twice"),
    ("a file in a file", lambda: zipped({"a": b"", "a/b": b""}), "'a' is a file, and a folder with files"),
    ("a bomb", lambda: patched(zipped(), (CENTRAL, 24, (120 << 20).to_bytes(4, "little"))), "for one is no code"),
    ("a large bomb", lambda: patched(zipped(), (CENTRAL, 24, b"\xff\xff\xff\x7f")), f"at most {MOST_UNPACKED_BYTES}"),
    ("overlapping entries", lambda: patched(zipped(), (CENTRAL, 20, b"\xff\xff\xff\x01")), "some lie on others"),
]


@pytest.mark.parametrize(("made", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_zip_that_may_not_be_unpacked_is_refused_and_leaves_nothing(
    shared_service: Service, made: Callable[[], bytes], words: str
) -> None:
    answer = put(shared_service, made())
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] == "invalid_request"
    assert words in answer.json()["message"]
    assert kept(shared_service) == []


@pytest.mark.slow
def test_real_bombs_and_many_entries_are_refused_and_a_large_package_is_taken(service: Service) -> None:
    bomb = zipped({"zeros": b"\0" * (120 << 20)})
    assert "for one is no code" in put(service, bomb).json()["message"]
    many = zipped({f"{number:06}": b"" for number in range(100_000)})
    began = time.process_time()
    assert f"more than {MOST_ENTRIES}" in put(service, many).json()["message"]
    print(f"100,000 entries refused in {time.process_time() - began:.2f} s of this process")
    most = zipped({f"{number:06}": b"" for number in range(MOST_ENTRIES)})
    began = time.process_time()
    tracemalloc.start()
    assert put(service, most).status_code == 201
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{MOST_ENTRIES} entries looked at in {time.process_time() - began:.2f} s, {held >> 20} MiB at most")
    assert held < 128 << 20


def test_another_content_than_the_hash_says_is_refused(service: Service) -> None:
    answer = put(service, zipped(), name="0" * 64)
    assert answer.status_code == 422
    assert f"have the sha256 {sha(zipped())}" in answer.json()["message"]
    assert kept(service) == []


@parametrize("name", ["A" * 64, "0" * 63, "..%2Fx", "0" * 64 + ".zip"], usual=[0])
def test_what_is_no_hash_is_refused(shared_service: Service, name: str) -> None:
    assert put(shared_service, zipped(), name=name).status_code in (404, 422)
    assert kept(shared_service) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Service]:
    """A service that takes packages of 2000 bytes, and 5000 in all."""
    made = Service(tmp_path / "home", package_max_bytes=2000, packages_max_bytes=5000)
    yield made
    made.close()


def package_of(number: int, size: int = 1500) -> bytes:
    """A zip of about so many bytes, like no other."""
    return zipped({"train.py": bytes([number]) + os.urandom(size)})


@pytest.mark.parametrize("chunked", [False, True])
def test_a_package_above_the_limit_is_refused_whether_it_says_its_length_or_not(small: Service, chunked: bool) -> None:
    data = package_of(0, 4000)
    answer = put(small, data, content=iter([data[:3000], data[3000:]]) if chunked else None)
    assert answer.status_code == 413, answer.text
    assert "at most 2000 are taken, and Ray takes no more than 104857600" in answer.json()["message"]
    assert ".gitignore" in answer.json()["message"]
    assert kept(small) == []
    assert put(small, package_of(1), content=iter([package_of(1)])).status_code == 422  # what came before left no trace


def test_the_quota_counts_all_packages_and_says_what_to_do(small: Service) -> None:
    packages = [package_of(number) for number in range(4)]
    assert [put(small, data).status_code for data in packages] == [201, 201, 201, 507]
    answer = put(small, packages[3])
    assert answer.json()["code"] == "insufficient_storage"
    assert "THINWIRE_PACKAGES_MAX_BYTES" in answer.json()["message"]
    small.clock.pass_(2 * HOUR_S)  # nobody has used them since
    assert put(small, packages[3]).status_code == 201
    assert kept(small) == [f"{sha(packages[3])}.zip"]


def test_a_package_that_a_job_names_stays_however_old_it_is_and_goes_with_the_job(small: Service) -> None:
    named, unnamed = package_of(1), package_of(2)
    for data in (named, unnamed):
        assert put(small, data).status_code == 201
    job_id = script(small, sha(named)).json()["id"]
    small.clock.pass_(48 * HOUR_S)
    small.turn()
    assert kept(small) == [f"{sha(named)}.zip"]
    small.launcher.put(job_id, LaunchState.FAILED)
    small.client.post(f"/v1/jobs/{job_id}/cancel")
    small.turn(4)
    assert small.job(job_id)["state"] in ("FAILED", "CANCELLED")
    small.clock.pass_(48 * HOUR_S)
    small.turn()
    assert kept(small) == [f"{sha(named)}.zip"]  # the job is over, and is kept
    assert small.client.delete(f"/v1/jobs/{job_id}").status_code == 204
    small.clock.pass_(48 * HOUR_S)
    small.turn()
    assert kept(small) == []


def test_two_uploads_of_one_package_at_once_are_one_package(service: Service) -> None:
    data = zipped({"train.py": os.urandom(2 << 20)})

    def slowly() -> Iterator[bytes]:
        for start in range(0, len(data), 1 << 18):
            yield data[start : start + (1 << 18)]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: put(service, data, content=slowly()), range(4)))
    assert {answer.status_code for answer in answers} <= {200, 201}
    assert kept(service) == [f"{sha(data)}.zip"]


def test_a_sender_that_breaks_off_leaves_nothing(service: Service) -> None:
    upload = service.plane.packages.upload(sha(zipped()), None, "anna", "default")
    upload.write(b"PK")
    assert len(kept(service)) == 1
    upload.close()
    upload.close()
    assert kept(service) == []


def test_what_a_dead_process_left_is_removed_and_what_lives_is_not(service: Service) -> None:
    living = service.plane.packages.upload(sha(zipped()), None, "anna", "default")
    dead = service.home / "packages" / ".upload-dead"
    dead.write_bytes(b"x")
    service.turn()
    assert len(kept(service)) == 1
    assert not dead.exists()
    living.write(zipped())
    assert living.finish().sha256 == sha(zipped())
    living.close()
    assert kept(service) == [f"{sha(zipped())}.zip"]


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(errno.ENOSPC, 507, "is full: free some of it"), (errno.EIO, 503, "cannot be written")],
)
def test_a_disk_that_refuses_is_told_and_leaves_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch, number: int, status: int, words: str
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(store, "check_zip", refuse)
    answer = put(service, zipped())
    assert answer.status_code == status
    assert words in answer.json()["message"]
    assert kept(service) == []


def test_a_disk_that_is_nearly_full_takes_no_package(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    answer = put(service, zipped())
    assert answer.status_code == 507
    assert "has 64 MiB left" in answer.json()["message"]


def test_a_lock_tells_an_upload_that_lives(tmp_path: Path) -> None:
    """What the store relies on: another open of the same file in the same process does not get the lock."""
    path = tmp_path / "file"
    with path.open("wb") as one, path.open("rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_job_that_names_a_package_that_is_not_there_is_refused_with_what_to_do(service: Service) -> None:
    answer = script(service, "0" * 64)
    assert answer.status_code == 422
    (problem,) = answer.json()["problems"]
    assert (problem["path"], problem["value"]) == ("recipe.package", "0" * 64)
    assert "PUT /v1/packages/" in problem["message"]
    assert "`thinwire submit`" in problem["message"]


def test_a_job_whose_package_lacks_the_script_is_refused_with_what_it_has(service: Service) -> None:
    data = zipped({"src/train.py": b"", "README": b""})
    put(service, data)
    (problem,) = script(service, sha(data)).json()["problems"]
    assert problem["path"] == "recipe.entry"
    assert problem["message"] == "the package has no file 'train.py'; it has src/train.py"


def test_the_launcher_is_given_the_package_and_the_environment_of_each_attempt(service: Service) -> None:
    data = zipped()
    put(service, data)
    job_id = script(service, sha(data), pip=["einops"], env_vars={"A": "1"}).json()["id"]
    service.turn()
    code = service.launcher.submissions[job_id].code
    assert code is not None
    assert code.package is not None
    assert code.package.read_bytes() == data
    assert (code.sha256, code.pip, code.env_vars) == (sha(data), ("einops",), {"A": "1"})
    service.launcher.put(job_id, LaunchState.RUNNING)
    service.turn()
    service.launcher.lose(job_id)
    service.turn(5)
    assert service.launcher.submissions[f"{job_id}-attempt2"].code == code


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x")])
def test_a_job_whose_package_has_gone_waits_says_why_and_goes_on_when_it_is_back(
    service: Service, damage: Callable[[Path], Any]
) -> None:
    data = zipped()
    put(service, data)
    job_id = script(service, sha(data)).json()["id"]
    damage(service.home / "packages" / f"{sha(data)}.zip")
    service.turn(2)
    assert service.state(job_id) == "SUBMITTING"
    assert "submit the same folder again, which uploads it" in service.job(job_id)["reason"]
    assert put(service, data).status_code == 201
    service.turn()
    assert service.state(job_id) == "PENDING"


def test_a_script_that_is_on_the_boxes_needs_no_package(service: Service) -> None:
    job_id = script(service, None, working_dir="/srv/code").json()["id"]  # type: ignore[arg-type]
    service.turn()
    code = service.launcher.submissions[job_id].code
    assert code is not None
    assert (code.package, code.working_dir) == (None, "/srv/code")
