"""Buckets that are sent while backward still runs: when their gradients are final.

    backward   |...layer 3...|...layer 2...|...layer 1...|  step()
    hooks            bucket 0      bucket 1     bucket 2    finish, update

A hook on each parameter says when its gradient is final. A bucket is launched when those of all its parameters are,
and strictly after the bucket before it, so that every rank sends in the same order whatever its timing. At the end of
that backward the rest is launched, of which no gradient came: so what ranks send before the next collective of the
user's is the same, whichever experts each has used. Algorithms that cannot send early launch in step().

A hook cannot know whether step() follows. So overlap is asked for, no_sync() surrounds every backward but the last,
and a backward whose step() never comes is undone when zero_grad() is called. All ranks must do so alike.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of dynamo at once
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from thinwire.comm.errors import CommError, PeerLost
from thinwire.comm.exchange.exchange import gather_flags, leave
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.layout import Span
from thinwire.comm.protocol import Group
from thinwire.comm.signals import deferred
from thinwire.optim.engine.exchanges import Exchange
from thinwire.optim.engine.flat import FlatSpace
from thinwire.optim.engine.local import local
from thinwire.optim.engine.sent import WRITTEN, Sent, spoil_

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Round:
    """From the first hook of a backward to its step(). exchange: None where nothing goes early.

    ready: of each tensor, has backward made its gradient? taken: is it where the exchange reads it? arrived: those
    that are ready and not taken; they are at the next launch, together.
    """

    exchange: Exchange | None
    ready: list[bool]
    taken: list[bool]
    missing_K: list[int]
    arrived: list[int] = field(default_factory=list)
    num_launched: int = 0
    left: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each that is taken: where its gradient was left in memory, and its version; another one in step() says that it
    was written since."""
    neighbours: dict[int, list[int]] = field(default_factory=dict)
    """Of shards, by the memory that their gradients lie in: those that are taken."""
    quiet: list[int] = field(default_factory=list)
    """Of those that are taken and lie in g_N: which had got no gradient."""
    awaits_end: bool = False
    """Is the end of this backward to launch what no hook has?"""
    sent: Sent = field(default_factory=Sent)
    written: bool = False
    """Has step() found another version of one that is in `left`?"""


_owners: dict[int, weakref.ref[Overlap]] = {}
"""By the id of a parameter the Overlap that its hooks belong to, weakly: a new optimizer takes the parameters over.
By id, for torch swaps no tensor with a weak reference; an Overlap holds its parameters, so that no id comes twice."""


class Overlap:
    """The buckets of one optimizer's gradients, and the hooks that launch them.

    spans: the buckets, in order of launch. begin: what the next step exchanges, or why that cannot go before step();
    called by the first hook of a backward, held weakly. hooks: whether there are any; without them all is launched in
    step().
    """

    def __init__(
        self, space: FlatSpace, spans: Sequence[Span], begin: Callable[[], Exchange | str], *, hooks: bool
    ) -> None:
        self._in_backward = self._in_step = 0
        self._waits_for: str | None = None
        self._space = space
        self._begin = weakref.WeakMethod(begin)  # an optimizer is to go when it is dropped, and its hooks with it
        self.num_buckets = len(spans)
        # The last one tells what has been found in step(): it is ready when backward is over, or nearly.
        self._num_early = len(spans) - (space.box is not None)
        self._last = spans[-1]
        self._buckets = [
            [k for k, (start, stop) in enumerate(spans) if start < tensor.stop and tensor.start < stop]
            for tensor in space.tensors
        ]
        self._tensors_K = [sum(k in buckets for buckets in self._buckets) for k in range(len(spans))] + [1]
        """How many tensors each bucket has elements of; and of one more, which nothing makes whole."""
        self._round: _Round | None = None
        self._suspended = 0
        self._handles: list[RemovableHandle] = []
        for tensor in space.tensors:
            owner = _owners.pop(id(tensor.param), lambda: None)()
            if owner is not None:
                owner.close()
        if hooks:
            self._watch()

    @property
    def first_buckets(self) -> list[int | None]:
        """Of each tensor, the first of the buckets that have elements of it; None: none has."""
        return [buckets[0] if buckets else None for buckets in self._buckets]

    @property
    def is_open(self) -> bool:
        """Has a backward run that step() has not followed yet?"""
        return self._round is not None

    @property
    def exchange(self) -> Exchange | None:
        """What hooks have begun to send; None where nothing went early."""
        return None if self._round is None else self._round.exchange

    @property
    def taken(self) -> Sequence[bool]:
        """Of each tensor: is its gradient where the exchange reads it already, and perhaps sent?"""
        return () if self._round is None else self._round.taken

    @property
    def quiet(self) -> Sequence[int]:
        """Which of those had got no gradient."""
        return () if self._round is None else self._round.quiet

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, a backward only adds to the gradients."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def report(self) -> dict[str, Any]:
        """Of the last step: buckets that were launched in backward and in step(), and what the latter waited for."""
        return {
            "buckets": self.num_buckets,
            "in_backward": self._in_backward,
            "in_step": self._in_step,
            "waits_for": self._waits_for,
        }

    @property
    def has_launched(self) -> bool:
        """Has backward sent a bucket of the next step, whose place in g the mean may have taken?"""
        return self._round is not None and self._round.num_launched > 0

    def refuse_between(self, call: str) -> None:
        """Raises: RuntimeError where backward has begun to send and step() has not followed."""
        if self.exchange is not None:
            raise RuntimeError(
                f"{call}() between backward and step(): gradients are on their way. Call it after step(), or after "
                "zero_grad() to drop them"
            )

    def refuse_written(self) -> None:
        """Raises: RuntimeError where gradients have been written since hooks took them.

        Of shards, which one rank of a box may have written alone, what was written counts where nothing goes early, and
        else look_at_shards() tells the others first.
        """
        here = self._round
        if here is None:
            return
        now = self._space.marks_of_gradients(here.left)
        changed = [i for (i, known), mark in zip(here.left.items(), now, strict=True) if mark != known]
        if changed and self._space.box is None:
            raise RuntimeError(WRITTEN)
        if here.exchange is None:
            for i in changed:
                here.taken[i] = False
        here.written = bool(changed)

    def look_at_shards(self) -> None:
        """Have all ranks learn of gradients of shards that are not as they were sent (sent.py). No wait, local."""
        here, box = self._round, self._space.box
        if box is not None:
            box.found = None
            if here is not None and here.exchange is not None:
                box.found = here.sent.differ(self._space, here.written)
                spoil_(self._space, self._last, here.exchange.runs, box.found)

    def refuse_written_shards(self, group: Group) -> None:
        """After NonFiniteInput: was it look_at_shards(), on any rank? Collective. Raises: RuntimeError, alike."""
        box = self._space.box
        if box is not None and self._handles:
            own = self._space.g_N.new_tensor(float(box.found_by_any))
            if gather_flags(group, own).any():
                raise RuntimeError(WRITTEN)

    def complete(self, begin: Callable[[], Exchange], beside: Callable[[], None]) -> None:
        """Launch what hooks have not, and wait for all. begin: makes the exchange where no hook has.

        beside: what else all ranks send, when the last bucket is launched. A peer that is lost in it does not undo the
        step: finish() decides, and the next call tells. A rank that has lost one in the exchange takes no part in it.
        Raises: PeerLost, NonFiniteInput, and what else beside raises; then it is undone.
        """
        here, self._round = self._round, None
        exchange, num_launched = None, 0
        if here is not None:
            exchange, num_launched = here.exchange, here.num_launched
        exchange = exchange or begin()
        self.launch_all(exchange, beside, num_launched)
        exchange.finish()
        self._in_backward, self._in_step = num_launched, len(exchange.at) - num_launched

    def launch_all(self, exchange: Exchange, beside: Callable[[], None], num_launched: int = 0) -> None:
        """Launch what is not launched, and send what goes beside it. Raises: as complete(), but for finish()."""
        with exchange.launching():
            for k in exchange.at[num_launched:]:
                exchange.launch(k)
        try:
            if not exchange.has_failed:
                beside()
        except PeerLost as error:
            logger.warning("peer_lost_beside_exchange reason=%s", error)
        except (CommError, ValueError):
            exchange.abandon()
            raise

    def abandon(self) -> None:
        """Undo what hooks have sent, if anything. Collective where a backward has begun to send; all ranks alike.

        Raises: PeerLost.
        """
        here, self._round = self._round, None
        if here is not None and here.exchange is not None:
            here.exchange.abandon()

    def undo(self, error: BaseException, reduce: Reducer, group: Group) -> None:
        """After this error of a step: undo what hooks have sent, with the others, and then what is open, without them.

        After one that step() does not name, such as a signal's, this rank has left: the others are to wait no more.
        """
        if not isinstance(error, CommError | ValueError | RuntimeError | TypeError):
            leave(group, error)
        try:
            self.abandon()
        except PeerLost as lost:
            logger.warning("peer_lost_while_undoing reason=%s", lost)  # a consequence, or reported by the next call
        finally:
            reduce.forget()

    def close(self) -> None:
        """Remove the hooks: the parameters have another optimizer now."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watch(self) -> None:
        mine = weakref.ref(self)  # hooks live as long as the parameter
        weakref.finalize(self, _forget, [id(tensor.param) for tensor in self._space.tensors], mine).atexit = False
        for index, tensor in enumerate(self._space.tensors):
            before, after = _hooks(mine, index)
            self._handles += [
                tensor.param.register_hook(before),  # type: ignore[no-untyped-call]
                tensor.param.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
            ]
            _owners[id(tensor.param)] = mine

    def _refuse_second(self, here: _Round, index: int) -> None:
        if not any(t.param.grad is not None for t, ready in zip(self._space.tensors, here.ready, strict=True) if ready):
            self.abandon()  # model.zero_grad() instead of the optimizer's: that batch was skipped
            return
        raise RuntimeError(
            f"{self._space.tensors[index].label}: a second backward reached it before step(), and its gradient may "
            "have been sent: call backward inside `with optimizer.no_sync():` for all micro-steps but the last, or "
            "optimizer.zero_grad() to skip a batch, on every rank; reentrant checkpointing needs overlap=False"
        )

    def _after_accumulation(self, index: int) -> None:
        if self._suspended:
            return
        here = self._round
        if here is not None and here.ready[index]:  # FSDP calls this hook alone, and not the one before
            self._refuse_second(here, index)
            here = self._round
        if here is None:
            here = self._open()
        here.ready[index] = True
        here.arrived.append(index)
        missing_K = here.missing_K
        for k in self._buckets[index]:
            missing_K[k] -= 1
        if here.exchange is None:
            self._take_arrived(here)  # at once, so that backward's memory is free for the next
            return
        if not here.awaits_end:
            self._await_end(here)
        if not missing_K[here.num_launched]:  # of the last bucket and one more: never
            self._launch_ready(here, here.exchange)

    @_disable_dynamo
    def _await_end(self, here: _Round) -> None:
        """Have the end of this backward call _at_end, unless it is inside of another one."""
        if not _is_nested():
            here.awaits_end = True
            Variable._execution_engine.queue_callback(partial(self._at_end, here))

    def _at_end(self, here: _Round) -> None:
        """Backward is over: launch what waits for gradients that have not come."""
        if self._round is not here or here.exchange is None:  # undone meanwhile
            return
        others = [index for index, ready in enumerate(here.ready) if not ready]
        for index in others:
            here.ready[index] = True
        here.arrived += others
        here.missing_K = [*[0] * self.num_buckets, 1]
        self._launch_ready(here, here.exchange)

    @_disable_dynamo
    @torch.no_grad()
    def _open(self) -> _Round:
        begin = self._begin()
        nothing = [False] * len(self._buckets)
        self._round = _Round(None, nothing, nothing.copy(), self._tensors_K.copy())
        found = "the optimizer is gone" if begin is None else begin()
        waits_for = found if isinstance(found, str) else None
        if waits_for is not None and waits_for != self._waits_for:
            logger.info("not_overlapped reason=%s", waits_for)
        self._waits_for = waits_for
        self._round.exchange = None if isinstance(found, str) else found
        return self._round

    @_disable_dynamo
    @torch.no_grad()
    def _launch_ready(self, here: _Round, exchange: Exchange) -> None:
        with deferred():
            while here.num_launched < self._num_early and not here.missing_K[here.num_launched]:
                self._take_arrived(here)
                exchange.launch(here.num_launched)
                here.sent.written(exchange.wrote)
                here.num_launched += 1
            if here.num_launched == self._num_early:
                self._take_arrived(here)

    def _take_arrived(self, here: _Round) -> None:
        """Read the gradients that have arrived where they are, where the exchange can; bring the others into g_N."""
        space, exchange, arrived = self._space, here.exchange, here.arrived
        # In low precision it stays where it is: where nothing goes early step() takes what unscale_() makes of it.
        taken = arrived if exchange is not None else [i for i in arrived if not space.is_low(i)]
        here.quiet += space.take_gradients(taken, None if exchange is None else exchange.keeps)
        if space.box is not None and exchange is not None:
            here.sent.watch(space, arrived)
        for index in taken:
            here.taken[index] = True
        here.left.update(zip(arrived, space.marks_of_gradients(arrived), strict=True))
        if space.box is not None:
            for index in arrived:
                self._follow_version(here, index)
        arrived.clear()

    def _follow_version(self, here: _Round, index: int) -> None:
        """FSDP makes the gradients of a module in one piece of memory, which has one version, and adds to one after
        another: those that were taken before have this one's version now.
        """
        grad = self._space.tensors[index].param.grad
        if grad is None:
            return
        neighbours = here.neighbours.setdefault(local(grad).untyped_storage().data_ptr(), [])
        for i, now in zip(neighbours, self._space.marks_of_gradients(neighbours), strict=True):
            here.left[i] = now if now[0] == here.left[i][0] else here.left[i]
        neighbours.append(index)


def _is_nested() -> bool:
    """Is this a backward inside of another, as reentrant checkpointing has? Its end is not that of the outer one."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _NODE:
            return True
    return False


_NODE = BackwardCFunction.apply.__code__
"""What the engine calls in a backward to run the backward of an autograd.Function."""


def _forget(params: list[int], owner: weakref.ref[Overlap]) -> None:
    for param in params:
        if _owners.get(param) is owner:
            del _owners[param]


def _hooks(owner: weakref.ref[Overlap], index: int) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
    """Of one parameter: before its gradient is added to what it has, and after. They run once a gradient."""

    def before(_: Tensor) -> None:
        overlap = owner()
        if overlap is not None and (here := overlap._round) is not None and here.ready[index]:
            overlap._refuse_second(here, index)

    def after(_: Tensor) -> None:
        overlap = owner()
        if overlap is not None:
            overlap._after_accumulation(index)

    return before, after
