"""What a result was made by: commit, versions, hardware. Refuses to measure code that is not the commit's."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import thinwire
from thinwire.tools.hardware import hardware

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "tests" / "data" / "tinyshakespeare.txt"
CODE = ("comm", "optim", "workers", "benchmarks", "tests/data/tinyshakespeare.txt", ":!benchmarks/results", ":!*.md")
"""What a figure depends on: local changes elsewhere do not mark a commit as changed."""


class ProvenanceError(Exception):
    """The code that runs is not the code of this checkout; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """commit: with "-changed" where CODE differs from it; "unknown" outside a git checkout."""

    commit: str
    versions: dict[str, str]
    hardware: dict[str, str]


def provenance(code: Sequence[str] = CODE) -> Provenance:
    """Of this process. code: what the figures depend on, as git names it.

    Raises: ProvenanceError where thinwire is imported from another folder than this checkout.
    """
    imported = Path(thinwire.__file__).resolve().parent
    if imported != ROOT / "thinwire":
        raise ProvenanceError(
            f"thinwire is imported from {imported}, the benchmarks are in {ROOT}: start them with "
            f"python -m benchmarks... in {ROOT}"
        )
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Provenance(_commit(code), versions, hardware())


def _commit(code: Sequence[str]) -> str:
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", *code)
    if commit is None or changes is None:
        return "unknown"
    return commit + ("-changed" if changes else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", "-C", str(ROOT), *arguments), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
