"""What can go wrong between workers.

CommError
|-- PeerLost         a peer died, or did not answer within the time-out
|-- CallMismatch     ranks are in different calls, state_dict() and step() say, and would wait for each other for ever
|-- NonFiniteInput   some rank gave NaN or infinity; every rank raises it alike, nothing was written
|   `-- Refused      some rank gave nothing on purpose, and says so: it has other parameters to exchange from now on
`-- WireMismatch     ranks disagree on what they exchange: layout, codec, dtype or version
"""

from __future__ import annotations


class CommError(RuntimeError):
    """A collective did not do what was asked. No rank may assume that its peers' state is its own."""


class PeerLost(CommError):
    """A peer died, left or fell silent in a collective.

    ranks: all peers that are lost, as far as the transport can tell. rank: the one, where it is known to be one.
    """

    def __init__(self, message: str, rank: int | None = None, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.ranks = ranks or (() if rank is None else (rank,))


class CallMismatch(CommError):
    """Ranks are in different calls, or left one out: the collectives that they wait in will never meet.

    Every rank raises it, in the call that it is in or in its next one. What that call had begun is undone. The group is
    of no more use.
    """


class NonFiniteInput(CommError):
    """At least one rank's input held NaN or infinity. `ranks` names them; empty where only the mean overflowed."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Refused(NonFiniteInput):
    """Some ranks took no part in an exchange (Reducer.launch_refused); `ranks` names them."""


class WireMismatch(CommError):
    """Two ranks would read each other's bytes differently."""
