"""A job's signature says in words what its workers train; a worker that trains something else is refused.

The job's signature is that of its members. Where there are none it is that of most workers that come, of those that do
not differ from what the driver knows of it: the job file, for one. A worker without a signature is never refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from thinwire.workers.membership.roster import Worker
from thinwire.workers.membership.seats import LONGEST_REASON


def of_most(workers: Sequence[Worker]) -> dict[str, str] | None:
    """The signature of most of them; of several, that of the lowest slot. None where nobody has one."""
    signed = sorted((w for w in workers if w.signature is not None), key=lambda w: w.identity.slot)
    texts = [tuple(sorted((w.signature or {}).items())) for w in signed]
    return dict(Counter(texts).most_common(1)[0][0]) if texts else None


def difference(own: dict[str, str] | None, jobs: dict[str, str] | None) -> str | None:
    """In words, how a worker's differs from the job's; None where it does not."""
    if own is None or jobs is None or own == jobs:
        return None
    fields = sorted(name for name in own.keys() | jobs.keys() if own.get(name) != jobs.get(name))
    said = [f"{name} is {own.get(name, 'missing')}, the job's is {jobs.get(name, 'missing')}" for name in fields]
    return f"this worker trains something else: {'; '.join(said)}"[:LONGEST_REASON]


def against(own: dict[str, str] | None, known: dict[str, str]) -> str | None:
    """In words, how a worker's differs from what is known of the job's; None where it does not."""
    return None if own is None else difference({name: own[name] for name in known if name in own}, known)
