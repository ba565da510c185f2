"""The momentum of the compressed phase: it is in what all ranks have received, and is made as floats on demand.

After a compressed exchange m is what the rows say: a sign an element, a scale a block. The next step forms its momentum
from that, and the parameters descend along it. So there is no float m then: 1/32 of its memory is enough. Where m is
exchanged times a factor for each tensor (1-bit LAMB), m is what the rows say over that.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from thinwire.comm.exchange.memory import ErrorMemory
from thinwire.comm.exchange.reducer import Reducer
from thinwire.comm.exchange.rows import Cut, Received
from thinwire.comm.kernels.blocks import spread
from thinwire.comm.kernels.choose import kernels_for
from thinwire.comm.layout import VectorLayout
from thinwire.comm.protocol import Result


class OverFactors:
    """A momentum that was received times a factor for each tensor: the Result, and the factors that were used.

    factor: float[tensors], copied. layout: of the vector, whose live runs are the tensors.
    """

    def __init__(self, result: Result, factor_T: Tensor, layout: VectorLayout) -> None:
        self.result, self.factor_T = result, factor_T.clone()
        self._layout = layout

    def decode_(self, out_N: Tensor, start: int = 0, stop: int | None = None) -> None:
        """out <- elements [start, stop) of the momentum, 0 where dead."""
        self.result.decode_(out_N, start, stop)
        out_N.div_(spread(self.factor_T, self._layout, start, stop))


InRows = Received | OverFactors
"""A momentum in rows that another rank can hold too."""


def tensors_of(rows: InRows) -> list[Tensor]:
    """All that another rank is given to hold the same: uint8[bytes], and float[tensors] where there are factors."""
    if isinstance(rows, Received):
        return [rows.wire.bytes_B]
    assert isinstance(rows.result, Received)
    return [rows.result.wire.bytes_B, rows.factor_T]


class Momentum:
    """m of all ranks: float[N], or the last result of the reducer where that is newer. memory: of its exchanges.

    m: at first. The floats are there in warm-up, and from when somebody asks for them to the next result.
    """

    def __init__(self, m_N: Tensor, reduce: Reducer, memory: ErrorMemory) -> None:
        self._reduce = reduce
        self._memory = memory
        self._numel, self._like = len(m_N), m_N.new_empty(0)
        self._m_N: Tensor | None = m_N
        self._result: Result | OverFactors | None = None
        """What was received last, where m is newer than the floats were."""
        self._shown = ref(self._m_N)
        """The memory of the floats, for as long as there are views of it: they stay views of the momentum."""
        self._version = -1
        """Of the floats when they were decoded."""

    @property
    def is_last_result(self) -> bool:
        """Does the reducer hold what m is, so that the next exchange may begin from that?"""
        return self._reduce.last(self._memory) is not None

    def refuse_written(self) -> None:
        """Raises: RuntimeError where the floats were written, and the next exchange begins from what was received."""
        if self._m_N is not None and self.is_last_result and self._m_N._version != self._version:
            raise RuntimeError(
                "optimizer.state[p]['exp_avg'] was written after the warm-up, where the momentum is what all ranks "
                "have received, and the state only shows it. Do not write to it; to begin moments anew, make the "
                "optimizer anew"
            )

    def written(self) -> Tensor:
        """m as float[N], to be written now: what was received is no momentum any more. Error memory is as it was."""
        m_N = self.floats()
        if self.is_last_result:
            self._memory.version += 1
        return m_N

    def received(self, factor_T: Tensor | None = None) -> None:
        """The reducer has a new result: the floats are old, and their memory is given back.

        factor: float[tensors]: the result is so many times m, in each tensor.
        """
        last = self._reduce.last(self._memory)
        self._m_N, self._result = None, last
        if last is not None and factor_T is not None:
            self._result = OverFactors(last, factor_T, self._reduce.buckets.layout)

    @property
    def last(self) -> OverFactors | None:
        """What the reducer holds, where that is m times factors; None where m is in floats alone."""
        return self._result if isinstance(self._result, OverFactors) and self.is_last_result else None

    def floats(self) -> Tensor:
        """m as float[N], brought up to date. May be written in warm-up and by who restores the error memory.

        After memory.restore() too: the result is still what was received, though no exchange begins from it any more.
        """
        if self._m_N is None:
            assert self._result is not None
            shown = self._shown()
            m_N = self._like.new_empty(self._numel) if shown is None else shown
            self._result.decode_(m_N)
            self._m_N, self._shown, self._version = m_N, ref(m_N), m_N._version
        return self._m_N

    def part(self, at: slice) -> Tensor:
        """These elements of m. New where there are no floats."""
        return self.decode_(self._like.new_empty(at.stop - at.start), at) if self._m_N is None else self._m_N[at]

    def decode_(self, out: Tensor, at: slice) -> Tensor:
        """out <- these elements of m. Returns it."""
        if self._m_N is not None:
            return out.copy_(self._m_N[at])
        assert self._result is not None
        self._result.decode_(out, at.start, at.stop)
        return out

    def described(self) -> dict[str, Any] | None:
        """Numbers and lists: what room() needs to know of rows(); None where m is in floats.

        Then it takes 1/32 of the bytes to give m to another rank.
        """
        result = self._result if self._m_N is None else None
        rows = result.result if isinstance(result, OverFactors) else result
        if not isinstance(rows, Received) or rows.cut is None:
            return None
        factors = len(result.factor_T) if isinstance(result, OverFactors) else None
        return {**rows.cut.plain(), "factors": factors, "bytes": rows.wire.bytes_B.numel()}

    def rows(self) -> InRows:
        """Where described() is of them: not to be modified."""
        assert isinstance(self._result, Received | OverFactors)
        return self._result

    def room(self, described: dict[str, Any]) -> InRows:
        """New memory for what another rank's described() is of, to be written before hold() takes it."""
        layout = self._reduce.buckets.layout
        cut = Cut.of_plain(layout, described)
        rows = Received.room_for(cut, kernels_for(self._like.device, self._like.dtype), self._like)
        return (
            rows
            if described["factors"] is None
            else OverFactors(rows, self._like.new_ones(described["factors"]), layout)
        )

    def hold(self, m: Tensor | InRows) -> None:
        """m is this vector, or what these rows say, from here on."""
        if isinstance(m, Tensor):
            self._m_N, self._result, self._shown = m, None, ref(m)
        else:
            self._m_N, self._result = None, m

    def follow(self, other: Momentum) -> None:
        """m is what the other one is, in rows where it is there, which are no result of this one's reducer."""
        self._m_N, self._result, self._shown, self._version = other._m_N, other._result, other._shown, other._version
