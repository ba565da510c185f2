"""A momentum that is each rank's own at all times: saved, handed on and given as the mean of all.

rank i, each step     m_i follows its own gradients; parameters are common
save, hand_over       m_i <- mean_i m_i, in full, so that a loaded run equals the one that goes on
a rank is gone        its momentum goes with it; the mean of the others' is given to who comes
a rank is behind      is given the momentum of who is ahead, for its own step does not count
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.comm.errors import NonFiniteInput, Refused
from thinwire.comm.exchange.exchange import gather_flags
from thinwire.comm.kernels.peak import witness
from thinwire.comm.protocol import Group
from thinwire.optim.engine.algorithm import State
from thinwire.optim.engine.optimizer import SAVE_EVERYWHERE, FlatOptimizer
from thinwire.optim.engine.schedule import StepPlan


class OwnMomentum(FlatOptimizer[State]):
    """An optimizer whose vectors have m_N, which is this rank's own from one save to the next."""

    lost_of_others: ClassVar[str] = "the momenta of the other ranks are missing; all begin with rank 0's"

    def begin(self) -> None:
        """Set what a fresh run begins with."""
        self.saved["last_sync"] = 0

    def exchange_(self, plan: StepPlan) -> None:
        """As FlatOptimizer.exchange_.

        Raises: also RuntimeError, alike on every rank, where it is the momentum of some rank that is not finite, for no
        later step would be.
        """
        try:
            super().exchange_(plan)
        except NonFiniteInput as error:
            if not isinstance(error, Refused):
                self.refuse_broken_momentum(error)
            raise

    @property
    def has_one_momentum(self) -> bool:
        """Do all ranks hold the same momentum? As after a save, until the next step; and one rank always does."""
        return bool(self.saved["last_sync"] == self.num_steps)

    def prepare_to_save(self) -> None:
        """The momenta become their mean, exchanged in full, so that a run that is loaded equals this one. Collective.

        Raises: PeerLost; RuntimeError where one is not finite. Then nothing has changed.
        """
        super().prepare_to_save()
        self._agree_on_momentum("prepare_to_save()", torch.empty_like(self.space.p_N))

    def prepare_to_hand_over(self) -> None:
        """As prepare_to_save(), in the gradient's memory."""
        super().prepare_to_save()
        self._agree_on_momentum("hand_over()", self.space.g_N)
        self.space.g_N.zero_()

    def _agree_on_momentum(self, call: str, room_N: Tensor) -> None:
        if self.has_one_momentum:
            return
        with self.calling(f"{call} after step {self.num_steps}", SAVE_EVERYWHERE):
            self.refuse_to_be_alone()
            try:
                self.reduce.full_(room_N.copy_(self.vectors.m_N))
            except NonFiniteInput as error:
                self.refuse_broken_momentum(error)
                raise
            self.vectors.m_N.copy_(room_N)
            self.saved["last_sync"] = self.num_steps

    def own_state(self) -> dict[str, Any]:
        """Which of the vectors is this rank's own."""
        return {} if self.has_one_momentum else {"vectors": ["m_N"]}

    def check_own(self, own: dict[str, Any]) -> None:
        """Refuse what own_state() cannot have given. Raises: ValueError."""
        if own not in ({}, {"vectors": ["m_N"]}):
            raise ValueError(f"state_dict has own = {own!r}: it is damaged, or of another optimizer; load another file")

    def go_on_from(self, own: dict[str, Any], *, in_round: bool) -> None:
        """Hold what own_state() gave: the momentum is there. Not in_round: as if all ranks had this one."""
        if not in_round:
            self.saved["last_sync"] = self.num_steps

    def end_round_as(self, src: int) -> None:
        """m <- that of rank `src`. Collective. Raises: PeerLost."""
        self.reduce.broadcast_(self.vectors.m_N.view(torch.uint8), src)
        self.saved["last_sync"] = self.num_steps

    def common_vectors(self) -> dict[str, Tensor]:
        """As FlatOptimizer.common_vectors, without a momentum that is a rank's own."""
        found = super().common_vectors()
        return found if self.has_one_momentum else {name: x for name, x in found.items() if name != "m_N"}

    def plain_state(self) -> dict[str, Any]:
        """As FlatOptimizer.plain_state, of ranks with one momentum."""
        found = super().plain_state()
        found["saved"]["last_sync"] = self.num_steps
        return found

    def synced_vectors(self, group: Group, *, taking_part: bool, num_ranks: int) -> dict[str, Tensor]:
        """As FlatOptimizer.synced_vectors: the mean of the momenta of those that take part.

        A save that lost a peer may have ended on some of them. They hold the mean of all ranks, and it counts alone.
        """
        found = super().synced_vectors(group, taking_part=taking_part, num_ranks=num_ranks)
        has_mean = taking_part and self.has_one_momentum
        flag = self.space.p_N.new_tensor([float(has_mean)])
        group.start_sum_(flag).wait()
        num_means = int(flag)
        if num_means == num_ranks:
            return found
        m_N = torch.zeros_like(self.space.p_N)
        if has_mean or (taking_part and not num_means):
            m_N.add_(self.vectors.m_N, alpha=1 / (num_means or num_ranks))
        group.start_sum_(m_N).wait()
        return {**found, "m_N": m_N.to(self.vectors.m_N.dtype)} if taking_part else found

    def refuse_broken_momentum(self, error: NonFiniteInput) -> None:
        """After this error, where the momentum of some rank is not finite. Collective. Raises: RuntimeError, alike."""
        finite = torch.isfinite(witness(self.vectors.m_N))
        broken = [rank for rank, flag in enumerate(gather_flags(self.group, finite).tolist()) if not flag]
        if broken:
            raise RuntimeError(
                f"after step {self.num_steps} the momentum of rank {', '.join(map(str, broken))} holds NaN or "
                "infinity, so that no step of it can be sent, and no state saved; nothing was changed. Load a "
                "checkpoint of before on every rank, or begin that momentum anew: "
                "for s in optimizer.state.values(): s['momentum_buffer'].zero_()"
            ) from error
