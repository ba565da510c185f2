"""Saving in the background: training goes on; a failure is told and costs that checkpoint, a crash no more."""

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.workers.checkpoints.states import CPU, GENERATION, assert_same, save, state
from tests.workers.checkpoints.storages import Full, Gated, Raising
from thinwire.workers.checkpoints import CheckpointId, CheckpointStore, Writer

FIRST, SECOND, THIRD = (CheckpointId(GENERATION, step) for step in (10, 20, 30))


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


@pytest.fixture
def writers(store):
    """`writers(n)`: those of n ranks, closed at the end."""
    made = []

    def make(size, **options):
        made.extend(Writer(store, **options) for _ in range(size))
        return made[-size:]

    yield make
    if isinstance(store.storage, Gated):
        store.storage.gate.set()
    for writer in made:
        writer.close(timeout_s=10)


def save_by(writers, which, content=None):
    return [writer.save(which, rank, len(writers), content or state(which.step)) for rank, writer in enumerate(writers)]


def files(store):
    return {path.name for path in Path(store.storage.path).rglob("*") if path.is_file()}


def test_saving_returns_while_the_store_is_still_writing_and_what_training_then_changes_is_not_saved(store, writers):
    gated = store.storage = Gated(store.storage.path)
    content = state(10)
    tickets = save_by(writers(3), FIRST, content)
    assert gated.reached.wait(30)
    for tensor in (*content.flat.values(), *content.buffers.values()):
        tensor.zero_()
    assert not any(ticket.over for ticket in tickets)
    assert store.newest_whole() is None
    gated.gate.set()
    assert tickets[0].wait(30)
    assert_same(store.load(FIRST, CPU), state(10))


def test_a_save_waits_for_the_one_before_so_that_no_rank_leaves_one_out(store, writers):
    gated = store.storage = Gated(store.storage.path)
    (writer,) = writers(1)
    first = writer.save(FIRST, 0, 1, state(10))
    second = []
    thread = threading.Thread(target=lambda: second.append(writer.save(SECOND, 0, 1, state(20))))
    thread.start()
    assert gated.reached.wait(30)
    assert not second
    gated.gate.set()
    thread.join(30)
    assert writer.wait(30)
    assert [ticket.failure for ticket in (first, *second)] == [None, None]
    assert_same(store.load(FIRST, CPU), state(10))
    assert_same(store.load(SECOND, CPU), state(20))


def test_a_save_behind_one_that_does_not_end_is_refused_and_says_so(store, writers):
    store.storage = Gated(store.storage.path)
    (writer,) = writers(1, commit_timeout_s=0.05)
    writer.save(FIRST, 0, 1, state(10))
    second = writer.save(SECOND, 0, 1, state(20))
    assert second.over
    assert "the one before has been in writing" in second.failure


def test_a_save_waits_for_the_shards_of_others_beside_the_next_one(store, writers):
    """Rank 1 died in writing the first: the next, of those who are left, is not held up by it."""
    left = Writer(store, commit_timeout_s=600)
    first = left.save(FIRST, 0, 2, state(10))
    second = left.save(CheckpointId(GENERATION + 1, 20), 0, 1, state(20))
    assert second.wait(30)
    assert second.failure is None
    assert not first.over
    assert store.newest_whole().step == 20
    assert left.close(timeout_s=0) is False


def test_one_that_a_rank_never_delivered_is_given_up_by_name_and_nothing_is_left_of_it(store, writers, caplog):
    save(store, 5)
    before = files(store)
    ranks = writers(3, commit_timeout_s=0.1)
    assert ranks[2].save(FIRST, 2, 3, state(10)).wait(30)
    with caplog.at_level(logging.ERROR):
        ticket = ranks[0].save(FIRST, 0, 3, state(10))
        assert ticket.wait(30)
    assert "no shard of rank 1 within 0." in ticket.failure
    assert f"checkpoint_failed step=10 path={store.address(FIRST)} reason=no shard of rank 1" in caplog.text
    assert store.newest_whole().step == 5
    assert files(store) == before
    assert not Path(store.address(FIRST)).exists()


def test_one_whose_part_nobody_will_give_is_given_up_when_and_why_its_patience_says(store, writers):
    asked = []

    def patience(missing):
        asked.append(missing)
        return 0.0, "worker 5 (rank 1) has left"

    (writer,) = writers(1, commit_timeout_s=600)
    ticket = writer.save(FIRST, 0, 3, state(10), patience=patience)
    assert ticket.wait(30)
    assert asked == [[1, 2]]
    assert ticket.failure.startswith("no shard of rank 1, 2 within")
    assert ticket.failure.endswith("s: worker 5 (rank 1) has left")
    assert files(store) == set()


@pytest.mark.parametrize("full_rank", [0, 1, 2])
def test_a_full_disk_is_told_leaves_the_one_before_intact_and_the_next_save_succeeds(store, writers, full_rank, caplog):
    save(store, 5, 3)
    full = store.storage = Full(store.storage.path, f"shard-0000{full_rank}-of-00003.safetensors")
    ranks = writers(3)
    before = files(store)
    tickets = save_by(ranks, FIRST)
    with caplog.at_level(logging.ERROR):
        assert all(ticket.wait(30) for ticket in tickets)
    assert f"rank {full_rank}: OSError: [Errno 28] No space left on device" in tickets[0].failure
    assert "checkpoint_failed" in caplog.text
    assert store.newest_whole().step == 5
    assert_same(store.load(CheckpointId(GENERATION, 5), CPU), state(5))
    assert not {name for name in files(store) if "partial" in name}
    full.refused = ""
    assert save_by(ranks, SECOND)[0].wait(30)
    assert store.newest_whole() == SECOND
    assert files(store) == before
    assert not Path(store.address(FIRST)).exists()


def test_a_disk_too_full_for_the_manifest_leaves_the_one_before(store, writers):
    save(store, 5)
    store.storage = Full(store.storage.path, "manifest")
    (writer,) = writers(1)
    ticket = writer.save(FIRST, 0, 1, state(10))
    assert ticket.wait(30)
    assert "No space left" in ticket.failure
    assert store.newest_whole().step == 5
    assert not Path(store.address(FIRST)).exists()


def test_a_real_disk_that_is_full_leaves_the_one_before(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3500k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root mounts a small disk")
    try:
        store = CheckpointStore(disk / "checkpoints", keep=2)
        writer = Writer(store)
        content = state(10)
        content.flat["parameters"] = torch.rand(500_000)  # 2 MB of 3.5
        assert writer.save(FIRST, 0, 1, content).wait(30)
        full = writer.save(SECOND, 0, 1, content)
        assert full.wait(30)
        assert "No space left on device" in full.failure
        assert store.newest_whole() == FIRST
        assert_same(store.load(FIRST, CPU), content)
        assert len(list((disk / "checkpoints").iterdir())) == 1
        pair = [Writer(store) for _ in range(2)]
        for step in (20, 30, 40):  # there is room for the half of one rank: what is left of it would stay for ever
            which = CheckpointId(GENERATION, step)
            half = pair[1].save(which, 1, 2, content)
            assert half.wait(30)
            assert half.failure is None
            other = pair[0].save(which, 0, 2, content)
            assert other.wait(30)
            assert "rank 0: OSError: [Errno 28] No space left on device" in other.failure
        assert all(one.close(10) for one in pair)
        small = writer.save(CheckpointId(GENERATION, 50), 0, 1, state(50))
        assert small.wait(30)
        assert store.newest_whole().step == 50
        assert writer.close(10)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_defect_of_a_store_is_told_and_not_raised(store, writers):
    store.storage = Raising(store.storage.path)
    (writer,) = writers(1)
    for which in (FIRST, SECOND):
        ticket = writer.save(which, 0, 1, state(10))
        assert ticket.wait(30)
        assert "ZeroDivisionError: a defect" in ticket.failure


def test_content_that_no_checkpoint_can_hold_is_refused_at_once(writers):
    content = state(10)
    content.flat["wave"] = torch.zeros(3, dtype=torch.complex64)
    (writer,) = writers(1)
    with pytest.raises(ValueError, match=r"flat.wave has dtype torch.complex64"):
        writer.save(FIRST, 0, 1, content)
    del content.flat["wave"]
    assert writer.save(SECOND, 0, 1, content).wait(30)
    assert writer.wait(0), "the refused one left nothing to wait for"


def test_those_that_ended_are_told_once_in_their_order(store, writers):
    full = store.storage = Full(store.storage.path)
    (writer,) = writers(1)
    assert writer.ended() == []
    first = writer.save(FIRST, 0, 1, state(10))
    assert first.wait(30)
    full.refused = "manifest"
    second = writer.save(SECOND, 0, 1, state(20))
    assert writer.wait(30)
    assert writer.ended() == [first, second]
    assert writer.ended() == []
    assert (first.failure, bool(second.failure)) == (None, True)


def test_saving_a_step_again_when_all_leave_is_the_save_that_there_is(store, writers):
    ranks = writers(2)
    tickets = save_by(ranks, FIRST)
    assert tickets[0].wait(30)
    assert [writer.ended() for writer in ranks]
    assert save_by(ranks, FIRST) == tickets


def test_the_number_of_ranks_and_the_rank_may_change_from_save_to_save(store, writers):
    ranks = writers(3)
    assert save_by(ranks, FIRST)[0].wait(30)
    later = CheckpointId(GENERATION + 1, 20)
    assert save_by(ranks[:0:-1], later)[0].wait(30)  # those that were 2 and 1 are now 0 and 1
    assert store.newest_whole() == later
    assert_same(store.load(later, CPU), state(20))
    assert_same(store.load(FIRST, CPU), state(10))


def test_a_manifest_waits_until_this_worker_may_commit(store, writers):
    allowed, asked = threading.Event(), threading.Event()

    def may_commit():
        asked.set()
        return allowed.is_set()

    ranks = writers(2, may_commit=may_commit)
    tickets = save_by(ranks, FIRST)
    assert asked.wait(30)
    assert not tickets[0].over
    assert store.newest_whole() is None
    allowed.set()
    assert tickets[0].wait(30)
    assert store.newest_whole() == FIRST


def test_a_worker_that_may_not_commit_for_long_gives_the_checkpoint_up_and_removes_it(store, writers):
    ranks = writers(2, may_commit=lambda: False, commit_timeout_s=0.2)
    tickets = save_by(ranks, FIRST)
    assert tickets[0].wait(30)
    assert "could not tell whether others go on without it" in tickets[0].failure
    assert files(store) == set()


def test_a_worker_that_is_told_that_it_may_never_commit_gives_the_checkpoint_up_at_once(store, writers):
    def fenced():
        raise RuntimeError("the others have gone on")

    (writer,) = writers(1, may_commit=fenced, commit_timeout_s=600)
    ticket = writer.save(FIRST, 0, 1, state(10))
    assert ticket.wait(30)
    assert ticket.failure == "RuntimeError: the others have gone on"
    assert files(store) == set()


def test_a_refusal_is_told_at_once_and_what_another_rank_still_writes_stays_until_it_has_written(store, writers):
    gated = Gated(store.storage.path, "shard-00002")
    slow, failing, first = CheckpointStore(store.storage.path, 2), CheckpointStore(store.storage.path, 2), store
    slow.storage, failing.storage = gated, Full(store.storage.path, "shard-00001-of-00003.safetensors")
    ranks = [Writer(one) for one in (first, failing, slow)]
    try:
        tickets = save_by(ranks, FIRST)
        assert gated.reached.wait(30)
        assert tickets[0].wait(30)
        assert "rank 1: OSError: [Errno 28]" in tickets[0].failure
        assert any("shard-00002" in name for name in files(store)), "it is being written"
        gated.gate.set()
        assert tickets[2].wait(30)
        failing.storage.refused = ""
        assert save_by(ranks, SECOND)[0].wait(30)
        assert not Path(store.address(FIRST)).exists()
        assert store.newest_whole() == SECOND
    finally:
        gated.gate.set()
        assert all(writer.close(10) for writer in ranks)


def test_what_failed_is_saved_again_by_all_ranks_when_all_leave_at_that_step(store, writers):
    full = store.storage = Full(store.storage.path, "shard-00000")
    ranks = writers(2)
    for attempt in range(2):
        mark = ranks[0].mark(FIRST)
        tickets = [writer.save(FIRST, rank, 2, state(10), mark) for rank, writer in enumerate(ranks)]
        assert tickets[0].wait(30)
        assert bool(tickets[0].failure) is (attempt == 0)
        full.refused = ""
    assert ranks[0].mark(FIRST) == mark
    assert store.newest_whole() == FIRST


def test_closing_gives_up_what_is_not_over_in_time(store, writers):
    (writer,) = writers(1)
    ticket = writer.save(FIRST, 0, 2, state(10))
    began = time.monotonic()
    assert writer.close(timeout_s=0.2) is False
    assert time.monotonic() - began < 10
    assert ticket.wait(30)
    assert "closed before all ranks had delivered" in ticket.failure


@pytest.mark.parametrize(
    "held",
    [
        pytest.param("shard-00000-of-00002.safetensors", marks=pytest.mark.slow),
        pytest.param("shard-00001-of-00002.json", marks=pytest.mark.slow),
        "manifest.json",
    ],
)
def test_a_process_killed_in_the_middle_of_writing_leaves_the_one_before(tmp_path, held):
    directory = tmp_path / "checkpoints"
    with half_way(directory, held) as child:
        child.kill()
    store = CheckpointStore(directory, keep=2, settle_s=0)
    assert list(directory.rglob(f".{held}.*.partial")), "it was half-way"
    assert store.newest_whole() == FIRST
    assert_same(store.load(FIRST, CPU), state(10))
    again = save(store, 20, 3, generation=store.begin(None))
    assert store.newest_whole() == again
    assert not list(directory.rglob("*.partial"))
    assert len(list(directory.glob("step-*"))) == 2


@pytest.mark.slow
def test_a_process_stopped_before_its_manifest_wakes_and_takes_nothing_from_those_that_went_on(tmp_path):
    """It has looked whether it may, and has not put it yet: nothing can keep it from that any more."""
    directory = tmp_path / "checkpoints"
    with half_way(directory, "manifest.json") as child:
        child.send_signal(signal.SIGSTOP)
        store = CheckpointStore(directory, keep=2)
        newer = [save(store, step, generation=GENERATION + 1) for step in (11, 12)]
        child.send_signal(signal.SIGCONT)
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.readline() == "None\n", "it does not know better"
    assert (Path(store.address(SECOND)) / "manifest.json").exists(), "it was late, and it was put"
    assert store.newest_whole() == newer[-1]
    for which in newer:
        assert_same(store.load(which, CPU), state(which.step))


def half_way(directory, held):
    """A process that stands still in the middle of writing the file of its second checkpoint."""
    command = [sys.executable, "-m", "tests.workers.checkpoints.dying_writer", str(directory), held]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "half\n"
    return child
