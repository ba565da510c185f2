"""What ranks of the Hugging Face tests share: tiny models and data made on the spot, and their environment."""

from __future__ import annotations

import os
from typing import Any

VOCABULARY = 32
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
"""No hub, and no more than errors in logs: the environment, before any of these libraries is imported."""


def prepare_environment(rank: int, size: int) -> None:
    """What torchrun would set, and no hub. Before transformers or accelerate are imported."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), OMP_NUM_THREADS="1"
    )
    os.environ.update(OFFLINE)


def small_gpt(seed: int, **config: Any) -> Any:
    """Two layers, random weights, tied embeddings."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, **config))


def sequences(count: int, length: int = 12) -> list[dict[str, Any]]:
    """Arithmetic progressions: the next number follows from the two before."""
    import torch

    rows = [(torch.arange(length) * (1 + i % 5) + i) % VOCABULARY for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]
