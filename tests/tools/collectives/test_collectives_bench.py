"""Ranks of the bench: what they compute, what they keep, and what they say where that cannot be."""

import json

import pytest
from typer.testing import CliRunner

from tests.comm import gloo_ranks
from tests.tools.collectives.made_up import kept, world
from tests.tools.lab.conftest import namespaces  # noqa: F401 - a fixture
from thinwire.cli import bench
from thinwire.contract.collectives import AT_HAND, TITLES, read
from thinwire.tools.collectives.asked import Asked, BenchFailed, size_bytes, size_text
from thinwire.tools.collectives.run import run

TREE = """
join()
from thinwire.tools.collectives.algorithms import tree_sum_
for n in range(2, size + 1):
    process_group = dist.new_group(list(range(n)))
    if rank < n:
        x = torch.arange(5.0) * (rank + 1)
        tree_sum_(TorchGroup(process_group), x, torch.empty_like(x))
        assert torch.equal(x, torch.arange(5.0) * (n * (n + 1) // 2)), (rank, n, x)
    dist.barrier()
say("done", "yes")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 8])
def test_a_tree_gives_all_ranks_the_sum_whatever_their_number(size, tmp_path):
    for rank in gloo_ranks.start(TREE, size, tmp_path):
        assert rank.wait(120) == 0
    assert [gloo_ranks.said(tmp_path, rank, "done") for rank in range(size)] == ["yes"] * size


BENCH = """
os.environ.update(WORLD_SIZE=str(size), RANK=str(rank))
join()
from pathlib import Path
from thinwire.tools.collectives.asked import Asked
from thinwire.tools.collectives.run import run
heard = []
asked = Asked(sizes=(1000, 4096, 10_001, 65_536, 262_144), turns=2, piece_bytes=4096, out=Path(folder) / "kept.json")
outcome = run(asked, lambda what, done: heard.append(what))
say("outcome", None if outcome is None else outcome.link)
say("heard", heard)
dist.destroy_process_group()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_measure_all_algorithms_and_the_first_keeps_them(size, tmp_path):
    for rank in gloo_ranks.start(BENCH, size, tmp_path):
        assert rank.wait(120) == 0
    (found,) = read(tmp_path / "kept.json").worlds
    assert (found.ranks, found.per_machine, found.device, found.backend) == (size, size, "cpu", "gloo")
    assert list(found.algorithms) == list(TITLES)
    for line in found.algorithms.values():
        assert [one.vector_bytes for one in line.timings] == [1000, 4096, 10_001, 65_536, 262_144]
        assert all(len(one.seconds) == 2 and min(one.seconds) > 0 for one in line.timings)
    said = [gloo_ranks.said(tmp_path, rank, "outcome") for rank in range(size)]
    assert said == [AT_HAND] + ["None"] * (size - 1)
    assert f"{size} ranks, 64k" in gloo_ranks.said(tmp_path, 0, "heard")
    assert gloo_ranks.said(tmp_path, 1, "heard") == "[]"


DIES = """
os.environ.update(WORLD_SIZE=str(size), RANK=str(rank))
join()
from pathlib import Path
from thinwire.tools.collectives import measure
from thinwire.tools.collectives.asked import Asked, BenchFailed
from thinwire.tools.collectives.run import run
if rank == 1:
    call_of = measure.call_of
    def dying(name, *given):
        call, calls = call_of(name, *given), []
        def once():
            calls.append(name)
            if name == "{at}" and len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            call()
        return once
    measure.call_of = dying
try:
    run(Asked(turns=5, out=Path(folder) / "kept.json"), lambda what, done: None)
except BenchFailed as error:
    say("error", error)
    sys.exit(1)
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("at", ["chain", "tree"])  # the one a collective, the other of send and recv
def test_a_rank_that_dies_is_named_and_nothing_is_kept(at, tmp_path):
    ranks = gloo_ranks.start(DIES.replace("{at}", at), 3, tmp_path, timeout_s=20.0)
    assert ranks[0].wait(60) == ranks[2].wait(60) == 1
    for rank in (0, 2):
        told = gloo_ranks.said(tmp_path, rank, "error")
        assert "lost rank 1" in told
        assert "Nothing is kept; start all ranks again" in told
    assert not (tmp_path / "kept.json").exists()


def test_one_rank_is_told_how_to_start_more(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(BenchFailed, match=r"one rank exchanges with nobody(.|\n)*torchrun --nnodes 2"):
        run(Asked(out=tmp_path / "kept.json"), lambda what, done: None)
    assert list(tmp_path.iterdir()) == []


def bench_of(*options):
    return CliRunner().invoke(bench.app, ["collectives", *options], env={"COLUMNS": "300", "TERM": "dumb"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "2"], "--hosts makes a lab, which needs both"),
        (["--rate", "1gbit"], "--rate makes a lab, which needs both"),
        (["--delay", "1ms"], "they need --hosts and --rate"),
        (["--hosts", "2", "--rate", "fast"], "'fast' is not a rate with its unit"),
        (["--hosts", "1000", "--rate", "1gbit"], "hosts = 1000: must be a whole number from 1 to 128"),
        (["--sizes", "1k"], "must be two or more, ascending"),
        (["--sizes", "4k,1k"], "must be two or more, ascending"),
        (["--sizes", "1k,lots"], "'lots' is not a size"),
        (["--sizes", "1,1k"], "must be from 4 bytes to 1g"),
        (["--sizes", "1k,2g"], "must be from 4 bytes to 1g"),
        (["--sizes", "256k,1m"], "whole pieces alone cannot tell a chain's latency from its bandwidth"),
        (["--piece", "10"], "piece = 10: must be from 1k to 1g"),
        (["--algorithms", "ring,star"], "star: must be of ring, rows, tree, broadcast, chain"),
        (["--device", "tpu"], "must be auto, cpu or gpu"),
        (["--turns", "0"], "--turns"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_started(options, words, monkeypatch):
    monkeypatch.setattr("thinwire.cli.bench_collectives.work", lambda name: pytest.fail("it was started"))
    done = bench_of(*options)
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("options", [[], ["--hosts", "1", "--rate", "1gbit"]])
def test_one_rank_is_no_network_on_the_command_line(options, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = bench_of(*options)
    assert done.exit_code == 1
    assert "one rank exchanges with nobody" in done.output


def test_a_rank_among_others_makes_no_lab(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = bench_of("--hosts", "2", "--rate", "1gbit")
    assert done.exit_code == 1
    assert "leave out one" in done.output


def test_a_file_of_another_link_is_told_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    file = kept(tmp_path / "kept.json", world(), link="a lab of 100 Mbit/s, 0.1 ms one way")
    done = bench_of("--hosts", "2", "--rate", "1gbit", "--out", str(file))
    assert done.exit_code == 1
    assert "is of a lab of 100 Mbit/s, 0.1 ms one way, and this is a lab of 1000 Mbit/s" in done.output


def test_sizes_are_read_as_they_are_written():
    for text, num_bytes in (("4096", 4096), ("64k", 1 << 16), ("1m", 1 << 20), ("1MiB", 1 << 20), ("1g", 1 << 30)):
        assert size_bytes(text) == num_bytes
    assert [size_text(size) for size in (1000, 4096, 1 << 20, 3 << 20, 1 << 30)] == ["1000", "4k", "1m", "3m", "1g"]


@pytest.mark.slow
def test_a_lab_is_made_measured_and_kept(namespaces, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    file = tmp_path / "lab.json"
    options = ["--hosts", "2", "--rate", "1gbit", "--sizes", "1k,16k,64k,256k", "--turns", "2", "--out", str(file)]
    done = bench_of(*options, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["link"] == "a lab of 1000 Mbit/s, 0.1 ms one way"
    assert told["world"]["ranks"] == 2
    assert len(set(told["world"]["boxes"])) == 2
    (found,) = read(file).worlds
    assert list(found.algorithms) == list(TITLES)
    again = bench_of(*options)
    assert "mean: ring all-reduce" in again.stdout
    assert f"thinwire plan JOB --collectives {file} --workers 2" in again.stdout
    assert len(read(file).worlds) == 1
