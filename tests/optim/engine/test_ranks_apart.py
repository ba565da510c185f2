"""Ranks that do different things, as processes over gloo: a message on every rank in seconds, or patience."""

import pytest

from tests.comm.gloo_ranks import said, start

SETUP = """
import logging
from thinwire.comm import CallMismatch, CommError
from thinwire.comm.groups import waits
from thinwire.optim import OneBitAdam

LOGGED = []
class Kept(logging.Handler):
    def emit(self, record):
        LOGGED.append(record.getMessage())
logging.getLogger("thinwire.comm.groups.waits").addHandler(Kept())

def made(name):
    global folder
    home, folder = folder, os.path.join(folder, name)
    os.makedirs(folder, exist_ok=True)
    join(tcp_store_on_rank_0=True)
    folder = home
    net = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))
    return net, OneBitAdam(net.parameters(), lr=1e-2, warmup=2)

def train(net, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()

def told(name, work, net, optimizer):
    before = optimizer.space.p_N.clone()
    began = time.monotonic()
    try:
        work()
    except CommError as error:
        say(name, repr((type(error).__name__, str(error), time.monotonic() - began)))
        assert torch.equal(before, optimizer.space.p_N)
"""

IN_TURN = (
    SETUP
    + """
# One rank saves alone; the last comes late, into the step that the second waits in.
net, optimizer = made("saves")
train(net, optimizer, 4)
if rank == 2:
    time.sleep(1)
told("saves", lambda: optimizer.state_dict() if rank == 0 else train(net, optimizer), net, optimizer)
told("again", lambda: train(net, optimizer), net, optimizer)
began = time.monotonic()
dist.destroy_process_group()
say("destroyed", time.monotonic() - began)

# One evaluates alone, the others wait, say so and go on; then one lets go of the group, and lives.
waits.SAY_S, waits.SURE_S = 1.0, 0.5
net, optimizer = made("evaluates")
train(net, optimizer, 4)
if rank == 0:
    net(torch.randn(4, 7))
    while not all(os.path.exists(os.path.join(folder, f"{r}.waited")) for r in (1, 2)):
        time.sleep(0.1)
else:
    class Said(logging.Handler):
        def emit(self, record):
            say("waited", record.getMessage())
    logging.getLogger("thinwire.comm.groups.waits").addHandler(Said())
train(net, optimizer, 2)
say("steps", optimizer.num_steps)
if rank == 2:
    dist.destroy_process_group()
told("destroys", lambda: train(net, optimizer) if rank != 2 else None, net, optimizer)
while not all(os.path.exists(os.path.join(folder, f"{r}.destroys")) for r in (0, 1)):
    time.sleep(0.1)
if rank != 2:
    dist.destroy_process_group()

# The one with the store ends, by an exception; the others learn of both.
net, optimizer = made("ends")
train(net, optimizer, 4)
if rank == 0:
    sys.last_value = ValueError("bad batch")  # as the interpreter does before it ends
    sys.exit(1)
told("ends", lambda: train(net, optimizer), net, optimizer)
"""
)


def test_ranks_that_part_are_told_which_rank_did_what(tmp_path):
    ranks = start(IN_TURN, 3, tmp_path)
    assert [rank.wait(timeout=280) for rank in ranks] == [1, 0, 0]
    saves, again = ([eval(said(tmp_path, r, name)) for r in range(3)] for name in ("saves", "again"))
    for kind, message, _ in (*saves, *again):
        assert kind == "CallMismatch"
        assert message == saves[0][1]  # word for word
    assert "rank 0 is in OneBitAdam.state_dict() after step 4 (all_gather of 16 bytes); rank" in saves[0][1]
    assert "in OneBitAdam.step() 5 (all_to_all of" in saves[0][1]
    assert "Call state_dict() on every rank" in saves[0][1]
    assert max(seconds for _, _, seconds in saves) < 30  # half of the time-out of the group
    assert max(float(said(tmp_path, r, "destroyed")) for r in range(3)) < 30  # not until the time-out

    for r in (1, 2):
        waited = said(tmp_path, r, "waited")
        assert waited.startswith("waiting_for ranks=[0] seconds=")
        assert "in='OneBitAdam.step() 5' known='rank 0 has not come to this call, it took part in OneBit" in waited
    assert [said(tmp_path, r, "steps") for r in range(3)] == ["6"] * 3

    for r in (0, 1):
        kind, message, seconds = eval(said(tmp_path, r, "destroys"))
        assert kind == "PeerLost"
        assert f"rank {r} of 3 lost rank 2 (it left: it destroyed its process group) in" in message
        assert "OneBitAdam.step() 7" in message
        assert "All ranks took part in OneBitAdam.step() 6. The ranks that are left can go on" in message
        assert seconds < 30
    for r in (1, 2):
        kind, message, seconds = eval(said(tmp_path, r, "ends"))
        assert kind == "PeerLost"
        assert "lost rank 0 (" in message
        assert "All ranks took part in OneBitAdam.step() 4." in message
        assert seconds < 30


STOPS_EARLY = (
    SETUP
    + """
net, optimizer = made("early")
train(net, optimizer, 4)
if rank == 1:
    END
told("early", lambda: train(net, optimizer), net, optimizer)
"""
)


@pytest.mark.slow  # the test above has the ones that differ most
@pytest.mark.parametrize(
    ("end", "known"),
    [
        ("sys.exit(0)", "it left: its program ended)"),
        ("sys.last_value = KeyError('x'); sys.exit(1)", "it left: its program ended with KeyError: 'x')"),
        ("os._exit(0)", "has ended)"),
    ],
)
def test_a_rank_that_stops_early_is_named_with_what_is_known(tmp_path, end, known):
    ranks = start(STOPS_EARLY.replace("END", end), 2, tmp_path)
    assert ranks[0].wait(timeout=280) == 0
    kind, message, seconds = eval(said(tmp_path, 0, "early"))
    assert kind == "PeerLost"
    assert "lost rank 1 (" in message
    assert known in message
    assert seconds < 30
