"""Dry steps of a small job: each kind of step is what it is called, and nothing is trained."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.workers.plan.rehearsed import rehearsed
from tests.workers.small_job import small_spec
from thinwire.comm.groups.blocking import MirroredGroup
from thinwire.comm.wire.network import Network
from thinwire.comm.wire.step_time import Transport, dense_32, one_bit
from thinwire.contract.plan import Link, PlanFailed, PlanRequest
from thinwire.workers.plan import children, rehearsal
from thinwire.workers.plan.rehearsal import Orders, Setting, as_rehearsed, rehearse, slowest, spawn
from thinwire.workers.plan.run import orders_of, run
from thinwire.workers.plan.ways import COMPRESSED, compressed_for
from thinwire.workers.recipes import recipe_of

SPEC = small_spec(steps=100, global_batch=4)
GIGABIT = Link(1e-4, 1.2e8, "given")


def quiet(*_):
    """Says nothing."""


@pytest.fixture
def sent(monkeypatch):
    """Bytes of each step that is made over a mirrored group, by optimizer."""
    found = []

    class Watched(MirroredGroup):
        def __init__(self, size, first=None):
            super().__init__(size, first)
            if first is None:
                found.append((self, []))

    monkeypatch.setattr(rehearsal, "MirroredGroup", Watched)
    return found


def test_each_kind_of_step_sends_what_the_forecast_says_it_sends(sent):
    """Two full, compressed and local steps of each optimizer, by the bytes that its group has counted."""
    device, bucket = torch.device("cpu"), 1 << 16

    def together():
        for group, steps in sent[-1:]:
            steps.append(group.stats.sent_bytes)

    found = rehearse(recipe_of(SPEC), Setting(2, bucket, 1, 1.0, device), together, quiet)
    network = Network(2, 0.0, 1.0)
    full = dense_32(network, found.elements, Transport(), bucket).payload_bytes
    bits = one_bit(network, found.elements, Transport(), bucket).payload_bytes
    for (group, marks), name in zip(sent, COMPRESSED, strict=True):
        ends = [*marks, group.stats.sent_bytes]
        steps = [after - before for before, after in pairwise(ends)]
        first = [bits] * 3 if name == "onebit_muon" else [full] * 3
        assert steps[:3] == pytest.approx(first, rel=0.06 if name == "onebit_muon" else 0.01)
        assert steps[3:6] == pytest.approx([bits] * 3, rel=0.06)  # blocks end with tensors: a few scales more
        if name == "zero_one_adam":
            assert steps[6:9] == [0, 0, 0]
    assert set(found.busy) == set(COMPRESSED)
    assert all(one.full > 0 and one.compressed > 0 for one in found.busy.values())
    assert found.busy["zero_one_adam"].local > 0
    assert found.forward_s > 0
    assert found.backward_s > 0


def test_a_job_of_sgd_rehearses_1_bit_sgd_and_nothing_of_adam(sent):
    def together():
        for group, steps in sent[-1:]:
            steps.append(group.stats.sent_bytes)

    bucket, methods = 1 << 16, compressed_for("sgd")
    setting = Setting(2, bucket, 1, 1.0, torch.device("cpu"), methods=methods)
    found = rehearse(recipe_of(SPEC), setting, together, quiet)
    assert tuple(found.busy) == methods == compressed_for("onebit_sgd") == ("onebit_sgd", "local_steps")
    (_, marks), (group, of_local) = sent
    bits = one_bit(Network(2, 0.0, 1.0), found.elements, Transport(), bucket).payload_bytes
    steps = [after - before for before, after in pairwise(marks)]
    assert steps[:2] == pytest.approx([bits] * 2, rel=0.06)
    steps = [after - before for before, after in pairwise([*of_local, group.stats.sent_bytes])]
    assert steps == pytest.approx([bits] * 3 + [0] * (len(steps) - 3), rel=0.06)
    assert len(steps) > 3
    assert found.busy["local_steps"].local > 0


def test_orders_name_the_methods_that_can_stand_in_for_the_job_s_own_and_muon_beside_adam():
    for name, methods in (("sgd", ["onebit_sgd"]), ("adam", [*COMPRESSED, "onebit_muon"])):
        orders = orders_of(PlanRequest(small_spec(optimizer={"name": name}), GIGABIT), GIGABIT, 2)[1]
        assert list(orders.methods) == [*methods, "local_steps"]


def test_muon_is_not_rehearsed_on_a_model_of_vectors():
    recipe = recipe_of(SPEC)
    recipe.model = lambda: nn.LayerNorm(64)
    recipe.loss = lambda model, batch: model(torch.ones(64)).pow(2).sum()
    setting = Setting(2, 64, 1, 1.0, torch.device("cpu"), methods=("zero_one_adam", "onebit_muon"))
    assert set(rehearse(recipe, setting, lambda: None, quiet).busy) == {"zero_one_adam"}


def test_nothing_is_trained():
    recipe, models = recipe_of(SPEC), []

    def kept(made=recipe.model):
        models.append(made())
        return models[-1]

    fresh = [param.detach() for param in recipe.model().parameters()]
    recipe.model = kept
    rehearse(recipe, Setting(2, 1 << 16, 1, 1.0, torch.device("cpu")), lambda: None, quiet)
    assert len(models) == 1 + len(COMPRESSED)
    for model in models:
        for param, before in zip(model.parameters(), fresh, strict=True):
            torch.testing.assert_close(param.detach(), before, rtol=0, atol=1e-6)


def test_the_slowest_rank_counts():
    one, other = rehearsed(forward_s=0.5), rehearsed(backward_s=0.9)
    found = slowest([one, other])
    assert (found.forward_s, found.backward_s) == (0.5, 0.9)
    assert found.busy == one.busy
    assert as_rehearsed(json.loads(json.dumps(asdict(found)))) == found


def test_orders_choose_the_bucket_of_a_job():
    def chosen(spec, link, workers=2):
        return orders_of(PlanRequest(spec, link), link, workers)[1].bucket_elements

    slow, fast = (chosen(SPEC, Link(1e-4, rate, "")) for rate in (1e3, 1e12))
    assert slow <= fast
    assert chosen(small_spec(bucket_elements=1 << 17), GIGABIT) == 1 << 17
    with pytest.raises(ValueError, match="5 workers for global_batch = 4"):
        chosen(SPEC, GIGABIT, workers=5)


def test_without_a_link_it_says_how_to_give_one_or_to_measure_it(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(PlanFailed, match=r"give --rate.*torchrun"):
        run(PlanRequest(SPEC, None, workers=2), quiet)


@pytest.mark.slow
def test_what_a_rank_says_before_it_fails_is_told(monkeypatch):
    monkeypatch.setattr(children, "LAST_WORDS", 40)
    spec = small_spec(data={"source": "text-file", "path": "/no/such/text"})
    with pytest.raises(PlanFailed, match="/no/such/text"):
        spawn(Orders(2, 1, 1 << 16, 1, "cpu", True, spec.model_dump(mode="json")), quiet)


@pytest.mark.slow
def test_a_plan_from_the_file_to_the_verdict(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    said = []
    found = run(PlanRequest(SPEC, GIGABIT, workers=2, steps=1), lambda what, done: said.append(what))
    assert found.workers == 2
    assert found.verdict
    assert said[0] == "what sending costs the processor"
    assert said[-1] == "done"


@pytest.mark.slow
def test_ranks_measure_the_link_between_them(tmp_path):
    """Two processes as torchrun starts them: the first one prints the plan, the other nothing."""
    job = tmp_path / "job.yaml"
    job.write_text(SPEC.model_dump_json())
    environment = {
        **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    argv = [sys.executable, "-m", "thinwire.cli.main", "plan", str(job), "--json", "--steps", "1"]
    children = [
        subprocess.Popen(argv, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [child.communicate(timeout=250)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    found = json.loads([line for line in told[0].splitlines() if line.startswith("{")][-1])
    assert found["link"]["source"] == "measured between 2 ranks"
    assert found["workers"] == 2
    assert found["cores"] == len(os.sched_getaffinity(0)) / 2
    assert "{" not in told[1]
