"""The body of a script's loop, from the batch to the next one: what is seen of it, and what it must not do.

Gradients are weighed there by this rank's share of the step (hooks on the parameters, for this step only). A step that
is lost in optimizer.step() is undone there; step() returns, the body ends, and `close` raises what became of it. Where
the optimizer has counted the step all the same, as local steps do, it stands: a step that was made, with an error.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from thinwire.comm import CommError
from thinwire.comm.protocol import Group
from thinwire.contract.reports import wrong_with_reported_name
from thinwire.contract.spec import uneven_boxes
from thinwire.optim import FlatOptimizer
from thinwire.workers.data.feed import Share, own_part
from thinwire.workers.ranks import Box
from thinwire.workers.session.registered import Registered
from thinwire.workers.session.training import ScriptError

logger = logging.getLogger(__name__)

_threads = threading.local()
"""Of each thread, as ranks may be threads: `bodies`, those of its loops that are open."""

STEPLESS = 20
"""Batches in a row without optimizer.step() until the log says so."""


Found = float | Tensor | Mapping[str, float | Tensor]
"""What a function of run.evaluate_every returns."""


@dataclass(frozen=True, slots=True)
class Made:
    """A step that was made in a body. seconds: of the whole body; of these, optimizer_s: inside of step(), where known.

    weight: of this rank's share. numbers: what the body has reported. left_out: the optimizer has not counted it.
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


class _Body:
    """One of them. lr: with which its step was made, once it was."""

    def __init__(self, optimizer: FlatOptimizer[Any], share: Share) -> None:
        self.share, self.optimizer = share, optimizer
        self.num_steps, self.phase = optimizer.num_steps, optimizer.phase.value
        self.lr = float(optimizer.param_groups[0]["lr"])
        self.has_stepped = False
        self.strangers: set[str] = set()
        self.began = time.perf_counter()
        self.step_began: float | None = None
        self.optimizer_s = 0.0


class Bodies:
    """All bodies of one loop, one after another; at most one is open.

    outside: says in words why optimizer.step() is refused where none is open; None where it is not.
    """

    def __init__(self, optimizer: FlatOptimizer[Any], registered: Registered) -> None:
        self._optimizer, self._registered = optimizer, registered
        self.outside: Callable[[], str | None] = lambda: None
        self._open: _Body | None = None
        self._lost: CommError | None = None
        self._stepless, self._pid = 0, os.getpid()
        self.numbers: dict[str, Tensor] = {}
        """What is reported of the step that is being made."""
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
        """Has the open body made its step, which counts?"""
        return self._open is not None and self._open.has_stepped and not self.is_undone

    @property
    def has_counted(self) -> bool:
        """Has the optimizer counted the step of the open body?"""
        body = self._open
        return body is not None and self._optimizer.num_steps > body.num_steps

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
        self._open = body = _Body(self._optimizer, share)
        watching = _watching()
        watching.append(body)
        handles: list[Any] = []
        weight = share.weight
        if weight != 1.0:
            for group in self._optimizer.param_groups:
                for param in group["params"]:
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
                "could not be given its state; there is one optimizer a run: register that, with all parameters"
            )
        lost, self._lost = self._lost, None
        if lost is not None and not counted:
            self._registered.put_back()
            raise lost
        if lost is not None:
            logger.warning("step_stands step=%d reason=%r", body.share.step, str(lost))
        self._note_stepless(body)
        seconds = time.perf_counter() - body.began
        weight, left_out = body.share.weight, not counted
        return Made(body.phase, body.lr, seconds, weight, self.numbers, body.optimizer_s, left_out, lost)

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
        if body.has_stepped:
            raise ScriptError(
                f"optimizer.step() for a second time with one batch, at step {body.share.step}: a step of the run is "
                "one step of the optimizer; call it once for each batch of run.batches()"
            )
        body.has_stepped = True
        body.lr = float(self._optimizer.param_groups[0]["lr"])

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
        if optimizer is not body.optimizer and optimizer is not body.optimizer.inside:
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


def by_name(found: Found) -> dict[str, float]:
    """A number alone is the validation loss. Raises: ScriptError for what is neither a number nor numbers by name."""
    named = found if isinstance(found, Mapping) else {"loss": found}
    numbers = {}
    for name, value in named.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            what = f"{type(value).__name__} {str(value)[:100]!r}" + (f" as {name!r}" if found is named else "")
            raise ScriptError(
                f"the function of run.evaluate_every returned {what}: return the validation loss of this rank's part, "
                'a number, or numbers by name, such as {"loss": 0.31, "accuracy": 0.92}'
            ) from error
        if wrong := wrong_with_reported_name(f"validation_{name}"):
            raise ScriptError(f"the function of run.evaluate_every returned {str(name)[:100]!r}: {wrong}")
    return numbers
