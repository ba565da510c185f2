"""A shard file, byte by byte: the layout of safetensors, written and read in a stream.

    8 bytes, little-endian: the header's length | header, JSON: {name: {dtype, shape, data_offsets}} | tensors' bytes

Any safetensors reader opens one. The library itself is not used: for a store that is not a local disk it makes the
whole file in memory, twice, and here every byte goes from the snapshot to the store once, through the checksum.
Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from thinwire.workers.checkpoints.manifest import Piece, ShardRecord

CHUNK_BYTES = 4 << 20

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""

DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}


class Tally:
    """Size and sha256 of what passes through."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._sha256 = hashlib.sha256()

    def through(self, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
        """The same chunks, counted."""
        for chunk in chunks:
            view = memoryview(chunk)
            self.size_bytes += view.nbytes
            self._sha256.update(view)
            yield view

    @property
    def sha256(self) -> str:
        """Of all that has passed, in hex."""
        return self._sha256.hexdigest()


def chunks(pieces: Sequence[tuple[Piece, Tensor]]) -> Iterator[bytes | memoryview]:
    """The bytes of a shard. pieces: flat tensors on the CPU, which are not copied."""
    yield _header(pieces)
    for _, piece_N in pieces:
        data = _bytes_of(piece_N)
        for start in range(0, data.nbytes, CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def read(stream: BinaryIO) -> Iterator[bytes]:
    """A file in chunks, from where the stream stands to its end."""
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def take_in(stream: BinaryIO, record: ShardRecord, whole: Mapping[str, Tensor]) -> None:
    """Read a shard into its places in whole tensors, on any device; where the bytes lie follows from the record.

    Modifies: `whole`, whose values are contiguous; undefined after a failure. Raises: ValueError for a file that is not
    the one of the record.
    """
    parts = [(whole[piece.tensor].view(-1)[piece.start : piece.stop]) for piece in record.pieces]
    header_bytes = record.size_bytes - sum(part.nbytes for part in parts)
    tally = Tally()
    source = _Reader(tally.through(read(stream)))
    if header_bytes < 8 or 8 + int.from_bytes(source.take(8), "little") != header_bytes:
        raise ValueError(f"{record.file} has another header than its manifest says")
    source.take(header_bytes - 8)
    for part in parts:
        landing = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
        source.fill(_bytes_of(landing))
        if landing is not part:
            part.copy_(landing)
    source.drain()
    check(record, tally)


def check(record: ShardRecord, tally: Tally) -> None:
    """Raises: ValueError where what has passed is not the file of the record."""
    if tally.size_bytes != record.size_bytes:
        raise ValueError(f"{record.file} has {tally.size_bytes} bytes, its manifest says {record.size_bytes}")
    if tally.sha256 != record.sha256:
        raise ValueError(f"{record.file} does not match its checksum")


class _Reader:
    """Bytes by count, out of chunks as they come. A stream that ends early ends with zeros: its checksum differs."""

    def __init__(self, chunks: Iterator[memoryview]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def fill(self, target: memoryview) -> None:
        at = 0
        while at < target.nbytes:
            if not self._rest.nbytes:
                self._rest = next(self._chunks, memoryview(b""))
                if not self._rest.nbytes:
                    return
            part = self._rest[: target.nbytes - at]
            target[at : at + part.nbytes] = part
            at, self._rest = at + part.nbytes, self._rest[part.nbytes :]

    def take(self, count: int) -> bytes:
        taken = bytearray(count)
        self.fill(memoryview(taken))
        return bytes(taken)

    def drain(self) -> None:
        for _ in self._chunks:
            pass


def _header(pieces: Sequence[tuple[Piece, Tensor]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {piece.tensor: f"{piece.start}:{piece.stop}" for piece, _ in pieces}}
    at = 0
    for piece, piece_N in pieces:
        end = at + piece_N.nbytes
        header[piece.tensor] = {"dtype": DTYPES[piece_N.dtype], "shape": [piece_N.numel()], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor_N: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    data: memoryview = tensor_N.view(torch.uint8).numpy().data
    return data
