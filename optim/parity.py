"""Whose numbers an optimizer is to meet: its own, those of settings given one by one, or another library's."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar

from thinwire.optim.onebit_settings import OneBitSettings
from thinwire.optim.zero_one_settings import ZeroOneSettings

Parity = Literal["deepspeed"]
"""Whose numbers are to be met, to rounding."""

Settings = TypeVar("Settings", OneBitSettings, ZeroOneSettings)


def chosen_settings(
    parity: Parity | None, settings: Settings | None, bias_correction: bool, *, ours: Settings, deepspeed: Settings
) -> Settings:
    """What a constructor was asked for. bias_correction: False turns it off in any settings. Raises: ValueError."""
    if parity not in (None, "deepspeed"):
        raise ValueError(f'parity = {parity!r}: must be "deepspeed" or None')
    if parity is not None and settings is not None:
        raise ValueError(
            f"parity = {parity!r} and settings = {settings}: give one of them; replace(...) of the settings that "
            "parity stands for changes a part"
        )
    chosen = settings or (ours if parity is None else deepspeed)
    return replace(chosen, bias_correction=chosen.bias_correction and bias_correction)
