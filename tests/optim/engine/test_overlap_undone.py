"""What hooks have sent and no step() followed is undone: skipped batches, second backwards, NaN, lost peers."""

import copy
import threading

import pytest
import torch

from tests.covering import every_value
from tests.optim.engine.test_overlap import NETS, ROUNDS, WARMUP, backward, make, train
from tests.optim.reference.written_out import COMPRESSED, bits
from thinwire.comm import NonFiniteInput, PeerLost, run_threads
from thinwire.optim.engine.state import error_memories, replicated

FIRST = WARMUP
"""Steps after which the next one is the first compressed one, which forms what it sends from float m."""


def replicas(optimizer):
    """What is the same on every rank."""
    return bits(optimizer.space.p_N, *replicated(optimizer.vectors).values())


def of_this_rank(optimizer):
    """And what is this rank's own in a round of several steps."""
    return replicas(optimizer) if optimizer.at_sync else bits(replicas(optimizer), *optimizer.vectors.of_round())


def kept(optimizer):
    """What must be as before bit for bit, and what to rounding: (bits, R, 4 ulp of the largest kept sum)."""
    exact = replicas(optimizer)
    errors = list(error_memories(optimizer.vectors).values())
    if not errors:
        return exact, torch.zeros(1), 0.0
    eps = torch.finfo(optimizer.space.p_N.dtype).eps
    return exact, errors[0].residual(), 4 * eps * getattr(errors[0], "largest", 0.0)


def assert_kept(optimizer, before):
    exact, residual, _ = kept(optimizer)
    rounding = max(before[2], kept(optimizer)[2])
    assert torch.equal(exact, before[0])
    torch.testing.assert_close(residual, before[1], rtol=0, atol=rounding)


def skip_by(how, net, optimizer):
    if how == "zero_grad":
        optimizer.zero_grad()
    elif how == "model.zero_grad":
        net.zero_grad()  # seen when the next backward reaches the first parameter
    else:
        with pytest.raises(RuntimeError, match="a second backward reached it before step"):
            backward(net, 100, 0)
        optimizer.zero_grad()


@pytest.mark.few(1)
@every_value(
    {
        "name": ("adam", *COMPRESSED),
        "steps": (2, FIRST, FIRST + 3),
        "how": ("zero_grad", "model.zero_grad", "second backward"),
    },
    only=(0, 2),
)
def test_a_backward_that_no_step_follows_is_undone_and_training_goes_on(name, steps, how):
    """Ranks have launched different numbers of buckets by then."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]).double() for _ in range(2)]
        ours, other = (make(name, net, group, overlap=True) for net in nets)
        for net, optimizer in zip(nets, (ours, other), strict=True):
            train(net, optimizer, steps, group.rank)
        before = kept(ours)
        backward(nets[0], 99, group.rank)
        assert ours.overlap.exchange is not None
        skip_by(how, nets[0], ours)
        if how != "model.zero_grad":
            assert not ours.overlap.is_open
            assert_kept(ours, before)
        for net, optimizer in zip(nets, (ours, other), strict=True):
            train(net, optimizer, 4, group.rank)
        torch.testing.assert_close(ours.space.p_N, other.space.p_N, rtol=0, atol=1e-12)
        return bits(*ours.common_vectors().values())

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.few(1)
@every_value(
    {
        "name": ("adam", *COMPRESSED),
        "steps, overlap": [(2, True), (FIRST, False), (FIRST + 3, True), (2, False), (FIRST, True), (FIRST + 3, False)],
        "policy": ("raise", "skip"),
    },
    only=(0, 1, 2, 3, 5),
)
@pytest.mark.law
def test_a_gradient_that_is_not_finite_is_undone_on_every_rank(name, steps, overlap, policy):
    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make(name, net, group, overlap=overlap, non_finite=policy)
        train(net, optimizer, steps, group.rank)
        before = kept(optimizer)
        optimizer.zero_grad()
        handle = net.first.weight.register_hook(lambda grad: grad * torch.nan) if group.rank == 1 else None
        backward(net, steps + 1, group.rank)
        if handle:
            handle.remove()
        assert (optimizer.overlap.exchange is not None) == overlap
        if policy == "raise":
            with pytest.raises(NonFiniteInput, match="rank 1"):
                optimizer.step()
        else:
            optimizer.step()
            assert optimizer.steps_skipped == 1
        assert optimizer.num_steps == steps
        assert_kept(optimizer, before)
        train(net, optimizer, 4, group.rank)
        return bits(optimizer.space.p_N)

    first, *others = run_threads(2, work)
    assert all(torch.equal(first, other) for other in others)


def stopped(_):
    raise ZeroDivisionError("in the midst of a backward")


@pytest.mark.few(3)
@every_value(
    {
        "name, steps": [
            *((name, steps) for steps in (2, FIRST, FIRST + 3) for name in ("adam", *COMPRESSED)),
            *((ROUNDS, steps) for steps in (4, 8, 10)),  # 5 and 9 end rounds of one step, 11 one of two
        ],
        "late": (False, True),
    },
    only=(0, 8, 13, -1),
)
@pytest.mark.law
def test_a_lost_peer_leaves_parameters_and_state_as_they_were(name, steps, late):
    held, ready = {}, threading.Event()

    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make(name, net, group, overlap=True)
        train(net, optimizer, steps, group.rank)
        memory = next(iter(error_memories(optimizer.vectors).values()), None)
        exact = of_this_rank(optimizer)
        errors = None if memory is None else (memory.worker_N.clone(), memory.server_c.clone())
        optimizer.zero_grad()
        if group.rank == 1:
            if late:
                net.first.weight.register_hook(stopped)
                with pytest.raises(ZeroDivisionError):
                    backward(net, steps + 1, group.rank)  # the end of it would launch the rest
            ready.wait()  # the peer may be on its way out of the last collective
            group.leave()
            return
        ready.set()
        backward(net, steps + 1, group.rank)  # a launch never raises: it is told by step()
        with pytest.raises(PeerLost):
            optimizer.step()
        assert not optimizer.overlap.is_open
        assert torch.equal(exact, of_this_rank(optimizer))
        assert optimizer.num_steps == steps
        if memory is not None:
            rounding = 4 * torch.finfo(torch.float32).eps * getattr(memory, "largest", 0.0)
            for old, new in zip(errors, (memory.worker_N, memory.server_c), strict=True):
                torch.testing.assert_close(new, old, rtol=0, atol=rounding)
        held["seen"] = True

    run_threads(2, work)
    assert held == {"seen": True}


def test_losses_of_disjoint_parameters_belong_inside_no_sync_but_for_the_last():
    """The end of a backward sends what has got no gradient as zero: one that comes later is refused, and not lost."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        plain, ours = (make("onebit_adam", net, group, overlap=on) for net, on in zip(nets, (False, True), strict=True))

        def other(net, step):
            generator = torch.Generator().manual_seed(step + 50 * group.rank)
            net.never(torch.randn(4, 5, generator=generator)).square().sum().backward()

        for step in range(1, 8):
            for net, optimizer in zip(nets, (plain, ours), strict=True):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    other(net, step)
                backward(net, step, group.rank)
                optimizer.step()
        assert torch.equal(bits(plain.space.p_N), bits(ours.space.p_N))
        told = ours.stats()["overlapped"]
        assert told["in_backward"] == told["buckets"]
        ours.zero_grad()
        other(nets[1], 8)
        with pytest.raises(RuntimeError, match="second backward reached it before step"):
            backward(nets[1], 8, group.rank)
        ours.zero_grad()
        train(nets[1], ours, 1, group.rank)
        return bits(ours.space.p_N)

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


def write_in_place(net):
    net.last.weight.grad.mul_(0.5)


def clip(net):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def replace(net):
    net.last.weight.grad = torch.ones_like(net.last.weight)


def remove(net):
    net.last.weight.grad = None


@every_value({"steps": [0, 2], "change": [write_in_place, clip, replace, remove]})
def test_gradients_that_are_written_after_they_may_have_been_sent_are_refused(change, steps):
    """From the first step on, though nothing has been sent there: a loop is right or wrong, whatever the step."""

    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make("adam", net, group, overlap=True)
        train(net, optimizer, steps, group.rank)
        exact = kept(optimizer)
        optimizer.zero_grad()
        backward(net, steps + 1, group.rank)
        change(net)
        with pytest.raises(RuntimeError, match="written between backward and step"):
            optimizer.step()
        assert_kept(optimizer, exact)
        assert optimizer.num_steps == steps
        train(net, optimizer, 2, group.rank)

    run_threads(2, work)


def test_what_reads_or_moves_state_is_refused_between_backward_and_step():
    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make("onebit_adam", net, group, overlap=True)
        optimizer.set_global_batch(8)
        train(net, optimizer, FIRST + 2, group.rank)
        state = optimizer.state_dict()
        calls = [
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(state),
            lambda: optimizer.set_global_batch(64),
        ]
        for call in calls:
            optimizer.zero_grad()
            backward(net, 1, group.rank)
            with pytest.raises(RuntimeError, match="between backward and step"):
                call()
        optimizer.step()

    run_threads(2, work)
