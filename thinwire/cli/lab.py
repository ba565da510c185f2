"""`thinwire lab`: a lab from the command line, and what this machine can do as one."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from thinwire.cli.quantities import rate_mbit, time_ms
from thinwire.cli.screen import complain
from thinwire.tools.doctor.examination import Examination
from thinwire.tools.doctor.probe import Visit
from thinwire.tools.lab import network
from thinwire.tools.lab.counters import HostCounters
from thinwire.tools.lab.lab import Lab, end_lab, find_labs, require_machine
from thinwire.tools.lab.run import Line
from thinwire.tools.lab.spec import LabError, LabRunFailed, LabSpec

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Several machines on slow Ethernet, in a box: network namespaces of this one, with links of limited rate.\n\n"
    "Needs Linux, root and iproute2; `thinwire lab check` says what is missing. A lab changes nothing in this "
    "machine's own network, and leaves nothing behind, however it ends.\n\n"
    "Start with `thinwire lab check`, then `thinwire lab run --hosts 2 --rate 100mbit -- python train.py`, where "
    "train.py calls `torch.distributed.init_process_group('gloo')`.",
)

Hosts = Annotated[int, typer.Option(help="How many hosts, each with a link of its own to one switch.")]
Rate = Annotated[str, typer.Option(help="Rate of each link in each direction, such as 100mbit, 1gbit, 2.7gbit.")]
Delay = Annotated[
    str | None,
    typer.Option(
        help="Delay one way from host to host: 0.1ms, 100us, 0. Default: 0.1ms, and 0 above 1gbit.", show_default=False
    ),
]
Loss = Annotated[float, typer.Option(help="Probability of losing a frame, 0 to 0.5. Needs a kernel with netem.")]
RanksPerHost = Annotated[int, typer.Option(help="Ranks on each host. They share its link, as the GPUs of a box do.")]


@app.command()
def check(
    rate: Rate = "1gbit",
    seconds: Annotated[float, typer.Option(min=0.1, max=10.0, help="Seconds to send in each measurement.")] = 2.0,
) -> None:
    """Say what this machine can do, and measure which rate a lab of two hosts reaches.

    Exit code 0 if a lab can be made. On a busy machine the reached rate says more about the machine than about the
    lab: repeat it when the machine is quiet.

    Example: `sudo thinwire lab check --rate 100mbit`
    """
    spec = spec_of(2, rate, None, 0.0, 1)
    with _plain_errors():
        able = check_machine(spec, seconds, typer.echo)
    raise typer.Exit(0 if able else 1)


@app.command()
def up(
    hosts: Hosts = 2,
    rate: Rate = "1gbit",
    delay: Delay = None,
    loss: Loss = 0.0,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running; `thinwire lab down` ends it.")] = False,
) -> None:
    """Keep a lab up until Ctrl-C, and print how to enter its hosts.

    Example: `sudo thinwire lab up --hosts 3 --rate 100mbit` in one terminal. In others run the commands that it prints,
    such as `sudo nsenter -t 4711 -m -n -p bash`.
    """
    spec = spec_of(hosts, rate, delay, loss, 1)
    with _plain_errors(), Lab(spec) as lab:
        typer.echo(f"Lab {lab.id}: {_described(lab)}. To enter a host:")
        for host, (address, pid) in enumerate(zip(lab.addresses, lab.host_pids(), strict=True)):
            typer.echo(f"  host {host}  {address:12}  nsenter -t {pid} -m -n -p bash")
        if detach:
            lab.detach()
            typer.echo("It stays up. `thinwire lab down` ends it.")
            return
        with contextlib.suppress(KeyboardInterrupt):
            typer.echo("Ctrl-C ends it, and every process in it.")
            lab.wait()
            raise LabError("the lab was ended by someone else")
    typer.echo("The lab is down.")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What every rank runs, after `--`.")],
    hosts: Hosts = 2,
    rate: Rate = "1gbit",
    delay: Delay = None,
    loss: Loss = 0.0,
    ranks_per_host: RanksPerHost = 1,
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which all ranks are ended (exit code 124).")
    ] = 3600.0,
    threads: Annotated[int, typer.Option(min=1, help="OMP_NUM_THREADS of each rank.")] = 1,
) -> None:
    """Run a command on every host, print each rank's lines, then what each link carried.

    Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT,
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME set, as torch.distributed wants them. When one rank fails, the lab ends
    the others after 5 seconds; the exit code is that of the first to fail.

    Example: `sudo thinwire lab run --hosts 4 --rate 100mbit -- .venv/bin/python train.py --steps 100`

    Two boxes of four ranks: `sudo thinwire lab run --hosts 2 --ranks-per-host 4 --rate 1gbit -- python train.py`
    """
    spec = spec_of(hosts, rate, delay, loss, ranks_per_host)
    with _plain_errors(), Lab(spec) as lab:
        typer.echo(f"Lab {lab.id}: {_described(lab)}.", err=True)
        result = lab.run(command, time_limit_s=time_limit, on_line=_print_line, omp_num_threads=threads)
    _print_counters(result.counters, result.wall_s)
    if result.timed_out:
        complain(f"not done after {time_limit:g} s, ended")
    elif result.first_failed is not None:
        code = result.returncodes[result.first_failed]
        complain(f"rank {result.first_failed} failed: {_ending(code)}")
    raise typer.Exit(result.worst)


@app.command()
def down() -> None:
    """End labs that were left up (`thinwire lab up --detach`). Labs whose owner still runs are left alone.

    Example: `sudo thinwire lab down`
    """
    with _plain_errors():
        labs = find_labs()
        for lab in labs:
            if lab.owner_lives:
                typer.echo(f"Lab {lab.id} is left alone: it belongs to process {lab.owner_pid}, which runs.")
            else:
                end_lab(lab)
                typer.echo(f"Lab {lab.id} is down.")
        if not labs:
            typer.echo("There is no lab on this machine.")


def spec_of(hosts: int, rate: str, delay: str | None, loss: float, ranks_per_host: int) -> LabSpec:
    """The lab that these options name. Raises: typer.BadParameter."""
    try:
        given: dict[str, Any] = {} if delay is None else {"delay_ms": time_ms(delay)}
        return LabSpec(hosts=hosts, rate_mbit=rate_mbit(rate), loss=loss, ranks_per_host=ranks_per_host, **given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _described(lab: Lab) -> str:
    spec = lab.spec
    ranks = "" if spec.ranks_per_host == 1 else f" of {spec.ranks_per_host} ranks"
    delay = "no delay added" if not spec.delay_ms else f"{spec.delay_ms:g} ms one way by {lab.delay_made_by}"
    loss = f", loss {spec.loss:g}" if spec.loss else ""
    return f"{spec.hosts} hosts{ranks}, {spec.rate_mbit:g} Mbit/s each, {delay}{loss}"


def _print_line(line: Line) -> None:
    typer.echo(f"[{line.rank}] {line.text}", err=line.stream == "stderr")


def _print_counters(counters: Sequence[HostCounters], wall_s: float) -> None:
    rows = [["host", "sent frames", "bytes", "drops", "received frames", "bytes", "drops"]]
    for one in counters:
        sent = (one.sent_frames, one.sent_bytes, one.sent_drops)
        received = (one.received_frames, one.received_bytes, one.received_drops)
        rows.append([str(one.host), *(f"{value:,}" for value in (*sent, *received))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    typer.echo(f"On the wire in {wall_s:.1f} s, Ethernet frames without preamble, checksum and gap:")
    for row in rows:
        typer.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Expected errors as one message and exit code 1. SIGTERM leaves the block in order, as Ctrl-C does."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except LabError as error:
        complain(str(error))
        raise typer.Exit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)


BUSY_LOAD = 0.5
MOST_OF_RATE = 1448 / 1514
"""Of a full frame's 1538 byte times on a wire, a lab counts 1514; 1448 of them are TCP's payload."""


def check_machine(spec: LabSpec, seconds: float, say: Callable[[str], object]) -> bool:
    """Say line by line what is there and what two hosts of this spec reach; False where a lab cannot be made.

    seconds: time to send, for each speed. Raises: LabRunFailed where the measurement itself fails.
    """
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    say(f"machine       Linux {platform.release()}, {cores} cores, load {load:.1f}")
    try:
        require_machine()
        say(f"root, tools   yes: {', '.join(network.tool(name) for name in ('ip', 'tc', 'bridge'))}")
    except LabError as error:
        say(f"root, tools   no: {error}")
        return False
    with contextlib.ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(spec))
        except LabError as error:
            say(f"a lab         no: {error}")
            return False
        say("a lab         yes: namespaces, veth, bridge, token bucket (sch_tbf)")
        if network.has_netem(lab.holder):
            say("loss, delay   yes, exact: netem (sch_netem)")
        else:
            say("loss          no: this kernel has no netem. " + network.kernel_module_hint("sch_netem"))
            say("delay         by the receiver's NAPI timer: round trip of twice the delay + 0.07 ms, with jitter")
        found = measure(lab, seconds)
        both = (found.both_there_mbit, found.both_back_mbit)
        for direction, measured in (("one way", (found.there_mbit,)), ("both ways", both)):
            rates = [rate or 0.0 for rate in measured]
            say(
                f"{direction:13} asked {spec.rate_mbit:g} Mbit/s, reached {', '.join(f'{rate:.1f}' for rate in rates)} "
                f"= {min(rates) / spec.rate_mbit:.3f} of it (most possible: {MOST_OF_RATE:.3f})"
            )
        say(f"round trip    {found.round_trip_ms:.3f} ms")
    if load > BUSY_LOAD * cores:
        say(f"The machine was busy (load {load:.1f} on {cores} cores): these rates may be its own, not the links'.")
    return True


def measure(lab: Lab, seconds: float) -> Visit:
    """What the doctor of host 0 measures of host 1, in a lab of two ranks. Raises: LabError, LabRunFailed."""
    with tempfile.NamedTemporaryFile("w") as token:
        token.write(secrets.token_hex(16))
        token.flush()
        doctor = [sys.executable, "-m", "thinwire.cli.main", "doctor", "--token-file", token.name]
        heard, said = os.pipe()
        with os.fdopen(heard) as listening:
            try:
                lab.start(1, [*doctor, "--listen"], stderr=said)  # it ends with the lab
            finally:
                os.close(said)
            listening.readline()
            asked = [*doctor, "--peers", lab.addresses[1], "--seconds", f"{seconds:g}", "--json"]
            result = lab.run([asked, ["true"]])
    try:
        # Its exit code is about the machine's disks and versions too.
        visit = Examination.model_validate_json(result.stdout[0]).calls[0].visit
    except (ValueError, IndexError) as error:
        raise LabRunFailed(f"the doctor of host 0 said: {result.stderr[0] or result.stdout[0]}") from error
    if visit.round_trip_ms is None:
        raise LabRunFailed(f"host 0 did not reach host 1: {visit.why}")
    return visit
