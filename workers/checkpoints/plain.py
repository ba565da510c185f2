"""Plain values as JSON and back, exactly: what JSON cannot say carries a tag. Nothing is pickled.

(0.9, 0.999)      {"$tuple": [0.9, 0.999]}                      an optimizer's betas stay a tuple
{3: "x"}          {"$dict": [[3, "x"]]}                         a key that is no string, or begins with "$"
inf, nan          {"$float": "inf"}                             strict JSON has none
tensor(0.1)       {"$tensor": {"dtype": "float32", ...}}        a learning rate may be one
"""

from __future__ import annotations

import math

import torch
from pydantic import JsonValue
from torch import Tensor

MOST_ELEMENTS = 4096
"""Of a tensor among plain values; a larger one belongs to the flat vectors or the buffers."""


def to_json(value: object, where: str = "plain") -> JsonValue:
    """What from_json makes the same value of. A copy. Raises: ValueError naming the place of what is not plain."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [[to_json(key, where), to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"$dict": [list(pair) for pair in pairs]}
    if isinstance(value, Tensor) and value.numel() <= MOST_ELEMENTS and not value.is_complex():
        values = to_json(value.detach().reshape(-1).tolist(), where)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"$tensor": {"dtype": dtype, "shape": list(value.shape), "values": values}}
    found = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
    raise ValueError(
        f"{where} is {found}: a checkpoint's plain values are numbers, strings, None, lists, tuples and dicts"
    )


def from_json(value: JsonValue) -> object:
    """The value that to_json was given; a tensor comes back on the CPU. Raises: ValueError, KeyError, TypeError."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag == "$float":
            return float(str(inner))
        if tag == "$tuple" and isinstance(inner, list):
            return tuple(from_json(item) for item in inner)
        if tag == "$dict" and isinstance(inner, list):
            pairs = [pair for pair in inner if isinstance(pair, list)]
            return {from_json(key): from_json(item) for key, item in pairs}
        if tag == "$tensor" and isinstance(inner, dict):
            return _tensor(inner)
    return {key: from_json(item) for key, item in value.items()}


def _tensor(told: dict[str, JsonValue]) -> Tensor:
    dtype = getattr(torch, str(told["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {told['dtype']!r} is none of torch's")
    shape = from_json(told["shape"])
    assert isinstance(shape, list)
    return torch.tensor(from_json(told["values"]), dtype=dtype).reshape(shape)
