"""What users put around and into local steps: optimizers of their own, scalers, early ends of rounds, shares."""

import io

import pytest
import torch

from tests.optim.local_steps.test_local_steps import (
    EVERY,
    INNER,
    backward,
    left,
    made,
    moments,
    network,
    same,
    train,
)
from tests.optim.regroup.ranks import new_ranks, together
from thinwire.comm import CommError, NonFiniteInput, run_threads
from thinwire.comm.errors import WireMismatch
from thinwire.optim import LocalSteps, OneBitSGD, OuterSGD
from thinwire.optim.saves import together as brought_together


class Own(torch.optim.Optimizer):
    """An optimizer as people write them: through .data, with a list, a count or what it finds in its groups."""

    def __init__(self, params, keeps="nothing"):
        super().__init__(params, {"lr": 0.05, "keeps": keeps, "d": 1.0})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state, g = self.state[param], param.grad.data
                if group["keeps"] == "list":
                    state["seen"] = [g.clone()]
                elif group["keeps"] == "bytes":
                    state["signs"], state["count"] = g.sign().to(torch.int8), state.get("count", 0) + 1
                elif group["keeps"] == "of no parameter":
                    self.state["count"] = 1
                elif group["keeps"] == "d":
                    group["d"] += float(g.abs().sum())
                param.data.add_(g, alpha=-group["lr"] / group["d"])


def own(net, group=None, keeps="nothing", **more):
    return LocalSteps(Own(net.parameters(), keeps), every=EVERY, group=group, **more)


def test_what_an_optimizer_writes_through_data_into_low_precision_counts():
    def work(group):
        net, alone = network(torch.bfloat16), network(torch.bfloat16)
        optimizer, other = own(net, group), Own(alone.parameters())
        for step in range(1, EVERY):
            for one, of_one in ((net, optimizer), (alone, other)):
                backward(one, step, group.rank)
                of_one.step()
                of_one.zero_grad()
            for mine, its in zip(net.parameters(), alone.parameters(), strict=True):
                assert torch.equal(mine, its)
        assert not torch.equal(net[0].weight, network(torch.bfloat16)[0].weight)

    run_threads(2, work)


@pytest.mark.few(2)
@pytest.mark.law
@pytest.mark.parametrize("inner", [*INNER, "bytes", "d"])
def test_ranks_of_unequal_steps_save_what_all_go_on_from(inner):
    """What has no mean, as a count of steps, is rank 0's on all: its file loaded everywhere equals the run."""
    files = {}

    def work(group):
        def build(net):
            return made(net, group, inner) if inner in INNER else own(net, group, inner)

        net, again = network(), network(seed=9)
        optimizer = build(net)
        train(net, optimizer, 1 + group.rank, group.rank)
        optimizer.sync()
        file = io.BytesIO()
        torch.save((net.state_dict(), optimizer.state_dict()), file)
        files[group.rank] = file.getvalue()
        group.mean_(torch.zeros(1))
        weights, state = torch.load(io.BytesIO(files[0]), weights_only=True)
        again.load_state_dict(weights)
        other = build(again)
        other.load_state_dict(state)
        for one, of_one in ((net, optimizer), (again, other)):
            train(one, of_one, EVERY, group.rank)
        assert optimizer.at_sync
        assert torch.equal(optimizer.space.p_N, other.space.p_N)
        assert torch.equal(left(optimizer), left(other))
        assert same(moments(optimizer), moments(other))
        assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]

    run_threads(3, work)


@pytest.mark.law
@pytest.mark.parametrize("inner", ["adamw", "adam of ours"])
def test_a_parameter_that_was_frozen_for_a_while_has_its_own_count_in_a_save(inner):
    """Of unequal ages: the loaded run is the one that went on, and each count is its parameter's."""

    def work(group):
        net, again = network(), network(seed=9)
        optimizer, other = made(net, group, inner), made(again, group, inner)
        net[4].bias.requires_grad_(False)
        train(net, optimizer, EVERY, group.rank)
        net[4].bias.requires_grad_(True)
        train(net, optimizer, EVERY, group.rank)
        state = optimizer.state_dict()
        again.load_state_dict(net.state_dict())
        other.load_state_dict(state)
        for one, of_one in ((net, optimizer), (again, other)):
            train(one, of_one, EVERY, group.rank)
        assert torch.equal(optimizer.space.p_N, other.space.p_N)
        assert same(moments(optimizer), moments(other))
        counts = {x for (_, name), x in moments(optimizer).items() if name.endswith("step")}
        assert {int(x) for x in counts} == {2 * EVERY, 3 * EVERY}

    run_threads(2, work)


@pytest.mark.parametrize(("keeps", "said"), [("list", "keeps 'seen' of parameter"), ("of no parameter", "'count'")])
def test_what_cannot_be_saved_is_refused_when_it_is_to_be(keeps, said):
    def work(group):
        net = network()
        optimizer = own(net, group, keeps)
        train(net, optimizer, EVERY, group.rank)
        with pytest.raises(ValueError, match=said) as found:
            optimizer.state_dict()
        if keeps == "list":
            share = optimizer.rank_state_dict()
            optimizer.load_state_dict(share)
        train(net, optimizer, EVERY, group.rank)
        return str(found.value)

    first, second = run_threads(2, work)
    assert first == second


def test_moments_of_before_are_saved_as_their_mean_before_any_step():
    def work(group):
        net = network()
        inner = INNER["adamw"](net.parameters())
        backward(net, 1, group.rank)
        inner.step()
        return LocalSteps(inner, every=EVERY, group=group).state_dict()["added"]

    first, second = run_threads(2, work)
    assert first
    assert all(same(first[name], second[name]) for name in first)


@pytest.mark.parametrize("size", [1, 2])
def test_a_grad_scaler_lowers_its_scale_where_this_rank_overflows(size):
    def work(group):
        net = network(torch.float32)
        optimizer = made(net, group)
        began = 2.0**120 if group.rank == size - 1 else 2.0**10
        scaler = torch.amp.GradScaler("cpu", init_scale=began)
        for step in range(1, 3 * EVERY + 1):
            x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
            scaler.scale(1e6 * net(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.num_steps == 3 * EVERY
        return began / scaler.get_scale(), optimizer.space.p_N.clone()

    found = run_threads(size, work)
    assert [lowered > 1 for lowered, _ in found] == [rank == size - 1 for rank in range(size)]
    assert all(torch.equal(found[0][1], p) for _, p in found)


@pytest.mark.parametrize("ends", ["step", "sync"])
def test_after_a_round_that_was_refused_all_count_the_same_steps(ends):
    def work(group):
        net = network()
        optimizer = made(net, group)
        for step in range(1, EVERY if group.rank == 0 else 3):
            backward(net, step, group.rank)
            if group.rank and step == 1:
                net[0].weight.grad[0, 0] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(NonFiniteInput):
            optimizer.sync() if group.rank else train(net, optimizer, 1, group.rank)
        optimizer.sync() if group.rank or ends == "sync" else train(net, optimizer, 1, group.rank)
        assert optimizer.at_sync
        return optimizer.num_steps, optimizer.space.p_N.clone()

    (steps, p), (others, other) = run_threads(2, work)
    assert steps == others == EVERY + 1
    assert torch.equal(p, other)


@pytest.mark.law
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shares_of_the_middle_of_a_round_come_together_with_all_that_was_moved(dtype):
    """x is where the round began; R has the mean of the moves, and any number of ranks goes on."""
    shares = {}

    def save(group):
        net = network(dtype)
        optimizer = made(net, group)
        train(net, optimizer, EVERY + 2, group.rank)
        shares[group.rank] = optimizer.rank_state_dict()
        moved = optimizer.vectors.start_N - optimizer.space.p_N
        group.mean_(moved)
        return optimizer.vectors.start_N.clone(), moved + left(optimizer)

    (start, due), *_ = run_threads(3, save)
    whole = brought_together([shares[rank] for rank in range(3)])

    def load(group):
        net = network(dtype, seed=9)
        optimizer = made(net, group)
        optimizer.load_state_dict(whole)
        assert torch.equal(optimizer.space.p_N, start)
        torch.testing.assert_close(left(optimizer), due, rtol=1e-5, atol=1e-7)
        train(net, optimizer, EVERY, group.rank)
        assert optimizer.at_sync
        return optimizer.space.p_N.clone()

    one, two = run_threads(2, load)
    assert torch.equal(one, two)


def test_the_state_of_another_inner_optimizer_is_refused():
    state = made(network()).state_dict()
    with pytest.raises(ValueError, match="inner = 'AdamW', and this is a LocalSteps over Adam"):
        made(network(), inner="adam of ours").load_state_dict(state)


@pytest.mark.parametrize("inner", ["adamw", "adam of ours"])
def test_a_step_of_the_inner_optimizer_alone_is_refused(inner):
    net = network()
    optimizer = made(net, inner=inner)
    backward(net, 1, 0)
    with pytest.raises(RuntimeError, match="call step\\(\\) of LocalSteps"):
        optimizer.inside.step()
    optimizer.step()
    assert optimizer.num_steps == 1


@pytest.mark.parametrize("early", [False, True])
def test_freezing_on_one_rank_alone_is_told_on_both(early):
    def work(group):
        net = network()
        optimizer = made(net, group)
        train(net, optimizer, 3 * EVERY - 1, group.rank)
        if group.rank:
            net[0].weight.requires_grad_(False)
        with pytest.raises(CommError) as found:
            optimizer.sync() if early and group.rank else train(net, optimizer, 1, group.rank)
        return type(found.value)

    assert run_threads(2, work) == [WireMismatch, WireMismatch]


@pytest.mark.law
def test_a_death_after_a_lost_gradient_keeps_what_the_other_steps_have_moved():
    """The lost gradient counts as zero; the rest of the round is in R."""

    ranks = new_ranks(2, made)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, 2)
        rank.optimizer.zero_grad()
        param = next(rank.net.parameters())
        param.grad = torch.full_like(param, torch.nan)
        rank.optimizer.step()

    together(ranks, work)
    state = ranks[0].optimizer.vectors
    moved = state.start_N - ranks[0].optimizer.space.p_N
    assert bool(state.lost)
    assert moved.any()
    (found,) = together(ranks[:1], lambda rank, group: (rank.regroup(group), left(rank.optimizer))[1])
    torch.testing.assert_close(found, moved)


def test_after_a_change_of_ranks_moments_are_made_equal_before_they_are_saved():
    """As where a save has ended on one rank, and another has lost a peer in it."""
    ranks = new_ranks(2, made)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, EVERY)
        if not group.rank:
            rank.optimizer.saved["same_inner"] = EVERY

    def save(rank, group):
        rank.regroup(group)
        return rank.optimizer.state_dict()["added"]

    together(ranks, work)
    first, second = together(ranks, save)
    assert all(same(first[name], second[name]) for name in first)


@pytest.mark.law
@pytest.mark.parametrize("size", [1, 3])
def test_every_step_a_round_of_sgd_is_one_bit_sgd(size):
    """H = 1, the inner SGD and the outer SGD(1): the update of the gradient with error memory."""

    def work(group):
        net, alone = network(), network()
        local = LocalSteps(torch.optim.SGD(net.parameters(), 0.05), every=1, outer=OuterSGD(1.0, 0.0), group=group)
        other = OneBitSGD(alone.parameters(), lr=0.05, momentum=0.0, group=group)
        for step in range(1, 9):
            for one, of_one in ((net, local), (alone, other)):
                backward(one, step, group.rank)
                of_one.step()
                of_one.zero_grad()
        torch.testing.assert_close(local.space.p_N, other.space.p_N, rtol=0, atol=1e-13)

    run_threads(size, work)
