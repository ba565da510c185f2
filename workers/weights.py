"""Weights by name, in the types that the model has: a job's newest checkpoint's, and given ones that a job begins with.

A checkpoint holds the parameters as one flat vector, in slices that the ranks wrote; the model's weights are cut out of
it. So a run that failed or was cancelled has weights too, and one that goes on has those of its last checkpoint.

Names, shapes and types of given weights have to be those of the model's state_dict(), which is looked at before
anything is written into the model. A file is read tensor by tensor, straight into the model; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from thinwire.contract.weights import MODEL, Fetched, FetchFailed
from thinwire.workers.checkpoints import CheckpointRefused, CheckpointStore
from thinwire.workers.checkpoints.shard import CHUNK_BYTES, DTYPES
from thinwire.workers.checkpoints.snapshot import Content
from thinwire.workers.checkpoints.storage import open_storage
from thinwire.workers.saving import restored
from thinwire.workers.session.training import Training

MOST_NAMED = 3
"""Tensors that a refusal names, of each kind of misfit."""
_OF_TORCH_SAVE = (b"PK\x03\x04", b"\x80")
"""How a file of torch.save begins, and how any pickle does."""


class StartRefused(ValueError):
    """What a job is to begin with is not there, or not of its model. The message says what, and what to do."""


def weights_of(content: Content) -> dict[str, Tensor]:
    """The tensors of the model's state_dict, by name; tied ones under each of their names, contiguous, not shared.

    Without sparse ones, as a graph in a buffer, which safetensors has no form for.

    Of a script those of the module that it has registered; of several, each with the module's name before it.
    """
    state = restored(content)["model"]
    dense = {name: x for name, x in state.items() if isinstance(x, Tensor) and x.layout == torch.strided}
    return {name: x.clone().contiguous() for name, x in dense.items()}


def fetch(where: str, target: Path, *, replace: bool = False) -> Fetched:
    """Write the weights of the newest whole checkpoint at a path or URL into the folder `target`, as MODEL.

    Modifies: target, which is made where it is missing. A file that is there is replaced, as a whole, where `replace`
    says so; else other weights stay. Raises: FetchFailed.
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
    shards: Any = content.plain.get("shards")
    if shards is not None:
        raise FetchFailed(
            f"{store.address(which)} holds the shards of {len(shards)} processes (workers.per_box) and no whole "
            "weights: let the script save them, as with torch.distributed.checkpoint"
        )
    tensors = weights_of(content)
    if not tensors:
        raise FetchFailed(
            f"{store.address(which)} has no weights by name: its script has registered no module; say "
            "run.register(model=model), and the next checkpoint has them"
        )
    path, partial = target / MODEL, target / f".{MODEL}.{secrets.token_hex(4)}"
    if not replace and os.path.lexists(path) and not _holds(path, tensors):
        raise FetchFailed(
            f"{path.absolute()} is there, and not with these weights of step {which.step}: --force puts these in its "
            "place, --to names another folder"
        )
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


def _holds(path: Path, tensors: Mapping[str, Tensor]) -> bool:
    """Has the file these tensors, bit for bit? Not by its bytes: safetensors writes its own words in any order."""

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().flatten().view(torch.uint8)

    try:
        with safe_open(path, framework="pt") as found:
            if set(found.keys()) != set(tensors):
                return False
            read = ((found.get_tensor(name), x) for name, x in tensors.items())
            return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in read)
    except (OSError, SafetensorError):
        return False


@dataclass(frozen=True, slots=True)
class Given:
    """Tensors by name, of which only names, types (as safetensors calls them) and shapes are known until they are read.

    where: what messages call them.
    """

    where: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, where: str, weights: Mapping[str, Tensor]) -> Given:
        """What is in memory."""
        return cls(where, {n: (DTYPES[x.dtype], tuple(x.shape)) for n, x in weights.items()}, weights.__getitem__)


@contextmanager
def opened(where: str) -> Iterator[Given]:
    """The weights of a safetensors file, at a path or URL. Raises: StartRefused."""
    with _on_disk(where) as path:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                tensors = {name: (x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
                yield Given(where, tensors, file.get_tensor)
        except SafetensorError as error:
            raise StartRefused(f"{where} is no whole safetensors file: {error}{_hint(path)}") from error


@contextmanager
def _on_disk(where: str) -> Iterator[Path]:
    """The file as one of this machine, fetched where it is none. Raises: StartRefused."""
    if "://" not in where or where.startswith("file://"):
        path = Path(where.removeprefix("file://"))
        if path.is_dir():
            raise StartRefused(f"{where} is a folder: name the file in it, such as {path / MODEL}")
        try:
            path.open("rb").close()
        except OSError as error:
            raise StartRefused(f"{where} cannot be read on this machine: {error.strerror}; {_SHARED}") from error
        yield path
        return
    folder, _, name = where.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="thinwire-start-") as temporary:
        path = Path(temporary) / MODEL
        try:
            with open_storage(folder).read("", name) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
        except (OSError, ValueError) as error:
            raise StartRefused(f"{where} cannot be read from this machine: {error}; {_SHARED}") from error
        yield path


_SHARED = "the weights that a job starts from lie where every worker finds them under the same name"


def _hint(path: Path) -> str:
    """What else a file may be."""
    with path.open("rb") as file:
        begins = file.read(4)
    if begins.startswith(_OF_TORCH_SAVE):
        return (
            ". It begins like a file of torch.save, which may hold code and is never read: load it where you trust it, "
            "and write it with safetensors.torch.save_model(model, path)"
        )
    return "; copy it again, or write it anew, by `thinwire fetch`, save_pretrained or safetensors.torch.save_model"


def refuse_misfits(given: Given, mine: Mapping[str, Tensor]) -> None:
    """Raises: StartRefused where names, shapes or types differ, with some of each. Of tied tensors one is enough."""
    there = {id(mine[name]) for name in given.tensors if name in mine}
    both = [name for name in given.tensors if name in mine]
    types = {name: DTYPES.get(mine[name].dtype, str(mine[name].dtype)) for name in both}
    shapes = [name for name in both if given.tensors[name][1] != tuple(mine[name].shape)]
    dtypes = [name for name in both if given.tensors[name][0] != types[name]]
    problems = [
        _told("lacks", [f"{name} {list(x.shape)}" for name, x in mine.items() if id(x) not in there]),
        _told("has what the model lacks", [f"{n} {list(x[1])}" for n, x in given.tensors.items() if n not in mine]),
        _told(
            "has other shapes", [f"{n} {list(given.tensors[n][1])}, the model's {list(mine[n].shape)}" for n in shapes]
        ),
        _told("has other types", [f"{name} in {given.tensors[name][0]}, the model's {types[name]}" for name in dtypes]),
    ]
    wrong = "; ".join(filter(None, problems))
    if not wrong:
        return
    if dtypes and not shapes and problems[:2] == ["", ""]:
        remedy = "make the model in the type of the weights (precision in the job file, .to(dtype) in a script)"
    else:
        remedy = "give weights of this model, or make the model that they are of"
    raise StartRefused(f"{given.where} does not fit the model of this job: it {wrong}: {remedy}")


def _told(what: str, found: Sequence[str]) -> str:
    if not found:
        return ""
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"{what}: {', '.join(found[:MOST_NAMED])}{more}"


@torch.no_grad()
def fill(training: Training, given: Given) -> str:
    """The model <- these weights. Local, before the first step. Returns the sha256 of what was read, in hex.

    Raises: StartRefused; where names, shapes and types are wrong nothing was written.
    """
    mine = training.registered.model_tensors()
    _refuse_strangers(training, mine, given.where)
    refuse_misfits(given, mine)
    digest, first = hashlib.sha256(), dict[int, tuple[str, str]]()
    for name in sorted(given.tensors):
        tensor, target = given.read(name).cpu().contiguous(), mine[name]
        sha256 = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {sha256}\n".encode())
        other, known = first.setdefault(id(target), (name, sha256))
        if known != sha256:
            raise StartRefused(
                f"{given.where} has different values for {other} and {name}, which are one tensor in the model of this "
                "job: untie them in the model, or leave one of them out of the file"
            )
        target.copy_(tensor)
    for space in (optimizer.space for optimizer in training.optimizers):
        space.take_written()
        # To the bit: that leaves a master that the weight is the rounded value of.
        space.load_masters({param: param.reshape(-1).to(space.p_N.dtype) for param in space.masters()})
    return digest.hexdigest()


def _refuse_strangers(training: Training, mine: Mapping[str, Tensor], where: str) -> None:
    """What the optimizer steps belongs to the model, or it would begin with values that nobody has given."""
    known = {id(x) for x in mine.values()}
    stepped = [tensor.param for optimizer in training.optimizers for tensor in optimizer.space.tensors]
    strangers = [list(param.shape) for param in stepped if id(param) not in known]
    if strangers:
        raise StartRefused(
            f"{where} cannot be given to this model: {len(strangers)} tensors that the optimizer steps, the first of "
            f"shape {strangers[0]}, belong to no module that is registered: say run.register(model=model)"
        )
