"""The link that a message between two ranks takes: inside a box, or the network between boxes.

A box is what shares one network: the same boot of the same machine and the same network namespace. So two containers
with networks of their own on one machine are two boxes, and so are the hosts of the lab (thinwire/tools/lab).
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from thinwire.comm.protocol import Group

_ID_BYTES, _NAME_BYTES = 8, 56
_BOOT_ID, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")


class LinkClass(StrEnum):
    """What a message crosses."""

    INSIDE = "inside a box"
    BETWEEN = "between boxes"


@dataclass(frozen=True, slots=True)
class Box:
    """One end of the network. id: 16 hexadecimal digits, equal where two ranks share it. name: the host's, to read."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Boxes:
    """The box of each rank of a group, in order of rank."""

    of_rank: tuple[Box, ...]

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.of_rank)

    @property
    def ids(self) -> tuple[str, ...]:
        """Each box once, in the order of its first rank."""
        return tuple(dict.fromkeys(box.id for box in self.of_rank))

    def link(self, one: int, other: int) -> LinkClass:
        """The class of the link between two ranks."""
        return LinkClass.INSIDE if self.of_rank[one].id == self.of_rank[other].id else LinkClass.BETWEEN

    def ranks_in(self, box_id: str) -> tuple[int, ...]:
        """The ranks of a box, ascending; none where it is unknown."""
        return tuple(rank for rank, box in enumerate(self.of_rank) if box.id == box_id)


@runtime_checkable
class Boxed(Protocol):
    """A Group whose ranks were given their boxes."""

    @property
    def box(self) -> Box | None:
        """This rank's; None: that of its process."""


def named_box(name: str) -> Box:
    """The box of this name: where somebody knows better than the network namespace which ranks are near each other."""
    return Box(_id_of(name), name)


def this_box() -> Box:
    """The box of this process."""
    name = socket.gethostname()
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    namespace = os.stat(_NAMESPACE).st_ino if _NAMESPACE.exists() else 0
    # Without a boot id (no Linux) the host's name has to tell machines apart.
    identity = f"{boot or name}:{namespace}"
    return Box(_id_of(identity), name)


def exchange_boxes(group: Group, own: Box | None = None, device: torch.device | str = "cpu") -> Boxes:
    """Learn every rank's box. Collective, one small all_gather. own: this rank's, None for what the group was given.

    Where it was given nothing it is this process's. Raises: PeerLost.
    """
    given = group.box if isinstance(group, Boxed) else None
    own = own or given or this_box()
    name = own.name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    row_B = torch.frombuffer(bytearray(bytes.fromhex(own.id) + name), dtype=torch.uint8).to(device)
    all_nB = torch.zeros((group.size, row_B.numel()), dtype=torch.uint8, device=device)
    group.all_gather(all_nB, row_B)
    rows = [bytes(row) for row in all_nB.tolist()]
    return Boxes(
        tuple(Box(row[:_ID_BYTES].hex(), row[_ID_BYTES:].rstrip(b"\0").decode(errors="replace")) for row in rows)
    )


def _id_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * _ID_BYTES]
