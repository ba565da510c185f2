"""How much the moments of a tensor have seen: torch.optim.AdamW counts it by parameter, we by run of equal tensors.

A tensor that joins late, or comes back after it was frozen, has moments that began at zero later than the others', or
stood still: 1 - beta^t takes its own t. Tensors that have seen the same and are neighbours in a group are one run, with
hyperparameters of its own; while all have seen the same a run is a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.optim.engine.places import FlatTensor


@dataclass(frozen=True, slots=True)
class Age:
    """Of one tensor. missed: steps of the run that it was not in.

    unseen: updates of the variance, as the optimizer counts them, that its own has not had; None: its variance is kept
    as it is used, after the freeze and in a second warm-up, and nothing is corrected any more.
    """

    missed: int = 0
    unseen: int | None = 0

    @classmethod
    def of(cls, steps: int, seen: int | None, num_steps: int, num_updates: int) -> Age:
        """Of a tensor that was in so many steps of num_steps, and whose variance has seen so many of num_updates."""
        return cls(num_steps - steps, None if seen is None else num_updates - seen)

    def counts(self, num_steps: int, num_updates: int) -> tuple[int, int | None]:
        """The steps and updates that Age.of takes."""
        return num_steps - self.missed, None if self.unseen is None else num_updates - self.unseen


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours of one parameter group that have seen the same. span: from the first one's start to the next run's."""

    group: int
    span: slice
    unseen: int | None

    def seen(self, updates: int) -> int | None:
        """Updates that the variance has had when the optimizer counts so many: t of 1 - beta^t; None as in Age."""
        return None if self.unseen is None else updates - self.unseen


def runs_of(tensors: Sequence[FlatTensor], spans: Sequence[slice], ages: Sequence[Age]) -> list[Run]:
    """The runs, group by group. A group without tensors has none."""
    found: list[Run] = []
    for group, span in enumerate(spans):
        inside = [i for i, tensor in enumerate(tensors) if span.start <= tensor.start < span.stop]
        starts = [i for n, i in enumerate(inside) if n == 0 or ages[i].unseen != ages[inside[n - 1]].unseen]
        stops = [*(tensors[i].start for i in starts[1:]), *([span.stop] if starts else [])]
        found += [
            Run(group, slice(tensors[i].start, stop), ages[i].unseen) for i, stop in zip(starts, stops, strict=True)
        ]
    return found
