"""A sample as the scalars that all trackers are given, by name: one list for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.contract.reports import Sample

PHASES = {"warmup": 0.0, "compressed": 1.0, "dense": 2.0}
"""A phase as a number: a chart takes nothing else."""


def scalars(sample: Sample) -> dict[str, float]:
    """What is known of this step. A number that a script has reported may be nan or infinite."""
    return {name: float(value) for name, value in _all(sample) if value is not None}


def _all(sample: Sample) -> Iterator[tuple[str, float | str | None]]:
    yield "loss", sample.loss
    yield "validation_loss", sample.validation_loss
    if sample.step > 0:  # step 0 is the state before training
        yield "lr", sample.lr
        yield "speed/samples_per_second", sample.samples_per_second
        yield "speed/step_seconds", sample.step_seconds
        yield "speed/predicted_step_seconds", sample.predicted_step_seconds
        yield "wire/compression_ratio", sample.compression_ratio
        yield "wire/payload_bytes", sample.payload_bytes
        yield "wire/payload_bytes_total", sample.payload_bytes_total
        yield "run/phase", PHASES[sample.phase]
        yield "run/world_size", sample.world_size
    if sample.health is not None:
        for name, value in sample.health.model_dump().items():
            yield f"health/{name}", value
    for name, value in (sample.reported or {}).items():
        yield f"reported/{name}", value
