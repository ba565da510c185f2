"""What do groups that cannot overlap return from start_*? A collective that is already done.

Code written for asynchronous collectives then runs on them unchanged, one collective after the other.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from thinwire.comm.protocol import Pending


class Finished:
    """A Pending with nothing left to wait for."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once."""


FINISHED = Finished()


class Blocking:
    """Mixin: start_* of a group whose collectives block. One communicator; a failure is raised where it is started."""

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """The group's own."""
        raise NotImplementedError

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """The group's own."""
        raise NotImplementedError

    def sum_(self, x: Tensor) -> None:
        """x <- sum over ranks of x. The group's own."""
        raise NotImplementedError

    def start_all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> Pending:
        """all_to_all, done when this returns. Raises: PeerLost."""
        self.all_to_all(out_nB, in_nB)
        return FINISHED

    def start_all_gather(self, out_nB: Tensor, in_B: Tensor) -> Pending:
        """all_gather, done when this returns. Raises: PeerLost."""
        self.all_gather(out_nB, in_B)
        return FINISHED

    def start_sum_(self, x: Tensor) -> Pending:
        """x <- sum over ranks of x, not divided; done when this returns. Raises: PeerLost."""
        self.sum_(x)
        return FINISHED

    def second_communicator(self) -> Self:
        """The group itself: nothing overlaps."""
        return self
