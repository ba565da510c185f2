"""What does sending cost the processor, whatever the wire? Timed over the loopback, where the wire is memory.

A rank sends, receives and adds up; each is work of its cores, and grows with the bytes. Over the loopback nothing else
takes time, so a collective's seconds divided by the bytes that a rank sends are that work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from thinwire.comm.groups.distributed import TorchGroup
from thinwire.comm.wire.step_time import Transport

ELEMENTS = 1 << 22
"""Of the vector that is sent: 16 MB in float32, larger than caches."""
REPEATS = 3


def measure(group: TorchGroup) -> Transport:
    """Time it. Collective, about a second; every rank's own figures, of which the slowest rank's count."""
    n = group.size
    vector_N = torch.zeros(ELEMENTS)
    half_N = torch.zeros(ELEMENTS, dtype=torch.bfloat16)
    rows_nB, received_nB = (torch.zeros((n, ELEMENTS // 8 // n), dtype=torch.uint8) for _ in range(2))

    def both_phases() -> None:
        group.all_to_all(received_nB, rows_nB)
        group.all_gather(received_nB, rows_nB[0])

    return Transport(
        all_reduce_32=_per_byte_s(group, lambda: group.start_sum_(vector_N).wait()),
        all_reduce_16=_per_byte_s(group, lambda: group.start_sum_(half_N).wait()),
        bits=_per_byte_s(group, both_phases),
    )


def _per_byte_s(group: TorchGroup, collective: Callable[[], None]) -> float:
    collective()  # to have all ranks here and the windows of TCP open
    sent_before, seconds = group.stats.sent_bytes, []
    for _ in range(REPEATS):
        began = time.perf_counter()
        collective()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * REPEATS / (group.stats.sent_bytes - sent_before)
