"""The chart as helm renders it, for the values of each file in values/."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/chart"
VALUES = {file.stem: file for file in sorted((Path(__file__).parent / "values").glob("*.yaml"))}
HELM = Path(sys.executable).parent / "helm"

Object = dict[str, Any]


class RenderRefused(Exception):
    """Helm refused the values; the message is what it said."""


def render(arguments: Sequence[str] = ()) -> str:
    """What `helm template` prints for these arguments. Raises RenderRefused."""
    command = [str(HELM), "template", "thinwire", str(CHART), "--namespace", "thinwire", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RenderRefused(done.stderr)
    return done.stdout


@functools.cache
def rendered(name: str) -> str:
    """The same for the values of this name, once."""
    return render(["--values", str(VALUES[name])])


def objects(text: str) -> list[Object]:
    """The objects of a YAML stream."""
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]


def with_jobs(found: list[Object]) -> list[Object]:
    """These, and the RayJobs in their ConfigMaps, as pods would come of them."""
    templates = [each["data"]["rayjob.yaml"] for each in found if "rayjob.yaml" in each.get("data", ())]
    return [*found, *(yaml.load(template, Loader=yaml.CSafeLoader) for template in templates)]
