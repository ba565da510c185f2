"""Run one case: cut it into sittings that fit in memory, start the ranks, listen, and put what they say together.

A process that dies takes its sitting along, not the case: the method whose turn it was is noted as failed, and the
sitting begins again without it.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.marked_lines import told_in
from benchmarks.provenance import provenance
from benchmarks.wire import child, machine
from benchmarks.wire.cases import ROOT, Case
from benchmarks.wire.loads import num_parameters
from benchmarks.wire.methods import BASELINE, COMPUTE, COMPUTE_METHOD, HANDED_VECTORS, METHODS, Method, known
from benchmarks.wire.net import Net, open_net
from benchmarks.wire.phases import PHASES
from benchmarks.wire.results import Measured, Result, Sitting, Turn, settings_of

MEMORY_SHARE = 0.7
"""Of what the machine has free, so much at most for the ranks' vectors."""
RANK_BYTES = 500e6
"""A process with torch and numba, before any vector."""
LAST_WORDS = 30
"""Lines of other output that are kept of each rank, for the reason of a failure."""

Tell = Callable[[str], None]


class CaseFailed(Exception):
    """A case has no result: its baseline failed, or the ranks did not come up. The message holds their last words."""


@dataclass
class Heard:
    """What the ranks of one sitting have said so far."""

    turns: dict[str, dict[int, dict[int, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    failed: dict[str, str] = field(default_factory=dict)
    families: dict[str, dict[str, Any]] = field(default_factory=dict)
    frames: dict[tuple[str, int], dict[str, list[int]]] = field(default_factory=lambda: defaultdict(dict))
    now: str | None = None
    ended: bool = False
    other: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def last_words(self) -> str:
        """What else was printed, by rank."""
        return "\n".join(f"rank {rank}: {line}" for rank, lines in sorted(self.other.items()) for line in lines)


class Listener:
    """Takes the lines of all ranks, answers requests to read the counters, tells of rounds."""

    def __init__(self, net: Net, answers: Path | None, tell: Tell) -> None:
        self.heard = Heard()
        self._net = net
        self._answers = answers
        self._tell = tell
        self._lock = threading.Lock()

    def __call__(self, rank: int, line: str) -> None:
        """One line of one rank."""
        before, said = told_in(line)
        if before or said is None:
            with self._lock:
                words = self.heard.other[rank]
                words.append(before)
                del words[:-LAST_WORDS]
        if said is None:
            return
        if said["kind"] == "count":
            self._count(said)
            return
        with self._lock:
            self._take(said)

    def _take(self, said: dict[str, Any]) -> None:
        heard, kind = self.heard, said["kind"]
        if kind == "begin" and said["rank"] == 0:
            heard.now = said["method"]
            self._tell(f"{known(said['method']).title}, {said['what']}")
        elif kind == "turn":
            heard.turns[said["method"]][said["round"]][said["rank"]] = said
        elif kind == "failed":
            # Every rank says so, with its own error or none: which one was the cause a reader must judge.
            why = [
                heard.failed.get(said["method"], ""),
                f"rank {said['rank']}: {said['error']}" if said["error"] else "",
            ]
            heard.failed[said["method"]] = "; ".join(filter(None, why))
        elif kind == "family":
            heard.families[said["family"]] = said
        elif kind == "end":
            heard.ended = heard.ended or said["rank"] == 0

    def _count(self, said: dict[str, Any]) -> None:
        counters = self._net.counters()
        if counters is not None:
            self.heard.frames[said["method"], said["round"]][said["when"]] = counters
        assert self._answers is not None
        (self._answers / str(said["id"])).touch()


def measure(case: Case, command: str, tell: Tell = lambda _: None) -> Result:
    """Run the case. Raises: CaseFailed, NetError, ProvenanceError; KeyboardInterrupt ends all it started."""
    for plugin in case.plugins:
        import_module(plugin)
    made_by = provenance()
    started_at, began = datetime.now(UTC), time.monotonic()
    load_average = list(os.getloadavg())
    tell("copying")
    copy_bytes_s = machine.copy_rate()
    stolen_s, all_s = machine.stolen_and_all_s()
    with open_net(case.network) as net:
        sittings = [_sit(case, net, methods, tell) for methods in sittings_of(case, machine.available_bytes())]
        described = net.described()
    stolen_s, all_s = (now - before for now, before in zip(machine.stolen_and_all_s(), (stolen_s, all_s), strict=True))
    return Result(
        load=case.load.name,
        hosts=case.network.hosts,
        rate_mbit=case.network.rate_mbit,
        settings=settings_of(case),
        parameters=num_parameters(case.load),
        sittings=sittings,
        net=described,
        copy_bytes_s=copy_bytes_s,
        load_average=load_average,
        stolen_share=stolen_s / all_s,
        command=command,
        commit=made_by.commit,
        versions=made_by.versions | machine.versions(),
        hardware=made_by.hardware | {"memory_gb": f"{machine.total_bytes() / 1e9:.1f}"},
        started_at=started_at.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - began,
    )


def sittings_of(case: Case, available_bytes: float) -> list[list[Method]]:
    """The methods of a case, cut where memory ends; the baseline is first in each. Families stay together."""
    vector_bytes = 4.0 * num_parameters(case.load)
    handed = 0.0 if case.load.computes else HANDED_VECTORS
    room = (MEMORY_SHARE * available_bytes / case.network.hosts - RANK_BYTES) / vector_bytes
    room -= handed + COMPUTE_METHOD.vectors + METHODS[BASELINE].vectors
    families: dict[str, list[Method]] = defaultdict(list)
    for name in case.methods:
        if name != BASELINE:
            families[known(name).family].append(known(name))
    sittings: list[list[Method]] = [[]]
    left = room
    for members in families.values():
        needs = max(method.vectors for method in members)
        if sittings[-1] and needs > left:
            sittings.append([])
            left = room
        sittings[-1] += members
        left -= needs
    return [[METHODS[BASELINE], *methods] for methods in sittings]


def _sit(case: Case, net: Net, methods: Sequence[Method], tell: Tell) -> Sitting:
    """One sitting, again without the method that ended it."""
    lost: dict[str, str] = {}
    while True:
        left = [method for method in methods if method.name not in lost]
        heard, ending = _run(case, net, left, tell)
        if heard.ended:
            break
        culprit = heard.now
        why = f"{ending} in its turn. {heard.last_words()[-1500:]}"
        if culprit in (None, BASELINE, COMPUTE):
            raise CaseFailed(f"{case.name}: {culprit or 'start'}: {why}")
        lost |= heard.failed
        lost[culprit] = heard.failed.get(culprit, why)
    if BASELINE in heard.failed:
        raise CaseFailed(f"{case.name}: {METHODS[BASELINE].title} failed: {heard.failed[BASELINE]}")
    return Sitting(measured=_put_together(heard, case.network.hosts), failed=lost | heard.failed)


def _run(case: Case, net: Net, methods: Sequence[Method], tell: Tell) -> tuple[Heard, str]:
    """Start the ranks and listen to their end. Returns what was heard, and how they ended."""
    num_bytes, rate = 4.0 * num_parameters(case.load), 1e6 * (case.network.rate_mbit or 100_000) / 8
    full_s = 2 * num_bytes / rate  # a ring all-reduce among many
    with tempfile.TemporaryDirectory(prefix="thinwire-wire-") as folder:
        answers = Path(folder) if net.counters() is not None else None
        listener = Listener(net, answers, tell)
        orders = child.Orders(
            load=case.load.name,
            methods=[COMPUTE, *(method.name for method in methods)],
            budget_s=case.budget_s,
            fewest_rounds=case.fewest_rounds,
            most_rounds=case.most_rounds,
            turn_s=case.turn_s,
            timeout_s=case.patience_s + 5 * full_s,
            answers=None if answers is None else str(answers),
            plugins=case.plugins,
        )
        argv = [sys.executable, "-m", "benchmarks.wire.child", child.argument(orders)]
        # Start and set-up; then so many rounds at half the speed expected. A round sends five full gradients at most.
        limit_s = 240 + case.budget_s + 1.5 * (case.fewest_rounds + 5) * (5 * full_s + 2 * len(methods))
        codes = net.run(argv, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, limit_s, listener)
    ending = f"the ranks ended with {', '.join(_code(code) for code in codes)}"
    if any(code is None for code in codes):
        ending += f" (time limit {limit_s:.0f} s)"
    return listener.heard, ending


def _code(code: int | None) -> str:
    return "no end" if code is None else f"exit code {code}"


def _put_together(heard: Heard, hosts: int) -> dict[str, Measured]:
    """One Measured for each method whose turns every rank has told."""
    found = {}
    for name, rounds in heard.turns.items():
        turns = []
        for number, ranks in sorted(rounds.items()):
            if len(ranks) < hosts:
                continue
            told = [ranks[rank] for rank in range(hosts)]
            totals = [sum(one["seconds"]) for one in told]
            frames = heard.frames.get((name, number), {})
            turns.append(
                Turn(
                    round=number,
                    steps=len(told[0]["seconds"]),
                    rank_s=totals,
                    step_s=told[totals.index(max(totals))]["seconds"],
                    phases={phase: sum(one["phases"][phase] for one in told) / hosts for phase in PHASES},
                    sent_bytes=[one["sent_bytes"] for one in told],
                    frame_bytes=[
                        after - before for before, after in zip(frames["before"], frames["after"], strict=True)
                    ]
                    if len(frames) == 2
                    else None,
                )
            )
        family = heard.families.get(known(name).family, {})
        if turns:
            found[name] = Measured(
                overlap=family.get("overlap"),
                bucket_elements=family.get("bucket_elements"),
                turns=turns,
                replicas_equal=family.get("equal"),
                finite=family.get("finite"),
            )
    return found


def command_line() -> str:
    """The command of this process, as a result tells it: without the folders of this machine."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
