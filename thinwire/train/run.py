"""The run that this process has a part in, wherever it runs. Torch-free until it is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.workers.session.session import Session


def session(folder: str | os.PathLike[str] | None = None, *, save_every: int = 500, keep: int = 2) -> Session:
    """The run that this process has a part in, as a context manager: under python, torchrun, or in a job.

    folder: where checkpoints are written and gone on from, one run a folder, and the same one for all ranks; None:
    nothing is kept. save_every: steps between two of them. keep: how many. In a job these three are ignored: the job's
    file says them.
    Raises: TypeError, ValueError for numbers or a folder that cannot be; OSError for one that cannot be made.
    """
    from thinwire.workers.session.begin import begin

    return begin(folder, save_every, keep)
