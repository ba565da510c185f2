"""The shares of a dataset that a worker computes, step by step, for any number of workers that come and go.

A step is a number of samples, independent of who computes them. Which they are depends on its number alone:

    map-style   len() and [i]: the order of an epoch is drawn from (seed, epoch), as in order.py. A worker reads
                its own samples and no others, through a DataLoader. With visit(i, number) in place of [i] a dataset is
                given the sample's number in the run too: what it draws from (seed, number), such as a mask or a shift,
                is drawn anew in every epoch, and is the same whichever worker draws it, and how often.
    iterable    the samples in the order in which they come. Every worker reads all of them and takes its own. Who comes
                later reads from the beginning, or has the dataset's own state loaded, where it has a state_dict().

Shares differ by at most one sample; where there are fewer samples than workers, some compute the same one. Each says by
its weight how much of the step's mean loss it is: the mean of the weighed losses over the workers is the mean over
the samples.
"""

from __future__ import annotations

import copy
import logging
import math
import operator
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from thinwire.workers.data.order import Order, generator, share
from thinwire.workers.data.seeded import Seeded

logger = logging.getLogger(__name__)

_OWN = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "dataset", "generator")
"""Arguments of a DataLoader that follow from the step."""


DIGITS = 16
"""Of a digest: for differences that nobody made on purpose."""


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part of a step. weight: of its mean loss; the mean over workers of weight * loss is the loss."""

    step: int
    batch: Any
    weight: float


class Feed(Protocol):
    """The steps of one dataset. last: how many there are; None: it is not known yet, or there is no end."""

    last: int | None

    def shares(self, step: int, rank: int, size: int) -> Iterator[Share]:
        """This worker's shares from `step` on, one step after another; asked anew whenever workers change."""

    def samples(self, step: int) -> int:
        """How many samples the step has, over all workers."""


def feed_of(
    dataset: Any,
    global_batch: int,
    *,
    steps: int | None,
    epochs: int | None,
    shuffle: bool,
    seed: int,
    loader: Mapping[str, Any],
) -> MapFeed | StreamFeed:
    """Raises: TypeError, ValueError for what is none, or has no end where one is needed."""
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "run.batches() was given a DataLoader: give it the dataset itself, and what the loader was made with as "
            "loader=dict(num_workers=..., collate_fn=...); it makes one for this worker's share"
        )
    if isinstance(dataset, Mapping):
        raise TypeError(
            "run.batches() was given a dict, which has no sample 0: give a list of samples, or for columns of tensors "
            "torch.utils.data.StackDataset(**columns)"
        )
    own = sorted(set(_OWN) & set(loader))
    if own:
        raise ValueError(
            f"run.batches(loader=...) has {', '.join(own)}: these follow from global_batch=, shuffle= and seed= of "
            "run.batches(); leave them out"
        )
    global_batch = _whole("global_batch", global_batch)
    steps, epochs = (None if n is None else _whole(name, n) for name, n in (("steps", steps), ("epochs", epochs)))
    if global_batch < 1 or (steps is not None and steps < 1) or (epochs is not None and epochs < 1):
        raise ValueError(f"global_batch = {global_batch}, steps = {steps}, epochs = {epochs}: give numbers from 1")
    # An IterableDataset inherits a [i] that raises, and may tell its length.
    if (
        hasattr(dataset, "__len__")
        and (hasattr(dataset, "__getitem__") or hasattr(dataset, "visit"))
        and not isinstance(dataset, IterableDataset)
    ):
        return MapFeed(dataset, global_batch, steps, epochs, shuffle, seed, loader)
    if isinstance(dataset, Iterable):
        if isinstance(dataset, Iterator):
            raise TypeError(
                f"run.batches() was given a {type(dataset).__name__}, which can be read only once: give it an object "
                "whose __iter__ begins anew, for a worker that comes later reads from the beginning"
            )
        return StreamFeed(dataset, global_batch, steps, epochs, loader)
    raise TypeError(
        f"run.batches() was given a {type(dataset).__name__}: a dataset has len() and [i], or can be iterated over"
    )


def _whole(name: str, value: Any) -> int:
    """Of Python, numpy or torch. Raises: TypeError for what is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"run.batches({name}={value!r}): give a whole number") from None


def own_part(samples: int, rank: int, size: int) -> tuple[range, float]:
    """The positions among the samples of a step that a rank computes, and the weight of their mean loss."""
    if samples >= size:
        positions = share(samples, rank, size)
        return positions, len(positions) * size / samples
    position = rank % samples  # computed by every rank that has this remainder
    return range(position, position + 1), size / (samples * len(range(position, size, samples)))


class MapFeed:
    """Of a dataset with len() and [i] or visit(i, number). Where it has a digest, that is of all that is in it."""

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        steps: int | None,
        epochs: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        loader: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        num_samples = len(dataset)
        if not num_samples:
            raise ValueError("run.batches() was given a dataset of no samples")
        self._dataset, self._global_batch, self._loader = dataset, global_batch, dict(loader)
        self._visited = hasattr(dataset, "visit")
        self._source: Any = _Visits(dataset) if self._visited else dataset
        self.order = (Order if shuffle else InOrder)(num_samples, seed)
        self._end: int | None = None  # samples of the whole run
        if epochs is not None or steps is None:
            self._end = num_samples * (epochs or 1)
        in_epochs = None if self._end is None else math.ceil(self._end / global_batch)
        self.last: int | None = min(steps or in_epochs or 0, in_epochs or steps or 0)
        self._iterator: Iterator[Any] | None = None

    @property
    def data(self) -> str:
        """As SessionFeed.data."""
        digest = getattr(self._dataset, "digest", None)
        of_all = "" if digest is None else f" #{digest[:DIGITS]}"
        kind = self._dataset.told if isinstance(self._dataset, Seeded) else type(self._dataset).__name__
        return f"{kind} of {self.order.num_samples} samples{of_all}"

    @property
    def drawing(self) -> str:
        """As SessionFeed.drawing."""
        shuffle = not isinstance(self.order, InOrder)
        return f"global_batch = {self._global_batch}, shuffle = {shuffle}, seed = {self.order.seed}"

    @property
    def length(self) -> str:
        """As SessionFeed.length."""
        return f"{self.last} steps"

    def samples(self, step: int) -> int:
        """As Feed.samples."""
        first = (step - 1) * self._global_batch
        return self._global_batch if self._end is None else max(1, min(self._global_batch, self._end - first))

    def shares(self, step: int, rank: int, size: int) -> Iterator[Share]:
        """As Feed.shares."""
        self._iterator = None  # ends the workers of the loader before
        steps = range(step, (self.last or step) + 1)
        mine = [own_part(self.samples(at), rank, size) for at in (steps[0], steps[-1])] if steps else []
        loader = DataLoader(
            self._source,
            batch_sampler=_Positions(self, steps, rank, size),
            generator=generator("loader", step),
            **_apart(self._loader),
        )
        self._iterator = iter(loader)
        for at, batch in zip(steps, self._iterator, strict=False):
            weight = mine[at == steps[-1]][1]
            yield Share(at, batch, weight)

    def share(self, step: int, rank: int, size: int) -> Share:
        """The one of this step: drawn here, by no process of a loader."""
        collate = self._loader.get("collate_fn") or default_collate
        batch = collate([self._source[one] for one in self.asked(step, rank, size)])
        return Share(step, batch, own_part(self.samples(step), rank, size)[1])

    def numbers(self, step: int, rank: int, size: int) -> range:
        """The numbers, over the whole run, of the samples that a rank computes in a step.

        Raises: ValueError for a step or a rank that does not exist.
        """
        if step < 1:
            raise ValueError(f"step {step} has no batch; steps count from 1")
        positions, _ = own_part(self.samples(step), rank, size)
        first = (step - 1) * self._global_batch
        return range(first + positions.start, first + positions.stop)

    def asked(self, step: int, rank: int, size: int) -> list[Any]:
        """For what the dataset is asked: i of each sample, with the sample's number where it is visited."""
        numbers = self.numbers(step, rank, size)
        samples: list[int] = self.order.samples(numbers).tolist()
        return list(zip(samples, numbers, strict=True)) if self._visited else samples


class _Visits:
    """A dataset that is visited, as a loader asks for its samples."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, asked: tuple[int, int]) -> Any:
        return self._dataset.visit(*asked)


class InOrder(Order):
    """As they stand, epoch after epoch."""

    def _epoch(self, epoch: int) -> torch.Tensor:
        return torch.arange(self.num_samples, dtype=torch.int64, device="cpu")


class _Positions:
    """The batch sampler of one worker's loader: made for some ranks, it is not asked after these have changed."""

    def __init__(self, feed: MapFeed, steps: range, rank: int, size: int) -> None:
        self._feed, self._steps, self._rank, self._size = feed, steps, rank, size

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[Any]]:
        return (self._feed.asked(step, self._rank, self._size) for step in self._steps)


_END = object()


@dataclass(slots=True)
class _Drawn:
    """All samples of one step, and what the dataset said of itself after them: its epoch and state."""

    step: int
    samples: list[Any]
    after: tuple[int, Any] | None


class StreamFeed:
    """Of a dataset that can only be iterated over. last is known when its end has been read."""

    def __init__(
        self, dataset: Any, global_batch: int, steps: int | None, epochs: int | None, loader: Mapping[str, Any]
    ) -> None:
        if loader.get("num_workers", 0) > 1:
            raise ValueError(
                f"run.batches(loader=...) has num_workers = {loader['num_workers']}, and each process would read the "
                "whole of an iterable dataset: at most 1, or make the dataset a map-style one"
            )
        self._dataset, self._global_batch, self._loader = dataset, global_batch, dict(loader)
        self._has_state = hasattr(dataset, "state_dict") and not loader.get("num_workers", 0)
        self._first = copy.deepcopy(dataset.state_dict()) if self._has_state else None
        self._epochs = epochs or (1 if steps is None else None)
        self.last = self._steps = steps
        self._collate: Callable[[list[Any]], Any] = self._loader.pop("collate_fn", None) or default_collate
        self._source: Iterator[Any] = iter(())
        self._epoch = 0
        self._ahead: list[Any] = []
        self._drawn: _Drawn | None = None
        self._given: dict[str, Any] | None = None

    @property
    def data(self) -> str:
        """As SessionFeed.data."""
        return f"{type(self._dataset).__name__}, read from its beginning"

    @property
    def drawing(self) -> str:
        """As SessionFeed.drawing."""
        return f"global_batch = {self._global_batch}"

    @property
    def length(self) -> str:
        """As SessionFeed.length."""
        return f"steps = {self._steps}, epochs = {self._epochs}"

    def samples(self, step: int) -> int:
        """As Feed.samples; of a step that was not read here, all of a batch."""
        drawn = self._drawn
        return len(drawn.samples) if drawn is not None and drawn.step == step else self._global_batch

    def shares(self, step: int, rank: int, size: int) -> Iterator[Share]:
        """As Feed.shares."""
        while self.last is None or step <= self.last:
            drawn = self._draw(step)
            if not drawn.samples:
                return
            positions, weight = own_part(len(drawn.samples), rank, size)
            mine = [drawn.samples[i] for i in positions]
            yield Share(step, self._collate(mine), weight)
            step += 1

    def state_dict(self) -> dict[str, Any]:
        """From where the step after the one that was drawn last is read: where the dataset can say it."""
        drawn = self._drawn
        if drawn is None or not self._has_state:
            return {"step": 0, "state": None}
        return {"step": drawn.step + 1, "state": drawn.after}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there when that step is asked for."""
        self._given = state

    def _draw(self, step: int) -> _Drawn:
        drawn = self._drawn
        if drawn is not None and drawn.step == step:
            return drawn
        if drawn is None or drawn.step != step - 1:
            self._go_to(step)
        samples: list[Any] = []
        while len(samples) < self._global_batch and self._look_ahead():
            samples.append(self._ahead.pop())
        after = (self._epoch, copy.deepcopy(self._dataset.state_dict())) if self._has_state else None
        if not self._look_ahead():
            self.last = step if samples else step - 1
        self._drawn = _Drawn(step, samples, after)
        return self._drawn

    def _go_to(self, step: int) -> None:
        """Read from the first sample of a step on: by the dataset's own state, or by reading all before it."""
        given, self._given = self._given, None
        self._ahead = []
        if given is not None and given["step"] == step and given["state"] is not None:
            self._source = self._read(given["state"])
            return
        self._source, skipped, began = self._read(None), (step - 1) * self._global_batch, time.monotonic()
        for _ in range(skipped):
            if next(self._source, _END) is _END:
                break
        if skipped:
            logger.warning(
                "stream_replayed samples=%d seconds=%.1f reason=a worker that comes later reads all before step %d "
                "again; a dataset with state_dict() and load_state_dict() need not",
                skipped,
                time.monotonic() - began,
                step,
            )

    def _look_ahead(self) -> bool:
        """Is there another sample?"""
        if not self._ahead:
            sample = next(self._source, _END)
            if sample is _END:
                return False
            self._ahead.append(sample)
        return True

    def _read(self, given: tuple[int, Any] | None) -> Iterator[Any]:
        """All samples from where the dataset said that it was, or from the first."""
        self._epoch, state = (0, self._first) if given is None else given
        if self._has_state:
            self._dataset.load_state_dict(copy.deepcopy(state))
        while self._epochs is None or self._epoch < self._epochs:
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(self._epoch)
            is_empty = given is None
            for sample in self._samples():
                is_empty = False
                yield sample
            if is_empty:
                raise ValueError(f"the dataset gave no sample in epoch {self._epoch}: its __iter__ must begin anew")
            self._epoch, given = self._epoch + 1, None

    def _samples(self) -> Iterator[Any]:
        if not self._loader.get("num_workers", 0):
            return iter(self._dataset)
        loader = DataLoader(
            self._dataset, batch_size=self._global_batch, collate_fn=_as_they_are, **_apart(self._loader)
        )
        return (sample for batch in loader for sample in batch)


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _apart(loader: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a loader whose processes hold none of this worker's connections.

    They are forked where nothing else is said: started anew they would run a script again that has no
    `if __name__ == "__main__"`.
    """
    how = loader.get("multiprocessing_context") or "fork"
    if not loader.get("num_workers", 0) or how != "fork":
        return dict(loader)
    return {**loader, "multiprocessing_context": how, "worker_init_fn": _Apart(loader.get("worker_init_fn"))}


class _Apart:
    """Called first in a process of a loader: lets go of the connections that it has inherited by fork.

    The end of a worker's connection tells the others of its death at once. A process that outlives it, and holds the
    same connection, would hide it from them.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        let_go_of_connections()
        if self._then is not None:
            self._then(worker)


def let_go_of_connections() -> None:
    """Point every inherited internet socket of this process at nothing. Only in a process that was just forked."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _is_internet(number):
                os.dup2(nothing, number)  # and not close(): its number must not be given to something else
        except OSError:
            continue  # the descriptor of the listing itself
    os.close(nothing)


def _is_internet(number: int) -> bool:
    import socket

    with socket.socket(fileno=os.dup(number)) as found:
        return found.family in (socket.AF_INET, socket.AF_INET6)
