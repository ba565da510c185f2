"""docs/upgrades.md: what the REST API of 0.1.0 had is still there, and asks for no more."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from thinwire.service.config import Settings
from thinwire.service.main import create_app
from thinwire.service.server import make_launcher

REFERENCE = re.compile(r'"#/components/schemas/(\w+)"')
RECORD = Path(__file__).parents[1] / "data/rest-0.1.0.json"


def outline(document: dict[str, Any]) -> dict[str, Any]:
    """Of an OpenAPI document: calls with their parameters and answers, and objects with their fields."""
    calls = {
        f"{method.upper()} {path}": {
            "parameters": sorted(p["name"] for p in one.get("parameters", [])),
            "required": sorted(p["name"] for p in one.get("parameters", []) if p.get("required")),
            "answers": sorted(code for code in one["responses"] if code.startswith("2")),
        }
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    }
    objects = {
        name: {"fields": sorted(one["properties"]), "required": sorted(one.get("required", []))}
        for name, one in document["components"]["schemas"].items()
        if "properties" in one
    }
    return {"calls": calls, "objects": objects, "asked": sorted(asked_in(document))}


def asked_in(document: dict[str, Any]) -> set[str]:
    """The objects of which bodies of requests are made."""
    schemas, found = document["components"]["schemas"], set[str]()
    waiting = [one.get("requestBody", {}) for methods in document["paths"].values() for one in methods.values()]
    while waiting:
        names = set(REFERENCE.findall(json.dumps(waiting.pop()))) - found
        found |= names
        waiting += [schemas[name] for name in names]
    return found


def lost(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a client of before would miss, or not know of."""
    found = []
    for call, one in before["calls"].items():
        here = now["calls"].get(call)
        if here is None:
            found.append(call)
            continue
        found += [f"{call}: {name}" for name in set(one["parameters"]) - set(here["parameters"])]
        found += [f"{call} now needs {name}" for name in set(here["required"]) - set(one["required"])]
        found += [f"{call} answers no {code}" for code in set(one["answers"]) - set(here["answers"])]
    for name, one in before["objects"].items():
        here = now["objects"].get(name, {"fields": [], "required": []})
        found += [f"{name}.{field}" for field in set(one["fields"]) - set(here["fields"])]
        if name in before["asked"]:
            found += [f"{name} now needs {field}" for field in set(here["required"]) - set(one["required"])]
    return found


def test_what_0_1_0_answered_is_still_there(tmp_path):
    settings = Settings(home=tmp_path, launcher="fake")
    now = outline(create_app(settings, make_launcher(settings)).openapi())
    before = json.loads(RECORD.read_text())
    assert len(before["calls"]) > 20
    assert lost(before, now) == []
    assert lost(now, {**now, "calls": {}}), "a call that is gone is found"
    spec = {"TrainSpec": {"fields": ["steps"], "required": []}}
    assert lost({"calls": {}, "objects": spec, "asked": ["TrainSpec"]}, now), (
        "a field that a request must have is found"
    )
