"""What a job may be called, the nearest to a name that it may not have, and what names the project that is meant."""

from __future__ import annotations

import re

LABEL = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"
PROJECT_VARIABLE = "THINWIRE_PROJECT"


def fitting_name(text: str) -> str:
    """The nearest that a job can be called: My_Model is my-model. Empty where nothing of it can stay."""
    return re.sub(r"[^a-z0-9.-]+", "-", text.lower()).strip(".-")[:63].strip(".-")
