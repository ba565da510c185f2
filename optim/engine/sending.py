"""The part of an optimizer that says how the mean gradient is sent, in full or in few bits, and what those leave out.

What 8 bits leave out is in an error memory, in units of the gradient. An algorithm says which one that is, and what
becomes of it where the unit changes: at the end of a warm-up (docs/algorithms.md, "Full exchanges in few bits").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.comm.codecs import SignCodec
from thinwire.comm.default import default_reducer
from thinwire.comm.groups.nodes import Topology
from thinwire.comm.keeps import Keeps
from thinwire.comm.protocol import ErrorMemory, FullWire, Group, Reducer
from thinwire.optim.engine.changing import ChangingOptimizer
from thinwire.optim.engine.exchanges import Exchange, MeanGradient
from thinwire.optim.engine.options import CheckedOptions


class SendingOptimizer(ChangingOptimizer):
    """What FlatOptimizer knows of its exchanges. full_exchange: how full ones are sent. topology: as was asked for."""

    full_exchange: FullWire
    topology: Topology

    codec: ClassVar[SignCodec] = SignCodec()
    """How what is compressed is written."""

    narrow: tuple[str, ...] = ()
    """Which of "variance" and "error_memory" are kept in bfloat16: 1-bit Adam's argument."""

    def take_exchange(self, asked: CheckedOptions) -> None:
        """Hold how exchanges are sent. Raises: ValueError for what cannot be."""
        self.topology = asked.topology
        self.full_exchange = self.choose_full_exchange(asked.full_exchange)

    def make_reducer(self, group: Group | None, keeps: Keeps = Keeps.NOTHING) -> Reducer:
        """What exchanges the vectors of self.space. Collective."""
        space, most = self.space, self.bucket_elements
        return default_reducer(
            group,
            space.layout,
            space.p_N,
            codec=self.codec,
            bucket_elements=most,
            cuts=space.cuts,
            keeps=keeps,
            full=self.full_exchange,
            topology=self.topology_now,
            sums=torch.bfloat16 if "error_memory" in self.narrow else None,
        )

    @property
    def topology_now(self) -> Topology:
        """What the exchange that is made next is asked for. Where ranks have come or gone boxes may differ: "auto"."""
        return "auto" if self.topology == "node_first" and hasattr(self, "reduce") else self.topology

    def choose_full_exchange(self, given: FullWire | None) -> FullWire:
        """How the mean gradient is sent. Raises: ValueError where it cannot be sent as was asked."""
        every = [param for group in self.param_groups for param in group["params"]]
        return given or ("bf16" if all(param.dtype == torch.bfloat16 for param in every) else "fp32")

    @property
    def gradient_memory(self) -> ErrorMemory | None:
        """What 8 bits leave out of the next mean gradient, in units of it; None where nothing is kept."""
        return None

    @property
    def mean_wire(self) -> FullWire:
        """How the mean gradient of the next step is sent, where it is.

        In place of 8 bits 16 where no error memory is of gradients: what is exchanged then goes into a variance that is
        seldom updated. That wants the size of small values too, and would find an error of long ago in a memory.
        """
        return "bf16" if self.full_exchange == "int8" and self.gradient_memory is None else self.full_exchange

    def errors_of_gradients(self, loaded: Mapping[str, Any]) -> str | None:
        """The name of the error memory whose R in this state_dict is that of gradients; None where there is none."""
        return None

    def groups_in(self, at: slice) -> list[tuple[slice, dict[str, Any]]]:
        """The parts of these elements of the flat vectors, each with the parameter group that owns it."""
        spans = zip(self.param_groups, self.space.spans, strict=True)
        parts = [(slice(max(at.start, span.start), min(at.stop, span.stop)), group) for group, span in spans]
        return [(part, group) for part, group in parts if part.start < part.stop]

    def gradient_weights(self) -> Tensor:
        """The same of every element: float[N], 0 where none is."""
        weight_N = torch.zeros_like(self.space.p_N)
        for group, span in zip(self.param_groups, self.space.spans, strict=True):
            weight_N[span] = self.gradient_weight(group)
        return weight_N

    def catch_up_(self, part_N: Tensor, plain: dict[str, Any], vectors: dict[str, Tensor]) -> None:
        """part <- this rank's part of R in the unit of ranks that have made a step more, which it is given. Local.

        plain, vectors: their plain_state() and replicated vectors. For most algorithms the unit is the same.
        """

    def gradient_weight(self, group: dict[str, Any]) -> float:
        """What a gradient counts in the momentum of this group: 1 - beta1."""
        return float(1 - group["betas"][0])

    def begin_mean(self) -> Exchange:
        """The mean gradient, opened."""
        return MeanGradient(self.reduce, self.space.g_N, self.gradient_memory, self.mean_wire)
