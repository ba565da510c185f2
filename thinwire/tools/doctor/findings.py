"""What follows from what was found: a pure function. Each finding says what, with the value, and what to change."""

from __future__ import annotations

from thinwire.tools.doctor.examination import Examination
from thinwire.tools.doctor.finding import Finding, Wishes, names_of
from thinwire.tools.doctor.of_boxes import of_boxes
from thinwire.tools.doctor.of_doors import closed_doors, unheard
from thinwire.tools.doctor.of_links import of_links


def findings(seen: Examination, wishes: Wishes) -> list[Finding]:
    """All, the worst first."""
    names = names_of(seen)
    found = [
        *unheard(seen, names),
        *of_boxes(seen, names, wishes),
        *closed_doors(seen, names),
        *of_links(seen, names, wishes),
    ]
    order = ("fault", "warning", "note")
    return sorted(found, key=lambda one: order.index(one.severity))
