"""Where a run begins that has saved nothing so far: afresh, with given weights, or at a checkpoint of another job.

Given weights are read by each worker before it joins the others, so that their checksum is in its signature: one
that has another file is refused. A checkpoint is read when all have joined: rank 0 says which one, as at a resume.

The run then saves at once, before its first step. As soon as that checkpoint is whole nobody needs the start any more:
a restart goes on from it, and a worker that comes later takes the checksum from it and reads no file. Until then a
restart begins at the start again.

Names, shapes and types of given weights have to be those of the model's state_dict(), which is looked at before
anything is written into the model. A file is read tensor by tensor, straight into the model; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thinwire.comm import PeerLost
from thinwire.comm.groups.texts import gather_texts
from thinwire.contract.start import Start
from thinwire.contract.weights import MODEL
from thinwire.optim.engine.shares import agree_on_load
from thinwire.workers.checkpoints import CheckpointId, CheckpointRefused, CheckpointStore
from thinwire.workers.checkpoints.shard import CHUNK_BYTES, DTYPES
from thinwire.workers.checkpoints.snapshot import Content
from thinwire.workers.checkpoints.storage import open_storage
from thinwire.workers.replicas import ranks_that_differ
from thinwire.workers.saving import on_all, registered_in, restore, restored
from thinwire.workers.session.training import Training

logger = logging.getLogger(__name__)
T = TypeVar("T")

SIGNED = "start"
"""The field of the signature, and of the plain values of the run's checkpoints."""
TRIES = 5
"""Another job that goes on removes its older checkpoints while they are read."""
DIGITS = 16
"""Of the checksum, as of the others in a signature."""
MOST_NAMED = 3
"""Tensors that a refusal names, of each kind of misfit."""
_OF_TORCH_SAVE = (b"PK\x03\x04", b"\x80")
"""How a file of torch.save begins, and how any pickle does."""


class StartRefused(ValueError):
    """What a job is to begin with is not there, or not of its model. The message says what, and what to do."""


class StartRefusedElsewhere(PeerLost):
    """Another rank cannot begin; the others do without it."""


class Origin:
    """Of one worker. start: None for a run that begins afresh. own: the run's own checkpoints; None: it keeps none."""

    def __init__(self, start: Start | None, own: CheckpointStore | None) -> None:
        self._start, self._own = start, own
        self._digest: str | None = None
        self._has_filled = False
        self._at = ""

    @property
    def signed(self) -> dict[str, str]:
        """What a worker's signature says of given weights."""
        return {} if self._digest is None else {SIGNED: f"weights #{self._digest[:DIGITS]}"}

    @property
    def kept(self) -> dict[str, object]:
        """What the run's own checkpoints say of them."""
        return {} if self._digest is None else {SIGNED: self._digest}

    @property
    def facts(self) -> dict[str, Any]:
        """Where the run has begun, for people."""
        only_weights = self._start is None or self._start.only_weights
        return {"where": self._at, "what": "weights" if only_weights else "everything"}

    def look(self, training: Training) -> None:
        """Before this worker joins: the model <- given weights, unless the run has saved something. Local.

        Raises: StartRefused.
        """
        if self._start is None or self._start.weights is None:
            return
        self._digest = self._known()
        if self._digest is None:
            self._fill(training, self._start.weights)

    def begin(self, training: Training) -> int | None:
        """Begin the run with it, on all ranks. Returns the last step that counts; None: it begins afresh. Collective.

        Raises: StartRefused, where all ranks have it on all; PeerLost where another rank alone has it.
        """
        if self._start is None:
            return None
        if self._start.weights is not None:
            return self._begin_with(self._start.weights, training)
        if self._start.checkpoints is None:
            raise StartRefused(
                f"start.job = {self._start.job}: the service alone knows where its checkpoints lie; submit the job to "
                "the service, or name start.checkpoints"
            )
        try:
            store = CheckpointStore(self._start.checkpoints, keep=1)
        except ValueError as error:
            raise StartRefused(f"start.checkpoints: {error}") from error
        which, content = self._read(store, training)
        self._at = store.address(which)
        return self._go_on_from(which, content, training, only_weights=self._start.only_weights)

    def _begin_with(self, weights: str, training: Training) -> int:
        _on_all(training, lambda: None if self._has_filled else self._fill(training, weights))
        assert self._digest is not None
        strangers = ranks_that_differ(training.group, bytes.fromhex(self._digest), training.device)
        if strangers:
            raise StartRefused(
                f"start.weights = {weights}: what rank {_listed(strangers)} has read is not what rank 0 has "
                f"(here, rank {training.group.rank}: #{self._digest[:DIGITS]}); give all machines the same file"
            )
        self._at = weights
        return 0

    def _fill(self, training: Training, weights: str) -> None:
        with opened(weights) as given:
            self._digest = fill(training, given)
        self._has_filled = True
        logger.info("start_weights where=%s sha256=%s", weights, self._digest)

    def _known(self) -> str | None:
        """The checksum that the newest of the run's own checkpoints has; None where there is none."""
        try:
            said = {} if self._own is None else self._own.newest_plain()
        except OSError as error:  # the resume will see to it
            logger.warning("checkpoints_not_read reason=%s", error)
            return None
        known = said.get(SIGNED)
        return known if isinstance(known, str) else None

    def _read(self, store: CheckpointStore, training: Training) -> tuple[CheckpointId, Content]:
        """The checkpoint that rank 0 finds; a newer one where the other job removes that meanwhile. Collective."""
        tried: list[CheckpointId] = []
        while True:
            which = self._found(store, training)
            try:
                return which, _on_all(training, partial(store.load, which, training.device))
            except (StartRefused, StartRefusedElsewhere):
                if which in tried or len(tried) == TRIES:
                    raise
                tried.append(which)

    def _found(self, store: CheckpointStore, training: Training) -> CheckpointId:
        """Which one, on all ranks alike. Collective. Raises: StartRefused, alike."""
        found_here = json.dumps(self._look_for(store) if training.group.rank == 0 else None)
        found = json.loads(gather_texts(training.group, found_here.encode(), training.device)[0])
        if isinstance(found, str):
            raise StartRefused(found)
        return CheckpointId(*found)

    def _look_for(self, store: CheckpointStore) -> CheckpointId | str:
        """Which one, or why there is none."""
        assert self._start is not None
        step, where = self._start.step, store.storage.address("")
        try:
            which = store.newest_whole(step)
            steps = [] if which is not None else sorted({one.step for one in store.sound()})
        except OSError as error:
            return f"start.checkpoints = {where} cannot be read: {error}"
        if which is not None:
            return which
        wanted = "" if step is None else f" of step {step}"
        if step is not None and steps:
            wanted += f", and whole ones of steps {_listed(steps)}"
        whose = "the job" if self._start.job is None else f"job {self._start.job}"
        return (
            f"start.checkpoints = {where} has no whole checkpoint{wanted}: {whose} has saved none there, or it was "
            "deleted, or removed when newer ones were saved (checkpoint.keep); name another one"
        )

    def _go_on_from(self, which: CheckpointId, content: Content, training: Training, *, only_weights: bool) -> int:
        """All ranks have it. Raises: StartRefused, alike; PeerLost."""
        weights = {name: x for name, x in restored(content)["model"].items() if isinstance(x, Tensor)}
        given = Given.of(self._at, weights)
        if only_weights:
            if not weights:
                raise StartRefused(f"{self._at} has no weights by name: its script had registered no module")
            fill(training, given)
            return 0
        try:
            training.registered.refuse_others(registered_in(content))
            if weights:
                refuse_misfits(given, training.registered.model_tensors())
            restore(content, training)
        except StartRefused:
            raise
        except (ValueError, RuntimeError) as error:
            raise StartRefused(
                f"{self._at} cannot be gone on from: {error}. To begin with its weights alone, with an optimizer that "
                "has seen nothing, say start.what = weights"
            ) from error
        agree_on_load(training.optimizer)
        return which.step


def _on_all(training: Training, read: Callable[[], T]) -> T:
    """Do it on every rank. Collective.

    Raises: StartRefused where this rank cannot; StartRefusedElsewhere where others alone cannot.
    """
    found = on_all(training, read, StartRefused, CheckpointRefused, OSError)
    if found.error is not None:
        raise StartRefused(found.why) from found.error
    if found.failed:
        raise StartRefusedElsewhere(f"rank {found.failed[0]} cannot begin: {found.why}", ranks=found.failed)
    return cast(T, found.value)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


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
    space = training.optimizer.space
    space.take_written()
    if space.has_master:  # to the bit: that leaves a master that the weight is the rounded value of
        space.load_masters({param: param.reshape(-1).to(space.p_N.dtype) for param in space.masters()})
    return digest.hexdigest()


def _refuse_strangers(training: Training, mine: Mapping[str, Tensor], where: str) -> None:
    """What the optimizer steps belongs to the model, or it would begin with values that nobody has given."""
    known = {id(x) for x in mine.values()}
    strangers = [list(one.param.shape) for one in training.optimizer.space.tensors if id(one.param) not in known]
    if strangers:
        raise StartRefused(
            f"{where} cannot be given to this model: {len(strangers)} tensors that the optimizer steps, the first of "
            f"shape {strangers[0]}, belong to no module that is registered: say run.register(model=model)"
        )
