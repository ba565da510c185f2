"""1-bit Muon: nothing of an update is lost, it is made once; momenta are a rank's own and saved as their mean."""

import logging
from itertools import pairwise

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import sized
from tests.optim.regroup.ranks import Rank, new_ranks, together
from tests.optim.seeded import seeded
from tests.reference.exchange import TwoPhase, block_units
from tests.reference.muon import MuonHyper, ReferenceMuon
from thinwire.comm import NonFiniteInput, PeerLost, run_threads
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim import Muon, OneBitMuon, compressed, muon, muon_math
from thinwire.optim.engine.state import error_memories
from thinwire.optim.regroup import hand_over

SIZES = (1, 2, 3, 4, 8)


def network(dtype=torch.float64, seed=2):
    """Sizes that divide by nothing, a matrix of one row, and one that is larger than a bucket."""
    layers = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 19), torch.nn.Tanh(), torch.nn.Linear(19, 1)
    )
    return seeded(seed, layers).to(dtype)


def backward(net, step, rank):
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)
    (net(x.to(next(net.parameters()).dtype)) - torch.sin(2 * x[:, :1])).square().mean().backward()


def train(net, optimizer, steps, rank):
    for _ in range(steps):
        backward(net, optimizer.num_steps + 1, rank)
        optimizer.step()
        optimizer.zero_grad()


def momentum(optimizer):
    return optimizer.vectors.m_N.clone()


@pytest.mark.few(1)
@every_value({"size": SIZES, "overlap": (False, True), "nesterov": (True, False)})
@pytest.mark.law
def test_all_of_every_ranks_update_is_applied_or_in_r(size, overlap, nesterov):
    """x' = (1 - lr wd) x - lr U, with U + R' = mean_i u_i + R, u_i written out."""

    def work(group):
        net, lr, decay = network(), 0.05, 0.3
        optimizer = sized(OneBitMuon, block=64, bucket_elements=64)(
            net.parameters(), lr=lr, weight_decay=decay, nesterov=nesterov, group=group, overlap=overlap
        )
        worst = 0.0
        for step in range(1, 9):
            x, left, m = optimizer.space.p_N.clone(), optimizer.vectors.update_error.residual(), momentum(optimizer)
            backward(net, step, group.rank)
            optimizer.space.gather_gradients()
            g = optimizer.space.g_N.clone()
            taken_in = 0.95 * m + 0.05 * g
            w = 0.95 * taken_in + 0.05 * g if nesterov else taken_in
            u = torch.zeros_like(w)
            for tensor, of_w, of_u in zip(
                optimizer.space.tensors, optimizer.space.views(w), optimizer.space.views(u), strict=True
            ):
                of_u.copy_(muon_math.RULES[optimizer.rules[tensor.param]](of_w))
            optimizer.step()
            optimizer.zero_grad()
            group.mean_(u)
            applied = ((1 - lr * decay) * x - optimizer.space.p_N) / lr
            due = u + left - optimizer.vectors.update_error.residual()
            worst = max(worst, float((applied - due).abs().max()), float((momentum(optimizer) - taken_in).abs().max()))
        return worst, optimizer.space.p_N.clone()

    found = run_threads(size, work)
    assert max(worst for worst, _ in found) < 1e-12
    assert all(torch.equal(found[0][1], p) for _, p in found)


@pytest.mark.parametrize("size", [1, 3])
def test_an_update_is_made_once_however_many_buckets_its_tensor_spans(size, monkeypatch):
    made = []
    monkeypatch.setitem(muon_math.RULES, "counted", lambda m: made.append(m.shape) or muon_math.matrix(m))

    def work(group):
        net = network()
        groups = [{"params": list(net.parameters())[::2], "rule": "counted"}]
        optimizer = sized(OneBitMuon, bucket_elements=40)(groups, group=group)
        assert len(optimizer.reduce.buckets) > 2 * len(optimizer.space.tensors)
        train(net, optimizer, 3, group.rank)
        assert not optimizer._sent

    run_threads(size, work)
    assert sorted(made) == sorted([p.shape for p in list(network().parameters())[::2]] * 3 * size)


@every_value({"make": (OneBitMuon, Muon), "size": (1, 3)})
def test_vectors_are_moved_together_at_most_a_piece_at_a_time_and_as_each_alone(make, size, monkeypatch):
    calls, ends, of_vectors = [], [], muon.vectors
    monkeypatch.setattr(muon, "vectors", lambda each: calls.append([len(one) for one in each]) or of_vectors(each))
    sizes = (7, 13, 19, 23, 29, 31)
    for piece, batches in ((8, 5), (40, 4), (1 << 20, 1)):
        monkeypatch.setattr(muon, "PIECE", piece)

        def work(group):
            net = seeded(4, lambda: torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(sizes))))
            optimizer = make(net.parameters(), lr=0.05, group=group, model=net)
            for step in range(3):
                net(torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + group.rank))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return optimizer.space.p_N.clone()

        calls.clear()
        ends.append(run_threads(size, work))
        assert all(sum(batch) <= piece or len(batch) == 1 for batch in calls)
        assert len(calls) == 3 * size * batches
    assert all(torch.equal(p, ends[0][0]) for one in ends for p in one)


def test_a_save_pulls_momenta_to_their_mean_and_a_step_takes_them_apart():
    def work(group):
        net = network()
        optimizer = OneBitMuon(net.parameters(), group=group)
        train(net, optimizer, 5, group.rank)
        own = momentum(optimizer)
        assert not optimizer.has_one_momentum
        assert "m_N" not in optimizer.common_vectors()
        parameters, left = optimizer.space.p_N.clone(), optimizer.vectors.update_error.residual()
        saved = optimizer.state_dict()
        assert torch.equal(optimizer.space.p_N, parameters)
        assert torch.equal(saved["residuals"]["update_error"], left)
        assert optimizer.has_one_momentum
        sent = group.stats.collectives
        optimizer.prepare_to_save()
        assert group.stats.collectives == sent
        after = momentum(optimizer)
        train(net, optimizer, 1, group.rank)
        return own, after, saved["vectors"]["m_N"], momentum(optimizer)

    found = run_threads(3, work)
    mean = sum(own for own, *_ in found) / 3
    for _, after, saved, later in found:
        torch.testing.assert_close(after, mean, rtol=1e-12, atol=1e-15)
        assert torch.equal(after, saved)
        assert torch.equal(after, found[0][1])
        assert later is found[0][3] or not torch.equal(later, found[0][3])


def build(net):
    return sized(OneBitMuon, bucket_elements=64)(net.parameters(), lr=0.02)


def test_a_newcomer_begins_with_the_mean_momentum_and_a_death_takes_its_share_away():
    ranks = new_ranks(3, build)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, 6)
        if group.rank == 2:
            group.arm(Fault((2,), "all_gather", 0, When.BEFORE, What.LOSE))
        rank.train(group, 7)

    together(ranks, work)
    survivors = list(ranks[:2])
    assert all(isinstance(rank.lost, PeerLost) for rank in survivors)
    own = [momentum(rank.optimizer) for rank in survivors]
    assert not torch.equal(*own)
    stay = [*survivors, *new_ranks(1, build)]
    together(stay, lambda rank, group: rank.regroup(group))
    for rank in stay:
        torch.testing.assert_close(momentum(rank.optimizer), (own[0] + own[1]) / 2, rtol=1e-6, atol=1e-9)
        assert torch.equal(momentum(rank.optimizer), momentum(stay[0].optimizer))
        assert rank.optimizer.has_one_momentum


@pytest.mark.law
@pytest.mark.parametrize("ended", [0, 1])
def test_a_save_that_has_ended_on_one_survivor_alone_counts_for_all(ended):
    """A peer is lost in its last collective. The dead rank's share of the momentum is in what that one holds."""
    ranks = new_ranks(4, build)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, 6)
        return momentum(rank.optimizer)

    mean = sum(together(ranks, work)) / 4
    survivors = list(ranks[:3])
    survivors[ended].optimizer.vectors.m_N.copy_(mean)
    survivors[ended].optimizer.saved["last_sync"] = 6
    assert [rank.optimizer.has_one_momentum for rank in survivors].count(True) == 1
    stay = [*survivors, *new_ranks(1, build)]
    together(stay, lambda rank, group: rank.regroup(group))
    for rank in stay:
        assert torch.equal(momentum(rank.optimizer), mean)
        assert rank.optimizer.has_one_momentum


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nan_in_one_ranks_momentum_is_named_on_all_and_can_be_begun_anew(size):
    last = size - 1

    def work(group):
        net = network()
        optimizer = OneBitMuon(net.parameters(), group=group, non_finite="skip")
        train(net, optimizer, 3, group.rank)
        if group.rank == last:
            optimizer.state[net[2].weight]["momentum_buffer"][1, 2] = torch.nan
        before = optimizer.space.p_N.clone()
        backward(net, 4, group.rank)
        with pytest.raises(RuntimeError, match=rf"momentum of rank {last} holds NaN.*momentum_buffer"):
            optimizer.step()
        assert torch.equal(optimizer.space.p_N, before)
        assert optimizer.num_steps == 3
        if size > 1:
            with pytest.raises(RuntimeError, match=rf"momentum of rank {last} holds NaN"):
                optimizer.state_dict()
        if group.rank == last:
            for state in optimizer.state.values():
                state["momentum_buffer"].zero_()
        optimizer.zero_grad()
        train(net, optimizer, 2, group.rank)
        return optimizer.space.p_N.clone()

    first, *others = run_threads(size, work)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_that_is_not_finite_is_found_whatever_the_rule(value, which):
    """In a matrix, and in a vector, whose rule asks the sign alone."""

    def work(group):
        net = network()
        optimizer = OneBitMuon(net.parameters(), group=group)
        train(net, optimizer, 2, group.rank)
        backward(net, 3, group.rank)
        if group.rank == 1:
            list(net.parameters())[which].grad.view(-1)[0] = value
        with pytest.raises(NonFiniteInput, match="rank 1"):
            optimizer.step()

    run_threads(2, work)


def test_what_is_undone_is_undone_by_the_hyperparameters_that_it_was_formed_with():
    """A momentum that is changed between backward and zero_grad() leaves R as it was."""

    def work(group):
        net = network()
        optimizer = sized(OneBitMuon, bucket_elements=64)(net.parameters(), lr=0.03, group=group, overlap=True)
        train(net, optimizer, 4, group.rank)
        left = optimizer.vectors.update_error.residual()
        backward(net, 5, group.rank)
        assert optimizer.overlap.exchange is not None
        optimizer.param_groups[0]["momentum"] = 0.5
        optimizer.zero_grad()
        return float((optimizer.vectors.update_error.residual() - left).abs().max()), float(left.abs().max())

    for off, size in run_threads(3, work):
        assert off < 1e-14 * max(size, 1)
        assert size > 0


def test_it_is_the_recursion_of_the_paper_in_float64():
    """Beside tests.optim.test_properties: with overlap, buckets and a rank's own clipping of gradients."""

    def work(group):
        net = network()
        optimizer = sized(OneBitMuon, block=64, bucket_elements=64)(
            net.parameters(), lr=0.03, group=group, overlap=True
        )
        start = [view.clone() for view in optimizer.space.views(optimizer.space.p_N)]
        seen = []
        for step in range(1, 13):
            backward(net, step, group.rank)
            seen.append([tensor.param.grad.clone() for tensor in optimizer.space.tensors])
            optimizer.step()
            optimizer.zero_grad()
        return optimizer, start, seen

    found = run_threads(3, work)
    optimizer, start, _ = found[0]
    units = block_units(optimizer.space.layout, 3, 64, optimizer.reduce.buckets.spans)
    hyper = [MuonHyper(0.03, 0.95, 0.1, True, optimizer.rules[t.param]) for t in optimizer.space.tensors]
    reference = ReferenceMuon(start, 3, hyper, TwoPhase(units))
    for step in range(12):
        reference.step([seen[step] for _, _, seen in found])
    for got, due in zip(optimizer.space.views(optimizer.space.p_N), reference.x, strict=True):
        torch.testing.assert_close(got, due, rtol=0, atol=1e-11)


def test_the_dense_one_is_torchs_muon_on_matrices():
    """Which iterates in bfloat16."""
    ours, theirs = ([torch.nn.Parameter(torch.linspace(-1, 1, 63).view(9, 7).clone())] for _ in range(2))
    mine = Muon(ours, lr=1e-2, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        g = torch.randn(9, 7, generator=torch.Generator().manual_seed(step))
        for (param,), optimizer in ((ours, mine), (theirs, other)):
            param.grad = g.clone()
            optimizer.step()
    moved = (theirs[0] - torch.linspace(-1, 1, 63).view(9, 7)).norm()
    assert (ours[0] - theirs[0]).norm() < 0.02 * moved


def test_who_would_compress_torchs_is_told_of_ours():
    with pytest.raises(TypeError, match=r"use OneBitMuon of thinwire\.optim"):
        compressed(torch.optim.Muon(torch.nn.Linear(3, 4, bias=False).parameters()))


@pytest.mark.few(1)
@every_value({"narrow": [(), ("momentum", "error_memory")], "size": (2, 3)})
def test_state_is_8_and_a_half_bytes_a_parameter_and_4_for_the_server_and_half_in_bfloat16(size, narrow):
    def work(group):
        net = torch.nn.Linear(1024, 1024, bias=False)
        optimizer = OneBitMuon(net.parameters(), group=group, narrow=narrow)
        for _ in range(2):
            net.weight.grad = torch.ones_like(net.weight)
            optimizer.step()
        return optimizer.stats()["bytes_per_parameter"]["state"]

    assert max(run_threads(size, work)) <= 0.5 + (4 + 2 / size) * (1 if narrow else 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.law
def test_in_bfloat16_a_loaded_run_equals_the_one_that_went_on_and_learns_as_well(size):
    def work(group):
        ends = []
        for narrow in ((), ("momentum", "error_memory")):
            net = network(torch.float32)
            optimizer = OneBitMuon(net.parameters(), lr=0.02, group=group, narrow=narrow)
            train(net, optimizer, 20, group.rank)
            ends.append(optimizer.space.p_N.clone())
        assert optimizer.vectors.m_N.dtype == torch.bfloat16
        saved, weights = optimizer.state_dict(), [p.detach().clone() for p in net.parameters()]
        other = network(torch.float32, seed=5)
        resumed = OneBitMuon(other.parameters(), lr=0.02, group=group, narrow=("momentum", "error_memory"))
        with torch.no_grad():
            for p, value in zip(other.parameters(), weights, strict=True):
                p.copy_(value)
        resumed.load_state_dict(saved)
        for one, of in ((net, optimizer), (other, resumed)):
            train(one, of, 6, group.rank)
        assert torch.equal(resumed.space.p_N, optimizer.space.p_N)
        assert torch.equal(resumed.vectors.m_N, optimizer.vectors.m_N)
        begun = network(torch.float32)
        start = torch.cat([p.detach().reshape(-1) for p in begun.parameters()]).norm()
        return ends, start

    for (wide, half), start in run_threads(size, work):
        assert (wide - half).norm() < 0.2 * start


def test_rules_are_logged_once_and_shown(caplog):
    with caplog.at_level(logging.INFO, "thinwire.optim.muon"):
        found = run_threads(2, lambda group: OneBitMuon(network().parameters(), group=group).stats()["rules"])
    assert found == [{"matrix": 7 * 13 + 13 * 19 + 19, "vector": 13 + 19 + 1}] * 2
    assert [record.getMessage() for record in caplog.records] == ["rules matrix=357 vector=33"]


def test_a_rank_that_went_on_alone_is_a_rank():
    """One rank made of a larger group gives out R, with the same momentum rule."""
    ranks = new_ranks(2, build)

    def leave(rank, group):
        rank.regroup(group)
        rank.train(group, 5)
        hand_over(rank.optimizer)

    together(ranks, leave)

    def alone(rank: Rank, group):
        rank.regroup(group)
        left = rank.residual(group)["update_error"].clone()
        rank.train(group, 6)
        return left, rank.residual(group)["update_error"]

    ((before, after),) = together(ranks[:1], alone)
    assert before.any()
    assert not after.any()
    assert not error_memories(ranks[0].optimizer.vectors)["update_error"].residual().any()
