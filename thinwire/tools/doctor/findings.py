"""What follows from what was found: a pure function. Each finding says what, with the value, and what to change.

Here is what is wrong with a box, by itself or beside the others, and who could not be examined. of_links.py has what is
wrong with a link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from thinwire.tools.doctor.examination import Call, Examination
from thinwire.tools.doctor.facts import Facts
from thinwire.tools.doctor.finding import Finding, Severity, Wishes, host_of, names_of
from thinwire.tools.doctor.of_links import of_links

FREE_FAULT, FREE_WARNING = 64 << 20, 2 << 30
"""Bytes: a disk with less cannot be used, or fills soon."""
FREE_FILES = 1000
FREE_MEMORY = 1 << 30
USED_GPU = 0.1
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
        *of_links(seen, names, wishes),
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
