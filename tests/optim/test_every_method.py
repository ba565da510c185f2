"""What holds of every method whose error memory or momentum goes over a save and a change of ranks: one row each.

Those that freeze a variance: engine/test_resume.py, regroup/ and test_properties.py. CADA, whose steps are given a
closure: cada/test_kept.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import sized
from tests.optim.local_steps import test_local_steps as local
from tests.optim.local_steps import test_overlap, test_parts
from tests.optim.muon.test_muon import network, train
from tests.optim.reference.written_out import bits
from tests.optim.regroup.ranks import goes_on, new_ranks, struck, together
from tests.optim.test_added_methods import every_fourth, top_k
from tests.optim.test_codecs_of_sgd import CODECS
from tests.optim.test_codecs_of_sgd import made as sgd
from tests.optim.test_sketched_sgd import made as sketched
from thinwire.comm import Keeps, PeerLost, run_threads
from thinwire.comm.errors import WireMismatch
from thinwire.comm.groups.faults import Fault, What, When
from thinwire.optim import OneBitMuon, OuterSGD
from thinwire.optim.engine.state import error_memories, replicated
from thinwire.optim.regroup import hand_over


@dataclass(frozen=True)
class Method:
    """make: of (net, group, settings) the optimizer. first, more: steps before a save or a change, and after it.

    own: has each rank a momentum of its own, which a save and a change pull to their mean? late: is an exchange under
    way between two steps, so that what ranks hold in common is known after prepare_to_save()? collectives: in which a
    peer is lost. ends: the step with the exchange in which it is. stands: does that step count all the same? differ:
    settings that ranks must have alike.
    """

    make: Callable
    first: int = 5
    more: int = 5
    own: bool = False
    late: bool = False
    collectives: tuple = ("all_to_all", "all_gather")
    ends: int = 5
    stands: bool = False
    differ: tuple = ()

    def build(self, net):
        """For ranks that change; whatever a job asks ranks to keep of each other, which is of signs alone."""
        optimizer = self.make(net)
        optimizer.keeps = Keeps.ROWS
        return optimizer


def of_sgd(codec):
    return lambda net, group=None, **more: sgd(net, group, **{"codec": codec, **more})


def muon(net, group=None, **more):
    return sized(OneBitMuon, bucket_elements=64)(net.parameters(), lr=0.02, group=group, **more)


def added(kind, **own):
    return lambda net, group=None: sized(kind, bucket_elements=64)(net.parameters(), lr=0.01, group=group, **own)


SUM = ("sum",)
IN_ROUNDS = {"first": local.EVERY + 2, "more": local.EVERY + 1, "ends": 2 * local.EVERY}
IN_PARTS = {"first": test_parts.EVERY + 4, "more": test_parts.EVERY + 3, "ends": test_parts.EVERY}
METHODS = {
    **{
        f"sgd, {codec}": Method(
            of_sgd(codec),
            collectives=SUM if codec == "powersgd" else Method.collectives,
            differ=({"codec": "int4" if codec == "int8" else "int8"},),
        )
        for codec in CODECS
    },
    "sketched sgd": Method(sketched, own=True, collectives=SUM, differ=({"k": 4}, {"columns": 13}, {"second": 4})),
    "muon": Method(muon, own=True),
    **{
        f"local steps of {inner}": Method(
            partial(local.made, inner=inner),
            **IN_ROUNDS,
            stands=True,
            differ=({"every": 5}, {"outer": OuterSGD(0.7)}),
        )
        for inner in local.INNER
    },
    **{
        f"late local steps of {inner}": Method(
            partial(test_overlap.late, inner=inner), **{**IN_ROUNDS, "first": 2 * local.EVERY + 1}, late=True
        )
        for inner in ("adamw", "muon")
    },
    **{
        f"{said}local steps of {inner} in parts": Method(
            partial(test_parts.streamed, inner=inner, overlap=bool(said)),
            **IN_PARTS,
            late=True,
            differ=({"parts": 2},),
        )
        for said, inner in (("", "adamw"), ("late ", "adamw"), ("late ", "muon"))
    },
    "top-k (docs/adding.md)": Method(added(top_k.TopKAdam, warmup=3)),
    "every fourth step (docs/adding.md)": Method(added(every_fourth.EveryFourth), ends=8),
}


def left(optimizer):
    return [memory.residual() for memory in error_memories(optimizer.vectors).values()]


def held(optimizer):
    """Parameters, what is replicated, R and what an inner optimizer keeps."""
    kept = [x for x in local.moments(optimizer).values() if isinstance(x, torch.Tensor)]
    return bits(optimizer.space.p_N, *replicated(optimizer.vectors).values(), *left(optimizer), *kept)


@pytest.mark.few(4)
@every_value(
    {
        "name": METHODS,
        "size": (2, 3, 1),
        "how": ("state_dict", "rank_state_dict"),
        "dtype": (torch.float32, torch.float64, torch.bfloat16),
    }
)
@pytest.mark.law
def test_a_run_that_loads_is_the_one_that_saved_and_went_on(name, size, how, dtype):
    """A share is saved as a round stands, and changes nothing of the run."""
    method = METHODS[name]

    def work(group):
        nets = network(dtype), network(dtype), network(dtype, seed=9)
        optimizer, quiet, loaded = (method.make(net, group) for net in nets)
        for net, one in ((nets[0], optimizer), (nets[1], quiet)):
            train(net, one, method.first, group.rank)
        saved = getattr(optimizer, how)()
        assert how == "rank_state_dict" or optimizer.at_sync
        nets[2].load_state_dict(nets[0].state_dict())
        loaded.load_state_dict(saved)
        ends = []
        for net, one in zip(nets, (optimizer, quiet, loaded), strict=True):
            train(net, one, method.more, group.rank)
            if method.late:
                one.prepare_to_save()
            ends.append(held(one))
        assert torch.equal(ends[0], ends[2])
        assert how == "state_dict" or torch.equal(ends[0], ends[1])
        return saved["vectors"]

    first, *others = run_threads(size, work)
    assert how == "rank_state_dict" or all(torch.equal(first[key], other[key]) for other in others for key in first)


@pytest.mark.few(3)
@pytest.mark.law
@pytest.mark.parametrize("name", METHODS)
def test_r_and_what_is_replicated_are_kept_over_3_4_2_and_1_ranks(name):
    """Who leaves ends the round early. Who comes has moments of one of the others; a momentum of each is their mean."""
    method = METHODS[name]
    ranks = new_ranks(3, method.build)

    def leave(rank, group):
        rank.regroup(group)
        one = rank.optimizer
        rank.train(group, one.num_steps + method.first)
        mean = one.vectors.m_N.clone() if method.own else torch.zeros(1)
        group.mean_(mean)
        hand_over(one)
        assert one.at_sync
        return dict(one.handed_over), rank.held(), local.moments(one), mean

    def come(rank, group):
        rank.regroup(group)
        return rank.residual(group), rank.held(), local.moments(rank.optimizer)

    for size in (4, 2, 1):
        gave = together(ranks, leave)
        residuals, common, kept, mean = gave[0]
        before = len(ranks)
        ranks = [*ranks[:size], *new_ranks(max(0, size - before), method.build)]
        found = together(ranks, come)
        for at, (has, holds, beside) in enumerate(found):
            assert all(torch.equal(has[key], residual) for key, residual in residuals.items())
            assert torch.equal(holds, found[0][1] if method.own else common)
            assert local.same(beside, gave[at][2] if at < before else kept)
            if method.own:
                torch.testing.assert_close(ranks[at].optimizer.vectors.m_N, mean, rtol=1e-6, atol=1e-9)
    assert all(residual.any() for residual in residuals.values())


@pytest.mark.few(3)
@pytest.mark.law
@every_value(
    {
        "name, collective": [(name, one) for name in METHODS for one in METHODS[name].collectives],
        "when": list(When),
        "bucket": (-1, 2),
    }
)
def test_replicas_are_equal_after_a_death_in_the_exchange(name, collective, when, bucket):
    """Some survivors may have ended the step or the round, and some not."""
    method = METHODS[name]
    ranks = new_ranks(4, method.build)
    struck(ranks, method.ends - 1, Fault((3,), collective, bucket, when, What.LOSE), more=2 * method.more)
    survivors = ranks[:3]
    assert all(isinstance(rank.lost, PeerLost) for rank in survivors)
    assert not method.stands or all(rank.optimizer.num_steps >= method.ends for rank in survivors)
    goes_on([*survivors, *new_ranks(1, method.build)], 2 * method.more)


@pytest.mark.parametrize(("name", "given"), [(name, one) for name in METHODS for one in METHODS[name].differ])
def test_ranks_that_differ_are_refused_alike_when_they_are_made(name, given):
    def work(group):
        with pytest.raises(WireMismatch, match=r"rank 0 has .*[;,] rank 1 has ") as found:
            METHODS[name].make(network(), group, **(given if group.rank else {}))
        return str(found.value)

    first, second = run_threads(2, work)
    assert first == second
