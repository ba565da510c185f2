"""What the models of a job file are made of: kinds of numbers, a base, and the error for what cannot stand together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from thinwire.contract.redaction import redacted_json

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Whole = Annotated[int, Field(strict=True)]
"""A whole number as JSON has it: not true, not "10", not 1.0."""
StepsOrFraction = Annotated[Whole, Field(ge=1)] | Fraction
"""A number of steps (an integer >= 1) or a fraction of all steps (a float between 0 and 1, both excluded).

Strict, or 1.0, which says "all steps", would be read as one step.
"""


Auto = Annotated[Literal["auto"], WithJsonSchema({"type": "string", "enum": ["auto"]})]
"""As an enum of one: of a constant in a union, openapi-python-client makes a reader that takes nothing else."""


class Frozen(BaseModel):
    """A model without unknown fields, that does not change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Impossible = tuple[str, Any, str]
"""A field that is in range and cannot stand beside another: its path, its value, what is allowed."""


def refuse(found: Sequence[Impossible]) -> None:
    """Raises: PydanticCustomError where something is found."""
    if found:
        shown = [(path, redacted_json(value, path), allowed) for path, value, allowed in found]
        path, value, allowed = shown[0]
        raise PydanticCustomError(
            "impossible",
            "{path} = {value} is not possible: {allowed}",
            {
                "path": path,
                "value": value,
                "allowed": allowed,
                "problems": [{"path": p, "value": v, "allowed": a} for p, v, a in shown],
            },
        )
