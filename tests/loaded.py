"""What processes find that are forked from the server of tests/forked.py: modules, and loops as machine code.

A module that is imported inside a function is named here too, such as torch._dynamo, which the first optimizer imports.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

import torch

from thinwire.optim.kernels.compiled import compile_all

MODULES = (
    "torch._dynamo",
    "torch.distributed.nn.functional",
    "thinwire.workers.session.job",
    "thinwire.workers.forming.group",
    "thinwire.workers.telemetry.history",
    "tests.workers.small_job",
)

torch.set_num_threads(1)  # threads are not forked
for name in MODULES:
    with contextlib.suppress(ImportError):  # the workers' need more than those of comm and optim
        importlib.import_module(name)
compile_all(torch.float32)
gc.collect()
gc.freeze()  # what is here stays: a collection that walks through it takes a fifth of a second, and copies its pages
