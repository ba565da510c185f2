"""SGD whose updates cross as a count-sketch, and the largest of them exactly: momentum and error memory by rank.

    rank i   u_i <- rho u_i + lr (g_i + wd x)
    all      D = sketched mean of u_i + v_i, the largest k of it;   v_i <- v_i + u_i, 0 where D is
             x <- x - D;   u_i <- 0 where D is

v_i is error memory: D + R' = mean_i u_i + R, whatever the sketch has found (comm/codecs/sketch.py, comm/exchange/
linear.py). What has been applied leaves the momentum too, or it would be applied once more where it is old.
[Ivkin et al. 2019, arXiv 1903.04488, Alg. 2 (Sketched-SGD), with the exact second round; Rothchild et al. 2020,
arXiv 2007.07682 (FetchSGD), which keeps both in the sketch; momentum by rank: Lin et al. 2018, arXiv 1712.01887]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.comm.codecs import CountSketch
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.protocol import Group
from thinwire.contract import hyperparameters
from thinwire.contract.hyperparameters import (
    LR,
    MOMENTUM,
    SKETCH,
    SKETCH_COLUMNS,
    SKETCH_K,
    SKETCH_ROWS,
    SKETCH_SECOND,
    WEIGHT_DECAY,
)
from thinwire.optim.engine.exchanges import Exchange, LeftGradients, formed_sum
from thinwire.optim.engine.hyperparameters import check_group
from thinwire.optim.engine.options import Options
from thinwire.optim.engine.own_momentum import OwnMomentum
from thinwire.optim.engine.schedule import StepPlan, linear_plan
from thinwire.optim.engine.state import Replicated, Residual

PIECE = 1 << 18
"""Elements, of a CPU's passes."""
PARAMETERS = "parameters_N"


@dataclass(frozen=True, slots=True)
class SketchedHyper:
    """The hyperparameters of one parameter group, or of a run in it, and the slice of the flat vectors that it owns."""

    span: slice
    lr: float
    momentum: float
    weight_decay: float


@dataclass(slots=True)
class SketchedState:
    """m: u of this rank; of all after a save. update_error: v.

    An element in fp32 takes 8 bytes as parameter and gradient, 4 as u, 4 + 4 / ranks of error memory, 4 each for what
    is left out and for the result, and 4 a row for where the sketch has it. One rank has u and one result.
    """

    m_N: Replicated
    update_error: Residual


class SketchedSGD(OwnMomentum[SketchedState]):
    """SGD with momentum as a torch.optim.Optimizer, of whose updates the largest are found by a count-sketch.

    params: parameters or groups, as torch.optim takes them. lr, momentum, weight_decay (coupled): per group; a schedule
    may move them. The rate is in what waits, so that it may change with any step.
    k: values that are applied in a step, None: a 25th. rows, columns: of the sketch; None: so many that all rows have
    6 sums for 100 values. second: the exact values of so many times k cross. By default a step sends a tenth of fp32's
    bytes. A sketch that is larger than the vector is refused.
    group, model, max_grad_norm (each rank shortens its own gradient), non_finite, overlap: as in CheckedOptions. The
    sketch is of all values at once, so with overlap it is sent at the end of backward. topology is "flat".
    One rank sends nothing and applies all: torch.optim.SGD, at a constant rate. Save on all ranks: u becomes its mean.
    The constructor is collective: it sends rank 0's parameters to all. Raises: ValueError; PeerLost, WireMismatch.
    """

    shown: ClassVar[Mapping[str, str]] = {"m_N": "momentum_buffer"}
    sends_in_full: ClassVar[bool] = False
    codec: CountSketch
    _sent_by: Sequence[SketchedHyper]
    """The hyperparameters of what is on its way."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = LR.default,
        momentum: float = MOMENTUM.default,
        *,
        weight_decay: float = WEIGHT_DECAY.default,
        k: int | None = SKETCH_K.default,
        rows: int = SKETCH_ROWS.default,
        columns: int | None = SKETCH_COLUMNS.default,
        second: int = SKETCH_SECOND.default,
        **options: Unpack[Options],
    ) -> None:
        for number, value in zip(SKETCH, (k, rows, columns, second), strict=True):
            number.check(value)
        self.codec = CountSketch(k, rows, columns, second)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, **options)

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse hyperparameters out of range. Raises: ValueError."""
        check_group(group, hyperparameters.SGD)

    def hyper(self, group: dict[str, Any], span: slice, seen: int | None = None) -> SketchedHyper:
        """The hyperparameters of a group, for this step."""
        return SketchedHyper(span, float(group["lr"]), float(group["momentum"]), float(group["weight_decay"]))

    def gradient_weight(self, group: dict[str, Any]) -> float:
        """What a gradient counts in u."""
        return float(group["lr"])

    def make_reducer(self, group: Group) -> Reducer:
        """As Algorithm.make_reducer. Raises: ValueError, on one rank too, for a sketch larger than the vector."""
        self.codec.refuse_larger(self.space.layout.num_live)
        return super().make_reducer(group)

    def make_state(self) -> SketchedState:
        """An empty vector and error memory."""
        return SketchedState(self.new_vector(), self.reduce.new_memory())

    def plan(self, step: int) -> StepPlan:
        """Every step is compressed."""
        return linear_plan()

    def begin_exchange(self, plan: StepPlan) -> Exchange:
        """u with this step's gradient."""
        self._sent_by = self.hypers(self.num_steps + 1)  # a schedule may move them before step()
        form = partial(self._formed, self._sent_by)
        return formed_sum(self.reduce, self.vectors.update_error, form)

    def _formed(self, groups: Sequence[SketchedHyper], at: slice, runs: LeftGradients = ()) -> Tensor:
        """u of these elements, new. Every product is rounded before it is added, so that slices change no bit."""
        p_N, g_N, m_N = self.space.p_N, self.space.g_N, self.vectors.m_N
        made = torch.zeros_like(g_N[at])
        for h, part in self._pieces(groups, at):
            u, g = made[part.start - at.start : part.stop - at.start], g_N[part]
            if h.weight_decay:
                g = g + p_N[part] * h.weight_decay
            torch.mul(m_N[part], h.momentum, out=u).add_(g * h.lr)
        return made

    def update(self, plan: StepPlan, groups: Sequence[SketchedHyper]) -> None:
        """Exchange u, apply what was found, and forget it.

        Raises: as OwnMomentum.exchange_.
        """
        self.exchange_(plan)
        p_N, m_N, result = self.space.p_N, self.vectors.m_N, self.reduce.result
        self.reduce.commit()  # first: where it is interrupted, nothing has moved
        for h, part in self._pieces(self._sent_by, slice(0, p_N.numel())):
            u, found = self._formed((h,), part), torch.empty_like(p_N[part])
            result.decode_(found, part.start, part.stop)
            if self.group.size > 1:
                u.masked_fill_(found != 0, 0.0)
            m_N[part] = u
            p_N[part].sub_(found)
        if self.group.size == 1:
            self.saved["last_sync"] = self.num_steps + 1

    def catch_up_(self, part_N: Tensor, plain: dict[str, Any], vectors: dict[str, Tensor], holders: int) -> None:
        """Of a step that others have finished: what they have applied, where x has moved, waits no more."""
        part_N.masked_fill_(self.space.p_N != vectors[PARAMETERS], 0.0)

    def _pieces(self, groups: Sequence[SketchedHyper], at: slice) -> Iterator[tuple[SketchedHyper, slice]]:
        """The elements `at` by run; on a CPU in pieces that its cache holds from operation to operation."""
        most = PIECE if self.space.p_N.device.type == "cpu" else at.stop - at.start
        for h in groups:
            for start in range(max(at.start, h.span.start), min(at.stop, h.span.stop), most):
                yield h, slice(start, min(start + most, at.stop, h.span.stop))

    def stats(self) -> dict[str, Any]:
        """As for all optimizers; sketch: rows, columns, k, and the exact values that cross."""
        k, columns = self.codec.sizes(self.space.layout.num_live)
        sketch = {"rows": self.codec.rows, "columns": columns, "k": k, "exact": self.codec.second * k}
        return {**super().stats(), "sketch": sketch}
