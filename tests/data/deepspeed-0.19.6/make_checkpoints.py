"""What DeepSpeed's engine saves, of a model of two layers: run with DeepSpeed 0.19.6 on CPUs, as README.md says.

DS_ACCELERATOR=cpu python make_checkpoints.py FOLDER
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import numpy
import torch
import torch.multiprocessing as mp

CASES = {  # name: ranks, steps, the config
    "onebit-adam": (1, 6, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 4}}}),
    "onebit-adam-warm": (1, 3, {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 100}}}),
    "onebit-adam-bf16": (
        1,
        3,
        {"bf16": {"enabled": True}, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2, "freeze_step": 100}}},
    ),
    "onebit-lamb-warm": (1, 3, {"optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-2, "freeze_step": 100}}}),
    "zero-one-adam": (1, 3, {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 1e-2, "var_freeze_step": 100}}}),
    "adamw": (1, 3, {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}),
    "adamw-zero1": (
        2,
        3,
        {
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        },
    ),
    "adamw-zero2": (
        2,
        3,
        {
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        },
    ),
}


def main(rank: int, name: str, folder: str) -> None:
    ranks, steps, config = CASES[name]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    sys.modules["cupy"] = types.ModuleType("cupy")  # imported by its optimizers; one rank compresses nothing
    sys.modules["cupy"].__dict__.update(vars(numpy))
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    model.register_buffer("seen", torch.arange(2.0))
    decay = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    config = {"train_micro_batch_size_per_gpu": 4, **config}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    torch.manual_seed(1 + rank)
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        loss = engine(torch.randn(4, 5, dtype=dtype)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, tag=name, save_latest=False)
    if "zero_optimization" in config:  # what DeepSpeed itself says is in its partitions
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found = {
            key: {"master": safe_get_full_fp32_param(p)}
            | {moment: safe_get_full_optimizer_state(p, moment) for moment in ("exp_avg", "exp_avg_sq")}
            for key, p in engine.module.named_parameters()
        }
        if rank == 0:
            torch.save(found, Path(folder) / name / "said.pt")


if __name__ == "__main__":
    where = sys.argv[1]
    wanted = sys.argv[2:] or list(CASES)
    for port, name in enumerate(wanted, 29610):
        os.environ.setdefault("MASTER_PORT", str(port))
        if CASES[name][0] == 1:
            main(0, name, where)
        else:
            os.environ["MASTER_PORT"] = str(port)
            mp.spawn(main, (name, where), nprocs=CASES[name][0])
        print("==", name, flush=True)
    (Path(where) / "zero_to_fp32.py").unlink(missing_ok=True)
