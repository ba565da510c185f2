"""All boxes, and every pair of them.

Who starts it speaks to each box: to this one directly, to others through their listeners, in a Ray cluster through
actors. Each box then visits each other one, so that both directions of a firewall are seen. Pairs that share no box
are measured at the same time.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from pydantic import Field, ValidationError

from thinwire.tools.doctor.facts import Facts, Frozen, Questions
from thinwire.tools.doctor.link import LinkError, call
from thinwire.tools.doctor.listener import Listener
from thinwire.tools.doctor.probe import Target, Visit, longest

Say = Callable[[str, float], None]
"""What is going on, and how much of it is done, 0 to 1."""
LOG_MARK = "thinwire-doctor-examination "
"""Before an examination as JSON, in a line of a log."""
_LOOK_S = 60.0


Read = TypeVar("Read", bound=Frozen)


class NoAnswer(Exception):
    """A box cannot be asked. connect: as Visit.connect. The message says why."""

    def __init__(self, connect: str, words: str) -> None:
        super().__init__(words)
        self.connect = connect


class Box(Protocol):
    """How a box is spoken to: each method raises NoAnswer. The questions are those of Listener.answer."""

    where: str
    """host:port of its listener, as a person wrote it."""

    def target(self) -> Target:
        """Where the others find its listener."""

    def ask(self, question: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """What its listener answers, within so long."""


class BoxReport(Frozen):
    """A box as it was found. facts: None where it did not answer; connect, why: then as in Visit.

    ports: that it was asked to listen at, and why not where it cannot. 0 stood for one that the kernel chose. apart:
    folders in which it does not see what the first box that answered has put there.
    """

    where: str
    facts: Facts | None = None
    connect: str = "ok"
    why: str = ""
    ports: dict[int, str] = Field(default_factory=dict)
    apart: tuple[str, ...] = ()


class Call(Frozen):
    """What `source` found as it visited `target`, both as places in Examination.boxes."""

    source: int
    target: int
    visit: Visit


class Examination(Frozen):
    """Everything that was found. ports: those that were asked for, beside one at each box that the kernel chose."""

    boxes: tuple[BoxReport, ...]
    calls: tuple[Call, ...] = ()
    ports: tuple[int, ...] = ()


def examine(
    boxes: Sequence[Box],
    questions: Questions,
    *,
    ports: Sequence[int] = (),
    seconds: float = 1.0,
    say: Say = lambda what, done: None,
) -> Examination:
    """Ask all boxes, and measure every pair. A box that does not answer is reported as one that does not.

    ports: that each must reach at each other, beside those that the kernel chooses. seconds: for each speed.
    """
    asked = (0, *ports) if len(boxes) > 1 else ()
    say("asking every box", 0.0)
    with ThreadPoolExecutor(max_workers=max(1, min(64, len(boxes)))) as pool:
        reports = list(pool.map(lambda box: _ask(box, questions, asked), boxes))
        answering = [place for place, report in enumerate(reports) if report.facts is not None]
        targets = [
            target.model_copy(update={"ports": tuple(report.ports)}) if (target := _target(box)) else None
            for box, report in zip(boxes, reports, strict=True)
        ]
        for place, apart in _apart([boxes[place] for place in answering], questions.folders).items():
            reports[answering[place]] = reports[answering[place]].model_copy(update={"apart": apart})
        calls: list[Call] = []
        turns = rounds(answering) if len(answering) > 1 else []
        for number, pairs in enumerate(turns):
            names = ", ".join(f"{boxes[one].where} and {boxes[other].where}" for one, other in pairs[:3])
            say(f"measuring {names}", 0.1 + 0.8 * number / len(turns))
            for found in pool.map(lambda pair: _measure(boxes, targets, pair, seconds), pairs):
                calls += found
        say("asking who reaches whom", 0.9)
        unheard = [place for place in range(len(boxes)) if place not in answering]
        for source in answering:
            for place in unheard:
                if (target := targets[place]) is not None:
                    calls.append(Call(source=source, target=place, visit=_visited(boxes[source], target, 0.0)))
    return Examination(boxes=tuple(reports), calls=tuple(calls), ports=tuple(ports))


def rounds(places: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which no place comes twice: one stays, the others go round."""
    ring: list[int | None] = [*places, *([None] if len(places) % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        met = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(one, other) for one, other in met if one is not None and other is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def _ask(box: Box, questions: Questions, ports: tuple[int, ...]) -> BoxReport:
    try:
        facts = _look(box, questions)
        opened = box.ask({"do": "open", "ports": list(ports)}, _LOOK_S)["ports"] if ports else {}
        return BoxReport(where=box.where, facts=facts, ports={int(port): str(why) for port, why in opened.items()})
    except NoAnswer as error:
        return BoxReport(where=box.where, connect=error.connect, why=str(error))


def _look(box: Box, questions: Questions) -> Facts:
    """Raises NoAnswer."""
    return _read(Facts, box, {"do": "look", "questions": questions.model_dump()}, _LOOK_S)


def _leave(box: Box, folders: tuple[str, ...], name: str) -> list[str]:
    """Raises NoAnswer."""
    return list(box.ask({"do": "leave", "folders": list(folders), "name": name}, _LOOK_S)["folders"])


def _read(what: type[Read], box: Box, question: dict[str, Any], patience_s: float) -> Read:
    """The answer, as what it is to be. Raises NoAnswer."""
    try:
        return what.model_validate(box.ask(question, patience_s))
    except ValidationError as error:
        raise NoAnswer("stranger", f"another version listens at {box.where}: {error.error_count()} fields") from error


def _apart(boxes: Sequence[Box], folders: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Which boxes do not see in a folder what the first has put there: it is not the same folder. By their places."""
    if len(boxes) < 2 or not folders:
        return {}
    first, found, name = boxes[0], {}, f".thinwire-doctor-{secrets.token_hex(8)}"
    with contextlib.suppress(NoAnswer):  # a box that has gone meanwhile is reported by its links
        paths = {f"{folder}/{name}": folder for folder in _leave(first, folders, name)}
        try:
            for place, box in enumerate(boxes[1:], start=1):
                seen = _look(box, Questions(files=tuple(paths))).files
                found[place] = tuple(paths[path] for path, why in seen.items() if why is not None)
        finally:
            _leave(first, (), "")
    return found


def _target(box: Box) -> Target | None:
    try:
        return box.target()
    except NoAnswer:
        return None


def _measure(
    boxes: Sequence[Box], targets: Sequence[Target | None], pair: tuple[int, int], seconds: float
) -> list[Call]:
    """Speeds are measured from one side, the rest from both. Where that side is not let in, from the other."""
    found: list[Call] = []
    for source, target in (pair, pair[::-1]):
        measured = any(call.visit.there_mbit is not None for call in found)
        where = targets[target]
        if where is not None:
            visit = _visited(boxes[source], where, 0.0 if measured else seconds)
            found.append(Call(source=source, target=target, visit=visit))
    return found


def _visited(box: Box, target: Target, seconds: float) -> Visit:
    question = {"do": "visit", "target": target.model_dump(), "seconds": seconds}
    try:
        return _read(Visit, box, question, longest(seconds))
    except NoAnswer as error:
        return Visit(connect="not asked", why=str(error))


class Here:
    """This box. address: under which the others find it."""

    def __init__(self, listener: Listener, address: str) -> None:
        self._listener, self._address = listener, address
        self.where = f"{address}:{listener.port}"

    def target(self) -> Target:
        """Its listener, under the address that the others know."""
        return Target(host=self._address, port=self._listener.port)

    def ask(self, question: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """It has no need of patience."""
        return self._listener.answer(question)


class Peer:
    """A box on which `thinwire doctor --listen` runs, asked in small frames: its link may lose others."""

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._host, self._port, self._secret = host, port, secret
        self.where = f"{host}:{port}"

    def target(self) -> Target:
        """As it was named."""
        return Target(host=self._host, port=self._port)

    def ask(self, question: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """Raises NoAnswer."""
        try:
            with call(self._host, self._port, self._secret, small=True) as link:
                link.say(question)
                link.socket.settimeout(patience_s)
                answer = link.heard()
        except LinkError as error:
            raise NoAnswer(error.kind, str(error)) from error
        except (OSError, ValueError) as error:
            raise NoAnswer("broke off", f"{self.where} broke off: {error}") from error
        if "error" in answer:
            raise NoAnswer("broke off", f"{self.where} broke off: {answer['error']}")
        return answer
