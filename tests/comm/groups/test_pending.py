"""Started collectives give what blocking ones give, count the same; two communicators do not wait for one another."""

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from thinwire.comm import SoloGroup, ThreadGroup, run_threads


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_started_collectives_on_threads_equal_the_blocking_ones(size):
    def work(group: ThreadGroup):
        assert group.second_communicator() is group
        rows = torch.arange(size * 5, dtype=torch.uint8).view(size, 5) + 50 * group.rank
        blocking, started = torch.zeros(2, size, 5, dtype=torch.uint8)
        group.all_to_all(blocking, rows)
        group.start_all_to_all(started, rows).wait()
        assert torch.equal(blocking, started)
        group.all_gather(blocking, rows[0])
        group.start_all_gather(started, rows[0]).wait()
        assert torch.equal(blocking, started)
        x = torch.full((13,), 1.1) * (group.rank + 1)
        mean = x.clone()
        group.mean_(mean)
        group.start_sum_(x).wait()
        assert torch.equal(x / size, mean)
        kinds = group.stats.bytes_by_kind
        assert kinds["sum"] == kinds["mean"] == 2 * (size - 1) * 13 * 4 // size
        return group.stats.sent_bytes, group.stats.collectives

    each = 2 * 5 * (size - 1)
    assert run_threads(size, work) == [(2 * each + 2 * (2 * (size - 1) * 52 // size), 6)] * size


def test_a_group_of_one_has_finished_when_it_starts():
    group, x = SoloGroup(), torch.tensor([1.0, 2.0])
    rows = torch.tensor([[1, 2]], dtype=torch.uint8)
    out = torch.zeros_like(rows)
    group.start_sum_(x).wait()
    group.second_communicator().start_all_to_all(out, rows).wait()
    assert x.tolist() == [1.0, 2.0]
    assert torch.equal(out, rows)
    assert group.stats.sent_bytes == 0


TWO_COMMUNICATORS = """
join(backend=None)  # as Ray Train and most scripts do without a GPU; "gloo" by name is in the other tests
group = TorchGroup()
second = group.second_communicator()
assert second is group.second_communicator() and second is not group and second.stats is group.stats
assert TorchGroup().second_communicator()._process_group() is second._process_group()
buckets = 5
rows = [torch.full((size, 1000), 10 * k + rank, dtype=torch.uint8) for k in range(buckets)]
out = [torch.zeros(size, 1000, dtype=torch.uint8) for _ in rows]
gathered = [torch.zeros(size, 1000, dtype=torch.uint8) for _ in rows]
sums = [torch.full((17,), float(k + rank)) for k in range(buckets)]
pending = []
# The second communicator runs in another order on one rank, relative to the first: only the order within each counts.
for k in range(buckets):
    if rank == 1:
        pending.append(second.start_all_gather(gathered[k], rows[k][0]))
    pending.append(group.start_all_to_all(out[k], rows[k]))
    pending.append(group.start_sum_(sums[k]))
    if rank != 1:
        pending.append(second.start_all_gather(gathered[k], rows[k][0]))
for each in reversed(pending):
    each.wait()
    each.wait()
for k in range(buckets):
    assert [row.unique().tolist() for row in out[k]] == [[10 * k + r] for r in range(size)], out[k]
    assert torch.equal(out[k], gathered[k])
    assert sums[k].tolist() == [float(k * size + sum(range(size)))] * 17
say("sent", [group.stats.sent_bytes, group.stats.collectives])

# One does not wait for the other: rank 0 finishes on the second what it has not begun on the first.
if rank > 0:
    first = group.start_sum_(sums[0])
second.all_gather(gathered[0], rows[0][0])
if rank == 0:
    first = group.start_sum_(sums[0])
first.wait()
pair = dist.new_group([2, 1], timeout=datetime.timedelta(seconds=9), sort_ranks=False)
if rank > 0:
    few = TorchGroup(pair)
    assert few.rank == few.second_communicator().rank == (0 if rank == 2 else 1)
    few_rows = torch.zeros(2, 1, dtype=torch.uint8)
    few.second_communicator().all_gather(few_rows, torch.tensor([few.rank], dtype=torch.uint8))
    assert few_rows.tolist() == [[0], [1]]
    timeout = few.second_communicator()._process_group()._get_backend(torch.device("cpu")).options._timeout
    assert timeout == datetime.timedelta(seconds=9), timeout
del pair
tasks = lambda: [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
assert any("gloo" in name for name in tasks())
dist.destroy_process_group()
say("left", [name for name in tasks() if "gloo" in name])
"""


def test_two_communicators_of_processes_overlap_and_end_with_the_process_group(tmp_path):
    size = 3
    ranks = start(TWO_COMMUNICATORS, size, tmp_path)
    assert [p.wait(timeout=120) for p in ranks] == [0] * size
    sent = 5 * (2 * 1000 * (size - 1) + 2 * (size - 1) * 17 * 4 // size)
    assert [said(tmp_path, r, "sent") for r in range(size)] == [str([sent, 15])] * size
    assert [said(tmp_path, r, "left") for r in range(size)] == ["[]"] * size
