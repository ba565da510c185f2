"""The checkpoints of one rank, through all its groups: when a job is saved, what of it, and from what it goes on.

A checkpoint is of a generation: that of the membership, which numbers on through all restarts (floor_of), or where
ranks are fixed one that rank 0 draws when they begin. What is of a newer generation is newer, whatever the step.

What of a job is in a checkpoint: model, optimizer and meter as flat vectors and plain values.

flat.parameters            P, the masters of low-precision parameters in it; the model's weights are cut out of it
flat.vectors.*             the optimizer's m, v and so on          flat.residuals.*    R of each error memory
flat.2.*                   the same of the second optimizer, and so on, where there are several
buffer.registered.*        tensors of what is registered (session/registered.py), such as a model's statistics; rank 0's
buffer.added.*             tensors of what others keep in optimizer.state (optim/engine/added.py); rank 0's
plain                      registered: all else of it; modules: which of it are modules, that name the parameters;
                           optimizer: all else of its state_dict; parameters: names, shapes, places in P; meter;
                           added: all else of what others keep in optimizer.state, where there is any
                           others: optimizer, parameters and added of the other optimizers, where there are any
"""

from __future__ import annotations

import json
import logging
import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.comm import PeerLost
from thinwire.comm.groups.texts import gather_texts
from thinwire.contract.reports import EventKind
from thinwire.contract.run_folder import RunFolder, checkpoints_in
from thinwire.contract.spec import Checkpoint
from thinwire.optim.engine import added, tensor_states
from thinwire.optim.engine.local import local
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.shares import agree_on_load
from thinwire.workers.checkpoints import (
    AttemptSuperseded,
    CheckpointId,
    CheckpointRefused,
    CheckpointStore,
    Superseded,
    Writer,
)
from thinwire.workers.checkpoints.manifest import BEGUN, TensorRecord, from_json, generation_folder, to_json
from thinwire.workers.checkpoints.snapshot import Content, records_of
from thinwire.workers.checkpoints.storage import StoreRefused, prove
from thinwire.workers.checkpoints.writer import PEERS_LOOK_S, Ticket, without_end
from thinwire.workers.membership.seats import Seat
from thinwire.workers.owed import Owed
from thinwire.workers.ranks import Alone, Box
from thinwire.workers.replicas import ReplicasDiffer, refuse_differing
from thinwire.workers.session.registered import Registered, put_together, take_apart, weight_name
from thinwire.workers.session.training import Training
from thinwire.workers.telemetry.meter import Meter
from thinwire.workers.telemetry.reporter import Reporter, RunSuperseded

logger = logging.getLogger(__name__)
T = TypeVar("T")


CLOSE_S = 50.0
"""How long the end of a run waits for its last checkpoint: its peers wait in a collective meanwhile, at most 60 s."""
SEES_S = 10.0
"""How long what rank 0 has written in a shared folder may take to be seen by another machine."""
REGISTERED = "registered."
"""Before the names of tensors of what is registered, among a checkpoint's buffers."""


class Saving:
    """The checkpoints of one rank. Training goes on while one is written; what became of it is reported later."""

    def __init__(
        self,
        run_dir: Path,
        settings: Checkpoint,
        reporter: Reporter,
        may_commit: Callable[[], bool] = lambda: True,
        attempt: Callable[[], int] = lambda: 0,
        box: Box | None = None,
    ) -> None:
        """may_commit: see Writer. attempt: see CheckpointStore. box: None: of one process."""
        self._box = box or Alone()
        self._writer = Writer(store_of(run_dir, settings, attempt), may_commit=may_commit)
        self._attempt_over: str | None = None
        self._reporter = reporter
        self._generation: int | None = None
        self._seat: Seat | None = None
        self._owed: list[tuple[Ticket, Owed]] = []
        """Of what is being saved."""
        self._closed = False
        self.beside: Callable[[], Mapping[str, object]] = dict
        """Plain values that checkpoints hold beside the state: what the run has begun with (session/joining.py)."""

    def seated(self, seat: Seat | None) -> None:
        """Checkpoints are of this generation from here on, and a rank that is not in it gives no part of those before.

        To be called for each seat, also of a generation that never formed. Local. None where ranks are fixed: then
        resume() draws the generation.
        """
        self._seat, self._generation = seat, None if seat is None else seat.generation
        if seat is not None:
            for _, owed in self._owed:
                owed.seated(seat)

    def resume(self, training: Training, meter: Meter) -> int | None:
        """Load what rank 0 finds, on every rank. Returns its step, None where there is nothing. Collective.

        What older generations have not saved yet, they save no more. Before a run that has saved nothing begins, each
        rank looks whether it can.
        Raises: StoreRefused where it cannot; RunSuperseded on rank 0, where the store knows a newer attempt of the job;
        PeerLost, also where another rank cannot save, where the store knows a newer generation than this, or another
        rank cannot load what rank 0 has found twice; FileNotFoundError where this rank does not see it,
        CheckpointRefused where it reads something else; OSError.
        """
        group, loaded, before = training.group, None, None
        with meter.part("control"):
            self._prove(training)
        while True:
            with meter.part("control"):
                found = torch.zeros(3, dtype=torch.int64, device=training.device)
                if group.rank == 0:
                    mine = json.dumps(self._find(begins=before is None) if self._box.rank == 0 else None)
                    told = self._box.share("what is found of checkpoints", mine)[0]
                    found[:] = torch.tensor(json.loads(told), dtype=found.dtype, device="cpu")
                group.broadcast_(found)
            self._generation, *newest = found.tolist()
            which = CheckpointId(*newest)
            if not self._generation:
                raise PeerLost("the store of checkpoints knows a newer generation than this, says the log of rank 0")
            if which.step < 0:
                return None
            store = self._writer.store
            if loaded is not None and which == before:
                raise loaded.error or PeerLost(f"another rank cannot load {store.address(which)}: {loaded.why}")
            load = partial(store.load, which, training.device, shard_prefix(self._box))
            with meter.part("control"):
                loaded = on_all(training, load, CheckpointRefused, FileNotFoundError)
                failed = self._box.share(f"the load of step {which.step}", loaded.why)
            if not any(failed):
                break
            loaded = replace(loaded, why=next(filter(None, failed)))
            before = which  # a late writer may have removed it: there is a newer one then
        content = loaded.value
        assert content is not None
        content = of_shard(content, self._box)
        restore(content, training)
        _warn_of_other_samples(content, training, which.step)
        meter.load(content.plain["meter"])  # type: ignore[arg-type]
        with meter.part("control"):  # here and not in the first step, whose bytes are those of the run that went on
            for optimizer in training.optimizers:
                agree_on_load(optimizer)
        return which.step

    def _prove(self, training: Training) -> None:
        """Can every rank save? Collective. Raises: StoreRefused where this one cannot; PeerLost where others cannot."""
        proved = on_all(training, partial(prove, self._writer.store.storage), StoreRefused)
        if proved.error is not None:
            raise proved.error
        if proved.failed:
            raise PeerLost(f"rank {proved.failed[0]} cannot save: {proved.why}", ranks=proved.failed)

    def refuse_other_folders(self, training: Training) -> None:
        """Does every rank see what rank 0 has written in resume()? No checkpoint would become whole else. Collective.

        Raises: StoreRefused, alike on every rank; PeerLost.
        """
        answers = gather_texts(training.group, self._begin_here(), training.device)
        others = [rank for rank, text in enumerate(answers) if text != answers[0]]
        if answers[0] and others:  # else rank 0 could not write: each save will say so
            raise StoreRefused(
                f"no checkpoint could be saved: rank {others[0]} does not see what rank 0 has written (on "
                f"{socket.gethostname()} the folder is {self._writer.store.storage.address('')}): give all ranks one "
                "folder, on a file system that all their machines share"
            )

    def _begin_here(self) -> bytes:
        """What says here that this generation has begun; empty where nothing does. Others may see it late."""
        assert self._generation is not None, "resume() comes first"
        until = time.monotonic() + SEES_S
        while True:
            try:
                with self._writer.store.storage.read(generation_folder(self._generation), BEGUN) as stream:
                    return stream.read()
            except OSError:
                if time.monotonic() > until:
                    return b""
            time.sleep(PEERS_LOOK_S)

    def save(self, training: Training, meter: Meter, step: int, look: Callable[[], None]) -> None:
        """Begin to write a checkpoint of `step`. A disk that refuses is reported, and the run goes on. Collective.

        Where the one before is still being written it waits for that, and looks meanwhile.
        Raises: PeerLost; ReplicasDiffer; what `look` raises.
        """
        assert self._generation is not None, "seated() or resume() comes first"
        with meter.part("checkpoint"):
            self._writer.wait_free(look)
            box = self._box
            box.share(f"the collection of step {step}")
            for optimizer in training.optimizers:
                optimizer.prepare_to_save()
                optimizer.refresh_master()
            refuse_differing_shards(training, box, step)
            content = collect(meter, training.registered)
            content = replace(content, plain={**self.beside(), "samples": samples_of(training), **content.plain})
            group, which = training.group, CheckpointId(self._generation, step)
            drawn = str(self._writer.mark(which)) if group.rank == box.rank == 0 else ""
            content, drawn = shard_of(content, box, drawn)
            mark = torch.full((1,), int(drawn or 0), dtype=torch.int64, device=training.device)
            group.broadcast_(mark)
            look()  # the worker may have been stopped in a step, and the others have gone on without it
            owed = None if self._seat is None else Owed(self._seat, processes=box.size)
            patience = without_end if owed is None else owed.patience
            place, places = group.rank * box.size + box.rank, group.size * box.size
            ticket = self._writer.save(which, place, places, content, int(mark), patience)
            self._owed = [pair for pair in self._owed if not pair[0].over]
            if owed is not None:
                self._owed.append((ticket, owed))

    def _find(self, *, begins: bool) -> tuple[int, int, int]:
        """This generation, 0 where it is over, and the newest checkpoint that is whole, or a step of -1. On rank 0.

        Raises: OSError.
        """
        store, generation = self._writer.store, self._generation
        try:
            if begins or generation is None:
                generation = store.begin(generation)
        except AttemptSuperseded as reason:
            raise RunSuperseded(f"{reason}; this attempt ends without a word") from reason
        except Superseded as reason:
            logger.warning("generation_superseded reason=%s", reason)
            return 0, 0, -1
        return generation, *(store.newest_whole() or (0, -1))

    def tell(self) -> None:
        """Report those that have become whole, or have not, since the last time."""
        for ticket in self._writer.ended():
            if ticket.failure is not None:
                self._reporter.event(EventKind.CHECKPOINT_FAILED, ticket.which.step, reason=ticket.failure)
                if ticket.attempt_over:
                    self._attempt_over = ticket.failure
            else:
                self._reporter.event(EventKind.CHECKPOINT_SAVED, ticket.which.step, path=ticket.address)

    def raise_if_attempt_over(self) -> None:
        """After `tell`. Raises: RunSuperseded where the store has said that a newer attempt of the job goes on."""
        if self._attempt_over is not None:
            raise RunSuperseded(f"{self._attempt_over}; this attempt ends without a word")

    def wait(self, look: Callable[[], None]) -> None:
        """Wait until all that is being written is whole, or has failed, or CLOSE_S are over. Raises what `look` raises.

        A peer that died owes its part: rank 0 would wait for it for all that time.
        """
        until = time.monotonic() + CLOSE_S
        while not self._writer.wait(PEERS_LOOK_S) and time.monotonic() < until:
            look()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for what is being written, and report it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if not self._writer.close(timeout_s):
            logger.error("checkpoint_unfinished after_s=%g", timeout_s)
        self.tell()


@dataclass(frozen=True, slots=True)
class OnAll(Generic[T]):
    """What came of a call on every rank: the value or the error of this one, and the ranks where it failed.

    why: the words of this rank's error, else of that of the first of those ranks.
    """

    value: T | None
    error: Exception | None
    failed: tuple[int, ...]
    why: str


def on_all(training: Training, call: Callable[[], T], *errors: type[Exception]) -> OnAll[T]:
    """Call it on every rank, and compare which of them met one of these errors. Collective. Raises: PeerLost."""
    value, failure, own = None, None, ""
    try:
        value = call()
    except errors as error:
        failure, own = error, str(error) or type(error).__name__
        logger.warning("rank_refuses rank=%d reason=%s", training.group.rank, own)
    said = [text.decode(errors="replace") for text in gather_texts(training.group, own.encode(), training.device)]
    failed = tuple(rank for rank, text in enumerate(said) if text)
    return OnAll(value, failure, failed, own or next(filter(None, said), ""))


def store_of(run_dir: Path, settings: Checkpoint, attempt: Callable[[], int] = lambda: 0) -> CheckpointStore:
    """Where the checkpoints of a run are. Raises: ValueError where nothing opens the place."""
    own, store = RunFolder(run_dir).checkpoints, settings.store
    where = own if store is None else checkpoints_in(store, run_dir.name)
    return CheckpointStore(where, settings.keep, attempt=attempt)


def floor_of(run_dir: Path, settings: Checkpoint) -> int:
    """The highest generation that the checkpoints of a run tell of, 0 for none: the next has a larger number.

    Raises: ValueError where nothing opens the place; OSError where it cannot be listed.
    """
    return store_of(run_dir, settings).newest_generation()


def refuse_differing_shards(training: Training, box: Box, step: int) -> None:
    """As refuse_differing(), where processes of a box hold different shards: alike on all of them. Collective.

    Raises: ReplicasDiffer, of the ranks at fault in any shard; PeerLost.
    """
    found: ReplicasDiffer | None = None
    try:
        for optimizer in training.optimizers:
            refuse_differing(optimizer, training.group, step)
    except ReplicasDiffer as error:
        found = error
    mine = [] if found is None else [str(found), *found.ranks]
    said = [json.loads(one) for one in box.share(f"the comparison of step {step}", json.dumps(mine))]
    differing = [one for one in said if one]
    if differing:
        ranks = tuple(sorted({rank for one in differing for rank in one[1:]}))
        raise ReplicasDiffer(differing[0][0] if found is None else str(found), ranks)


def shard_prefix(box: Box) -> str:
    """What the names of this process's tensors begin with in a checkpoint; "" where it holds all of the model."""
    return "" if box.size == 1 else f"{box.rank} of {box.size}: "


def shard_of(content: Content, box: Box, drawn: str) -> tuple[Content, str]:
    """What this process of a box writes of a checkpoint, which is one for all shards; and what the first has drawn.

    The first box's first process writes what is not tensors, and says which tensors there are: of all shards.
    Collective in the box. Raises: PeerLost.
    """
    if box.size == 1:
        return content, drawn
    prefix = shard_prefix(box)
    flat = {prefix + name: tensor for name, tensor in content.flat.items()}
    buffers = {prefix + name: tensor for name, tensor in content.buffers.items()}
    records = {name: record.model_dump() for name, record in records_of(flat, buffers).items()}
    said = box.share("the shards of a checkpoint", json.dumps([records, to_json(dict(content.plain)), drawn]))
    of_all = [json.loads(one) for one in said]
    others = {name: TensorRecord.model_validate(record) for one in of_all for name, record in one[0].items()}
    plain = {"shards": [from_json(one[1]) for one in of_all]}
    return Content(flat, buffers, plain, shard=(box.rank, box.size), others=others), str(of_all[0][2])


def of_shard(content: Content, box: Box) -> Content:
    """What this process of a box goes on from. Raises: CheckpointRefused where other boxes have saved."""
    shards: Any = content.plain.get("shards")
    saved = 1 if shards is None else len(shards)
    if saved != box.size:
        raise CheckpointRefused(
            f"the checkpoint is of boxes of {saved} processes, and these have {box.size}: a job's shards are not cut "
            f"anew; say workers.per_box = {saved}, or begin a new job of what the script itself has saved by "
            "torch.distributed.checkpoint"
        )
    if shards is None:
        return content
    prefix = shard_prefix(box)
    flat = {name.removeprefix(prefix): x for name, x in content.flat.items()}
    buffers = {name.removeprefix(prefix): x for name, x in content.buffers.items()}
    return Content(flat, buffers, shards[box.rank])


def collect(meter: Meter, registered: Registered) -> Content:
    """The state of a run, to be saved before the next step: its tensors are the live ones. Collective.

    The error memory is brought together as R, from which the run goes on.
    Raises: PeerLost; then nothing has changed, or of several optimizers only in what form R is held. ValueError naming
    what was registered and no checkpoint can hold.
    """
    plain_registered, tensors = registered.collected()
    flat: dict[str, Tensor] = {}
    buffers = {REGISTERED + name: tensor for name, tensor in tensors.items()}
    names = registered.parameter_names()
    first, *others = (
        _collect_one(optimizer, _prefix(at), names, flat, buffers) for at, optimizer in enumerate(registered.optimizers)
    )
    plain = {
        **first,
        "meter": meter.state(),
        "model": {},
        "registered": plain_registered,
        "modules": registered.modules,
        **({"others": others} if others else {}),
    }
    return Content(flat, buffers, plain)


def _prefix(at: int) -> str:
    """What the names of an optimizer's tensors begin with: nothing for the first."""
    return f"{at + 1}." if at else ""


def _collect_one(
    optimizer: FlatOptimizer[Any],
    prefix: str,
    names: dict[int, list[str]],
    flat: dict[str, Tensor],
    buffers: dict[str, Tensor],
) -> dict[str, Any]:
    """Its plain values; its tensors are put into flat and buffers. names: of parameters, by id. Collective."""
    state = optimizer.state_dict()
    flat[f"{prefix}parameters"] = tensor_states.parameters(optimizer)
    for kind in ("vectors", "residuals"):
        flat.update({f"{prefix}{kind}.{name}": v_N for name, v_N in state.pop(kind).items()})
    state.pop("master", None)  # is in P
    of_others = take_apart(state.pop(added.ADDED, {}), prefix + added.ADDED, buffers)
    return {
        "optimizer": state,
        "parameters": _places(optimizer, names),
        **({added.ADDED: of_others} if of_others else {}),
    }


def registered_in(content: Content) -> Any:
    """The plain values of what was registered: before recipes were scripts, in effect the model of the recipe."""
    plain: dict[str, Any] = dict(content.plain)
    return plain["registered"] if "registered" in plain else {"model": {**plain["model"], **_buffers(content)}}


def restore(content: Content, training: Training) -> None:
    """Load all of it but the meter. Raises: ValueError where it is of another model, optimizer or script."""
    states = restored(content)["optimizers"]
    theirs, mine = [one["optimizer"] for one in states], [type(one).__name__ for one in training.optimizers]
    if theirs != mine and max(len(theirs), len(mine)) > 1:  # before the first of them is loaded
        raise ValueError(
            f"the checkpoint has {len(theirs)} optimizers ({', '.join(theirs)}), and this script has registered "
            f"{len(mine)} ({', '.join(mine)}): register the same in the same order, or begin a new run"
        )
    for at, (optimizer, state) in enumerate(zip(training.optimizers, states, strict=True)):
        optimizer.load_state_dict({**state, "parameters": content.flat[f"{_prefix(at)}parameters"]})
    tensors = {n.removeprefix(REGISTERED): x for n, x in content.buffers.items() if n.startswith(REGISTERED)}
    training.registered.load(registered_in(content), tensors)


def samples_of(training: Training) -> str:
    """What decides which samples are those of a step: kept in checkpoints."""
    return f"{training.feed.data}, {training.feed.drawing}"


def _warn_of_other_samples(content: Content, training: Training, step: int) -> None:
    """Say it on rank 0 where the steps from here on are not of the samples that the run which saved would have used."""
    before, now = content.plain.get("samples"), samples_of(training)
    if before is not None and before != now and training.group.rank == 0:
        logger.warning(
            "samples_differ step=%d before=%r now=%r: what follows is drawn by the new numbers, so some samples of "
            "this epoch come twice and others not at all; give what was given before, or begin anew in another folder",
            step,
            before,
            now,
        )


def restored(content: Content) -> dict[str, Any]:
    """What `model`, `optimizers` (of each) and `meter` load, under these keys. Shares memory with `content`."""
    plain: dict[str, Any] = dict(content.plain)
    model: dict[str, Any] = {**plain["model"], **_buffers(content)}
    parts = [plain, *plain.get("others", [])]
    optimizers = [_restored_one(part, _prefix(at), content, model) for at, part in enumerate(parts)]
    return {"model": model, "optimizers": optimizers, "meter": plain["meter"]}


def _restored_one(plain: dict[str, Any], prefix: str, content: Content, model: dict[str, Any]) -> dict[str, Any]:
    """The state_dict of one optimizer. The weights that it steps are put into model, by name."""
    masters = []
    for row in plain["parameters"]:
        p_N, shape, dtype = content.flat[f"{prefix}parameters"], row["shape"], getattr(torch, row["dtype"])
        part_N = p_N[row["start"] : row["start"] + math.prod(shape)]
        if dtype != p_N.dtype:
            masters.append(part_N)
        model.update(dict.fromkeys(row["names"], part_N.view(shape).to(dtype)))
    optimizer = {
        **plain["optimizer"],
        "vectors": _under(f"{prefix}vectors.", content),
        "residuals": _under(f"{prefix}residuals.", content),
    }
    if masters:
        optimizer["master"] = torch.cat(masters)
    if added.ADDED in plain:
        optimizer[added.ADDED] = put_together(plain[added.ADDED], content.buffers)
    return optimizer


def _buffers(content: Content) -> dict[str, Tensor]:
    """Of the model; of a script what its modules have beside what the optimizer steps, named as its parameters."""
    modules: Any = content.plain.get("modules")
    if modules is None:
        return {place: x for place, x in content.buffers.items() if not place.startswith(added.ADDED)}
    found = {}
    for place, value in content.buffers.items():
        module, _, name = place.removeprefix(REGISTERED).partition(".")
        if module in modules:
            found[weight_name(modules, module, name)] = value
    return found


def _places(optimizer: FlatOptimizer[Any], names: dict[int, list[str]]) -> list[dict[str, Any]]:
    """Of each parameter that has a state, in the order of entries: its names, its dtype, shape and place in P.

    Of a shard: those of what is here.
    """
    return [
        {
            "names": names.get(id(tensor.param), []),
            "dtype": str(tensor.param.dtype).removeprefix("torch."),
            "shape": list(local(tensor.param).shape),
            "start": tensor.start,
        }
        for tensor in tensor_states.order_of(optimizer).tensors
    ]


def _under(prefix: str, content: Content) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v_N for name, v_N in content.flat.items() if name.startswith(prefix)}
