"""A job file, YAML or JSON, read as the body of a request.

What the fields mean is checked by the service, which answers with every problem at once; by `read_job_spec` for
commands that ask no service.
YAML is read as its JSON subset: a date stays text, 1e-3 is a number, a key given twice is refused.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import JsonValue, ValidationError

from thinwire.cli.exit_codes import WRONG_INPUT, Ended
from thinwire.contract.jobs import BODY_LIMIT_BYTES, MOST_VALUES, Problem
from thinwire.contract.spec import ScriptSpec, TrainSpec, read_spec

STDIN = Path("-")
"""In the place of a file: what is piped into the command."""


class JobFileError(Ended):
    """The file is not a job that can run; the message names the file and the place in it."""

    code = WRONG_INPUT


def read_job_file(path: Path) -> dict[str, JsonValue]:
    """The object in the file, or, for STDIN, in what is piped. Raises JobFileError."""
    named = named_file(path)
    try:
        if path == STDIN:
            content = sys.stdin.buffer.read(BODY_LIMIT_BYTES + 1)
        else:
            with path.open("rb") as file:
                content = file.read(BODY_LIMIT_BYTES + 1)
        if len(content) > BODY_LIMIT_BYTES:
            size = len(content) if path == STDIN else max(path.stat().st_size, len(content))
            raise JobFileError(f"{named} has {size} bytes; a job file may have at most {BODY_LIMIT_BYTES}")
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise JobFileError(f"{named} cannot be read: {reason}") from error
    document = _json_in(text, named)
    if not isinstance(document, dict):
        kind = _KINDS[type(document)]
        raise JobFileError(f"{named} holds {kind}, not a mapping of fields: see examples/quickstart.yaml")
    return document


def named_file(path: Path) -> str:
    """The file, in words."""
    return "standard input" if path == STDIN else str(path)


def read_value(text: str, named: str) -> JsonValue:
    """One value, as it would stand in a file. named: what it is of, for a person. Raises JobFileError."""
    if not text:
        return ""
    return _json_in(text, named)


def _json_in(text: str, path: str) -> JsonValue:
    """What the YAML or JSON in the text is. path: where it stands, for a person. Raises JobFileError."""
    try:
        loader = _JsonLikeLoader(text)
        node = loader.get_single_node()
        number = 0 if node is None else _num_values(node, {})
        if number > MOST_VALUES:
            raise JobFileError(f"{path} holds {number} values, aliases written out; at most {MOST_VALUES} are read")
        found = None if node is None else loader.construct_document(node)
        # What JSON cannot carry must fail here with the file's name, not in the middle of a request.
        problems = list(_not_json(found, ""))
        if problems:
            raise JobFileError(f"{path} holds what JSON cannot carry: {'; '.join(problems)}")
        document: JsonValue = json.loads(json.dumps(found, allow_nan=False))
    except yaml.YAMLError as error:
        raise JobFileError(f"{path} is neither YAML nor JSON: {_one_line(error)}") from error
    except (IndexError, TypeError, ValueError, RecursionError) as error:  # IndexError: PyYAML's, of !!float ""
        raise JobFileError(f"{path} holds a value that JSON cannot carry: {error}") from error
    return document


def read_job_spec(path: Path, document: Mapping[str, JsonValue] | None = None) -> TrainSpec | ScriptSpec:
    """What the service would make of the file. document: in place of what is in it. Raises JobFileError, with every
    problem at once.
    """
    from thinwire.service.problems import problems_of_spec

    try:
        return read_spec(read_job_file(path) if document is None else document)
    except ValidationError as error:
        raise explain_rejection(path, "it is no job", problems_of_spec(error)) from error


def explain_rejection(path: Path, message: str, problems: Sequence[Problem]) -> JobFileError:
    """The service's refusal of this file: each problem as path, value and what is allowed, a line each."""
    named = named_file(path)
    if not problems:
        return JobFileError(f"{named} was refused, nothing was started: {message}")
    return JobFileError("\n".join([f"{named} was refused, nothing was started:", *problem_lines(problems)]))


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """A line for each: path, value, what is allowed."""
    lines = []
    for problem in problems:
        value = "" if problem.value is None else f" = {json.dumps(problem.value)}"
        lines.append(f"  {problem.path or '(the whole file)'}{value}: {problem.message}")
    return lines


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values the node stands for, aliases written out: nine lines may stand for 9**9 of them.

    known: of nodes that have been counted. Raises YAMLError for one that stands inside of itself.
    """
    if id(node) not in known:
        known[id(node)] = 0  # while it is counted
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        values = [value for _, value in inner] if isinstance(node, yaml.MappingNode) else inner
        known[id(node)] = 1 + sum(_num_values(value, known) for value in values)
    elif known[id(node)] == 0:
        raise yaml.constructor.ConstructorError(None, None, "this stands inside of itself", node.start_mark)
    return known[id(node)]


def _not_json(value: object, path: str) -> Iterator[str]:
    """What JSON has no word for, as 'optimizer.lr = nan: must be a finite number'."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_json(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _not_json(inner, f"{path}.{index}".lstrip("."))
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path or 'the file'} = {value}: must be a finite number"
    elif value is not None and not isinstance(value, str | int | float | bool):
        yield f"{path or 'the file'} is of YAML type {type(value).__name__}: must be text, a number, true or false"


_KINDS: dict[type, str] = {
    type(None): "nothing",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
}


class _JsonLikeLoader(yaml.SafeLoader):
    """SafeLoader without dates and yes/no, with numbers as YAML 1.2 and 1e-3, refusing a key given twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._flat: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Take in what `<<` names; keys are text from then on, as JSON and the page have them."""
        if node in self._flat:  # named by `<<` in another place: own keys now stand behind those that it has taken in
            return
        self._flat.add(node)
        seen: dict[str, int] = {}
        for index, (key, value) in enumerate(node.value):
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key.start_mark)
            text = _key(self.construct_object(key))
            if text in seen:
                same = "" if key.value == text else f", as a key {text},"
                problem = f"{key.value}{same} is given twice, first in line {seen[text]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[text] = key.start_mark.line + 1
            named = yaml.ScalarNode("tag:yaml.org,2002:str", text, key.start_mark, key.end_mark)
            node.value[index] = named, value
        super().flatten_mapping(node)


def _key(value: object) -> str:
    """As JavaScript has it, in which the page reads the same file: 0x1 and 1.0 are the key 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)


_DROPPED = {"tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"}
_JsonLikeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _DROPPED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_JsonLikeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_JsonLikeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)
_JsonLikeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^[-+]?(?:0b[01][01_]*|0o[0-7][0-7_]*|0x[0-9a-fA-F][0-9a-fA-F_]*|[0-9][0-9_]*)$"),
    list("-+0123456789"),
)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """As YAML 1.2 has it, and the page: 010 is ten, 0o10 eight, and 1:30 no number but text."""
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 0 if text.lstrip("-+")[1:2].isalpha() else 10)


_JsonLikeLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
