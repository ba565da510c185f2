"""The weights of a job's newest checkpoint, by name, in the types that the model has.

A checkpoint holds the parameters as one flat vector, in slices that the ranks wrote; the model's weights are cut out of
it. So a run that failed or was cancelled has weights too, and one that goes on has those of its last checkpoint.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from thinwire.contract.weights import MODEL, Fetched, FetchFailed
from thinwire.workers.checkpoints import CheckpointRefused, CheckpointStore
from thinwire.workers.checkpoints.snapshot import Content
from thinwire.workers.saving import restored


def weights_of(content: Content) -> dict[str, Tensor]:
    """The tensors of the model's state_dict, by name; tied ones under each of their names, contiguous, not shared.

    Without sparse ones, as a graph in a buffer, which safetensors has no form for.

    Of a script those of the module that it has registered; of several, each with the module's name before it.
    """
    state = restored(content)["model"]
    dense = {name: x for name, x in state.items() if isinstance(x, Tensor) and x.layout == torch.strided}
    return {name: x.clone().contiguous() for name, x in dense.items()}


def fetch(where: str, target: Path) -> Fetched:
    """Write the weights of the newest whole checkpoint at a path or URL into the folder `target`, as MODEL.

    Modifies: target, which is made where it is missing; a file that is there is replaced as a whole.
    Raises: FetchFailed.
    """
    try:
        store = CheckpointStore(where, keep=1)
        which = store.newest_whole()
        if which is None:
            raise FetchFailed(
                f"{store.storage.address('')} has no whole checkpoint: a job saves one every checkpoint.every_steps "
                "steps, and at its end"
            )
        content = store.load(which, torch.device("cpu"))
    except (OSError, ValueError, CheckpointRefused) as error:
        raise FetchFailed(f"the checkpoints of the job cannot be read: {error}") from error
    tensors = weights_of(content)
    if not tensors:
        raise FetchFailed(
            f"{store.address(which)} has no weights by name: its script has registered no module; say "
            "run.register(model=model), and the next checkpoint has them"
        )
    path, partial = target / MODEL, target / f".{MODEL}.{secrets.token_hex(4)}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, metadata={"format": "pt", "thinwire.step": str(which.step)})
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):  # where not even its folder could be made
            partial.unlink()
        raise FetchFailed(f"{path} cannot be written: {error.strerror or error}") from error
    parameters = sum(x.numel() for x in tensors.values())
    return Fetched(path, which.step, len(tensors), parameters, path.stat().st_size)
