"""Thinwire's optimizers inside Lightning's Trainer: `Trainer(strategy=ThinwireStrategy(), ...)` is the line to change.

The strategy is Lightning's DDPStrategy without DistributedDataParallel around the module. Its processes, samplers and
checkpoints stay Lightning's. What DDP did beside averaging gradients is done here: rank 0's parameters and buffers at
the start, rank 0's buffers before a forward. What Lightning would do to each rank's own gradient, the optimizer does:
gradient_clip_val becomes its max_grad_norm, so that the mean gradient is clipped wherever it is exchanged in full.

Written against lightning 2.6; needs `lightning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.optim import Optimizer

from thinwire.integrations.lightning_clipping import ClippedInStep, refuse_clipping
from thinwire.optim.engine.optimizer import FlatOptimizer

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
            assert isinstance(optimizer, FlatOptimizer)

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
        super().load_optimizer_state_dict(checkpoint)

    def _settle(self) -> None:
        """End a round of local steps (0/1 Adam): all ranks hold the same parameters. Sends nothing where they do."""
        for optimizer in self.optimizers:
            assert isinstance(optimizer, FlatOptimizer)
            if not optimizer.at_sync:
                optimizer.space.take_changes()
                optimizer.prepare_to_save()
                optimizer.space.write_back()

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
