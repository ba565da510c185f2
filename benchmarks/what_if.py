"""What `thinwire what-if` predicts beside what was measured: the papers' clusters, NCCL hosts on a GPU, the lab.

    .venv/bin/python -m benchmarks.what_if        # from stored measurements, into results/what-if; nothing is run

The papers' rows of one box and of InfiniBand are what the software of the papers is fitted to (fitted()); their
Ethernet rows are predicted, by the rate that they say iperf has found. The hosts on a GPU are predicted by the rate
that their link was shaped to, and again by what its dense fp32 steps have reached. The lab's steps are those of
results/plan, with the processors' part measured, for the events and the network are the same model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.plan import METHODS as PLANNED
from benchmarks.plan import RESULTS as PLAN_RESULTS
from benchmarks.plan import predicted_anew
from benchmarks.provenance import provenance
from benchmarks.report import pipes
from thinwire.cli.plan import GOODPUT
from thinwire.comm.wire.network import Exchange, Network, exchange_cost
from thinwire.contract.what_if import Outcome, WhatIf
from thinwire.workers.plan.catalogue import COPIED, DEVICES, MODELS
from thinwire.workers.plan.what_if import answer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OUT = RESULTS / "what-if"
ETHERNET, INFINIBAND = 4.1e9 / 8, 32e9 / 8
"""Bytes a second: what iperf and perftest found on the cluster of arXiv 2102.02888."""
SLOW_ETHERNET = 2.7e9 / 8
"""The same of arXiv 2202.06009."""
A_NODE = 4
BERT = MODELS["bert-large"]
BERT_ROWS, SQUAD_ROWS = "bert_large_samples_per_second", "squad_samples_per_second"
BATCH = {BERT_ROWS: 16, SQUAD_ROWS: 3}
SQUAD_ON_ONE_GPU = 19.0
"""Samples a second: figure 7 of DeepSpeed's post, one GPU, 3 a batch."""
HOSTS = {"ddp": "dense_fp32", "ddp_bf16": "dense_bf16", "twadam": "onebit_adam", "twlamb": "onebit_lamb"}
"""Methods of results/hosts-on-one-gpu."""
GPT2 = 124_475_904
MISS = {"papers": 0.10, "hosts": 0.15, "lab": 0.15}


@dataclass(frozen=True, slots=True)
class Checked:
    """One step. where: of MISS; by: what its link was taken from."""

    where: str
    case: str
    method: str
    by: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_dense(self) -> bool:
        """In full precision."""
        return self.method.startswith("dense")


def published() -> dict[str, Any]:
    """What the papers and DeepSpeed's pages say."""
    found: dict[str, Any] = json.loads((RESULTS / "papers" / "published.json").read_text())
    return found


@dataclass(frozen=True, slots=True)
class Fitted:
    """Of one box and InfiniBand alone. flops, layer_s: of a V100. update_s, code_s: DeepSpeed's, seconds a value.

    squad_compute_s: of a pass over 3 samples of 384 tokens.
    """

    flops: float
    layer_s: float
    update_s: float
    code_s: float
    squad_compute_s: float


def fitted() -> Fitted:
    """One figure from one row each, but code_s: the mean over tasks of what InfiniBand's compressed steps have left."""
    rows = [dict(zip(published()["profile"]["columns"], row, strict=True)) for row in published()["profile"]["rows"]]
    infiniband = [row for row in rows if row["network"] == "infiniband"]
    (box,) = [row for row in infiniband if row["nodes"] == 1]
    (single,) = [row for row in infiniband if row["batch_per_gpu"] == 1]
    passes_s, update_s = ((row_sum(box, *names)) for names in (("forward_ms", "backward_ms"), ("other_ms",)))
    squad_s = BATCH[SQUAD_ROWS] / SQUAD_ON_ONE_GPU - update_s
    left = []
    for rows_of, compute_s in ((BERT_ROWS, passes_s), (SQUAD_ROWS, squad_s)):
        samples = {gpus: speed for gpus, _, _, _, speed in published()[rows_of]["rows"] if gpus > A_NODE and speed}
        left.append(
            fmean(
                BATCH[rows_of] * gpus / speed - compute_s - update_s - _one_bit_s(gpus, INFINIBAND)
                for gpus, speed in samples.items()
            )
        )
    return Fitted(
        flops=box["batch_per_gpu"] * BERT.flops_of(None) / passes_s,
        layer_s=row_sum(single, "forward_ms", "backward_ms") / BERT.layers,
        update_s=update_s / BERT.values,
        code_s=fmean(left) / BERT.values,
        squad_compute_s=squad_s,
    )


def row_sum(row: dict[str, Any], *names: str) -> float:
    """Seconds, of columns in milliseconds."""
    return 1e-3 * sum(float(row[name]) for name in names)


def _one_bit_s(gpus: int, bytes_per_s: float) -> float:
    network = Network(gpus, 0.0, bytes_per_s, A_NODE)
    return network.seconds(exchange_cost(Exchange.FLAT_ONE_BIT, network, BERT.values))


def forecast_theirs(gpus: int, task: str = BERT_ROWS, bytes_per_s: float = ETHERNET, **more: Any) -> dict[str, Outcome]:
    """By method, on the papers' cluster with the papers' software. task: BERT_ROWS or SQUAD_ROWS. more: of WhatIf."""
    methods = ("dense_bf16", "onebit_adam")
    given: dict[str, Any] = {"model": "bert-large", "batch": BATCH[task], "software": "deepspeed", "methods": methods}
    if task == SQUAD_ROWS:
        given |= {"model": "bert-large-squad", "compute_s": fitted().squad_compute_s}
    found = answer(WhatIf(nodes=gpus // A_NODE, gpus=A_NODE, bytes_per_s=bytes_per_s, **(given | more)))
    return {one.name: one for one in found.outcomes}


def papers() -> Iterator[Checked]:
    """Every row of theirs that crosses Ethernet."""
    for row in published()["profile"]["rows"]:
        told = dict(zip(published()["profile"]["columns"], row, strict=True))
        if told["network"] != "ethernet" or told["nodes"] == 1:
            continue
        measured_s = row_sum(told, "forward_ms", "allreduce_ms", "backward_ms", "other_ms")
        more = {"batch": told["batch_per_gpu"], "accumulate": told["accumulation"], "methods": ("dense_bf16",)}
        found = forecast_theirs(told["gpus"], **more)["dense_bf16"]
        case = f"table 1, {told['gpus']} GPUs, batch {told['batch_per_gpu']}, x {told['accumulation']}"
        yield Checked("papers", case, "dense_bf16", "iperf", measured_s, found.step_s)
    for task, title in ((BERT_ROWS, "BERT-Large"), (SQUAD_ROWS, "SQuAD")):
        for gpus, dense, bits, _, _ in published()[task]["rows"]:
            if gpus <= A_NODE:
                continue
            found_by = forecast_theirs(gpus, task)
            for method, speed in (("dense_bf16", dense), ("onebit_adam", bits)):
                measured_s = BATCH[task] * gpus / speed
                yield Checked("papers", f"{title}, {gpus} GPUs", method, "iperf", measured_s, found_by[method].step_s)


def hosts() -> Iterator[Checked]:
    """Two NCCL ranks on one H100 as two hosts, at two rates."""
    folder = RESULTS / "hosts-on-one-gpu"
    steps = json.loads((folder / "steps.json").read_text())
    rows = json.loads((folder / "deepspeed.json").read_text())["rows"] + steps["new"]["rows"] + steps["old"]["rows"]
    alone_s = median(row["med_s"] for row in rows if row["method"] == "no exchange")
    update_s = 2 * COPIED["dense"] * GPT2 / DEVICES["h100"].copy_bytes_s  # two ranks share its memory
    for row in rows:
        rate = row.get("rate")
        if row["method"] not in HOSTS or rate not in ("10gbit", "1gbit"):
            continue
        (dense_s,) = [one["med_s"] for one in rows if one["method"] == "ddp" and one["rate"] == rate]
        hidden_s = 2 / 3 * (alone_s - update_s)
        reached = 4 * GPT2 / (dense_s - alone_s + hidden_s)
        shaped = GOODPUT * float(rate.removesuffix("gbit")) * 1e9 / 8
        for by, bytes_per_s in (("shaped", shaped), ("reached", reached)):
            name = HOSTS[row["method"]]
            measured = {"compute_s": alone_s - update_s, "update_s": update_s}
            asked = WhatIf(2, 1, bytes_per_s, "gpt2", GPT2, batch=8, device="h100", methods=(name,), **measured)
            if (by, name) != ("reached", "dense_fp32"):
                yield Checked("hosts", f"GPT-2, {rate}", name, by, row["med_s"], answer(asked).outcome(name).step_s)


def lab() -> Iterator[Checked]:
    """Three models on the lab's five networks of two and four hosts."""
    kept = json.loads((PLAN_RESULTS / "plan.json").read_text())
    assert {one["method"] for one in kept["steps"]} == set(PLANNED.values())
    for one in predicted_anew(kept):
        yield Checked("lab", one.case, one.method, "shaped", one.measured_s, one.by_rate_s)


def all_checked() -> list[Checked]:
    """In that order."""
    return [*papers(), *hosts(), *lab()]


def extremes(found: Sequence[Checked], *, dense: bool) -> tuple[float, float]:
    """The least and the largest error."""
    errors = [one.error for one in found if one.is_dense is dense]
    return min(errors), max(errors)


def within(found: Sequence[Checked]) -> tuple[int, int]:
    """How many hold what is asked of them, and of how many."""
    return sum(abs(one.error) <= MISS[one.where] for one in found), len(found)


IN_BRIEF = {
    **{"dense_fp32": "dense fp32", "dense_bf16": "dense, 16 bits"},
    **{"onebit_adam": "1-bit Adam", "onebit_lamb": "1-bit LAMB", "zero_one_adam": "0/1 Adam"},
}


def in_brief(found: Sequence[Checked]) -> list[str]:
    """The errors of all steps in per cent, as lines of Markdown: a row for each case, a column for each method."""
    by: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for one in found:
        error = f"{100 * one.error:+.0f}"
        error = f"**{error}**" if abs(one.error) > MISS[one.where] else error
        by.setdefault((one.where, one.case, one.by), {}).setdefault(one.method, []).append(error)
    rows = [
        (where, case.replace("/", ", "), rate, *(", ".join(errors.get(method, ())) for method in IN_BRIEF))
        for (where, case, rate), errors in by.items()
    ]
    return list(pipes(("from", "step", "link by", *IN_BRIEF.values()), rows))


def readme(found: Sequence[Checked]) -> str:
    """All of it as a table; misses in bold."""
    lines = [
        "# `thinwire what-if` beside what was measured",
        "",
        f"Written by `python -m benchmarks.what_if` at commit {provenance().commit}; nothing was run for it. Measured: "
        "rows published in and about arXiv 2102.02888 ([published.json](../papers/published.json)), [NCCL hosts on one "
        "H100](../hosts-on-one-gpu/README.md), [the lab](../plan/README.md). What is fitted and what is predicted: "
        "[benchmarks/what_if.py](../../what_if.py). Misses, in bold, are more than 10 % off for the papers, 15 % else; "
        "[docs/what-if.md](../../../docs/what-if.md) explains them.",
        "",
    ]
    columns = ("from", "step", "method", "link by", "measured, ms", "predicted, ms", "")
    rows = []
    for one in found:
        error = f"{one.error:+.0%}"
        error = f"**{error}**" if abs(one.error) > MISS[one.where] else error
        measured, predicted = (f"{1e3 * seconds:.4g}" for seconds in (one.measured_s, one.predicted_s))
        rows.append((one.where, one.case, one.method, one.by, measured, predicted, error))
    lines += [*pipes(columns, rows), ""]
    for where in MISS:
        here = [one for one in found if one.where == where]
        for words, dense in (("dense", True), ("compressed", False)):
            hits, count = within([one for one in here if one.is_dense is dense])
            low, high = extremes(here, dense=dense)
            lines.append(f"* {where}, {words}: {hits} of {count} within {MISS[where]:.0%}; {low:+.0%} to {high:+.0%}")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print it, and keep it. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Held against stored measurements: what `thinwire what-if` predicts.")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    text = readme(all_checked())
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "README.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
