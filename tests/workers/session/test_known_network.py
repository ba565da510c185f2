"""A network that `thinwire bench collectives` has measured: a job of the same ranks on the same boxes goes by it."""

import json
from pathlib import Path

import pytest
import torch

from tests.tools.collectives.made_up import kept, world
from thinwire.comm import bucket_size
from thinwire.comm.groups.threads import run_threads
from thinwire.comm.wire.link_classes import this_box
from thinwire.comm.wire.network import all_gather, all_reduce, all_to_all
from thinwire.contract.collectives import RING, ROWS, default_file, read
from thinwire.workers.session.joining import kept_bucket
from thinwire.workers.session.known_network import known_network

CPU = torch.device("cpu")
NUMEL = 25_000_000


def kept_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latency_s: float, boxes: tuple[str, ...]) -> None:
    """A file where jobs look for it, of a network with this latency."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    links = {RING: (latency_s, 1e8), ROWS: (2 * latency_s, 5e7)}
    kept(default_file(), world(len(boxes), links, boxes=boxes, per_machine=len(boxes) // len(set(boxes))))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_characterised_network_chooses_the_buckets(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_size, "measure", lambda *_, **__: pytest.fail("it was measured again"))
    chosen = []
    for latency_s in (1e-5, 0.1):
        kept_for(tmp_path / str(latency_s), monkeypatch, latency_s, (this_box().id,) * ranks)
        found = run_threads(ranks, lambda group: known_network(group, CPU))
        assert found == [found[0]] * ranks
        network = found[0]
        assert network is not None
        folder = tmp_path / f"run-{latency_s}"
        folder.mkdir()
        sizes = run_threads(ranks, lambda group, folder=folder: kept_bucket(folder, group, NUMEL, CPU))
        assert sizes == [sizes[0]] * ranks
        chosen.append(sizes[0])
        assert json.loads((folder / "buckets.json").read_text())["rows"] == list(network.rows)
        line = read(default_file()).worlds[0].algorithms
        for cost, name in ((all_reduce(ranks, 1e6), RING), (all_to_all(ranks, 1e6) + all_gather(ranks, 1e6), ROWS)):
            expected_s = line[name].alpha_s + line[name].beta_s * 1e6
            assert network.seconds(cost) == pytest.approx(expected_s, rel=1e-6)
    assert chosen[0] < chosen[1] == NUMEL  # where a round takes so long, one bucket is best


def test_a_file_of_other_boxes_or_a_damaged_one_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept_for(tmp_path, monkeypatch, 0.1, (this_box().id, "0" * 16))
    assert run_threads(2, lambda group: known_network(group, CPU)) == [None, None]
    kept_for(tmp_path / "of-three", monkeypatch, 0.1, (this_box().id,) * 3)
    assert run_threads(2, lambda group: known_network(group, CPU)) == [None, None]
    default_file().write_text("{")
    assert run_threads(2, lambda group: known_network(group, CPU)) == [None, None]
    assert "network_unreadable" in caplog.text
    assert min(run_threads(2, lambda group: kept_bucket(tmp_path, group, NUMEL, CPU))) > 0
