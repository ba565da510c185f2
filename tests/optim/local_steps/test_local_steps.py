"""Local steps: nothing of what ranks have moved by is lost, whatever the codec, the inner optimizer and the ranks."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import sized
from tests.optim.muon.test_muon import backward, network, train
from tests.optim.regroup.ranks import goes_on, new_ranks, together
from thinwire.comm import NonFiniteInput, SoloGroup, run_threads
from thinwire.comm.codecs import PowerSGD, SignCodec, TopKCodec
from thinwire.comm.errors import CallMismatch
from thinwire.optim import SGD, Adam, LocalSteps, Muon, OneBitAdam, OuterSGD

SIZES = (1, 2, 3, 4, 8)
EVERY = 4
INNER = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "muon": lambda params: Muon(params, lr=0.01, group=SoloGroup()),
    "adam of ours": lambda params: Adam(params, lr=0.01, group=SoloGroup()),
}


def made(net, group=None, inner="adamw", **more):
    more = {"every": EVERY, "codec": SignCodec(64), **more}
    return sized(LocalSteps, bucket_elements=64)(INNER[inner](net.parameters()), group=group, **more)


def left(optimizer):
    return optimizer.vectors.move_error.residual()


def moments(optimizer):
    """What the inner optimizer keeps of all parameters, by parameter and name."""
    found = {}
    for at, tensor in enumerate(optimizer.space.tensors):
        for name, x in optimizer.kept_beside(tensor.param).items():
            found[at, name] = x.clone() if isinstance(x, torch.Tensor) else x
    return found


def same(one, other):
    pairs = [(one[key], other.get(key)) for key in one]
    alike = [torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs]
    return one.keys() == other.keys() and all(alike)


@pytest.mark.few(1)
@every_value(
    {
        "size": SIZES,
        "inner": tuple(INNER),
        "codec": (SignCodec(64), "int8", "int4", TopKCodec(64, 4)),
        "outer": (OuterSGD(0.7, 0.9), OuterSGD(), OuterSGD(0.5, 0.8, nesterov=False)),
    }
)
@pytest.mark.law
def test_all_that_ranks_have_moved_by_is_applied_or_in_r(size, inner, codec, outer):
    """x_s' = x_s - lr (D + mu b), with D + R' = mean_i d_i + R; in between each inner optimizer steps alone."""

    def work(group):
        net, alone = network(), network()
        optimizer = made(net, group, inner, codec=codec, outer=outer)
        other = INNER[inner](alone.parameters())
        b, worst = torch.zeros_like(optimizer.space.p_N), 0.0
        for step in range(1, 3 * EVERY + 1):
            if optimizer.at_sync:
                began, before = optimizer.space.p_N.clone(), left(optimizer)
                for mine, its in zip(net.parameters(), alone.parameters(), strict=True):
                    its.data.copy_(mine)
            for one, of_one in ((net, optimizer), (alone, other)):
                of_one.zero_grad()
                backward(one, step, group.rank)
                of_one.step()
            if optimizer.at_sync:
                moved, its = began.clone(), dict(zip(net.parameters(), alone.parameters(), strict=True))
                for tensor in optimizer.space.tensors:
                    moved[tensor.start : tensor.stop] -= its[tensor.param].detach().view(-1)
                group.mean_(moved)
                given = moved + before - left(optimizer)
                b = outer.momentum * b + given
                due = began - outer.lr * (given + outer.momentum * b if outer.nesterov else b)
                worst = max(worst, float((optimizer.space.p_N - due).abs().max()))
            else:
                here = torch.cat([param.detach().view(-1) for param in net.parameters()])
                assert torch.equal(here, torch.cat([param.detach().view(-1) for param in alone.parameters()]))
        assert optimizer.stats()["num_rounds"] == 3
        return worst, optimizer.space.p_N.clone()

    found = run_threads(size, work)
    assert max(worst for worst, _ in found) < 1e-12
    assert all(torch.equal(found[0][1], p) for _, p in found)


@pytest.mark.few(1)
@pytest.mark.law
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_make_fewer_steps_count_by_what_they_moved(size):
    """Rank r makes 1 + r mod 4 steps of 4, the last none in the second round: the plain mean of the moves."""

    def work(group):
        net = network()
        optimizer = made(net, group, outer=OuterSGD(1.0, 0.0))
        worst = 0.0
        for r in range(3):
            began, before = optimizer.space.p_N.clone(), left(optimizer)
            steps = 0 if r == 1 and group.rank == size - 1 else 1 + group.rank % EVERY
            for _ in range(steps):
                backward(net, optimizer.num_steps + 1, group.rank)
                if optimizer.num_steps + 1 - optimizer.common_steps < EVERY:
                    optimizer.step()
                    optimizer.zero_grad()
            moved = began - optimizer.space.p_N
            optimizer.sync()
            group.mean_(moved)
            worst = max(worst, float((began - optimizer.space.p_N - moved - before + left(optimizer)).abs().max()))
            assert (optimizer.num_steps, optimizer.at_sync) == (EVERY * (r + 1), True)
        return worst, optimizer.space.p_N.clone()

    found = run_threads(size, work)
    assert max(worst for worst, _ in found) < 1e-12
    assert all(torch.equal(found[0][1], p) for _, p in found)


def test_a_step_may_end_the_round_that_another_rank_ends_by_sync():
    def work(group):
        net = network()
        optimizer = made(net, group)
        for _ in range(2):
            train(net, optimizer, EVERY if group.rank else 2, group.rank)
            if not group.rank:
                optimizer.sync()
        return optimizer.num_steps, optimizer.space.p_N.clone()

    first, *others = run_threads(3, work)
    assert first[0] == 2 * EVERY
    assert all(steps == first[0] and torch.equal(first[1], p) for steps, p in others)


@pytest.mark.law
@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_a_death_in_mid_round_costs_the_dead_ranks_round_alone(inner):
    """What the survivors have moved by is in R, as the mean of theirs; all go on from where the round began."""

    def build(net):
        return made(net, inner=inner, outer=OuterSGD(1.0, 0.0))

    ranks, known = new_ranks(3, build), {}

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, EVERY)
        known[group.rank] = (
            rank.optimizer.space.p_N.clone(),
            [x.error() for x in rank.optimizer.vectors.move_error.worker],
        )
        rank.train(group, EVERY + 2)

    together(ranks, work)
    survivors = list(ranks[:2])
    moved = sum(known[0][0] - rank.optimizer.space.p_N for rank in survivors) / 2
    worker = sum(_in_place(rank.optimizer, known[at][1]) for at, rank in enumerate(survivors)) / 2
    server = sum(_server(rank.optimizer) for rank in survivors)
    stay = [*survivors, *new_ranks(1, build)]
    found = together(stay, lambda rank, group: (rank.regroup(group), left(rank.optimizer))[1])
    for rank, residual in zip(stay, found, strict=True):
        torch.testing.assert_close(residual, moved + worker + server, rtol=1e-5, atol=1e-7)
        assert torch.equal(rank.optimizer.space.p_N, known[0][0])
        assert rank.optimizer.num_steps == EVERY + 2
        assert rank.optimizer.at_sync
    assert same(moments(stay[2].optimizer), moments(stay[0].optimizer))
    assert not same(moments(stay[1].optimizer), moments(stay[0].optimizer))
    goes_on(stay, 2 * EVERY)


def _in_place(optimizer, of_buckets):
    found = torch.zeros_like(optimizer.space.p_N)
    for place, x in zip(optimizer.vectors.move_error.places, of_buckets, strict=True):
        found[place.worker.at] = x
    return found


def _server(optimizer):
    found = torch.zeros_like(optimizer.space.p_N)
    for place, kept in zip(optimizer.vectors.move_error.places, optimizer.vectors.move_error.server, strict=True):
        found[place.own.at] = kept.error()
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_counts_as_zero_and_is_told_at_the_end_of_the_round(size, inner):
    last = size - 1

    def work(group):
        net = network()
        optimizer = made(net, group, inner)
        for step in range(1, EVERY + 1):
            backward(net, step, group.rank)
            if group.rank == last and step == 2:
                net[2].weight.grad[1, 1] = torch.nan
            if step < EVERY:
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(NonFiniteInput, match=f"gradient of rank {last} in steps 1 to {EVERY} holds NaN"):
            optimizer.step()
        assert not optimizer.at_sync
        train(net, optimizer, 1, group.rank)
        assert optimizer.at_sync
        train(net, optimizer, EVERY, group.rank)
        return optimizer.space.p_N.clone()

    first, *others = run_threads(size, work)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def test_with_skip_it_is_said_in_the_log_alone(caplog):
    def work(group):
        net = network()
        optimizer = made(net, group, non_finite="skip")
        for step in range(1, EVERY + 1):
            backward(net, step, group.rank)
            if group.rank == 1 and step == 2:
                net[2].weight.grad[1, 1] = torch.inf
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.at_sync
        return optimizer.space.p_N.isfinite().all()

    assert all(run_threads(2, work))
    assert [record.message for record in caplog.records if "left_out" in record.message] == [
        f"gradient_left_out rank=1 steps=1-{EVERY}"
    ]


def test_parameters_that_are_not_finite_are_named_on_all():
    def work(group):
        net = network()
        optimizer = made(net, group)
        train(net, optimizer, EVERY - 1, group.rank)
        backward(net, EVERY, group.rank)
        if group.rank:
            with torch.no_grad():
                net[0].weight[0, 0] = torch.inf
        with pytest.raises(RuntimeError, match="inner optimizer of rank 1 has moved parameters to NaN or infinity"):
            optimizer.step()

    run_threads(2, work)


def test_a_schedule_may_hold_either():
    net = network()
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer = LocalSteps(inner, every=2)
    for holder in (inner, optimizer):
        torch.optim.lr_scheduler.LambdaLR(holder, lambda _: 0.5)
        assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    before = inner.param_groups[0]["lr"]
    optimizer.load_state_dict(optimizer.state_dict())
    inner.param_groups[0]["lr"] = before / 2
    assert optimizer.param_groups[0]["lr"] == before / 2


def test_the_state_of_the_inner_optimizer_is_shown_and_counted():
    net = network(torch.float32)
    optimizer = made(net)
    train(net, optimizer, 1, 0)
    assert set(optimizer.state[net[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    held = optimizer.stats()["bytes_per_parameter"]["state"]
    train(net, optimizer, 1, 0)
    assert held >= 4 * 4  # outer momentum, where the round began, and two moments
    assert optimizer.stats()["bytes_per_parameter"]["state"] == held


@pytest.mark.few(1)
@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_parameters_may_be_frozen_and_unfrozen_and_groups_added(inner):
    def work(group):
        net, more = network(), torch.nn.Parameter(torch.full((3, 5), 1.0 + group.rank, dtype=torch.float64))
        optimizer = made(net, group, inner)
        train(net, optimizer, EVERY + 1, group.rank)
        net[0].weight.requires_grad_(False)
        kept = net[0].weight.detach().clone()
        train(net, optimizer, EVERY + 1, group.rank)
        assert optimizer.num_steps == 2 * EVERY + 2
        net[0].weight.requires_grad_(True)
        train(net, optimizer, EVERY, group.rank)
        assert not torch.equal(kept, net[0].weight)
        if inner == "adamw":
            optimizer.add_param_group({"params": [more]})
            assert (more == 1).all()
            more.grad = torch.ones_like(more)
        train(net, optimizer, 2 * EVERY, group.rank)
        optimizer.prepare_to_save()
        return optimizer.space.p_N.clone()

    first, *others = run_threads(3, work)
    assert all(torch.equal(first, other) for other in others)


def over_two(group):
    return Muon(network().parameters(), group=group)


@pytest.mark.parametrize(
    ("inner", "more", "error", "said"),
    [
        ("adamw", {"every": 0}, ValueError, r"every = 0: must be a whole number \(int\), at least 1"),
        ("adamw", {"every": 9, "total_steps": 8}, ValueError, "every = 9, total_steps = 8: the ranks would never"),
        ("adamw", {"codec": "signs"}, ValueError, "codec = 'signs': must be one of sign, int8, int4, topk"),
        (
            "adamw",
            {"codec": PowerSGD()},
            ValueError,
            "crosses in sums of the whole vector .* use OneBitSGD for factors",
        ),
        ("adamw", {"outer": 0.7}, ValueError, r"outer = 0.7: must be an OuterSGD"),
        (over_two, {}, ValueError, "inner = Muon over 2 ranks: it communicates by itself"),
        (lambda group: OneBitAdam(network().parameters(), group=SoloGroup()), {}, ValueError, "give the dense one"),
        (lambda group: torch.optim.LBFGS(network().parameters()), {}, ValueError, "needs a closure"),
        (lambda group: network(), {}, TypeError, "inner = Sequential: must be an optimizer"),
    ],
)
def test_bad_input_is_said_in_a_sentence_alike_on_all_ranks(inner, more, error, said):
    def work(group):
        one = INNER[inner](network().parameters()) if isinstance(inner, str) else inner(group)
        with pytest.raises(error, match=said) as found:
            LocalSteps(one, group=group, **{"every": 4, **more})
        return str(found.value)

    first, second = run_threads(2, work)
    assert first == second


def test_an_outer_rule_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"outer\.momentum = 1.0"):
        OuterSGD(momentum=1.0)


def test_a_state_loaded_into_the_inner_optimizer_alone_is_refused():
    net = network()
    inner = torch.optim.AdamW(net.parameters())
    optimizer = LocalSteps(inner, every=4)
    train(net, optimizer, 1, 0)
    inner.load_state_dict(inner.state_dict())
    backward(net, 2, 0)
    with pytest.raises(RuntimeError, match="state_dict\\(\\) and load_state_dict\\(\\) of LocalSteps"):
        optimizer.step()


def test_a_save_in_a_round_of_unequal_steps_says_what_to_do():
    def work(group):
        net = network()
        optimizer = made(net, group)
        train(net, optimizer, 1 + group.rank, group.rank)
        with pytest.raises(CallMismatch):
            optimizer.state_dict()

    run_threads(2, work)


def test_a_whole_run_of_32_steps_a_round_sends_a_thousandth_of_fp32():
    def work(group):
        net = torch.nn.Linear(512, 512, bias=False)
        optimizer = LocalSteps(SGD(net.parameters(), lr=0.1, group=SoloGroup()), every=32, group=group)
        began = optimizer.reduce.stats.sent_bytes
        for _ in range(64):
            net.weight.grad = torch.ones_like(net.weight)
            optimizer.step()
        return (optimizer.reduce.stats.sent_bytes - began) / 64

    ring = 2 * 4 * 512 * 512 / 2  # what each of two ranks sends of fp32 in a step
    assert all(ring / sent > 900 for sent in run_threads(2, work))
