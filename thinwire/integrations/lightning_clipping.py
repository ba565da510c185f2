"""Clipping in Lightning's strategies over Thinwire's optimizers: gradient_clip_val becomes the optimizer's bound.

Lightning would clip each rank's own gradient before step(). Here clipping says only to which norm, and the optimizer
clips the mean gradient wherever it is exchanged in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch.nn import Module
from torch.optim import Optimizer

from thinwire.optim.engine.optimizer import FlatOptimizer


class ClippedInStep(Strategy):  # type: ignore[misc]
    """In front of a strategy whose optimizers are Thinwire's: these clip in step()."""

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
