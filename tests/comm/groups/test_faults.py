"""A fault happens where it was told to, on the ranks it was told to, and peers fail instead of waiting."""

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from thinwire.comm import PeerLost, SoloGroup, run_threads
from thinwire.comm.groups.faults import Fault, FaultyGroup, What, When

SIZE, BUCKETS = 3, 3


def exchange(group, log):
    """Two phases a bucket, the second on the second communicator; what was finished goes into `log`."""
    rows = torch.ones((group.size, 24), dtype=torch.uint8) * (group.rank + 1)
    out = torch.zeros_like(rows)
    for k in range(BUCKETS):
        first = group.start_all_to_all(out, rows)
        log.append(f"{k} started")
        first.wait()
        log.append(f"{k} first")
        group.second_communicator().start_all_gather(out, rows[0]).wait()
        log.append(f"{k} second")


def run(*faults):
    """What each rank has done, and the rank that its PeerLost names (None: no error)."""

    def work(group):
        faulty, log = FaultyGroup(group), []
        exchange(faulty, [])  # not armed yet: nothing happens
        faulty.arm(*faults)
        try:
            exchange(faulty, log)
        except PeerLost as error:
            return log, error.rank
        return log, None

    return run_threads(SIZE, work)


def test_without_a_fault_it_is_the_group_below():
    def work(group):
        plain, faulty = torch.tensor([1.0, group.rank]), torch.tensor([1.0, group.rank])
        around = FaultyGroup(group)
        group.mean_(plain)
        around.mean_(faulty)
        around.broadcast_(faulty, src=1)
        around.start_sum_(faulty).wait()
        assert around.stats is group.stats
        assert around.second_communicator() is around
        return plain.tolist(), faulty.tolist()

    assert run_threads(2, work) == [([1.0, 0.5], [2.0, 1.0])] * 2
    assert [lost for _, lost in run()] == [None] * SIZE


@pytest.mark.parametrize(
    ("collective", "when", "done"),
    [
        ("all_to_all", When.BEFORE, []),
        ("all_to_all", When.AFTER, ["1 started"]),
        ("all_gather", When.BEFORE, ["1 started", "1 first"]),
        ("all_gather", When.AFTER, ["1 started", "1 first"]),
    ],
)
def test_a_rank_fails_at_its_place_in_its_bucket_and_its_peers_at_their_next_wait(collective, when, done):
    results = run(Fault((2,), collective, 1, when))
    before = ["0 started", "0 first", "0 second"]
    log, lost = results[2]
    assert (log, lost) == (before + done, 2)
    for log, lost in results[:2]:
        assert lost == 2
        assert "2 first" not in log
        assert log[:3] == before[: len(log)]  # rank 2 may break the barrier before a peer has woken up at it
        assert len(log) >= 2


def test_some_ranks_finish_the_last_phase_and_some_do_not():
    results = run(Fault((0, 2), "all_gather", BUCKETS - 1, When.AFTER))
    for rank in (0, 2):
        assert results[rank][0][-1] == f"{BUCKETS - 1} first"
        assert results[rank][1] in (0, 2)


def test_a_hanging_rank_is_found_by_the_time_out():
    def work(group):
        faulty = FaultyGroup(group, Fault((1,), "mean", 0, what=What.HANG, hang_s=1.0))
        with pytest.raises(PeerLost) as raised:
            faulty.mean_(torch.zeros(3))
        return raised.value.rank

    assert run_threads(2, work, timeout_s=0.2) == [1, 1]


def test_a_nan_is_put_into_what_is_given_or_into_what_is_got():
    def work(group):
        faulty = FaultyGroup(group, Fault((0,), "mean", 0, what=What.NAN))
        x = torch.ones(3)
        faulty.mean_(x)
        assert x.isnan().tolist() == [True, False, False]  # on both ranks: it was given
        faulty.arm(Fault((0,), "sum", 1, When.AFTER, What.NAN), Fault((1,), "all_gather", 0, what=What.NAN))
        x = torch.ones(3)
        faulty.start_sum_(x).wait()
        assert not x.isnan().any()
        faulty.start_sum_(x).wait()
        assert x.isnan().any() == (group.rank == 0)
        row = torch.ones(5, dtype=torch.float64).view(torch.uint8)
        rows = torch.zeros((2, 40), dtype=torch.uint8)
        faulty.all_gather(rows, row)
        assert rows.view(torch.float64).isnan().tolist() == [[False] * 5, [False, True, False, False, False]]
        assert rows.view(torch.float32).isnan().sum() == 2
        assert not row.view(torch.float64).isnan().any()  # the copy on the wire is, not the sender's memory
        return True

    assert run_threads(2, work) == [True, True]


def test_a_collective_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="collective = 'gather': must be one of all_to_all"):
        Fault((0,), "gather")


def test_a_group_that_cannot_be_left_fails_by_itself():
    with pytest.raises(PeerLost, match="injected before mean 0") as raised:
        FaultyGroup(SoloGroup(), Fault((0,), "mean")).mean_(torch.zeros(1))
    assert raised.value.rank == 0


PROCESSES = """
from thinwire.comm.groups.faults import *
join()
group = FaultyGroup(TorchGroup(), Fault((1,), "all_gather", 2, what=What.WHAT))
rows = torch.ones((size, 24), dtype=torch.uint8)
out = torch.zeros_like(rows)
try:
    for k in range(4):
        group.start_all_to_all(out, rows).wait()
        group.second_communicator().start_all_gather(out, rows[0]).wait()
        say("done", k)
except PeerLost as error:
    say("lost", error.rank)
    other = os.path.join(folder, f"{2 - rank}.lost")
    until = time.monotonic() + 30
    while not os.path.exists(other) and time.monotonic() < until:  # its process lives on until the other knows too
        time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.parametrize(("what", "code"), [("KILL", -9), ("LOSE", 0)])
def test_processes_are_killed_or_leave_between_the_phases(tmp_path, what, code):
    ranks = start(PROCESSES.replace("What.WHAT", f"What.{what}"), SIZE, tmp_path)
    assert [p.wait(timeout=120) for p in ranks] == [0, code, 0]
    for rank in (0, 2):
        assert said(tmp_path, rank, "lost") == "1"
        assert said(tmp_path, rank, "done") == "1"
