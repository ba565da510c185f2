"""What a rank of LocalSteps holds in a round, and which part of the model crosses when.

    part 2        |........|........x........|........x        H = 9 steps, 3 parts: each part has rounds of H steps,
    part 1        |.....|........x........|........x           but the first of a cycle, and crosses (x) H / 3 steps
    part 0        |..|........x........|........x              after the part before it
    step          0  3  6  9  12    18    24

A cycle begins where all ranks hold the same parameters. Part p crosses after step (p + 1) H / parts of it, rounded
down; the last one ends it. Parts are numbered from the end of the vector, as buckets are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.layout import BYTE
from thinwire.optim.engine.checking import is_count
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.schedule import StepPlan, local_steps_plan
from thinwire.optim.engine.state import MASTER, Local, Replicated, Residual


@dataclass(slots=True)
class LocalStepsState:
    """Vectors beside those of the inner optimizer. outer: the momentum b. start: x_s; None where x is, on all ranks.

    lost: bool, a gradient of this rank since the last exchange was not finite and counted as zero. base: with overlap,
    of the part that is under way, x where that was sent: x_s - base is under way.

    An element in fp32 takes 8 bytes as parameter and gradient, 4 each as b and x_s, 4 + 4 / ranks of error memory, and
    what the inner optimizer keeps; with overlap 4 / parts more.
    """

    outer_N: Replicated
    move_error: Residual
    lost: Local
    start_N: Local | None = None
    base_b: Local | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """A vector of `numel` elements in so many parts of about one size, cut anywhere between bytes of signs.

    Raises: ValueError where there are not as many bytes.
    """

    numel: int
    count: int

    def __post_init__(self) -> None:
        if self.count > self.numel // BYTE:
            raise ValueError(
                f"parts = {self.count}: must be at most {self.numel // BYTE}, for the flat vector of all "
                f"parameters has {self.numel} values, and a part has at least {BYTE}"
            )

    @property
    def bounds(self) -> list[int]:
        """Where parts begin and end, ascending."""
        return [self.numel // BYTE * i // self.count * BYTE for i in range(self.count + 1)]

    def __getitem__(self, part: int) -> slice:
        bounds = self.bounds
        return slice(bounds[self.count - part - 1], bounds[self.count - part])


@dataclass(frozen=True, slots=True)
class Turn:
    """The part that crosses next, in a cycle that began after step `since`."""

    part: int
    since: int

    def due(self, every: int, parts: int) -> int:
        """The step after which it crosses."""
        return self.since + (self.part + 1) * every // parts

    def after(self, step: int, parts: int) -> Turn:
        """The next one, this part having crossed after that step."""
        return Turn(0, step) if self.part + 1 == parts else Turn(self.part + 1, self.since)


class InRounds(FlatOptimizer[LocalStepsState]):
    """When which part crosses, and what is saved of a round. every: H. parts: how many."""

    every: int
    parts: int
    _runs_beside: bool
    _turn: Turn | None
    """Whose turn it is after what has been applied; None: the first part's, of a cycle that began with that."""
    _under_way: tuple[Turn, int] | None
    """Whose turn it was in the exchange that is under way, and after which step that was launched."""
    _has_arrived: bool
    """Is D of the round before in x_s, and this rank's own move still in x?"""
    _at: slice
    """The part that was sent last."""

    @property
    def cuts(self) -> list[int]:
        """As Algorithm.cuts: bounds of parts, too."""
        return [*super().cuts, *self._parts.bounds]

    @property
    def _parts(self) -> Parts:
        return Parts(self.space.p_N.numel(), self.parts)

    def plan(self, step: int) -> StepPlan:
        """Gradients stay; the last step of a round ends it."""
        return local_steps_plan(due=step >= self._next_turn.due(self.every, self.parts))

    @property
    def _last_sent(self) -> int:
        """The step after which the last exchange was launched, or the run began."""
        return int(self.saved["last_sync"]) if self._under_way is None else self._under_way[1]

    @property
    def _turn_now(self) -> Turn:
        """After what has been applied."""
        return self._turn or Turn(0, int(self.saved["last_sync"]))

    @property
    def _next_turn(self) -> Turn:
        """After what has been launched."""
        if self._under_way is None:
            return self._turn_now
        turn, step = self._under_way
        return turn.after(step, self.parts)

    @property
    def next_exchange(self) -> int:
        """As Algorithm.next_exchange."""
        return max(self._next_turn.due(self.every, self.parts), self.num_steps + 1)

    @property
    def steps_beside(self) -> int:
        """As Algorithm.steps_beside."""
        if not self._runs_beside:
            return 0
        step = self.next_exchange
        return max(self._next_turn.after(step, self.parts).due(self.every, self.parts) - step, 1)

    @property
    def at_round_end(self) -> bool:
        """As Algorithm.at_round_end: of all parts. What was sent there may be under way."""
        return self._next_turn == Turn(0, self.num_steps)

    @property
    def has_sent(self) -> bool:
        """As Algorithm.has_sent: of one part."""
        return self.num_steps == self._last_sent

    @property
    def common_steps(self) -> int:
        """The step at which the last round ended that has been applied. In a round ranks hold different parameters."""
        return int(self.saved["last_sync"])

    def _is_applied(self, turn: Turn, step: int, *, whole: bool = False) -> None:
        self.saved["last_sync"] = step
        self._turn = None if whole else turn.after(step, self.parts)

    def own_state(self) -> dict[str, Any]:
        """In a round x, x_s and whether a gradient was lost; of x_s the masters, where there are any.

        base_N: x_s, and where an exchange has arrived that is not in x yet, of its part x where it was sent. turn: of
        several parts, their number and the turn.
        """
        s = self.vectors
        if s.start_N is None:
            return {}
        low = [x.reshape(-1) for i, x in enumerate(self.space.views(s.start_N)) if self.space.is_low(i)]
        masters = {MASTER: torch.cat(low)} if low else {}
        own = {"parameters": self.space.p_N.clone(), "start_N": s.start_N.clone(), "lost": bool(s.lost)}
        if self._has_arrived and s.base_b is not None:
            own["base_N"] = s.start_N.clone()
            own["base_N"][self._at] = s.base_b
        if self.parts > 1:
            own["turn"] = [self.parts, self._turn_now.part, self._turn_now.since]
        return {**own, **masters}

    def check_own(self, own: dict[str, Any]) -> None:
        """Refuse what own_state() cannot have given. Raises: ValueError."""
        if own and (
            own.keys() - {MASTER, "base_N", "turn"} != {"parameters", "start_N", "lost"}
            or not isinstance(own["lost"], bool)
        ):
            raise ValueError(f"state_dict has own {sorted(own)}: it is damaged, or of another optimizer")
        turn = own.get("turn", [1, 0, 0])
        counts = isinstance(turn, list | tuple) and len(turn) == 3 and all(is_count(one) for one in turn)
        if not counts or turn[1] >= turn[0]:
            raise ValueError(
                f"state_dict has own['turn'] = {turn!r}: must be [parts, whose turn it is, step]; it is damaged"
            )
        for key in ("parameters", "start_N", *(["base_N"] if "base_N" in own else [])) if own else ():
            found, shape = own[key], self.space.p_N.shape
            if not isinstance(found, Tensor) or found.shape != shape:
                raise ValueError(f"state_dict has own[{key!r}] = {found!r}, this optimizer needs {list(shape)}")
