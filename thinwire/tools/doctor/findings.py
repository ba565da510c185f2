"""What follows from what was found: a pure function. Each finding says what, with the value, and what to change.

First what is wrong with a box, by itself or beside the others, and who could not be examined; then with the links:
who does not reach whom, at which port; frames, clocks and speeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median_low

from thinwire.tools.doctor.examination import Call, Examination
from thinwire.tools.doctor.facts import Facts, Interface
from thinwire.tools.doctor.finding import (
    Blame,
    Finding,
    Pair,
    Severity,
    Wishes,
    between,
    blamed,
    boxes_of,
    host_of,
    names_of,
)

FREE_FAULT, FREE_WARNING = 64 << 20, 2 << 30
"""Bytes: a disk with less cannot be used, or fills soon."""
FREE_FILES = 1000
FREE_MEMORY = 1 << 30
USED_GPU = 0.1
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


def findings(seen: Examination, wishes: Wishes) -> list[Finding]:
    """All, the worst first."""
    names = names_of(seen)
    found = [
        *_unheard(seen, names),
        *_of_boxes(seen, names, wishes),
        *_links(seen, names, wishes),
    ]
    order = ("fault", "warning", "note")
    return sorted(found, key=lambda one: order.index(one.severity))


def _unheard(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    """Boxes that could not be examined, and why."""
    for place, (name, box) in enumerate(zip(names, seen.boxes, strict=True)):
        if box.facts is not None:
            continue
        host, port = host_of(box.where), box.where.rpartition(":")[2]
        kind, change = _UNHEARD.get(box.connect, _OTHERWISE)
        reached = [names[call.source] for call in seen.calls if call.target == place and call.visit.connect == "ok"]
        also = f"; {', '.join(reached)} can reach it" if reached else ""
        what = f"{name} could not be examined: {box.why}{also}"
        change = change.format(host=host, port=port)
        yield Finding("fault", kind, (name,), what, change)


def _of_boxes(seen: Examination, names: Sequence[str], wishes: Wishes) -> Iterator[Finding]:
    """Everything that a box says of itself and that a job would suffer from."""
    for place, (name, box) in enumerate(zip(names, seen.boxes, strict=True)):
        if box.facts is None:
            continue
        yield from _room(name, box.facts)
        yield from _apart(seen, names, place)
        yield from _gpus(name, box.facts)
        calls = [call for call in seen.calls if call.source == place]
        yield from _interfaces(name, box.facts, wishes, calls)
        if len(seen.boxes) > 1:
            yield from _own_name(name, box.facts)
    yield from _versions(seen, names)
    yield from _unlike_gpus(seen, names)
    yield from _enough(seen, wishes)


def _room(name: str, facts: Facts) -> Iterator[Finding]:
    """Disks, files and memory."""
    for folder in facts.folders:
        free = folder.free_bytes or 0
        if folder.problem is not None or free < FREE_FAULT or folder.free_files == 0:
            why = folder.problem or ("no more files can be made" if folder.free_files == 0 else "the disk is full")
            what = f"{name}: {folder.path} cannot be used, {free >> 20} MiB free: {why}"
            change = f"Make room or mend the permissions of {folder.path} on {name}, or name another folder."
            yield Finding("fault", "disk", (name,), what, change)
        elif free < FREE_WARNING or (folder.free_files or FREE_FILES) < FREE_FILES:
            what = f"{name}: {folder.path} has only {free >> 20} MiB and {_count(folder.free_files)} files left"
            change = f"Make room in {folder.path} on {name}: checkpoints and logs will fill it."
            yield Finding("warning", "disk", (name,), what, change)
    for path, unreadable in facts.files.items():
        if unreadable is not None:
            what = f"{name}: {path} cannot be read: {unreadable}"
            change = f"Put the file at {path} on {name} too; every worker reads it on its own box."
            yield Finding("fault", "file", (name,), what, change)
    for url, unwritten in facts.stores.items():
        if unwritten is not None:
            what = f"{name}: the store {url} cannot be written to: {unwritten}"
            change = f"Give {name} what it needs for {url}: a route, the client's package, credentials."
            yield Finding("fault", "store", (name,), what, change)
    if facts.available_bytes is not None and facts.available_bytes < FREE_MEMORY:
        what = f"{name}: {facts.available_bytes >> 20} MiB of memory are left"
        change = f"End what else runs on {name}, or raise its container's limit."
        yield Finding("warning", "memory", (name,), what, change)


def _apart(seen: Examination, names: Sequence[str], place: int) -> Iterator[Finding]:
    """Folders that should be one and are not. Those that cannot be used at all are reported as disks."""
    box = seen.boxes[place]
    first = next(name for name, one in zip(names, seen.boxes, strict=True) if one.facts is not None)
    unusable = {folder.path for folder in box.facts.folders if folder.problem} if box.facts else set()
    for folder in box.apart:
        if folder not in unusable:
            what = f"{names[place]}: {folder} is another folder than on {first}: what {first} puts there is not seen"
            change = f"Mount one shared folder at {folder} on all boxes, or give the job a store at a URL."
            yield Finding("fault", "store", (names[place],), what, change)


def _gpus(name: str, facts: Facts) -> Iterator[Finding]:
    if facts.gpu_problem is not None:
        what = f"{name}: its GPUs do not answer: {facts.gpu_problem}"
        change = f"Load the driver on {name} that fits its library; after an upgrade, reboot."
        yield Finding("fault", "gpu", (name,), what, change)
    for number, gpu in enumerate(facts.gpus):
        if gpu.memory_mib and gpu.used_mib > USED_GPU * gpu.memory_mib:
            what = f"{name}: GPU {number} ({gpu.name}) has {gpu.used_mib} of {gpu.memory_mib} MiB in use already"
            change = f"See with nvidia-smi who uses GPU {number} of {name}, and end that."
            yield Finding("warning", "gpu", (name,), what, change)


def _interfaces(name: str, facts: Facts, wishes: Wishes, calls: Sequence[Call]) -> Iterator[Finding]:
    wanted = {f"{variable} in its environment": value for variable, value in facts.environment.items()}
    wanted = {who: value for who, value in wanted.items() if "SOCKET_IFNAME" in who}
    if wishes.interface is not None:
        wanted["the job or --interface"] = wishes.interface
    for who, interface in wanted.items():
        yield from _interface(name, facts, who, interface, calls)


def _own_name(name: str, facts: Facts) -> Iterator[Finding]:
    if (facts.hostname_address or "").startswith("127."):
        what = f"{name}: its own name {facts.hostname} means {facts.hostname_address} there"
        change = f"If peers are asked to connect to 127.0.0.1, give {facts.hostname} its real address in /etc/hosts."
        yield Finding("note", "host name", (name,), what, change)


def _interface(name: str, facts: Facts, who: str, interface: str, calls: Sequence[Call]) -> Iterator[Finding]:
    others = ", ".join(f"{one.name} ({one.addresses[0]})" for one in facts.interfaces if one.addresses)
    found = next((one for one in facts.interfaces if one.name == interface), None)
    wrong: str | None = None
    if found is None:
        wrong = f"there is none; there are {others}"
    elif not found.up:
        wrong = "it is down"
    elif not found.addresses:
        wrong = f"it has no address; with one: {others}"
    if wrong is not None:
        what = f"{name}: {who} wants the interface {interface}: {wrong}"
        change = f"Name the interface that carries the traffic between the boxes, or bring {interface} up on {name}."
        yield Finding("fault", "interface", (name,), what, change)
        return
    taken = {
        one.name for call in calls if call.visit.address and (one := facts.interface_of(call.visit.address)) is not None
    }
    if taken and interface not in taken:
        what = f"{name}: {who} wants the interface {interface}, but {name} reaches the others by {', '.join(taken)}"
        change = f"Name the boxes by their addresses on {interface}, or name {', '.join(taken)} as the interface."
        yield Finding("warning", "interface", (name,), what, change)


def _versions(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    facts = {name: box.facts for name, box in zip(names, seen.boxes, strict=True) if box.facts is not None}
    packages = sorted({package for one in facts.values() for package in one.versions})
    for package in packages:
        said = {name: one.versions.get(package, "missing") for name, one in facts.items()}
        yield from _differ(package, said, "warning" if package in ("numpy", "torchvision") else "fault")
    minor = {name: one.python.rpartition(".")[0] for name, one in facts.items()}
    whole = {name: one.python for name, one in facts.items()}
    yield from _differ("python", whole, "fault" if len(set(minor.values())) > 1 else "note")
    drivers = {name: one.gpus[0].driver for name, one in facts.items() if one.gpus}
    yield from _differ("the GPU driver", drivers, "warning")


def _differ(what: str, said: dict[str, str], severity: Severity) -> Iterator[Finding]:
    if len(set(said.values())) < 2:
        return
    usual = Counter(said.values()).most_common(1)[0][0]
    by_version: dict[str, list[str]] = {}
    for name, value in said.items():
        by_version.setdefault(value, []).append(name)
    odd = [name for name, value in said.items() if value != usual]
    words = "; ".join(f"{value} on {', '.join(where)}" for value, where in by_version.items())
    change = f"Install the same {what} on {', '.join(odd)} as on the others."
    yield Finding(severity, "version", tuple(odd), f"{what} differs: {words}", change)


def _unlike_gpus(seen: Examination, names: Sequence[str]) -> Iterator[Finding]:
    said = {
        name: " + ".join(f"{number} x {model}" for model, number in Counter(gpu.name for gpu in facts.gpus).items())
        for name, box in zip(names, seen.boxes, strict=True)
        if (facts := box.facts) is not None
    }
    if len(set(said.values())) > 1:
        what = "the boxes have different GPUs: " + "; ".join(f"{name}: {gpus or 'none'}" for name, gpus in said.items())
        change = "A step takes as long as its slowest worker: give a job boxes of one kind."
        yield Finding("note", "gpu", tuple(said), what, change)


def _enough(seen: Examination, wishes: Wishes) -> Iterator[Finding]:
    facts = [box.facts for box in seen.boxes if box.facts is not None]
    gpus, cpus = sum(len(one.gpus) for one in facts), sum(one.cpus for one in facts)
    on_gpus = wishes.device == "gpu" or (wishes.device == "auto" and gpus > 0)
    have, unit = (gpus, "GPUs") if on_gpus else (cpus, "CPUs")
    if have < wishes.workers:
        what = f"the job needs at least {wishes.workers} workers, and the boxes have {have} {unit}: one for each"
        change = f"Lower workers.min to {have}, or add boxes." if have else f"Add boxes with {unit}."
        yield Finding("fault", "too few", (), what, change)


def _count(number: int | None) -> str:
    return "enough" if number is None else str(number)


def _links(seen: Examination, names: Sequence[str], wishes: Wishes) -> Iterator[Finding]:
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
        card = _interface_of(seen, blame.pairs[0])
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
    card = _interface_of(seen, pair)
    return None if card is None else card.mtu


def _interface_of(seen: Examination, pair: Pair) -> Interface | None:
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
    cards = (_interface_of(seen, pair), _interface_of(seen, pair[::-1]))
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
