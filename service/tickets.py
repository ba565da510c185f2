"""What lets a driver fetch its job's token once: a ticket, which stands in the driver's command line.

A ticket follows from the job's token and the number of the attempt, so that a submission can be repeated; nobody can go
the other way. Apart from auth.py, because command lines are also written where no web framework is installed.
"""

from __future__ import annotations

import hashlib
import hmac


def ticket_of(token: str, attempt: int) -> str:
    """The ticket of an attempt of the job that has this token."""
    return hmac.digest(token.encode(), b"ticket of attempt %d" % attempt, hashlib.sha256).hex()
