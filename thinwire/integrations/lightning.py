"""Thinwire's optimizers inside Lightning's Trainer: `Trainer(strategy=ThinwireStrategy(), ...)` is the line to change.

The strategy is Lightning's DDPStrategy without DistributedDataParallel around the module. Its processes, samplers and
checkpoints stay Lightning's. What DDP did beside averaging gradients is done here: rank 0's parameters and buffers at
the start, rank 0's buffers before a forward. What Lightning would do to each rank's own gradient, the optimizer does:
gradient_clip_val becomes its max_grad_norm, so that the mean gradient is clipped wherever it is exchanged in full.

Written against lightning 2.6; needs `lightning`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn import Module
from torch.optim import Optimizer

from thinwire.integrations.accelerate import bring_together
from thinwire.optim import LocalSteps, ZeroOneAdam
from thinwire.optim.engine.optimizer import FlatOptimizer
from thinwire.optim.engine.options import reader_of_gradients
from thinwire.optim.engine.orphans import listed

logger = logging.getLogger(__name__)

SETTINGS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)
"""What ThinwireStrategy takes of what DDPStrategy takes."""
BROADCAST_BYTES = 250 * 1024 * 1024
"""Of buffers at once; DDP's figure."""


class ClippedInStep(Strategy):  # type: ignore[misc]
    """In front of a strategy whose optimizers are Thinwire's: these clip in step().

    Lightning would clip each rank's own gradient before step(). Here clipping says only to which norm, and the
    optimizer clips the mean gradient wherever it is exchanged in full.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._given_bounds: dict[int, float | None] = {}
        """max_grad_norm of optimizers for whose next step a clipping was asked, as it was before."""
        super().__init__(*args, **settings)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of configure_optimizers."""
        return self._optimizers  # type: ignore[no-any-return]

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        Strategy.optimizers.fset(self, optimizers)
        for wrapper in self._lightning_optimizers:
            _hand_on(wrapper)

    def setup_precision_plugin(self) -> None:
        """As Lightning's; where the plugin would clip each rank's own gradient, the optimizer does it."""
        super().setup_precision_plugin()
        if self.optimizers:
            self.precision_plugin.clip_gradients = self._clip

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """One step of this optimizer, with the bound of the gradient that this step's clipping has asked for."""
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            if id(optimizer) in self._given_bounds:
                optimizer.max_grad_norm = self._given_bounds.pop(id(optimizer))  # type: ignore[attr-defined]

    def teardown(self) -> None:
        """As Lightning's."""
        self.let_precision_plugin_clip()
        super().teardown()

    def let_precision_plugin_clip(self) -> None:
        """As before setup_precision_plugin(): the plugin may serve another trainer."""
        self.precision_plugin.__dict__.pop("clip_gradients", None)

    def _clip(
        self, optimizer: Optimizer, clip_val: float | None = 0.0, gradient_clip_algorithm: str | None = "norm"
    ) -> None:
        """In place of the precision plugin's: the bound of this step's mean gradient. Raises: ValueError."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if not clip_val or clip_val <= 0:
            return
        bound = float(clip_val)
        _refuse_algorithm(gradient_clip_algorithm)
        _refuse_bound(optimizer, bound, self._given_bounds.get(id(optimizer), optimizer.max_grad_norm))  # type: ignore[attr-defined]
        self._given_bounds.setdefault(id(optimizer), optimizer.max_grad_norm)  # type: ignore[attr-defined]
        optimizer.max_grad_norm = bound  # type: ignore[attr-defined]


class ThinwireStrategy(ClippedInStep, DDPStrategy):  # type: ignore[misc]
    """Training on several processes with Thinwire's optimizers: gradients stay local, step() does all communication.

    settings: those of DDPStrategy that are in SETTINGS. Raises: TypeError for what is DDP's own, with the reason.

    Trainer.fit raises a ValueError where configure_optimizers gives an optimizer that is not Thinwire's, one that
    exchanges with other ranks than the trainer's, or where gradients are to be clipped by value.
    """

    strategy_name = "thinwire"

    def __init__(self, **settings: Any) -> None:
        for name in settings:
            if name not in SETTINGS:
                raise TypeError(
                    f"ThinwireStrategy({name}=...): there is no DistributedDataParallel here, so that its settings and "
                    "communication hooks have nothing to act on, and unused parameters need none; leave it out. It "
                    f"takes {', '.join(SETTINGS)}"
                )
        super().__init__(**settings)
        self._blocked = 0
        self._buffers_due = True

    def configure_ddp(self) -> None:
        """Rank 0's parameters and buffers to all, as DDP sends them; the module is not wrapped. Collective."""
        assert self.model is not None
        trained = [param for param in self.model.parameters() if param.requires_grad]
        _verify_param_shape_across_processes(_world(), trained)
        _sync_module_states(self.model)
        self._buffers_due = True

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Those of configure_optimizers. Raises: ValueError for one that cannot train here, saying what to change."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            _refuse_foreign(optimizer, self.world_size)
            refuse_clipping(optimizer, trainer)
            refuse_averaging(optimizer, trainer)
            assert isinstance(optimizer, FlatOptimizer)
            optimizer.reader = reader_of_gradients(self.lightning_module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, a backward only adds to gradients: micro-steps of an accumulation. Matters with overlap alone."""
        self._blocked += 1
        try:
            with ExitStack() as stack:
                for optimizer in self.optimizers:
                    stack.enter_context(optimizer.no_sync())  # type: ignore[attr-defined]
                yield
        finally:
            self._blocked -= 1

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, after rank 0's buffers have come, as under DDP: not between the micro-steps of a step."""
        self._sync_buffers()
        self._buffers_due = not self._blocked
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """All ranks evaluate the same model: parameters of a sync, rank 0's buffers. Collective inside a fit."""
        self._settle()
        self._sync_buffers()

    def on_train_end(self) -> None:
        """The model that fit() leaves behind is the same on all ranks. Collective."""
        self._settle()
        self._sync_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state, at a sync: a checkpoint has module and optimizers of one moment. Collective."""
        self._settle()
        return super().lightning_module_state_dict()  # type: ignore[no-any-return]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Of each optimizer, in order. Raises: ValueError where the checkpoint has others, or more or fewer."""
        saved = checkpoint["optimizer_states"]
        if len(saved) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has the states of {len(saved)} optimizers, and configure_optimizers gave "
                f"{len(self.optimizers)}: load it with the optimizers that it was saved with"
            )
        for optimizer in self.optimizers:
            _add_groups(optimizer)
        super().load_optimizer_state_dict(checkpoint)

    def _settle(self) -> None:
        """End a round of local steps: all ranks hold the same parameters. Sends nothing where they do."""
        for optimizer in self.optimizers:
            assert isinstance(optimizer, FlatOptimizer)
            bring_together(optimizer)

    def _sync_buffers(self) -> None:
        due, self._buffers_due = self._buffers_due, False
        module = self.lightning_module
        assert module is not None
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        buffers = [buffer for name, buffer in module.named_buffers() if name not in ignored]
        if due and buffers and self.world_size > 1:
            dist._broadcast_coalesced(_world(), buffers, BROADCAST_BYTES, 0)  # type: ignore[attr-defined]


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _refuse_foreign(optimizer: Optimizer, world_size: int) -> None:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    if not isinstance(optimizer, FlatOptimizer):
        raise ValueError(
            f"configure_optimizers gave {kind}: nothing averages its gradients under ThinwireStrategy, and ranks would "
            'drift apart. Use an optimizer of thinwire.optim (Adam is the uncompressed one), or Trainer(strategy="ddp")'
        )
    if optimizer.group.size != world_size:
        raise ValueError(
            f"{kind} exchanges with {optimizer.group.size} ranks, and the trainer has {world_size}: make it inside "
            "configure_optimizers, when the process group is there, and leave its `group` out"
        )


def _add_groups(optimizer: Optimizer) -> None:
    """Groups beyond the optimizer's own, which BaseFinetuning has set before a checkpoint is loaded, are added.

    It sets all groups that there were when the checkpoint was made. Collective where there are more. What does not
    begin with the optimizer's own is refused in the next step.
    """
    assert isinstance(optimizer, FlatOptimizer)
    given = optimizer.param_groups
    for own in range(1, len(given)):
        if listed(given[:own]) == optimizer.listed:
            optimizer.param_groups = given[:own]
            for group in given[own:]:
                optimizer.add_param_group(group)
            _say_frozen(optimizer, given[own:])
            return


def _say_frozen(optimizer: FlatOptimizer[Any], groups: list[dict[str, Any]]) -> None:
    """Lightning freezes a backbone when a run begins, resumed or not, and unfreezes it at one epoch alone."""
    frozen = [param for group in groups for param in group["params"] if not param.requires_grad]
    if frozen and optimizer.group.rank == 0:
        logger.warning(
            "resumed_frozen parameters=%d: a finetuning callback has frozen what was trained when the checkpoint was "
            "made, and unfreezes it at its own epoch alone, which is over: call requires_grad_(True) on it in "
            "on_train_start() of the module, or it stays as it is",
            len(frozen),
        )


def _hand_on(wrapper: LightningOptimizer) -> None:
    """Let Lightning's wrapper call the optimizer's own methods: inherited ones would set attributes of the wrapper."""
    optimizer = wrapper.optimizer
    for name in dir(type(optimizer)):
        method = getattr(type(optimizer), name)
        if callable(method) and not name.startswith("_") and name not in vars(LightningOptimizer):
            vars(wrapper)[name] = getattr(optimizer, name)


def refuse_clipping(optimizer: Optimizer, trainer: Trainer) -> None:
    """Raises: ValueError where the trainer is to clip as this optimizer cannot."""
    assert isinstance(optimizer, FlatOptimizer)
    if trainer.gradient_clip_val:
        _refuse_algorithm(trainer.gradient_clip_algorithm)
        _refuse_bound(optimizer, float(trainer.gradient_clip_val), optimizer.max_grad_norm)


def refuse_averaging(optimizer: Optimizer, trainer: Trainer) -> None:
    """Raises: ValueError where callbacks average weights that local steps let differ between ranks."""
    for callback in trainer.callbacks if isinstance(optimizer, LocalSteps | ZeroOneAdam) else ():
        if {"WeightAveraging", "StochasticWeightAveraging"} & {kind.__name__ for kind in type(callback).__mro__}:
            raise ValueError(
                f"{type(callback).__name__} with {type(optimizer).__name__}: between two syncs each rank has weights "
                "of its own, so that each would average others, and end with them. Use OneBitAdam or Adam with this "
                "callback; or average in a callback of your own, only where optimizer.at_sync is true, and call "
                "optimizer.prepare_to_save() on every rank before the average is copied into the module"
            )


def _refuse_algorithm(algorithm: str | None) -> None:
    if algorithm is not None and str(getattr(algorithm, "value", algorithm)) != "norm":
        raise ValueError(
            f'gradient_clip_algorithm = {algorithm!r}: must be "norm". By value each rank would clip its own gradient '
            "before the mean, which is not what DDP does"
        )


def _refuse_bound(optimizer: Optimizer, bound: float, own: float | None) -> None:
    if own is not None and own != bound:
        raise ValueError(
            f"gradient_clip_val = {bound}, and the optimizer has max_grad_norm = {own}: both bound the norm of the "
            "same gradient; give one of them, or both alike"
        )
    if own is None and optimizer.overlaps:  # type: ignore[attr-defined]
        raise ValueError(
            f"gradient_clip_val = {bound} with overlap=True: gradients are sent in backward, before Lightning clips. "
            f"Give the optimizer max_grad_norm={bound} as well, or leave out overlap"
        )
