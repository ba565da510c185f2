"""Checkpoints that DeepSpeed 0.19.6 wrote: weights and moments are those in its files, and what is none is refused.

The files are in tests/data; DeepSpeed is not needed. make_checkpoints.py beside them says of what model they are.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire import optim
from thinwire.integrations.deepspeed import MODEL, CheckpointRefused, load_checkpoint

SAVED = Path(__file__).parents[1] / "data/deepspeed-0.19.6/checkpoints"
WEIGHTS, BIASES = ["0.weight", "2.weight"], ["0.bias", "2.bias"]
NAMES = [*WEIGHTS, *BIASES]
SHAPES = {"0.weight": (7, 5), "2.weight": (3, 7), "0.bias": (7,), "2.bias": (3,)}


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model that was saved, with other values."""
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_buffer("seen", torch.zeros(2))
    return model.to(dtype)


def optimizer_of(model: nn.Module, kind: str = "OneBitAdam", **options: Any) -> Any:
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in WEIGHTS], "weight_decay": 0.1},
        {"params": [named[name] for name in BIASES]},
    ]
    if kind.startswith("OneBit"):
        options = {"warmup": 50, **options}
    return getattr(optim, kind)(groups, model=model, lr=1e-2, **options)


def read(name: str) -> dict[str, Any]:
    return torch.load(SAVED / name / MODEL, weights_only=True)


def cut(groups: list[Tensor]) -> dict[str, Tensor]:
    """Two vectors of a group each, without their padding."""
    found = {}
    for names, vector in zip((WEIGHTS, BIASES), groups, strict=True):
        for name in names:
            numel = torch.Size(SHAPES[name]).numel()
            found[name], vector = vector[:numel].view(SHAPES[name]), vector[numel:]
    return found


def check(model: nn.Module, optimizer: Any, weights: dict[str, Tensor], moments: dict[str, dict[str, Tensor]]) -> None:
    masters = optimizer.space.masters()
    for name, p in model.named_parameters():
        assert torch.equal(masters.get(p, p.detach()).view(p.shape), weights[name].detach().float()), name
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][moment], moments[moment][name].float()), (name, moment)


@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [
        ("onebit-adam-warm", "OneBitAdam", 2),
        ("onebit-lamb-warm", "OneBitLamb", 2),
        ("zero-one-adam", "ZeroOneAdam", 2),
        ("adamw", "Adam", 3),
        ("adamw", "OneBitAdam", 3),
        ("onebit-adam-warm", "Adam", 2),
    ],
)
def test_weights_and_moments_of_an_engine_in_fp32_are_taken_over(name, kind, steps):
    model = model_of()
    optimizer = optimizer_of(model, kind)
    taken = load_checkpoint(SAVED / name, model, optimizer)
    saved = read(name)
    states = saved["optimizer"]["state"]
    moments = {m: {n: states[i][m] for i, n in enumerate(NAMES)} for m in ("exp_avg", "exp_avg_sq")}
    check(model, optimizer, saved["module"], moments)
    assert (taken.steps, taken.frozen_at, optimizer.num_steps) == (steps, None, steps)
    assert torch.equal(model.seen, torch.arange(2.0))
    if kind == "OneBitLamb":
        expected = sorted(states[i]["lamb_coeff_freeze"] for i in range(len(NAMES)))
        assert sorted(optimizer.vectors.coeff_T.tolist()) == pytest.approx(expected)


def test_after_its_freeze_one_bit_adam_goes_on_compressing():
    model = model_of()
    optimizer = optimizer_of(model, warmup=3)
    taken = load_checkpoint(SAVED / "onebit-adam", model, optimizer)
    states = read("onebit-adam")["optimizer"]["state"]
    assert (taken.optimizer, taken.steps, taken.frozen_at) == ("OneBitAdam", 5, 3)
    assert optimizer.stats()["phase"] == "compressed"
    for i, name in enumerate(NAMES):
        p, state = dict(model.named_parameters())[name], states[i]
        assert torch.equal(optimizer.state[p]["exp_avg"], state["exp_avg"])
        v = optimizer.state[p]["exp_avg_sq"]
        assert torch.equal(v, torch.maximum(v, state["exp_avg_sq"]))
        assert float((v == state["exp_avg_sq"]).float().mean()) > 0.5, "but for what the floor has raised"
    assert "next step is a compressed one" in str(taken)
    with pytest.raises(CheckpointRefused, match="frozen variance"):
        load_checkpoint(SAVED / "onebit-adam", other := model_of(), optimizer_of(other, "Adam"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_masters_of_a_run_in_bf16_are_taken_over(dtype):
    model = model_of(dtype)
    optimizer = optimizer_of(model)
    load_checkpoint(SAVED / "onebit-adam-bf16", model, optimizer)
    outer = read("onebit-adam-bf16")["optimizer"]
    states = outer["optimizer_state_dict"]["state"]
    moments = {m: cut([states[0][m], states[1][m]]) for m in ("exp_avg", "exp_avg_sq")}
    check(model, optimizer, cut(outer["fp32_groups_flat"]), moments)


@pytest.mark.parametrize(("name", "prefix"), [("adamw-zero1", "bf16_"), ("adamw-zero2", "")])
def test_partitions_of_zero_are_put_together(name, prefix):
    model = model_of(torch.bfloat16 if prefix else torch.float32)
    optimizer = optimizer_of(model)
    taken = load_checkpoint(SAVED / name, model, optimizer)
    assert (taken.ranks, taken.zero_stage, taken.steps) == (2, int(name[-1]), 3)
    masters = {n: optimizer.space.masters().get(p, p.detach()).view(p.shape) for n, p in model.named_parameters()}
    module = read(name)["module"]
    for key, value in masters.items():
        assert torch.equal(value.to(module[key].dtype), module[key]), "16-bit weights are masters, rounded"
    if not prefix:
        adamw = as_two_ranks(other := model_of())
        for key, p in model.named_parameters():
            theirs = dict(other.named_parameters())[key]
            torch.testing.assert_close(p, theirs, rtol=1e-5, atol=1e-6)
            for moment in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(
                    optimizer.state[p][moment], adamw.state[theirs][moment], rtol=1e-4, atol=1e-9
                )


def as_two_ranks(model: nn.Module) -> torch.optim.AdamW:
    """What make_checkpoints.py trains, without DeepSpeed: three steps of the mean gradient of two ranks."""
    torch.manual_seed(0)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in WEIGHTS], "weight_decay": 0.1}]
    groups += [{"params": [named[name] for name in BIASES], "weight_decay": 0.0}]
    adamw, streams = torch.optim.AdamW(groups, lr=1e-2), [torch.Generator().manual_seed(1 + rank) for rank in range(2)]
    for _ in range(3):
        adamw.zero_grad()
        for stream in streams:
            (model(torch.randn(4, 5, generator=stream)).square().mean() / 2).backward()
        adamw.step()
    return adamw


def test_a_folder_with_latest_and_one_of_a_tag_are_the_same(tmp_path):
    shutil.copytree(SAVED / "adamw", tmp_path / "step3")
    (tmp_path / "latest").write_text("step3\n")
    for given in ((tmp_path, None), (tmp_path, "step3"), (tmp_path / "step3", None)):
        model = model_of()
        assert load_checkpoint(given[0], model, optimizer_of(model, "Adam"), tag=given[1]).steps == 3
    for tag in ("../adamw", "", ".."):
        with pytest.raises(CheckpointRefused, match="must be the name of a folder"):
            load_checkpoint(tmp_path, model, optimizer_of(model, "Adam"), tag=tag)


class Runs:
    """What a pickle may do."""

    def __reduce__(self):
        return os.mkdir, ("was-run",)


def changed(tmp_path: Path, name: str, **keys: Any) -> Path:
    """A copy of a checkpoint whose file of the model has other values by these keys; None takes one away."""
    folder = tmp_path / name
    shutil.copytree(SAVED / name, folder, dirs_exist_ok=True)
    state = {**read(name), **keys}
    torch.save({key: value for key, value in state.items() if value is not None}, folder / MODEL)
    return folder


def test_nothing_in_a_file_is_run_and_the_refusal_says_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = changed(tmp_path, "adamw", client=Runs())
    model = model_of()
    optimizer = optimizer_of(model, "Adam")
    with pytest.raises(CheckpointRefused, match=r"mkdir.*code of that file would run"):
        load_checkpoint(folder, model, optimizer)
    assert not (tmp_path / "was-run").exists()
    assert optimizer.num_steps == 0


def test_what_is_no_such_checkpoint_is_refused_in_words(tmp_path):
    model = model_of()
    optimizer = optimizer_of(model, "Adam")

    def refused(folder: Path, said: str, model: nn.Module = model, optimizer: Any = optimizer) -> None:
        with pytest.raises((CheckpointRefused, ValueError), match=said):
            load_checkpoint(folder, model, optimizer)
        assert optimizer.num_steps == 0

    refused(tmp_path / "nothing", "is no folder")
    refused(tmp_path, "has no mp_rank_00_model_states.pt")
    (tmp_path / MODEL).write_bytes(b"not a file of torch")
    refused(tmp_path, "cannot be read")
    (tmp_path / MODEL).write_bytes((SAVED / "adamw" / MODEL).read_bytes()[:4000])
    refused(tmp_path, "cannot be read")
    torch.save([1], tmp_path / MODEL)
    refused(tmp_path, "holds list")
    refused(changed(tmp_path, "adamw", module=None), "no weights")
    refused(changed(tmp_path, "adamw", optimizer=None), "no state of an optimizer")
    outer = read("adamw")["optimizer"]
    refused(changed(tmp_path, "adamw", optimizer={**outer, "state": {}}), "before the first step")
    states = {i: {k: v for k, v in one.items() if k != "exp_avg_sq"} for i, one in outer["state"].items()}
    refused(changed(tmp_path, "adamw", optimizer={**outer, "state": states}), "exp_avg, exp_avg_sq and step are needed")
    states = {i: {**one, "exp_avg": one["exp_avg"] * torch.nan} for i, one in outer["state"].items()}
    refused(changed(tmp_path, "adamw", optimizer={**outer, "state": states}), "not finite")
    sparse = {i: {**one, "exp_avg": one["exp_avg"].to_sparse()} for i, one in outer["state"].items()}
    huge = {i: {**one, "step": 10**30} for i, one in outer["state"].items()}
    weights = read("adamw")["module"]
    name = next(name for name, _ in model.named_parameters())
    for keys, said in (
        ({"optimizer": {**outer, "state": sparse}}, "must be a dense tensor"),
        ({"optimizer": {**outer, "state": huge}}, "step count"),
        ({"module": {**weights, name: weights[name] * torch.nan}}, f"{name}.*not finite"),
        ({"module": {**weights, name: "text"}}, "is not laid out"),
        ({"optimizer": {**outer, "param_groups": [1, 2]}}, "is not laid out"),
        ({"optimizer": {**outer, "param_groups": [{}, {}]}}, "is not laid out"),
        ({"dp_world_size": "many"}, "is not laid out"),
    ):
        refused(changed(tmp_path, "adamw", **keys), said)
    refused(changed(tmp_path, "adamw", optimizer={**outer, "param_groups": [{}, {}]}), "is not laid out as")
    refused(changed(tmp_path, "adamw", optimizer={**outer, "state": {0: 3, 1: 3, 2: 3, 3: 3}}), "is not laid out as")
    one_group = optim.Adam(model.parameters(), model=model)
    refused(SAVED / "adamw", "has 2 parameter groups, and the optimizer 1", optimizer=one_group)
    wide = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    refused(SAVED / "adamw", "the model that it was made of", model_of())
    refused(SAVED / "adamw", "build the same model", wide, optimizer_of(wide, "Adam"))
    part = tmp_path / "adamw-zero2"
    shutil.copytree(SAVED / "adamw-zero2", part)
    (part / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    refused(part, "that of rank 1 is missing")
    (part / MODEL).rename(part / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    refused(part, "ZeRO-3")


def test_what_the_error_memory_held_is_said(tmp_path):
    outer = read("onebit-adam")["optimizer"]
    states = {i: {**one, "worker_error": torch.ones(2)} for i, one in outer["state"].items()}
    model = model_of()
    folder = changed(tmp_path, "onebit-adam", optimizer={**outer, "state": states})
    taken = load_checkpoint(folder, model, optimizer_of(model, warmup=3))
    assert taken.released == pytest.approx(8**0.5)
    assert "error memory begins empty" in str(taken)
