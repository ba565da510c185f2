"""What `thinwire bench collectives` does: as one of the ranks that were started, or with hosts of a lab of its own."""

from __future__ import annotations

import os
import sys
from typing import Any

from thinwire.contract.collectives import AT_HAND, CollectivesError, World, default_file, keep, room_for, world_of
from thinwire.tools.collectives.asked import Asked, BenchFailed, Outcome, Say, link_of
from thinwire.tools.collectives.rank import measured, orders_of
from thinwire.tools.lab import Lab, LabError, Line
from thinwire.tools.lab.spec import LabSpec
from thinwire.tools.marked_lines import told_in

START_S = 120.0
"""For the ranks of a lab to have imported torch and met, on top of what they may measure."""
ALONE = """one rank exchanges with nobody. Start this on each machine as torchrun starts a script:
    torchrun --nnodes 2 --rdzv-endpoint HEAD:29500 --no-python thinwire bench collectives
or let it make hosts of its own on this machine, as root:
    sudo thinwire bench collectives --hosts 2 --rate 1gbit --out collectives-1gbit.json"""


def run(asked: Asked, say: Say) -> Outcome | None:
    """Measure and keep. None on all ranks but 0. Raises: BenchFailed; what was kept before stays then."""
    as_rank = int(os.environ.get("WORLD_SIZE") or 1) > 1
    if asked.lab is None and not as_rank:
        raise BenchFailed(ALONE)
    if asked.lab is not None and as_rank:
        raise BenchFailed(
            "--hosts and --rate make a lab, and this is a rank of a network at hand (WORLD_SIZE is set): leave out one"
        )
    link = AT_HAND if asked.lab is None else link_of(asked.lab)
    file = asked.out or (default_file() if asked.lab is None else None)
    first = asked.lab is not None or os.environ.get("RANK", "0") == "0"
    try:
        if file is not None and first:
            room_for(file, link)  # told now, and not after a minute
        found = measured(asked, say) if asked.lab is None else _in_lab(asked, asked.lab, say)
        if found is None:
            return None
        if file is not None:
            keep(file, link, found)
    except CollectivesError as error:
        raise BenchFailed(str(error)) from error
    except OSError as error:
        raise BenchFailed(f"{file}: {error.strerror or error}") from error
    return Outcome(found, link, file)


def _in_lab(asked: Asked, spec: LabSpec, say: Say) -> World:
    if spec.world_size < 2:
        raise BenchFailed(f"--hosts {spec.hosts}: {ALONE}")
    told: dict[str, Any] = {}

    def on_line(line: Line) -> None:
        _, found = told_in(line.text)
        if found is None:
            return
        if "doing" in found:
            say(found["doing"], found["done"])
        for key in ("world", "failed"):
            if key in found:
                told.setdefault(key, found[key])

    argv = [sys.executable, "-m", "thinwire.tools.collectives.rank", orders_of(asked)]
    try:
        with Lab(spec) as lab:
            say(f"{spec.world_size} ranks start", 0.0)
            result = lab.run(argv, time_limit_s=START_S + 4 * asked.seconds, on_line=on_line)
            if not result.ok and "failed" not in told:
                result.check()
    except LabError as error:
        raise BenchFailed(str(error)) from error
    if "failed" in told:
        raise BenchFailed(told["failed"])
    say("done", 1.0)
    return world_of(told["world"])
