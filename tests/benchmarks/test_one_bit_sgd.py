"""The benchmark of 1-bit SGD runs both methods as jobs, and writes its table."""

import json

import pytest

from benchmarks import one_bit_sgd


@pytest.mark.slow
def test_both_methods_are_run_and_told_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(one_bit_sgd, "RATES", (0.1,))
    one_bit_sgd.main(seeds=1, steps=20, out=tmp_path)
    found = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [(one["method"], one["lr"], one["steps"]) for one in found] == [
        *(("sgd", 0.1, 20),) * 2,
        *(("onebit_sgd", 0.1, 20),) * 2,
    ]
    table = (tmp_path / "README.md").read_text()
    assert "| sgd |" in table
    assert "| onebit_sgd |" in table
