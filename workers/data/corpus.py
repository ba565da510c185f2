"""The text a job trains on, as bytes: the same on every worker, split into a training and a validation part.

The Python standard library is real text that every machine has. It is split by file, so that the validation part
is text the model has not seen; a file's side depends on its path alone.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from thinwire.contract.spec import PythonStdlib, TextFile

MAX_STDLIB_BYTES = 16 * 2**20
"""The standard library is read in order of path up to here; a release that is larger loses its last files."""

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Written by the build or the distribution, so they differ between machines of one Python version.
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "config-")


class DataError(Exception):
    """The data of a job cannot be used; the message says what, the value and what to do."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on and bytes to validate on, both uint8[N].

    `digest` is the SHA-256 of both parts: workers that do not agree on it must not train together.
    """

    train: Tensor
    validation: Tensor
    digest: str


def load_corpus(data: PythonStdlib | TextFile) -> Corpus:
    """Read what `data` names, whole, into memory. Raises DataError."""
    if isinstance(data, TextFile):
        train, validation, what = _text_file(data)
    else:
        train, validation, what = _python_stdlib(data, Path(sysconfig.get_path("stdlib")))
    for part, content in (("training", train), ("validation", validation)):
        if not content:
            raise DataError(
                f"the {part} part of {what} is empty ({len(train)} training and {len(validation)} validation bytes "
                f"at data.validation_fraction = {data.validation_fraction}); name a larger text or another fraction"
            )
    hashed = hashlib.sha256(len(train).to_bytes(8, "big"))
    hashed.update(train)
    hashed.update(validation)
    return Corpus(
        train=_as_tensor(train),
        validation=_as_tensor(validation),
        digest=hashed.hexdigest(),
    )


def _text_file(data: TextFile) -> tuple[bytes, bytes, str]:
    path = Path(data.path)
    if not path.is_absolute():
        raise DataError(f"data.path = {data.path!r} is relative; give an absolute path that every worker can read")
    content = _read(path)
    _, num_validation = data.parts(len(content))
    cut = len(content) - num_validation
    return content[:cut], content[cut:], str(path)


def _python_stdlib(data: PythonStdlib, folder: Path) -> tuple[bytes, bytes, str]:
    train: list[bytes] = []
    validation: list[bytes] = []
    num_bytes = 0
    for relative in sorted(_source_files(folder)):
        content = _read(folder / relative)
        if num_bytes + len(content) > MAX_STDLIB_BYTES:
            break
        num_bytes += len(content)
        (validation if _position(relative) < data.validation_fraction else train).append(content)
    version = sysconfig.get_python_version()
    what = f"the source of Python {version}'s standard library ({len(train) + len(validation)} files in {folder})"
    return _join(train), _join(validation), what


def _source_files(folder: Path) -> Iterator[str]:
    """Relative paths, with forward slashes, of the library's own modules."""

    def refuse(error: OSError) -> None:  # os.walk would otherwise pass over a folder it cannot list
        raise DataError(f"cannot list {error.filename}: {error.strerror}; make it readable or name another text")

    for root, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and _wanted(name)]
        for name in files:
            if name.endswith(".py") and _wanted(name):
                yield (Path(root) / name).relative_to(folder).as_posix()


def _wanted(name: str) -> bool:
    return not name.startswith(_SKIPPED_PREFIXES)


def _position(relative_path: str) -> float:
    """A number in [0, 1) that depends on the path alone; Python's own hash differs from process to process."""
    return int.from_bytes(hashlib.sha256(relative_path.encode()).digest()[:6], "big") / 2**48


def _join(contents: Iterable[bytes]) -> bytes:
    return b"\n".join(contents)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}; make it readable on every worker or name another text"
        ) from error


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


Sample = tuple[Tensor, Tensor]
"""Inputs and targets."""


class Windows:
    """Windows of one text: a dataset of (bytes, the same one byte on), int64[T] each."""

    def __init__(self, corpus: Corpus, context: int, part: Literal["training", "validation"] = "training") -> None:
        """context: bytes a window predicts. Raises: DataError where the part is shorter than a window."""
        tokens = corpus.train if part == "training" else corpus.validation
        self.digest = corpus.digest
        self._len = (tokens.numel() - 1) // context
        if self._len < 1:
            raise DataError(
                f"the {part} text has {tokens.numel()} bytes; recipe.context = {context} needs at least {context + 1}; "
                "name a longer text, a shorter context or another data.validation_fraction"
            )
        self._tokens, self._context = tokens, context

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, window: int) -> Sample:
        if not 0 <= window < self._len:
            raise IndexError(f"window {window} of {self._len}")
        first = window * self._context
        bytes_T1 = self._tokens[first : first + self._context + 1].long()
        return bytes_T1[:-1], bytes_T1[1:]


def spread(windows: Windows, num: int) -> list[Sample]:
    """`num` windows spread evenly over the text, always the same; all where there are fewer."""
    num = min(num, len(windows))
    return [windows[i * len(windows) // num] for i in range(num)]
