"""The tables of the three papers as rows: theirs, what was measured or counted here, the forecast for their cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.papers import volume
from benchmarks.papers.published import table
from benchmarks.papers.runs import Compared
from benchmarks.papers.volume import by_our_rules
from benchmarks.provenance import ROOT

ONE_BIT_ADAM, ONE_BIT_LAMB, ZERO_ONE_ADAM = "2102.02888", "2104.06069", "2202.06009"
H100 = "GPT-2 small, 2 hosts (NCCL, one H100), 10 Gbit/s"


@dataclass(frozen=True, slots=True)
class Row:
    """One claim or line of a paper, arXiv's number. Empty: there is none, and `remark` says why."""

    paper: str
    what: str
    theirs: str
    here: str = ""
    forecast: str = ""
    remark: str = ""


def volumes() -> list[Row]:
    """Bytes and rounds, counted by the plans of our optimizers; nothing is measured."""
    counted = "counted by the plan under the paper's schedule"
    rows = []
    for paper, what, theirs, run in (
        (ONE_BIT_ADAM, "volume, BERT-Large, sequence 128, dense for 23 k of 152 k steps", "5x", volume.ADAM_LARGE),
        (ONE_BIT_ADAM, "volume, BERT-Base, dense for 16 k of 118 k steps", "5x", volume.ADAM_BASE),
        (ONE_BIT_ADAM, "volume, SQuAD, dense for 400 of 1,848 steps (DeepSpeed: 25 %)", "3.4x", volume.SQUAD),
        (ONE_BIT_LAMB, "volume, BERT-Large, dense for 1,000 of 5,993 steps", "4.6x", volume.LAMB_LARGE),
    ):
        by_paper, by_rule = volume.volume(run).over_half, volume.volume(by_our_rules(run)).over_half
        worse = "; our rule sends more" if by_rule < by_paper else ""
        here = f"{by_paper:.2f}x; {by_rule:.1f}x by our rule for the warm-up, in 8 bits"
        rows.append(Row(paper, what, theirs, here, remark=f"over fp16; {counted}{worse}"))
    adam, zero_one = volume.volume(volume.ADAM_LARGE), volume.volume(volume.ZERO_ONE_LARGE)
    own = volume.volume(by_our_rules(volume.ADAM_LARGE)), volume.volume(by_our_rules(volume.ZERO_ONE_LARGE))
    rows.append(
        Row(
            ZERO_ONE_ADAM,
            "volume against 1-bit Adam, BERT-Large",
            "87 % less",
            f"{1 - zero_one.bits / adam.bits:.1%} less; {1 - own[1].bits / own[0].bits:.1%} by our rules for both",
            remark=f"{counted} as DeepSpeed ships it; the warm-up of our 1-bit Adam is shorter, in 8 bits",
        )
    )
    rows.append(
        Row(
            ZERO_ONE_ADAM,
            "rounds against 1-bit Adam, BERT-Large",
            "54 % fewer",
            f"{1 - zero_one.rounds:.1%} fewer; {1 - own[1].rounds:.1%} by our rules",
            remark=f"{counted} as DeepSpeed ships it; {zero_one.bits:.2f} bits a value, ours {own[1].bits:.2f}",
        )
    )
    return rows


def measured_steps() -> dict[str, float]:
    """Seconds a step on two NCCL hosts of one H100 at 10 Gbit/s, by method: results/hosts-on-one-gpu."""
    kept = json.loads((ROOT / "benchmarks/results/hosts-on-one-gpu/deepspeed.json").read_text())
    rows = [row for row in kept["rows"] if row.get("rate") == "10gbit"]
    return {row["method"]: median(row["times"][-3:]) for row in rows}


def scores(found: Sequence[Compared]) -> list[Row]:
    """The workloads in small, each method beside the dense one. Never the papers' scores: other data, other sizes."""
    return [
        Row(
            paper_of(one.method),
            f"{one.workload}, {one.method}",
            "as dense",
            f"{one.score:.4g} (dense {one.dense:.4g}{_untrained(one)}) {one.unit}; {_interval(one)}",
            remark=f"{one.seeds} seed{'s' * (one.seeds > 1)}, paired, 2 workers; "
            + (f"{one.sent:.1f}x fewer bytes than fp32; " if one.sent else "")
            + f"{_searched(one)}",
        )
        for one in found
        if one.method not in ("adam", "sgd")
    ]


def _untrained(one: Compared) -> str:
    return "" if one.untrained is None else f", untrained {one.untrained:.4g}"


def _searched(one: Compared) -> str:
    """The rate in times the script's own, and how many were tried with seed 0."""
    more = len(one.tried) > 1
    return f"{one.times:g} times the script's rate, " + (f"the best of {len(one.tried)}" if more else "not searched")


def _interval(one: Compared) -> str:
    which = "worse" if one.worse.mean > 0 else "better"
    return f"{which} by {abs(one.worse.mean):.3g}" + (f" +- {one.worse.half:.2g}" if one.seeds > 1 else "")


def paper_of(method: str) -> str:
    """The paper that a method is of; empty for those that are of none of the three."""
    return {"onebit_adam": ONE_BIT_ADAM, "onebit_lamb": ONE_BIT_LAMB, "zero_one_adam": ZERO_ONE_ADAM}.get(method, "")


DAYS = "of BERT-Large are 64 V100 for days"
FILES_ARE_TAKEN = "is not at hand; the script takes its files"


def not_reproduced() -> list[Row]:
    """What nothing here stands beside, and why."""
    glue = table("glue").where(model="BERT-Large (compressed)")[0]
    told = ", ".join(f"{task} {score}" for task, score in glue.items() if task != "model")
    missing = (
        (ONE_BIT_ADAM, "GLUE after 1-bit Adam", told, f"152,000 steps {DAYS}, and GLUE {FILES_ARE_TAKEN}"),
        (ONE_BIT_ADAM, "SQuAD 1.1, F1", "on par with 93.32", f"BERT-Large as published, and SQuAD, {FILES_ARE_TAKEN}"),
        (ONE_BIT_ADAM, "CIFAR-10, ResNet-18", "as Adam", f"CIFAR-10 {FILES_ARE_TAKEN}"),
        (ONE_BIT_ADAM, "CelebA, DCGAN", "as Adam", f"CelebA {FILES_ARE_TAKEN}"),
        (ONE_BIT_LAMB, "SQuAD F1, batch 65,536 before", "as LAMB", f"5,993 steps {DAYS}"),
        (ZERO_ONE_ADAM, "ImageNet, ResNet-18, top-1", "as Adam", f"ImageNet {FILES_ARE_TAKEN}"),
        (ZERO_ONE_ADAM, "GPT-2 117 M, perplexity", "as Adam", f"its text {FILES_ARE_TAKEN}"),
    )
    return [Row(paper, what, theirs, remark=f"not reproduced, because {why}") for paper, what, theirs, why in missing]


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For table.json."""
    return [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
