"""A share that one rank saves alone: nothing is sent, the run goes on as it was, and what is loaded is what went on."""

import copy
import logging

import pytest
import torch

from tests.covering import every_value
from tests.optim.engine.test_resume import (
    FREEZE,
    everything,
    network,
    through_a_file,
    told,
    train,
    two_groups,
)
from tests.optim.reference.written_out import COMPRESSED, bits, make
from thinwire.comm import Keeps, run_threads
from thinwire.comm.errors import CallMismatch
from thinwire.optim import OneBitAdam
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.saves import together

IN_ROUND = 10
"""Of 0/1 Adam as written_out.make makes it, frozen after step 5: the last sync was at step 9."""


def made(name, group, seed=0, dtype=torch.float32, **more):
    net = network(seed, dtype)
    return net, make(name, two_groups(net), group, warmup=FREEZE, **more)


def residuals(optimizer):
    return {name: memory.residual() for name, memory in error_memories(optimizer.vectors).items()}


def assert_close_to_r(found, expected):
    """To a few ulp of the largest: sums of as many terms as there are ranks, in another order."""
    for name, r_N in expected.items():
        assert (found[name] - r_N).abs().max() <= 8 * torch.finfo(r_N.dtype).eps * r_N.abs().max()


@every_value(
    {
        "name, saved_at": [*((name, 7) for name in COMPRESSED), ("zero_one_adam", IN_ROUND), ("adam", 4)],
        "old, new": [(3, 2), (2, 3), (3, 1)],
        "dtype": [torch.float32, torch.bfloat16],
    },
    only=(0, 2),
)
@pytest.mark.law
def test_the_shares_of_all_ranks_are_the_state_dict_of_all_for_any_number_of_them(name, saved_at, old, new, dtype):
    def save(group):
        net, optimizer = made(name, group, dtype=dtype)
        train(net, optimizer, saved_at, group.rank)
        share, weights = through_a_file(optimizer.rank_state_dict()), through_a_file(net.state_dict())
        whole = optimizer.state_dict()
        return share, weights, copy.deepcopy(whole), bits(*net.parameters())

    ranks = run_threads(old, save)
    found, expected = together([share for share, *_ in ranks[::-1]]), ranks[0][2]
    assert_close_to_r(found["residuals"], expected["residuals"])
    for key in ("num_steps", "frozen_at", "saved", "param_groups", "shapes", "optimizer"):
        assert found[key] == expected[key]
    for vector, value in expected["vectors"].items():
        torch.testing.assert_close(found["vectors"][vector], value, rtol=1e-6, atol=1e-9)

    def load(group):
        net, optimizer = made(name, group, seed=group.rank, dtype=dtype)
        net.load_state_dict(ranks[0][1])
        optimizer.load_state_dict(copy.deepcopy(found))
        assert_close_to_r(residuals(optimizer), found["residuals"])
        assert optimizer.at_sync
        start = [p.detach().float().clone() for p in net.parameters()]
        train(net, optimizer, 10, group.rank)
        optimizer.state_dict()
        return start, bits(*net.parameters(), optimizer.space.p_N)

    loaded = run_threads(new, load)
    as_saved, _ = made(name, None, dtype=dtype)
    torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in as_saved.parameters()]).copy_(ranks[0][3])
    for start, after in loaded:
        assert torch.equal(after, loaded[0][1])
        assert all(torch.equal(a, b) for a, b in zip(start, loaded[0][0], strict=True))


@every_value(
    {
        "name, saved_at": [*((name, 7) for name in COMPRESSED), ("zero_one_adam", IN_ROUND)],
        "new": [3, 2, 1],
        "dtype": [torch.float32, torch.bfloat16],
    },
    only=(0, 2, -1),
)
@pytest.mark.law
def test_the_share_of_rank_0_alone_is_whole_but_for_r_and_says_so_once(name, saved_at, new, dtype, caplog):
    def save(group):
        net, optimizer = made(name, group, dtype=dtype)
        train(net, optimizer, saved_at, group.rank)
        part = {key: memory.share(3) for key, memory in error_memories(optimizer.vectors).items()}
        return through_a_file(optimizer.rank_state_dict()), through_a_file(net.state_dict()), part

    share, weights, part = run_threads(3, save)[0]

    def load(group):
        net, optimizer = made(name, group, seed=group.rank, dtype=dtype)
        net.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(share))
        optimizer.prepare_to_save()
        assert optimizer.at_sync
        assert optimizer.num_steps == saved_at
        assert_close_to_r(residuals(optimizer), part)
        at_start = bits(optimizer.space.p_N, *net.parameters(), *replicated(optimizer.vectors).values())
        assert torch.equal(bits(*net.parameters()), bits(*(weights[key] for key, _ in net.named_parameters())))
        train(net, optimizer, 10, group.rank)
        while not optimizer.at_sync:
            train(net, optimizer, 1, group.rank)
        return at_start, bits(*optimizer.common_vectors().values())

    with caplog.at_level(logging.WARNING):
        ranks = run_threads(new, load)
    assert all(torch.equal(a, b) for rank in ranks for a, b in zip(rank, ranks[0], strict=True))
    said = [record.getMessage() for record in caplog.records if "share_of_one_rank" in record.getMessage()]
    assert len(said) == 1, said
    assert f"step={saved_at} rank=0 of=3 loaded_by={new}" in said[0]
    assert "2 of 3 ranks held" in said[0]
    assert "thinwire.optim.saves.together" in said[0]
    assert ("since the last sync" in said[0]) == (saved_at == IN_ROUND)


def test_in_the_warm_up_nothing_is_missing_and_nothing_said(caplog):
    def work(group):
        net, optimizer = made("onebit_adam", group)
        train(net, optimizer, 3, group.rank)
        share = through_a_file(optimizer.rank_state_dict())
        return share, through_a_file(net.state_dict())

    share, weights = run_threads(2, work)[0]

    def load(group):
        net, optimizer = made("onebit_adam", group, seed=4)
        net.load_state_dict(weights)
        optimizer.load_state_dict(share)
        train(net, optimizer, 1, group.rank)
        return bits(optimizer.space.p_N)

    with caplog.at_level(logging.WARNING):
        first, second = run_threads(2, load)
    assert torch.equal(first, second)
    assert "share_of_one_rank" not in caplog.text


def test_another_cut_into_buckets_keeps_r():
    def work(group):
        net, optimizer = made("onebit_adam", group, bucket_elements=64)
        train(net, optimizer, 8, group.rank)
        share, before = optimizer.rank_state_dict(), residuals(optimizer)
        other, resumed = made("onebit_adam", group, bucket_elements=40)
        other.load_state_dict(net.state_dict())
        resumed.load_state_dict(share)
        assert_close_to_r(residuals(resumed), before)
        train(other, resumed, 3, group.rank)
        return bits(resumed.space.p_N)

    first, second = run_threads(2, work)
    assert torch.equal(first, second)


def test_saves_chooses_what_state_dict_gives():
    def work(group):
        net, optimizer = made("onebit_adam", group)
        optimizer.saves = "rank"
        train(net, optimizer, 7, group.rank)
        collectives = group.stats.collectives
        if group.rank == 0:
            assert "share" in optimizer.state_dict()
        assert group.stats.collectives == collectives
        optimizer.saves = "together"
        assert "residuals" in optimizer.state_dict()
        with pytest.raises(ValueError, match="saves = 'alone'"):
            optimizer.saves = "alone"
        return optimizer.saves

    assert run_threads(2, work) == ["together"] * 2
    net = network(0)
    with pytest.raises(ValueError, match="saves = 'alone'"):
        OneBitAdam(net.parameters()).saves = "alone"


def shares_of(name, size, steps, seed=0, wide=13):
    def work(group):
        net = torch.nn.Sequential(torch.nn.Linear(7, wide), torch.nn.Tanh(), torch.nn.Linear(wide, 3))
        if wide == 13:
            net = network(seed)
        optimizer = make(name, two_groups(net), group, warmup=FREEZE)
        train(net, optimizer, steps, group.rank)
        return optimizer.rank_state_dict()

    return run_threads(size, work)


def without(share, key):
    return {k: v for k, v in share.items() if k != key}


def test_shares_that_are_not_of_one_save_are_refused_with_both_values():
    ours = shares_of("onebit_adam", 3, 7)
    name, entry = "momentum_error", ours[1]["share"]["1 of 3"]
    worker = entry["errors"][name]
    damaged = {
        **ours[1],
        "share": {"1 of 3": {**entry, "errors": {name: {**worker, "server": worker["server"][:-1]}}}},
    }
    other_v = {**ours[1], "vectors": {**ours[1]["vectors"], "v_N": ours[1]["vectors"]["v_N"] + 1}}
    for shares, message in (
        ([], "must be a list"),
        (ours[:2], r"2 shares of 3 ranks: those of ranks \[2\] are missing"),
        ([*ours, ours[1]], r"shares\[3\] is of rank 1 of 3, and so is one before"),
        ([ours[0], ours[1], shares_of("onebit_adam", 2, 7)[0]], "rank 0 of 2, and so is"),
        ([ours[0], *shares_of("onebit_adam", 2, 7)[1:]], r"ranks \[0, 1\] are of \[3, 2\] ranks"),
        ([ours[0], ours[1], shares_of("onebit_adam", 3, 8)[2]], "num_steps = 7 and rank 2 8"),
        ([ours[0], shares_of("onebit_lamb", 3, 7)[1], ours[2]], "optimizer = 'OneBitAdam' and rank 1 'OneBitLamb'"),
        ([ours[0], shares_of("onebit_adam", 3, 7, wide=5)[1], ours[2]], r"shapes = \[\[13\].*and rank 1 \[\[5\]"),
        ([ours[0], without(ours[1], "vectors"), ours[2]], r"shares\[1\] lacks \['vectors'\]"),
        ([ours[0], damaged, ours[2]], "server errors of .* damaged"),
        ([ours[0], other_v, ours[2]], "ranks 0 and 1 have saved other values of v_N"),
        ([ours[0], 3, ours[2]], r"shares\[1\] is int"),
    ):
        with pytest.raises(ValueError, match=message):
            together(shares)
    whole = together(ours)
    with pytest.raises(ValueError, match=r"shares\[0\] is state_dict\(\) of all ranks"):
        together([whole])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["onebit_adam", "zero_one_adam"])
def test_a_share_that_does_not_fit_is_refused_and_nothing_is_changed(name):
    steps = IN_ROUND if name == "zero_one_adam" else 7
    ours, of_three = shares_of(name, 2, steps), shares_of(name, 3, steps)
    entry = ours[0]["share"]["0 of 2"]
    memory, errors = next(iter(entry["errors"].items()))

    def of(name="0 of 2", **changed):
        return {**ours[0], "share": {name: {**entry, **changed}}}

    cases = [
        (ours[1], r"share of rank 1 of 2, and this is rank 0 of 2.*thinwire.optim.saves.together"),
        (of_three[2], r"share of rank 2 of 3, and this is rank 0 of 2"),
        (shares_of(name, 2, 7, wide=5)[0], "shapes"),
        (shares_of("onebit_lamb", 2, 7)[0], "optimizer = 'OneBitLamb'"),
        (without(ours[0], "vectors"), "lacks .*vectors"),
        (without(ours[0], "share"), "lacks .*residuals"),
        ({**ours[0], "share": {}}, r"share = \[\]"),
        ({**ours[0], "share": {**ours[0]["share"], **ours[1]["share"]}}, r"share = \['0 of 2', '1 of 2'\]"),
        *(({**ours[0], "share": {"0 of 2": without(entry, key)}}, f"lacks .*{key}") for key in entry),
        (of(rank=1), "rank = 1, size = 2 under '0 of 2'"),
        (of("2 of 2", rank=2), "rank = 2, size = 2"),
        (of(errors={}), r"errors = \[\]: this optimizer needs"),
        (of(errors={memory: 3}), r"errors.*= int"),
        (of(errors={memory: without(errors, "served")}), r"lacks \['served'\]"),
        (of(errors={memory: {**errors, "worker": errors["worker"][:-8]}}), "damaged"),
        (of(errors={memory: {**errors, "moves": "?"}}), "moves"),
        (of(errors={memory: {**errors, "worker": None}}), "worker"),
        (of(own=3), "own = 3"),
        ({**ours[0], "names": [*ours[0]["names"], "more"]}, r"without \['more'\]"),
    ]
    if name == "zero_one_adam":
        own = entry["own"]
        cases += [(of(own=without(own, key)), f"own without .*{key}") for key in own]
        cases += [
            (of(own={**own, "u_N": own["u_N"][:3]}), r"own\['u_N'\].*\[3\]"),
            (of(own={**own, "rounds": [[1.0, 0.0]]}), r"own\['rounds'\]"),
        ]
    else:
        cases.append((of(own={"u_N": errors["worker"]}), r"own \['u_N'\]"))

    def work(group):
        if group.rank:
            made(name, group)
            return True
        _, optimizer = made(name, group)
        before = everything(optimizer), copy.deepcopy(told(optimizer))
        for share, message in cases:
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(share)
            assert torch.equal(everything(optimizer), before[0]), message
            assert told(optimizer) == before[1], message
        return True

    assert run_threads(2, work) == [True] * 2


@pytest.mark.parametrize("name", ["onebit_adam", "adam"])
def test_ranks_that_loaded_what_does_not_belong_together_all_hear_of_it_at_the_next_step(name):
    def save(group):
        net, optimizer = made(name, group)
        found = []
        for steps in (4, 3):
            train(net, optimizer, steps, group.rank)
            found += [optimizer.rank_state_dict(), optimizer.state_dict()]
        return copy.deepcopy(found)

    saved = run_threads(2, save)

    def work(group):
        net, optimizer = made(name, group)
        share_4, whole_4, share_7, whole_7 = saved[group.rank]
        odd = group.rank == 1
        messages = []
        for mine, message in (
            (share_4 if odd else share_7, "the step is 7 on rank 0 and 4 on rank 1"),
            (whole_4 if odd else whole_7, "the step is 7 on rank 0 and 4 on rank 1"),
            (share_7 if odd else whole_7, "is state_dict.. of all ranks on rank 0 and a share of 2 ranks on rank 1"),
            (whole_7, "parameters is"),
            (share_7, "parameters is"),
        ):
            optimizer.load_state_dict(copy.deepcopy(mine))
            with torch.no_grad():
                net[0].weight += odd and message == "parameters is"  # the model was loaded on one rank only
            before = everything(optimizer)
            for _ in range(2):  # said as often as it is tried
                with pytest.raises(ValueError, match=message) as raised:
                    train(net, optimizer, 1, group.rank)
            with pytest.raises((ValueError, CallMismatch)):  # that finds out that steps differ before it looks further
                optimizer.state_dict()
            messages.append(str(raised.value))
            assert torch.equal(everything(optimizer), before)
            for group_ in optimizer.param_groups:
                group_["lr"] = 1e-2
        return messages

    first, second = run_threads(2, work)
    assert first == second


def test_a_share_is_refused_between_backward_and_step_where_gradients_are_on_their_way():
    def work(group):
        net, optimizer = made("onebit_adam", group, overlap=True)
        train(net, optimizer, 7, group.rank)
        net(torch.ones(2, 7)).square().mean().backward()
        for call in (optimizer.rank_state_dict, lambda: optimizer.load_state_dict({})):
            with pytest.raises(RuntimeError, match="between backward and step"):
                call()
        optimizer.step()
        return optimizer.rank_state_dict()["num_steps"]

    assert run_threads(2, work) == [8, 8]


class Replicated(OneBitAdam):
    """Each rank keeps the server error of the one before too."""

    keeps = Keeps.REPLICA


@pytest.mark.parametrize("of_rank_0", [False, True])
def test_replicas_of_server_errors_are_those_of_the_rank_before_after_a_load(of_rank_0):
    def make_one(group):
        net = network(0)
        return net, Replicated(two_groups(net), group=group, warmup=FREEZE)

    def save(group):
        net, optimizer = make_one(group)
        train(net, optimizer, 8, group.rank)
        return copy.deepcopy((optimizer.rank_state_dict(), net.state_dict()))

    saved = run_threads(3, save)

    def load(group):
        net, optimizer = make_one(group)
        share, weights = saved[0 if of_rank_0 else group.rank]
        net.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(share))
        optimizer.prepare_to_save()
        loaded = optimizer.vectors.momentum_error.held()
        train(net, optimizer, 2, group.rank)
        after = optimizer.vectors.momentum_error.held()
        return [(held.server_c, held.replica_r) for held in (loaded, after)]

    ranks = run_threads(3, load)
    for when in range(2):
        for rank in range(3):
            before, replica = ranks[rank - 1][when][0], ranks[rank][when][1]
            assert before.any()
            assert torch.equal(replica, before)
