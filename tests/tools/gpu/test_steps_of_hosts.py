"""Steps of ranks as hosts: the command runs, on processors; what fails or finds no time costs no other row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from thinwire.cli import bench
from thinwire.tools.gpu import run
from thinwire.tools.gpu.cases import FIRST, IN_BOXES, NOTHING, RATES_MBIT, THEN, TITLES, passes
from thinwire.tools.gpu.table import REHEARSAL, table
from thinwire.tools.lab import Line
from thinwire.tools.marked_lines import MARK

ROOT = Path(__file__).parents[3]
ALONE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "ray", "fastapi", "sqlalchemy", "typer", "httpx", "yaml"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
"""A machine with a GPU has torch, and what we need beside it need not be there."""
REHEARSE = """
import benchmarks.gpu.__main__, benchmarks.gpu_hosts, thinwire.tools.gpu.rank
sys.exit(benchmarks.gpu_hosts.main(["--rehearse", *sys.argv[1:]]))
"""


def rehearsed(out: Path, *options: str) -> dict:
    """The result of a rehearsal, by a process of its own that lacks what ALONE says."""
    argv = [sys.executable, "-c", ALONE + REHEARSE, "--out", str(out), *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert sorted(path.name for path in out.iterdir()) == ["REHEARSAL.json", "REHEARSAL.md"]
    return json.loads((out / "REHEARSAL.json").read_text())


@pytest.mark.slow
def test_a_rehearsal_trains_on_hosts_of_a_lab_and_counts_what_they_send(namespaces, tmp_path):  # noqa: F811
    result = rehearsed(tmp_path, "--rates", "1000", "--only", "ddp_fp32,deepspeed,onebit_adam_clipped")
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == [NOTHING, "ddp_fp32", "onebit_adam_clipped"]
    assert result["finished"]
    assert "DeepSpeed is not installed" in result["left_out"][0]["why"]
    values = rows["ddp_fp32"]["values"]
    # A ring of two sends each value once; frames have headers.
    assert 4 * values < rows["ddp_fp32"]["wire_bytes"] < 1.3 * 4 * values
    ours = rows["onebit_adam_clipped"]
    assert values / 8 < ours["payload_bytes"] < values / 4
    assert ours["payload_bytes"] < ours["wire_bytes"] < 4 * values / 5
    assert rows[NOTHING]["wire_bytes"] < 0.02 * 4 * values
    assert rows["ddp_fp32"]["losses"][0] > rows["ddp_fp32"]["losses"][-1]
    assert all(row["replicas_equal"] for row in result["rows"] if row["method"] != NOTHING)
    assert not any(key in row for row in result["rows"] for key in ("seconds", "peak_bytes"))
    assert (tmp_path / "REHEARSAL.md").read_text().startswith(f"# {REHEARSAL}")


@pytest.mark.slow
def test_all_of_it_is_rehearsed(namespaces, tmp_path):  # noqa: F811
    result = rehearsed(tmp_path)
    assert result["failed"] == []
    assert {one["method"] for one in result["left_out"]} <= {"deepspeed"}
    done = {(row["where"], row["method"]) for row in result["rows"]}
    todo = {(one.words(), name) for one in passes(2, run.REHEARSED_RATES) for name in (NOTHING, *one.methods)}
    assert todo - done == {(where, name) for where, name in todo if name == "deepspeed"}
    assert all(row["replicas_equal"] for row in result["rows"] if row["method"] != NOTHING)


def test_every_method_is_measured_at_every_rate_the_most_valuable_first():
    todo = passes(2, RATES_MBIT)
    assert {name for one in todo for name in one.methods} == set(TITLES) - {NOTHING}
    assert [one.words() for one in todo][:3] == [
        "2 hosts, 10 Gbit/s", "2 hosts, 1 Gbit/s", "2 hosts of 2 ranks, 10 Gbit/s",
    ]  # fmt: skip
    for rate in RATES_MBIT:
        flat = [name for one in todo if (one.rate_mbit, one.ranks_per_host) == (rate, 1) for name in one.methods]
        boxed = [name for one in todo if (one.rate_mbit, one.ranks_per_host) == (rate, 2) for name in one.methods]
        assert (flat, boxed) == ([*FIRST, *THEN], list(IN_BOXES))
    assert {one.rate for one in todo} == {"10 Gbit/s", "1 Gbit/s", "unshaped", "2.7 Gbit/s", "25 Gbit/s"}
    (one,) = passes(3, [1000.0], ["lamb"])
    assert (one.hosts, one.methods) == (3, ("lamb",))


ROW = {"seconds": [2.0, 1.0, 4.0], "wire_bytes": 2e6, "payload_bytes": None, "peak_bytes": 0, "replicas_equal": True}


class Ranks:
    """Measures all, but for the method at which it fails."""

    def __init__(self, fails: str | None = None) -> None:
        self.fails, self.starts = fails, []

    def __call__(self, one, orders, limit_s, on_line):
        self.starts.append((one.words(), orders.methods))

        def say(rank=0, **told):
            on_line(Line(rank, "stdout", f"noise {MARK}{json.dumps(told)}"))

        on_line(Line(1, "stderr", "a warning"))
        for name in orders.methods:
            if self.fails == "to start":
                return "rank 1 failed, return codes [0, 1]: no such device"
            say(kind="begin", method=name)
            if name == self.fails:
                say(1, kind="failed", error="ValueError: no such kernel", at="there")
                return "rank 1 failed, return codes [0, 1]"
            say(kind="row", method=name, **ROW)
        say(kind="end")
        return None


def measured(ranks, only, minutes=1.0):
    kept = []
    found = run.measure(
        passes(2, [1000.0], only),
        "tiny",
        "cuda",
        minutes,
        lambda line: None,
        lambda found: kept.append(len(found.rows)),
        ranks,
    )
    return found, kept


def test_a_method_that_fails_costs_its_pass_a_new_start_and_no_other_row():
    ranks = Ranks(fails="ddp_fp32")
    found, kept = measured(ranks, ["ddp_bf16", "ddp_fp32", "lamb", "hsdp"])
    assert [row["method"] for row in found.rows] == [NOTHING, "ddp_bf16", "lamb", NOTHING, "ddp_bf16", "hsdp"]
    assert [(one["where"], one["method"], one["error"], one["rank"]) for one in found.failed] == [
        ("2 hosts, 1 Gbit/s", "ddp_fp32", "ValueError: no such kernel", 1)
    ]
    assert [methods for _, methods in ranks.starts] == [
        (NOTHING, "ddp_bf16", "ddp_fp32", "lamb"), ("lamb",), (NOTHING, "ddp_bf16", "hsdp"),
    ]  # fmt: skip
    assert kept[-1] == len(found.rows)


def test_ranks_that_do_not_start_are_tried_once_and_the_other_passes_go_on():
    ranks = Ranks(fails="to start")
    found, _ = measured(ranks, ["ddp_bf16"])
    assert [(one["where"], one["method"]) for one in found.failed] == [
        ("2 hosts, 1 Gbit/s", "none, ddp_bf16"), ("2 hosts of 2 ranks, 1 Gbit/s", "none, ddp_bf16"),
    ]  # fmt: skip
    assert "no such device" in found.failed[0]["error"]


def test_what_the_minutes_do_not_reach_is_told():
    ranks = Ranks()
    found, _ = measured(ranks, ["ddp_bf16"], minutes=0.01)
    assert (found.rows, ranks.starts) == ([], [])
    assert {one["method"] for one in found.left_out} == {NOTHING, "ddp_bf16"}
    assert "the 0.01 minutes were over" in found.left_out[0]["why"]


def test_the_table_compares_each_row_with_no_exchange_in_its_pass():
    rows = [
        {"where": "here", "method": NOTHING, **ROW},
        {"where": "here", "method": "lamb", **ROW, "seconds": [3.0], "payload_bytes": 1e6, "peak_bytes": 5e9},
        {"where": "here", "method": NOTHING, **ROW, "seconds": [6.0]},
        {"where": "here", "method": "muon", **ROW, "seconds": [9.0], "replicas_equal": False},
    ]
    failed = [{"where": "here", "method": "none, hsdp", "error": "why\nat length"}]
    shown = table(
        {
            "rehearsal": False, "machine": {"gpu": "X100", "nccl": "2.9"}, "hardware": {}, "versions": {"torch": "9"},
            "command": "c", "began": "now", "spent_s": 1.0, "minutes": 2.0, "finished": False, "rows": rows,
            "left_out": [], "failed": failed,
        }
    )  # fmt: skip
    assert shown.startswith("# Ranks of one machine as hosts: X100")
    assert "| LAMB, fp32 | 3.0000 (3.0000 to 3.0000) | 1.50 | 2.00 | 1.00 | 5.00 | yes |" in shown
    assert "| Muon, fp32 | 9.0000 (9.0000 to 9.0000) | 1.50 | 2.00 | - | - | **no** |" in shown
    assert "Not finished" in shown
    assert shown.endswith("## Failed\n\n* here: none, hsdp: why\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_the_command_line_says_what_is_missing_and_ends_with_2(capfd):
    told = CliRunner().invoke(bench.app, ["gpu", "--minutes", "1"])
    assert told.exit_code == 2
    assert "thinwire bench gpu --rehearse" in told.output + capfd.readouterr().err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--minutes", "0"], "above 0"),
        (["--hosts", "1"], "from 2 to 128"),
        (["--rates", "1000,0.5"], "0.5: must be from 1 to 100000 Mbit/s"),
        (["--only", "adam,ddp"], "adam, ddp: must be of none, onebit_adam"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_can(option, words, capsys):
    with pytest.raises(SystemExit) as ended:
        run.main(["--rehearse", *option])
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())
