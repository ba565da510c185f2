import fcntl
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.papers import ranks, rates, rows, runs, volume
from benchmarks.papers.published import table
from benchmarks.papers.volume import by_our_rules
from benchmarks.provenance import ROOT


def test_the_plans_count_the_bytes_that_the_papers_publish():
    """As far as a sentence rounds. 87 % and 54 % of 0/1 Adam are upper ends, which DeepSpeed's file does not reach."""
    adam, lamb = volume.volume(volume.ADAM_LARGE), volume.volume(volume.LAMB_LARGE)
    by_formula = 1 / (23 / 152 + (1 - 23 / 152) / 16)  # of DeepSpeed's post, which counts no scales
    assert by_formula == pytest.approx(4.893, abs=0.001)
    assert by_formula * 0.99 < adam.over_half < by_formula
    assert lamb.over_half == pytest.approx(4.6, abs=0.05)
    zero_one = volume.volume(volume.ZERO_ONE_LARGE)
    assert 0.83 < 1 - zero_one.bits / adam.bits < 0.87
    assert 0.50 < 1 - zero_one.rounds < 0.54


def test_a_rule_that_sends_more_than_the_papers_schedule_is_said_to():
    squad = next(row for row in rows.volumes() if "SQuAD" in row.what)
    assert volume.volume(by_our_rules(volume.SQUAD)).over_half < volume.volume(volume.SQUAD).over_half
    assert "our rule sends more" in squad.remark


def test_a_method_without_a_warm_up_has_no_volume_of_the_papers():
    with pytest.raises(ValueError, match="onebit_muon: only 1-bit Adam"):
        volume.volume(volume.RunSteps(100, "onebit_muon"))


def test_the_profile_adds_up_to_the_share_of_the_all_reduce_that_the_paper_prints():
    for row in table("profile").where():
        step_ms = sum(row[part] for part in ("forward_ms", "allreduce_ms", "backward_ms", "other_ms"))
        assert 100 * row["allreduce_ms"] / step_ms == pytest.approx(row["allreduce_percent"], abs=1.0), row


def _run(
    method: str, seed: int, score: float, *, higher: bool = True, sent: int = 10, times: float = 1.0
) -> dict[str, object]:
    return {
        **{"workload": "gpt2", "optimizer": method, "seed": seed, "score": score, "unit": "perplexity"},
        **{"higher_is_better": higher, "bytes": sent, "dense_bytes": 100, "times": times},
    }


def test_a_rate_is_searched_with_the_first_seed_until_its_neighbours_are_worse(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "KEPT", tmp_path / "runs.jsonl")
    score = {0.5: 9.0, 1.0: 8.0, 2.0: 7.0, 4.0: 6.0}  # lower is better; beyond that it diverges

    def some(workload, one, _):
        if one.times == 8 and one.method == "adam":
            raise ranks.RankFailed("rank 0 ended with 1")
        return _run(one.method, one.seed, score.get(one.times, math.nan) + one.seed, higher=False, times=one.times)

    monkeypatch.setattr(runs, "_run", some)
    with pytest.raises(runs.RunsFailed):
        list(runs.make(2, ["gpt2"], tmp_path))
    told = [(run["seed"], run["times"]) for run in runs.kept() if run["optimizer"] == "onebit_adam"]
    assert told == [(0, 1.0), (0, 2.0), (0, 4.0), (0, 8.0), (1, 4.0)]
    one = next(one for one in runs.compared(runs.kept()) if one.method == "onebit_adam")
    assert (one.seeds, one.times, one.tried, one.score) == (2, 4.0, (1.0, 2.0, 4.0, 8.0), 6.5)
    (row,) = rows.scores([one])
    assert row.remark.endswith("4 times the script's rate, the best of 4")


def test_a_search_looks_to_both_sides_and_ends_at_the_end_of_its_range():
    tried = {1.0: 5.0}
    assert rates.following({}, higher_is_better=True) == 1.0
    assert rates.following(tried | {2.0: 4.0}, higher_is_better=True) == 0.5
    assert rates.following(tried | {2.0: 4.0, 0.5: 5.0}, higher_is_better=True) is None  # of equals the nearest to 1
    falling = {2.0**power: -float(power) for power in range(-4, 2)}
    assert rates.following(falling, higher_is_better=True) is None
    assert rates.best({1.0: math.nan, 2.0: math.inf, 0.5: 3.0}, higher_is_better=False) == 0.5


def test_what_begins_with_weights_is_made_again_where_a_better_rate_was_found_for_them(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "KEPT", tmp_path / "runs.jsonl")
    bert, after = (next(one for one in runs.WORKLOADS if one.name == name) for name in ("bert", "bert-glue"))
    first = _run("adam", 0, 1.0) | {"workload": "bert"}
    later = _run("adam", 0, 1.0) | {"workload": "bert-glue", "weights": "bert-adam-0-x1"}
    assert runs.found_rate(after, "adam", [first, later]) == 1.0
    assert runs.compared([first, later])[-1].workload == "bert-glue"
    better = _run("adam", 0, 2.0, times=2.0) | {"workload": "bert"}
    assert runs.found_rate(bert, "adam", [first, better]) == 2.0
    assert [one.workload for one in runs.compared([first, later, better])] == ["bert"]


@pytest.mark.parametrize("higher", [True, False])
def test_a_pair_is_of_one_seed_and_worse_is_positive_whichever_way_the_score_goes(higher):
    kept = [
        _run("adam", 0, 10.0, higher=higher),
        _run("adam", 1, 12.0, higher=higher),
        _run("adam", 7, 99.0, higher=higher),
    ]
    kept += [_run("onebit_adam", 0, 11.0, higher=higher), _run("onebit_adam", 1, 13.0, higher=higher)]
    dense, one = runs.compared(kept)
    assert (dense.method, dense.worse.mean) == ("adam", 0.0)
    assert (one.seeds, one.dense, one.score, one.sent) == (2, 11.0, 12.0, 10.0)
    assert one.worse.mean == (-1.0 if higher else 1.0)
    assert one.worse.half == pytest.approx(0.0)


def test_one_seed_has_no_interval_and_one_worker_no_ratio():
    (_, one) = runs.compared([_run("adam", 0, 10.0), _run("onebit_adam", 0, 11.0, sent=0)])
    assert math.isinf(one.worse.half)
    assert one.sent is None
    (row,) = rows.scores([one])
    assert "+-" not in row.here
    assert "untrained" not in row.here
    assert "fewer bytes" not in row.remark


def test_a_run_that_is_kept_is_not_made_again(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "KEPT", tmp_path / "runs.jsonl")
    gpt2 = next(workload for workload in runs.WORKLOADS if workload.name == "gpt2")
    runs.KEPT.write_text("".join(json.dumps(_run(method, 0, 1.0)) + "\n" for method in gpt2.methods[1:]))
    made = []
    monkeypatch.setattr(rates, "WIDEST", 1.0)

    def some(workload, one, _):
        made.append((workload.name, one.method, one.seed))
        return _run(one.method, one.seed, 1.0)

    monkeypatch.setattr(runs, "_run", some)
    assert len(list(runs.make(1, ["gpt2"], tmp_path))) == 2
    assert made == [("gpt2", gpt2.methods[0], 0), ("gpt2", runs.UNTRAINED, 0)]
    assert [run["optimizer"] for run in runs.kept()[: len(gpt2.methods) - 1]] == list(gpt2.methods[1:])


def test_a_run_that_fails_is_said_at_the_end_and_holds_up_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "KEPT", tmp_path / "runs.jsonl")

    def some(workload, one, _):
        if one.method == "onebit_lamb":
            raise ranks.RankFailed("rank 1 ended with 1")
        return _run(one.method, one.seed, 1.0, times=one.times)

    monkeypatch.setattr(runs, "_run", some)
    with pytest.raises(runs.RunsFailed, match="rank 1 ended with 1"):
        list(runs.make(1, ["gpt2"], tmp_path))
    assert "onebit_muon" in {run["optimizer"] for run in runs.kept()}


def test_weights_that_are_not_there_are_made_again_and_not_kept_twice(monkeypatch, tmp_path):
    ran = []

    def script(file, words, count):
        ran.append(file.name)
        options = dict(zip(words[::2], words[1::2], strict=True))
        Path(options["--out"]).write_text(json.dumps(_run(options["--optimizer"], 0, 1.0)))
        if "--save" in options:
            Path(options["--save"]).mkdir(parents=True)

    monkeypatch.setattr(runs, "KEPT", tmp_path / "runs.jsonl")
    monkeypatch.setattr(ranks, "run", script)
    monkeypatch.setattr(rates, "WIDEST", 1.0)
    made = list(runs.make(1, ["bert-glue"], tmp_path))
    assert ran == ["bert_pretrain.py", "glue.py"] * 5 + ["glue.py"]
    assert len(made) == len(runs.kept()) == 6
    assert made[0]["command"].endswith("glue.py --preset small --optimizer adam --seed 0 --weights bert-adam-0-x1")
    assert not any(str(tmp_path) in line for line in runs.KEPT.read_text().splitlines())


def test_a_rank_that_fails_ends_the_others(tmp_path, monkeypatch):
    """The other one waits for longer than the test may take."""
    monkeypatch.setattr(ranks, "FORKSERVER", multiprocessing.get_context("spawn"))  # which has nothing to import
    script = tmp_path / "fails.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(3)\ntime.sleep(3600)\n")
    with pytest.raises(ranks.RankFailed, match=r"fails\.py: rank 1 ended with 3"):
        ranks.run(script, [], 2)
    assert not multiprocessing.active_children()


def test_a_command_that_is_killed_leaves_no_rank(tmp_path):
    """Each rank holds a lock while it lives; what would hold it forever is let go when the command is killed."""
    (tmp_path / "waits.py").write_text(
        "import fcntl, os, time\n"
        "held = open(os.environ['RANK'] + '.lock', 'w')\n"
        "fcntl.flock(held, fcntl.LOCK_EX)\n"
        "held.write('held')\nheld.flush()\ntime.sleep(3600)\n"
    )
    (tmp_path / "command.py").write_text(
        "import multiprocessing\nfrom pathlib import Path\nfrom benchmarks.papers import ranks\n"
        "if __name__ == '__main__':\n"
        "    ranks.FORKSERVER = multiprocessing.get_context('spawn')\n"
        "    ranks.run(Path('waits.py').resolve(), [], 2)\n"
    )
    command = subprocess.Popen(
        [sys.executable, "command.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    locks = [tmp_path / f"{rank}.lock" for rank in (0, 1)]
    try:
        while not all(lock.exists() and lock.read_text() == "held" for lock in locks):
            assert command.poll() is None
            time.sleep(0.05)
    finally:
        command.kill()
        command.wait()
    for lock in locks:
        with lock.open() as free:
            fcntl.flock(free, fcntl.LOCK_EX)
