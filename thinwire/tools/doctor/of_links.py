"""What is wrong with the links between boxes: who does not reach whom, at which port; frames, clocks and speeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low

from thinwire.tools.doctor.examination import Examination
from thinwire.tools.doctor.facts import Interface
from thinwire.tools.doctor.finding import Blame, Finding, Pair, Wishes, between, blamed, boxes_of

CLOCK_S = 1.0
SLOW = 0.5
"""Less than this part of what the best quarter of the links reaches, or of what the card says."""
HALF_DUPLEX = 0.6
"""Both ways at once less than this part of the sum of each way alone."""
HALF_DUPLEX_MOST_MBIT = 2500.0
"""Above, no link is half duplex, and the processor may be what the two ways share."""
ONE_STREAM_MBIT = 10_000.0
"""A faster link is not filled by the one connection with which it is measured."""
FAR_MS = 10.0


def of_links(seen: Examination, names: Sequence[str], wishes: Wishes) -> Iterator[Finding]:
    """Ports, large frames, clocks, speeds, and how long a message takes."""
    yield from _ports(seen, names)
    yield from _frames(seen, names)
    yield from _clocks(seen, names)
    yield from _speeds(seen, names, wishes)
    yield from _half_duplex(seen, names)
    yield from _far(seen, names)


def _ports(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    by_port: dict[str, dict[Pair, str]] = {}
    for call in between(seen):
        met = {int(seen.boxes[call.target].where.rpartition(":")[2]): call.visit.connect, **call.visit.ports}
        for port, how in met.items():
            chosen = port not in seen.ports and not seen.boxes[call.target].where.endswith(f":{port}")
            by_port.setdefault("" if chosen else str(port), {})[call.source, call.target] = how
    for which, doors in by_port.items():
        bad = {pair for pair, how in doors.items() if how not in ("ok", "not asked")}
        for blame in blamed(bad, doors):
            yield _port(seen, names, which, blame, doors)
    for call in seen.calls:
        if call.visit.connect == "not asked":
            name, other = names[call.source], names[call.target]
            what = f"{name} did not say how it reaches {other}: {call.visit.why}"
            change = f"Ask again; if it stays so, look at what `thinwire doctor --listen` says on {name}."
            yield Finding("fault", "unheard", (name,), what, change)


def _port(seen: Examination, names: Sequence[str], port: str, blame: Blame, met: dict[Pair, str]) -> Finding:
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
    what = f"{which} cannot be reached from {pairs}: {heard}"
    boxes = tuple(dict.fromkeys(names[place] for pair in blame.pairs for place in pair))
    return Finding("fault", "no route" if how == "no route" else "firewall", boxes, what, change)


def _frames(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    passes: dict[Pair, bool] = {}
    sizes: dict[Pair, int] = {}
    for call in between(seen):
        there = (call.source, call.target)
        for pair, large in ((there, call.visit.sends_large), (there[::-1], call.visit.hears_large)):
            if large is not None:
                passes[pair] = passes.get(pair, True) and large
        if call.visit.frame_bytes is not None:
            sizes[there] = call.visit.frame_bytes
    bad = {pair for pair, large in passes.items() if not large}
    for blame in blamed(bad, passes):
        known = [sizes[pair] for pair in blame.pairs if pair in sizes]
        largest = max(_mtu(seen, pair) or 0 for pair in blame.pairs)
        fits = min(known) if known else None
        card = _interface(seen, blame.pairs[0])
        command = f"`ip link set dev {card.name if card else 'NAME'} mtu {fits or 1500}`"
        what = (
            f"large frames vanish {_where(names, blame)}: the interfaces send up to {largest} bytes, "
            + (f"{fits} arrive" if fits and fits < largest else "these do not arrive")
            + "; small ones pass"
        )
        change = (
            f"Set the MTU of these boxes to {fits or 1500} ({command}), "
            f"or let the switches and tunnels between them carry {largest}."
        )
        yield Finding("fault", "mtu", boxes_of(names, blame), what, change)
    for pair, size in sizes.items():
        mtu = _mtu(seen, pair)
        other = _mtu(seen, pair[::-1])
        if pair not in bad and pair < pair[::-1] and mtu and other and size < min(mtu, other):
            what = (
                f"between {names[pair[0]]} and {names[pair[1]]} packets of {size} bytes arrive and larger ones do "
                f"not, though the interfaces send {mtu}; TCP has found out"
            )
            change = f"Set the MTU of both to {size}, so that nothing has to find out."
            yield Finding("note", "mtu", tuple(names[place] for place in pair), what, change)


def _mtu(seen: Examination, pair: Pair) -> int | None:
    card = _interface(seen, pair)
    return None if card is None else card.mtu


def _interface(seen: Examination, pair: Pair) -> Interface | None:
    """By which the first of the pair speaks to the second."""
    facts = seen.boxes[pair[0]].facts
    for call in seen.calls:
        if (call.source, call.target) == pair and call.visit.address and facts is not None:
            return facts.interface_of(call.visit.address)
    return None


def _clocks(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    """Each box's clock against the median of all."""
    ahead = _clocks_ahead(seen)
    if not ahead:
        return
    usual = median_low(ahead.values())
    for place, clock in ahead.items():
        skew = clock - usual
        if abs(skew) > CLOCK_S:
            other = f"that of {names[next(one for one in ahead if one != place)]}" if len(ahead) == 2 else "the others'"
            what = f"the clock of {names[place]} is {abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} {other}"
            change = (
                f"Let chrony or systemd-timesyncd set the clock of {names[place]}: events and leases compare times."
            )
            yield Finding("warning", "clock", (names[place],), what, change)


def _clocks_ahead(seen: Examination) -> dict[int, float]:
    """Seconds by which each box's clock is ahead of the first one's, by whichever calls lead there."""
    offsets = [(call.source, call.target, call.visit.clock_s) for call in between(seen)]
    ahead: dict[int, float] = {}
    for source, target, offset in offsets * len(seen.boxes):
        if offset is None:
            continue
        if not ahead:
            ahead[source] = 0.0
        if source in ahead:
            ahead.setdefault(target, ahead[source] + offset)
        elif target in ahead:
            ahead[source] = ahead[target] - offset
    return ahead


def _speeds(seen: Examination, names: Sequence[str], wishes: Wishes) -> Iterator[Finding]:
    rates: dict[Pair, float] = {}
    for call in between(seen):
        for pair, rate in (
            ((call.source, call.target), call.visit.there_mbit),
            ((call.target, call.source), call.visit.back_mbit),
        ):
            if rate is not None:
                rates[pair] = rate
    if not rates:
        return
    usual = sorted(rates.values())[len(rates) * 3 // 4]  # one bad box of three is in two thirds of all pairs
    bad: dict[Pair, float] = {}
    for pair, rate in rates.items():
        back = rates.get(pair[::-1], rate)
        should = [back, wishes.rate_mbit or 0.0, _card(seen, pair)]
        if len(rates) > 2:
            should.append(usual)
        expected = min(max(should), ONE_STREAM_MBIT)
        if rate < SLOW * expected:
            bad[pair] = expected
    for blame in blamed(bad, rates):
        reached = [rates[pair] for pair in blame.pairs]
        expected = max(bad[pair] for pair in blame.pairs)
        one_way = blame.what in ("out", "into", "pair")
        opposite = [rates[pair[::-1]] for pair in blame.pairs if pair[::-1] in rates]
        figures = f"{_span(reached)} Mbit/s"
        if one_way and opposite:
            figures += f", and {_span(opposite)} the other way"
        what = f"slow {_where(names, blame)}: {figures}; {expected:.0f} are expected"
        yield Finding(
            "warning", "asymmetry" if one_way else "slow link", boxes_of(names, blame), what, _mend_speed(names, blame)
        )


def _mend_speed(names: Sequence[str], blame: Blame) -> str:
    if blame.what == "all":
        return "Look at the switch between all, and at what else uses the network now."
    if blame.box is not None:
        box = names[blame.box]
        return f"Look at {box}'s cable, its switch port and `ethtool` there: speed, duplex, errors, limits on traffic."
    one, other = (names[place] for place in blame.pairs[0])
    return f"Look at the path between {one} and {other} (`mtr`), and at `ethtool` on both: speed, duplex, errors."


def _card(seen: Examination, pair: Pair) -> float:
    """What the slower of the two cards has agreed on with its switch; 0 where that is not known."""
    cards = (_interface(seen, pair), _interface(seen, pair[::-1]))
    return min(float(card.speed_mbit or 0) if card is not None else 0.0 for card in cards)


def _half_duplex(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    for call in between(seen):
        visit = call.visit
        alone, together = (visit.there_mbit, visit.back_mbit), (visit.both_there_mbit, visit.both_back_mbit)
        there, back = (rate or 0.0 for rate in alone)
        if None in (*alone, *together) or min(there, back) < SLOW * max(there, back) or there > HALF_DUPLEX_MOST_MBIT:
            continue
        both = sum(rate or 0.0 for rate in together)
        if both < HALF_DUPLEX * (there + back):
            pair = (names[call.source], names[call.target])
            what = (
                f"between {pair[0]} and {pair[1]} both directions share one speed: {there:.0f} and {back:.0f} "
                f"Mbit/s alone, {both:.0f} together"
            )
            change = "Set card and switch port both to negotiate (`ethtool -s NAME autoneg on`): one is half duplex."
            yield Finding("warning", "half duplex", pair, what, change)


def _far(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    far: dict[frozenset[int], float] = {}
    for call in between(seen):
        if call.visit.round_trip_ms is not None and call.visit.round_trip_ms > FAR_MS:
            pair = frozenset((call.source, call.target))
            far[pair] = max(far.get(pair, 0.0), call.visit.round_trip_ms)
    for pair, took in far.items():
        one, other = sorted(names[place] for place in pair)
        what = f"a message between {one} and {other} takes {took:.1f} ms there and back"
        change = "Look for a detour, a full queue or a busy machine: boxes of one site need less than 1 ms."
        yield Finding("warning", "latency", (one, other), what, change)


# words


def _where(names: Sequence[str], blame: Blame) -> str:
    one, other = (names[place] for place in blame.pairs[0])
    match blame.what:
        case "all":
            return "between all boxes"
        case "box":
            return f"between {names[blame.box or 0]} and every other box"
        case "out":
            return f"in all that {names[blame.box or 0]} sends"
        case "into":
            return f"in all that {names[blame.box or 0]} receives"
        case "both":
            return f"between {one} and {other}"
        case "pair":
            return f"from {one} to {other}"


def _span(rates: Sequence[float]) -> str:
    low, high = f"{min(rates):.0f}", f"{max(rates):.0f}"
    return low if low == high else f"{low} to {high}"
