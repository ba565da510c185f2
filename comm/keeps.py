"""What a rank keeps of the others, so that the death of one takes less of the error memory away."""

from __future__ import annotations

from enum import StrEnum


class Keeps(StrEnum):
    """What an exchange of signs keeps beside a rank's own error memory; the same on every rank."""

    NOTHING = "nothing"
    """The server error of a rank that dies is lost, and the mean of the others' worker errors stands for its own."""
    ROWS = "rows"
    """The rows of the last exchange, and now and then the largest server errors of every rank: both errors of a rank
    that dies are estimated (comm.exchange.rebuild). Sends 0.4 % more bytes; 1/4 byte an element of memory."""
    REPLICA = "replica"
    """Each rank also keeps the server error of the rank before it, bit-equal. Sends half as many bytes again; 4 / ranks
    bytes an element of memory."""
