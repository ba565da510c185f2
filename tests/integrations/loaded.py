"""What ranks of these tests find beside tests/loaded.py: each imported these libraries, and ran for less than that."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

from tests.integrations.hugging_face import OFFLINE

NAMES = {
    "accelerate": (),
    "datasets": (),
    "lightning": (),
    "peft": (),
    "transformers": ("GPT2LMHeadModel", "Trainer"),
    "trl": ("DPOTrainer", "SFTTrainer"),
}
"""A library, and what it imports once it is asked for."""

os.environ.update(OFFLINE)
for library, names in NAMES.items():
    with contextlib.suppress(ImportError):
        module = importlib.import_module(library)
        for name in names:
            getattr(module, name)
gc.collect()
gc.freeze()
