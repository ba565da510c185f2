"""What is compared of a parameter in bfloat16 or float16 with its master in float32, and when the answer is there."""

from __future__ import annotations

import torch
from torch import Tensor

FEW = 8
"""Elements of each that most steps look at, at least, where it has so many rows."""


class Answer:
    """A bool, 0-dim, that comes to the host by itself from a CPU or a GPU.

    of_all: of a look at all values, which have been taken.
    """

    def __init__(self, found: Tensor, of_all: bool) -> None:
        self.of_all = of_all
        self._host: Tensor | None = found if found.device.type == "cpu" else None
        self._event: torch.cuda.Event | None = None
        if found.device.type == "cuda":
            self._host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            self._host.copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(found.device))

    def there(self) -> bool | None:
        """It; None where it has not come yet."""
        if self._host is None or (self._event is not None and not self._event.query()):  # type: ignore[no-untyped-call]
            return None
        return bool(self._host.numpy())


def bits(x: Tensor) -> Tensor:
    """Of 16 bits each, by which NaN is like itself."""
    return x.view(torch.int16)


def where_true(master: Tensor, param: Tensor) -> Tensor:
    """The master where the parameter is its rounded value, bit for bit, else the parameter. New, in its shape."""
    same = bits(master.to(param.dtype)) == bits(param)
    return torch.where(same, master, param.to(master.dtype))


def few(x: Tensor) -> Tensor:
    """A view of some elements: of rows that are evenly spread the one in the middle."""
    if not x.dim():
        return x.view(1)
    where: list[slice | int] = [size // 2 for size in x.shape]
    where[0] = slice(None, None, max(1, len(x) // FEW))
    return x[tuple(where)]
