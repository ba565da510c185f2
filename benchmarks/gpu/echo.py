"""A group of which only one rank is there: what a step of one of many ranks costs its own device, without a network."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from thinwire.comm.groups.blocking import Blocking
from thinwire.comm.protocol import Stats


class Echo(Blocking):
    """One end of a group whose ranks give the same. The others serve what they were sent, as it is.

    Collectives are copies on the device, of as many bytes as a rank receives. What is started is done, as far as the
    host can tell, when start_* returns: on a GPU in the order of the stream, and nobody waits.
    """

    def __init__(self, size: int = 2, *, first: Echo | None = None) -> None:
        self.rank, self.size = 0, size
        self.stats: Stats = Stats() if first is None else first.stats
        self._sent: deque[Tensor] = deque() if first is None else first._sent
        self._second: Echo | None = None

    def all_to_all(self, out_nB: Tensor, in_nB: Tensor) -> None:
        """out[i] <- in[0], which is this rank's."""
        out_nB.copy_(in_nB[:1].expand_as(out_nB))
        self._sent.append(in_nB)

    def all_gather(self, out_nB: Tensor, in_B: Tensor) -> None:
        """out[0] <- in; out[i] <- what rank i was sent in the all-to-all that belongs to this.

        What is sent beside an exchange, of another size, is in no all-to-all: all have the same.
        """
        if self._sent and self._sent[0].shape == out_nB.shape:
            out_nB.copy_(self._sent.popleft())
            out_nB[0].copy_(in_B)
        else:
            out_nB.copy_(in_B.expand_as(out_nB))

    def mean_(self, x: Tensor) -> None:
        """All have the same."""

    def broadcast_(self, x: Tensor, src: int = 0) -> None:
        """All have the same."""

    def sum_(self, x: Tensor) -> None:
        """x <- size x."""
        x.mul_(self.size)

    def second_communicator(self) -> Echo:
        """Another one of the same ranks, so that an exchange goes its way as over NCCL."""
        if self._second is None:
            self._second = Echo(self.size, first=self)
        return self._second
