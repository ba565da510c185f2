"""What a dead rank held of the error memory is estimated from kept rows: by the formula, alike on all, and told."""

from functools import cache

import pytest
import torch

from tests.covering import every_value
from tests.optim.regroup.ranks import goes_on, new_ranks, struck, together, trained
from tests.optim.regroup.test_regroup import EPS, FAULTS, STEP, dies, maker, regrouped
from thinwire.comm import Keeps, PeerLost
from thinwire.comm.exchange.rebuild import SERVER, WORKER
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim.engine.state import error_memories
from thinwire.optim.regroup import hand_over


def keeping(name, keeps=Keeps.ROWS):
    def build(net):
        optimizer = maker(name)(net)
        optimizer.keeps = keeps
        return optimizer

    return build


def begun(name, size, steps, keeps=Keeps.ROWS):
    return trained(keeping(name, keeps), size, steps)


def everything(ranks):
    """Of each rank: worker error, server error and result in their place, what was sent, outliers; float64[N] each."""
    found = []
    for at, rank in enumerate(ranks):
        (memory,) = error_memories(rank.optimizer.vectors).values()
        worker_N = memory.worker_N
        own = {"worker": worker_N, "server": memory.share(1) - worker_N}
        own["sent"], own["out"] = torch.zeros_like(worker_N), torch.zeros_like(worker_N)
        own["serves"] = torch.zeros_like(worker_N, dtype=torch.bool)
        for place, worker, server in zip(memory.places, memory.worker, memory.server, strict=True):
            own["sent"][place.worker.at] = worker.sent()
            own["out"][place.own.at] = server.sent()
            own["serves"][place.own.at] = True
        own["outliers"] = torch.zeros_like(worker_N)
        if memory.outliers is not None:
            memory.outliers.add_(own["outliers"], at)
        found.append({key: x if x.dtype is torch.bool else x.double() for key, x in own.items()})
    return found


@cache
def undisturbed(name, size, steps):
    ranks = begun(name, size, steps)
    return ranks[0].held(), everything(ranks)


def expected(all_n, dead):
    """R as the survivors are to rebuild it, written out."""
    size, survivors = len(all_n), [one for at, one in enumerate(all_n) if at not in dead]
    mean = {key: sum(one[key] for one in survivors) / len(survivors) for key in ("worker", "sent")}
    out_N = sum(one["out"] for one in all_n)
    found_N = sum(one["worker"] for one in survivors) / size + sum(one["server"] for one in survivors)
    orphaned_N = sum(all_n[at]["serves"] for at in dead).bool()
    for one in (all_n[at] for at in dead):
        worker_N = WORKER * (mean["worker"] + mean["sent"] - one["sent"])
        found_N += torch.where(orphaned_N, mean["worker"], worker_N) / size
        server_N = one["outliers"] + SERVER * (mean["sent"] - out_N)
        found_N += torch.where(one["serves"], server_N, 0)
    return found_N


def largest(all_n):
    return max(float(one[key].abs().max()) for one in all_n for key in ("worker", "server", "sent"))


@pytest.mark.few(1)
@every_value(
    {
        "size, dead": [(2, (0,)), (3, (1,)), (4, (3,)), (4, (0, 2)), (8, (1, 2, 6))],
        "name": ["onebit_adam", "onebit_lamb", "onebit_sgd", "zero_one_adam"],
    },
    only=(1, 2, 4),
)
@pytest.mark.law
def test_what_the_dead_held_is_rebuilt_as_the_formula_says(name, size, dead):
    ranks = begun(name, size, STEP)
    held, all_n = ranks[0].held(), everything(ranks)
    stay = [rank for at, rank in enumerate(ranks) if at not in dead]
    residuals = [next(iter(found.values())) for found in regrouped(stay)]
    for found_N in residuals:
        assert torch.equal(found_N, residuals[0])
        assert (found_N - expected(all_n, dead)).abs().max() <= 64 * EPS * largest(all_n)
    assert stay[0].told.rebuilt == stay[0].told.lost == dead
    if name != "zero_one_adam":  # a sync has ended its round
        assert torch.equal(stay[0].held(), held)
    goes_on([*stay, *new_ranks(1, keeping(name))])


@pytest.mark.few(1)
@every_value({"where": FAULTS, "size": (4, 3, 2)}, only=(0, 2))
@pytest.mark.law
def test_t5_a_death_anywhere_in_a_step_is_rebuilt_from_the_exchange_that_counts(where, size):
    dead = size - 1
    fault = dies(where, dead, size)
    forward = len(fault.ranks) > 1
    ranks = new_ranks(size, keeping("onebit_adam"))
    struck(ranks, STEP, fault)
    stay = ranks[:dead]
    (found_N,) = regrouped(stay)[0].values()
    step = stay[0].told.step
    assert step == (STEP + 1 if forward else STEP)
    assert stay[0].told.rebuilt == (dead,)
    held, all_n = undisturbed("onebit_adam", size, step)
    assert torch.equal(stay[0].held(), held)
    assert (found_N - expected(all_n, (dead,))).abs().max() <= 64 * EPS * largest(all_n)
    goes_on(stay)


@pytest.mark.law
def test_a_peer_lost_while_outliers_are_sent_undoes_the_step():
    ranks = new_ranks(3, keeping("onebit_adam"))
    first = 6  # the first compressed step, which sends them

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, first - 1)
        before = rank.held()
        group.arm(Fault((2,), "all_gather", len(rank.optimizer.reduce.buckets), When.BEFORE, What.LOSE))
        with pytest.raises(PeerLost):
            rank.train(group, first)
        assert rank.optimizer.num_steps == first - 1
        assert torch.equal(rank.held(), before)
        raise PeerLost("over", 0, (2,))

    together(ranks, work)
    stay = ranks[:2]
    regrouped(stay)
    assert stay[0].told.rebuilt == ()  # nothing was exchanged yet
    goes_on(stay)


def test_rows_change_no_bit_of_training_and_cost_few_bytes():
    plain, ours = begun("onebit_adam", 3, STEP, Keeps.NOTHING), begun("onebit_adam", 3, STEP)
    assert torch.equal(plain[0].held(), ours[0].held())
    sent = [ranks[0].optimizer.group.stats.sent_bytes for ranks in (plain, ours)]
    (memory,) = error_memories(ours[0].optimizer.vectors).values()
    assert sent[1] - sent[0] == 2 * memory.outliers._room[0, 0].numel()  # once in so few steps, to two others


def test_a_planned_change_keeps_r_with_rows_too():
    ranks = begun("onebit_adam", 4, STEP)
    together(ranks, lambda rank, group: hand_over(rank.optimizer))
    expected_N = ranks[0].optimizer.handed_over["momentum_error"]
    for residuals in regrouped(ranks[:3]):
        assert (residuals["momentum_error"] - expected_N).abs().max() <= 4 * EPS * expected_N.abs().max()
    assert ranks[0].told.rebuilt == ()
    assert ranks[0].optimizer.error_lost is None


def test_after_r_was_put_anew_nothing_is_rebuilt_before_an_exchange():
    ranks = begun("onebit_adam", 3, STEP)

    def put_anew(rank, group):
        memory = rank.optimizer.vectors.momentum_error
        rank.optimizer.vectors.m_N  # noqa: B018 - it is read before the result no longer counts
        memory.restore(memory.residual())

    together(ranks, put_anew)
    stay = ranks[1:]
    regrouped(stay)
    assert stay[0].told.rebuilt == ()
    assert stay[0].told.lost_norm == stay[0].told.unrebuilt_norm > 0


def test_what_is_still_lost_is_told_about_right_with_what_it_would_have_been():
    ranks = begun("onebit_adam", 4, STEP)
    all_n = everything(ranks)
    whole_N = sum(one["worker"] for one in all_n) / 4 + sum(one["server"] for one in all_n)
    stay = [ranks[i] for i in (0, 2, 3)]
    found_N = regrouped(stay)[0]["momentum_error"]
    true = float((whole_N - found_N).norm())
    told = stay[0].told
    assert 0.4 * true <= told.lost_norm <= 2.5 * true
    assert told.lost_norm < told.unrebuilt_norm
    stats = stay[1].optimizer.stats()
    assert stats["error_lost_norm"] == told.lost_norm
    assert stats["error_lost_norm_unrebuilt"] == told.unrebuilt_norm
