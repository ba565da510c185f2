"""What a job file says of a recipe: its optimizer, learning rates, numbers and text.

Hyperparameters are as the constructors of thinwire.optim take them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from thinwire.comm.groups.blocking import SoloGroup
from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.comm.protocol import Group
from thinwire.contract.optimizers import CadaSpec, LocalStepsSpec
from thinwire.contract.spec import PythonStdlib, TextFile, TextRecipe, TrainSpec
from thinwire.optim import FlatOptimizer, LambBounds, OuterSGD, ZeroOneSchedule
from thinwire.optim.by_name import OPTIMIZERS
from thinwire.optim.variance.freezing import FreezingOptimizer
from thinwire.workers.data.corpus import Corpus, Sample, Windows, load_corpus, spread
from thinwire.workers.rates import risen_and_fallen
from thinwire.workers.recipe import Recipe, moved

Model = TypeVar("Model", bound=nn.Module)

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""What parameters are made of, by `precision` of the spec."""


def learning_rate(spec: TrainSpec, step: int) -> float:
    """The rate of step `step` (from 1): linear to the peak over the warm-up, then cosine to final_fraction of it."""
    floor = 1.0 if spec.lr_schedule.decay == "constant" else spec.lr_schedule.final_fraction
    return risen_and_fallen(step, spec.steps, spec.lr_warmup_steps, floor, peak=spec.optimizer.lr)


def hyperparameters(spec: TrainSpec) -> dict[str, Any]:
    """The hyperparameters of the job file, under the constructors' names, and the run's steps where they are needed.

    Of local steps those of the inner optimizer, which are in the parameter groups.
    """
    given = spec.optimizer
    hyper = (given.inner if isinstance(given, LocalStepsSpec) else given).model_dump(exclude={"name"})
    if "warmup" in hyper:
        hyper["warmup"] = spec.warmup_steps or "auto"
        hyper |= {"total_steps": spec.steps, "lr_warmup_steps": spec.lr_warmup_steps}
    if "var_freeze" in hyper:
        del hyper["var_freeze"]
        hyper["var_freeze_step"] = spec.var_freeze_step
        # A rate that rises to the very end leaves the last step for what follows the freeze.
        hyper |= {"total_steps": spec.steps, "lr_warmup_steps": min(spec.lr_warmup_steps, spec.steps - 1)}
        hyper["schedule"] = ZeroOneSchedule(**_taken(hyper, ZeroOneSchedule))
    if "max_coeff" in hyper:
        hyper["bounds"] = LambBounds(**_taken(hyper, LambBounds))
    if "error_memory" in hyper:
        hyper["narrow"] = [name for name in ("variance", "error_memory") if hyper.pop(name) == "bf16"]
    return hyper


def _taken(hyper: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Out of these those that are fields of a dataclass."""
    return {field.name: hyper.pop(field.name) for field in fields(kind) if field.name in hyper}


def take_settings(optimizer: FlatOptimizer[Any], spec: TrainSpec) -> None:
    """The hyperparameters of the job file, in place of those that a checkpoint of another job has brought. Local."""
    hyper = hyperparameters(spec)
    for group in optimizer.param_groups:
        group.update({name: value for name, value in hyper.items() if name in group})
    if isinstance(optimizer, FreezingOptimizer) and optimizer.stability is not None:
        optimizer.stability = replace(
            optimizer.stability,
            beta2=optimizer.beta2,
            total_steps=hyper["total_steps"],
            lr_warmup_steps=hyper["lr_warmup_steps"],
            part=optimizer.warmup_part[optimizer.full_exchange],
        )


class OfJob(Recipe):
    """A recipe whose optimizer, rates and numbers are those of a TrainSpec.

    Its model draws nothing while it trains, and what it computes for a sample does not depend on the others of the
    batch.
    """

    takes_names: ClassVar[bool] = True
    global_batch: int
    steps: int
    seed: int

    def __init__(self, spec: TrainSpec) -> None:
        self.spec = spec
        self.global_batch, self.steps, self.seed = spec.global_batch, spec.steps, spec.seed
        self.evaluate_every = spec.evaluation.every_steps

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's parameters."""
        return PRECISIONS[self.spec.precision]

    @abstractmethod
    def validation(self) -> Sequence[Any]:
        """As many samples as the spec says, or all where there are fewer. Raises: DataError."""

    def optimizer(self, params: Iterable[Any], group: Group) -> FlatOptimizer[Any]:
        """The one that the spec names."""
        given = self.spec.optimizer
        made = OPTIMIZERS[given.name].sized(self.spec.bucket_elements or DEFAULT_BUCKET)
        if isinstance(given, LocalStepsSpec):
            local: FlatOptimizer[Any] = made(
                OPTIMIZERS[given.inner.name](params, group=SoloGroup(), **hyperparameters(self.spec)),
                every=given.every,
                outer=OuterSGD(given.outer.lr, given.outer.momentum, given.outer.nesterov),
                codec=given.codec,
                overlap=given.overlap,
                parts=given.parts,
                total_steps=self.spec.steps,
                group=group,
            )
            return local
        how = {"overlap": self.spec.overlap, "topology": self.spec.topology}
        optimizer: FlatOptimizer[Any] = made(
            params,
            group=group,
            **({} if isinstance(given, CadaSpec) else how),  # who sends is known after backward alone
            **hyperparameters(self.spec),
        )
        return optimizer

    def lr(self, step: int) -> float:
        """As the spec's schedule has it."""
        return learning_rate(self.spec, step)

    def rehearse(self, model: nn.Module, optimizer: FlatOptimizer[Any], device: Any) -> None:
        """One backward, whose gradient is thrown away."""
        dataset = self.dataset()
        one = dataset.visit(0, 0) if hasattr(dataset, "visit") else dataset[0]
        with optimizer.no_sync():
            self.loss(model, moved(default_collate([one]), device)).backward()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()


class OverText(OfJob):
    """A recipe over the bytes of a text."""

    @cached_property
    def corpus(self) -> Corpus:
        """The text, read when it is first asked for. Raises: DataError."""
        data = self.spec.data
        assert isinstance(data, PythonStdlib | TextFile), "a spec that was validated has no other"
        return load_corpus(data)

    @property
    def context(self) -> int:
        """Bytes of a window."""
        assert isinstance(self.spec.recipe, TextRecipe)
        return self.spec.recipe.context

    def validation(self) -> list[Sample]:
        """Windows of the text's other part. Raises: DataError."""
        return spread(Windows(self.corpus, self.context, "validation"), self.spec.evaluation.windows)


def seeded_normal(model: Model, seed: int, std: Callable[[str, Tensor], float]) -> Model:
    """The model on the CPU: biases 0, scales of norms 1, all else normal(0, std(name, parameter)).

    Names that end in "bias" are biases, names with "norm" belong to norms. The global rng is not used.
    """
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std(name, parameter), generator=generator)
    return model
