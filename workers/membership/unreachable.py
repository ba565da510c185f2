"""Who is left out where some members cannot talk to one another? As few as can be, chosen one by one.

Each time the rank of the most broken pairs; of several, one that was not heard of lately; then one that brings no
state; then the highest.
"""

from __future__ import annotations

from collections.abc import Collection

from thinwire.workers.membership.seats import LONGEST_REASON


def left_out(
    reports: dict[int, dict[int, str]], stateless: Collection[int], unheard: Collection[int] = ()
) -> dict[int, str]:
    """The ranks to leave out, and why. reports: by the rank that says it, whom it cannot reach, and why."""
    pairs = {frozenset((one, other)) for one, others in reports.items() for other in others if one != other}
    found: dict[int, str] = {}
    while pairs:
        ranks = set().union(*pairs)
        worst = max(
            ranks, key=lambda rank: (sum(rank in pair for pair in pairs), rank in unheard, rank in stateless, rank)
        )
        found[worst] = _why(worst, reports, sorted(min(pair - {worst}) for pair in pairs if worst in pair))
        pairs = {pair for pair in pairs if worst not in pair}
    return found


def _why(rank: int, reports: dict[int, dict[int, str]], peers: list[int]) -> str:
    said = [
        f"rank {peer} cannot reach it ({reports[peer][rank]})"
        if rank in reports.get(peer, {})
        else f"it cannot reach rank {peer} ({reports[rank][peer]})"
        for peer in peers
    ]
    return "; ".join(said)[:LONGEST_REASON]
