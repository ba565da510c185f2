"""What 1-bit Adam, 1-bit LAMB and 0/1 Adam share: settings, scales, and a warm-up that ends with a frozen variance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar, Unpack

from torch.optim.optimizer import ParamsT

from thinwire.comm.kernels.reference import Scale
from thinwire.comm.layout import DEFAULT_BLOCK
from thinwire.comm.protocol import Group, Reducer
from thinwire.optim.engine.optimizer import FlatOptimizer, State
from thinwire.optim.engine.options import Options
from thinwire.optim.engine.scales import scaled_reducer
from thinwire.optim.onebit_settings import OneBitSettings
from thinwire.optim.zero_one_settings import ZeroOneSettings

Parity = Literal["deepspeed"]
"""Whose numbers are to be met, to rounding."""

Settings = TypeVar("Settings", OneBitSettings, ZeroOneSettings)


class CompressedOptions(Options, Generic[Settings], total=False):
    """The keywords of WarmupOptimizer, for the constructors that hand them on."""

    total_steps: int | None
    lr_warmup_steps: int | None
    parity: Parity | None
    settings: Settings | None
    bias_correction: bool
    block: int
    scale: Scale


class WarmupOptimizer(FlatOptimizer[State], Generic[State, Settings]):
    """A FlatOptimizer that compresses once its variance is frozen.

    total_steps, lr_warmup_steps: of the run, where known.
    parity: "deepspeed" gives the numbers of DeepSpeed 0.19.6. settings: where descriptions differ, one by one, in
    place of parity. bias_correction: False turns it off in any settings. ours, deepspeed: settings of the algorithm.
    block: values that share a scale, in our settings. scale: the norm that it keeps.
    options: as in FlatOptimizer.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        ours: Settings,
        deepspeed: Settings,
        total_steps: int | None = None,
        lr_warmup_steps: int | None = None,
        parity: Parity | None = None,
        settings: Settings | None = None,
        bias_correction: bool = True,
        block: int = DEFAULT_BLOCK,
        scale: Scale = "l2",
        **options: Unpack[Options],
    ) -> None:
        if parity not in (None, "deepspeed"):
            raise ValueError(f'parity = {parity!r}: must be "deepspeed" or None')
        if parity is not None and settings is not None:
            raise ValueError(
                f"parity = {parity!r} and settings = {settings}: give one of them; replace(...) of the settings that "
                "parity stands for changes a part"
            )
        chosen = settings or (ours if parity is None else deepspeed)
        self.settings: Settings = replace(chosen, bias_correction=chosen.bias_correction and bias_correction)
        self.total_steps = total_steps
        self.lr_warmup_steps = lr_warmup_steps
        self.block = block
        self.scale: Scale = scale
        super().__init__(params, defaults, **options)

    @property
    def warmup_from(self) -> int:
        """The step after which the present warm-up, or the one that the variance was frozen by, began."""
        return int(self.saved.get("warmup_from", 0))

    def make_reducer(self, group: Group | None, block: int) -> Reducer:
        """What exchanges the vectors, with scales as the settings say. Collective."""
        return scaled_reducer(
            self.settings.scales,
            group,
            self.space,
            self.param_groups,
            block,
            self.scale,
            self.bucket_elements,
            shadow=self.shadow,
        )
