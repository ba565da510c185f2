"""The figures of benchmarks.across_hosts: what three runs, and the counters of the hosts, say. Pure.

A sample is a step of a job's history, an event what it reported beside that, both as the service hands them out;
Begun is a step as its script has seen it begin on its own box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.lab_boxes import Begun

WORKERS = 2
SETTLE = 3
"""First steps after any change that say nothing of speed."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Of the steps of one phase by so many workers: from the end of a step to the end of the next."""

    steps: int
    steps_per_second: float
    median_step_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """What became of it. Seconds: how long it lasted, from it to the first step without the box, and from the mending
    to the first step with it.

    finished_alone: steps that only the box had finished when it was cut off, which the others made themselves.
    """

    lasted_s: float
    alone_after_s: float
    full_again_after_s: float
    steps_alone: int
    finished_alone: int


@dataclass(frozen=True, slots=True)
class Told:
    """One run: what the service says of it, and the cut, where it had one."""

    job: dict[str, Any]
    samples: list[dict[str, Any]]
    events: list[dict[str, Any]]
    redone: int
    cut: Cut | None

    @property
    def summary(self) -> dict[str, Any]:
        """Summary.json."""
        found: dict[str, Any] = self.job["summary"]
        return found


def rate_of(samples: Sequence[dict[str, Any]], phase: str, workers: int) -> Rate | None:
    """Over the wall clock, all between two steps included; None where there are too few such steps."""
    lengths, stretch = [], 0
    for before, after in pairwise(samples):
        alike = all((one["phase"], one["world_size"]) == (phase, workers) for one in (before, after))
        stretch = stretch + 1 if alike and before["step"] else 0
        if stretch > SETTLE:
            lengths.append(after["time"] - before["time"])
    return Rate(len(lengths), len(lengths) / sum(lengths), median(lengths)) if lengths else None


def redone_by(events: Sequence[dict[str, Any]]) -> int:
    """Committed steps that were run again, as the job tells of its changes of workers; resumes are not among them."""
    return sum(event["fields"]["redone"] for event in events if event["kind"] == "regrouped")


def gone_back(steps: Sequence[Begun]) -> int:
    """The same by what a box has seen that was never cut off: by how much the steps that count for it went back."""
    return sum(max(0, before.step - after.step) for before, after in pairwise(steps))


def cut_of(
    cut_at: float,
    mended_at: float,
    samples: Sequence[dict[str, Any]],
    survivor: Sequence[Begun],
    box: Sequence[Begun],
) -> Cut:
    """samples: of the whole run. survivor, box: what was begun on the box that stayed, and on the other."""
    alone = [one for one in survivor if one.world_size == 1 and one.time > cut_at]
    there_by_then = [one.step for one in box if one.time < mended_at]
    full = [one["time"] for one in samples if one["time"] > mended_at and one["world_size"] == WORKERS]
    return Cut(
        lasted_s=mended_at - cut_at,
        alone_after_s=alone[0].time - cut_at,
        full_again_after_s=full[0] - mended_at,
        steps_alone=sum(one["world_size"] == 1 for one in samples if one["step"]),
        finished_alone=max(0, max(there_by_then) - alone[0].step),
    )


def figures_of(found: dict[str, Told], share: float, model: str, mbit: float, steps: int) -> dict[str, Any]:
    """What is printed as JSON; None where --only has left out the run that would say it."""
    dense, cut, undisturbed = (found.get(name) for name in ("dense", "cut", "undisturbed"))
    dense_rate = dense and rate_of(dense.samples, "dense", WORKERS)
    compressed = undisturbed or cut
    compressed_rate = compressed and rate_of(compressed.samples, "compressed", WORKERS)
    predicted = compressed.summary if compressed else {}
    return {
        "hosts": 3,
        "workers": WORKERS,
        "model": model,
        "parameters": next(iter(found.values())).summary["parameters"],
        "rate_mbit": mbit,
        "steps": steps,
        "steps_redone": sum(one.redone for one in found.values()),
        "speedup": (
            compressed_rate.steps_per_second / dense_rate.steps_per_second if dense_rate and compressed_rate else None
        ),
        "dense": dense_rate and asdict(dense_rate),
        "compressed": compressed_rate and asdict(compressed_rate),
        "other_interfaces_share": share,
        "predicted_step_seconds": predicted.get("predicted_step_seconds"),
        "measured_step_seconds": predicted.get("measured_step_seconds"),
        "loss": cut and cut.summary["loss"]["validation_last"],
        "loss_undisturbed": undisturbed and undisturbed.summary["loss"]["validation_last"],
        "cut": cut and cut.cut and asdict(cut.cut),
        "attempts": max(one.job["attempt"] for one in found.values()),
        "replicas_bit_equal": all(one.summary["replicas_bit_equal"] for one in found.values()),
    }


def table(figures: dict[str, Any]) -> list[str]:
    """A line a figure."""
    dense, compressed, cut = (figures[name] for name in ("dense", "compressed", "cut"))
    lines = [f"{figures['parameters'] / 1e6:.1f} M parameters, {WORKERS} workers, {figures['rate_mbit']:g} Mbit/s"]
    for name, rate in (("dense fp32", dense), ("1-bit Adam, compressed phase", compressed)):
        if rate:
            lines.append(f"{name:30} {rate['steps_per_second']:7.2f} steps/s over {rate['steps']} steps")
    if figures["speedup"]:
        lines.append(f"{'1-bit Adam over dense fp32':30} {figures['speedup']:7.2f}")
    if figures["predicted_step_seconds"]:
        told = figures["predicted_step_seconds"], figures["measured_step_seconds"]
        lines.append(f"{'step predicted, measured':30} {told[0]:7.3f} s, {told[1]:.3f} s")
    if cut:
        lines += [
            f"{'cut off for':30} {cut['lasted_s']:7.1f} s",
            f"{'the other goes on alone after':30} {cut['alone_after_s']:7.1f} s, for {cut['steps_alone']} steps",
            f"{'both train after the return':30} {cut['full_again_after_s']:7.1f} s",
        ]
    lines.append(f"{'committed steps run again':30} {figures['steps_redone']:7d}")
    if figures["loss"] and figures["loss_undisturbed"]:
        lines.append(f"{'loss, undisturbed':30} {figures['loss']:7.3f}, {figures['loss_undisturbed']:.3f} nats a byte")
    lines.append(f"{'bytes on other interfaces':30} {figures['other_interfaces_share']:7.2%}")
    return lines
