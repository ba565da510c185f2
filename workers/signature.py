"""What a worker trains, in a few short texts: two workers belong to the same run where theirs are equal.

A worker shows its signature when it joins (membership.Member.join). One that differs from the job's is not seated, and
learns in which field; so a wrong worker ends by itself, before it has had any part in a step.

    thinwire, torch, numba      versions
    code                        digest of the sources that decide what a rank computes and when it sends
    device                      cpu or cuda: their groups do not meet
    spec.*                      the job file, field by field, less what may differ (below)
    data, steps                 what is trained on, with its digest where it has one; how samples are drawn
    registered, optimizer       names of what belongs to the state; the optimizer's class, or those of several
    model                       number and digest of names, shapes and dtypes of what is trained
    start                       digest of given weights, where the job starts from a file (session/joining.py)

Values of the model and the optimizer are not in it, for a newcomer is given them. Nor is what may differ between the
workers and the attempts of one run: the name of the job, and how many workers it has, on what, and how patient it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import thinwire
from thinwire.contract.spec import JobSpec

if TYPE_CHECKING:
    import torch

    from thinwire.workers.session.training import Training

COMPUTES = ("comm", "contract", "optim", "workers")
"""Packages of thinwire. All of each: a loop that saves or reports at another step has its peers wait for ever."""
MAY_DIFFER: dict[str, set[str] | bool] = {
    "name": True,
    "priority": True,
    "tracking": True,
    "labels": True,
    "workers": {"min", "max", "device", "max_restarts", "elastic", "grace_s"},
}
"""Fields of the job file that do not decide what a rank computes. workers.shadow does."""
LONGEST = 80
"""Characters of a value; a longer one ends in its digest."""
DIGITS = 16
"""Of a digest: for differences that nobody made on purpose."""


def signature(spec: JobSpec | None, training: Training) -> dict[str, str]:
    """Of what this worker has built. Local; the same on every worker of a run, whatever its rank and its machine."""
    optimizers, names = training.optimizers, training.registered.parameter_names()
    params = [tensor.param for optimizer in optimizers for tensor in optimizer.space.tensors]
    rows = [f"{names.get(id(param), [])} {tuple(param.shape)} {param.dtype}\n" for param in params]
    return {
        **(_of_code() if spec is None else known_before(spec)),
        **_of_machine(training.device),
        "data": _shortened(training.feed.data),
        "steps": _shortened(f"{training.feed.drawing}, {training.feed.length}"),
        "registered": _shortened(", ".join(training.registered.names)),
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
        "model": f"{len(rows)} tensors #{_digest(''.join(rows).encode())}",
    }


def _of_machine(device: torch.device) -> dict[str, str]:
    return {"torch": version("torch"), "numba": version("numba"), "device": device.type}


def known_before(spec: JobSpec) -> dict[str, str]:
    """What a driver knows of it before there is any worker: needs no torch. Raises: OSError."""
    return {**_of_code(), **spec_fields(spec)}


def _of_code() -> dict[str, str]:
    return {"thinwire": thinwire.__version__, "code": code_digest(Path(thinwire.__file__).parent)}


def spec_fields(spec: JobSpec) -> dict[str, str]:
    """What the job file says, as spec.optimizer.lr: "0.001"."""
    fields = spec.model_dump(mode="json", exclude=MAY_DIFFER)
    return {name: _shortened(json.dumps(value)) for name, value in _leaves("spec", fields)}


@cache
def code_digest(package: Path) -> str:
    """Of the sources of COMPUTES below `package`: a version does not distinguish two checkouts. Raises: OSError."""
    hashed = hashlib.sha256()
    for name in COMPUTES:
        for file in sorted((package / name).rglob("*.py")):
            content = file.read_bytes()
            hashed.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode())
            hashed.update(content)
    return hashed.hexdigest()[:DIGITS]


def _leaves(path: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(f"{path}.{key}", inner)
        else:
            yield f"{path}.{key}", inner


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - DIGITS]}... #{_digest(text.encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]
