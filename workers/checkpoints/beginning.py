"""Which generation goes on from what is here? It says so first: no older one makes a checkpoint whole after that.

    checkpoints/generation-000000000003/begun.json    created once, so that no two that begin have one number

A generation whose workers hold a state says nothing here: they go on from one another, and the membership has seen to
it that nobody else does (workers/membership).
"""

from __future__ import annotations

import logging
import secrets
import time

from thinwire.workers.checkpoints.manifest import seal
from thinwire.workers.checkpoints.names import BEGUN, checkpoints, generation_folder, generations
from thinwire.workers.checkpoints.storage import Storage, put_once

logger = logging.getLogger(__name__)


class Superseded(Exception):
    """A newer generation has gone on from what is here: the one that asks is over, and knows it not."""


def newest_generation(storage: Storage) -> int:
    """The highest generation that has left anything here; 0 for none. Raises: OSError."""
    folders = storage.folders()
    return max([*generations(folders), *(which.generation for which in checkpoints(folders))], default=0)


def begin(storage: Storage, generation: int | None) -> int:
    """Say that this generation goes on from here. Returns its number.

    generation: None for the next one. Of several that begin at once each gets a number of its own, if the place can
    tell. A place that can be read and not written is named in the log, and the generation begins.
    Raises: Superseded where this generation is not the newest; OSError where the place cannot be listed.
    """
    newest = newest_generation(storage)
    if generation is not None and newest >= generation:
        raise Superseded(f"generation {newest} has been here before generation {generation}")
    wanted = newest + 1 if generation is None else generation
    while True:
        said = seal({"generation": wanted, "at": time.time(), "by": secrets.token_hex(8)})
        try:
            put_once(storage, generation_folder(wanted), BEGUN, said)
        except FileExistsError as error:
            if generation is not None:
                raise Superseded(f"another generation {generation} has been here before") from error
            wanted += 1
            continue
        except OSError as error:  # each save will say so too; the run goes on
            logger.error("generation_not_kept path=%s reason=%s", storage.address(""), error)
        return wanted


def raise_if_superseded(storage: Storage, generation: int) -> None:
    """Raises: Superseded where a newer generation has gone on from here; OSError."""
    newest = max(generations(storage.folders()), default=0)
    if newest > generation:
        raise Superseded(f"generation {newest} has gone on from the checkpoints here; this is {generation}")
