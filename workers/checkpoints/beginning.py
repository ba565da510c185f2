"""A generation that goes on from what is here says so first: no older one makes a checkpoint whole after that.

    checkpoints/generation-000000000003/begun.json    created once, so that no two that begin have one number

A generation whose workers hold a state says nothing here: they go on from one another, and the membership has seen to
it that nobody else does (workers/membership).

A membership knows its own workers alone. A service that takes over submits the job as a further attempt, on another Ray
perhaps, while nobody can tell the attempt before that it is over; its membership numbers on. So begun.json has the
attempt too: where a newer one has gone on from here, an older one begins nothing and makes nothing whole, whatever its
generation.
"""

from __future__ import annotations

import logging
import secrets
import time

from thinwire.workers.checkpoints.manifest import seal, unseal
from thinwire.workers.checkpoints.names import BEGUN, checkpoints, generation_folder, generations
from thinwire.workers.checkpoints.storage import Storage, put_once

logger = logging.getLogger(__name__)


class Superseded(Exception):
    """A newer generation has gone on from what is here: the one that asks is over, and knows it not."""


class AttemptSuperseded(Superseded):
    """A newer attempt of the job has: all workers of the one that asks are."""


def newest_generation(storage: Storage) -> int:
    """The highest generation that has left anything here; 0 for none. Raises: OSError."""
    folders = storage.folders()
    return max([*generations(folders), *(which.generation for which in checkpoints(folders))], default=0)


def begin(storage: Storage, generation: int | None, attempt: int = 0) -> int:
    """Say that this generation, of this attempt of the job, goes on from here. Returns its number.

    generation: None for the next one. attempt: 0 where there is no service that counts them. Of several that begin at
    once each gets a number of its own, if the place can tell. A place that can be read and not written is named in the
    log, and the generation begins.
    Raises: AttemptSuperseded; Superseded where this generation is not the newest; OSError where the place cannot be
    listed.
    """
    _raise_if_other_attempt(storage, generations(storage.folders()), attempt)
    newest = newest_generation(storage)
    if generation is not None and newest >= generation:
        raise Superseded(f"generation {newest} has been here before generation {generation}")
    wanted = newest + 1 if generation is None else generation
    while True:
        said = seal({"generation": wanted, "attempt": attempt, "at": time.time(), "by": secrets.token_hex(8)})
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


def raise_if_superseded(storage: Storage, generation: int, attempt: int = 0) -> None:
    """Raises: AttemptSuperseded, Superseded where a newer attempt or generation has gone on from here; OSError."""
    begun = generations(storage.folders())
    _raise_if_other_attempt(storage, begun, attempt)
    newest = max(begun, default=0)
    if newest > generation:
        raise Superseded(f"generation {newest} has gone on from the checkpoints here; this is {generation}")


def _raise_if_other_attempt(storage: Storage, begun: list[int], attempt: int) -> None:
    """begun: the generations that have; the last of them is of the newest attempt, for an older one begins no more."""
    if not begun:
        return
    folder = generation_folder(begun[-1])
    try:
        with storage.read(folder, BEGUN) as stream:
            said = unseal(stream.read())
    except (FileNotFoundError, ValueError) as error:  # being made, or of a store that tears; then its number must do
        logger.info("begun_unreadable path=%s reason=%s", storage.address(folder), error)
        return
    newer = said.get("attempt", 0) if isinstance(said, dict) else 0
    if isinstance(newer, int) and newer > attempt:
        raise AttemptSuperseded(f"attempt {newer} of this job has gone on from the checkpoints here; this is {attempt}")
