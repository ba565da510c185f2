"""The body of a script's loop, from the batch to the next one: what is seen of it, and what it must not do.

Gradients are weighed there by this rank's share of the step (hooks on the parameters, for this step only). A step that
is lost in optimizer.step() is undone there; step() returns, the body ends, and `close` raises what became of it. Where
the optimizer has counted the step all the same, as local steps do, it stands: a step that was made, with an error.

Several optimizers may step with one batch, in any order and each as often as it likes. Then the batch is what counts,
or does not: its steps are made one after another, for what the later ones compute hangs on what the former ones moved.
So when one is lost, those before it in the body stand, on all ranks. The rest of the body sends nothing more. Whether
the batch counts is known when the ranks meet again (joining.py): it does where some rank has made all of it, and then
only the exchange that was lost has to be made up for; else `take_back` brings back what has moved, of which a copy is
held from when the batch is given out (optim/engine/keeping.py).
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from thinwire.comm import CommError
from thinwire.comm.protocol import Group
from thinwire.contract.spec import uneven_boxes
from thinwire.optim.engine.keeping import Kept
from thinwire.workers.data.feed import Share, own_part
from thinwire.workers.ranks import Box
from thinwire.workers.session.registered import Optimizers, Registered
from thinwire.workers.session.training import ScriptError

logger = logging.getLogger(__name__)

_threads = threading.local()
"""Of each thread, as ranks may be threads: `bodies`, those of its loops that are open."""

STEPLESS = 20
"""Batches in a row without optimizer.step() until the log says so."""


@dataclass(frozen=True, slots=True)
class Made:
    """A step that was made in a body. seconds: of the whole body; of these, optimizer_s: inside of step(), where known.

    weight: of this rank's share. numbers: what the body has reported. left_out: no optimizer has counted it.
    elements: of the vectors that its steps were of, together; None: of a step of the one optimizer.
    lost: with what the exchange after it failed, where the step stands all the same.
    """

    phase: str
    lr: float
    seconds: float
    weight: float
    numbers: dict[str, Tensor]
    optimizer_s: float = 0.0
    left_out: bool = False
    lost: CommError | None = None
    elements: int | None = None


class _Body:
    """One of them. num_steps: of each optimizer when it began. phase, lr: of the first optimizer; lr: with which its
    step was made, once it was. elements: as Made.elements, so far."""

    def __init__(self, optimizers: Optimizers, share: Share) -> None:
        self.share, self.optimizers = share, optimizers
        self.num_steps, self.phase = [one.num_steps for one in optimizers], optimizers[0].phase.value
        self.lr = float(optimizers[0].param_groups[0]["lr"])
        self.elements = 0
        self.has_stepped = False
        self.strangers: set[str] = set()
        self.began = time.perf_counter()
        self.step_began: float | None = None
        self.optimizer_s = 0.0


class Bodies:
    """All bodies of one loop, one after another; at most one is open.

    outside: says in words why optimizer.step() is refused where none is open; None where it is not.
    """

    def __init__(self, registered: Registered) -> None:
        self._optimizers, self._registered = registered.optimizers, registered
        self.outside: Callable[[], str | None] = lambda: None
        self._open: _Body | None = None
        self._lost: CommError | None = None
        self._kept: list[Kept] = []
        """Several optimizers, as they were when the last batch was given out."""
        self._stepless, self._pid = 0, os.getpid()
        self.numbers: dict[str, Tensor] = {}
        """What is reported of the step that is being made."""
        for optimizer in self._optimizers:
            optimizer.undone = self._note_undone
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    @property
    def is_open(self) -> bool:
        """Is a batch out?"""
        return self._open is not None

    @property
    def is_undone(self) -> bool:
        """Was the step of the open body lost, and does not stand?"""
        return self._lost is not None and not self.has_counted

    @property
    def has_stepped(self) -> bool:
        """Has the open body made its step, or some of its steps, and do they count?"""
        return self._open is not None and self._open.has_stepped and not self.is_undone

    @property
    def has_counted(self) -> bool:
        """Has an optimizer counted a step of the open body, which stands? Where several have lost one none does."""
        body = self._open
        if body is None or (self._lost is not None and len(self._optimizers) > 1):
            return False
        return any(one.num_steps > steps for one, steps in zip(self._optimizers, body.num_steps, strict=True))

    def refuse_fork(self, call: str) -> None:
        """Raises: ScriptError in a process that the script has forked."""
        if os.getpid() != self._pid:
            raise ScriptError(
                f"run.{call} in process {os.getpid()}, which process {self._pid} has forked: only the process that "
                "began the loop is a worker; end a forked one with os._exit()"
            )

    @contextmanager
    def open(self, share: Share) -> Iterator[None]:
        """The batch of this share is given out inside."""
        self.numbers = {}
        self._registered.remember()
        if len(self._optimizers) > 1:
            self._kept = [Kept(one) for one in self._optimizers]
        self._open = body = _Body(self._optimizers, share)
        watching = _watching()
        watching.append(body)
        handles: list[Any] = []
        weight = share.weight
        if weight != 1.0:
            for param in (param for one in self._optimizers for group in one.param_groups for param in group["params"]):
                if param.requires_grad:
                    handles.append(param.register_hook(lambda grad: grad * weight))
        try:
            yield
        finally:
            watching.remove(body)
            for handle in handles:
                handle.remove()

    def close(self) -> Made:
        """The body is over: what it has made. Raises: ScriptError; the CommError of a step that was lost."""
        self.refuse_fork("batches()")
        counted = self.has_counted
        body, self._open = self._open, None
        assert body is not None
        if body.strangers:
            raise ScriptError(
                f"{', '.join(sorted(body.strangers))} made a step and is not registered: a worker that comes later "
                "could not be given its state; say run.register(name=optimizer), of each optimizer that makes steps"
            )
        lost, self._lost = self._lost, None
        for optimizer in self._optimizers:
            optimizer.lost = None
        if lost is not None and not counted:
            self._registered.put_back()
            raise lost
        if lost is not None:
            logger.warning("step_stands step=%d reason=%r", body.share.step, str(lost))
        self.let_go()
        self._note_stepless(body)
        seconds = time.perf_counter() - body.began
        weight, left_out = body.share.weight, not counted
        elements = body.elements if len(self._optimizers) > 1 else None
        return Made(body.phase, body.lr, seconds, weight, self.numbers, body.optimizer_s, left_out, lost, elements)

    def take_back(self) -> None:
        """The last batch does not count, on any rank: what its steps have moved is as when it was given out. Local."""
        for kept in self._kept:
            if kept.has_moved:
                kept.put_back()
        self.let_go()

    def end(self) -> None:
        """There is no further batch: one that was lost is not made again. Local."""
        if self._open is None:
            self.take_back()

    def let_go(self) -> None:
        """What the last batch has moved stands, or is gone. Local."""
        self._kept = []

    def _note_stepless(self, body: _Body) -> None:
        self._stepless = 0 if body.has_stepped else self._stepless + 1
        if self._stepless == STEPLESS:
            logger.warning(
                "no_step batches=%d reason=the loop's body has not called optimizer.step(): nothing is learned. To "
                "accumulate gradients make global_batch larger, and cut the batch inside of the body",
                STEPLESS,
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The optimizer's step begins, in a body. Where it was given a closure, the body's backward is yet to come."""
        body = self._open
        self.refuse_fork("batches()")
        if body is None:
            words = self.outside()
            if words is not None:
                raise ScriptError(f"optimizer.step() outside of the loop's body, {words}")
            return None
        if body.has_stepped and len(self._optimizers) == 1:
            raise ScriptError(
                f"optimizer.step() for a second time with one batch, at step {body.share.step}: a step of the run is "
                "one step of the optimizer; call it once for each batch of run.batches()"
            )
        body.has_stepped = True
        if optimizer is self._optimizers[0]:
            body.lr = float(optimizer.param_groups[0]["lr"])
        body.elements += next(one for one in self._optimizers if one is optimizer).space.layout.num_live

        def computed() -> None:
            self._registered.before_step()
            body.step_began = time.perf_counter()

        return once_computed(args, kwargs, computed)

    def _after_step(self, *_: object) -> None:
        body = self._open
        if body is not None and body.step_began is not None:
            body.optimizer_s += time.perf_counter() - body.step_began

    def _note_undone(self, error: CommError) -> None:
        """An exchange of this optimizer was lost: the body goes on, and a step that does not stand is made again."""
        if self._open is None:
            raise error
        if self._lost is None:
            self._lost = error.with_traceback(None)
            if not self.has_counted:
                self._registered.keep()
            if len(self._optimizers) > 1:  # what its peers have, nobody knows: no more is sent with this batch
                for optimizer in self._optimizers:
                    optimizer.lost = self._lost


def _watching() -> list[_Body]:
    if not hasattr(_threads, "bodies"):
        _threads.bodies = []
    bodies: list[_Body] = _threads.bodies
    return bodies


def _note_stranger(optimizer: Optimizer, *_: object) -> None:
    """Whatever optimizer has stepped in this thread."""
    if torch.compiler.is_compiling():  # a compiled step is traced through this
        return
    for body in _watching():
        if not any(optimizer in (one, one.inside) for one in body.optimizers):
            body.strangers.add(type(optimizer).__name__)


# Once, and never taken away: torch goes through all of them after each step, and fails if another thread adds one then.
register_optimizer_step_post_hook(_note_stranger)


def once_computed(args: Any, kwargs: Any, call: Callable[[], None]) -> tuple[Any, Any] | None:
    """For a hook before an optimizer's step(): `call` when gradients are there: after its closure, if any."""
    this, *given = args
    closure = kwargs["closure"] if "closure" in kwargs else next(iter(given), None)
    if closure is None:
        call()
        return None

    calls = iter((call,))  # CADA computes two gradients: what moves between them is its own

    def computed() -> Any:
        loss = closure()
        for first in calls:
            first()
        return loss

    return (this, computed), {}


def weighed(
    share: Share, weigh: Callable[[Any], Any] | None, samples: int, group: Group, device: torch.device
) -> Share:
    """The share, whose weight is its part of all that ranks count in this step, such as tokens.

    weigh: counts what the mean loss of a batch is a mean over; None, or gives None on all ranks: samples. Where nothing
    is counted on any rank the weight is that of the samples too.
    Collective. Raises: ScriptError for what is no count; PeerLost.
    """
    if weigh is None or group.size == 1:
        return share
    found = weigh(share.batch)
    if found is None:
        return share
    try:
        count = float(found)
    except (TypeError, ValueError, RuntimeError) as error:  # a text, a list, a tensor of several
        raise _no_count(found, share) from error
    if not (math.isfinite(count) and count >= 0):
        raise _no_count(count, share)
    positions, of_samples = own_part(samples, group.rank, group.size)
    own = count * of_samples / len(positions)  # a batch that several ranks compute counts once
    mean = torch.tensor([own], dtype=torch.float64, device=device)
    group.mean_(mean)
    return replace(share, weight=own / mean.item()) if mean.item() else share


def _no_count(found: object, share: Share) -> ScriptError:
    return ScriptError(f"run.batches(weigh=...) counted {found!r} in its batch of step {share.step}: give one from 0")


def refuse_unequal(samples: int, box: Box, numbers: Iterable[int], weigh: Callable[[Any], Any] | None) -> None:
    """Where a model is sharded FSDP makes the mean over a box, of shares that weigh alike. numbers: of boxes.

    Raises: ScriptError.
    """
    if box.size == 1:
        return
    if weigh is not None:
        raise ScriptError("run.batches(weigh=...): leave it out where a worker is a box: FSDP weighs shares alike")
    uneven = uneven_boxes(samples, box.size, numbers)
    if uneven is not None:
        raise ScriptError(
            f"{samples} samples of a step (global_batch, or what the last one has) are no multiple of {uneven} "
            f"boxes x {box.size} processes, and FSDP weighs shares alike: give a multiple for each number of boxes "
            "that the job may have, from workers.min to workers.max; or let both be the same, and a job that has lost "
            "a box waits for another"
        )
