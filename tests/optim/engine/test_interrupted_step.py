"""Ctrl-C inside a step: it is finished, or as if it had not begun, and then this rank leaves, so that no peer waits."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.optim.constructing import construct
from thinwire.comm import PeerLost, SoloGroup, ThreadGroup
from thinwire.optim import Adam, OneBitAdam, OneBitLamb, OneBitMuon, ZeroOneAdam
from thinwire.optim.engine.state import error_memories

MAKERS = {
    "onebit_adam": lambda params, group, **more: construct(OneBitAdam, params, warmup=2, group=group, **more),
    "onebit_lamb": lambda params, group, **more: construct(OneBitLamb, params, warmup=2, group=group, **more),
    "zero_one_adam": lambda params, group, **more: construct(
        ZeroOneAdam, params, var_freeze_step=2, group=group, **more
    ),
    "onebit_muon": lambda params, group, **more: construct(
        OneBitMuon, [{"params": params, "rule": "vector"}], group=group, **more
    ),
    "adam": lambda params, group, **more: construct(Adam, params, group=group, **more),
}
INTERRUPTED = [
    ("onebit_adam", "finish"),  # at its commit parameters have moved: that is not undone
    ("onebit_lamb", "finish"),
    ("onebit_lamb", "commit"),
    ("zero_one_adam", "finish"),
    ("zero_one_adam", "commit"),
    ("onebit_muon", "finish"),
    ("onebit_muon", "commit"),
]


def trained(name, group, steps, interrupted=None, **more):
    """The parameters after these steps; interrupted: a method of the reducer that is interrupted once, at step 4."""
    x = torch.nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
    optimizer = MAKERS[name]([x], group, **more)
    for step in range(1, steps + 1):
        x.grad = torch.randn(50, generator=torch.Generator().manual_seed(step), dtype=torch.float64) + group.rank
        if step == 4 and interrupted is not None:
            target = optimizer.reduce.full if name == "adam" else optimizer.reduce
            real = getattr(target, interrupted)

            def interrupt():
                raise KeyboardInterrupt

            setattr(target, interrupted, interrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            setattr(target, interrupted, real)
            x.grad = torch.randn(50, generator=torch.Generator().manual_seed(step), dtype=torch.float64) + group.rank
        optimizer.step()
    return x.detach().clone()


@pytest.mark.parametrize(("name", "method"), INTERRUPTED)
def test_one_rank_goes_on_after_an_interrupt_as_if_the_step_had_not_begun(name, method):
    assert torch.equal(trained(name, SoloGroup(), 6, method), trained(name, SoloGroup(), 6))


def test_one_rank_goes_on_after_an_interrupt_of_a_full_mean():
    assert torch.equal(trained("adam", SoloGroup(), 6, "finish"), trained("adam", SoloGroup(), 6))


def begun(group, rank):
    """1-bit Adam after step 3, its first compressed one, and a function that makes its next steps, up to this one."""
    layers = [torch.nn.Parameter(torch.linspace(-1, i, 24, dtype=torch.float64)) for i in range(1, 4)]
    optimizer = construct(OneBitAdam, layers, lr=1e-2, warmup=2, group=group, bucket_elements=32)

    def go_on(to):
        while optimizer.num_steps < to:
            for i, x in enumerate(layers):
                seed = 100 * optimizer.num_steps + 10 * i + rank
                x.grad = torch.randn(24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            optimizer.step()

    go_on(3)
    return optimizer, go_on


def what_it_has(optimizer):
    """Parameters, moments and this rank's part of R, as vectors; and the step."""
    saved = optimizer.rank_state_dict()
    vectors = {name: x for name, x in optimizer.common_vectors().items() if name != "divisor"}
    parts = [memory.share(2) for memory in error_memories(optimizer.vectors).values()]
    assert saved["saved"] is not None
    return optimizer.num_steps, [x.clone() for x in (*vectors.values(), *parts)]


def same(left, right):
    return left[0] == right[0] and all(
        torch.allclose(a, b, 1e-12, 1e-14) for a, b in zip(left[1], right[1], strict=True)
    )


OURS = ("/comm/", "/optim/")
EXCHANGE = ("/comm/exchange/", "/comm/kernels/")


class AtLine:
    """Does something at the at-th line that this thread executes in these folders of thinwire; counts them all."""

    def __init__(self, at, act, folders):
        self.at, self.act, self.folders, self.lines = at, act, folders, 0

    def __enter__(self):
        # What ends with an older optimizer would be counted among the lines, and swallow what is raised there.
        gc.disable()
        sys.settrace(self.call)
        return self

    def __exit__(self, *what):
        sys.settrace(None)
        gc.enable()

    def call(self, frame, event, value):
        ours = "thinwire" in frame.f_globals.get("__name__", "")
        return self.line if ours and any(one in frame.f_code.co_filename for one in self.folders) else None

    def line(self, frame, event, value):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.act()
        return self.line


def two_ranks(of_rank_0, steps):
    """of_rank_0(optimizer, go_on) in this thread, the main one, beside a rank in another; what that has and raised."""
    groups, is_there, other = ThreadGroup.create(2), threading.Event(), {}

    def work():
        optimizer, go_on = begun(groups[1], 1)
        is_there.set()
        try:
            go_on(steps)
        except PeerLost as error:
            other["raised"] = error
        other["has"] = what_it_has(optimizer)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        optimizer, go_on = begun(groups[0], 0)
        assert is_there.wait(60)  # who leaves now would take the other out of what is over for both
        found = of_rank_0(optimizer, go_on)
    except BaseException:
        groups[0].leave("the test has failed")
        raise
    thread.join(60)
    assert not thread.is_alive()
    return found, other


@pytest.fixture(scope="module")
def undisturbed():
    """What rank 0 has after steps 3, 4 and 6; how many lines step 4 has."""

    def work(optimizer, go_on):
        has, lines = {3: what_it_has(optimizer)}, {}
        for step, folders in ((4, OURS), (5, EXCHANGE), (6, ())):
            with AtLine(0, None, folders) as seen:
                go_on(step)
            has[step], lines[folders] = what_it_has(optimizer), seen.lines
        return {"has": has, "lines": lines}

    return two_ranks(work, 6)[0]


def interrupted_at(line, undisturbed):
    """Rank 0 gets SIGINT at this line of its step 4. Returns how that went; asserts that nobody is worse off."""
    has, told = undisturbed["has"], []

    def work(optimizer, go_on):
        at = AtLine(line, lambda: signal.raise_signal(signal.SIGINT), OURS)
        try:
            with at:
                go_on(4)
        except KeyboardInterrupt:
            pass
        else:
            assert at.lines < line, "the interrupt was lost"  # waits have fewer lines than in the undisturbed run
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        now = what_it_has(optimizer)
        assert same(now, has[optimizer.num_steps]), "neither as before the step nor as after it"
        told.append({3: "undone", 4: "finished"}[optimizer.num_steps])
        left = ""
        try:
            go_on(6)
        except PeerLost as error:
            left = str(error)
        if left:
            assert told == ["undone"]
            assert "KeyboardInterrupt in OneBitAdam.step() 4" in left
            told.append("left")
        assert same(what_it_has(optimizer), has[3 if left else 6])

    _, other = two_ranks(work, 6)
    if told[-1] == "left":
        assert isinstance(other["raised"], PeerLost)
        assert "KeyboardInterrupt in OneBitAdam.step() 4" in str(other["raised"])
        assert other["has"][0] in (3, 4)  # it may have all of the step: regroup() knows what to do then
    else:
        assert "raised" not in other
    return " ".join(told)


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_step_leaves_it_whole_and_no_peer_waiting(undisturbed):
    num_lines = undisturbed["lines"][OURS]
    assert num_lines > 300
    lines = {
        *range(2, num_lines - 20, num_lines // 40),
        *range(num_lines - 25, num_lines),
    }  # handlers are put back there
    went = {interrupted_at(line, undisturbed) for line in sorted(lines)}
    assert went == {"undone", "undone left", "finished"}  # the first before anything was begun


@pytest.mark.slow
def test_an_interrupt_at_one_line_in_three_of_a_step_leaves_it_whole_and_no_peer_waiting(undisturbed):
    for line in range(1, undisturbed["lines"][OURS], 3):
        interrupted_at(line, undisturbed)


@pytest.mark.slow
def test_any_error_inside_an_exchange_leaves_it_whole_or_said_to_be_torn_and_no_peer_waiting(undisturbed):
    has, num_lines = undisturbed["has"], undisturbed["lines"][EXCHANGE]

    def act():
        raise TimeoutError("as a time limit raises it, in any thread")

    went = set()
    for line in range(1, num_lines - 20, num_lines // 40):

        def work(optimizer, go_on, line=line):
            with pytest.raises(TimeoutError), AtLine(line, act, EXCHANGE):
                go_on(4)
            memory = optimizer.vectors.momentum_error
            if memory.torn:
                with pytest.raises(RuntimeError, match="half written: an error came in"):
                    optimizer.rank_state_dict()
                went.add("torn")
            else:
                part_N = memory.share(2)
                assert any(torch.allclose(part_N, has[step][1][-1], 1e-12, 1e-14) for step in (3, 4))
                went.add("whole")

        _, other = two_ranks(work, 6)
        assert isinstance(other["raised"], PeerLost)
    assert went == {"whole", "torn"}


PROCESSES = """
from thinwire.optim import OneBitAdam
join()
x = torch.nn.Parameter(torch.linspace(-1, 1, 50_000))
optimizer = OneBitAdam.sized(8192)([x], warmup=2)

def step():
    x.grad = torch.full_like(x, 1.0 + rank)
    optimizer.step()

def wait_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)

while optimizer.num_steps < 4:
    step()
if rank == 0:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before, finish = x.detach().clone(), optimizer.reduce.finish
    optimizer.reduce.finish = lambda: (say("waits", os.getpid()), finish())
    try:
        step()
    except KeyboardInterrupt:
        assert torch.equal(x.detach(), before) and optimizer.num_steps == 4
    else:
        raise AssertionError("it was to be interrupted")
    say("interrupted", "")
    wait_for("1.lost")
    try:
        step()
    except PeerLost as error:
        say("next", error)
else:
    wait_for("0.interrupted")
    try:
        step()
    except PeerLost as error:
        say("lost", error)
"""


def test_sigint_to_a_process_that_waits_for_another_ends_its_step_and_tells_the_other(tmp_path):
    ranks = start(PROCESSES, 2, tmp_path, timeout_s=600)
    try:
        wait_until_said(tmp_path, 0, "waits", ranks[0])
        os.kill(int(said(tmp_path, 0, "waits")), signal.SIGINT)
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    assert "rank 0 (it left: KeyboardInterrupt in OneBitAdam.step() 5)" in said(tmp_path, 1, "lost")
    assert "has left the group: KeyboardInterrupt in OneBitAdam.step() 5" in said(tmp_path, 0, "next")


def wait_until_said(folder, rank, name, process):
    while True:
        try:
            if said(folder, rank, name):
                return
        except FileNotFoundError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"rank {rank} has ended with {process.wait(0.05)}") from None
