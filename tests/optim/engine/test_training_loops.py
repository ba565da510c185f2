"""Training loops as people write them for torch.optim: each is held against the plain loop, for every optimizer."""

import io

import pytest
import torch
import torch.nn.functional as F

from tests.covering import every_value
from tests.optim.reference.written_out import CLASSES, bits, make
from tests.optim.seeded import seeded
from thinwire.comm import run_threads
from thinwire.optim import Adam
from thinwire.optim.engine.state import replicated

FREEZE, STEPS, SIZE = 4, 13, 2
ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}

every_optimizer = pytest.mark.parametrize("name", CLASSES)


def network(dtype=torch.float32):
    layers = lambda: torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.Tanh(), torch.nn.Linear(11, 3))  # noqa: E731
    return seeded(0, layers).to(dtype)


def two_groups(net):
    last = {**ADAM, "lr": 3e-3, "weight_decay": 0.0}
    return [{"params": list(net[0].parameters()), **ADAM}, {"params": list(net[2].parameters()), **last}]


def inputs(step, rank, dtype=torch.float32):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def loss_of(net, x):
    return (net(x) - torch.sin(2 * x[:, :3])).square().mean()


def end(optimizer):
    """Bits of what a rank holds at last; of 0/1 Adam also what it has not sent yet."""
    local = optimizer.vectors.of_round() if not optimizer.at_sync else ()
    return bits(optimizer.space.p_N, *replicated(optimizer.vectors).values(), *local)


def plain(net, optimizer, rank, steps=range(1, STEPS + 1)):
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, inputs(step, rank)).backward()
        optimizer.step()


def with_closure(net, optimizer, rank):
    for step in range(1, STEPS + 1):
        calls = []

        def closure(step=step, calls=calls):
            optimizer.zero_grad()
            loss = loss_of(net, inputs(step, rank))
            loss.backward()
            calls.append(loss.item())
            return loss

        returned = optimizer.step(closure)
        assert calls == [float(returned.detach())]


def zeroed_by_the_model(net, optimizer, rank):
    for step in range(1, STEPS + 1):
        net.zero_grad()
        assert all(p.grad is None for p in net.parameters())
        loss_of(net, inputs(step, rank)).backward()
        optimizer.step()


def zeroed_in_place_by_the_model(net, optimizer, rank):
    for step in range(1, STEPS + 1):
        net.zero_grad(set_to_none=False)
        loss_of(net, inputs(step, rank)).backward()
        optimizer.step()


def with_gradients_of_ones_own(net, optimizer, rank):
    for step in range(1, STEPS + 1):
        params = list(net.parameters())
        grads = torch.autograd.grad(loss_of(net, inputs(step, rank)), params)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        optimizer.step()


LOOPS = [with_closure, zeroed_by_the_model, zeroed_in_place_by_the_model, with_gradients_of_ones_own]


@every_value({"name": CLASSES, "loop": LOOPS}, only=(0, 2, 4))
def test_every_way_to_write_the_loop_gives_the_same_bits(name, loop):
    def work(group):
        ends = []
        for written in (plain, loop):
            net = network()
            optimizer = make(name, two_groups(net), group, warmup=FREEZE)
            written(net, optimizer, group.rank)
            ends.append(end(optimizer))
        return ends

    for expected, got in run_threads(SIZE, work):
        assert torch.equal(got, expected)


@pytest.mark.few(1)
@every_optimizer
def test_two_backward_passes_before_a_step_are_one_of_the_sum_and_send_nothing(name):
    def work(group):
        double, ends = torch.float64, []
        for accumulated in (False, True):
            net = network(double)
            optimizer = make(name, two_groups(net), group, warmup=FREEZE)
            for step in range(1, STEPS + 1):
                x = inputs(step, group.rank, double)
                optimizer.zero_grad()
                sent = group.stats.collectives
                if accumulated:
                    for half in x.chunk(2):
                        (loss_of(net, half) / 2).backward()
                else:
                    loss_of(net, x).backward()
                assert group.stats.collectives == sent
                optimizer.step()
            ends.append([p.detach().clone() for p in net.parameters()])
        return ends

    # Three ranks: the mean of two signs of one scale, as updates of a vector have, is a zero of either sign.
    for whole, halves in run_threads(3, work):
        for a, b in zip(whole, halves, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def lambda_lr(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) * 0.95**step)


def one_cycle(optimizer):
    rates = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=STEPS + 1, cycle_momentum=False)


SCHEDULERS = [lambda_lr, one_cycle]


@every_value({"name": CLASSES, "scheduler": SCHEDULERS}, only=(1, 3, 5))
def test_a_scheduler_steers_as_rates_set_by_hand_do(name, scheduler):
    theirs = scheduler(torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in (1e-2, 3e-3)]))
    rates = []
    for _ in range(STEPS):
        rates.append(theirs.get_last_lr())
        theirs.optimizer.step()
        theirs.step()

    def work(group):
        ends = []
        for by_hand in (False, True):
            net = network()
            optimizer = make(name, two_groups(net), group, warmup=FREEZE)
            schedule = None if by_hand else scheduler(optimizer)
            for step in range(1, STEPS + 1):
                if by_hand:
                    for param_group, rate in zip(optimizer.param_groups, rates[step - 1], strict=True):
                        param_group["lr"] = rate
                plain(net, optimizer, group.rank, [step])
                if schedule is not None:
                    schedule.step()
            ends.append(end(optimizer))
        return ends

    for steered, by_hand in run_threads(SIZE, work):
        assert torch.equal(steered, by_hand)


@every_value({"name": CLASSES, "scheduler": SCHEDULERS}, only=(0, 2, 4))
def test_model_optimizer_and_scheduler_go_on_from_one_file(name, scheduler):
    def work(group):
        net = network()
        optimizer = make(name, two_groups(net), group, warmup=FREEZE)
        schedule = scheduler(optimizer)

        def go(net, optimizer, schedule, steps):
            for step in steps:
                plain(net, optimizer, group.rank, [step])
                schedule.step()

        go(net, optimizer, schedule, range(1, 8))
        file = io.BytesIO()
        optimizer_state = optimizer.state_dict()  # first: it may bring the parameters of the ranks together
        state = {"model": net.state_dict(), "optimizer": optimizer_state, "schedule": schedule.state_dict()}
        torch.save(state, file)
        go(net, optimizer, schedule, range(8, STEPS + 1))

        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        other = network()
        with torch.no_grad():
            other[0].weight.zero_()
        resumed = make(name, two_groups(other), group, warmup=FREEZE)
        again = scheduler(resumed)
        other.load_state_dict(loaded["model"])
        resumed.load_state_dict(loaded["optimizer"])
        again.load_state_dict(loaded["schedule"])
        go(other, resumed, again, range(8, STEPS + 1))
        return end(optimizer), end(resumed), schedule.get_last_lr() == again.get_last_lr()

    for went_on, resumed, same_rates in run_threads(SIZE, work):
        assert torch.equal(went_on, resumed)
        assert same_rates


class Tied(torch.nn.Module):
    """A Linear whose weight is the Embedding's."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.head = torch.nn.Linear(8, 11)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return F.cross_entropy(self.head(self.table(tokens)), (tokens + 1) % 11)


def tokens(step, rank):
    return torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(1000 * step + rank))


def gradients_of_both_uses(net, rank):
    """Through the table and through the head, as if they were two tensors."""
    table, head = (net.table.weight.detach().clone().requires_grad_() for _ in range(2))
    logits = F.linear(F.embedding(tokens(1, rank), table), head, net.head.bias.detach())
    return torch.autograd.grad(F.cross_entropy(logits, (tokens(1, rank) + 1) % 11), (table, head))


@pytest.mark.few(3)
@every_optimizer
def test_tied_weights_stay_one_parameter_that_takes_both_gradients(name):
    def work(group):
        net = seeded(0, Tied)
        rate = {"lr": 0.2} if "muon" in name else {}  # an update has a fifth of the size
        optimizer = make(name, [{"params": list(net.parameters()), **ADAM, **rate}], group, warmup=FREEZE)
        assert len(optimizer.space.tensors) == 2
        before, losses = net.table.weight.detach().clone(), []
        for step in range(1, 30):
            net.zero_grad()
            loss = net(tokens(step, group.rank))
            loss.backward()
            losses.append(float(loss.detach()))
            if step == 1:
                torch.testing.assert_close(net.table.weight.grad, sum(gradients_of_both_uses(net, group.rank)))
            optimizer.step()
        optimizer.prepare_to_save()
        assert net.head.weight is net.table.weight
        assert not torch.equal(net.table.weight, before)
        assert losses[-1] < losses[0]
        return bits(*net.parameters())

    first, *others = run_threads(SIZE, work)
    assert all(torch.equal(first, other) for other in others)


def test_a_tied_model_takes_the_steps_of_adamw():
    ours, theirs = seeded(0, Tied).double(), seeded(0, Tied).double()
    optimizer, reference = Adam(ours.parameters(), **ADAM), torch.optim.AdamW(theirs.parameters(), **ADAM)
    for step in range(1, 30):
        for net, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            net(tokens(step, 0)).backward()
            opt.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
