"""torch.distributed.checkpoint with sharded boxes: loaded with other numbers of boxes and of their ranks."""

from __future__ import annotations

import json

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.optim.sharded.boxes import SETUP
from thinwire.integrations.checkpoint import by_parameter, load_by_parameter
from thinwire.optim import Adam

RESHARDED = """
import warnings
import torch.distributed.checkpoint as dcp
from thinwire.integrations.checkpoint import by_parameter, load_by_parameter
warnings.filterwarnings("ignore")

def made(k, kind, more, net=Net):
    mesh = grid(k)
    model = sharded(mesh["shard"], net())
    return model, kind(model.parameters(), lr=1e-2, model=model, group=mesh["replicate"].get_group(), **more)

def whole(state):
    return {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in state.items() if key != "plain"}

def load(at, model, optimizer):
    state = {"model": model.state_dict(), "optimizer": by_parameter(optimizer)}
    dcp.load(state, checkpoint_id=at)
    model.load_state_dict(state["model"])
    load_by_parameter(optimizer, state["optimizer"])

for kind, more, sizes in (
    (OneBitAdam, {"warmup": 3}, (2, 4, 1)),
    (OneBitAdam, {"warmup": 9}, (1,)),
    (OneBitLamb, {"warmup": 3}, (2, 1)),
    (Adam, {}, (4,)),
    (ZeroOneAdam, {"var_freeze_step": 3}, (4,)),
):
    name = f"{kind.__name__} {more}"
    model, optimizer = made(2, kind, more)
    train(model, optimizer, range(5))
    at = os.path.join(folder, name.replace(" ", "_"))
    state = {"model": model.state_dict(), "optimizer": by_parameter(optimizer)}
    dcp.save(state, checkpoint_id=at)
    saved, weights = whole(state["optimizer"]), full(model)
    train(model, optimizer, range(5, 7))
    for k in sizes:
        again, other = made(k, kind, more)
        load(at, again, other)
        now = whole(by_parameter(other))
        same = saved.keys() == now.keys() and torch.equal(full(again), weights)
        found[f"{name} {k}"] = same and all(torch.allclose(saved[key], now[key], atol=1e-6) for key in saved)
        if more == {"warmup": 3}:
            found[f"R {name} {k}"] = any(bool(x.any()) for key, x in now.items() if key.endswith("momentum_error"))
        train(again, other, range(5, 7))
        if k == 2:
            found[f"{name} goes on"] = torch.equal(full(again), full(model))
        found[f"{name} {k} alike"] = all(torch.equal(x, full(again)) for x in every(full(again)))
    dist.barrier()

# Written by boxes, loaded by ranks that have the whole model, and refused by another model
plain = Net()
optimizer = Adam(plain.parameters(), lr=1e-2, model=plain)
load(os.path.join(folder, "Adam_{}"), plain, optimizer)
found["whole"] = [optimizer.num_steps]
state = by_parameter(optimizer)
smaller = nn.Linear(3, 3)
found["refused"] = refused(lambda: load_by_parameter(Adam(smaller.parameters(), model=smaller), state))
say("found", json.dumps(found))
dist.destroy_process_group()
"""


def without(state, key):
    return {name: x for name, x in state.items() if name != key}


def changed(state, key):
    return {**without(state, key), f"module.{key}": state[key]}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda s, key: without(s, key), "the state has nothing by the key '0.weight/m_N', where a tensor"),
        (changed, "the state has nothing by the key '0.weight/m_N', where a tensor belongs: give model= as"),
        (lambda s, key: {**s, key: "text"}, "the state has str by the key '0.weight/m_N'"),
        (
            lambda s, key: {**s, key: torch.ones(3)},
            r"the state has \[3\] by the key '0.weight/m_N', and of this .* \[2, 3\]",
        ),
        (lambda s, key: without(s, "plain"), "the state has 'nothing' by the key 'plain', which is not what"),
        (lambda s, key: {**s, "plain": "{"}, "the state has '{' by the key 'plain'"),
        (lambda s, key: {**s, "plain": "[1]"}, "by the key 'plain', which is not what by_parameter"),
        (
            lambda s, key: {**s, "plain": json.dumps({**json.loads(s["plain"]), "param_groups": 3})},
            "by the key 'plain'",
        ),
        (lambda s, key: {**s, "plain": json.dumps(without(json.loads(s["plain"]), "entries"))}, "by the key 'plain'"),
    ],
)
def test_a_checkpoint_with_missing_or_other_entries_is_refused_and_changes_nothing(damage, words):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = Adam(model.parameters(), lr=0.1, model=model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = by_parameter(optimizer)
    with pytest.raises(ValueError, match=words):
        load_by_parameter(optimizer, damage(state, "0.weight/m_N"))
    assert all(torch.equal(x, state[key]) for key, x in by_parameter(optimizer).items() if key != "plain")


@pytest.mark.slow
@pytest.mark.law
def test_state_and_r_are_resharded_with_the_parameters(tmp_path):
    ranks = start(SETUP + RESHARDED, 4, tmp_path)
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * 4
    for rank in range(4):
        found = json.loads(said(tmp_path, rank, "found"))
        assert found.pop("whole") == [5]
        assert found.pop("refused").startswith("ValueError: the checkpoint is of parameters of the shapes [[24], [10],")
        assert not [name for name, value in found.items() if not value]
