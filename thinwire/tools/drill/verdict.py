"""What the traces of a run prove or refute, given what was done to it. Pure.

A *holder* of a step is a process that has committed it and lives. What is looked for:

    committed by two   a generation commits a step after a later generation has committed one
    redone             a step that is run again though a holder of it goes on, or was never touched
    samples wrong      the samples of a step's last generation are not those of the same step of the undisturbed run
    replicas differ    two ranks of a generation hold different parameters after the same step
    holders lost       a process ended otherwise than well, or as it was asked to, and no fault explains it

Between two exchanges of local steps, or two syncs of 0/1 Adam, each rank steps alone, and a step stands for those that
have made it: a rank that a fault has reached costs its part of the samples until the others know. Such steps are not
wrong; the ranks that are missing in them are counted (not made).

A fault explains what becomes of a process that it has touched, until that process has committed a step again after all
that the fault can do is over: from then on it is as good as any other.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.tools.drill.asked import Verdict
from thinwire.workers.data.order import share

ASKED_TO = ("well", "Dismissed", "RunEnded", "RunSuperseded")


@dataclass(slots=True)
class Process:
    """What one process has written down. commits: its lines, in order. ended: why, None where it has not said."""

    pid: int
    commits: list[dict[str, Any]] = field(default_factory=list)
    fed: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class Touch:
    """A fault has reached this process. Of the monotonic clock: time, and until when its end may come of that."""

    pid: int
    time: float
    until: float = math.inf


def read(folder: Path) -> list[Process]:
    """The traces of a run. A last line that was being written when its process died is left out."""
    found = []
    for file in sorted(folder.glob("*.jsonl")):
        process = Process(int(file.stem))
        for text in file.read_text().split("\n")[:-1]:
            line = json.loads(text)
            match line["kind"]:
                case "committed":
                    process.commits.append(line)
                case "fed":
                    process.fed.append(line)
                case "ended":
                    process.ended = line["why"]
        found.append(process)
    return found


def judge(
    processes: Sequence[Process], undisturbed: Sequence[Process], touches: Collection[Touch], living: Collection[int]
) -> Verdict:
    """The verdict. living: the pids that were alive when the run was stopped."""
    by_two = list(_commits_by_two(processes))
    differ = list(_replicas_that_differ(processes))
    not_made = _not_made(processes, touches)
    wrong = list(_wrong_samples(processes, undisturbed, not_made))
    lost = list(_lost_holders(processes, touches, living))
    redone = list(_redone(processes, touches))
    steps = {one["step"] for process in processes for one in process.commits}
    return Verdict(
        committed=max(steps, default=0),
        compared=len(steps & {one["step"] for process in undisturbed for one in process.commits}),
        redone=sum(count for count, _ in redone),
        commits_by_two=len(by_two),
        samples_wrong=len(wrong),
        replicas_differ=len(differ),
        holders_lost=len(lost),
        not_made=sum(not_made.values()),
        violations=(*by_two, *differ, *wrong, *lost, *(words for _, words in redone)),
    )


def _by_generation(processes: Sequence[Process]) -> dict[int, list[tuple[int, dict[str, Any]]]]:
    """(pid, line) of each commit, by generation, in order of time."""
    found: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for process in processes:
        for one in process.commits:
            found[one["generation"]].append((process.pid, one))
    return {number: sorted(found[number], key=lambda line: line[1]["time"]) for number in sorted(found)}


def _commits_by_two(processes: Sequence[Process]) -> Iterator[str]:
    generations = _by_generation(processes)
    begun = {number: lines[0][1]["time"] for number, lines in generations.items()}
    for number, lines in generations.items():
        later = {other: time for other, time in begun.items() if other > number}
        for pid, one in lines:
            after = [other for other, time in later.items() if time < one["time"]]
            if after:
                yield (
                    f"committed by two: process {pid} committed step {one['step']} in generation {number} "
                    f"{one['time'] - begun[after[0]]:.3f} s after generation {after[0]} had begun to commit"
                )


def _replicas_that_differ(processes: Sequence[Process]) -> Iterator[str]:
    seen: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for process in processes:
        for one in process.commits:
            if one["digest"] is not None:
                seen[one["generation"], one["step"]][one["rank"]] = one["digest"]
    for (generation, step), digests in sorted(seen.items()):
        if len(set(digests.values())) > 1:
            yield f"replicas differ: generation {generation}, step {step}: {digests}"


def _not_made(processes: Sequence[Process], touches: Collection[Touch]) -> dict[int, int]:
    """Local steps that ranks of their generation have not made, because a fault has reached them: how many have not."""
    last = _last_generations(processes)
    seated: dict[int, set[int]] = defaultdict(set)
    made: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for process in processes:
        for line in (*process.fed, *process.commits):
            seated[line["generation"]].add(process.pid)
        made_here = [one for one in process.commits if one["generation"] == last[one["step"]]]
        for one in made_here:
            made[one["step"]][process.pid] = one
    found = {}
    for step, lines in made.items():
        missing = seated[last[step]] - lines.keys()
        if not missing or any(one["digest"] is not None for one in lines.values()):
            continue
        if missing <= _touched(processes, touches, max(one["time"] for one in lines.values())):
            found[step] = len(missing)
    return found


def _wrong_samples(
    processes: Sequence[Process], undisturbed: Sequence[Process], not_made: Collection[int]
) -> Iterator[str]:
    """A step counts in the last generation that committed it: what was fed before was undone.

    not_made: steps that some ranks have not made. The others have the samples that they would have had.
    """
    last = _last_generations(processes)
    expected = _rows(undisturbed, _last_generations(undisturbed))  # nothing is done to it, but machines may be short
    for step, rows in sorted(_rows(processes, last).items()):
        if step in expected and rows != expected[step]:
            if step in not_made and _are_shares(processes, step, last[step], expected[step]):
                continue
            yield (
                f"samples wrong: step {step} of generation {last[step]} was fed {len(rows)} samples, "
                f"of which {len(set(rows) & set(expected[step]))} are of that step's {len(expected[step])}"
            )


def _are_shares(processes: Sequence[Process], step: int, generation: int, expected: Sequence[int]) -> bool:
    """Has each rank that has committed this step been fed its own share of the samples?"""
    for process in processes:
        made = [one for one in process.commits if (one["step"], one["generation"]) == (step, generation)]
        fed = [one for one in process.fed if (one["step"], one["generation"]) == (step, generation)]
        for one in made:
            mine = share(len(expected), one["rank"], one["size"])
            if not fed or fed[-1]["rows"] != list(expected[mine.start : mine.stop]):
                return False
    return True


def _last_generations(processes: Sequence[Process]) -> dict[int, int]:
    """The last generation that committed each step."""
    last: dict[int, int] = {}
    for process in processes:
        for one in process.commits:
            last[one["step"]] = max(last.get(one["step"], 0), one["generation"])
    return last


def _rows(processes: Sequence[Process], generations: Mapping[int, int]) -> dict[int, list[int]]:
    """The rows of each step in the order of its ranks, in the generation that counts."""
    parts: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for process in processes:
        for one in process.fed:
            if generations.get(one["step"]) == one["generation"]:
                parts[one["step"]][one["rank"]] = one["rows"]
    return {step: [row for rank in sorted(ranks) for row in ranks[rank]] for step, ranks in parts.items()}


def _redone(processes: Sequence[Process], touches: Collection[Touch]) -> Iterator[tuple[int, str]]:
    """Between two generations that follow each other. A process that goes on, or that nothing has touched, holds."""
    generations = _by_generation(processes)
    numbers = list(generations)
    for at, number in enumerate(numbers[1:], start=1):
        lines = generations[number]
        began, first = lines[0][1]["time"], min(one["step"] for _, one in lines)
        seated = {pid for pid, _ in lines}
        touched = _touched(processes, touches, began)
        held: dict[int, int] = {}
        for before in numbers[:at]:
            for pid, one in generations[before]:
                # Between the syncs of 0/1 Adam a step is the rank's own: those that are lost are counted elsewhere.
                if one["time"] <= began and one["digest"] is not None and (pid in seated or pid not in touched):
                    held[pid] = max(held.get(pid, 0), one["step"])
        if held and (most := max(held.values())) >= first:
            who = max(held, key=lambda pid: held[pid])
            yield (
                most - first + 1,
                f"redone: generation {number} began with step {first} though process {who} held step {most}",
            )


def _lost_holders(processes: Sequence[Process], touches: Collection[Touch], living: Collection[int]) -> Iterator[str]:
    touched = _touched(processes, touches, math.inf)
    for process in processes:
        if not process.commits or process.pid in touched or process.pid in living:
            continue
        if process.ended is None or not process.ended.startswith(ASKED_TO):
            why = process.ended or "without a word"
            yield f"holder lost: process {process.pid} was touched by no fault that explains it, and ended: {why}"


def _touched(processes: Sequence[Process], touches: Collection[Touch], at: float) -> set[int]:
    """Those that a fault had reached by then, and that had not got over it."""
    last = {
        process.pid: max((one["time"] for one in process.commits if one["time"] <= at), default=0.0)
        for process in processes
    }
    return {touch.pid for touch in touches if touch.time <= at and last.get(touch.pid, 0.0) <= touch.until}
