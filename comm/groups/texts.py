"""Every rank's text on every rank: how settings and standings, which differ in length, are compared."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from thinwire.comm.protocol import Group


def gather_texts(group: Group, own: bytes, device: torch.device) -> list[bytes]:
    """The texts of all ranks, by rank. device: of the group's tensors. Collective, twice. Raises: PeerLost."""
    lengths = _gather(group, torch.tensor([len(own)], dtype=torch.int64, device=device).view(torch.uint8))
    sizes = lengths.view(torch.int64).flatten().tolist()
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    if own:
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = _gather(group, padded.to(device)).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def texts_if_they_differ(group: Group, own: str, device: torch.device) -> list[str] | None:
    """The texts of all ranks, by rank; None where all are alike, at 16 bytes a rank. Collective. Raises: PeerLost."""
    text = own.encode()
    known = torch.tensor([len(text), zlib.crc32(text)], dtype=torch.int64, device=device)
    everyone = _gather(group, known.view(torch.uint8)).view(torch.int64).tolist()
    if all(theirs == everyone[0] for theirs in everyone):
        return None
    return [theirs.decode(errors="replace") for theirs in gather_texts(group, text, device)]


def _gather(group: Group, own_B: Tensor) -> Tensor:
    everyone_nB = torch.zeros((group.size, own_B.numel()), dtype=torch.uint8, device=own_B.device)
    group.all_gather(everyone_nB, own_B)
    return everyone_nB
