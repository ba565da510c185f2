"""Who is left out where some members cannot talk to one another? As few as can be, chosen one by one.

Each time the rank of the most broken pairs; of several, one that was not heard of lately; then one that brings no
state; then the highest. Never the last that holds the state: the others would begin from a checkpoint while it lives.
"""

from __future__ import annotations

from collections.abc import Collection

from thinwire.workers.membership.seats import LONGEST_REASON


def left_out(
    reports: dict[int, dict[int, str]], holders: Collection[int], unheard: Collection[int] = ()
) -> dict[int, str]:
    """The ranks to leave out, and why.

    reports: by the rank that says it, whom it cannot reach, and why. holders: of the state.
    """
    pairs = {frozenset((one, other)) for one, others in reports.items() for other in others if one != other}
    found: dict[int, str] = {}
    while pairs:
        left = [rank for rank in holders if rank not in found]
        worst = max(
            set().union(*pairs) - (set(left) if len(left) == 1 else set()),
            key=lambda rank: (sum(rank in pair for pair in pairs), rank in unheard, rank not in holders, rank),
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
