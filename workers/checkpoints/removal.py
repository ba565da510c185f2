"""Which checkpoints are removed: old ones, and what is left of saves that failed; never what somebody may still write.

Rank 0 of a generation removes, after each of its saves, what that generation or an older one has written. Where a newer
one has written anything it removes nothing: it has been left behind, and the newer one sees to all.

Of a folder without a manifest it removes                                                   because
    of its own generation, an earlier step: the files of ranks that have delivered later    a rank writes in order
    of an older generation: all, when nothing has changed in it for SETTLE_S                a writer gives up before

A manifest goes first, so that half of a checkpoint is never taken for whole. What cannot be removed is named in the log
and tried again after the next save.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping

from thinwire.workers.checkpoints.manifest import CheckpointId
from thinwire.workers.checkpoints.names import MANIFEST, checkpoints, folder_of, generations, part_of
from thinwire.workers.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

SETTLE_S = 120.0
"""Twice the time for which a rank 0 waits for the shards of its checkpoint (writer.py)."""


class Unfinished:
    """Folders without a manifest, of generations that are over, and since when they are as they are.

    By the clock of this machine: those of other machines and of stores differ.
    """

    def __init__(self, settle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._settle_s, self._clock = settle_s, clock
        self._seen: dict[CheckpointId, tuple[float, Mapping[str, int]]] = {}

    def settled(self, which: CheckpointId, files: Mapping[str, int]) -> bool:
        """Has nothing changed in it for so long that nobody can be writing it? Begins to count at the first call."""
        now = self._clock()
        since, before = self._seen.get(which, (now, files))
        if before != files:
            since = now
        self._seen[which] = since, files
        return now - since >= self._settle_s


def remove_parts(storage: Storage, which: CheckpointId, ranks: Collection[int], mark: int | None = None) -> None:
    """Remove what these ranks have written of a checkpoint without a manifest, and the folder if nothing else is there.

    mark: that of the save; None for any. Where there is a manifest, nothing is removed. Raises: OSError.
    """
    folder = folder_of(which)
    files = storage.files(folder)
    if MANIFEST in files:
        return
    parts = {name: part_of(name) for name in files}
    theirs = [name for name, part in parts.items() if part and part.rank in ranks and mark in (None, part.mark)]
    if len(theirs) == len(files):
        storage.remove(folder)
    elif theirs:
        storage.remove(folder, *theirs)


def discard(storage: Storage, which: CheckpointId) -> None:
    """Remove a checkpoint; its manifest first, so that half of one is never taken for whole. Raises: OSError."""
    storage.remove(folder_of(which), MANIFEST)
    storage.remove(folder_of(which))


def bury(storage: Storage, which: CheckpointId) -> None:
    """Remove one without a manifest, unless it gets one at this moment. Raises: OSError.

    An empty manifest is put first. Of two who put one only the first succeeds: either it is whole and stays, or the
    writer that would make it whole finds out.
    """
    folder = folder_of(which)
    try:
        storage.create(folder, MANIFEST, [])
    except FileExistsError:
        return
    except OSError as error:  # a disk may be so full that nothing can be put, and this makes room
        logger.warning("checkpoint_removed_without_a_mark path=%s reason=%s", storage.address(folder), error)
    parts = [name for name in storage.files(folder) if name != MANIFEST]
    storage.remove(folder, *parts)
    storage.remove(folder)


def tidy(
    storage: Storage,
    which: CheckpointId,
    *,
    keep: int | None,
    is_sound: Callable[[CheckpointId, Mapping[str, int]], bool],
    delivered: Collection[int],
    pending: Collection[CheckpointId],
    unfinished: Unfinished,
) -> None:
    """After the save of `which`, on rank 0: remove what the module's docstring says. Nothing is raised.

    keep: how many whole ones stay; None where this save failed, after which no whole one goes. is_sound: is it whole as
    far as sizes tell? delivered: ranks that write no earlier checkpoint of this generation any more. pending: those of
    which rank 0 still waits for parts.

    Of whole ones, those also go that a later generation went back behind. What is only refused stays until it is old:
    it may be whole for another version, or for who repairs it.
    """
    kept, earliest = 0, math.inf
    try:
        folders = storage.folders()
    except OSError as error:
        logger.warning("checkpoints_not_tidied path=%s reason=%s", storage.address(folder_of(which)), error)
        return
    found = checkpoints(folders)
    if max([*generations(folders), *(other.generation for other in found)], default=0) > which.generation:
        return
    for other in reversed(found):
        try:
            files = storage.files(folder_of(other))
            if MANIFEST in files:
                if keep is None:
                    continue
                if kept < keep and other.step < earliest and is_sound(other, files):
                    kept, earliest = kept + 1, other.step
                elif other < which and (kept == keep or other.step >= earliest):
                    discard(storage, other)
            elif other >= which or other in pending:
                continue
            elif other.generation == which.generation:
                remove_parts(storage, other, delivered)
            elif unfinished.settled(other, files):
                bury(storage, other)
        except OSError as error:
            logger.warning("checkpoint_not_removed path=%s reason=%s", storage.address(folder_of(other)), error)
