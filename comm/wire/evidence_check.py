"""Does what an evidence file says follow from the raw numbers in it? Pure functions of its content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from thinwire.comm.protocol import Call
from thinwire.comm.wire.headers import Frames, HeaderModel
from thinwire.comm.wire.ledger import entries, leaving, unexplained_ratio
from thinwire.comm.wire.link_classes import Box, Boxes
from thinwire.comm.wire.routes import KINDS

SCHEMA = 1
_RELATIVE = 1e-9
"""Room for other orders of summing floating-point numbers."""

_STR, _INT, _LIST, _DICT = (str,), (int,), (list,), (dict,)
_NUMBER, _NUMBER_OR_NONE = (int, float), (int, float, type(None))
_TOP: dict[str, tuple[type, ...]] = {
    "schema": _INT,
    "made_at": _STR,
    "versions": _DICT,
    "optimizer": _STR,
    "steps": _INT,
    "notes": _DICT,
    "topology": _DICT,
    "headers": _DICT,
    "counters": _LIST,
    "groups": _LIST,
    "ledger": _LIST,
    "counted_bytes": _DICT,
    "predicted_bytes": _DICT,
    "unexplained_ratio_by_box": _DICT,
    "unexplained_ratio": _NUMBER_OR_NONE,
    "sha256": _STR,
}
_VERSIONS: dict[str, tuple[type, ...]] = {"thinwire": _STR, "torch": _STR, "python": _STR, "kernel": _STR}
_TOPOLOGY: dict[str, tuple[type, ...]] = {"ranks": _LIST, "rate_mbit": _NUMBER_OR_NONE}
_BOX: dict[str, tuple[type, ...]] = {"id": _STR, "name": _STR}
_HEADERS: dict[str, tuple[type, ...]] = dict.fromkeys(HeaderModel.FIELDS, _INT)
_COUNTERS: dict[str, tuple[type, ...]] = {
    "box": _STR,
    "source": _STR,
    "interface": _STR,
    "sent_bytes_before": _INT,
    "sent_bytes_after": _INT,
    "sent_frames_before": _INT,
    "sent_frames_after": _INT,
}
_GROUP: dict[str, tuple[type, ...]] = {"ranks": _LIST, "calls": _LIST}
_CALL: dict[str, tuple[type, ...]] = {"kind": _STR, "num_bytes": _INT, "src": _INT, "times": _INT}


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of everything but `sha256`: JSON with sorted keys and no spaces, UTF-8."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def derive(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Ledger, sums and ratios from the raw fields, which must be whole (`check` says so)."""
    boxes = [Box(**box) for box in raw["topology"]["ranks"]]
    headers = HeaderModel(**raw["headers"])
    ledger: Counter[tuple[str, str, str]] = Counter()
    counted = {one["box"]: one["sent_bytes_after"] - one["sent_bytes_before"] for one in raw["counters"]}
    predicted = dict.fromkeys(counted, 0.0)
    for group in raw["groups"]:
        members = Boxes(tuple(boxes[rank] for rank in group["ranks"]))
        calls: dict[Call, int] = {
            (call["kind"], call["num_bytes"], call["src"]): call["times"] for call in group["calls"]
        }
        for entry in entries(calls, members):
            for name in ("collectives", "num_bytes", "messages"):
                ledger[entry.kind, entry.link.value, name] += getattr(entry, name)
        for box in counted:
            total = sum((leaving(call, members, box, headers) * times for call, times in calls.items()), Frames())
            predicted[box] += total.num_bytes
    kinds = sorted({(kind, link) for kind, link, _ in ledger})
    return {
        "ledger": [
            {"kind": kind, "link": link}
            | {name: ledger[kind, link, name] for name in ("collectives", "num_bytes", "messages")}
            for kind, link in kinds
        ],
        "counted_bytes": counted,
        "predicted_bytes": predicted,
        "unexplained_ratio_by_box": {box: unexplained_ratio(counted[box], predicted[box]) for box in counted},
        "unexplained_ratio": unexplained_ratio(sum(counted.values()), sum(predicted.values())),
    }


def check(content: Mapping[str, Any]) -> list[str]:
    """What does not fit, each with the name of the field; nothing where all fits."""
    if content.get("schema") != SCHEMA:
        return [f"schema: is {content.get('schema')!r}, this version of thinwire checks {SCHEMA}"]
    complaints = _shape(content)
    if complaints:
        return complaints
    complaints = _sense(content)
    if complaints:
        return complaints
    for name, value in derive(content).items():
        complaints += _compare(name, content[name], value)
    if content["sha256"] != digest(content):
        complaints.append(f"sha256: is {content['sha256']}, the content gives {digest(content)}")
    return complaints


def _shape(content: Mapping[str, Any]) -> list[str]:
    complaints = _fields("", content, _TOP)
    if complaints:
        return complaints
    complaints += _fields("versions.", content["versions"], _VERSIONS)
    complaints += _fields("topology.", content["topology"], _TOPOLOGY)
    complaints += _fields("headers.", content["headers"], _HEADERS)
    complaints += _rows("counters", content["counters"], _COUNTERS)
    complaints += _rows("groups", content["groups"], _GROUP)
    if complaints:
        return complaints
    complaints += _rows("topology.ranks", content["topology"]["ranks"], _BOX)
    for at, group in enumerate(content["groups"]):
        complaints += _rows(f"groups[{at}].calls", group["calls"], _CALL)
    return complaints


def _rows(name: str, rows: list[Any], fields: Mapping[str, tuple[type, ...]]) -> list[str]:
    complaints = []
    for at, row in enumerate(rows):
        complaints += (
            _fields(f"{name}[{at}].", row, fields)
            if isinstance(row, dict)
            else [f"{name}[{at}]: expected an object, got {row!r}"]
        )
    return complaints


def _fields(prefix: str, found: Mapping[str, Any], wanted: Mapping[str, tuple[type, ...]]) -> list[str]:
    complaints = [f"{prefix}{name}: is missing" for name in wanted if name not in found]
    complaints += [f"{prefix}{name}: is not a field of schema {SCHEMA}" for name in found if name not in wanted]
    for name, kinds in wanted.items():
        value = found.get(name)
        if name in found and (not isinstance(value, kinds) or isinstance(value, bool)):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            complaints.append(f"{prefix}{name}: expected {expected}, got {value!r}")
    return complaints


def _sense(content: Mapping[str, Any]) -> list[str]:
    complaints = []
    boxes = {box["id"] for box in content["topology"]["ranks"]}
    counted = [one["box"] for one in content["counters"]]
    if len(set(counted)) != len(counted) or set(counted) != boxes:
        complaints.append(f"counters: are of boxes {counted}, the ranks are in {sorted(boxes)}")
    if content["steps"] < 0:
        complaints.append(f"steps: is {content['steps']}, cannot be negative")
    for at, one in enumerate(content["counters"]):
        for name in ("sent_bytes", "sent_frames"):
            if not 0 <= one[f"{name}_before"] <= one[f"{name}_after"]:
                before, after = one[f"{name}_before"], one[f"{name}_after"]
                complaints.append(f"counters[{at}].{name}_after: is {after}, before it was {before}: it never falls")
    size = len(content["topology"]["ranks"])
    for at, group in enumerate(content["groups"]):
        ranks = group["ranks"]
        whole = all(type(rank) is int and 0 <= rank < size for rank in ranks)
        if not (ranks and whole and len(set(ranks)) == len(ranks)):
            complaints.append(f"groups[{at}].ranks: is {ranks}, must be different ranks from 0 to {size - 1}")
        keys = [(call["kind"], call["num_bytes"], call["src"]) for call in group["calls"]]
        if len(set(keys)) != len(keys):
            complaints.append(f"groups[{at}].calls: two rows are of the same collective")
        for position, call in enumerate(group["calls"]):
            where = f"groups[{at}].calls[{position}]"
            if call["kind"] not in KINDS:
                complaints.append(f"{where}.kind: is {call['kind']!r}, must be one of {', '.join(KINDS)}")
            if call["num_bytes"] < 0 or call["times"] < 1:
                complaints.append(f"{where}: {call['times']} times {call['num_bytes']} bytes cannot be")
            if not (0 <= call["src"] < len(ranks) if call["kind"] == "broadcast" else call["src"] == -1):
                complaints.append(f"{where}.src: is {call['src']}, must be a rank of the group, or -1 without a source")
    try:
        HeaderModel(**content["headers"])
    except ValueError as error:
        complaints.append(str(error))
    return complaints


def _compare(name: str, said: Any, derived: Any) -> list[str]:
    """Where `said` differs from what the raw numbers give."""
    if isinstance(said, dict) and isinstance(derived, dict):
        complaints = [f"{name}.{key}: is not in the raw numbers" for key in said if key not in derived]
        complaints += [f"{name}.{key}: is missing" for key in derived if key not in said]
        return complaints + [
            complaint
            for key in derived
            if key in said
            for complaint in _compare(f"{name}.{key}", said[key], derived[key])
        ]
    if isinstance(said, list) and isinstance(derived, list):
        if len(said) != len(derived):
            return [f"{name}: has {len(said)} rows, the raw numbers give {len(derived)}"]
        pairs = enumerate(zip(said, derived, strict=True))
        return [complaint for at, (a, b) in pairs for complaint in _compare(f"{name}[{at}]", a, b)]
    numbers = isinstance(said, int | float) and isinstance(derived, int | float)
    near = abs(said - derived) <= _RELATIVE * max(abs(said), abs(derived)) if numbers else said == derived
    return [] if near else [f"{name}: is {said!r}, the raw numbers give {derived!r}"]
