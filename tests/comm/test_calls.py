"""Ranks in different calls: an error on every rank that says which rank is where, and nothing has changed."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.covering import every_value
from tests.optim.constructing import construct
from tests.optim.reference.written_out import bits
from thinwire.comm import CallMismatch, SoloGroup, run_threads
from thinwire.comm.calls import Calls, Place, calls_of, mismatch, refuse_other_calls
from thinwire.optim import SGD, Adam, OneBitAdam, OneBitLamb, ZeroOneAdam
from thinwire.optim.engine.health import health
from thinwire.optim.engine.state import replicated
from thinwire.optim.regroup import hand_over

CPU = torch.device("cpu")


def test_places_differ_only_where_both_are_at_the_same_place_of_one_order():
    here = Place(0, 7, "all_gather", 16)
    assert here.differs(Place(0, 7, "all_to_all", 16))
    assert here.differs(Place(0, 7, "all_gather", 32))
    for other in (here, Place(0, 8, "all_to_all", 16), Place(1, 7, "all_to_all", 16)):
        assert not here.differs(other)
    assert not Place(0, 0, "relay", 16).differs(Place(0, 0, "relay", 32))


def test_calls_know_where_their_rank_is_and_what_it_did_last():
    calls = Calls()
    assert calls.words() == "its own code"
    with calls.within("a()", "do"):
        with calls.within("b()"):
            calls.begun[0] += 1
        assert (calls.words(), calls.remedy, calls.last) == ("a()", "do", "b()")
    assert calls.last == "a()"
    with calls.within("local()"):  # nothing was begun: no other rank took part in it
        pass
    with calls.within("mine()"), ThreadPoolExecutor(1) as threads:
        with pytest.raises(RuntimeError, match=r"yours\(\): another thread is in mine\(\) on the same process group"):
            threads.submit(calls.within("yours()").__enter__).result()
        assert calls.words() == "mine()"
    with pytest.raises(ZeroDivisionError), calls.within("c()"):
        calls.begun[1] += 1 // 0
    assert (calls.words(), calls.remedy, calls.last) == ("its own code after a()", "", "a()")
    assert calls_of(SoloGroup()).words() == "its own code"


def test_the_error_names_who_is_where_and_what_to_do_once():
    told = str(mismatch({2: "b()", 0: "a()", 1: "b()"}, ["call a() everywhere", "", "call a() everywhere"]))
    assert told.startswith("rank 0 is in a(); ranks 1, 2 are in b(): every rank must make the same calls")
    assert told.count("Call a() everywhere.") == 1


def raised(work, size=2):
    """The texts of the CallMismatch that every rank raises in work(group)."""

    def one(group):
        with pytest.raises(CallMismatch) as error:
            work(group)
        return str(error.value)

    return run_threads(size, one)


def test_threads_in_other_collectives_are_told_at_once_and_may_go_on():
    def work(group):
        x, rows = torch.ones(4), torch.zeros((2, 4), dtype=torch.uint8)
        with pytest.raises(CallMismatch, match=r"all_reduce of 16 bytes.*all_gather of 4 bytes") as error:
            group.mean_(x) if group.rank == 0 else group.all_gather(rows, rows[0])
        with pytest.raises(CallMismatch, match=r"all_reduce of 16 bytes.*all_reduce of 8 bytes"):
            group.mean_(x[: 4 - 2 * group.rank])
        group.mean_(x)
        return str(error.value)

    first, second = run_threads(2, work)
    assert first == second


def test_calls_are_compared_before_what_is_in_them():
    def work(group):
        assert refuse_other_calls(group, "a()", CPU, more="x\ny") is None
        assert refuse_other_calls(group, "a()", CPU, more=f"x\n{group.rank}") == ["x\n0", "x\n1", "x\n2"]
        with pytest.raises(CallMismatch) as error:
            refuse_other_calls(group, "ab"[group.rank > 0] + "()", CPU, remedy="do" * (group.rank == 1))
        return str(error.value)

    assert [told.split(":")[0] for told in run_threads(3, work)] == ["rank 0 is in a(); ranks 1, 2 are in b()"] * 3


NET = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))


def made(cls, group, **more):
    net = copy.deepcopy(NET)
    return net, construct(cls, net.parameters(), lr=1e-2, group=group, **more)


def train(net, optimizer, rank, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * optimizer.num_steps + rank))
        net(x).square().mean().backward()
        optimizer.step()


PHASES = {
    "adam_w": (OneBitAdam, {"warmup": 100}),
    "onebit_adam": (OneBitAdam, {"warmup": 2}),
    "onebit_lamb": (OneBitLamb, {"warmup": 2}),
    "zero_one_adam": (ZeroOneAdam, {"var_freeze_step": 2}),
}
ALONE = {
    "state_dict()": lambda net, optimizer: optimizer.state_dict(),
    "hand_over()": lambda net, optimizer: hand_over(optimizer),
    "__init__()": lambda net, optimizer: OneBitAdam(copy.deepcopy(net).parameters(), group=optimizer.group),
}


@pytest.mark.law
@every_value({"phase": PHASES, "call": ALONE})
def test_a_call_of_one_rank_beside_a_step_of_another_raises_on_both_and_changes_nothing(phase, call):
    cls, more = PHASES[phase]

    def work(group):
        (net, optimizer), (other_net, other) = made(cls, group, **more), made(cls, group, **more)
        train(net, optimizer, group.rank, 4)
        train(other_net, other, group.rank, 4)
        before = bits(optimizer.space.p_N, *replicated(optimizer.vectors).values())
        both = rf"rank 0 is in .*{re.escape(call)}.*; rank 1 is in .*step\(\) 5"
        with pytest.raises(CallMismatch, match=both) as error:
            ALONE[call](net, optimizer) if group.rank == 0 else train(net, optimizer, group.rank)
        assert torch.equal(bits(optimizer.space.p_N, *replicated(optimizer.vectors).values()), before)
        train(net, optimizer, group.rank, 4)
        train(other_net, other, group.rank, 4)
        torch.testing.assert_close(optimizer.space.p_N, other.space.p_N)  # as if it had not been, to rounding
        assert (optimizer.num_steps, other.num_steps) == (8, 8)
        return str(error.value)

    first, second = run_threads(2, work)
    assert first == second
    assert ("Call state_dict() on every rank" in first) == (call == "state_dict()")


def test_a_round_of_local_steps_is_ended_by_all_or_by_none():
    def work(group):
        net, optimizer = made(ZeroOneAdam, group, var_freeze_step=1, local_step_scaler=1, local_step_clipper=8)
        train(net, optimizer, group.rank, 10)
        while optimizer.at_sync:
            train(net, optimizer, group.rank)
        if group.rank == 0:
            optimizer.prepare_to_save()
        while True:
            train(net, optimizer, group.rank)

    for told in raised(work):
        assert "rank 0 is in ZeroOneAdam.prepare_to_save() after step" in told
        assert "Call prepare_to_save() on every rank, or evaluate where optimizer.at_sync is true." in told


def test_ranks_that_save_after_different_steps_are_told():
    def work(group):
        net, optimizer = made(OneBitAdam, group, warmup=2)
        train(net, optimizer, group.rank, 4)
        if group.rank == 0:
            optimizer.num_steps += 1
        optimizer.state_dict()

    for told in raised(work):
        assert "rank 0 is in OneBitAdam.state_dict() after step 5; rank 1 is in OneBitAdam.state_dict() after s" in told


def test_what_is_local_may_be_called_by_one_rank_alone():
    def work(group):
        for cls in (Adam, SGD):
            net, optimizer = made(cls, group)
            train(net, optimizer, group.rank, 2)
            if group.rank == 0:
                optimizer.state_dict()
                health(optimizer)
            train(net, optimizer, group.rank)
        return optimizer.num_steps

    assert run_threads(2, work) == [3, 3]
