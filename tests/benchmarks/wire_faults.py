"""Two methods that fail in their turn: one rank raises while the other waits for it; a process aborts."""

import os

import torch.distributed as dist

from benchmarks.wire.methods import Method, add_method


class Raises:
    overlap = None

    def __init__(self, setting):
        self.group = setting.process_group

    def settle(self, inputs):
        pass

    def use(self, variant):
        return 1

    def step(self, arguments):
        if dist.get_rank() == 1:
            raise ArithmeticError("rank 1 does not come")
        dist.barrier(self.group)

    def sent_bytes(self):
        return 0

    def parameters(self):
        return []


class Aborts(Raises):
    def step(self, arguments):
        os.abort()


add_method(Method("raises", "raises", "raises", "", 1), __name__, "Raises")
add_method(Method("aborts", "aborts", "aborts", "", 1), __name__, "Aborts")
