"""Sketched SGD: nothing of an update is lost, the largest are applied, momenta are each rank's, saved as their mean."""

import random

import pytest
import torch

from tests.covering import every_value
from tests.optim.muon.test_muon import backward, network, train
from tests.optim.reference.written_out import bits
from tests.optim.regroup.ranks import goes_on, new_ranks, together, until
from tests.optim.seeded import seeded
from thinwire.comm import NonFiniteInput, PeerLost, VectorLayout, run_threads
from thinwire.comm.codecs import CountSketch
from thinwire.comm.codecs.sketch import PRIME, hashed, median
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim import SketchedSGD

SIZES = (1, 2, 3, 4, 8)
SKETCH = {"k": 5, "rows": 5, "columns": 12, "second": 3}


def made(net, group=None, **more):
    return SketchedSGD(net.parameters(), **{"lr": 0.02, "momentum": 0.8, "group": group, **SKETCH, **more})


def left(optimizer):
    return optimizer.vectors.update_error.residual()


def gradient(optimizer):
    g = torch.zeros_like(optimizer.space.p_N)
    for tensor in optimizer.space.tensors:
        g[tensor.start : tensor.stop] = tensor.param.grad.view(-1)
    return g


@pytest.mark.few(2)
@every_value({"size": SIZES, "overlap": (False, True), "momentum": (0.0, 0.8)})
@pytest.mark.law
def test_all_of_every_ranks_update_is_applied_or_in_r(size, overlap, momentum):
    """x' = x - D with D + R' = mean_i u_i + R, u_i = rho u_i + lr (g_i + wd x), 0 where D is, at most k values."""

    def work(group):
        net, decay, lr, worst = network(), 0.1, 0.02, 0.0
        optimizer = made(net, group, overlap=overlap, momentum=momentum, weight_decay=decay)
        s, space = optimizer.vectors, optimizer.space
        for step in range(1, 9):
            x, u, before = space.p_N.clone(), s.m_N.clone(), left(optimizer)
            optimizer.zero_grad()
            backward(net, step, group.rank)
            u = momentum * u + lr * (gradient(optimizer) + decay * x)
            optimizer.step()
            applied = x - space.p_N
            mean = u.clone()
            group.mean_(mean)
            worst = max(worst, float((applied + left(optimizer) - mean - before).abs().max()))
            if size > 1:
                where = applied != 0
                assert 0 < int(where.sum()) <= SKETCH["k"]
                assert not s.update_error.worker_N[where].any()
                u[where] = 0
            worst = max(worst, float((s.m_N - u).abs().max()))
        return worst, float(left(optimizer).abs().max()), bits(space.p_N)

    found = run_threads(size, work)
    for worst, rest, held in found:
        assert worst < 1e-12
        assert (rest > 0) == (size > 1)
        assert torch.equal(held, found[0][2])


@pytest.mark.law
def test_it_is_the_recursion_of_the_paper_written_out():
    """With a sketch that finds all that is looked for: Alg. 2 with the exact second round, on three ranks."""
    size, k, steps, lr, rho = 3, 3, 10, 0.05, 0.7

    def work(group):
        wide = lambda: torch.nn.Sequential(torch.nn.Linear(7, 200), torch.nn.Tanh(), torch.nn.Linear(200, 1))  # noqa: E731
        net = seeded(2, wide).double()
        optimizer = made(net, group, lr=lr, momentum=rho, k=k, rows=5, columns=250, second=100)
        start, path = optimizer.space.p_N.clone(), []
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            backward(net, step, group.rank)
            path.append((gradient(optimizer), None))
            optimizer.step()
            path[-1] = path[-1][0], optimizer.space.p_N.clone()
        return start, path

    found = run_threads(size, work)
    x = found[0][0]
    u, v = ([torch.zeros_like(x) for _ in range(size)] for _ in range(2))
    for step in range(steps):
        for rank, (_, path) in enumerate(found):
            u[rank] = rho * u[rank] + lr * path[step][0]
            v[rank] = v[rank] + u[rank]
        mean = sum(v) / size
        where = mean.abs().topk(k).indices
        x = x.clone()
        x[where] -= mean[where]
        for rank in range(size):
            u[rank][where] = v[rank][where] = 0
        for _, path in found:
            torch.testing.assert_close(path[step][1], x, rtol=0, atol=1e-13)


@pytest.mark.law
def test_on_one_rank_it_is_torch_s_at_a_constant_rate():
    ours, theirs = network(), network()
    optimizer = made(ours, weight_decay=0.1)
    other = torch.optim.SGD(theirs.parameters(), lr=0.02, momentum=0.8, weight_decay=0.1)
    for step in range(1, 13):
        for net, one in ((ours, optimizer), (theirs, other)):
            one.zero_grad()
            backward(net, step, 0)
            one.step()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-13)


def struck_in(ranks, step, fault):
    """All make `step` steps, then one in which the fault strikes; who loses what others have waits for these."""

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, step)
        group.arm(fault)
        try:
            rank.train(group, step + 1)
        except PeerLost:
            if fault.what is What.ALONE and group.rank in fault.ranks:
                ahead = [one for at, one in enumerate(ranks) if at not in fault.ranks]
                until(lambda: all(one.optimizer.num_steps == step + 1 for one in ahead))
            raise

    together(ranks, work)


@pytest.mark.law
@every_value({"call": (0, 1), "when": list(When)})
def test_replicas_are_equal_after_a_death_in_either_sum(call, when):
    ranks = new_ranks(4, made)
    struck_in(ranks, 4, Fault((3,), "sum", call, when, What.LOSE))
    goes_on([*ranks[:3], *new_ranks(1, made)])


@pytest.mark.law
def test_who_loses_the_result_alone_keeps_nothing_that_the_others_have_applied():
    """R after the change is the mean of what all would have kept, had it come."""
    ranks = new_ranks(3, made)
    struck_in(ranks, 4, Fault((0,), "sum", 1, When.AFTER, What.ALONE))
    assert [rank.optimizer.num_steps for rank in ranks] == [4, 5, 5]
    lost, *ahead = (rank.optimizer for rank in ranks)
    moved = lost.space.p_N != ahead[0].space.p_N
    waits = lost.vectors.update_error.worker_N + lost._formed(lost.hypers(5), slice(0, len(moved)))
    due = (waits.masked_fill(moved, 0.0) + sum(one.vectors.update_error.worker_N for one in ahead)) / 3
    found = together(ranks, lambda rank, group: (rank.regroup(group), left(rank.optimizer))[1])
    assert 0 < int(moved.sum()) <= SKETCH["k"]
    for has in found:
        torch.testing.assert_close(has, due, rtol=1e-5, atol=1e-8)
    ends = together(ranks, lambda rank, group: (rank.regroup(group), rank.train(group, 8), rank.held())[2])
    assert all(torch.equal(ends[0][: len(moved) * 4], end[: len(moved) * 4]) for end in ends)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(size):
    last = size - 1

    def work(group):
        net = network()
        optimizer = made(net, group)
        train(net, optimizer, 3, group.rank)
        before = bits(optimizer.space.p_N, optimizer.vectors.m_N, left(optimizer))
        backward(net, 4, group.rank)
        if group.rank == last:
            net[2].weight.grad[1, 1] = torch.nan
        with pytest.raises(NonFiniteInput, match=f"rank {last}"):
            optimizer.step()
        assert torch.equal(before, bits(optimizer.space.p_N, optimizer.vectors.m_N, left(optimizer)))
        optimizer.zero_grad()
        train(net, optimizer, 2, group.rank)
        return optimizer.space.p_N.clone()

    first, *others = run_threads(size, work)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def test_by_default_a_step_sends_a_tenth_of_fp32():
    def work(group):
        net = torch.nn.Linear(256, 256, bias=False)
        optimizer = SketchedSGD(net.parameters(), lr=0.05, group=group)
        for _ in range(2):
            before = group.stats.bytes_by_kind.copy()
            net(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
        return (group.stats.bytes_by_kind - before)["sum"], optimizer.stats()["sketch"]

    sent, sketch = run_threads(2, work)[0]
    assert sketch == {"rows": 1, "columns": 3932, "k": 2621, "exact": 2621}
    assert sent == 4 * (3932 + 2621)
    assert sent == pytest.approx(4 * 2**16 / 10, rel=0.01)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"k": 0}, r"k = 0: must be a whole number \(int\), at least 1, or None"),
        ({"rows": 4}, "rows = 4: must be odd"),
        ({"columns": 1.5}, r"columns = 1.5: must be a whole number"),
        ({"second": 0}, "second = 0: must be"),
        ({"columns": 200}, r"5 rows x 200 columns and 3 k = 15 exact values are 1,015 values, of a vector of 390"),
        ({"momentum": 1.0}, "momentum = 1.0: must be"),
        ({"full_exchange": "int8"}, "full_exchange = 'int8': must be left out of SketchedSGD"),
        ({"topology": "node_first"}, "node_first"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_is_refused_in_a_sentence_on_all_ranks(given, words, size):
    def work(group):
        if size == 1 and "topology" in given:
            return
        with pytest.raises(ValueError, match=words):
            made(network(), group, **given)

    run_threads(size, work)


@pytest.mark.law
def test_hashes_are_polynomials_modulo_2_to_the_61_minus_1():
    drawn = random.Random(5)
    i = torch.tensor([0, 1, 2, 12345, (1 << 31) - 1, *(drawn.randrange(1 << 31) for _ in range(200))])
    for degree in (2, 4):
        for coefficients in (
            [drawn.randrange(1, PRIME) for _ in range(degree)],
            [PRIME - 1] * degree,
            [1] + [0] * (degree - 1),
        ):
            due = []
            for x in i.tolist():
                h = 0
                for coefficient in coefficients:
                    h = (h * x + coefficient) % PRIME
                due.append(h)
            assert hashed(i, coefficients).tolist() == due


@pytest.mark.parametrize("rows", [1, 3, 5, 7, 9])
def test_the_median_is_torch_s(rows):
    x = torch.randn(rows, 1000, generator=torch.Generator().manual_seed(rows))
    assert torch.equal(median(list(x)), x.median(0).values)


def test_a_sketch_is_linear_and_finds_what_is_large():
    """Twenty values of 1 among 4000 of about 0.01; no estimate of them is far off, and all of them cross."""
    layout, generator = VectorLayout.single(4000), torch.Generator().manual_seed(3)
    z = [0.01 * torch.randn(4000, generator=generator, dtype=torch.float64) for _ in range(2)]
    large = torch.randperm(4000, generator=generator)[:20]
    z[0][large[:10]] += 2
    z[1][large[10:]] -= 2
    sketch = CountSketch(k=20, rows=5, columns=200, second=4).over(layout, z[0])
    mean = (sketch.first(z[0]) + sketch.first(z[1])) / 2
    torch.testing.assert_close(mean, sketch.first((z[0] + z[1]) / 2), rtol=0, atol=1e-12)
    known, one = sketch.second(mean, z[0])
    other = sketch.second(mean, z[1])[1]
    known.decide((one + other) / 2)
    known.decode((one + other) / 2, found := torch.empty_like(z[0]))
    due = torch.zeros_like(found)
    due[large] = ((z[0] + z[1]) / 2)[large]
    torch.testing.assert_close(found, due, rtol=0, atol=1e-15)
