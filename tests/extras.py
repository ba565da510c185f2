"""What an installation with some of the extras could import: the closure of its requirements, by their metadata.

`only` is a prelude for a process of its own. A package outside the closure cannot be imported there, as if it were not
installed, though the tests' environment has everything.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent

STEPS = """
import torch
from thinwire.comm import SoloGroup
from thinwire.optim import OneBitAdam

model = torch.nn.Linear(8, 1)
optimizer = OneBitAdam(model.parameters(), lr=0.05, warmup=2, group=SoloGroup())
losses = []
for _ in range(6):
    optimizer.zero_grad()
    losses.append((model(torch.ones(4, 8)) - 3).square().mean())
    losses[-1].backward()
    optimizer.step()
assert losses[-1] < losses[0], losses
"""
"""Source that trains a little with the optimizer, on one rank."""
IN_RAY = {"colorama", "psutil", "setproctitle"}
"""Ray's wheel has its own copies of these."""
_PRELUDE = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

REFUSED = set(%s)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def asked(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for, with extras that stand for other extras written out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(map(Requirement, project["dependencies"]))
    waiting = list(extras)
    while waiting:
        for requirement in map(Requirement, project["optional-dependencies"][waiting.pop()]):
            if requirement.name == project["name"]:
                waiting += sorted(requirement.extras)
            else:
                found.append(requirement)
    return found


def closure(*extras: str) -> set[str]:
    """Canonical names of all distributions that `pip install thinwire[extras]` brings, of those installed here."""
    seen: set[tuple[str, str]] = set()
    waiting = list(_pairs(asked(*extras), ""))
    while waiting:
        pair = waiting.pop()
        if pair in seen:
            continue
        seen.add(pair)
        name, extra = pair
        try:
            waiting += _pairs(map(Requirement, distribution(name).requires or []), extra)
        except PackageNotFoundError:
            continue  # for another system, or what a test would miss
    return {name for name, _ in seen}


def _pairs(requirements: Iterable[Requirement], extra: str) -> Iterator[tuple[str, str]]:
    """Each requirement that holds here, by name, with each extra that it asks for; itself has the extra ''."""
    for one in requirements:
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            yield from ((canonicalize_name(one.name), its) for its in ("", *one.extras))


@cache
def _owners() -> dict[str, set[str]]:
    """The distributions that each top-level module of this environment belongs to. Slow: it reads all their records."""
    return {module: set(map(canonicalize_name, names)) for module, names in packages_distributions().items()}


def refused(*extras: str) -> set[str]:
    """Top-level modules of this environment that such an installation has not."""
    brought = closure(*extras) | {"thinwire"}
    found = {
        module
        for module, owners in _owners().items()
        if re.fullmatch(r"[A-Za-z]\w*", module) and brought.isdisjoint(owners)
    }
    return found - IN_RAY if "ray" in brought else found


def only(*extras: str) -> str:
    """The prelude: source that a process runs before what is tested."""
    return _PRELUDE % json.dumps(sorted(refused(*extras)))
