"""The timeline of a drill: who trained when, how fast, and what the loss made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from thinwire.contract.reports import Sample
from thinwire.workers.drill.account import Account
from thinwire.workers.drill.killer import Kill


def draw(
    path: Path, samples: Sequence[Sample], kills: Sequence[Kill], undisturbed: Sequence[Sample], found: Account
) -> None:
    """Write the picture. Raises: OSError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, other = ([one for one in run if one.step > 0] for run in (samples, undisturbed))
    began = steps[0].time
    figure, (size, speed, loss) = pyplot.subplots(3, 1, figsize=(10, 8), height_ratios=(1, 1, 1.4))
    speed.sharex(size)
    times = [one.time - began for one in steps]
    size.step(times, [one.world_size for one in steps], where="post", color="tab:blue")
    size.set_ylabel("workers that train")
    size.set_ylim(0, max(one.world_size for one in steps) + 0.5)
    size.set_title(
        f"{found.kills} kills: goodput {found.goodput:.1%}, {found.steps_lost} committed steps run again, "
        f"regrouped in {found.regroup_s.median or 0:.2f} s"
    )
    runs = ((other, "undisturbed", "grey"), (steps, "workers killed", "tab:blue"))
    for run, label, style in runs:
        speed.plot(*_per_second(run), color=style, label=label)
    speed.set_ylabel("steps a second")
    speed.set_ylim(bottom=0)
    for number, kill in enumerate(kills):
        for axes in (size, speed):
            axes.axvline(kill.time - began, color="tab:red", alpha=0.6, linewidth=1, label="_" if number else "a kill")
    for axes in (size, speed):
        axes.set_xlabel("seconds since the first step of its run")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="lower right")
    for run, label, style in runs:
        known = [(one.step, one.loss) for one in run if one.loss is not None and one.step <= steps[-1].step]
        loss.plot([step for step, _ in known], _smooth([value for _, value in known]), label=label, color=style)
    loss.set_xlabel("step")
    loss.set_ylabel("training loss, mean of 20 steps")
    loss.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _per_second(steps: Sequence[Sample], window_s: float = 2.0) -> tuple[list[float], list[float]]:
    """Times from the first step, and rates in whole windows: what is left at the end is in none."""
    began, ended = steps[0].time, steps[-1].time
    edges = [i * window_s for i in range(max(1, int((ended - began) / window_s)))]
    counts = [0] * len(edges)
    for one in steps:
        if (at := int((one.time - began) / window_s)) < len(edges):
            counts[at] += 1
    return [edge + window_s / 2 for edge in edges], [count / window_s for count in counts]


def _smooth(values: Sequence[float], over: int = 20) -> list[float]:
    return [
        sum(values[max(0, i - over + 1) : i + 1]) / len(values[max(0, i - over + 1) : i + 1])
        for i in range(len(values))
    ]
