"""The size of buckets is chosen once, for all ranks, and a restart has the same."""

import json

import pytest
import torch

from thinwire.comm import SoloGroup, run_threads
from thinwire.comm.layout import DEFAULT_BUCKET
from thinwire.contract.run_folder import RunFolder
from thinwire.workers.session.joining import kept_bucket

CPU = torch.device("cpu")
NUMEL = 1 << 22


def chosen(tmp_path, ranks=2, numel=NUMEL):
    sizes = run_threads(ranks, lambda group: kept_bucket(tmp_path, group, numel, CPU))
    assert len(set(sizes)) == 1
    return sizes[0]


def test_what_was_chosen_is_kept_with_the_network_it_was_chosen_for(tmp_path):
    size = chosen(tmp_path)
    found = json.loads(RunFolder(tmp_path).buckets.read_text())
    assert (found["bucket_elements"], found["elements"], found["ranks"]) == (size, NUMEL, 2)
    assert found["latency_s"] >= 0
    assert found["bytes_per_s"] > 0


def test_a_restart_takes_the_kept_size_and_another_number_of_ranks_does_not(tmp_path):
    file = RunFolder(tmp_path).buckets
    file.write_text(json.dumps({"bucket_elements": 131_072, "elements": NUMEL, "ranks": 2}))
    assert chosen(tmp_path) == 131_072
    assert chosen(tmp_path, ranks=3) != 131_072 or json.loads(file.read_text())["ranks"] == 3
    assert json.loads(file.read_text())["ranks"] == 3


@pytest.mark.parametrize("text", ["", "{}", '{"ranks": 2, "elements": 4194304, "bucket_elements": "many"}'])
def test_a_damaged_file_is_told_and_replaced(tmp_path, text, caplog):
    RunFolder(tmp_path).buckets.write_text(text)
    size = chosen(tmp_path)
    assert "buckets_unreadable" in caplog.text
    assert json.loads(RunFolder(tmp_path).buckets.read_text())["bucket_elements"] == size


def test_one_rank_measures_nothing_and_writes_nothing(tmp_path):
    assert kept_bucket(tmp_path, SoloGroup(), NUMEL, CPU) == DEFAULT_BUCKET
    assert kept_bucket(None, SoloGroup(), NUMEL, CPU) == DEFAULT_BUCKET
    assert not list(tmp_path.iterdir())
