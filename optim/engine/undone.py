"""Who makes a step again that was undone? Whoever called step(), which raises; or somebody who has asked to be told.

A loop that outlives its peers (workers/session) has its body run to the end also where a step in it was lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thinwire.comm.errors import NonFiniteInput, PeerLost

if TYPE_CHECKING:  # it imports this module
    from thinwire.optim.engine.optimizer import FlatOptimizer


@contextmanager
def heeded(optimizer: FlatOptimizer[Any]) -> Iterator[None]:
    """A step that is undone inside, for want of a peer or of a finite gradient, is told to optimizer.undone.

    Raises: what is raised inside, where nobody is to be told, and all other errors.
    """
    try:
        yield
    except (PeerLost, NonFiniteInput) as error:
        if optimizer.undone is None:
            raise
        optimizer.undone(error)
