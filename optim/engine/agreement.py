"""Do all ranks optimize the same model? Asked before a parameter is touched, so that a mismatch changes nothing."""

from __future__ import annotations

import zlib
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.errors import WireMismatch
from thinwire.comm.groups.texts import gather_texts
from thinwire.comm.protocol import Group


def describe(param_groups: list[dict[str, Any]]) -> list[str]:
    """A line for each parameter: its place, dtype and shape; not its name or device, in which ranks may differ."""
    return [
        f"parameter {index} of group {at}: {param.dtype} {tuple(param.shape)}"
        for at, group in enumerate(param_groups)
        for index, param in enumerate(group["params"])
    ]


def refuse_other_models(group: Group, lines: list[str], device: torch.device) -> None:
    """Compare descriptions over all ranks: 16 bytes a rank, and the texts where they differ. Collective.

    Raises: WireMismatch naming the first line that differs and both sides, alike on every rank; PeerLost.
    """
    text = "\n".join(lines).encode()
    own = torch.tensor([len(text), zlib.crc32(text)], dtype=torch.int64, device=device)
    everyone = _gather(group, own.view(torch.uint8)).view(torch.int64).tolist()
    if all(theirs == everyone[0] for theirs in everyone):
        return
    texts = [theirs.decode() for theirs in gather_texts(group, text, device)]
    other = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
    for first, theirs in zip_longest(texts[0].split("\n"), texts[other].split("\n"), fillvalue="no such parameter"):
        if first != theirs:
            raise WireMismatch(
                f"rank 0 has {first}; rank {other} has {theirs}. All ranks must build the same model, with the same "
                "parameter groups and settings; nothing was changed"
            )


def _gather(group: Group, own_B: Tensor) -> Tensor:
    everyone_nB = torch.zeros((group.size, own_B.numel()), dtype=torch.uint8, device=own_B.device)
    group.all_gather(everyone_nB, own_B)
    return everyone_nB
