"""A device that is not the CPU as torch sees it, with the host's memory: it notes where a GPU would make the host wait.

Its operations are run by the CPU's, on the same memory, so that what a step computes is what it would. Every kernel of
torch goes through `_run`, which looks for what makes the host wait on CUDA: a value that is read, a shape that depends
on values, a copy between host and device that nobody said need not be waited for. Where it is called from in the
product is noted, with how often: `noted()`.

For a process of its own: torch takes one such device, and for good. What is not seen: an operation that waits on CUDA
alone, for a reason that is not here; tests/gpu asks CUDA itself.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
PRODUCT, NOT_OURS = "thinwire.", "thinwire.comm.groups."
EXCHANGES, FINISH = "thinwire.comm.exchange.", "finish"

READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "histc"}
"""Operations that give the host a value, or a shape that depends on values."""
READ_AN_ARGUMENT = {"masked_fill", "masked_fill_", "index_fill", "index_fill_"}
"""Those that read the value to fill with, where it is a tensor on the device."""
COPIES = {"copy_", "_to_copy", "_copy_from"}
WRITE_ONLY = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_", "aten::_foreach_zero_")
"""They do not read what they write."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _Shared(ctypes.Structure):
    """The head of what DLPack hands over: memory, and on which kind of device it is."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device))


_ON_HOST, _ELSEWHERE = 1, 12
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_waits: Counter[str] = Counter()
_listening = [False]
operations = [0]
"""How many have been run."""
passes: list[tuple[str, str, int]] = []
"""Of each of these: for what it was (noted_as), its name, and the bytes of memory that it reads and writes."""
_purpose = threading.local()
_libraries: list[Any] = []


def start() -> torch.device:
    """Make the device known to torch. Once a process."""
    _setup_privateuseone_for_python_backend(NAME)
    every = torch.library.Library("_", "IMPL", "PrivateUse1")
    every.fallback(_run)
    ours = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in ("copy_", "repeat_interleave.Tensor", "masked_fill.Tensor", "masked_fill_.Tensor"):
        ours.impl(name, _called(name))
    _libraries.extend([every, ours])
    as_torch_has_it = Tensor.__dlpack_device__

    def dlpack_device(x: Tensor) -> Any:
        return (_ELSEWHERE, 0) if x.device.type == NAME else as_torch_has_it(x)

    Tensor.__dlpack_device__ = dlpack_device  # type: ignore[method-assign]  # torch knows no device of another name
    return torch.device(NAME)


@contextmanager
def noted() -> Iterator[Counter[str]]:
    """Inside, waits are counted, by module and function of the product; what is outside of it is not."""
    _waits.clear()
    _listening[0] = True
    try:
        yield _waits
    finally:
        _listening[0] = False


@contextmanager
def noted_as(purpose: str) -> Iterator[None]:
    """Operations of this thread are for that, inside."""
    _purpose.name = purpose
    try:
        yield
    finally:
        _purpose.name = ""


def on_host(x: Tensor) -> Tensor:
    """The same memory, as the host's. Not a copy, and no wait."""
    if x.device.type != NAME:
        return x
    return _as(x, _ON_HOST) if x.numel() else torch.empty(x.shape, dtype=x.dtype)  # which can still be given room


def _called(name: str) -> Any:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    return lambda *given, **named: _run(op, *given, **named)


def _as(x: Tensor, kind: int) -> Tensor:
    """The same memory, as a tensor of another kind of device."""
    capsule = torch._C._to_dlpack(x.detach())
    shared = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_Shared)).contents
    shared.device.kind, shared.device.number = kind, 0
    return torch._C._from_dlpack(capsule)


def _run(op: Any, *given: Any, **named: Any) -> Any:
    operations[0] += 1
    if _listening[0] and (why := _waits_for(op, given, named)):
        _note(why)
    leaves, form = tree_flatten((given, named))
    ours = [x if isinstance(x, Tensor) and x.device.type == NAME else None for x in leaves]
    there = [x.type == NAME for x in leaves if isinstance(x, torch.device)]
    hosts = [on_host(x) if isinstance(x, Tensor) else _host_of(x) for x in leaves]
    given, named = tree_unflatten(hosts, form)
    given = tuple(_number(x, argument, hosts) for x, argument in zip(given, op._schema.arguments, strict=False))
    made = op(*given, **named)
    passes.append(
        (getattr(_purpose, "name", ""), op._schema.name.removeprefix("aten::"), _moved(op, given, named, made))
    )
    for one, host in zip(ours, hosts, strict=True):
        if one is not None and one.shape != host.shape:  # what had no room got some
            one.data = _as(host, _ELSEWHERE)
    back = {id(host): one for one, host in zip(leaves, hosts, strict=True) if isinstance(host, Tensor)}
    stays = op._schema.name == "aten::_local_scalar_dense" or (there and not any(there))

    def device_of(x: Any) -> Any:
        if not isinstance(x, Tensor) or stays:
            return x
        found = back.get(id(x))
        return _as(x, _ELSEWHERE) if found is None else found

    return tree_map(device_of, made)


def _moved(op: Any, given: tuple[Any, ...], named: dict[str, Any], made: Any) -> int:
    """Bytes that this operation reads and writes, each once; 0 of one that only looks at memory in another way."""
    pairs = [*zip(op._schema.arguments, given, strict=False), *((a, named.get(a.name)) for a in op._schema.arguments)]
    written = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
    if views or op._schema.name.startswith(("aten::empty", "aten::new_empty")):
        return 0
    only = op._schema.name.startswith(WRITE_ONLY)
    total = 0
    for argument, x in pairs:
        writes = argument in written
        each = (not writes or not (only or argument.kwarg_only)) + writes
        total += each * sum(_bytes_of(one) for one in tree_flatten(x)[0] if isinstance(one, Tensor))
    return total if written else total + sum(_bytes_of(x) for x in tree_flatten(made)[0] if isinstance(x, Tensor))


def _bytes_of(x: Tensor) -> int:
    """Of memory: what is expanded lies there once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * x.element_size()


def _number(x: Any, argument: Any, others: list[Any]) -> Any:
    """A number that stood for a tensor, as one again: its type is that of the first tensor where both are of a kind."""
    if not isinstance(x, bool | int | float) or str(argument.type) not in ("Tensor", "Optional[Tensor]"):
        return x
    first = next((one.dtype for one in others if isinstance(one, Tensor)), None)
    alike = first is not None and (first.is_floating_point or not isinstance(x, float)) and first != torch.bool
    return torch.tensor(x, dtype=first if alike else None)


def _host_of(x: Any) -> Any:
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _waits_for(op: Any, given: tuple[Any, ...], named: dict[str, Any]) -> str | None:
    """What the host would wait for, in words."""
    name = op._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_flatten((given, named))[0] if isinstance(x, Tensor)]
    if name in READS:
        return name
    if name in READ_AN_ARGUMENT and isinstance(given[-1], Tensor) and given[-1].device.type == NAME:
        return f"{name} with a value on the device"
    if name == "repeat_interleave" and named.get("output_size") is None:
        return "repeat_interleave without output_size"
    if name.startswith(("index", "_index_put")) and any(x.dtype == torch.bool for x in _indices(given)):
        return f"{name} by a mask"
    devices = {x.device.type for x in tensors} | {d.type for d in named.values() if isinstance(d, torch.device)}
    if len(devices) < 2:
        return None
    if name in COPIES:
        waits = not (named.get("non_blocking") or (name == "copy_" and len(given) > 2 and given[2]))
        return f"{name} between host and device" if waits else None
    if any(x.device.type == "cpu" and x.dim() for x in tensors):
        return f"{name} of tensors on both sides"
    return None


def _indices(given: tuple[Any, ...]) -> list[Tensor]:
    return (
        [x for x in given[1] if isinstance(x, Tensor)] if len(given) > 1 and isinstance(given[1], list | tuple) else []
    )


def _note(why: str) -> None:
    site, frame = "", sys._getframe(2)
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith(NOT_OURS) and not site:
            return
        if module.startswith(PRODUCT):
            site = site or f"{module.removeprefix(PRODUCT)}.{frame.f_code.co_qualname}"
            if name == FINISH and module.startswith(EXCHANGES):
                _waits[f"{FINISH}: {why}"] += 1
                return
        frame = frame.f_back
    if site:
        _waits[f"{site}: {why}"] += 1
