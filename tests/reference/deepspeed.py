"""What DeepSpeed's one-bit optimizers do otherwise than their papers, for papers.py: scales, padding, schedules.

Read from microsoft/DeepSpeed: runtime/comm/nccl.py (the exchange), runtime/fp16/onebit/{adam,lamb,zoadam}.py. Settings
of the reference classes that belong to it, beside what is here: bias_correction=False and no floor everywhere;
LAMB: weigh_ratio, skip_unit_coefficients; 0/1 Adam: eps_outside, Fresh.ALWAYS, decay_in_sum, gradient_stage.

With these settings the reference reproduces the classes of DeepSpeed 0.19.6, run in float64, within 1e-12 in x, m and v
for n = 1 to 4: tests/optim/reference/test_deepspeed_traces.py, from numbers recorded in tests/data. Not
0/1 Adam on one rank: there DeepSpeed forgets the gradient of every step of its first stage that is not a variance step.

DeepSpeed's first step() only initialises, so its counter is t + 1 at the t-th update: freeze_step = T there is
warmup = T - 1 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from tests.reference.exchange import Errors, compressed_mean


class DeepSpeedExchange:
    """The exchange of vectors of `lengths`, laid end to end, each compressed by itself, as DeepSpeed does it.

    Each vector is padded to a multiple of n lcm(n, 8). It has one scale on the way to the servers, and one a chunk of
    1/n of it on the way back. The padding counts: it is in the scales and has errors. One worker exchanges nothing.
    lengths: of all tensors (Adam, 0/1 Adam in fp32), of the groups (in fp16), or of one fused vector (LAMB).
    keep_padding: what came back for the padding goes into the next exchange, instead of zero (LAMB's fused buffer).
    """

    def __init__(self, lengths: Sequence[int], num_workers: int, *, keep_padding: bool = False) -> None:
        multiple = num_workers * lcm(num_workers, 8)
        self.worker_units, self.server_units = [], []
        live = []
        at = 0
        for length in lengths:
            padded = -(-length // multiple) * multiple
            chunk = padded // num_workers
            self.worker_units.append((at, at + padded))
            self.server_units += [(at + rank * chunk, at + (rank + 1) * chunk) for rank in range(num_workers)]
            live.append(torch.arange(at, at + length))
            at += padded
        self.live = torch.cat(live)
        self.padded_length = at
        self.keep_padding = keep_padding
        self.errors: dict[str, Errors] = {}
        self.padding: dict[str, Tensor] = {}

    def __call__(self, zs: list[Tensor], memory: str) -> Tensor:
        """The compressed mean of zs; modifies the memory's errors, and its padding where that is kept."""
        if len(zs) == 1:
            return zs[0].clone()
        padding = self.padding.setdefault(memory, zs[0].new_zeros(self.padded_length))
        padded = [padding.index_copy(0, self.live, z) for z in zs]
        errors = self.errors.setdefault(memory, Errors.zeros(padded))
        out = compressed_mean(padded, errors, self.worker_units, self.server_units)
        if self.keep_padding:
            self.padding[memory] = out
        return out[self.live]


@dataclass(frozen=True, slots=True)
class ZeroOneSchedule:
    """The steps t of DeepSpeed's 0/1 Adam. variance: those with a full exchange. sync: those that end a round.

    gradient_stage: the last step of its first stage.
    """

    variance: frozenset[int]
    sync: frozenset[int]
    gradient_stage: int


def zero_one_schedule(
    steps: int,
    var_freeze_step: int,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32678,
    local_step_clipper: int = 16,
) -> ZeroOneSchedule:
    """Count as zoadam.py counts, for steps t = 1..steps. Its counter starts at 1, from the call that initialises."""
    variance, sync = set(), set()
    var_interval, var_counter, local_interval, local_counter = 1, 0, 1, 0
    for t in range(1, steps + 1):
        counter = t + 1
        if t <= var_freeze_step:
            if counter % var_interval == 0:
                variance.add(t)
                var_counter += 1
                if var_counter == var_update_scaler:
                    var_counter, var_interval = 0, 2 * var_interval
        else:
            if counter % local_interval == 0:
                sync.add(t)
            local_counter += 1
            if local_counter == local_step_scaler:
                local_counter, local_interval = 0, min(local_step_clipper, 2 * local_interval)
    return ZeroOneSchedule(frozenset(variance), frozenset(sync), var_freeze_step)
