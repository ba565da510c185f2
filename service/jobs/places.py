"""Which places of files do all machines of a cluster reach? What is a folder of one machine is told so in words."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def is_local(place: str) -> bool:
    """Is it a path, on whichever machine opens it?"""
    return place.startswith(("/", "file://", "local://"))


def path_of(place: str) -> Path:
    """The path of a local one."""
    return Path(os.path.normpath(place.partition("://")[2] or place))


def unshared(place: str | None, shared: Sequence[Path]) -> str | None:
    """What it has to be, where not every machine of the cluster reaches it; None where it is that.

    place: None for a folder of this machine alone. shared: folders that all machines have.
    """
    if place is not None and (not is_local(place) or any(path_of(place).is_relative_to(one) for one in shared)):
        return None
    known = f"; shared here: {', '.join(map(str, shared))}" if shared else ""
    return (
        "must be a place that every machine of the cluster reaches, such as s3://bucket/folder, or a folder below one "
        f"of THINWIRE_SHARED_FOLDERS{known}: a worker that starts on another machine would not find it"
    )
