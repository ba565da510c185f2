"""How a run that succeeded went: summary.json. Rank 0 writes it, the service hands it on, the command line shows it.

Of a run that has left none the command line makes one out of its samples (contract/figures.py), for itself alone: with
None for what only rank 0 knows.

A reader takes summaries of other versions: keys that it does not know are passed over, parts of the time shown; one
that came later than the first summaries has a default. Any other key that is missing is an error that names it, since
a table with holes would look like a result.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Losses(_Part):
    """Nats a byte; None where none was taken."""

    train_first: float | None
    train_last: float | None
    validation_first: float | None
    validation_last: float | None


class PayloadBytes(_Part):
    """Bytes one rank sent, counted by the transport; fp32, bf16: what a ring all-reduce would have sent instead.

    Those of checkpoints and control are not in `sent`.
    """

    sent: int
    warmup_phase: int
    compressed_phase: int
    compressed_phase_fp32: int
    fp32: int
    bf16: int
    checkpoints: int | None
    control: int | None


class Rounds(_Part):
    """Steps in which workers could exchange something, and how many of them sent nothing."""

    total: int = 0
    skipped: int = 0


class CompressionRatios(_Part):
    """fp32 ring all-reduce over sent; None where nothing was sent: no such phase, or one worker."""

    compressed_phase: float | None
    overall: float | None


class Seconds(_Part):
    """Wall time of rank 0, in all and by part; the parts are what the writer has measured, and `other`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]

    total: float

    @property
    def parts(self) -> dict[str, float]:
        """All but the total, in their order."""
        return self.__pydantic_extra__


class Spread(_Part):
    """One number of reports.Health over the run."""

    first: int | float
    last: int | float
    max: int | float


class WaitedFor(_Part):
    """The worker for which the others waited in most of the steps that exchanged something."""

    worker: int
    share: float = Field(description="of these steps, those in which it came last")
    seconds: float = Field(description="how much longer the others waited, in all of them")
    computing: float | None = Field(
        None, description="how much longer than they it computed, in all of them; None where that is not known"
    )


class Summary(_Part):
    """summary.json. Its fields stand in the file in this order."""

    state: Literal["SUCCEEDED"] | None = "SUCCEEDED"
    steps: int
    frozen_at: int | None = Field(description="the last uncompressed step; None where nothing was compressed")
    world_size: int = Field(description="of the last step")
    parameters: int | None
    replicas_bit_equal: bool | None
    loss: Losses
    payload_bytes: PayloadBytes
    rounds: Rounds = Rounds()
    """Absent from the summaries of runs before 0/1 Adam, which skipped none."""
    compression_ratio: CompressionRatios
    seconds: Seconds | None
    predicted_step_seconds: float | None = Field(
        None, description="mean over the steps of the last phase that were predicted; None where none was"
    )
    measured_step_seconds: float | None = Field(None, description="mean over the same steps")
    prediction_error: float | None = Field(None, description="predicted over measured, less 1")
    waited_for: WaitedFor | None = Field(None, description="None where no worker came last in most steps")
    health: dict[str, Spread] = Field(default_factory=dict, description="by the names of reports.Health")
    attempts: int = 1

    def as_json(self) -> dict[str, JsonValue]:
        """What stands in the file."""
        return self.model_dump(mode="json")

    def as_text(self) -> str:
        """The file."""
        return json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n"
