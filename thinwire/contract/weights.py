"""The trained weights of a job, as `thinwire fetch` hands them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODEL = "model.safetensors"
"""The file of the weights; safetensors, transformers and others open it."""


class FetchFailed(Exception):
    """There are no weights to be had; the message says where it has looked, and what to do."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was written. parameters: elements of all tensors."""

    path: Path
    step: int
    tensors: int
    parameters: int
    bytes: int
