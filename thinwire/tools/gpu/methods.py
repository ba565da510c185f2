"""Each way to train the model on several ranks, as its users have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from thinwire.optim import (
    SGD,
    Adam,
    Lamb,
    Muon,
    OneBitAdam,
    OneBitLamb,
    OneBitMuon,
    OneBitSGD,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from thinwire.tools.gpu.cases import DEEPSPEED, NOTHING

LR = 3e-4
CLIP = 1.0
PLENTY = 10**6
"""Steps of a warm-up that does not end here."""


class LeftOut(Exception):
    """It cannot be measured here; the message says why. All ranks find the same."""


@dataclass(slots=True)
class Training:
    """One method on one rank. forward: the loss of a batch. settle: steps before any that counts. round_steps: of one

    turn that counts. ours: the optimizer, where it is one of thinwire's. sharded: ranks of a box hold different values.
    """

    parameters: list[nn.Parameter]
    forward: Callable[[Tensor, Tensor], Tensor]
    step: Callable[[], None]
    backward: Callable[[Tensor], Any] = torch.autograd.backward
    settle: int = 2
    round_steps: int = 1
    ours: Any = None
    sharded: bool = False


def make(name: str, model: nn.Module, device: torch.device, batch: int, box: int) -> Training:
    """The method of this name, with ranks_per_host = box. Collective. Raises: LeftOut."""
    if name in OURS:
        kind, options, settle, steps = OURS[name]
        return _ours(model, kind(model.parameters(), model=model, **options), settle, steps)
    if name == NOTHING:
        return _with(model, model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True))
    if name == "deepspeed":
        return _deepspeed(model, batch)
    if name in ("sharded_onebit_adam", "hsdp"):
        mesh = init_device_mesh(device.type, (dist.get_world_size() // box, box), mesh_dim_names=("replicate", "shard"))
        if name == "hsdp":
            _shard(model, mesh)
            return _with(model, model, torch.optim.AdamW(model.parameters(), lr=LR), sharded=True)
        _shard(model, mesh["shard"])
        group = mesh["replicate"].get_group()
        optimizer = OneBitAdam(model.parameters(), model=model, group=group, **COMPRESSED)
        return _ours(model, optimizer, 4, sharded=True)
    return _ddp(name, model)


COMPRESSED: dict[str, Any] = {"lr": LR, "overlap": True, "warmup": 2}
DENSE: dict[str, Any] = {"lr": LR, "overlap": True}


def _zero_one(clipper: int) -> dict[str, Any]:
    schedule = ZeroOneSchedule(dense_steps=1, local_step_scaler=1, local_step_clipper=clipper)
    return {**DENSE, "var_freeze_step": 1, "schedule": schedule}


OURS: dict[str, tuple[Callable[..., Any], dict[str, Any], int, int]] = {
    "onebit_adam": (OneBitAdam, COMPRESSED, 4, 1),
    "onebit_adam_clipped": (OneBitAdam, {**COMPRESSED, "max_grad_norm": CLIP}, 4, 1),
    "onebit_adam_node_first": (OneBitAdam, {**COMPRESSED, "topology": "node_first"}, 4, 1),
    "onebit_lamb": (OneBitLamb, COMPRESSED, 4, 1),
    "zero_one_adam": (ZeroOneAdam, _zero_one(1), 4, 1),
    "zero_one_adam_4": (ZeroOneAdam, _zero_one(4), 8, 4),
    "onebit_muon": (OneBitMuon, DENSE, 3, 1),
    "onebit_sgd": (OneBitSGD, DENSE, 3, 1),
    "adam_int8": (OneBitAdam, {**DENSE, "warmup": PLENTY, "full_exchange": "int8"}, 2, 1),
    "adam_fp32": (OneBitAdam, {**DENSE, "warmup": PLENTY, "full_exchange": "fp32"}, 2, 1),
    "adam_node_first": (Adam, {**DENSE, "topology": "node_first"}, 2, 1),
    "muon": (Muon, DENSE, 2, 1),
    "lamb": (Lamb, DENSE, 2, 1),
    "sgd": (SGD, DENSE, 2, 1),
}
"""What is made, with which options, steps to settle, steps of a turn."""


def _with(model: nn.Module, wrapped: nn.Module, optimizer: Any, settle: int = 2, sharded: bool = False) -> Training:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Training(list(model.parameters()), wrapped, step, settle=settle, sharded=sharded)


def _ours(model: nn.Module, optimizer: Any, settle: int, round_steps: int = 1, sharded: bool = False) -> Training:
    made = _with(model, model, optimizer, settle, sharded)
    made.round_steps, made.ours = round_steps, optimizer
    return made


def _shard(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _ddp(name: str, model: nn.Module) -> Training:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settle = 2
    if name == "ddp_bf16":
        # Not the function itself: DDP knows it by its name, and wants NCCL for it.
        wrapped.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    elif name == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
        settle = 3
    return _with(model, wrapped, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), settle)


def _deepspeed(model: nn.Module, batch: int) -> Training:
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        raise LeftOut(f"DeepSpeed is not installed: pip install deepspeed=={DEEPSPEED}") from None
    if found != DEEPSPEED:
        raise LeftOut(
            f"deepspeed is {found}, and what is said of it is of {DEEPSPEED}: pip install deepspeed=={DEEPSPEED}"
        )
    import deepspeed

    parameters = {"lr": LR, "freeze_step": 2, "cuda_aware": False, "comm_backend_name": "nccl"}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "OneBitAdam", "params": parameters},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return Training(list(model.parameters()), engine, engine.step, backward=engine.backward, settle=4)


def checksum(training: Training) -> int:
    """Of the bits of what this rank holds: equal replicas have equal ones."""
    total = 0
    for parameter in training.parameters:
        held: Any = parameter.detach()
        bits = (held.to_local() if hasattr(held, "to_local") else held).contiguous().view(-1).view(torch.int32)
        total = (total * 31 + int(bits.to(torch.int64).sum())) % (1 << 53)
    return total
