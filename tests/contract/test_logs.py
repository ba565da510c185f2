"""Lines of a log: each is one object, whatever is in it, and says what its call says."""

from __future__ import annotations

import ast
import io
import json
import logging
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.contract import logs
from thinwire.contract.logs import JsonLines, TextLines, _taken_apart

ROOT = Path(__file__).parent.parent.parent
OURS = "thinwire.test"


def line(template: object, *given: object, name: str = OURS, fields: Any = None, **more: Any) -> dict[str, Any]:
    """What a call of the logger writes, read back."""
    logger = logging.Logger(name)
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines(fields or {}))
    logger.addHandler(handler)
    logger.warning(template, *given, **more)
    written = out.getvalue()
    assert written.endswith("\n")
    assert written.count("\n") == 1, written
    assert written.isascii()
    assert all(sign >= " " for sign in written[:-1])
    assert "\x7f" not in written
    found: dict[str, Any] = json.loads(written, parse_constant=lambda word: pytest.fail(word))
    return found


def said(template: str, *given: object, **more: Any) -> dict[str, Any]:
    """The same without what every line has."""
    found = line(template, *given, **more)
    assert found.pop("level") == "WARNING"
    assert found.pop("logger") == more.get("name", OURS)
    assert found.pop("time").endswith("Z")
    return found


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (("job_accepted job_id=%s steps=%d", "a-1", 60), {"event": "job_accepted", "job_id": "a-1", "steps": 60}),
        (("prune_failed",), {"event": "prune_failed"}),
        (("reconcile_failed where=database",), {"event": "reconcile_failed", "where": "database"}),
        (("a_b reason=%r", 'it\'s "so"\nand so'), {"event": "a_b", "reason": 'it\'s "so"\nand so'}),
        (("a_b after_s=%.1f", 1.25), {"event": "a_b", "after_s": 1.25}),
        (("a_b peer=%s:%d why=%r", "h", 80, "x"), {"event": "a_b", "peer": "h:80", "why": "x"}),
        (("%s job_id=%s", "resize_failed", "a"), {"event": "resize_failed", "job_id": "a"}),
        (("a_%s step=%d %s", "b", 3, "some words"), {"event": "a_b", "step": 3, "message": "some words"}),
        (("a_b host=%s: set X, or Y", "h"), {"event": "a_b", "host": "h", "message": "set X, or Y"}),
        (
            ("a_b advice='chmod 600 %s' holds='the last'", "/t"),
            {"event": "a_b", "advice": "chmod 600 /t", "holds": "the last"},
        ),
        (("a_b kind=%s message=%s", "K", "words"), {"event": "a_b", "kind": "K", "message": "words"}),
        (("a_b level=%s person=%s", 1, 2), {"event": "a_b", "level_": 1, "person_": 2}),
        (("a_b share=%d%%", 5), {"event": "a_b", "share": "5%"}),
        (("a_b fields=%s", {"x": [1, None, True]}), {"event": "a_b", "fields": {"x": [1, None, True]}}),
        (("a_b x=%s y=%s", math.nan, -math.inf), {"event": "a_b", "x": "nan", "y": "-inf"}),
        (("a_b x=%d", 10**30), {"event": "a_b", "x": hex(10**30)}),
        (("Started server process [%d]", 7), {"message": "Started server process [7]"}),
        (("not %d two", 7, 8), {"message": "'not %d two' cannot be filled in (TypeError)"}),
        (("a_b x=%d", "seven"), {"event": "a_b", "x": "seven"}),
        (("a_b x=100%",), {"message": "a_b x=100%"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_call_says_its_event_and_its_fields(call: tuple[Any, ...], expected: dict[str, Any]) -> None:
    assert said(*call) == expected


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(ANY, st.text(st.characters(exclude_categories=[])), st.text(st.characters(exclude_categories=[])))
def test_no_value_breaks_a_line_or_passes_for_a_field(value: object, other: str, name: str) -> None:
    found = said("a_b first=%s second=%s", value, other, fields={"job_id": name})
    assert found.keys() == {"event", "first", "second", "job_id"}
    assert found["event"] == "a_b"
    assert said("anything at all: %s", value, name="uvicorn.error").keys() == {"message"}


def test_what_is_no_text_becomes_text() -> None:
    assert said("a_b name=%s", "x\ud800y")["name"] == "x\N{REPLACEMENT CHARACTER}y"
    assert said("a_b name=%s", "\x1b[31m\x00\x7f\x85\u2028")["name"] == "\x1b[31m\x00\x7f\x85\u2028"
    assert said("a_b path=%s", Path("/a"))["path"] == "/a"

    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert said("a_b x=%s", Broken())["x"] == "(Broken whose __str__ raises RuntimeError)"
    assert "cannot be filled in" in said("free %s", Broken(), name="other")["message"]
    long = said("a_b x=%s", "y" * 100_000)["x"]
    assert len(long) < 20_000
    assert long.endswith("characters more")
    endless: list[object] = []
    endless.append(endless)
    assert "[...]" in str(said("a_b x=%s", endless)["x"])


def test_secrets_are_hidden_by_name_and_by_form() -> None:
    secret = "ghp_" + "0123456789abcdefABCDEF0123456789abcd"
    found = line("a_b password=%s url=%s env=%s", "hunter2", "redis://:hunter2@h/0", {"API_KEY": "hunter2"})
    assert (found["password"], found["url"], found["env"]) == ("***", "redis://***@h/0", {"API_KEY": "***"})
    try:
        raise ValueError(f"refused: {secret}")
    except ValueError:
        found = line("a_b", exc_info=True)
    assert found["exception"].endswith("ValueError: refused: ***")
    assert secret not in json.dumps(line(secret, name="library"))


def test_a_process_and_a_request_have_fields_of_their_own_and_a_call_may_name_another_job() -> None:
    attempt = [1]
    fields = {"job_id": "mine", "attempt": lambda: attempt[0], "rank": None}

    def within() -> None:
        logs.bind(request_id="r1")
        logs.bind(person="anna")
        attempt[0] = 2
        assert said("a_b rank=%d", 0, fields={"rank": 3}) == {
            **{"event": "a_b", "rank": 3, "rank_": 0},
            **{"request_id": "r1", "person": "anna"},
        }
        found = said("a_b job_id=%s request_id=%s", "theirs", "forged", fields=fields)
        assert found == {
            **{"event": "a_b", "job_id": "theirs", "attempt": 2},
            **{"request_id": "r1", "request_id_": "forged", "person": "anna"},
        }
        text = TextLines(logs.TEXT).format(logging.LogRecord(OURS, 20, "", 0, "a_b x=%d", (1,), None))
        assert text.endswith(f"INFO {OURS} a_b x=1 request_id=r1")

    copy_context().run(within)
    assert "request_id" not in line("a_b")


@pytest.fixture
def process() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """This process, with a log of JSON; gives what was written."""
    root, ray, out = logging.getLogger(), logging.getLogger("ray"), io.StringIO()
    before = root.handlers[:], root.level, ray.handlers[:], ray.propagate, sys.excepthook, threading.excepthook
    root.handlers.clear()
    ray.handlers = [logging.StreamHandler(io.StringIO())]
    ray.propagate = False
    logs.set_up("json", stream=out, fields={"job_id": "j"})
    yield lambda: [json.loads(one) for one in out.getvalue().splitlines()]
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level, ray.handlers[:], ray.propagate, sys.excepthook, threading.excepthook = before


def test_what_would_go_past_the_log_is_a_line_of_it(process: Callable[[], list[dict[str, Any]]]) -> None:
    logging.getLogger("ray").warning("of Ray")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("of a library", stacklevel=1)
        logging.captureWarnings(capture=False)
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    try:
        raise KeyError("x")
    except KeyError as error:
        sys.excepthook(KeyError, error, error.__traceback__)
    of_ray, warned, in_thread, uncaught = process()
    assert of_ray["message"] == "of Ray"
    assert "of a library" in warned["message"]
    assert (in_thread["event"], in_thread["kind"], in_thread["thread"]) == ("uncaught", "ZeroDivisionError", "worker")
    assert "ZeroDivisionError" in in_thread["exception"]
    assert uncaught["exception"].endswith("KeyError: 'x'")
    assert {one["job_id"] for one in process()} == {"j"}


def test_a_log_that_others_have_set_up_stays_unless_it_is_forced(process: Callable[[], list[dict[str, Any]]]) -> None:
    root = logging.getLogger()
    theirs = logging.StreamHandler(io.StringIO())
    (ours,) = (one for one in root.handlers if isinstance(one.formatter, JsonLines))
    root.handlers[:] = [ours]
    logs.set_up("json", stream=io.StringIO())
    assert root.handlers != [ours], "its own is set up again"
    root.handlers[:] = [theirs]
    logs.set_up("json")
    assert root.handlers == [theirs]
    logs.set_up("text", stream=io.StringIO(), force=True)
    assert [type(one.formatter) for one in root.handlers] == [TextLines]


@pytest.mark.parametrize(
    ("environment", "told", "form"),
    [
        ("", None, "text"),
        ("", "json", "json"),
        ("json", None, "json"),
        ("text", "json", "text"),
        ("yaml", None, "text"),
    ],
)
def test_the_environment_says_the_form_before_what_a_job_was_told(
    monkeypatch: pytest.MonkeyPatch, environment: str, told: str | None, form: str
) -> None:
    monkeypatch.setenv(logs.VARIABLE, environment)
    assert logs.of_environment(told) == form


class Value(int):
    """For any conversion."""

    def __str__(self) -> str:
        return "value"


def calls() -> Iterator[tuple[str, str, int]]:
    """Of every call of a logger in the code: where it is, its template, how many values it gives (-1: unknown)."""
    for folder in ("comm", "optim", "service", "thinwire", "workers"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder == "thinwire" and {"comm", "optim", "service", "workers"} & set(path.parts[len(ROOT.parts) :]):
                continue
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "getLogger" in text else ():
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and ast.unparse(node.func.value) in ("logger", "_log")
                ):
                    given = node.args[1:] if node.func.attr == "log" else node.args
                    if given and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str):
                        starred = any(isinstance(one, ast.Starred) for one in given)
                        yield f"{path}:{node.lineno}", given[0].value, -1 if starred else len(given) - 1


def test_every_call_in_the_code_is_an_event_with_fields() -> None:
    """So that no line of ours comes as one text."""
    found = list(calls())
    assert len(found) > 150
    for where, template, number in found:
        takes = sum(piece.takes for piece in logs._pieces(template))
        assert number in (-1, takes), f"{where}: {template}"
        taken = _taken_apart(template, tuple(map(Value, range(takes))))
        assert taken is not None, f"{where}: {template}"
