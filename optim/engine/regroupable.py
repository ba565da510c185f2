"""What an optimizer answers when its ranks change: what is common, what is its own, and how it is connected anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from thinwire.comm.errors import CommError
from thinwire.comm.protocol import Group
from thinwire.optim.engine import saving
from thinwire.optim.engine.state import replicated

if TYPE_CHECKING:
    from thinwire.optim.engine.optimizer import FlatOptimizer

HandedOver = dict[str, Tensor]
"""R of each slot, by name."""


class Regroupable:
    """The part of FlatOptimizer that optim.regroup drives. An algorithm whose ranks differ between steps overrides it.

    handed_over: R of each slot, from when it was taken to the next step at which all hold the same.
    shadow: from the next regroup() on, each rank also keeps the server error of the rank before it, so that the death
    of one takes none of it away (comm.exchange.bucketed). The same on every rank.
    """

    shadow: bool = False
    handed_over: HandedOver | None = None
    bucket_elements: int
    num_steps: int
    _group: Group

    @property
    def group(self) -> Group:
        """The ranks that it exchanges with."""
        return self._group

    @property
    def common_steps(self) -> int:
        """The last step at which all ranks held the same parameters."""
        return self.num_steps

    def settled(self, group: Group, *, taking_part: bool, num_ranks: int) -> dict[str, Tensor]:
        """Parameters (parameters_N) and replicated vectors, as after a sync in full of the ranks that take part.

        group: in which these num_ranks are, and perhaps others, who give nothing. Not modified: copies where they
        differ from what is here. Collective where ranks hold something of their own. Raises: PeerLost.
        """
        optimizer = cast("FlatOptimizer[Any]", self)
        return {"parameters_N": optimizer.space.p_N, **replicated(optimizer.vectors)}

    def plain_state(self) -> dict[str, Any]:
        """All of state_dict() that is not a vector, as after settled(). Numbers, texts, lists and dicts."""
        return saving.plain(cast("FlatOptimizer[Any]", self))

    def connect(self, group: Group, bucket_elements: int) -> None:
        """Exchange with other ranks from here on, with empty vectors: for optim.regroup, which fills them. Collective.

        Raises: PeerLost, WireMismatch; then everything is as before.
        """
        before = dict(self.__dict__)
        self._group, self.bucket_elements = group, bucket_elements
        try:
            self._refuse_other_models(group)
            self._connect()
        except CommError:
            self.__dict__.update(before)
            raise

    def _refuse_other_models(self, group: Group) -> None:
        raise NotImplementedError

    def _connect(self) -> None:
        raise NotImplementedError
