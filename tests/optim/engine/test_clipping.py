"""max_grad_norm with overlap: compressed steps shorten bucket by bucket, by what is known when a bucket goes."""

import copy
import math

import pytest
import torch

from tests.covering import every_value
from tests.optim.engine.test_overlap import NETS, WARMUP, everything, make
from tests.optim.reference.written_out import bits
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim.engine.state import replicated

BOUND = 0.05
WAITS = "max_grad_norm waits for a first norm: at first, and after a save or a change of ranks"
OURS = ("onebit_adam", "onebit_lamb", "onebit_sgd", "zero_one_adam", "onebit_muon")
LATER = 4
"""Steps after the warm-up."""


def bounded(name, net, group, **more):
    """Syncs of 0/1 Adam in every step."""
    if name == "zero_one_adam":
        more = {"local_step_clipper": 1, **more}
    return make(name, net, group, **{"overlap": True, "max_grad_norm": BOUND, **more})


def one_step(net, optimizer, rank, *, times=1.0, hooks=True):
    """times: how long the gradient is. hooks: does backward send it? Returns stats()["overlapped"]."""
    step = optimizer.num_steps + 1
    optimizer.zero_grad()
    loss = times * backward_loss(net, step, rank)
    if hooks:
        loss.backward()
    else:
        with optimizer.no_sync():
            loss.backward()
    optimizer.step()
    return optimizer.stats().get("overlapped")


def backward_loss(net, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank)
    x = torch.randn(6, 7, generator=generator)
    return (net(x, extra=True) - torch.sin(x[:, :3] * 2)).square().mean()


@pytest.mark.few(1)
@every_value({"name": OURS, "size": (2, 3, 2, 4, 2)})
def test_buckets_leave_in_backward_and_it_does_not_matter_when_they_leave(name, size):
    """All but the first compressed step: and a step whose hooks send nothing comes to the same bits."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        early, late = (bounded(name, net, group) for net in nets)
        told = []
        for _ in range(WARMUP + LATER):
            told.append(one_step(nets[0], early, group.rank))
            one_step(nets[1], late, group.rank, hooks=False)
            assert torch.equal(everything(early), everything(late))
        return told, bits(early.space.p_N)

    found = run_threads(size, work)
    assert all(torch.equal(found[0][1], p) for _, p in found)
    for told, _ in found:
        compressed = told[WARMUP:] if name not in ("onebit_sgd", "onebit_muon") else told[1:]
        first = compressed.pop(0)
        assert first["waits_for"] == (WAITS if name not in ("onebit_sgd", "onebit_muon") else None)
        assert [one["waits_for"] for one in compressed] == [None] * len(compressed)
        assert all(one["in_backward"] == one["buckets"] for one in compressed)


def ends_of(optimizer):
    """Where each tensor's gradient lies, and the first bucket that has elements of it."""
    spans = optimizer.reduce.buckets.spans
    for tensor in optimizer.space.tensors:
        first = min(k for k, (start, stop) in enumerate(spans) if start < tensor.stop and tensor.start < stop)
        yield slice(tensor.start, tensor.stop), first


def written_out(optimizer, g_N, before_N):
    """g shortened by the formula of clipping.py; before: the gradient of the step before, not shortened."""
    at, num = list(ends_of(optimizer)), len(optimizer.reduce.buckets.spans)
    here, were = [0.0] * num, [0.0] * num
    for s, k in at:
        here[k] += float(g_N[s].square().sum())
        were[k] += float(before_N[s].square().sum())
    made_N = torch.zeros_like(g_N)
    for s, k in at:
        seen = sum(here[: k + 1]) + sum(were[k + 1 :])
        made_N[s] = g_N[s] * min(1.0, BOUND / (seen**0.5 + 1e-6))
    return made_N


def own_gradient(net, optimizer, step, rank, times=1.0):
    """The gradient of this batch, not shortened."""
    made_N, twin = torch.zeros_like(optimizer.space.g_N), copy.deepcopy(net)
    (times * backward_loss(twin, step, rank)).backward()
    grads = {id(ours): theirs.grad for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True)}
    for tensor in optimizer.space.tensors:
        if (grad := grads[id(tensor.param)]) is not None:
            made_N[tensor.start : tensor.stop] = grad.flatten()
    return made_N


@pytest.mark.few(1)
@every_value({"size": (2, 3)})
def test_what_is_applied_and_kept_is_what_the_shortened_gradients_say(size):
    """m' + R' = b1 m + (1 - b1) mean of the shortened + R, and each is shortened as the formula says."""

    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = bounded("onebit_adam", net, group)
        for _ in range(WARMUP + 1):
            before_N = own_gradient(net, optimizer, optimizer.num_steps + 1, group.rank)
            one_step(net, optimizer, group.rank)
        memory = optimizer.vectors.momentum_error
        for _ in range(LATER):
            g_N = own_gradient(net, optimizer, optimizer.num_steps + 1, group.rank)
            given_N, m_N, r_N = written_out(optimizer, g_N, before_N), optimizer.vectors.m_N.clone(), memory.residual()
            assert torch.linalg.vector_norm(g_N) > 1.5 * BOUND
            group.mean_(mean_N := given_N.clone())
            one_step(net, optimizer, group.rank)
            sent = [param.grad for param in net.parameters() if param.grad is not None]
            ours_N = torch.cat([tensor.param.grad.flatten() for tensor in optimizer.space.tensors])
            live_N = torch.cat([given_N[tensor.start : tensor.stop] for tensor in optimizer.space.tensors])
            assert sent
            torch.testing.assert_close(ours_N, live_N, rtol=1e-5, atol=1e-9)
            held = optimizer.vectors.m_N + memory.residual()
            torch.testing.assert_close(held, 0.9 * m_N + 0.1 * mean_N + r_N, rtol=1e-5, atol=1e-7)
            before_N = g_N

    run_threads(size, work)


def test_a_spike_is_shortened_in_the_step_in_which_it_comes():
    """One of 1000 times the length comes to c sqrt(1 + ln(S_K / S_1)) at most, and each bucket to c."""

    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = bounded("onebit_adam", net, group)
        for _ in range(WARMUP + 2):
            one_step(net, optimizer, group.rank)
        g_N = own_gradient(net, optimizer, optimizer.num_steps + 1, group.rank, times=1000.0)
        one_step(net, optimizer, group.rank, times=1000.0)
        given, sent = [0.0] * optimizer.overlap.num_buckets, [0.0] * optimizer.overlap.num_buckets
        for (at, k), tensor in zip(ends_of(optimizer), optimizer.space.tensors, strict=True):
            given[k] += float(g_N[at].square().sum())
            sent[k] += float(tensor.param.grad.square().sum())
        return given, sent, float(optimizer.space.gradient_norm)

    for given, sent, norm in run_threads(2, work):
        assert norm == pytest.approx(sum(given) ** 0.5, rel=1e-5)
        assert norm > 1000 * BOUND
        most = 1 + math.log(sum(given) / next(square for square in given if square))
        assert 0.99 < sum(sent) / BOUND**2 < 1.001 * most
        assert max(sent) <= 1.001 * BOUND**2


@pytest.mark.few(1)
@every_value({"name": OURS, "of_rank": (False, True)})
def test_a_run_that_is_loaded_goes_on_as_the_one_that_saved(name, of_rank):
    """A state of all ranks has no rank's norm: both wait for one step. A rank's share has it.

    The loaded run's first step is sent in step() all the same, and comes to the same bits.
    """

    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = bounded(name, net, group)
        for _ in range(WARMUP + 3):
            one_step(net, optimizer, group.rank)
        state = optimizer.rank_state_dict() if of_rank else optimizer.state_dict()
        other = copy.deepcopy(net)
        for param in other.parameters():
            param.grad = None
        loaded = bounded(name, other, group)
        loaded.load_state_dict(state)
        told = []
        for _ in range(3):
            told.append(one_step(net, optimizer, group.rank)["waits_for"])
            one_step(other, loaded, group.rank)
            assert torch.equal(everything(optimizer), everything(loaded))
        return told

    for told in run_threads(2, work):
        assert told == [None if of_rank else WAITS, None, None]


def test_a_damaged_share_is_refused_and_one_of_other_buckets_waits():
    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = bounded("onebit_adam", net, group)
        for _ in range(WARMUP + 2):
            one_step(net, optimizer, group.rank)
        state = optimizer.rank_state_dict()
        (of_rank,) = state["share"].values()
        rest = of_rank["rest"]
        for damaged in ([*rest[1:], -1.0], [*rest[1:], float("nan")], "rest"):
            of_rank["rest"] = damaged
            with pytest.raises(ValueError, match=r"share with rest = .*damaged"):
                optimizer.load_state_dict(state)
        of_rank["rest"] = rest[1:]
        optimizer.load_state_dict(state)
        assert not optimizer.clipping.is_known
        assert one_step(net, optimizer, group.rank)["waits_for"]

    run_threads(2, work)


@pytest.mark.few(1)
@every_value({"name": OURS})
def test_what_was_undone_leaves_nothing_behind(name):
    """A batch that zero_grad() drops, and a step that is left out for a gradient that is not finite."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        disturbed, other = (bounded(name, net, group, non_finite="skip") for net in nets)
        for _ in range(WARMUP + 2):
            for net, optimizer in zip(nets, (disturbed, other), strict=True):
                one_step(net, optimizer, group.rank)
        rest_K = disturbed.clipping.share()
        disturbed.zero_grad()
        (100 * backward_loss(nets[0], 77, group.rank)).backward()
        disturbed.zero_grad()
        one_step(nets[0], disturbed, group.rank, times=float("inf") if group.rank == 0 else 50.0)
        assert disturbed.steps_skipped == 1
        assert disturbed.clipping.share() == rest_K == other.clipping.share()
        hooks = group.rank != 1  # one whose next backward opens nothing must not keep the last one's norms either
        for net, optimizer in zip(nets, (disturbed, other), strict=True):
            one_step(net, optimizer, group.rank, hooks=hooks)
        # what was undone is in the error memory again to rounding
        torch.testing.assert_close(disturbed.space.p_N, other.space.p_N, rtol=1e-3, atol=1e-5)
        ours, theirs = (torch.cat([t.param.grad.flatten() for t in one.space.tensors]) for one in (disturbed, other))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)

    run_threads(2, work)


def test_rates_that_move_after_backward_do_not_shorten_twice():
    """0/1 Adam sends such a sync again, of gradients that are shortened already."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        moved, other = (bounded("zero_one_adam", net, group) for net in nets)
        for _ in range(WARMUP + 2):
            for net, optimizer in zip(nets, (moved, other), strict=True):
                one_step(net, optimizer, group.rank)
        for net, optimizer in zip(nets, (moved, other), strict=True):
            optimizer.zero_grad()
            step = optimizer.num_steps + 1
            if optimizer is other:
                optimizer.param_groups[0]["lr"] *= 0.5
            backward_loss(net, step, group.rank).backward()
            assert optimizer.overlap.exchange is not None
            if optimizer is moved:
                optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.step()
        ours, theirs = (torch.cat([t.param.grad.flatten() for t in one.space.tensors]) for one in (moved, other))
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(moved.space.p_N, other.space.p_N, rtol=1e-4, atol=1e-6)

    run_threads(2, work)


@pytest.mark.few(1)
@every_value({"name": OURS})
def test_a_grad_scaler_and_no_overlap_clip_by_the_exact_norm(name):
    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        ours, plain = (bounded(name, net, group, overlap=on) for net, on in zip(nets, (True, False), strict=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        for net, optimizer in zip(nets, (ours, plain), strict=True):
            for step in range(1, WARMUP + LATER):
                optimizer.zero_grad()
                scaler.scale(backward_loss(net, step, group.rank)).backward()
                scaler.step(optimizer)
                scaler.update()
        sent = torch.cat([tensor.param.grad.flatten() for tensor in plain.space.tensors])
        assert float(torch.linalg.vector_norm(sent)) == pytest.approx(BOUND, rel=1e-4)
        torch.testing.assert_close(ours.space.p_N, plain.space.p_N, rtol=1e-3, atol=1e-4)

    run_threads(2, work)


class OneGradient(torch.nn.Module):
    """Two parameters whose gradient backward leaves in the same memory, and two whose gradients lie side by side."""

    def __init__(self):
        super().__init__()
        self.last, self.cut = torch.nn.Linear(16, 3), torch.nn.Parameter(torch.ones(2, 16, 7))
        self.one, self.other = (torch.nn.Parameter(torch.full((6, 16), x)) for x in (0.1, 0.2))
        self.left, self.right = (torch.nn.Parameter(torch.full((16, 16), x)) for x in (0.1, 0.2))

    def forward(self, x, extra):
        x = x @ self.cut[0].T + (self.one.unsqueeze(0) + self.other.unsqueeze(0)).squeeze(0)
        x = x @ torch.cat([self.left, self.right]).T
        return self.last(torch.tanh(x[:, :16]) * x[:, 16:])


@pytest.mark.few(1)
@every_value({"name": OURS})
def test_gradients_in_one_memory_are_each_shortened_once(name):
    def work(group):
        nets = [seeded(0, OneGradient) for _ in range(2)]
        early, late = (bounded(name, net, group) for net in nets)
        for step in range(WARMUP + LATER):
            one_step(nets[0], early, group.rank)
            one_step(nets[1], late, group.rank, hooks=False)
            # g_N is not compared: that of a gradient which is read in place is worth nothing
            held = [bits(one.space.p_N, *replicated(one.vectors).values()) for one in (early, late)]
            assert torch.equal(*held), step
            sent = [[tensor.param.grad for tensor in one.space.tensors] for one in (early, late)]
            assert all(map(torch.equal, *sent)), step
        assert early.overlap.report()["in_backward"]

    run_threads(2, work)


@pytest.mark.few(1)
@every_value({"name": OURS})
def test_a_step_that_was_refused_leaves_no_norms_behind(name):
    """The next one's backward opens nothing, and zero_grad() is the model's."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        disturbed, other = (bounded(name, net, group) for net in nets)
        for net, optimizer in zip(nets, (disturbed, other), strict=True):
            for _ in range(WARMUP + 2):
                one_step(net, optimizer, group.rank)
        disturbed.zero_grad()
        backward_loss(nets[0], 77, group.rank).backward()
        for param in nets[0].parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)
        with pytest.raises(RuntimeError, match="gradients were written"):
            disturbed.step()
        for net, optimizer in zip(nets, (disturbed, other), strict=True):
            net.zero_grad()
            with optimizer.no_sync():
                (20 * backward_loss(net, 78, group.rank)).backward()
            optimizer.step()
        assert torch.equal(disturbed.space.g_N, other.space.g_N)
        assert disturbed.clipping.share() == other.clipping.share()

    run_threads(2, work)


def test_rates_that_fall_after_backward_so_far_that_the_sync_is_not_due_do_not_shorten_twice():
    """What 0/1 Adam has sent is undone, and the step is local."""

    def work(group):
        net = copy.deepcopy(NETS[0])
        more = {"local_step_clipper": 4, "local_step_scaler": None}
        optimizer = bounded("zero_one_adam", net, group, **more)
        for _ in range(WARMUP + 2):
            one_step(net, optimizer, group.rank)
        optimizer.zero_grad()
        backward_loss(net, optimizer.num_steps + 1, group.rank).backward()
        assert optimizer.overlap.exchange is not None
        sent = torch.cat([tensor.param.grad.flatten() for tensor in optimizer.space.tensors])
        for param_group in optimizer.param_groups:
            param_group["lr"] /= 4
        optimizer.step()
        assert not optimizer.at_sync
        g_N = optimizer.space.g_N
        assert torch.equal(torch.cat([g_N[tensor.start : tensor.stop] for tensor in optimizer.space.tensors]), sent)

    run_threads(2, work)
