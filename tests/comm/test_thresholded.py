"""Activations that cross above a threshold: the dense all-to-all where all do, and a mask both ways where not."""

import math
from functools import partial

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.covering import every_value
from tests.optim.seeded import seeded
from thinwire.comm import CallMismatch, PeerLost, SoloGroup, Thresholded, WireMismatch, run_threads
from thinwire.comm.codecs import ThresholdCodec
from thinwire.comm.groups.faults import Fault, FaultyGroup, When
from thinwire.optim import OneBitSGD

HEAD = 8
"""Bytes of each row that say of which call it is."""
WIDTHS = {
    "one rank": lambda rank, size: 24 if rank == 0 else 0,
    "last rank": lambda rank, size: 7 if rank == size - 1 else 0,
    "all": lambda rank, size: 12,
    "uneven": lambda rank, size: 5 * rank + 1,
    "long": lambda rank, size: 300 if rank else 70_000,
}


def part(rank, width, samples, dtype=torch.float32):
    """The part of a rank: [samples, width]."""
    return torch.randn(samples, width, generator=torch.Generator().manual_seed(rank)).to(dtype).requires_grad_()


def kept(x, share):
    """x where it is sent, else 0."""
    at = x.abs().topk(math.ceil(share * x.shape[1])).indices
    return torch.zeros_like(x).scatter(1, at, x.gather(1, at))


def dense(xs, weights):
    """By rank: what one process computes of all parts, and the gradients of the sum of all losses."""
    leaves = [x.detach().requires_grad_() for x in xs]
    ys = torch.cat(leaves, 1).chunk(len(xs))
    sum((y * w).square().sum() for y, w in zip(ys, weights, strict=True)).backward()
    return ys, [x.grad for x in leaves]


@every_value(
    {
        "size": [1, 2, 3, 4, 8],
        "widths": WIDTHS,
        "share": [1.0, 0.5, 0.2, 1e-6],
        "num, dtype": [(1, torch.float32), (3, torch.float64), (5, torch.bfloat16)],
    }
)
@pytest.mark.law
def test_what_is_sent_and_its_gradient_are_those_of_one_process_to_the_bit(size, widths, share, num, dtype):
    xs = [part(rank, WIDTHS[widths](rank, size), size * num, dtype) for rank in range(size)]
    generator = torch.Generator().manual_seed(99)
    weights = [torch.randn(num, sum(x.shape[1] for x in xs), generator=generator).to(dtype) for _ in range(size)]
    share = 1.0 if size == 1 else share  # one rank sends nothing
    masked = [kept(x.detach(), share) for x in xs]
    due, gradients = dense(masked, weights)

    def work(group):
        exchange = Thresholded(share=share, group=group)
        for _ in range(2):  # the second knows the widths
            x = xs[group.rank].detach().requires_grad_()
            y = exchange(x)
            (y * weights[group.rank]).square().sum().backward()
        return y.detach(), x.grad

    for rank, (y, gradient) in enumerate(run_threads(size, work)):
        assert torch.equal(y, due[rank])
        assert torch.equal(gradient, torch.where(masked[rank] != 0, gradients[rank], 0))


@pytest.mark.parametrize("width", [256, 257, 1 << 16, (1 << 16) + 1])
def test_places_are_as_long_as_the_last_one_needs(width):
    x = torch.zeros(4, width)
    x[:, -1], x[:, width // 2] = 1.0, -2.0

    def work(group):
        exchange = Thresholded(share=2 / width, group=group)
        y = exchange(x if group.rank else x[:, :0])
        return y, group.stats.bytes_by_kind["all_to_all_v"]

    (y, nothing), (_, sent) = run_threads(2, work)
    assert torch.equal(y, x[:2])
    assert nothing == HEAD
    assert sent == HEAD + 2 * 2 * 4 + {256: 8, 257: 8, 1 << 16: 8}.get(width, 16)


def test_bytes_are_those_of_values_and_places_forward_and_of_values_backward():
    samples, width, keep = 2 * 8, 64, 4

    def work(group):
        exchange, sent = Thresholded(share=keep / width, group=group), []
        x = part(group.rank, width if group.rank == 0 else 0, samples)
        for _ in range(2):
            before = group.stats.bytes_by_kind["all_to_all_v"]
            y = exchange(x)
            forward = group.stats.bytes_by_kind["all_to_all_v"]
            y.sum().backward()
            sent.append((forward - before, group.stats.bytes_by_kind["all_to_all_v"] - forward))
        assert sent[0] == sent[1]
        return sent[0]

    of_a_rank = samples // 2 * keep
    assert run_threads(2, work) == [(HEAD + of_a_rank * (4 + 1), HEAD), (HEAD, HEAD + of_a_rank * 4)]


def test_without_gradients_nothing_goes_back_and_a_value_that_is_not_finite_crosses():
    def work(group):
        exchange = Thresholded(share=0.1, group=group)
        x = part(group.rank, 20, 2).detach()
        x[:, 3] = math.nan
        with torch.no_grad():
            y = exchange(x)
        assert not y.requires_grad
        return y

    for y in run_threads(2, work):
        assert y[:, 3].isnan().all()
        assert y[:, 23].isnan().all()


def test_a_group_of_one_gives_what_it_was_given():
    x = part(0, 10, 3)
    assert Thresholded(share=0.1, group=SoloGroup())(x) is x


@pytest.mark.parametrize("share", [0, -0.1, 1.01, math.nan, True, "0.5", None])
def test_a_share_of_nothing_or_more_than_all_is_refused(share):
    with pytest.raises(ValueError, match=f"share = {share!r}: must be above 0, which would send nothing"):
        Thresholded(share=share, group=SoloGroup())


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.zeros(4, 2, 2), r"x is torch.float32\[4, 2, 2\]: must be floats of \[samples of all ranks, width\]"),
        (torch.zeros(4, 2).int(), r"x is torch.int32\[4, 2\]: must be floats"),
        (torch.zeros(3, 2), "with as many samples for each of 2 ranks"),
        (torch.zeros(0, 2), "with as many samples for each of 2 ranks"),
    ],
)
def test_an_x_that_cannot_be_shared_out_is_refused(x, said):
    def work(group):
        with pytest.raises(ValueError, match=said):
            Thresholded(share=0.5, group=group)(x)

    run_threads(2, work)


@pytest.mark.parametrize(
    ("share", "samples", "dtype", "said"),
    [
        ((0.5, 0.25), (4, 4), (torch.float32,) * 2, "rank 0 has share 0.5, rank 1 has share 0.25"),
        ((0.5, 0.5), (4, 8), (torch.float32,) * 2, "rank 0 has samples 4, rank 1 has samples 8"),
        ((0.5, 0.5), (4, 4), (torch.float32, torch.float64), "rank 0 has dtype float32, rank 1 has dtype float64"),
    ],
)
def test_ranks_that_disagree_are_told_so_alike(share, samples, dtype, said):
    def work(group):
        rank = group.rank
        with pytest.raises(WireMismatch, match=said):
            Thresholded(share=share[rank], group=group)(torch.zeros(samples[rank], 6, dtype=dtype[rank]))

    run_threads(2, work)


def test_ranks_of_which_none_has_a_part_are_told_so():
    def work(group):
        with pytest.raises(ValueError, match="x has width 0 on every rank"):
            Thresholded(share=0.5, group=group)(torch.zeros(4, 0))

    run_threads(2, work)


def test_ranks_with_numbers_of_samples_that_both_have_seen_are_told_that_they_differ():
    def work(group):
        exchange = Thresholded(share=0.5, group=group)
        for samples in (4, 8):
            exchange(torch.zeros(samples, 6))
        with pytest.raises(CallMismatch, match=r"Thresholded\(\) \(all_to_all_v of"):
            exchange(torch.zeros(4 if group.rank else 8, 6))

    run_threads(2, work)


def test_a_rank_that_leaves_its_backward_out_does_not_take_the_gradients_of_others_for_activations():
    """With all sent both have as many bytes, so that nothing else would show it."""

    def work(group):
        exchange = Thresholded(share=1.0, group=group)
        y = exchange(part(group.rank, 6, 6))
        others = y.sum().backward
        mine = partial(exchange, part(group.rank, 6, 6))  # as where its loss is NaN, and it goes on with the next batch
        with pytest.raises(CallMismatch, match="rank 1 is in call 2") as found:
            (mine if group.rank == 1 else others)()
        return str(found.value)

    words = run_threads(3, work)
    assert len(set(words)) == 1
    assert "ranks 0, 2 are in backward of call 1 of Thresholded()" in words[0]


@pytest.mark.parametrize("call", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("when", When)
def test_a_peer_that_is_lost_in_mid_exchange_is_told_on_every_rank(call, when):
    def work(group):
        exchange = Thresholded(share=0.5, group=FaultyGroup(group, Fault((1,), "all_to_all_v", call, when)))
        try:
            exchange(part(group.rank, 6, 6)).sum().backward()
            group.mean_(torch.zeros(1))  # who had all of it learns it here
        except PeerLost as error:
            return error.rank
        return None

    assert run_threads(3, work) == [1, 1, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_beside_gradients_that_overlap_with_backward_it_is_as_without(size):
    """Both launch collectives in backward, of graphs that differ from rank to rank."""
    ways = {}
    for overlap in (False, True):

        def work(group, overlap=overlap):
            net = seeded(
                1, lambda: torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
            )
            exchange = Thresholded(share=0.5, group=group)
            codec = ThresholdCodec(0.2)
            optimizer = OneBitSGD(net.parameters(), lr=0.1, codec=codec, group=group, overlap=overlap)
            x, own = part(group.rank, 6 if group.rank == 0 else 0, 4 * size), torch.ones(4, 3, requires_grad=True)
            for _ in range(5):
                net(torch.cat([own.sin(), exchange(x)], 1)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return optimizer.space.p_N.clone(), x.grad

        ways[overlap] = run_threads(size, work)
    for (p, gradient), (due, of_x) in zip(ways[True], ways[False], strict=True):
        assert torch.equal(p, due)
        assert torch.equal(p, ways[True][0][0])
        assert torch.equal(gradient, of_x)


def test_over_processes_it_is_the_same_and_a_peer_that_dies_in_backward_is_named(tmp_path):
    ranks = start(
        """
        from thinwire.comm import Thresholded
        join(tcp_store_on_rank_0=True)
        exchange = Thresholded(share=0.25)
        torch.manual_seed(0)
        x = torch.randn(6, 8)[:, : 8 if rank == 0 else 0].requires_grad_()
        y = exchange(x)
        y.square().sum().backward()
        say("y", (y.tolist(), x.grad.tolist()))
        y = exchange(x)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            y.sum().backward()
        except PeerLost as error:
            say("lost", error.ranks)
        """,
        3,
        tmp_path,
    )
    assert [rank.wait(60) for rank in ranks] == [0, 0, -9]
    torch.manual_seed(0)
    due = kept(torch.randn(6, 8), 0.25)
    for rank in range(3):
        y, gradient = eval(said(tmp_path, rank, "y"))
        assert torch.equal(torch.tensor(y), due[2 * rank : 2 * rank + 2])
        assert torch.equal(torch.tensor(gradient), 2 * due if rank == 0 else torch.zeros(6, 0))
    assert [said(tmp_path, rank, "lost") for rank in (0, 1)] == ["(2,)", "(2,)"]
