"""A vector that travels along some ranks reaches all of them, whatever its size, and nobody else."""

from tests.comm import gloo_ranks

RELAY = """
join()
group = TorchGroup()
path = (2, 0, 3)
for numel in (1, 999, 1000, 4321):
    x = torch.full((numel,), float(rank))
    if rank == 2:
        x = torch.arange(numel, dtype=torch.float32)
    group.relay_(x, path, 1000)
    expected = torch.arange(numel, dtype=torch.float32) if rank in path else torch.full((numel,), float(rank))
    assert torch.equal(x, expected), (rank, numel)
say("sent", group.stats.bytes_by_kind["relay"])
y = torch.ones(3)
group.mean_(y)
dist.destroy_process_group()
"""


def test_a_relay_reaches_the_ranks_on_its_path_in_pieces_and_leaves_the_others_alone(tmp_path):
    for rank in gloo_ranks.start(RELAY, 4, tmp_path):
        assert rank.wait(120) == 0
    total = 4 * (1 + 999 + 1000 + 4321)
    assert [int(gloo_ranks.said(tmp_path, rank, "sent")) for rank in range(4)] == [total, 0, total, 0]


LOST = """
join()
group = TorchGroup()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.relay_(torch.zeros(5_000_000), (0, 1, 2))
except PeerLost as error:
    say("error", error)
    sys.exit(3)
"""


def test_a_rank_that_dies_on_the_way_is_told_to_those_behind_it(tmp_path):
    ranks = gloo_ranks.start(LOST, 3, tmp_path, timeout_s=10.0)
    assert ranks[2].wait(60) == 3
    assert "lost rank 1" in gloo_ranks.said(tmp_path, 2, "error")
    ranks[0].wait(60)


LATE = """
join()
group = TorchGroup()
if rank == 0:
    time.sleep(1.0)
x = torch.full((10,), 7.0 if rank == 0 else 0.0)
group.relay_(x, (0, 1))
assert x.tolist() == [0.0 if rank == 2 else 7.0] * 10
group.mean_(x)
dist.destroy_process_group()
"""


def test_a_first_rank_that_is_late_is_waited_for(tmp_path):
    """As over a link on which a piece takes longer than the waiting ranks look: gloo would give up all connections."""
    for rank in gloo_ranks.start(LATE, 3, tmp_path):
        assert rank.wait(120) == 0
