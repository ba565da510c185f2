"""The weights that a checkpoint gives: those that the model had, by name, in its types."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.test_saving import AT, make, saving_run
from thinwire.comm import SoloGroup
from thinwire.contract.weights import FetchFailed
from thinwire.optim import Adam
from thinwire.train import session
from thinwire.workers.checkpoints import CheckpointStore
from thinwire.workers.checkpoints.snapshot import Content
from thinwire.workers.weights import fetch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_of_the_model_bit_by_bit(tmp_path, dtype):
    (model, _), *_ = saving_run(CheckpointStore(tmp_path / "checkpoints", keep=1), "onebit_adam", 3, dtype)
    found = fetch(str(tmp_path / "checkpoints"), tmp_path / "out")
    weights = load_file(found.path)
    assert weights.keys() == model.keys()
    assert all(weights[name].dtype == model[name].dtype for name in model)
    assert all(torch.equal(weights[name], model[name]) for name in model)
    assert (found.step, found.tensors) == (AT, len(model))
    assert found.bytes == found.path.stat().st_size
    fresh, _, _ = make("onebit_adam", SoloGroup(), dtype)
    fresh.load_state_dict(weights)  # what anybody does with it
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_what_cannot_be_fetched_is_told(tmp_path):
    with pytest.raises(FetchFailed, match="has no whole checkpoint"):
        fetch(str(tmp_path / "none"), tmp_path)
    with pytest.raises(FetchFailed, match="cannot open nowhere://x"):
        fetch("nowhere://x", tmp_path)
    saving_run(CheckpointStore(tmp_path / "c", keep=1), "onebit_adam", 1, torch.float32)
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchFailed, match="cannot be written"):
        fetch(str(tmp_path / "c"), tmp_path / "file" / "out")


def test_shards_are_no_whole_weights(tmp_path, monkeypatch):
    saving_run(CheckpointStore(tmp_path / "c", keep=1), "onebit_adam", 1, torch.float32)
    monkeypatch.setattr(CheckpointStore, "load", lambda *_: Content({}, {}, {"shards": [{}, {}]}))
    with pytest.raises(FetchFailed, match=r"the shards of 2 processes .* let the script save them"):
        fetch(str(tmp_path / "c"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Tied(torch.nn.Module):
    """Two names for one parameter, and statistics."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 3, bias=False)
        self.head.weight = self.body.weight

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


def scripts_run(folder, **more):
    """Train in a loop of a script; the model."""
    with session(folder) as run:
        model = Tied()
        optimizer = Adam(model.parameters(), lr=0.1, group=run.group)
        run.register(model=model, optimizer=optimizer, counts={"of": torch.ones(2)}, **more)
        for x in run.batches(torch.randn(8, 3), global_batch=4, steps=2):
            run.step(model(x).square().mean())
    return model


def test_the_weights_of_a_script_are_those_of_the_module_that_it_has_registered(tmp_path):
    state = scripts_run(tmp_path).state_dict()
    found = fetch(str(tmp_path / "checkpoints"), tmp_path / "out")
    weights = load_file(found.path)
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)


def test_of_several_modules_each_weight_is_called_by_its_module_first(tmp_path):
    average = Tied()
    state = scripts_run(tmp_path, average=average).state_dict()
    weights = load_file(fetch(str(tmp_path / "checkpoints"), tmp_path / "out").path)
    expected = {"model": state, "average": average.state_dict()}
    assert weights.keys() == {f"{module}.{name}" for module, of in expected.items() for name in of}
    assert all(torch.equal(weights[f"{module}.{name}"], of[name]) for module, of in expected.items() for name in of)


def test_a_script_without_a_module_is_told_to_register_it(tmp_path):
    with session(tmp_path) as run:
        param = torch.nn.Parameter(torch.ones(2))
        run.register(optimizer=Adam([param], lr=0.1, group=run.group))
        for x in run.batches(torch.ones(4, 2), global_batch=4, steps=1):
            run.step((param * x).sum())
    with pytest.raises(FetchFailed, match="registered no module"):
        fetch(str(tmp_path / "checkpoints"), tmp_path / "out")
