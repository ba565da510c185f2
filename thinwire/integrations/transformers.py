"""One line for Hugging Face Trainer: its loop stays, gradients stay on their rank, the optimizer sends.

    trainer = with_thinwire(Trainer(model, args, ...), OneBitAdam)
    trainer.train()

The optimizer is made where Trainer makes its own, with the learning rate, betas, weight decay groups, clipping and
number of steps of the TrainingArguments. transformers is imported inside the function.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from thinwire.integrations import accelerate
from thinwire.integrations.accelerate import bring_together, mixed, own_optimizer
from thinwire.integrations.shares import write_share
from thinwire.optim import LocalSteps
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.schedule import Wire
from thinwire.optim.variance.warmup import WarmupOptimizer

if TYPE_CHECKING:
    from thinwire.integrations.run import Run

logger = logging.getLogger(__name__)

FILE = "optimizer.pt"
"""What Trainer calls the optimizer's file."""

OVERRIDDEN = (
    "_clip_grad_norm",
    "_finalize_training",
    "_get_grad_norm",
    "_load_optimizer_and_scheduler",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "evaluation_loop",
    "get_decay_parameter_names",
    "log",
)
"""Methods of Trainer that this file builds on: another version may not have them."""


def with_thinwire(
    trainer: Any, optimizer_class: type[FlatOptimizer[Any]] | None = None, *, run: Run | None = None, **settings: Any
) -> Any:
    """The same trainer, trained by this optimizer, which does all communication. Call it before train().

    optimizer_class: of thinwire.optim; None where the trainer has one, Trainer(..., optimizers=(optimizer, None)), or
    a subclass of Trainer makes one. run: a thinwire.train.session, whose batches are trained on; then workers may be
    lost and come. settings: keywords of the class, and its attributes saves and gradients, before what the
    TrainingArguments say. Every rank alike.
    Modifies the trainer. Raises: TypeError, ValueError saying which argument cannot be.
    """
    import transformers

    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(
            f"with_thinwire() of thinwire.integrations.transformers received {type(trainer).__name__}: give it a "
            "transformers.Trainer; for an Accelerator there is thinwire.integrations.accelerate"
        )
    if isinstance(trainer, TrainsTogether):
        raise ValueError("with_thinwire() was called with this trainer before: once is enough")
    if run is not None:
        from thinwire.integrations import transformers_session as session
    missing = [name for name in (*OVERRIDDEN, *(session.OVERRIDDEN if run else ())) if not hasattr(trainer, name)]
    if missing:
        raise ValueError(
            f"transformers {transformers.__version__} has a Trainer without {missing}: use 5.23 or another that has "
            "them"
        )
    _refuse_arguments(trainer)
    _refuse_other_optimizers(trainer, optimizer_class, settings)
    accelerate.leave_unwrapped(trainer.accelerator)
    trainer._thinwire_class, trainer._thinwire_settings = optimizer_class, dict(settings)
    if run is None:
        return mixed(trainer, TrainsTogether)
    session.feed(trainer, run)
    trainer._thinwire_settings.setdefault("group", run.group)
    return mixed(mixed(trainer, TrainsTogether), session.FedBySession)


class TrainsTogether:
    """Mixed into transformers.Trainer: makes the optimizer, leaves clipping to it, and saves what all ranks hold."""

    args: Any
    accelerator: Any
    optimizer: Any
    model: Any
    state: Any
    _thinwire_class: type[FlatOptimizer[Any]] | None
    _thinwire_settings: dict[str, Any]
    _norm_is_of_mean = True

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer; a search of hyperparameters makes an accelerator for each trial."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerate.leave_unwrapped(self.accelerator)

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer, of the class that was asked for, over Trainer's groups. Collective at first."""
        if self.optimizer is None and self._thinwire_class is None:
            super().create_optimizer(model)  # type: ignore[misc]
        elif self.optimizer is None:
            self.optimizer = self._made(self._thinwire_class, self.model if model is None else model)
        ours = own_optimizer(self.optimizer)
        if ours is None:
            raise ValueError(
                f"{type(self).__name__}.create_optimizer made {type(self.optimizer).__name__}: let it make one of "
                "thinwire.optim"
            )
        if ours.max_grad_norm is None and self.args.max_grad_norm > 0:
            ours.max_grad_norm = float(self.args.max_grad_norm)
        return self.optimizer

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer, on parameters that all ranks share."""
        self._bring_together()
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As Trainer. grad_norm is that of the mean gradient; where none was formed, own_grad_norm is this rank's."""
        ours = own_optimizer(self.optimizer)
        norm = None if ours is None else ours.space.gradient_norm
        if norm is not None and "loss" in logs and "learning_rate" in logs:
            logs["grad_norm" if self._norm_is_of_mean else "own_grad_norm"] = float(norm)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> None:
        """Nothing: step() clips, the mean gradient where it is exchanged in full."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Nothing yet: step() knows it, and log() reports it."""
        ours = own_optimizer(self.optimizer)
        assert ours is not None
        plan = ours.plan(ours.num_steps + 1)
        self._norm_is_of_mean = plan.gradient is Wire.FULL or ours.group.size == 1

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As Trainer: one rank writes, for any number of ranks, what all have brought together before. Collective."""
        with self._collected():
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As Trainer; with saves="rank" each rank its share (thinwire.integrations.shares)."""
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        write_share(Path(output_dir, FILE), self.optimizer.optimizer)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As Trainer; where a checkpoint has shares, each rank its own."""
        self.optimizer.file = None if checkpoint is None else Path(checkpoint, FILE)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        finally:
            self.optimizer.file = None

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer; save_model() on one rank writes what all ranks hold."""
        self._bring_together()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _bring_together(self) -> None:
        ours = own_optimizer(self.optimizer)
        if ours is not None:
            bring_together(ours)

    @contextmanager
    def _collected(self) -> Iterator[None]:
        """Inside, the optimizer's state_dict() is one that all ranks have made, and needs none of them."""
        ours = own_optimizer(self.optimizer)
        assert ours is not None
        if self.args.save_only_model or ours.saves == "rank":
            bring_together(ours)
            yield
            return
        collected = ours.state_dict()  # before the model is written: it may bring parameters together
        self.optimizer.collected = collected if self.args.should_save else {}
        del collected
        try:
            yield
        finally:
            self.optimizer.collected = None

    def _made(self, optimizer_class: type[FlatOptimizer[Any]] | None, model: Any) -> FlatOptimizer[Any]:
        """Over Trainer's two groups, with and without weight decay, of named parameters that are trained."""
        assert optimizer_class is not None
        decayed = set(self.get_decay_parameter_names(model))  # type: ignore[attr-defined]
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups = [
            {"params": [pair for pair in trained if pair[0] in decayed], "weight_decay": self.args.weight_decay},
            {"params": [pair for pair in trained if pair[0] not in decayed], "weight_decay": 0.0},
        ]
        settings = {"model": self._with_buffers(model), **self._defaults(optimizer_class), **self._thinwire_settings}
        saves, gradients = settings.pop("saves", "together"), settings.pop("gradients", "own")
        made = optimizer_class([group for group in groups if group["params"]], **settings)
        made.saves, made.gradients = saves, gradients
        shown = {name: value for name, value in settings.items() if name != "model"}
        logger.info("optimizer_made class=%s ranks=%d settings=%s", optimizer_class.__name__, made.group.size, shown)
        return made

    def _with_buffers(self, model: Any) -> Any:
        """The model whose buffers are to be rank 0's, as under DDP; None where Trainer is configured not to."""
        return None if self.args.ddp_broadcast_buffers is False else model

    def _defaults(self, optimizer_class: type[FlatOptimizer[Any]]) -> dict[str, Any]:
        """What TrainingArguments say, as keywords of the class."""
        args, found = self.args, {"lr": self.args.learning_rate}
        if "betas" in inspect.signature(optimizer_class).parameters:
            found |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        if issubclass(optimizer_class, WarmupOptimizer) and self._thinwire_settings.get("warmup", "auto") == "auto":
            steps = self.state.max_steps
            found |= {"total_steps": steps, "lr_warmup_steps": args.get_warmup_steps(steps)}
        return found


def _refuse_other_optimizers(trainer: Any, optimizer_class: Any, settings: dict[str, Any]) -> None:
    """Raises: TypeError, ValueError where it is not clear which optimizer trains, or it is not of thinwire.optim."""
    if optimizer_class is not None and not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, FlatOptimizer)
    ):
        raise TypeError(f"optimizer_class = {optimizer_class!r}: give a class of thinwire.optim, as OneBitAdam")
    if optimizer_class is not None and issubclass(optimizer_class, LocalSteps):
        raise ValueError(
            f"with_thinwire(trainer, {optimizer_class.__name__}): it is made around another optimizer: make it, "
            "optimizer = LocalSteps(torch.optim.AdamW(model.parameters(), lr=...), every=32, model=model), when the "
            "TrainingArguments are made, and say with_thinwire(Trainer(..., optimizers=(optimizer, None)))"
        )
    if trainer.optimizer_cls_and_kwargs is not None:
        raise ValueError(
            f"Trainer was given optimizer_cls_and_kwargs = {trainer.optimizer_cls_and_kwargs!r}: leave it out, and say "
            "with_thinwire(trainer, OneBitAdam, ...)"
        )
    if trainer.optimizer is not None:
        if own_optimizer(trainer.optimizer) is None:
            theirs = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            raise ValueError(
                f"the trainer has {type(theirs).__name__} already, from Trainer(optimizers=...) or an earlier train(): "
                "make a Trainer without it, and say with_thinwire(trainer, OneBitAdam, ...) before train()"
            )
        if optimizer_class is not None or settings:
            raise ValueError(
                f"Trainer was given optimizers = ({type(trainer.optimizer).__name__}, ...), and with_thinwire() "
                f"{optimizer_class and optimizer_class.__name__} and {settings}: give one of them"
            )
        accelerate.refuse_other_ranks(own_optimizer(trainer.optimizer), trainer.accelerator.num_processes)  # type: ignore[arg-type]
        return
    makes_its_own = _creates_optimizer(trainer)
    if optimizer_class is None and makes_its_own is None:
        raise ValueError("with_thinwire(trainer) without an optimizer: say with_thinwire(trainer, OneBitAdam, ...)")
    if optimizer_class is not None and makes_its_own is not None:
        raise ValueError(
            f"{makes_its_own}.create_optimizer makes the optimizer, and with_thinwire was given "
            f"{optimizer_class.__name__}: let that method make it and say with_thinwire(trainer), or remove the method"
        )


def _creates_optimizer(trainer: Any) -> str | None:
    """The subclass of Trainer that has its own create_optimizer."""
    for found in type(trainer).__mro__:
        if "create_optimizer" in vars(found):
            return None if found.__module__ == "transformers.trainer" else found.__name__
    return None


def _refuse_arguments(trainer: Any) -> None:
    """Raises: ValueError for TrainingArguments that would be ignored, or that one rank alone follows."""
    args = trainer.args
    if isinstance(trainer.model_wrapped, DistributedDataParallel):
        raise ValueError("this trainer has trained with DistributedDataParallel: call with_thinwire before train()")
    optim = getattr(args.optim, "value", args.optim)
    if not optim.startswith("adamw_torch") or args.optim_args:
        raise ValueError(
            f"TrainingArguments(optim={optim!r}, optim_args={args.optim_args!r}): with_thinwire makes the optimizer, "
            "leave both out"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or args.fsdp:
        engine = "DeepSpeed" if trainer.is_deepspeed_enabled else "FSDP"
        raise ValueError(
            f"TrainingArguments (or `accelerate config`) turn {engine} on, which shards or steps the model itself: "
            "leave it out; thinwire is for models that are whole on every rank"
        )
    if trainer.is_fsdp_xla_enabled or getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError("the model is sharded over the ranks: thinwire is for models that are whole on every rank")
    if args.world_size > 1 and args.auto_find_batch_size:
        raise ValueError(
            "TrainingArguments(auto_find_batch_size=True): the rank that runs out of memory would begin again alone, "
            "while its peers wait: set per_device_train_batch_size"
        )
    if args.world_size > 1 and args.enable_jit_checkpoint:
        raise ValueError(
            "TrainingArguments(enable_jit_checkpoint=True): each rank saves when its own signal comes, perhaps at "
            "another step, and a checkpoint is of one step of all ranks: use save_steps"
        )
