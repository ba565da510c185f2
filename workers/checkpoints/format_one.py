"""Checkpoints of format 1, which rank 0 wrote alone: state.pt and its manifest. They are read, never written.

checkpoints/step-00000100/state.pt        weights, optimizer vectors, R of each error memory; tensors only
checkpoints/step-00000100/manifest.json   step, sha256 and size of state.pt
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import torch

from thinwire.workers.checkpoints.manifest import MANIFEST
from thinwire.workers.checkpoints.shard import Tally, read
from thinwire.workers.checkpoints.snapshot import Content
from thinwire.workers.checkpoints.storage import Storage

STATE = "state.pt"


def defect(storage: Storage, folder: str) -> str | None:
    """What is wrong with a checkpoint; None where its checksum holds. Raises: OSError, ValueError, KeyError."""
    with storage.read(folder, MANIFEST) as stream:
        manifest = json.loads(stream.read())
    if manifest["format"] != 1:
        return f"its folder is one of format 1, its manifest says {manifest['format']!r}"
    tally = Tally()
    with storage.read(folder, STATE) as stream:
        for _ in tally.through(read(stream)):
            pass
    if tally.size_bytes != manifest["size_bytes"]:
        return f"{STATE} has {tally.size_bytes} bytes, its manifest says {manifest['size_bytes']}"
    if tally.sha256 != manifest["sha256"]:
        return f"{STATE} does not match its checksum"
    return None


def load(storage: Storage, folder: str, device: torch.device) -> Content:
    """What it holds, as one of format 2 would: the model's tensors are all among the buffers. Runs no code of it.

    Raises: OSError, KeyError; ValueError for what is torn, or holds more than tensors and plain values.
    """
    with storage.read(folder, STATE) as stream:
        try:
            state: dict[str, Any] = torch.load(stream, map_location=device, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:  # RuntimeError: torn
            raise ValueError(f"{STATE} does not load as tensors and plain values: {error}") from error
    optimizer = dict(state["optimizer"])
    flat = {f"{kind}.{name}": v_N for kind in ("vectors", "residuals") for name, v_N in optimizer.pop(kind).items()}
    if "master" in optimizer:
        flat["master"] = optimizer.pop("master")
    plain = {"optimizer": optimizer, "meter": state["meter"], "parameters": [], "model": {}}
    return Content(flat, state["model"], plain)
