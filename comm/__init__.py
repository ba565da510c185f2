"""How bytes move: groups of ranks, codecs, the compressed all-reduce and its error memory; no optimizers.

Each name is imported when it is first asked for, so that what lies below and needs no torch, the lab, starts without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.comm.default import default_reducer
    from thinwire.comm.errors import CallMismatch, CommError, NonFiniteInput, PeerLost, WireMismatch
    from thinwire.comm.exchange.memory import ErrorMemory
    from thinwire.comm.exchange.reducer import Reducer
    from thinwire.comm.groups.blocking import SoloGroup
    from thinwire.comm.groups.distributed import TorchGroup
    from thinwire.comm.groups.nccl import prepare_nccl
    from thinwire.comm.groups.threads import ThreadGroup, run_threads
    from thinwire.comm.keeps import Keeps
    from thinwire.comm.layout import VectorLayout
    from thinwire.comm.protocol import Group, Stats
    from thinwire.comm.thresholded import Thresholded

__all__ = [
    "CallMismatch",
    "CommError",
    "ErrorMemory",
    "Group",
    "Keeps",
    "NonFiniteInput",
    "PeerLost",
    "Reducer",
    "SoloGroup",
    "Stats",
    "ThreadGroup",
    "Thresholded",
    "TorchGroup",
    "VectorLayout",
    "WireMismatch",
    "default_reducer",
    "prepare_nccl",
    "run_threads",
]

_MODULES = {
    "default": ("default_reducer",),
    "errors": ("CallMismatch", "CommError", "NonFiniteInput", "PeerLost", "WireMismatch"),
    "exchange.memory": ("ErrorMemory",),
    "exchange.reducer": ("Reducer",),
    "groups.blocking": ("SoloGroup",),
    "groups.distributed": ("TorchGroup",),
    "groups.nccl": ("prepare_nccl",),
    "groups.threads": ("ThreadGroup", "run_threads"),
    "keeps": ("Keeps",),
    "layout": ("VectorLayout",),
    "protocol": ("Group", "Stats"),
    "thresholded": ("Thresholded",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return found
