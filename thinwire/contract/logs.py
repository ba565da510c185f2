"""Lines of a log: text for people, or with THINWIRE_LOG_FORMAT=json one JSON object a line, for programs.

A line of ours is a call such as `logger.info("job_accepted job_id=%s steps=%s", job_id, steps)`: the template says what
the values are called, and the values come beside it. So an object has each of them as it is, numbers as numbers,
and no text is parsed: what a value holds cannot pass for another field. That is why the formatter is of our own: those
of libraries (python-json-logger, structlog) take names from the call alone, and of these calls would keep one text.

    {"time": "2026-11-27T17:28:50.123Z", "level": "INFO", "logger": "thinwire.service.jobs.service",
     "event": "job_accepted", "request_id": "5f0c...", "person": "anna", "job_id": "quickstart-3fa9c1", "steps": 60}

time, level, logger    of every line
event                  of a line of ours: its first word. `message` is what it says in free words, if anything
message                of the line of another library (uvicorn, SQLAlchemy, Ray): all that it says
request_id, person     within a request
job_id, attempt, rank  in a process of a job. Its lines may name other jobs; a rank in the group of the time, which
                       need not be what the worker is called, is `rank_` there
exception              a traceback

Nothing in a line breaks it, and no line breaks another: all is ASCII, control characters are escapes, halves of
surrogate pairs U+FFFD, numbers that are not finite words. Secrets are hidden as everywhere (redaction.py).
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from itertools import zip_longest
from numbers import Integral, Real
from types import MappingProxyType, TracebackType
from typing import Any, Final, Literal, NamedTuple, TextIO

from thinwire.contract.redaction import Redacting, redacted

LogFormat = Literal["text", "json"]
VARIABLE: Final = "THINWIRE_LOG_FORMAT"
TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
MOST_CHARACTERS: Final = 16_384
"""Of one value: what is longer is cut, and says so."""
DEEPEST: Final = 8
"""Mappings and lists inside one another, of a value."""

Field = object | Callable[[], object]
"""A value, or what gives it when a line is written."""

_bound: ContextVar[Mapping[str, object]] = ContextVar("thinwire_log_fields", default=MappingProxyType({}))


def bind(**fields: object) -> None:
    """What is logged in this context from here on, in its tasks and threads too, has these fields."""
    _bound.set({**_bound.get(), **fields})


def bound(name: str) -> object | None:
    """The value of a field that was bound in this context."""
    return _bound.get().get(name)


class TextLines(Redacting):
    """The lines for people. Within a request they end with its id."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, without the traceback that may follow it."""
        line = super().formatMessage(record)
        request_id = bound("request_id")
        return line if request_id is None else f"{line} request_id={request_id}"


class JsonLines(logging.Formatter):
    """One object a line. fields: of every line of this process."""

    def __init__(self, fields: Mapping[str, Field] = MappingProxyType({})) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """The line. It raises nothing: a call that is wrong is a line, too."""
        event, message, own = _said(record)
        found: dict[str, object] = {
            "time": iso(record.created),
            "level": record.levelname,
            "logger": record.name,
        }
        if event is not None:
            found["event"] = event
        if message:
            found["message"] = message
        for name, value in {**self._of_process(), **_bound.get()}.items():
            if value is not None:
                found[name] = value
        for name, value in own.items():
            is_taken = name in _RESERVED or (name == "rank" and name in found)
            found[f"{name}_" if is_taken else name] = value
        if record.exc_info and record.exc_info[0] is not None:
            found["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            found["stack"] = record.stack_info
        return as_line(found)

    def _of_process(self) -> dict[str, object]:
        return {name: value() if callable(value) else value for name, value in self._fields.items()}


def iso(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def as_line(fields: Mapping[str, object]) -> str:
    """These fields as one line of ASCII, secrets hidden."""
    shown = {_plain(name): _shown(value, name) for name, value in fields.items()}
    return json.dumps(shown, ensure_ascii=True, allow_nan=False).replace("\x7f", "\\u007f")


def of_environment(otherwise: object = None) -> LogFormat:
    """What the environment of this process asks for, else what it was told; text where it was told nothing."""
    asked = os.environ.get(VARIABLE, "").strip() or otherwise
    return "json" if asked == "json" else "text"


def set_up(
    form: LogFormat | None = None,
    *,
    stream: TextIO | None = None,
    text: str = TEXT,
    fields: Mapping[str, Field] = MappingProxyType({}),
    force: bool = False,
) -> None:
    """Have this process write its log to `stream` (default: stderr) in this form (default: of the environment).

    It takes the place of what this function has set up before; with `force` of all that there is, else a process that
    has a log already keeps it. text: the format of a text. As JSON also what would go past the log is a line of it:
    warnings, errors that nobody has caught, and the lines of Ray, which has a handler of its own.
    """
    form = of_environment() if form is None else form
    root = logging.getLogger()
    for other in root.handlers[:]:
        if force or isinstance(other.formatter, JsonLines | TextLines):
            root.removeHandler(other)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every call
    if root.handlers:
        return
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(fields) if form == "json" else TextLines(text))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    if form == "json":
        ray = logging.getLogger("ray")
        ray.handlers.clear()
        ray.propagate = True
        logging.captureWarnings(capture=True)
        sys.excepthook = _uncaught
        threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("uncaught kind=%s", kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    error = args.exc_value or args.exc_type()
    name = args.thread.name if args.thread is not None else None
    logging.getLogger(__name__).critical(
        "uncaught kind=%s thread=%s",
        *(args.exc_type.__name__, name),
        exc_info=(args.exc_type, error, args.exc_traceback),
    )


# what a call says

_RESERVED: Final = frozenset({"time", "level", "logger", "event", "request_id", "person", "exception", "stack"})
_OURS: Final = ("thinwire", "__main__")
_EVENT: Final = re.compile(r"[a-z][a-z0-9_]*")
_CONVERSION: Final = re.compile(r"%[#0\- +]*[0-9]*(?:\.[0-9]+)?[hlL]?([diouxXeEfFgGcrsa%])")
_KEY: Final = re.compile(r"(?:^|(?<=\s))([a-z_][a-z0-9_]*)=")
_ONE: Final = re.compile(rf"({_CONVERSION.pattern})[:;,.]?")


class _Piece(NamedTuple):
    """A field of a template; without a name, free words. takes: so many values. is_value: it is one of them."""

    name: str
    template: str
    takes: int
    is_value: bool


@lru_cache(maxsize=2048)
def _pieces(template: str) -> tuple[_Piece, ...]:
    """The first is the event. A value that the template gives itself goes on up to the next name."""
    head, _, rest = template.partition(" ")
    keys = list(_KEY.finditer(rest))
    found = [_piece("event", head.rstrip(":")), _piece("", rest[: keys[0].start() if keys else len(rest)].strip())]
    for key, follower in zip_longest(keys, keys[1:]):
        end = len(rest) if follower is None else follower.start()
        value = rest[key.end() : end].strip()
        words = ""
        if _CONVERSION.match(value):
            value, _, words = value.partition(" ")
        found += [_piece(key[1], value.strip("'")), _piece("", words.strip())]
    return tuple(piece for piece in found if piece.template)


def _piece(name: str, template: str) -> _Piece:
    conversions = [one for one in _CONVERSION.finditer(template) if one[1] != "%"]
    return _Piece(name, template, len(conversions), len(conversions) == 1 and bool(_ONE.fullmatch(template)))


def _said(record: logging.LogRecord) -> tuple[str | None, str, dict[str, object]]:
    """The event, free words, and fields."""
    template, given = record.msg, record.args
    if isinstance(template, str) and record.name.partition(".")[0] in _OURS:
        values = given if isinstance(given, tuple) else (given,)  # logging unwraps a mapping that is the only one
        try:
            found = _taken_apart(template, values)
        except (TypeError, ValueError, OverflowError):  # a call whose values do not fit its template
            found = None
        if found is not None:
            return found
    try:
        return None, record.getMessage(), {}
    except Exception as error:  # noqa: BLE001 - whatever a value's own __str__ raises: the line must be written
        return None, f"{template!r} cannot be filled in ({type(error).__name__})", {}


def _taken_apart(template: str, given: tuple[object, ...]) -> tuple[str, str, dict[str, object]] | None:
    """None for what is no line of ours: its first word is no event, or its template takes other values."""
    pieces = _pieces(template)
    if sum(piece.takes for piece in pieces) != len(given):
        return None
    event, words, fields = "", list[str](), dict[str, object]()
    left = iter(given)
    for piece in pieces:
        values = tuple(next(left) for _ in range(piece.takes))
        filled = values[0] if piece.is_value else piece.template % values
        if piece.name == "event":
            event = str(filled)
        elif piece.name:
            fields[piece.name] = filled
        else:
            words.append(str(filled).strip(" :;,"))
    if not _EVENT.fullmatch(event):
        return None
    if "message" in fields:
        words.append(str(fields.pop("message")))
    return event, "; ".join(filter(None, words)), fields


# values

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def _plain(text: str) -> str:
    """With whole characters alone."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def _text(value: object, name: str) -> str:
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception as error:  # noqa: BLE001 - the value's own code: its line must be written nevertheless
        text = f"({type(value).__name__} whose __str__ raises {type(error).__name__})"
    text = _plain(redacted(str(text), name))
    left = len(text) - MOST_CHARACTERS
    return text if left <= 0 else f"{text[:MOST_CHARACTERS]}... and {left} characters more"


def _shown(value: object, name: str, depth: int = 0) -> Any:
    """The value as JSON has it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        number = int(value)
        return number if abs(number) < 2**63 else _text(f"{number:#x}", name)
    if isinstance(value, Real):
        real = float(value)
        return real if math.isfinite(real) else str(real)
    if depth < DEEPEST and isinstance(value, Mapping):
        return {_text(key, ""): _shown(inner, str(key), depth + 1) for key, inner in value.items()}
    if depth < DEEPEST and isinstance(value, list | tuple | set | frozenset):
        inside: Iterable[object] = value
        return [_shown(inner, name, depth + 1) for inner in inside]
    return _text(value, name)
