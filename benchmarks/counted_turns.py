"""Turns of two ways in a lab, of which each has its seconds by the ranks and its bytes by the counters of the network.

Ranks print a request before and after a turn, while nobody sends anything; whoever runs the lab reads the counters then
and answers with a file.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import typer

from thinwire.tools.lab import Lab, Line

MARK = "@turn "


class Reader:
    """What the lab's on_line is given. turns: those that count, each with sent_bytes, of each host.

    answers: a folder that the ranks see too.
    """

    def __init__(self, lab: Lab, answers: Path) -> None:
        self._lab, self._answers = lab, answers
        self._sent: dict[str, list[int]] = {}
        self.turns: list[dict[str, Any]] = []

    def __call__(self, line: Line) -> None:
        """A line of a rank: answered, kept, or passed on to stderr."""
        if not line.text.startswith(MARK):
            typer.echo(f"{line.rank}: {line.text}", err=True)
            return
        told = json.loads(line.text.removeprefix(MARK))
        if "count" in told:
            self._sent[told["count"]] = [host.sent_bytes for host in self._lab.counters()]
            (self._answers / told["count"]).touch()
            return
        number = told["turn"]
        before, after = self._sent[f"before-{number}"], self._sent[f"after-{number}"]
        told["sent_bytes"] = [late - early for early, late in zip(before, after, strict=True)]
        if not told.pop("settles"):
            self.turns.append(told)


def count(answers: str, name: str) -> None:
    """Have the counters read, under a name. Collective: of torch.distributed's default group."""
    dist.barrier()
    if dist.get_rank() == 0:
        print(MARK + json.dumps({"count": name}), flush=True)
        while not (Path(answers) / name).exists():
            time.sleep(0.005)
    dist.barrier()


def tell(turn: dict[str, Any]) -> None:
    """By rank 0: a turn, with its number and whether it settles things and does not count."""
    if dist.get_rank() == 0:
        print(MARK + json.dumps(turn), flush=True)
