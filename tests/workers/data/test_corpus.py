import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from thinwire.contract.spec import PythonStdlib, TextFile
from thinwire.workers.data import corpus
from thinwire.workers.data.corpus import DataError, load_corpus


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the standard library's folder."""
    for i in range(40):
        (tmp_path / f"m{i:02}.py").write_text(f"value = {i}\n" * 5)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def content(part: torch.Tensor) -> bytes:
    return part.numpy().tobytes()


def test_standard_library_is_enough_to_train_on() -> None:
    text = load_corpus(PythonStdlib())
    assert text.train.dtype == text.validation.dtype == torch.uint8
    assert text.train.dim() == text.validation.dim() == 1
    assert text.train.numel() > 2 * 2**20
    assert text.validation.numel() > 0.03 * text.train.numel()
    assert text.train.numel() + text.validation.numel() <= corpus.MAX_STDLIB_BYTES + 2000
    assert b"import " in content(text.train[: 2**18])


@pytest.mark.slow
def test_corpus_is_the_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from thinwire.workers.data.corpus import load_corpus; from thinwire.contract.spec import PythonStdlib;"
        "print(load_corpus(PythonStdlib()).digest)"
    )
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # this process has a random one, or that
    environment = {**os.environ, "PYTHONHASHSEED": other}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == load_corpus(PythonStdlib()).digest


def test_every_file_is_on_exactly_one_side_in_order_of_path(library: Path) -> None:
    text = load_corpus(PythonStdlib(validation_fraction=0.4))
    files = {path.name: path.read_bytes() for path in sorted(library.glob("*.py"))}
    sides = {name: (body in content(text.train), body in content(text.validation)) for name, body in files.items()}
    assert all(sum(side) == 1 for side in sides.values())
    assert content(text.train) == b"\n".join(files[name] for name, (train, _) in sides.items() if train)
    assert content(text.validation) == b"\n".join(files[name] for name, (_, validation) in sides.items() if validation)


def test_side_of_a_file_depends_on_its_path_alone(library: Path) -> None:
    before = content(load_corpus(PythonStdlib(validation_fraction=0.4)).validation)
    (library / "zz_new.py").write_text("new = 1\n")
    after = content(load_corpus(PythonStdlib(validation_fraction=0.4)).validation)
    assert after.startswith(before)


def test_larger_fraction_only_moves_files_to_the_validation_side(library: Path) -> None:
    small = content(load_corpus(PythonStdlib(validation_fraction=0.2)).validation)
    large = content(load_corpus(PythonStdlib(validation_fraction=0.6)).validation)
    assert set(small.splitlines()) < set(large.splitlines())


@pytest.mark.parametrize(
    "path",
    [
        "site-packages/x.py",
        "dist-packages/x.py",
        "test/x.py",
        "lib2to3/tests/x.py",
        "idlelib/idle_test/x.py",
        "__pycache__/x.py",
        "_sysconfigdata__linux_.py",
        "sitecustomize.py",
        "config-3.11-linux/python-config.py",
        "note.txt",
    ],
)
def test_files_that_are_not_the_library_are_left_out(library: Path, path: str) -> None:
    before = load_corpus(PythonStdlib()).digest
    (library / path).parent.mkdir(parents=True, exist_ok=True)
    (library / path).write_text("foreign = 1\n")
    assert load_corpus(PythonStdlib()).digest == before


def test_size_is_capped(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_STDLIB_BYTES", 700)
    text = load_corpus(PythonStdlib(validation_fraction=0.4))
    assert 600 < text.train.numel() + text.validation.numel() < 700 + 40


def test_interpreter_without_library_source_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"training part .* is empty \(0 training and 0 validation bytes"):
        load_corpus(PythonStdlib())
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"cannot list .*absent"):
        load_corpus(PythonStdlib())


def test_unreadable_module_is_an_error_that_names_it(library: Path) -> None:
    (library / "m99.py").symlink_to(library / "absent.py")
    with pytest.raises(DataError, match=r"cannot read .*m99\.py: No such file"):
        load_corpus(PythonStdlib())


def test_text_file_is_split_at_its_tail_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    text = load_corpus(TextFile(source="text-file", path=str(path), validation_fraction=0.25))
    assert content(text.train) == bytes(range(150))
    assert content(text.validation) == bytes(range(150, 200))


def test_digest_tells_where_the_parts_meet(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(100))
    digests = {
        load_corpus(TextFile(source="text-file", path=str(path), validation_fraction=fraction)).digest
        for fraction in (0.1, 0.2)
    }
    assert len(digests) == 2
    assert all(len(digest) == len(hashlib.sha256().hexdigest()) for digest in digests)


def test_absent_relative_or_empty_text_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*absent: No such file"):
        load_corpus(TextFile(source="text-file", path=str(tmp_path / "absent")))
    with pytest.raises(DataError, match=r"cannot read .*: Is a directory"):
        load_corpus(TextFile(source="text-file", path=str(tmp_path)))
    with pytest.raises(DataError, match=r"'text' is relative; give an absolute path"):
        load_corpus(TextFile(source="text-file", path="text"))
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"empty is empty|is empty \(0 training and 0 validation bytes"):
        load_corpus(TextFile(source="text-file", path=str(tmp_path / "empty")))
    (tmp_path / "tiny").write_bytes(b"ab")
    with pytest.raises(DataError, match=r"validation part of .*tiny is empty \(2 training and 0 validation"):
        load_corpus(TextFile(source="text-file", path=str(tmp_path / "tiny")))
