"""What follows from what was found: a pure function. Each finding says what, with the value, and what to change.

of_boxes.py finds what is wrong with a box, of_links.py with a link; here is who does not reach whom, at which port, and
on which side that is to be mended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thinwire.tools.doctor.blame import Blame, Pair, blamed
from thinwire.tools.doctor.examination import Examination
from thinwire.tools.doctor.finding import Finding, Wishes, between, host_of, names_of
from thinwire.tools.doctor.of_boxes import of_boxes
from thinwire.tools.doctor.of_links import of_links

_LISTEN = "`thinwire doctor --listen --port {port}`"
_UNHEARD = {
    "silent": ("firewall", f"Start {_LISTEN} there, and let TCP port {{port}} through the firewalls on the way."),
    "refused": ("not listening", f"Start {_LISTEN} there, or open that port in its firewall."),
    "no route": ("no route", "Give this box a route to {host}, or name an address in a network that both are in."),
    "wrong token": ("token", "Give both boxes the same token file; `sha256sum` compares them."),
    "unknown name": ("name", "Name the box by its address, or put {host} into DNS or /etc/hosts."),
    "stranger": ("stranger", f"Something else listens at port {{port}}: start {_LISTEN} with another port."),
    "no actor": ("no actor", "Install thinwire on that node, and look at what `ray list actors` says of it."),
    "mute": ("mute", "See what runs at port {port} there: it takes connections and answers none."),
}
_OTHERWISE = ("unheard", f"Start {_LISTEN} there again, and look at what it says.")


def unheard(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    """Boxes that could not be examined, and why."""
    for place, (name, box) in enumerate(zip(names, seen.boxes, strict=True)):
        if box.facts is not None:
            continue
        host, port = host_of(box.where), box.where.rpartition(":")[2]
        kind, change = _UNHEARD.get(box.connect, _OTHERWISE)
        reached = [names[call.source] for call in seen.calls if call.target == place and call.visit.connect == "ok"]
        also = f"; {', '.join(reached)} can reach it" if reached else ""
        yield Finding(
            severity="fault",
            kind=kind,
            boxes=(name,),
            what=f"{name} could not be examined: {box.why}{also}",
            change=change.format(host=host, port=port),
        )


def closed_doors(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    """Ports that are closed between boxes that were both examined otherwise."""
    by_port: dict[str, dict[Pair, str]] = {}
    for call in between(seen):
        met = {int(seen.boxes[call.target].where.rpartition(":")[2]): call.visit.connect, **call.visit.ports}
        for port, how in met.items():
            chosen = port not in seen.ports and not seen.boxes[call.target].where.endswith(f":{port}")
            by_port.setdefault("" if chosen else str(port), {})[call.source, call.target] = how
    for which, doors in by_port.items():
        bad = {pair for pair, how in doors.items() if how not in ("ok", "not asked")}
        for blame in blamed(bad, doors):
            yield _door(seen, names, which, blame, doors)
    for call in seen.calls:
        if call.visit.connect == "not asked":
            name, other = names[call.source], names[call.target]
            yield Finding(
                severity="fault",
                kind="unheard",
                boxes=(name,),
                what=f"{name} did not say how it reaches {other}: {call.visit.why}",
                change=f"Ask again; if it stays so, look at what `thinwire doctor --listen` says on {name}.",
            )


def _door(seen: Examination, names: Sequence[str], port: str, blame: Blame, met: dict[Pair, str]) -> Finding:
    source, target = blame.pairs[0]
    how = met[source, target]
    facts = seen.boxes[target].facts
    first, last = (facts.ports if facts is not None else None) or (32768, 60999)
    which = f"TCP port {port}" if port else f"TCP ports that the kernel chooses ({first} to {last}), as workers use,"
    pairs = "; ".join(f"{names[a]} to {names[b]}" for a, b in blame.pairs)
    heard = {"silent": "no answer", "refused": "refused", "no route": "no route"}.get(how, how)
    sides = {
        "into": f"on {names[blame.box]}, inwards" if blame.box is not None else "",
        "out": f"on {names[blame.box]}, outwards" if blame.box is not None else "",
        "box": f"on {names[blame.box]}, both ways" if blame.box is not None else "",
        "both": f"on {names[source]} and {names[target]}",
        "all": "on every box, or in what joins them",
    }
    side = sides.get(blame.what, f"on {names[target]} inwards, or on {names[source]} outwards")
    if how == "no route":
        change = f"Give {names[source]} a route to {names[target]}."
    else:
        change = f"Open {which.rstrip(',')} in the firewall {side}."
    return Finding(
        severity="fault",
        kind="no route" if how == "no route" else "firewall",
        boxes=tuple(dict.fromkeys(names[place] for pair in blame.pairs for place in pair)),
        what=f"{which} cannot be reached from {pairs}: {heard}",
        change=change,
    )


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
