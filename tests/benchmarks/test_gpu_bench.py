"""The benchmark for GPUs runs, on a made-up one; and what it says of that cannot be taken for a GPU's figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import run as parts
from benchmarks.gpu.chain import DeepSpeedStep
from benchmarks.gpu.report import REHEARSAL, table
from tests.emulation.emulator import require_compiler

ROOT = Path(__file__).parents[2]
REHEARSE = """
import sys
from benchmarks.gpu.__main__ import main
code = main(["--rehearse", "--out", sys.argv[1]])
print("brought:", sorted({"ray", "fastapi"} & set(sys.modules)))
sys.exit(code)
"""


def leaves(value, name=""):
    """Every value of a result, with its name."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, name)
    else:
        yield name, value


@pytest.mark.slow
def test_a_rehearsal_runs_every_part_and_says_that_it_is_one(tmp_path):
    require_compiler()
    argv = [sys.executable, "-c", REHEARSE, str(tmp_path)]
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "brought: []" in done.stdout  # a machine with a GPU need have neither
    result, shown = json.loads((tmp_path / "REHEARSAL.json").read_text()), (tmp_path / "REHEARSAL.md").read_text()
    assert result["rehearsal"] is True
    assert result["failed"] == []
    assert set(result["parts"]) == set(parts.PARTS)
    assert all("1300 M" in one["what"] and "memory" in one["why"] for one in result["left_out"])
    assert shown.startswith(f"# {REHEARSAL}")
    measured = ("second", "per_s", "share", "over_adam", "held_bytes", "most_bytes")
    for name, value in leaves(result["parts"]):
        assert not isinstance(value, float) or not any(word in name for word in measured), name
        assert name.startswith("rehearsed_") or not any(word in name for word in measured), name
    assert " ms |" not in shown.replace("| ms |", "").replace(", ms |", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["REHEARSAL.json", "REHEARSAL.md"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_says_what_is_missing_and_ends_with_2(capsys):
    assert command.main([]) == 2
    told = capsys.readouterr().err
    assert "torch sees no GPU" in told
    assert "--rehearse" in told


class Device:
    """Nothing: only its memory is asked for. broken: as after an error of CUDA, which every call meets."""

    rehearsal, device = False, torch.device("cpu")

    def __init__(self, *, broken=False):
        self._broken = broken

    def free_bytes(self):
        if self._broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 100


def test_what_fails_or_does_not_fit_is_kept_and_the_others_go_on(monkeypatch):
    def fails():
        raise ValueError("no such kernel")

    tasks = [
        parts.Task("steps", "that fails", 1.0, fails),
        parts.Task("steps", "too large", 1.0, lambda: [1], needs_bytes=101),
        parts.Task("steps", "too long", 61.0, lambda: [2]),
        parts.Task("steps", "that fits", 1.0, lambda: [3], "family"),
        parts.Task("steps", "as the one before it, which was quick", 61.0, lambda: [4], "family"),
    ]
    monkeypatch.setattr(parts, "tasks", lambda device: tasks)
    said = []
    found = parts.run(Device(), 1.0, said.append)
    assert found.parts == {"steps": [3, 4]}
    assert [(one["what"], one["error"]) for one in found.failed] == [("that fails", "ValueError: no such kernel")]
    assert [one["what"] for one in found.left_out] == ["too large", "too long"]
    assert "memory" in found.left_out[0]["why"]
    assert "left of 1 minutes" in found.left_out[1]["why"]
    assert any("quick, about 30 s" in line for line in said)


def test_what_was_measured_outlives_a_broken_device_and_an_interrupt(monkeypatch):
    def interrupts():
        raise KeyboardInterrupt

    monkeypatch.setattr(
        parts, "tasks", lambda device: [parts.Task("steps", str(k), 1.0, lambda: [1]) for k in range(2)]
    )
    found = parts.run(Device(broken=True), 1.0, lambda line: None)
    assert ["illegal memory access" in one["error"] for one in found.failed] == [True, True]
    tasks = [parts.Task("steps", "0", 1.0, lambda: [1]), parts.Task("steps", "1", 1.0, interrupts)]
    tasks.append(parts.Task("steps", "2", 1.0, lambda: [2]))
    monkeypatch.setattr(parts, "tasks", lambda device: tasks)
    kept = []
    found = parts.run(Device(), 1.0, lambda line: None, lambda found: kept.append(len(found.parts["steps"])))
    assert kept == [1, 1]
    assert [one["what"] for one in found.failed] == ["1"]
    assert found.left_out == [{"part": "steps", "what": "2", "why": "interrupted"}]


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_minutes_that_are_none_are_refused(minutes):
    with pytest.raises(SystemExit):
        command.main(["--rehearse", "--minutes", minutes])


def test_the_table_of_a_gpu_has_medians_spread_and_shares():
    steps = {"values": 25_000_000, "step": "1-bit Adam", "ranks": 8, "seconds": [1e-3, 2e-3, 4e-3]}
    steps |= {"adam_seconds": [1e-3], "over_adam": 2.0, "launches": 31.0}
    kernel = {"values": 25_000_000, "kernel": "serve", "seconds": [1e-3], "gb_per_s": 1500.0}
    kernel |= {"copy_gb_per_s": 2000.0, "share_of_copy": 0.75}
    result = {
        "rehearsal": False, "command": "python -m benchmarks.gpu", "commit": "abc", "began": "now", "spent_s": 5.0,
        "minutes": 10.0, "gpus": [{"name": "X100"}], "nvidia_smi": [{"driver_version": "1.2"}],
        "versions": {"torch": "9"}, "kernels": "CUDA kernels", "finished": True,
        "parts": {"steps": [steps], "kernels": [kernel]}, "left_out": [], "failed": [],
    }  # fmt: skip
    shown = table(result)
    assert shown.startswith("# On a GPU: X100")
    assert "| 25 M | 1-bit Adam | 8 | 2.000 (1.000 to 4.000) | 1.000 (1.000 to 1.000) | 2.00 x | 31 |" in shown
    assert "| 25 M | serve | 1.000 (1.000 to 1.000) | 1500 | 2000 | 75% |" in shown
    assert "Not finished" not in shown
    assert "plain torch" not in shown
    shown = table({**result, "kernels": "plain torch", "finished": False})
    assert "Not finished" in shown
    assert "Ours ran as plain torch" in shown


def test_the_chain_loses_nothing_but_to_its_errors():
    """Else it would be a straw man: what is not sent is in the errors, as DeepSpeed's exchange has it."""
    torch.manual_seed(0)
    chain = DeepSpeedStep(1000, 1, torch.device("cpu"))
    given = chain._m.clone()
    for _ in range(3):
        before = given + chain._worker_error + chain._server_error
        chain._exchange(chain._m.copy_(given))
        torch.testing.assert_close(chain._m + chain._worker_error + chain._server_error, before)
        assert len(chain._m.abs().unique()) <= 2  # one scale, to rounding
