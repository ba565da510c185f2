"""`thinwire doctor`: what is wrong with boxes and links, before a job suffers from it."""

from __future__ import annotations

import io
import ipaddress
import json
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.cli.job_file import JobFileError, read_job_spec
from thinwire.cli.quantities import rate_mbit
from thinwire.cli.screen import complain
from thinwire.contract.spec import ScriptSpec, TrainSpec
from thinwire.service.launch.protocol import LauncherError
from thinwire.tools.doctor.clusters import NotExamined, Order, examine_cluster
from thinwire.tools.doctor.examination import Box, Examination, Here, Peer, examine
from thinwire.tools.doctor.facts import Questions
from thinwire.tools.doctor.finding import Finding, Wishes, asked_by, names_of
from thinwire.tools.doctor.findings import findings
from thinwire.tools.doctor.link import SHORTEST_SECRET
from thinwire.tools.doctor.listener import Listener

PORT = 7655
"""Where a doctor listens unless another port is given."""

app = typer.Typer(rich_markup_mode="markdown")


CLUSTER_LIMIT_S = 900.0
"""For the job that examines a Ray cluster: 64 nodes take 63 rounds of some ten seconds."""


FINE, SUFFERS, UNEXAMINED = 0, 1, 2
"""Exit codes: nothing that will hurt; something will; nobody could be examined, or what was asked makes no sense."""
_COLOURS = {"fault": "red", "warning": "yellow", "note": "dim"}
_WIDTH = 160


class Unusable(Exception):
    """What was asked cannot be done; the message says why, and what to do."""


@app.command()
def doctor(
    peers: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT],...", help=f"Other boxes, where `--listen` runs. PORT: {PORT} if not given."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A Ray cluster, http://head:8265, where thinwire is installed: all nodes."),
    ] = None,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes", help="Pods of Kubernetes, as those of a job, with the rights that kubectl has here."
        ),
    ] = False,
    pods: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="With --kubernetes: so many workers. Default: workers.max of --job, else 2."),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="With --kubernetes. Default: that of kubectl's context.")
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(
            help="With --kubernetes: a RayJob, as of `thinwire manifest`.", envvar="THINWIRE_KUBERAY_TEMPLATE"
        ),
    ] = None,
    added: Annotated[
        Path | None,
        typer.Option(
            help="With --kubernetes: a file with what is added to the pods, as kuberay.pods of the chart.",
            envvar="THINWIRE_KUBERAY_PODS",
            show_default=False,
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="With --kubernetes: of head and workers.", envvar="THINWIRE_KUBERAY_IMAGE"),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="With --address: the Python of the nodes. Default: THINWIRE_PYTHON there, else python."),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="A job file: what it needs is looked for, its store, its data, its workers.")
    ] = None,
    listen: Annotated[
        bool, typer.Option("--listen", help="Be examined: listen for the doctor of another box until Ctrl-C.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="A secret of 16 characters or more, the same on all boxes; with `--address`, the cluster's token."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="This box's address for the others. Default: that by which the first peer is reached."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at. 0: any.")] = PORT,
    ports: Annotated[
        str,
        typer.Option(
            metavar="PORT,...", help="Ports that all boxes must reach at one another, beside any the kernel gives."
        ),
    ] = "",
    interface: Annotated[
        str | None,
        typer.Option(help="The interface by which the boxes are to speak: it must be there, and be the one used."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="What every link should reach, such as 10gbit; half of it is enough."),
    ] = None,
    store: Annotated[
        list[str] | None,
        typer.Option(help="A folder that all boxes share, or a URL: each must be able to write. May be given again."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="How long each speed is measured. 0: not at all.")
    ] = 1.0,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: findings, facts, measurements.")
    ] = False,
) -> None:
    """Say what is wrong with boxes and the links between them, and what to change.

    Alone, it looks at this box: disks, memory, interfaces, GPUs and their driver, versions. With `--peers` it looks at
    the others too and at every pair: who reaches whom at which port, whether large frames arrive, how fast each
    direction is alone and both are at once, how long a message takes, what the clocks say.

    The measurements load the links for some seconds a pair: not while a job trains on them.

    **Several boxes.** Put the same token file on all. On each of the others run `thinwire doctor --listen --token-file
    FILE`, and on one `thinwire doctor --peers 10.0.0.2,10.0.0.3 --token-file FILE`.

    **A Ray cluster.** `thinwire doctor --address http://head:8265 --token-file FILE` runs a Ray job that examines every
    node; nothing has to be started on them.

    **Kubernetes.** `thinwire doctor --kubernetes --pods 4` does the same in pods of a RayJob, placed as those of a job
    would be, and removes it again. It needs the extra `kubernetes`.

    **Before a job.** `--job FILE`, with either of them: its store, its data and enough CPUs or GPUs are looked for too.

    **Exit status**: 0 nothing that would hurt a job; 1 something was found; 2 nothing could be examined.
    """
    try:
        if listen:
            _listen(_secret(token_file), host or "", port)
            return
        spec = None if job is None else _spec(job)
        questions, wishes = _asked(spec, store or [], interface, expect)
        if (address is not None) + (peers is not None) + kubernetes > 1:
            raise Unusable("--address, --peers and --kubernetes: give one, all that it names is examined")
        order = Order(questions, _ports(ports), seconds, CLUSTER_LIMIT_S, _say)
        if kubernetes:
            seen = _pods(pods, spec, (namespace, template, image, added), order)
        elif address is not None:
            seen = examine_cluster(address, "" if token_file is None else _token(token_file), order, python)
        elif peers is not None:
            seen = _with_peers(_peers(peers), _secret(token_file), (host, port), order)
        else:
            seen = examine([_alone()], questions)
    except (Unusable, NotExamined) as error:
        complain(str(error))
        raise typer.Exit(UNEXAMINED) from None
    _print(seen, findings(seen, wishes), json_)


def _print(seen: Examination, found: list[Finding], json_: bool) -> NoReturn:
    if json_:
        typer.echo(json.dumps(as_json(seen, found)))
    else:
        typer.echo(as_text(seen, found, colours=sys.stdout.isatty()), nl=False)
    raise typer.Exit(exit_code(seen, found))


def _spec(job: Path) -> TrainSpec | ScriptSpec:
    try:
        return read_job_spec(job)
    except JobFileError as error:
        raise Unusable(str(error)) from error


def _asked(
    spec: TrainSpec | ScriptSpec | None, stores: Sequence[str], interface: str | None, expect: str | None
) -> tuple[Questions, Wishes]:
    """Of the job, and of the options beside it, which win."""
    questions, wishes = (Questions(), Wishes()) if spec is None else asked_by(spec)
    changed: dict[str, object] = {}
    if interface is not None:
        changed["interface"] = interface
    if expect is not None:
        changed["rate_mbit"] = _rate(expect)
    folders = (*questions.folders, *(store for store in stores if "://" not in store))
    urls = (*questions.stores, *(store for store in stores if "://" in store))
    return questions.model_copy(update={"folders": folders, "stores": urls}), wishes.model_copy(update=changed)


def _pods(
    pods: int | None,
    spec: TrainSpec | ScriptSpec | None,
    kind: tuple[str | None, Path | None, str | None, Path | None],
    order: Order,
) -> Examination:
    """kind: namespace, template, image, and what is added to the pods."""
    try:
        from thinwire.service.launch.kuberay.kube import connect
        from thinwire.tools.doctor.pods import examine_pods
    except ModuleNotFoundError as error:
        raise Unusable("--kubernetes needs the Kubernetes client: pip install 'thinwire[kubernetes]'") from error
    namespace, template, image, added = kind
    number = pods or (2 if spec is None else spec.workers.max)
    try:
        return examine_pods(connect(namespace), number, order, spec=spec, template=template, image=image, added=added)
    except LauncherError as error:
        raise Unusable(str(error)) from error


def _alone() -> Box:
    """This box, with a listener that nobody else can find."""
    return Here(Listener(secrets.token_bytes(16), "127.0.0.1"), "127.0.0.1")


def _with_peers(
    peers: Sequence[tuple[str, int]], secret: bytes, here: tuple[str | None, int], order: Order
) -> Examination:
    own = here[0] or _own_address(peers)
    listener = _listener(secret, own if ":" in own else "", here[1])
    try:
        boxes: list[Box] = [Here(listener, own), *(Peer(*peer, secret) for peer in peers)]
        return examine(boxes, order.questions, ports=order.ports, seconds=order.seconds, say=order.say)
    finally:
        listener.close()


def _say(what: str, done: float) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r\x1b[K{what} ({done:.0%})" if done < 1.0 else "\r\x1b[K", nl=False, err=True)


def _own_address(peers: Sequence[tuple[str, int]]) -> str:
    """By which this box would reach the first peer that there is a route to. Nothing is sent."""
    for host, port in peers:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as asked:
                asked.connect(address)
                return str(asked.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"  # none can be reached: the findings say why


def _listen(secret: bytes, host: str, port: int) -> None:
    listener = _listener(secret, host, port)
    typer.echo(f"listening at port {listener.port}; Ctrl-C ends it", err=True)
    try:
        while True:
            time.sleep(3600.0)
    except KeyboardInterrupt:
        listener.close()


def _listener(secret: bytes, host: str, port: int) -> Listener:
    try:
        return Listener(secret, host, port)
    except OSError as error:
        raise Unusable(f"port {port} cannot be listened at: {error.strerror}; choose another with --port") from error


def _secret(path: Path | None) -> bytes:
    if path is None:
        raise Unusable(
            "--token-file is missing: write one with `openssl rand -hex 16 > doctor.token`, and put it on all boxes"
        )
    secret = _token(path).encode()
    if len(secret) < SHORTEST_SECRET:
        raise Unusable(f"the token in {path} has {len(secret)} characters: it must have {SHORTEST_SECRET} at least")
    return secret


def _token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"the token file {path} cannot be read: {error}") from error


def _peers(text: str) -> list[tuple[str, int]]:
    """HOST, HOST:PORT, [SIX], [SIX]:PORT, with commas between."""
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            found.append((str(ipaddress.IPv6Address(word)), PORT))
            continue
        except ValueError:
            host, colon, number = word.rpartition(":")
        if not colon or number.endswith("]"):
            host, number = word, str(PORT)
        if not host or not number.isdecimal() or not 0 < int(number) < 1 << 16:
            raise Unusable(f"--peers {word!r}: must be HOST or HOST:PORT, with a port from 1 to 65535")
        found.append((host.strip("[]"), int(number)))
    if not found:
        raise Unusable(f"--peers {text!r} names nobody: give HOST or HOST:PORT, with commas between")
    return found


def _ports(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in words if not word.isdecimal() or not 0 < int(word) < 1 << 16]
    if wrong:
        raise Unusable(f"--ports {wrong[0]!r}: must be port numbers from 1 to 65535, with commas between")
    return tuple(int(word) for word in words)


def _rate(text: str) -> float:
    try:
        return rate_mbit(text)
    except ValueError as error:
        raise Unusable(f"--expect {error}") from error


# what a person reads, and what a program does


def exit_code(seen: Examination, found: list[Finding]) -> int:
    """Notes do not count."""
    if not any(box.facts is not None for box in seen.boxes):
        return UNEXAMINED
    return SUFFERS if any(one.severity != "note" for one in found) else FINE


def as_json(seen: Examination, found: list[Finding]) -> dict[str, Any]:
    """Everything, for a program: names, what was found, and what was measured."""
    return {
        "exit_code": exit_code(seen, found),
        "findings": [asdict(one) for one in found],
        "names": names_of(seen),
        **seen.model_dump(mode="json"),
    }


def as_text(seen: Examination, found: list[Finding], *, colours: bool = False) -> str:
    """Two tables, then each finding in two lines: what is, and what to change."""
    written = io.StringIO()
    console = Console(file=written, width=_WIDTH, force_terminal=colours, highlight=False, soft_wrap=True)
    console.print(_boxes(seen))
    if seen.calls:
        console.print(_links(seen))
    console.print()
    for one in found:
        line = Text(f"{one.severity}: ", style=_COLOURS[one.severity])
        console.print(line.append(one.what, style="default"))
        console.print(Text(f"    {one.change}"))
    counts = [f"{number} {kind}{'s' * (number > 1)}" for kind in _COLOURS if (number := _number(found, kind))]
    console.print(", ".join(counts) + "." if counts else _fine(seen))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def _number(found: list[Finding], severity: str) -> int:
    return sum(one.severity == severity for one in found)


def _fine(seen: Examination) -> str:
    boxes, calls = len(seen.boxes), len(seen.calls)
    links = f" and {calls // 2} link{'s' * (calls > 2)}" if calls else ""
    return f"Nothing found that would hurt a job: {boxes} box{'es' * (boxes > 1)}{links} examined."


def _boxes(seen: Examination) -> Table:
    table = Table(
        "box", "address", "CPUs", "memory free", "disk free", "GPUs", "interfaces", "python", "torch", "ray", box=None
    )
    for name, box in zip(names_of(seen), seen.boxes, strict=True):
        facts = box.facts
        if facts is None:
            table.add_row(name, box.where, "not examined")
            continue
        free = [folder.free_bytes for folder in facts.folders if folder.free_bytes is not None]
        up = [one for one in facts.interfaces if one.up and one.addresses and one.name != "lo"]
        table.add_row(
            name,
            box.where,
            str(facts.cpus),
            f"{(facts.available_bytes or 0) / 2**30:.1f} GiB",
            f"{min(free) / 2**30:.1f} GiB" if free else "",
            str(len(facts.gpus)),
            ", ".join(f"{one.name} {one.mtu}" for one in up),
            facts.python,
            facts.versions.get("torch", "none"),
            facts.versions.get("ray", "none"),
        )
    return table


def _links(seen: Examination) -> Table:
    names = names_of(seen)
    table = Table("from", "to", "there and back", "there", "back", "both at once", "frame", "clock", box=None)
    for call in seen.calls:
        visit = call.visit
        if visit.connect != "ok":
            table.add_row(names[call.source], names[call.target], visit.connect)
            continue
        both = (visit.both_there_mbit, visit.both_back_mbit)
        table.add_row(
            names[call.source],
            names[call.target],
            f"{visit.round_trip_ms:.2f} ms",
            _mbit(visit.there_mbit),
            _mbit(visit.back_mbit),
            " + ".join(f"{rate:.0f}" for rate in both if rate is not None),
            "" if visit.frame_bytes is None else f"{visit.frame_bytes} B",
            "" if visit.clock_s is None else f"{visit.clock_s * 1e3:+.1f} ms",
        )
    return table


def _mbit(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.0f} Mbit/s"
