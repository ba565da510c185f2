"""The smallest job of a built-in recipe that two workers train in seconds, as a user submits it."""

from __future__ import annotations

from typing import Any


def small_job(**changes: Any) -> dict[str, Any]:
    """As JSON, with other fields in the place of its own."""
    return {
        "name": "small",
        "steps": 40,
        "global_batch": 4,
        "recipe": {"layers": 1, "width": 32, "heads": 2, "context": 16},
        "optimizer": {"name": "onebit_adam", "lr": 0.001, "warmup": 10},
        "workers": {"min": 2, "max": 2, "device": "cpu"},
        "evaluation": {"every_steps": 20, "windows": 8},
        **changes,
    }
