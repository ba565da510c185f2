"""0/1 Adam: what ranks send and when, and that they, and resumed runs, agree after every sync."""

import copy

import pytest
import torch

from tests.covering import every_value
from tests.optim.zero_one_adam.problem import HYPER, bits, make, synced, train
from thinwire.comm import SoloGroup, run_threads
from thinwire.optim import ZeroOneAdam
from thinwire.optim.engine.replicas import Replicas


def test_a_local_step_sends_no_byte_and_a_sync_two_collectives():
    def work(group):
        model, optimizer = make(group, torch.float32)
        train(model, optimizer, 12, group.rank)
        local = syncs = 0
        for _ in range(20):
            bytes_before, collectives_before = group.stats.sent_bytes, group.stats.collectives
            train(model, optimizer, 1, group.rank)
            if synced(optimizer):
                syncs += 1
                assert group.stats.collectives == collectives_before + 2
            else:
                local += 1
                assert (group.stats.sent_bytes, group.stats.collectives) == (bytes_before, collectives_before)
        return local, syncs

    assert run_threads(3, work) == [(14, 6)] * 3


@pytest.mark.few(1)
@every_value({"old, new": [(2, 3), (4, 1), (1, 4), (3, 8)]}, only=(1, 3))
def test_t7_a_checkpoint_from_the_middle_of_a_round_loads_on_any_number_of_ranks(old, new):
    def save(group):
        model, optimizer = make(group)
        train(model, optimizer, 21, group.rank)
        before = optimizer.space.p_N.clone()
        group.mean_(before)
        return optimizer.state_dict(), copy.deepcopy(model.state_dict()), before, optimizer.space.p_N.clone()

    saved, weights, mean_x, x = run_threads(old, save)[0]
    torch.testing.assert_close(x, mean_x, rtol=0, atol=1e-13)  # the forced sync takes the mean of the replicas

    def load(group):
        model, optimizer = make(group, seed=3)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        residual = optimizer.vectors.update_error.residual()
        train(model, optimizer, 12, group.rank)
        assert synced(optimizer)
        return residual, optimizer.space.p_N

    results = run_threads(new, load)
    for residual, p in results:
        assert torch.equal(residual, saved["residuals"]["update_error"])
        assert torch.equal(p, results[0][1])


def test_the_learning_rate_drives_the_syncs_of_a_run():
    model, optimizer = make(local_step_scaler=None, local_step_clipper=4)
    at = []
    for step in range(1, 31):
        optimizer.param_groups[0]["lr"] = 1e-2 * (
            step / 6 if step <= 6 else 1.0 if step <= 9 else 0.5 if step <= 17 else 0.1
        )
        train(model, optimizer, 1, rank=0)
        at += [step] if synced(optimizer) else []
    assert at == [*range(1, 10), 11, 13, 15, 17, 21, 25, 29]


def test_at_sync_tells_where_ranks_hold_the_same_and_saving_there_sends_nothing():
    """Elsewhere saving costs two exchanges in full, of x and of m, and then the ranks agree too."""

    def work(group):
        model, optimizer = make(group, torch.float32)
        assert optimizer.at_sync
        seen = []
        for _ in range(24):
            train(model, optimizer, 1, group.rank)
            seen.append((optimizer.at_sync, bits(optimizer.space.p_N)))
            if optimizer.at_sync:
                sent = group.stats.collectives
                optimizer.prepare_to_save()
                assert group.stats.collectives == sent
        sent, by_kind = group.stats.collectives, copy.copy(group.stats.bytes_by_kind)
        assert not optimizer.at_sync
        optimizer.prepare_to_save()
        assert optimizer.at_sync
        assert group.stats.collectives == sent + 3
        more = {kind: num - by_kind[kind] for kind, num in group.stats.bytes_by_kind.items() if num > by_kind[kind]}
        assert set(more) == {"sum", "all_gather"}
        assert more["all_gather"] == 16  # do all ranks call it?
        return seen, bits(optimizer.space.p_N, optimizer.vectors.m_N)

    results = run_threads(2, work)
    for (at_sync, p), (other_at_sync, other_p) in zip(results[0][0], results[1][0], strict=True):
        assert at_sync == other_at_sync == torch.equal(p, other_p)
    assert torch.equal(results[0][1], results[1][1])


def test_rounds_skipped_are_the_steps_that_sent_nothing_idle_syncs_among_them(monkeypatch):
    monkeypatch.setattr(Replicas, "begin", lambda *_: None)  # which an idle sync may do

    def work(group):
        model, optimizer = make(group, torch.float32)
        silent = 0
        for step in range(1, 41):
            optimizer.param_groups[0]["lr"] = 0.0 if 9 <= step <= 12 else HYPER["lr"]
            sent = group.stats.sent_bytes
            train(model, optimizer, 1, group.rank)
            silent += group.stats.sent_bytes == sent
        stats = optimizer.stats()
        resumed = make(group, torch.float32)[1]
        resumed.load_state_dict(optimizer.state_dict())
        assert resumed.stats()["rounds_skipped"] == stats["rounds_skipped"]
        return stats["rounds_skipped"] - silent, silent > 20

    assert run_threads(2, work) == [(0, True)] * 2


@every_value({"weight_decay": [0.0, 0.1], "dtype": [torch.float32, torch.float64]})
def test_one_rank_alone_keeps_no_x_s_and_trains_as_one_that_does(monkeypatch, weight_decay, dtype):
    """Over rounds of one, two and four steps, groups of different rates, one of them 0, a save in a round and R."""

    def trained(keeps):
        monkeypatch.setattr(ZeroOneAdam, "_keeps_start", keeps)
        two = lambda model: [{"params": list(part.parameters())} for part in (model[0], model[2])]  # noqa: E731
        model, optimizer = make(SoloGroup(), dtype, params=two, weight_decay=weight_decay)
        found, between = [], 0
        for step in range(1, 41):
            optimizer.param_groups[1]["lr"] = 0.0 if step in (14, 21, 22) else HYPER["lr"] / step
            if step == 30:  # what a larger group has left
                residual_N = torch.full_like(optimizer.space.p_N, 1e-3)
                residual_N[optimizer.space.layout.dead(0, len(residual_N))] = 0
                optimizer.vectors.update_error.restore(residual_N)
            train(model, optimizer, 1, 0)
            between += not optimizer.at_sync
            assert optimizer.at_sync or (optimizer.vectors.x_s_N is not None) == keeps
            if step == 35:
                assert not optimizer.at_sync
                optimizer.prepare_to_save()
            found.append(
                (optimizer.space.p_N.clone(), optimizer.vectors.m_N.clone(), optimizer.common_parameters.clone())
            )
        assert between > 10
        return found

    rounding = 100 * torch.finfo(dtype).eps
    for ours, theirs in zip(trained(False), trained(True), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=rounding, atol=rounding)
