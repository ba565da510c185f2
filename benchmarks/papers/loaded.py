"""What ranks of the papers' workloads find when they are forked (ranks.py): imports, and loops as machine code."""

from __future__ import annotations

import gc
import importlib

import torch

from thinwire.optim.kernels.compiled import compile_all

NAMES = {
    "datasets": (),
    "sklearn.datasets": (),
    "sklearn.metrics": (),
    "scipy.stats": (),
    "torch._dynamo": (),
    "thinwire.train": ("session",),
    "transformers": (
        *("AutoTokenizer", "BertForPreTraining", "BertForQuestionAnswering", "BertForSequenceClassification"),
        *("BertTokenizer", "DataCollatorForLanguageModeling", "GPT2LMHeadModel", "ResNetForImageClassification"),
    ),
}
"""A module, and what it imports once it is asked for."""

torch.set_num_threads(1)  # threads are not forked
for module, names in NAMES.items():
    for name in names or ("__name__",):
        getattr(importlib.import_module(module), name)
compile_all(torch.float32)
gc.collect()
gc.freeze()
