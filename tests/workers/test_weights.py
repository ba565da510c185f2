"""The weights that a checkpoint gives: those that the model had, by name, in its types."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.test_saving import AT, make, saving_run
from thinwire.comm import SoloGroup
from thinwire.contract.weights import FetchFailed
from thinwire.workers.checkpoints import CheckpointStore
from thinwire.workers.weights import fetch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_of_the_model_bit_by_bit(tmp_path, dtype):
    ((model, _), _), *_ = saving_run(CheckpointStore(tmp_path / "checkpoints", keep=1), "onebit_adam", 3, dtype)
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
