"""`thinwire bench`: the benchmarks, a command each; all but `gpu` and `collectives` are in a checkout alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli.commands import work
from thinwire.cli.screen import complain

ROOT = Path(__file__).resolve().parents[2]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure the kernels, collectives, the exchange and whole training steps.\n\n"
    "All but `gpu` and `collectives` need a checkout of the repository.",
)

Quick = Annotated[bool, typer.Option("--quick", help="Fewer cases and rounds.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run all cases again, and replace their files.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the results. [default: in the checkout]")]
TableOnly = Annotated[bool, typer.Option("--table-only", help="Run nothing; make tables and pictures from the files.")]
OnLoopback = Annotated[
    bool,
    typer.Option("--loopback", help="Run a tiny case on loopback, without root, to see that it runs."),
]
Only = Annotated[
    str | None, typer.Option("--only", help="Run only cases with this in their name, such as gpt-25m/2x100Mbit.")
]
Methods = Annotated[
    str | None, typer.Option(help="Run only these methods, separated by commas; `--methods help` lists them.")
]


@app.command()
def kernels(quick: Quick = False, out: Out = None) -> None:
    """Time the fused kernels, on one core and on all, against the rate at which they copy memory.

    Example: `thinwire bench kernels --quick`
    """
    _benchmark("kernels.__main__").main(quick, out)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def gpu(context: typer.Context) -> None:
    """Time whole steps over NCCL on one GPU, its ranks as hosts on links of a given rate; `gpu --help` says the rest.

    Example: `sudo thinwire bench gpu --minutes 5 --rates 10000,1000`
    """
    raise typer.Exit(work("gpu")(context.args))


@app.command()
def collectives(
    hosts: Annotated[
        int | None, typer.Option(help="Make a lab of so many hosts on this machine, as root. Needs --rate.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Of each link of the lab, such as 100mbit, 1gbit. Needs --hosts.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(help="Of the lab, one way: 0.1ms, 0. Default: 0.1ms, and 0 above 1gbit.")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Of the lab; they share a link.")] = 1,
    sizes: Annotated[
        str | None, typer.Option(help="Of vectors, by commas, ascending: 4k,64k,1m. [default: 1k, 4k, 16k ... 16m]")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, max=1000, help="Calls of each algorithm that are timed.")] = 5,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Leave out sizes that would take it past this.")
    ] = 60.0,
    piece: Annotated[str, typer.Option(help="What the chain passes on at a time.")] = "256k",
    algorithms: Annotated[
        str | None, typer.Option(help="Some of ring, rows, tree, broadcast, chain, by commas. [default: all]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu (gloo) or gpu (NCCL).")] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to keep it in; more worlds of the same network may go into one. [default: where jobs and "
            "`thinwire plan` look for it; for a lab none]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
) -> None:
    """Time collectives by algorithm and size, and fit T = alpha + beta n to each, for `thinwire plan` and for jobs.

    Three give all ranks the mean of their vectors: a **ring** (how dense gradients travel), all-to-all and all-gather
    of **rows** (how compressed ones do) and a binomial **tree**. Two give all ranks the vector of one: a binomial
    **broadcast** and a pipelined **chain** (how a rank that joins gets its state). They take turns at each size.

    **alpha** is what a call takes however small it is, **beta** what each byte of the vector adds. The line is fitted
    to every other size and the largest; *missed by* is the worst of the others, predicted over measured, less 1.

    **Where.** Start it on each machine as torchrun starts a script, and it measures the network between them; what it
    keeps is then found by jobs with the same ranks on these boxes, until they boot again, and by `thinwire plan`. Or
    let it make a lab (`--hosts`, `--rate`), and give its file to `thinwire plan --collectives`.

    Run it while nothing else does.

    Examples: `torchrun --nnodes 2 --rdzv-endpoint HEAD:29500 --no-python thinwire bench collectives` on each of two
    machines, `torchrun --nproc-per-node 2 --no-python thinwire bench collectives --out /tmp/loopback.json`,
    `sudo thinwire bench collectives --hosts 4 --rate 100mbit --out lab.json`
    """
    from thinwire.cli import bench_collectives

    bench_collectives.run(
        lab=bench_collectives.lab_of(hosts, rate, delay, ranks_per_host),
        sizes=sizes,
        turns=turns,
        seconds=seconds,
        piece=piece,
        algorithms=algorithms,
        device=device,
        out=out,
        as_json=as_json,
    )


def _over_links(name: str, loads: list[str] | None, tiny: str, words: str) -> None:
    """Make a command of it. loads: that it times, None: all of the full set; tiny: the one of --loopback."""

    @app.command(name, help=words)
    def run(
        quick: Quick = False,
        fresh: Fresh = False,
        out: Out = None,
        table_only: TableOnly = False,
        loopback: OnLoopback = False,
        methods: Methods = None,
        only: Only = None,
    ) -> None:
        """Choose the cases, run what is missing, leave with the exit code."""
        bench, cases, known = _benchmark("wire.bench"), _benchmark("wire.cases"), _benchmark("wire.methods")
        if methods == "help":
            for method in known.METHODS.values():
                typer.echo(f"{method.name:18} {method.title}{' (only where named)' if method.by_name else ''}")
            return
        names = list(known.STANDARD) if methods is None else [name.strip() for name in methods.split(",")]
        unknown = [name for name in names if name not in known.METHODS]
        if unknown:
            complain(f"--methods: no method {', '.join(unknown)}; see --methods help")
            raise typer.Exit(2)
        names = list(dict.fromkeys([known.BASELINE, *names]))  # every ratio is to it
        chosen = loads or list(cases.FULL_LOADS)
        if loopback:
            todo, folder = cases.loopback_set(names, tiny), bench.TRY_RESULTS
        elif quick:
            todo, folder = cases.quick_set(names, chosen), bench.QUICK_RESULTS
        else:
            todo, folder = cases.full_set(names, chosen), bench.RESULTS
        if only is not None and not any(only in case.name for case in todo):
            complain(f"--only {only}: no such case; there are {', '.join(c.name for c in todo)}")
            raise typer.Exit(2)
        code = bench.run(todo, out or folder, fresh=fresh, run_missing=not table_only, only=only)
        raise typer.Exit(code)


_over_links(
    "exchange",
    ["exchange-25m"],
    "tiny-exchange",
    "Time the exchange alone, over emulated links, without the time that a model takes.\n\n"
    "Each finished case is one file; the same command goes on from the files that are there. The links need root.\n\n"
    "Example: `thinwire bench exchange --quick`",
)
_over_links(
    "lab",
    None,
    "tiny",
    "Time whole training steps and the exchange alone, over emulated links, all methods side by side.\n\n"
    "The full set takes about 45 minutes on two cores, --quick under 10. Each finished case is one file; the same "
    "command goes on from the files that are there. The links need root. Nothing else should run on the machine "
    "meanwhile.\n\nExample: `thinwire bench lab --quick`",
)


def _benchmark(name: str) -> Any:
    """A module of the checkout's `benchmarks`. Leaves with exit code 1 and what to do where there is no checkout."""
    if not (ROOT / "benchmarks").is_dir():
        complain(
            f"the benchmarks are not in the installed package ({ROOT} has no folder benchmarks). Clone the repository, "
            "and in it: make test, then .venv/bin/thinwire bench lab --quick"
        )
        raise typer.Exit(1)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # `benchmarks` lies beside the package, not in it
    return importlib.import_module(f"benchmarks.{name}")
