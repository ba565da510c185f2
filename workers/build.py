"""From a spec to what trains: model, optimizer, data, learning rate. Each the same on every rank.

The size of buckets is what suits the network at a run's first start; then the same at every restart: scales end where
buckets do, so with another size a restarted run would go on from the same state, but not bit-equal.

    buckets.json    in the run's folder, by rank 0: the size, the network it was chosen for, ranks and elements
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.bucket_size import measured_bucket
from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.protocol import Group
from thinwire.contract.files import write_whole
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import BertRecipe, Digits, GptRecipe, PythonStdlib, ResnetRecipe, TextFile, TrainSpec
from thinwire.optim import SGD, Adam, FlatOptimizer, Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.kernels.compiled import compile_all
from thinwire.optim.variance.freezing import FreezingOptimizer
from thinwire.workers.data.batches import Batches, Data
from thinwire.workers.data.corpus import DataError, load_corpus
from thinwire.workers.data.digits import digit_images
from thinwire.workers.data.masked import masked_bytes
from thinwire.workers.data.windows import next_bytes
from thinwire.workers.recipes import REGISTRY as RECIPES
from thinwire.workers.replicas import ranks_that_differ

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that one rank trains with. validation: inputs and targets on the device."""

    spec: TrainSpec
    group: Group
    device: torch.device
    model: nn.Module
    optimizer: FlatOptimizer[Any]
    data: Data
    validation: tuple[Tensor, Tensor]

    @property
    def batches(self) -> Batches:
        """What steps train on."""
        return self.data.batches

    @property
    def registered(self) -> None:
        """Nothing but model and optimizer is part of a recipe's state."""

    def global_batch(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return self.spec.global_batch

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        return learning_rate(self.spec, step)


def build(spec: TrainSpec, group: Group, device: torch.device, run_dir: Path | None = None) -> Training:
    """Build it. Collective: the optimizer compares layouts and sends rank 0's parameters to all.

    run_dir: where the size of buckets is kept, so that a restart has the same.
    Raises: DataError, ValueError for what the spec cannot have; PeerLost, WireMismatch.
    """
    data = load_data(spec)
    refuse_other_data(group, data, device)
    inputs, targets = data.validation
    model = RECIPES[spec.recipe.name](spec.recipe, spec.seed).to(device, PRECISIONS[spec.precision])
    numel = sum(parameter.numel() for parameter in model.parameters())
    optimizer = OPTIMIZERS[spec.optimizer.name](
        model.parameters(),
        group=group,
        overlap=spec.overlap,
        bucket_elements=spec.bucket_elements or kept_bucket(run_dir, group, numel, device),
        **_hyper(spec),
    )
    return Training(spec, group, device, model, optimizer, data, (inputs.to(device), targets.to(device)))


def load_data(spec: TrainSpec) -> Data:
    """Read the data of a spec, whole, into memory, in the form that its recipe trains on. Raises: DataError."""
    sizes = spec.global_batch, spec.evaluation.windows, spec.seed
    match spec.recipe, spec.data:
        case GptRecipe(context=context), PythonStdlib() | TextFile() as text:
            return next_bytes(load_corpus(text), context, *sizes)
        case BertRecipe(context=context), PythonStdlib() | TextFile() as text:
            return masked_bytes(load_corpus(text), context, *sizes)
        case ResnetRecipe(shift=shift), Digits(validation_fraction=fraction):
            return digit_images(fraction, shift, *sizes)
    raise ValueError(f"no data for {spec.recipe!r} from {spec.data!r}; a spec that was validated has none such")


def rehearse(training: Training) -> None:
    """Do once, alone, what is slow the first time: compiling, or loading what was compiled, and a backward.

    For a newcomer, before its peers wait for it. Its gradient is thrown away. Local.
    """
    optimizer = training.optimizer
    compile_all(optimizer.space.p_N.dtype)
    inputs, targets = training.batches.local(1, 0, training.spec.global_batch)  # the share of one of so many ranks
    with optimizer.no_sync():
        training.model(inputs.to(training.device), targets.to(training.device)).backward()
    optimizer.zero_grad()


def refuse_other_data(group: Group, data: Data, device: torch.device) -> None:
    """Compare what ranks train on. Collective. Raises: DataError, alike on every rank; PeerLost."""
    strangers = ranks_that_differ(group, bytes.fromhex(data.digest), device)
    if strangers:
        raise DataError(
            f"the data of rank {', '.join(map(str, strangers))} is not rank 0's (here, rank {group.rank}: "
            f"{data.description}); give all nodes the same files, Python and packages"
        )


def learning_rate(spec: TrainSpec, step: int) -> float:
    """The rate of step `step` (from 1): linear to the peak over the warm-up, then cosine to final_fraction of it."""
    peak, warmup = spec.optimizer.lr, spec.lr_warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if spec.lr_schedule.decay == "constant":
        return peak
    progress = (step - warmup) / max(1, spec.steps - warmup)
    floor = spec.lr_schedule.final_fraction
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def _hyper(spec: TrainSpec) -> dict[str, Any]:
    """The hyperparameters of the job file, under the constructors' names, and the run's steps where they are needed."""
    hyper = spec.optimizer.model_dump(exclude={"name"})
    if "warmup" in hyper:
        hyper["warmup"] = spec.warmup_steps or "auto"
        hyper |= {"total_steps": spec.steps, "lr_warmup_steps": spec.lr_warmup_steps}
    if "var_freeze" in hyper:
        del hyper["var_freeze"]
        hyper["var_freeze_step"] = spec.var_freeze_step
        # A rate that rises to the very end leaves the last step for what follows the freeze.
        hyper |= {"total_steps": spec.steps, "lr_warmup_steps": min(spec.lr_warmup_steps, spec.steps - 1)}
    return hyper


def take_settings(training: Training) -> None:
    """The hyperparameters of the job file, in place of those that a checkpoint of another job has brought. Local."""
    optimizer, spec = training.optimizer, training.spec
    hyper = _hyper(spec)
    for group in optimizer.param_groups:
        group.update({name: value for name, value in hyper.items() if name in group})
    if isinstance(optimizer, FreezingOptimizer) and optimizer.stability is not None:
        optimizer.stability = replace(
            optimizer.stability,
            beta2=optimizer.beta2,
            total_steps=hyper["total_steps"],
            lr_warmup_steps=hyper["lr_warmup_steps"],
        )


OPTIMIZERS: dict[str, Callable[..., FlatOptimizer[Any]]] = {
    "onebit_adam": OneBitAdam,
    "onebit_lamb": OneBitLamb,
    "zero_one_adam": ZeroOneAdam,
    "adam": Adam,
    "lamb": Lamb,
    "sgd": SGD,
}
"""By `optimizer.name` of the spec."""

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What parameters are made of, by `precision` of the spec."""


def kept_bucket(run_dir: Path | None, group: Group, numel: int, device: torch.device) -> int:
    """Elements of a bucket, alike on every rank. Collective. run_dir: None: not kept, and the default.

    Raises: PeerLost; OSError on rank 0 where the folder cannot be written.
    """
    if run_dir is None or group.size == 1:
        return DEFAULT_BUCKET
    file = RunFolder(run_dir).buckets
    known = torch.tensor([_kept_size(file, group.size, numel) if group.rank == 0 else 0], device=device)
    group.broadcast_(known)
    if int(known):
        return int(known)
    size, network = measured_bucket(group, numel, device)
    if group.rank == 0 and network is not None:
        logger.info(
            "buckets_chosen elements=%d of=%d latency_us=%.0f mbyte_per_s=%.1f",
            size,
            numel,
            1e6 * network.latency_s,
            network.bytes_per_s / 1e6,
        )
        chosen = {
            "bucket_elements": size,
            "elements": numel,
            "ranks": group.size,
            "latency_s": network.latency_s,
            "bytes_per_s": network.bytes_per_s,
        }
        write_whole(file, json.dumps(chosen, indent=2) + "\n")
    return size


def _kept_size(file: Path, ranks: int, numel: int) -> int:
    """What the file says; 0 where there is none for so many ranks and elements, or it is damaged."""
    if not file.exists():
        return 0
    try:
        found = json.loads(file.read_text())
        alike = (found["ranks"], found["elements"]) == (ranks, numel)
        return int(found["bucket_elements"]) if alike else 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("buckets_unreadable path=%s reason=%r: they are chosen anew", file, error)
        return 0
