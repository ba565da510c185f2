"""What ranks compare: whether all mean the same by the bytes that they exchange, and texts that differ in length.

Facts are compared once, before the first exchange. Every rank sends FACTS_BYTES of them, whatever it has to say, so
that it also shows ranks that know other facts, more of them, or another version of thinwire. A fact is a name
and a value that a reader understands; a long value ends in its checksum. A rank that never comes is found by the
group's time-out.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from thinwire.comm.errors import WireMismatch
from thinwire.comm.layout import Buckets, VectorLayout
from thinwire.comm.protocol import Codec, Group

WIRE_VERSION = 2
"""Changes where the meaning of bytes on the wire does."""
FACTS_BYTES = 1024
"""A rank's text. The same in every version: ranks of two versions must be able to read that they are."""
_VALUE_BYTES = 80


def gather_texts(group: Group, own: bytes, device: torch.device) -> list[bytes]:
    """The texts of all ranks, by rank. device: of the group's tensors. Collective, twice. Raises: PeerLost."""
    lengths = _gather(group, torch.tensor([len(own)], dtype=torch.int64, device=device).view(torch.uint8))
    sizes = lengths.view(torch.int64).flatten().tolist()
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device="cpu")
    if own:
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = _gather(group, padded.to(device)).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def texts_if_they_differ(group: Group, own: str, device: torch.device) -> list[str] | None:
    """The texts of all ranks, by rank; None where all are alike, at 16 bytes a rank. Collective. Raises: PeerLost."""
    return TextsCompared(group, own, device).differing()


class TextsCompared:
    """texts_if_they_differ() in two halves: other work may lie between them. Collective, as differing() is."""

    def __init__(self, group: Group, own: str, device: torch.device) -> None:
        self._group, self._text = group, own.encode()
        known = torch.tensor([len(self._text), zlib.crc32(self._text)], dtype=torch.int64, device=device)
        own_B = known.view(torch.uint8)
        self._all_nB = torch.zeros((group.size, own_B.numel()), dtype=torch.uint8, device=device)
        self._pending = group.start_all_gather(self._all_nB, own_B)

    def differing(self) -> list[str] | None:
        """The texts of all ranks, by rank; None where all are alike. Raises: PeerLost."""
        self._pending.wait()
        everyone = self._all_nB.view(torch.int64).tolist()
        if all(theirs == everyone[0] for theirs in everyone):
            return None
        found = gather_texts(self._group, self._text, self._all_nB.device)
        return [theirs.decode(errors="replace") for theirs in found]


def _gather(group: Group, own_B: Tensor) -> Tensor:
    everyone_nB = torch.zeros((group.size, own_B.numel()), dtype=torch.uint8, device=own_B.device)
    group.all_gather(everyone_nB, own_B)
    return everyone_nB


def in_words(ranks: Sequence[int], one: str, many: str) -> str:
    """The subject of a sentence, and its verb: rank 3 is; ranks 0, 1, 2 are."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown} {one}" if len(ranks) == 1 else f"ranks {shown} {many}"


def agree(group: Group, facts: Mapping[str, int | str], like: Tensor) -> None:
    """All ranks compare facts, and the versions of wire and package, and dtype and kind of device of `like`.

    Collective: 1 KiB a rank. Raises: PeerLost; ValueError where the facts do not fit; WireMismatch, alike on every
    rank: the first fact in which ranks differ, and who has what.
    """
    own = {
        "wire version": WIRE_VERSION,
        "thinwire version": _package_version(),
        "dtype": str(like.dtype).removeprefix("torch."),
        "device": like.device.type,
        **facts,
    }
    own_B = torch.zeros(FACTS_BYTES, dtype=torch.uint8, device="cpu")
    text = _written(own)
    own_B[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    all_nB = torch.zeros((group.size, FACTS_BYTES), dtype=torch.uint8, device=like.device)
    group.all_gather(all_nB, own_B.to(like.device))
    everyone = [_read(bytes(row.tolist())) for row in all_nB.cpu()]
    refuse_differing(everyone)


def exchange_facts(layout: VectorLayout, codec: Codec, buckets: Buckets | None = None) -> dict[str, int | str]:
    """What two ranks must have alike to read each other's rows."""
    facts: dict[str, int | str] = {
        "elements": layout.numel,
        "live elements": layout.num_live,
        "live runs": len(layout.live),
        "segments": len(layout.segments),
        "layout": f"#{layout.fingerprint():08x}",
        "codec": codec_text(codec),
    }
    if buckets is not None:
        facts |= {"buckets": len(buckets), "cut": f"#{buckets.fingerprint():08x}"}
    return facts


def refuse_differing(everyone: list[dict[str, str]]) -> None:
    """Facts of each rank. Raises: WireMismatch: the first fact that is not alike, and which ranks have which value."""
    names = dict.fromkeys(name for facts in everyone for name in facts)
    for name in names:
        having: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            having.setdefault(facts.get(name, "none"), []).append(rank)
        if len(having) > 1:
            sides = ", ".join(f"{in_words(ranks, 'has', 'have')} {name} {value}" for value, ranks in having.items())
            raise WireMismatch(
                f"{sides}: all ranks must build the same model with the same settings and the same version of thinwire"
            )


def codec_text(codec: Codec) -> str:
    """Name and settings, as sign:4096:l2; of a codec that is no dataclass the name and the fingerprint."""
    if dataclasses.is_dataclass(codec):
        settings = [str(getattr(codec, field.name)) for field in dataclasses.fields(codec)]
        return ":".join([codec.name, *settings])
    return f"{codec.name} #{codec.fingerprint():08x}"


def _written(facts: Mapping[str, int | str]) -> bytes:
    lines = []
    for name, value in facts.items():
        text = " ".join(str(value).split())
        if len(text.encode()) > _VALUE_BYTES:
            text = f"{text.encode()[: _VALUE_BYTES - 16].decode(errors='ignore')}... #{zlib.crc32(text.encode()):08x}"
        lines.append(f"{name}={text}")
    written = "\n".join(lines).encode()
    if len(written) > FACTS_BYTES:
        raise ValueError(f"{len(facts)} facts of {len(written)} bytes: at most {FACTS_BYTES} are compared")
    return written


def _read(row: bytes) -> dict[str, str]:
    text = row.rstrip(b"\0").decode(errors="replace")
    pairs = (line.partition("=") for line in text.split("\n") if line)
    return {name: value for name, _, value in pairs}


def _package_version() -> str:
    try:
        return version("thinwire")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"
