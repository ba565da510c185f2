"""Overlap changes when buckets are sent, never what comes out: bit-equal to sending them in step()."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.written_out import CLASSES, COMPRESSED, bits
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import Adam, OneBitAdam
from thinwire.optim.engine.state import error_memories, replicated

WARMUP, STEPS, BUCKET = 4, 10, 40
ROUNDS = "zero_one_adam in rounds"
"""Steps 1, 2 are dense; 3 to 9 are syncs, of which 3, 4 and 6 move the variance; then 11, 15, 19."""
IN_ROUNDS = {
    "dense_steps": 2,
    "var_freeze_step": 6,
    "var_update_scaler": 1,
    "local_step_scaler": 3,
    "local_step_clipper": 4,
}
MERGED = ("adam", "lamb", "sgd", "onebit_adam", "onebit_lamb", "zero_one_adam", "onebit_muon")


class Net(torch.nn.Module):
    """Tied weights, a layer that only some batches use, one that none does."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(7, 13)
        self.tied = torch.nn.Linear(13, 13)
        self.sometimes = torch.nn.Linear(13, 13)
        self.never = torch.nn.Linear(5, 3)
        self.last = torch.nn.Linear(13, 3)

    def forward(self, x, extra):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.tied(torch.tanh(self.tied(x))))
        if extra:
            x = x + self.sometimes(x)
        return self.last(x)


NETS = [seeded(seed, Net) for seed in range(2)]


def groups_of(net):
    """Two groups, the second without matrices, with rates of their own."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    vectors = [p for p in net.parameters() if p.dim() < 2]
    return [{"params": matrices, "lr": 1e-2, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}]


def make(name, net, group, **more):
    if name in (*COMPRESSED, ROUNDS):
        more = {"block": 64, **more}
    if name == ROUNDS:
        name, more = "zero_one_adam", {**IN_ROUNDS, **more}
    elif name == "zero_one_adam":
        more = {"dense_steps": WARMUP, "var_freeze_step": WARMUP, "local_step_scaler": 100, **more}
    if name in ("onebit_adam", "onebit_lamb"):
        more = {"warmup": WARMUP, **more}
    return construct(CLASSES[name], groups_of(net), group=group, bucket_elements=BUCKET, **more)


def batch(step, rank, part, dtype):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    x = torch.randn(6, 7, generator=generator).to(dtype)
    return x, torch.sin(x[:, :3] * 2)


def backward(net, step, rank, part=0):
    """Which layers a batch uses differs between ranks."""
    x, y = batch(step, rank, part, next(net.parameters()).dtype)
    loss = (net(x, extra=(step + rank) % 2) - y).square().mean()
    loss.backward()
    return loss


def train(net, optimizer, steps, rank, parts=1):
    """Returns stats()["overlapped"] after each step."""
    told = []
    for _ in range(steps):
        step = optimizer.num_steps + 1
        optimizer.zero_grad()
        for part in range(parts - 1):
            with optimizer.no_sync():
                backward(net, step, rank, part)
        backward(net, step, rank, parts - 1)
        optimizer.step()
        told.append(optimizer.stats().get("overlapped"))
    return told


def everything(optimizer):
    s = optimizer.vectors
    local = () if optimizer.at_sync else s.of_round()
    errors = [part for memory in error_memories(s).values() for part in (memory.worker_N, memory.server_c)]
    return bits(optimizer.space.p_N, optimizer.space.g_N, *replicated(s).values(), *local, *errors)


@pytest.mark.few(2)
@every_value({"name": (*CLASSES, ROUNDS), "size": (1, 2, 3), "dtype": [torch.float32, torch.float64]}, only=(1, 3, 9))
def test_with_overlap_every_step_is_bit_equal_to_one_without(name, size, dtype):
    """All phases, rounds, tied weights, unused ones, layers that take part on some ranks only, micro-batches."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]).to(dtype) for _ in range(2)]
        plain, ours = (make(name, net, group, overlap=on) for net, on in zip(nets, (False, True), strict=True))
        for step in range(1, (19 if name == ROUNDS else STEPS) + 1):
            train(nets[0], plain, 1, group.rank, parts=1 + step % 2)
            train(nets[1], ours, 1, group.rank, parts=1 + step % 2)
            assert torch.equal(everything(plain), everything(ours)), step
        return bits(ours.space.p_N) if ours.at_sync else None

    first, *others = run_threads(size, work)
    assert all(torch.equal(first, other) for other in others if first is not None)


@pytest.mark.few(1)
@every_value({"name": MERGED}, only=(0, 2, 4))
def test_buckets_leave_while_backward_runs_in_every_step_but_the_first(name):
    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make(name, net, group, overlap=True)
        return optimizer.overlap.num_buckets, train(net, optimizer, STEPS, group.rank)

    for num_buckets, (first, *others) in run_threads(2, work):
        assert num_buckets > 10
        assert first["in_backward"] == 0
        assert first["waits_for"] == "the first step finds out whether a GradScaler calls it"
        for told in others:
            assert told["waits_for"] is None
            # Those that hold part of `never`, whose gradient does not come, when backward ends.
            assert told["buckets"] == num_buckets == told["in_backward"]
            assert told["in_step"] == 0


def test_all_buckets_but_those_of_the_last_layer_go_before_backward_reaches_it():
    """Vectors are of all layers: they are in the last buckets, wherever their group is."""

    def work(group):
        layers = [torch.nn.Linear(16, 16) for _ in range(4)]
        net = seeded(0, lambda: torch.nn.Sequential(*layers))
        optimizer = construct(OneBitAdam, groups_of(net), warmup=2, group=group, overlap=True, bucket_elements=256)
        seen = []

        def look(grad):
            seen.append(0 if optimizer.overlap.exchange is None else optimizer.overlap._round.num_launched)

        net[0].weight.register_hook(look)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.randn(5, 16, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
        return optimizer.overlap.num_buckets, seen, optimizer.stats()["overlapped"]

    for num_buckets, seen, told in run_threads(2, work):
        assert num_buckets == 5
        assert seen == [0, 3, 3, 3]
        assert told == {"buckets": 5, "in_backward": 5, "in_step": 0, "waits_for": None}


@pytest.mark.few(1)
@pytest.mark.parametrize(("nested", "plain", "all_early"), [([0], [], False), ([0, 1, 2], [], True), ([0], [2], True)])
def test_inside_reentrant_checkpointing_the_end_of_backward_is_that_of_the_outer_one(nested, plain, all_early):
    """Each layer has a backward of its own there; where there are only such, nobody says when the outer one ends."""

    def work(group):
        nets = [seeded(0, lambda: torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))) for _ in range(2)]
        made = [
            construct(OneBitAdam, net.parameters(), warmup=2, group=group, bucket_elements=64, overlap=on)
            for net, on in zip(nets, (False, True), strict=True)
        ]
        for step in range(5):
            for net, optimizer in zip(nets, made, strict=True):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(2 * step + group.rank)
                x = torch.randn(5, 16, generator=generator, requires_grad=True)
                for layer in nested:  # ranks are threads, and two that read torch's generator at once can stand still
                    x = checkpoint(net[layer], x, use_reentrant=True, preserve_rng_state=False)
                for layer in plain:
                    x = net[layer](x)
                x.square().sum().backward()
                optimizer.step()
            assert torch.equal(bits(made[0].space.p_N), bits(made[1].space.p_N))
        return made[1].stats()["overlapped"]

    for told in run_threads(2, work):
        assert (told["in_backward"] == told["buckets"]) == all_early


@pytest.mark.few(1)
@every_value({"name": MERGED, "clear": ["to zero", "never"]}, only=(1, 3, 5))
def test_gradients_that_backward_adds_to_go_early_too(name, clear):
    """They are the flat gradient itself, or one that is never cleared and grows, as any optimizer would have it."""

    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        plain, ours = (make(name, net, group, overlap=on) for net, on in zip(nets, (False, True), strict=True))
        for step in range(1, STEPS + 1):
            for net, optimizer in zip(nets, (plain, ours), strict=True):
                if clear == "to zero":
                    optimizer.zero_grad(set_to_none=False)
                backward(net, step, group.rank)
                optimizer.step()
            assert torch.equal(bits(plain.space.p_N), bits(ours.space.p_N))
        return ours.stats()["overlapped"]

    for told in run_threads(2, work):
        assert told["in_backward"] > 0


def test_what_is_trained_beside_frozen_parameters_goes_early():
    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        plain, ours = (make("onebit_adam", net, group, overlap=on) for net, on in zip(nets, (False, True), strict=True))
        for net, optimizer in zip(nets, (plain, ours), strict=True):
            train(net, optimizer, 3, group.rank)
            net.last.weight.requires_grad_(False)
            train(net, optimizer, 5, group.rank)
        told = ours.stats()["overlapped"]
        return torch.equal(everything(plain), everything(ours)), told

    for equal, told in run_threads(2, work):
        assert equal
        assert told["in_backward"] == told["buckets"]
        assert told["waits_for"] is None


def test_a_gradient_that_was_replaced_is_copied_in():
    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        plain, ours = (make("onebit_adam", net, group, overlap=on) for net, on in zip(nets, (False, True), strict=True))
        for step in range(1, STEPS + 1):
            for net, optimizer in zip(nets, (plain, ours), strict=True):
                net.zero_grad()  # to None: backward makes tensors of its own
                backward(net, step, group.rank)
                optimizer.step()
            assert torch.equal(everything(plain), everything(ours))
        return ours.stats()["overlapped"]["in_backward"]

    assert all(run_threads(2, work))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_copied_in_when_they_are_ready(dtype):
    def work(group):
        nets = [copy.deepcopy(NETS[0]).to(dtype) for _ in range(2)]
        plain, ours = (make("onebit_adam", net, group, overlap=on) for net, on in zip(nets, (False, True), strict=True))
        for _ in range(STEPS):
            train(nets[0], plain, 1, group.rank, parts=2)
            train(nets[1], ours, 1, group.rank, parts=2)
            assert torch.equal(everything(plain), everything(ours))
        return ours.stats()["overlapped"]["in_backward"]

    assert all(run_threads(2, work))


def test_a_closure_overlaps_too():
    def work(group):
        net = copy.deepcopy(NETS[0])
        optimizer = make("adam", net, group, overlap=True)
        for step in range(1, 4):

            def closure(step=step):
                optimizer.zero_grad()
                return backward(net, step, group.rank)

            optimizer.step(closure)
        return optimizer.stats()["overlapped"]["in_backward"]

    assert all(run_threads(2, work))


def test_a_new_optimizer_takes_the_parameters_over():
    def work(group):
        net = copy.deepcopy(NETS[0])
        old = make("adam", net, group, overlap=True)
        train(net, old, 2, group.rank)
        new = make("onebit_adam", net, group, overlap=True)
        train(net, new, 8, group.rank)
        return old.overlap.is_open, new.stats()["overlapped"]["in_backward"]

    for old_is_open, in_backward in run_threads(2, work):
        assert not old_is_open
        assert in_backward


def test_without_overlap_there_are_no_hooks_and_no_stats_of_it():
    net = copy.deepcopy(NETS[0])
    optimizer = Adam(net.parameters())
    assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in net.parameters())
    assert "overlapped" not in optimizer.stats()
    with optimizer.no_sync():
        backward(net, 1, 0)
    optimizer.step()


def test_a_group_that_is_added_before_the_first_step_overlaps_too():
    def work(group):
        nets = [copy.deepcopy(NETS[0]) for _ in range(2)]
        made = []
        for net, overlap in zip(nets, (False, True), strict=True):
            parameters = list(net.parameters())
            optimizer = construct(Adam, parameters[4:], group=group, overlap=overlap, bucket_elements=BUCKET)
            backward(net, 1, group.rank)  # its hooks are of a layout that goes
            optimizer.add_param_group({"params": parameters[:4], "lr": 1e-2})
            train(net, optimizer, 4, group.rank)
            made.append(optimizer)
        return torch.equal(everything(made[0]), everything(made[1])), made[1].stats()["overlapped"]

    for equal, told in run_threads(2, work):
        assert equal
        assert told["in_backward"]
