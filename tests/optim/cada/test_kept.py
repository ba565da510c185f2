"""What is saved of CADA, and given to other ranks: G and moments are, what a rank sent last is its own share's."""

import pytest
import torch

from tests.covering import every_value
from tests.optim.cada.problem import SOME, closure_of, made, network, sent_by_all, train
from tests.optim.reference.written_out import bits
from tests.optim.regroup.ranks import Rank, together
from thinwire.comm import PeerLost, SoloGroup, run_threads
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim.engine.state import replicated
from thinwire.optim.regroup import hand_over
from thinwire.optim.saves import together as brought_together


def held(optimizer):
    return bits(optimizer.space.p_N, *replicated(optimizer.vectors).values())


def uploads(optimizer):
    return optimizer.stats()["num_uploads"]


@pytest.mark.few(1)
@every_value({"size": (1, 2, 3), "rule": (1, 2), "dtype": (torch.float64, torch.float32, torch.bfloat16)})
@pytest.mark.law
def test_a_run_that_loads_is_the_one_that_saved_and_went_on(size, rule, dtype):
    """All send in the step after it, in both."""

    def work(group):
        net, again = network(dtype), network(dtype, seed=9)
        optimizer, other = made(net, group, rule=rule), made(again, group, rule=rule)
        train(net, optimizer, 15, group.rank)
        saved = optimizer.state_dict()
        again.load_state_dict(net.state_dict())
        other.load_state_dict(saved)
        ends = []
        for one, of_one in ((net, optimizer), (again, other)):
            before = uploads(of_one)
            train(one, of_one, 1, group.rank)
            assert uploads(of_one) == before + size
            train(one, of_one, 14, group.rank)
            ends.append((held(of_one), of_one.saved))
        assert torch.equal(ends[0][0], ends[1][0])
        assert ends[0][1] == ends[1][1]

    run_threads(size, work)


@pytest.mark.few(1)
@every_value({"size": (1, 3), "rule": (1, 2)})
@pytest.mark.law
def test_a_share_goes_on_as_it_stood_without_an_upload_more(size, rule):
    def work(group):
        nets = network(), network(), network(seed=9)
        optimizer, quiet, loaded = (made(net, group, rule=rule) for net in nets)
        for net, one in ((nets[0], optimizer), (nets[1], quiet)):
            train(net, one, 15, group.rank)
        nets[2].load_state_dict(nets[0].state_dict())
        loaded.load_state_dict(optimizer.rank_state_dict())
        for net, one in zip(nets, (optimizer, quiet, loaded), strict=True):
            train(net, one, 15, group.rank)
        assert torch.equal(held(optimizer), held(quiet))
        assert torch.equal(held(optimizer), held(loaded))
        assert optimizer.saved == quiet.saved == loaded.saved

    run_threads(size, work)


@pytest.mark.few(1)
@pytest.mark.law
@pytest.mark.parametrize("how", ["the share of rank 0", "the shares of all, brought together"])
def test_shares_for_other_ranks_have_all_but_who_sent_what(how, caplog):
    files = {}

    def save(group):
        net = network()
        optimizer = made(net, group)
        train(net, optimizer, 15, group.rank)
        files[group.rank] = net.state_dict(), optimizer.rank_state_dict(), held(optimizer), uploads(optimizer)

    def load(group):
        net = network(seed=9)
        optimizer = made(net, group)
        weights, share, due, before = files[0]
        net.load_state_dict(weights)
        optimizer.load_state_dict(share if "rank 0" in how else brought_together([one[1] for one in files.values()]))
        assert torch.equal(held(optimizer), due)
        train(net, optimizer, 1, group.rank)
        assert uploads(optimizer) == before + group.size
        train(net, optimizer, 5, group.rank)
        assert float((sent_by_all(optimizer) - optimizer.vectors.mean_N).abs().max()) < 1e-12
        return held(optimizer)

    run_threads(3, save)
    first, *others = run_threads(2, load)
    assert all(torch.equal(first, other) for other in others)
    assert ("what the other ranks sent last is not there" in caplog.text) == ("rank 0" in how)


@pytest.mark.law
def test_a_rank_that_saves_alone_has_all_send_in_the_next_step():
    """As loops do that save on rank 0: nothing waits, and G stays the mean of what ranks sent."""

    def work(group):
        net = network()
        optimizer = made(net, group, max_age=50, threshold=1e9)
        train(net, optimizer, 5, group.rank)
        if group.rank == 0:
            optimizer.state_dict()
        assert uploads(optimizer) == 3
        train(net, optimizer, 1, group.rank)
        assert uploads(optimizer) == 6
        return float((sent_by_all(optimizer) - optimizer.vectors.mean_N).abs().max())

    assert max(run_threads(3, work)) < 1e-15


@pytest.mark.parametrize(
    "change",
    [
        {"age": 0},
        {"age": 1.5},
        {"sent_N": torch.zeros(3)},
        {"compared_N": None},
        {"more": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_damaged_share_is_refused_and_nothing_changes(change):
    net = network()
    optimizer = made(net, SoloGroup())
    train(net, optimizer, 3, 0)
    share, before = optimizer.rank_state_dict(), held(optimizer)
    share["share"]["0 of 1"]["own"] |= change
    with pytest.raises(ValueError, match="state_dict has own"):
        optimizer.load_state_dict(share)
    assert torch.equal(held(optimizer), before)


def test_lengths_that_are_none_are_refused():
    net = network()
    optimizer = made(net, SoloGroup())
    train(net, optimizer, 3, 0)
    saved = optimizer.state_dict()
    saved["saved"]["lengths"] = [-1.0]
    with pytest.raises(ValueError, match=r"saved\['lengths'\] = \[-1.0\]: must be numbers"):
        optimizer.load_state_dict(saved)


def test_a_state_from_before_lengths_were_kept_loads_and_goes_by_those_of_its_next_steps():
    net = network()
    optimizer = made(net, SoloGroup())
    train(net, optimizer, 3, 0)
    saved = optimizer.state_dict()
    del saved["saved"]["lengths"]
    saved["names"] = [name for name in saved["names"] if name != "lengths"]
    saved["saved"]["moved"] = [[1.0, 2.0]]
    optimizer.load_state_dict(saved)
    train(net, optimizer, 2, 0)
    assert len(optimizer.saved["lengths"]) == 2
    optimizer.load_state_dict(optimizer.state_dict())


class CadaRank(Rank):
    """One whose step is given a closure."""

    def step(self, rank, size):
        self.optimizer.step(closure_of(self.net, self.optimizer.num_steps + 1, rank))


def new_ranks(size, rule, first=0):
    def build(net):
        return made(net, rule=rule, **SOME)

    found = [CadaRank(f"w{i}", build, seed=i) for i in range(first, first + size)]
    for rank in found:
        rank.net = network(seed=rank.net[0].weight.numel() + first)
        rank.optimizer = build(rank.net)
    return found


@pytest.mark.few(1)
@pytest.mark.law
@pytest.mark.parametrize("rule", [1, 2])
def test_the_mean_of_what_ranks_sent_goes_over_3_4_2_and_1_ranks(rule):
    """Bit for bit, with moments and the common older point; then all send."""
    ranks = new_ranks(3, rule)

    def leave(rank, group):
        rank.regroup(group)
        before = uploads(rank.optimizer)
        rank.train(group, rank.optimizer.num_steps + 1)
        assert uploads(rank.optimizer) == before + group.size
        assert float((sent_by_all(rank.optimizer) - rank.optimizer.vectors.mean_N).abs().max()) < 1e-15
        rank.train(group, rank.optimizer.num_steps + 9)
        assert float((sent_by_all(rank.optimizer) - rank.optimizer.vectors.mean_N).abs().max()) < 1e-12
        hand_over(rank.optimizer)
        return rank.held(), uploads(rank.optimizer)

    def come(rank, group):
        rank.regroup(group)
        return rank.held(), uploads(rank.optimizer)

    for size in (4, 2, 1):
        gave = together(ranks, leave)
        assert all(rank.lost is None for rank in ranks)
        ranks = [*ranks[:size], *new_ranks(max(0, size - len(ranks)), rule, first=5)]
        for holds, count in together(ranks, come):
            assert torch.equal(holds, gave[0][0])
            assert count == gave[0][1]
    assert ranks[0].optimizer.vectors.mean_N.any()


@pytest.mark.few(1)
@pytest.mark.law
@every_value(
    {
        "rule, when": [(rule, when) for rule in (1, 2) for when in When],
        "collective, call": [("all_gather", 0), ("all_to_all_v", 1), ("sum", 1), ("all_gather", 3)],
    }
)
def test_after_a_death_in_a_step_all_hold_the_same_and_send(rule, collective, call, when):
    """Some survivors may have made the step, and some not."""
    ranks = new_ranks(4, rule)

    def work(rank, group):
        rank.regroup(group)
        rank.train(group, 0 if collective == "sum" else 4)  # all send in the first step, and seldom later
        group.arm(Fault((3,), collective, call, when, What.LOSE))
        rank.train(group, 40)

    together(ranks, work, timeout_s=60.0)
    survivors = ranks[:3]
    assert all(isinstance(rank.lost, PeerLost) for rank in survivors)
    stay = [*survivors, *new_ranks(1, rule, first=5)]

    def go_on(rank, group):
        rank.regroup(group)
        before = uploads(rank.optimizer)
        rank.train(group, rank.optimizer.num_steps + 1)
        assert uploads(rank.optimizer) == before + 4
        rank.train(group, rank.optimizer.num_steps + 9)
        assert float((sent_by_all(rank.optimizer) - rank.optimizer.vectors.mean_N).abs().max()) < 1e-12
        return rank.held()

    ends = together(stay, go_on, timeout_s=60.0)
    assert all(rank.lost is None for rank in stay)
    assert all(torch.equal(ends[0], end) for end in ends)
