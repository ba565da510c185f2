"""What launches a kernel: CuPy on a GPU, an emulator in tests. The code above knows this protocol only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

THREADS = 256
"""Threads of a block, of every kernel of ours: as the sources say."""

Array = np.ndarray[Any, Any]
Argument = Tensor | np.generic | Array
"""Of a kernel: a tensor is the address of its first element; a number, and an array of one structure, go by value."""
FORMS = {"u4": "I", "i4": "i", "u8": "Q", "i8": "q", "f4": "f", "f8": "d"}
"""What struct calls each type of numbers that kernels are given."""


class Launcher(Protocol):
    """The kernels of one source."""

    def launch(
        self, kernel: str, blocks: int, shared_bytes: int, arguments: Sequence[Argument], reads: Sequence[Tensor] = ()
    ) -> None:
        """Start it with so many blocks of THREADS threads, behind all that was started before; does not wait for it.

        shared_bytes: of memory that the threads of a block share. reads: tensors whose addresses are inside of an
        argument. Tensors are contiguous, and stay as they are until what is started here has run.
        """

    def prepared(
        self, kernel: str, blocks: int, shared_bytes: int, arguments: Sequence[Argument], reads: Sequence[Tensor] = ()
    ) -> Callable[[], None]:
        """What starts it, as often as it is called, from any thread: with the addresses and numbers of now."""
        return partial(self.launch, kernel, blocks, shared_bytes, arguments, reads)


Load = Callable[[str], Launcher]
"""Makes the launcher of a source, given its text."""

Structure = np.dtype[Any]
"""A structure of C, field by field as numpy names it."""
