"""`thinwire up` and `thinwire down`: this machine as a box of a Ray cluster."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from thinwire import boxes
from thinwire.boxes import (
    DASHBOARD_PORT,
    HEAD_PORT,
    Box,
    BoxError,
    BoxFolder,
    BoxRay,
    State,
    default_folder,
)
from thinwire.cli.screen import complain
from thinwire.contract.interfaces import NoInterface, address_of, interfaces, listed, routes_to
from thinwire.service.launch import processes
from thinwire.service.launch.protocol import LauncherError

START_S = 240.0
HOW_TO_HEAD = (
    "There, `thinwire down`, then `thinwire up --head --interface NAME`, which prints the line to type on other boxes"
)
REACH_S = 5.0
"""A head's port takes a connection in no time; one of a busy machine, in this."""
END_S = 95.0
"""For a supervisor: its workers may take boxes.LEAVE_S to leave, and Ray ray_head.CLOSE_S to end."""

Folder = Annotated[
    Path | None, typer.Option("--box", help="This box's folder. Default: THINWIRE_BOX, or beside the home.")
]


def up(
    head: Annotated[bool, typer.Option("--head", help="Begin a cluster: this box is its head.")] = False,
    join: Annotated[str | None, typer.Option(metavar="HEAD:PORT", help="Join the cluster of this head.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="With --join: a copy of the head's token file, mode 0600.")
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            help="The network interface that the other boxes reach. Default: with --join the one that leads to the "
            "head; with --head loopback, a cluster of this box alone."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="With --head: where boxes join.")] = HEAD_PORT,
    dashboard_port: Annotated[int, typer.Option(help="With --head: where services submit jobs.")] = DASHBOARD_PORT,
    num_cpus: Annotated[
        int | None, typer.Option(min=1, help="How many workers without a GPU fit here. Default: its cores.")
    ] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, as a service manager wants it.")] = False,
    folder: Folder = None,
) -> None:
    """Make this machine a box of a Ray cluster, and keep it one: Ray that ends is started again.

    On the head: `thinwire up --head --interface eth0`. It says what to type on the others, and at the service.
    """
    place = BoxFolder(folder or default_folder())
    try:
        box = _asked(head, join, token_file, interface, port, dashboard_port, num_cpus)
        _refuse_second(place)
        place.make(box, token_file)
        if foreground:
            raise typer.Exit(boxes.main([str(place.path)]))
        _see_head(place, box)
        _start(place)
    except (BoxError, NoInterface, LauncherError, OSError) as error:
        complain(str(error))
        raise typer.Exit(2 if isinstance(error, NoInterface) else 1) from None
    typer.echo(_welcome(place, box))


def down(folder: Folder = None) -> None:
    """End Ray on this box, with all that runs in it, and see that nothing is left."""
    place = BoxFolder(folder or default_folder())
    try:
        box, state = place.box(), place.state()
        if box is None:
            typer.echo(f"Nothing is up here ({place.path}).", err=True)
            return
        if state is not None and state.supervised():
            supervising = processes.Process(state.pid, 0, 0, state.birth)
            if processes.end(lambda: [supervising], END_S, END_S + 5.0):
                raise BoxError(f"the supervisor, process {state.pid}, does not end; see {place.log}")
        ray = BoxRay(place, box)
        ray.acquire()
        try:
            ray.end()  # what a supervisor left that was killed
        finally:
            ray.release()
        place.forget()
    except (BoxError, LauncherError, OSError) as error:
        complain(str(error))
        raise typer.Exit(1) from None
    typer.echo("Down: nothing of Ray is left on this box.")


def _asked(
    head: bool,
    join: str | None,
    token_file: Path | None,
    interface: str | None,
    port: int,
    dashboard_port: int,
    num_cpus: int | None,
) -> Box:
    """What was asked for. Raises BoxError, NoInterface."""
    if head == (join is not None):
        raise BoxError("give --head, or --join HEAD:PORT with --token-file: a box is one of the two")
    cpus = num_cpus or os.cpu_count() or 1
    if head:
        if token_file is not None:
            raise BoxError("--token-file is for --join: a head makes the token itself")
        address = "127.0.0.1" if interface is None else address_of(interface)
        where = f"{address}:{port}"
        return Box(role="head", address=address, head=where, dashboard_port=dashboard_port, num_cpus=cpus)
    assert join is not None
    if token_file is None:
        raise BoxError("--join needs --token-file: a copy of the head's token file, which `thinwire up --head` names")
    boxes.read_token(token_file)  # before anything is asked of the network
    host, _, joined = join.rpartition(":")
    if not host or not joined.isdecimal():
        raise BoxError(f"--join {join}: must be HEAD:PORT, as `thinwire up --head` prints it")
    try:
        head_address = socket.gethostbyname(host)
        address = routes_to(head_address) if interface is None else address_of(interface)
    except OSError as error:
        raise BoxError(f"the head {host} cannot be reached from here: {error.strerror or error}") from error
    if ipaddress.ip_address(head_address).is_loopback:
        raise BoxError(
            f"--join {join}: a head on loopback ({head_address}) is a cluster of its own machine alone; Ray lets no "
            f"box join it, not even one of that machine. {HOW_TO_HEAD}. This box: {listed(interfaces())}"
        )
    return Box(role="joined", address=address, head=f"{head_address}:{joined}", num_cpus=cpus)


def _refuse_second(place: BoxFolder) -> None:
    box, state = place.box(), place.state()
    if box is not None and state is not None and state.supervised():
        raise BoxError(
            f"this box is up already, as {box.role} of the cluster {box.head}: `thinwire down` first, or --box for "
            "another folder"
        )


def _see_head(place: BoxFolder, box: Box) -> None:
    """Ray would look for a head for minutes, and end in a stack trace. Raises BoxError where nobody listens there."""
    host, _, port = box.head.rpartition(":")
    if box.role == "head":
        return
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except (OSError, OverflowError) as error:
        place.withdraw()
        raise BoxError(
            f"no head answers at {box.head} ({getattr(error, 'strerror', None) or error}). One that was started "
            f"without --interface listens on its loopback alone. {HOW_TO_HEAD}. If it has an interface, see that it is "
            "up and that no firewall is in between"
        ) from None


def _start(place: BoxFolder) -> None:
    """Start the supervisor, and wait until Ray is up. Raises BoxError."""
    place.state_file.unlink(missing_ok=True)
    with place.log.open("wb") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", boxes.__name__, str(place.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=place.path,
            start_new_session=True,
        )
    until = time.monotonic() + START_S
    state: State | None = None
    while time.monotonic() < until and started.poll() is None:
        state = place.state()
        if state is not None and state.up:
            return
        if state is not None and state.trouble not in (None, "it is starting"):
            break
        time.sleep(0.2)
    why = (state and state.trouble) or place.log.read_text(errors="replace")[-2000:].strip()
    if started.poll() is None:
        started.terminate()
        started.wait(END_S)
    place.withdraw()
    raise BoxError(f"Ray does not run on this box: {why}")


def _welcome(place: BoxFolder, box: Box) -> str:
    if box.role == "joined":
        return f"Up: this box ({box.address}) has joined the cluster of {box.head}. `thinwire down` ends it."
    others = f"thinwire up --join {box.head} --token-file TOKEN"
    if box.address.startswith("127."):
        others = f"(none can: it listens on loopback; use --interface. This box: {listed(interfaces())})"
    return "\n".join(
        (
            f"Up: this box ({box.address}) is the head of a cluster. Its token is in {place.token}:",
            "copy it, mode 0600, to every other box and to the service's machine. Who has it may run anything on them.",
            f"  on another box:  {others}",
            f"  at the service:  THINWIRE_LAUNCHER=ray THINWIRE_RAY_ADDRESS={box.dashboard}",
            "                   THINWIRE_RAY_TOKEN_FILE=TOKEN THINWIRE_PUBLIC_URL=http://ADDRESS:8400",
            "                   thinwire serve --host ADDRESS --port 8400",
            "`thinwire down` ends it, with all that runs in it.",
        )
    )
