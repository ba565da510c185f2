"""The buffers of a model (running statistics, masks) stay those of rank 0 on every rank, as DDP keeps them.

    rank 0     message = |checksum of names, dtypes, shapes|bytes in all|a flag a buffer|buffers that have changed|
    others     take what came; a buffer that did not come is put back as it came last

One broadcast a step. It has as many bytes as the last one needed: how much has changed does not change much from step
to step, and constants such as masks are sent once. Where more is needed, a second broadcast brings the rest.
What has changed is found by looking at the values: batch_norm writes running statistics without a new version.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from thinwire.comm.calls import calls_of
from thinwire.comm.protocol import Group
from thinwire.optim.engine.local import local
from thinwire.optim.engine.parameters import named_as_trained, refuse_other_models

_COUNTS = struct.Struct("<qq")


def excepted_of(model: nn.Module | None) -> Collection[str]:
    """Names of the parameters and buffers that are each rank's own: DDP's word for it."""
    found: Collection[str] = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return found


class Buffers:
    """The buffers of a model that is trained over a group, and what of them all ranks hold. model None: none.

    Buffers are those that the model has when equalise_() is called. Every rank calls alike.
    given_bytes: what rank 0 has given so far, the same number on every rank.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self.given_bytes = 0
        self._lines: list[str] = []
        self._described: list[tuple[str, torch.dtype, torch.Size]] = []
        self._checksum = 0
        self._common: list[Tensor | None] = []
        """Of each buffer, uint8[its bytes]: what rank 0 gave last; None before."""
        self._room = sum(_bytes_of(buffer).numel() for _, buffer in self._named()) + self._header_bytes(self._named())

    def lines(self) -> list[str]:
        """A line for each: name, dtype, shape. Raises: ValueError, naming one that cannot be sent."""
        return _lines(self._named())

    def all(self) -> list[Tensor]:
        """The buffers themselves."""
        return [buffer for _, buffer in self._named()]

    @torch.no_grad()
    def equalise_(self, group: Group, device: torch.device) -> None:
        """Buffers <- those of rank 0, bit for bit. device: of the group's tensors. Collective where there are any.

        Raises: PeerLost; WireMismatch, or ValueError where buffers are others than rank 0's. Then none is written.
        """
        if self._model is None or group.size == 1:
            return
        named = self._named()
        if not named and not self._room:
            return
        described = [(name, buffer.dtype, buffer.shape) for name, buffer in named]
        fresh = described != self._described
        lines = _lines(named) if fresh else self._lines
        if fresh:
            self._common = [None] * len(named)
        if not self._room:
            self._compare_first(group, lines, device)
        header = self._header_bytes(named)
        room = self._room or header
        checksum = zlib.crc32("\n".join(lines).encode()) if fresh else self._checksum
        held = [_bytes_of(buffer) for _, buffer in named]
        message_B = self._written(checksum, held, device) if group.rank == 0 else None
        message_B = _passed(group, message_B, room, device)
        self.given_bytes += max(message_B.numel(), room)
        theirs, total = _COUNTS.unpack(bytes(message_B[: _COUNTS.size].tolist()))
        self._room = header if fresh else total
        if not named and total == _COUNTS.size:
            self._room = 0
        if theirs != checksum:
            raise ValueError(
                f"the buffers of this rank's model are not those of rank 0: {_difference(self._lines, lines)}. "
                "Register and resize buffers on every rank alike, before the same step; nothing was changed"
            )
        self._lines, self._described, self._checksum = lines, described, checksum
        if group.rank == 0:
            return
        self._take(named, held, message_B)

    def _compare_first(self, group: Group, lines: list[str], device: torch.device) -> None:
        """See that all ranks have these, the first of the model. Collective.

        A rank that has them alone waits here for ranks that send nothing for buffers: it reports its call to them.
        Raises: CallMismatch, WireMismatch, PeerLost.
        """
        calls = calls_of(group)
        call = f"{calls.now or 'equalise_buffers()'} with the first buffers of its model"
        with calls.within(call, "register buffers on every rank alike, before the same step"):
            refuse_other_models(group, call, lines, device)

    def _named(self) -> list[tuple[str, Tensor]]:
        found = []
        excepted = excepted_of(self._model)
        for name, buffer in () if self._model is None else self._model.named_buffers():
            if name in excepted:
                continue
            name, buffer = named_as_trained(name), local(buffer)
            if buffer.layout != torch.strided or buffer.is_meta or buffer.is_quantized:
                raise ValueError(
                    f"buffer {name}: is {buffer.layout}, {buffer.dtype} on {buffer.device}; the buffers of model= "
                    "must be dense and hold values"
                )
            if buffer.numel():
                found.append((name, buffer))
        return found

    def _header_bytes(self, named: Sequence[object]) -> int:
        return _COUNTS.size + len(named) if named else 0

    def _written(self, checksum: int, held: list[Tensor], device: torch.device) -> Tensor:
        """The message of rank 0, uint8[B]. Modifies what is held to be common."""
        differs = _differing(held, self._common)
        changed = [at for at, differ in enumerate(differs) if differ]
        sent = [held[at] for at in changed]
        self._keep(changed, sent)
        total = _COUNTS.size + len(held) + sum(own.numel() for own in sent)
        header = _COUNTS.pack(checksum, total) + bytes(differs)
        return torch.cat([torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device), *_on(device, sent)])

    def _take(self, named: list[tuple[str, Tensor]], held: list[Tensor], message_B: Tensor) -> None:
        start = _COUNTS.size + len(named)
        flags = message_B[_COUNTS.size : start].tolist()
        came = [at for at, flag in enumerate(flags) if flag]
        self._keep(came, list(torch.split(message_B[start:], [held[at].numel() for at in came])))
        left = [at for at, flag in enumerate(flags) if not flag]
        differs = _differing([held[at] for at in left], [self._common[at] for at in left])
        moved = [at for at, differ in zip(left, differs, strict=True) if differ]
        _write([(*named[at], common) for at in (*came, *moved) if (common := self._common[at]) is not None])

    def _keep(self, places: Sequence[int], given: list[Tensor]) -> None:
        """What is common at these places <- these bytes."""
        for at, given_B in zip(places, given, strict=True):
            if self._common[at] is None:
                self._common[at] = torch.empty_like(given_B)
        if given:
            torch._foreach_copy_([common for at in places if (common := self._common[at]) is not None], given)


def _passed(group: Group, message_B: Tensor | None, room: int, device: torch.device) -> Tensor:
    """Rank 0's message, on every rank: a broadcast of `room` bytes, and one of what does not fit. Raises: PeerLost."""
    first_B = torch.zeros(room, dtype=torch.uint8, device=device)
    if message_B is not None:
        part = message_B[:room]
        first_B[: part.numel()] = part
    _broadcast(group, first_B)
    _, total = _COUNTS.unpack(bytes(first_B[: _COUNTS.size].tolist()))
    if total <= room:
        return first_B[:total]
    rest_B = torch.zeros(total - room, dtype=torch.uint8, device=device) if message_B is None else message_B[room:]
    rest_B = rest_B.contiguous()
    _broadcast(group, rest_B)
    return torch.cat([first_B, rest_B])


def _broadcast(group: Group, x: Tensor) -> None:
    began = time.perf_counter()
    group.broadcast_(x)
    group.stats.waited_s += time.perf_counter() - began  # the first to wait for a rank 0 that is late


def _lines(named: list[tuple[str, Tensor]]) -> list[str]:
    return [f"buffer {name}: {buffer.dtype} {tuple(buffer.shape)}" for name, buffer in named]


def _bytes_of(buffer: Tensor) -> Tensor:
    """Its values, uint8[B]: a view where they lie together."""
    dense = buffer.detach()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    return dense.resolve_neg().contiguous().view(-1).view(torch.uint8)


def _write(given: list[tuple[str, Tensor, Tensor]]) -> None:
    """Buffers <- bytes, in place: name, buffer, bytes. Raises: ValueError where one cannot be written."""
    into, values = [], []
    for _, buffer, given_B in given:
        real = torch.view_as_real(buffer.detach()) if buffer.is_complex() else buffer.detach()
        into.append(real)
        values.append(given_B.view(real.dtype).view(real.shape))
    try:
        if into:
            torch._foreach_copy_(into, values)
    except RuntimeError:
        for (name, _, _), buffer, value in zip(given, into, values, strict=True):
            _write_one(name, buffer, value)


def _write_one(name: str, buffer: Tensor, value: Tensor) -> None:
    try:
        buffer.copy_(value)
    except RuntimeError as error:
        raise ValueError(
            f"buffer {name}: differs from rank 0's and cannot be written ({error}); make it with .clone(), outside of "
            "torch.inference_mode()"
        ) from error


def _differing(held: list[Tensor], common: Sequence[Tensor | None]) -> list[bool]:
    """Of each buffer: is it another than what is common? On a GPU: waits for it once."""
    pairs = [(_words(a), None if b is None else _words(b).to(a.device)) for a, b in zip(held, common, strict=True)]
    if all(a.device.type == "cpu" for a, _ in pairs):
        return [b is None or not torch.equal(a, b) for a, b in pairs]
    unlike = [None if b is None else (a != b).any() for a, b in pairs]
    here = [found.to(held[-1].device) for found in unlike if found is not None]
    answers = iter(torch.stack(here).tolist() if here else [])
    return [True if found is None else bool(next(answers)) for found in unlike]


def _words(bytes_B: Tensor) -> Tensor:
    """The same bytes eight at a time, where that goes: large constants are compared in every step."""
    fits = bytes_B.numel() % 8 == 0 and bytes_B.storage_offset() % 8 == 0
    return bytes_B.view(torch.int64) if fits else bytes_B


def _on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


def _difference(before: list[str], now: list[str]) -> str:
    """What has changed here since the last step, for a message."""
    changed = [f"{line} is new" for line in now if line not in before] + [
        f"{line} is gone" for line in before if line not in now
    ]
    return f"since the last step {'; '.join(changed[:3])}" if changed else "here none has changed since the last step"
