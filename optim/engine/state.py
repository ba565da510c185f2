"""What an optimizer remembers, each vector with its kind: the kind says what a checkpoint and a resize do to it.

A vector is a field of the state, or a property where it is made when asked for.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, get_type_hints

from torch import Tensor

from thinwire.comm.exchange.error_feedback import ErrorMemory


class Kind(StrEnum):
    """REPLICATED: bit-equal on every rank, saved. RESIDUAL: error memory, saved as R. SCRATCH: worth nothing.

    LOCAL: a rank's own since the last sync; saving forces a sync (prepare_to_save), after which it is worth nothing.
    """

    REPLICATED = "replicated"
    LOCAL = "local"
    RESIDUAL = "residual"
    SCRATCH = "scratch"


Replicated = Annotated[Tensor, Kind.REPLICATED]
Local = Annotated[Tensor, Kind.LOCAL]
Residual = Annotated[ErrorMemory, Kind.RESIDUAL]
Scratch = Annotated[Tensor, Kind.SCRATCH]


def replicated(state: object) -> dict[str, Tensor]:
    """The replicated vectors of a state, by field name; not copies."""
    return {name: getattr(state, name) for name in _names(state, Kind.REPLICATED)}


def slots(state: object) -> dict[str, ErrorMemory]:
    """The error memory of a state, by field name."""
    return {name: getattr(state, name) for name in _names(state, Kind.RESIDUAL)}


def _names(state: object, kind: Kind) -> list[str]:
    made = {name: found.fget for name, found in vars(type(state)).items() if isinstance(found, property)}
    hints: dict[str, Any] = get_type_hints(type(state), include_extras=True)
    hints |= {name: get_type_hints(get, include_extras=True).get("return") for name, get in made.items() if get}
    return [name for name, hint in hints.items() if kind in getattr(hint, "__metadata__", ())]
