"""What a job begins with in place of fresh values: given weights, or a checkpoint of another job. Torch-free.

    start: {weights: /shared/model.safetensors}             a file, on a path that all workers see, or at a URL
    start: {job: my-model-3f2a1c}                           another job's newest checkpoint, with all that is in it
    start: {job: my-model-3f2a1c, step: 500, what: weights}
    start: {checkpoints: s3://bucket/runs/my-model-3f2a1c}  the same by hand: where that job's checkpoints lie

Where a job is named the service says where its checkpoints are, and so it stands in the job from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from thinwire.contract import stores

Place = Annotated[str, Field(min_length=1, max_length=1024)]


class Start(BaseModel):
    """Given weights, or a checkpoint of another job. It is read until the job has saved a checkpoint of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: Place | None = Field(
        None,
        description="a safetensors file, as `thinwire fetch` and save_pretrained write one: its absolute path on all "
        "boxes, or a URL",
    )
    job: str | None = Field(None, min_length=1, max_length=80, description="the ID of the job whose checkpoint it is")
    checkpoints: Place | None = Field(
        None, description="where that job's checkpoints lie, a folder or a URL; null: the service says it"
    )
    step: Annotated[int, Field(strict=True, ge=0, le=10**9)] | None = Field(
        None, description="of the checkpoint; null: the newest"
    )
    what: Literal["everything", "weights"] | None = Field(
        None,
        description="of the checkpoint: everything, as a resume would have it, or the model's weights alone, from step "
        "0; null: everything",
    )

    @property
    def only_weights(self) -> bool:
        """Does the job begin at step 0, with an optimizer that has seen nothing?"""
        return self.weights is not None or self.what == "weights"

    @property
    def place(self) -> tuple[str, str | None]:
        """The field that says where it is read, and what that says."""
        return ("start.checkpoints", self.checkpoints) if self.weights is None else ("start.weights", self.weights)


def impossible(start: Start) -> Iterator[tuple[str, object, str]]:
    """What of a start cannot stand together, as (path, value, what is allowed)."""
    of_checkpoint = {"job": start.job, "checkpoints": start.checkpoints}
    if start.weights is None and not any(of_checkpoint.values()):
        yield (
            "start",
            start.model_dump(exclude_none=True),
            "a file, {weights: /a/model.safetensors}, or a checkpoint, {job: ID}",
        )
    if start.weights is not None:
        for name, value in {**of_checkpoint, "step": start.step, "what": start.what}.items():
            if value is not None:
                yield f"start.{name}", value, "left out with start.weights, which is a file of weights alone"
    path, place = start.place
    if place is None:
        return
    if words := stores.misplaced(place):
        yield path, place, words
    elif place.startswith("memory://"):
        yield path, place, "a place that all workers reach: what is in the memory of one process no other sees"
