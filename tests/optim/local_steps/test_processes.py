"""Late rounds over real processes: nobody waits for the slowest; who is killed in an exchange costs its own moves."""

from tests.comm.gloo_ranks import said, start
from tests.covering import parametrize

LATE = """
import datetime
from tests.optim.local_steps.test_local_steps import EVERY, _in_place, _server, left, network
from tests.optim.local_steps.test_overlap import late
from tests.optim.muon.test_muon import train
from thinwire.optim.regroup import regroup

def at(name, of):
    return os.path.join(folder, f"{of}.{name}")

def until(*names):
    end = time.monotonic() + 90
    while not all(os.path.exists(at(*name)) for name in names):
        assert time.monotonic() < end, names
        time.sleep(0.005)

def go(to):
    train(net, optimizer, to - optimizer.num_steps, rank)
"""

AHEAD = (
    LATE
    + """
join()
net = network(torch.DTYPE)
group = TorchGroup()
optimizer = late(net, group, "adamw")
go(2 * EVERY - 1)  # replicas have been compared after step 1, and are again after step 10
if rank == 2:
    until(("ahead", 0), ("ahead", 1))  # both have ended that round, and made the steps of the next
go(3 * EVERY - 1)
say("ahead", optimizer.num_steps)
go(6 * EVERY + 2)
optimizer.prepare_to_save()
say("held", optimizer.space.p_N.double().sum().item().hex())
"""
)

KILLED = (
    LATE
    + """
store = dist.FileStore(os.path.join(folder, "first"), size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
net = network(torch.DTYPE)
group = TorchGroup()
optimizer = late(net, group, "adamw")
go(2 * EVERY - 1)
if rank == 2:  # the others have launched that round's exchange, and wait for nothing
    until(("launched", 0), ("launched", 1))
    os.kill(os.getpid(), signal.SIGKILL)
go(3 * EVERY - 1)
say("launched", optimizer.num_steps)
try:
    go(3 * EVERY)
    say("lost", "nobody")
except PeerLost as error:
    say("lost", error.ranks)
start_N = optimizer.vectors.start_N.clone()
moved = start_N - optimizer.space.p_N
dist.destroy_process_group()
store = dist.FileStore(os.path.join(folder, "second"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
group = TorchGroup()
memory = optimizer.vectors.move_error
due = moved + _in_place(optimizer, [one.error() for one in memory.worker])
server = _server(optimizer)
told = regroup(optimizer, group, has_state=True)
say("told", (told.step, told.local_steps_lost))
assert torch.equal(optimizer.space.p_N, start_N)
residual = left(optimizer)
group.mean_(due)
group.start_sum_(server).wait()
torch.testing.assert_close(residual, due + server, rtol=1e-5, atol=1e-6)
go(5 * EVERY + 1)
optimizer.prepare_to_save()
say("held", optimizer.space.p_N.double().sum().item().hex())
"""
)


KILLED_IN_PARTS = (
    LATE
    + """
store = dist.FileStore(os.path.join(folder, "first"), size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
net = network(torch.DTYPE)
group = TorchGroup()
optimizer = late(net, group, "adamw", every=6, parts=3)
go(9)  # one part after steps 2, 4 and so on
if rank == 2:
    until(("launched", 0), ("launched", 1))
    os.kill(os.getpid(), signal.SIGKILL)
go(11)
say("launched", optimizer.num_steps)
try:
    go(12)
    say("lost", "nobody")
except PeerLost as error:
    say("lost", error.ranks)
start_N = optimizer.vectors.start_N.clone()
dist.destroy_process_group()
store = dist.FileStore(os.path.join(folder, "second"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
group = TorchGroup()
told = regroup(optimizer, group, has_state=True)
say("told", (told.step, told.lost))
assert torch.equal(optimizer.space.p_N, start_N)
go(25)
optimizer.prepare_to_save()
say("held", optimizer.space.p_N.double().sum().item().hex())
"""
)


def ended(ranks, gone=()):
    codes = [rank.wait(timeout=120) for rank in ranks]
    assert [code for at, code in enumerate(codes) if at not in gone] == [0] * (len(ranks) - len(gone))


@parametrize("dtype", ["float32", "bfloat16"], usual=[0])
def test_nobody_waits_for_the_slowest_at_the_end_of_a_round(tmp_path, dtype):
    """Two ranks end a round and make all but the last step of the next before the third has ended the first."""
    ended(start(AHEAD.replace("DTYPE", dtype), 3, tmp_path))
    assert [said(tmp_path, rank, "ahead") for rank in range(2)] == ["11", "11"]
    assert len({said(tmp_path, rank, "held") for rank in range(3)}) == 1


@parametrize("dtype", ["float32", "bfloat16"], usual=[1])
def test_who_is_killed_while_an_exchange_is_under_way_costs_its_own_moves(tmp_path, dtype):
    ended(start(KILLED.replace("DTYPE", dtype), 3, tmp_path), gone=(2,))
    for rank in range(2):
        assert said(tmp_path, rank, "lost") == "(2,)"
        assert eval(said(tmp_path, rank, "told")) == (12, 8)
    assert len({said(tmp_path, rank, "held") for rank in range(2)}) == 1


@parametrize("dtype", ["float32", "bfloat16"], usual=[1])
def test_who_is_killed_while_a_part_is_under_way_is_named_when_the_next_is_due(tmp_path, dtype):
    ended(start(KILLED_IN_PARTS.replace("DTYPE", dtype), 3, tmp_path), gone=(2,))
    for rank in range(2):
        assert said(tmp_path, rank, "lost") == "(2,)"
        assert eval(said(tmp_path, rank, "told")) == (12, (2,))
    assert len({said(tmp_path, rank, "held") for rank in range(2)}) == 1
