"""Checkpoints of a job: atomic, checksummed, free of the world size; the newest whole one is where a job resumes.

    checkpoints/step-00000100/state.pt        weights, optimizer vectors, R of each error memory; tensors only
    checkpoints/step-00000100/manifest.json   step, sha256 and size of state.pt

A folder is written under a name that starts with a dot, synced, and renamed: what has its final name is whole, unless
the disk lies, and then the checksum says so and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FORMAT = 1
_PREFIX = "step-"
_NAME = re.compile(r"step-(\d{8,})")
"""Whatever else lies in the folder, a copy or a note of its owner, is not a checkpoint and is left alone."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoints of one job, below `path`. Only rank 0 writes."""

    path: Path
    keep: int

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write the state of `step`, then remove all but the newest `keep`. Raises: OSError; the older are intact."""
        self.path.mkdir(parents=True, exist_ok=True)
        final = self.path / f"{_PREFIX}{step:08d}"
        partial = self.path / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        torch.save(state, partial / "state.pt")
        manifest = {
            "format": FORMAT,
            "step": step,
            "sha256": _sha256(partial / "state.pt"),
            "size_bytes": (partial / "state.pt").stat().st_size,
            "written_at": time.time(),
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        for file in (partial / "state.pt", partial / "manifest.json", partial):
            _sync(file)
        shutil.rmtree(final, ignore_errors=True)  # a resumed run may reach the same step again
        partial.rename(final)
        _sync(self.path)
        for old in self._steps()[: -self.keep]:
            shutil.rmtree(self.path / f"{_PREFIX}{old:08d}", ignore_errors=True)
        return final

    def newest_whole(self) -> int | None:
        """The step of the newest checkpoint whose checksum holds; None where there is none. Names the torn ones."""
        for step in reversed(self._steps()):
            reason = self._defect(step)
            if reason is None:
                return step
            logger.warning("checkpoint_refused path=%s reason=%s", self.path / f"{_PREFIX}{step:08d}", reason)
        return None

    def load(self, step: int, device: torch.device) -> dict[str, Any]:
        """The state of `step`, its tensors on `device`. Holds tensors and plain values only: no code is run.

        Raises: FileNotFoundError where this machine does not see it.
        """
        file = self.path / f"{_PREFIX}{step:08d}" / "state.pt"
        if not file.exists():
            raise FileNotFoundError(
                f"{file}: rank 0 resumes from it, and this worker does not see it; put the service's home on storage "
                "that all nodes share"
            )
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
        return state

    def _steps(self) -> list[int]:
        names = [entry.name for entry in self.path.iterdir()] if self.path.exists() else []
        return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)

    def _defect(self, step: int) -> str | None:
        folder = self.path / f"{_PREFIX}{step:08d}"
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            if manifest["format"] != FORMAT:
                return f"format {manifest['format']}, this version reads {FORMAT}"
            size = (folder / "state.pt").stat().st_size
            if size != manifest["size_bytes"]:
                return f"state.pt has {size} bytes, its manifest says {manifest['size_bytes']}"
            if _sha256(folder / "state.pt") != manifest["sha256"]:
                return "state.pt does not match its checksum"
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
