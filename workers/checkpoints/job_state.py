"""What of a job is in a checkpoint, and how it goes back: model, optimizer and meter as flat vectors and plain values.

flat.parameters            P, the masters of low-precision parameters in it; the model's weights are cut out of it
flat.vectors.*             the optimizer's m, v and so on          flat.residuals.*    R of each error memory
buffer.*                   whatever else the model's state_dict has: statistics, frozen parameters; rank 0's
plain                      optimizer: all else of its state_dict; parameters: names, shapes, places in P; meter
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.workers.checkpoints.snapshot import Content
from thinwire.workers.telemetry.meter import Meter


def collect(model: nn.Module, optimizer: FlatOptimizer[Any], meter: Meter) -> Content:
    """The state of a job, to be saved before the next step: its tensors are the live ones. Collective.

    The error memory is brought together as R, from which the run goes on. Raises: PeerLost; then nothing has changed.
    """
    state = optimizer.state_dict()
    state.pop("master", None)  # is in P
    flat = {f"{kind}.{name}": v_N for kind in ("vectors", "residuals") for name, v_N in state.pop(kind).items()}
    parameters = _places(model, optimizer)
    named = {name for row in parameters for name in row["names"]}
    rest = {name: value for name, value in model.state_dict().items() if name not in named}
    buffers = {name: value for name, value in rest.items() if isinstance(value, Tensor)}
    plain = {
        "optimizer": state,
        "parameters": parameters,
        "meter": meter.state(),
        "model": {name: value for name, value in rest.items() if name not in buffers},
    }
    return Content({"parameters": optimizer.space.p_N, **flat}, buffers, plain)


def restored(content: Content) -> dict[str, Any]:
    """What `model`, `optimizer` and `meter` load, under these keys. Shares memory with `content`."""
    plain: dict[str, Any] = dict(content.plain)
    model: dict[str, Any] = {**plain["model"], **content.buffers}
    masters = []
    for row in plain["parameters"]:
        p_N, shape, dtype = content.flat["parameters"], row["shape"], getattr(torch, row["dtype"])
        part_N = p_N[row["start"] : row["start"] + math.prod(shape)]
        if dtype != p_N.dtype:
            masters.append(part_N)
        model.update(dict.fromkeys(row["names"], part_N.view(shape).to(dtype)))
    optimizer = {
        **plain["optimizer"],
        "vectors": _under("vectors.", content),
        "residuals": _under("residuals.", content),
    }
    if masters:
        optimizer["master"] = torch.cat(masters)
    return {"model": model, "optimizer": optimizer, "meter": plain["meter"]}


def _places(model: nn.Module, optimizer: FlatOptimizer[Any]) -> list[dict[str, Any]]:
    """Of each parameter of the optimizer, in flat order: what the model calls it, its dtype, shape and place in P."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [
        {
            "names": names.get(id(tensor.param), []),
            "dtype": str(tensor.param.dtype).removeprefix("torch."),
            "shape": list(tensor.param.shape),
            "start": tensor.start,
        }
        for tensor in optimizer.space.tensors
    ]


def _under(prefix: str, content: Content) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v_N for name, v_N in content.flat.items() if name.startswith(prefix)}
