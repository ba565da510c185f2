"""`thinwire migrate`: every key of a DeepSpeed configuration is named once, and the lines that come out run."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from thinwire import optim
from thinwire.cli.migrate_keys import migration_of
from thinwire.contract.spec import read_spec

ADAM: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {
        "type": "OneBitAdam",
        "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "freeze_step": 5},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 4, "total_num_steps": 12},
    },
    "zero_optimization": {"stage": 0},
}
LAMB = {
    "optimizer": {"type": "OneBitLamb", "params": {"lr": 1e-3, "freeze_step": 4, "max_coeff": 5.0, "factor_max": 3.0}},
    "bf16": {"enabled": True},
}
ZERO_ONE = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {
        "type": "ZeroOneAdam",
        "params": {"lr": 1e-3, "var_freeze_step": 6, "local_step_scaler": 8, "local_step_clipper": 4},
    },
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3, "total_num_steps": 10}},
}
FP16 = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}},
    "fp16": {"enabled": True, "loss_scale": 128},
}


@pytest.fixture
def given(tmp_path: Path) -> Callable[[object], str]:
    def write(config: object) -> str:
        path = tmp_path / "ds_config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return str(path)

    return write


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for name, inner in value.items() for k, v in leaves(inner, f"{path}.{name}".lstrip(".")).items()}
    return {path: value}


@pytest.mark.parametrize("config", [ADAM, LAMB, ZERO_ONE, FP16], ids=["adam", "lamb", "zero_one", "fp16"])
def test_every_key_is_named_once_with_its_value(config):
    said = migration_of(config).said
    named = {one.key: one.value for one in said}
    assert len(named) == len(said)
    for key, value in leaves(config).items():
        assert named[key] == value, key
    assert all(one.words for one in said)


def test_a_key_that_nobody_knows_is_named_and_ends_with_another_code(thinwire, given):
    whole = thinwire("migrate", given(ADAM))
    assert whole.code == 0, whole.err
    assert "UNKNOWN" not in whole.err
    run = thinwire("migrate", given(ADAM | {"frobnicate": {"speed": 3}, "optimizer": ADAM["optimizer"] | {"typ": 1}}))
    assert run.code == 1
    assert run.out == whole.out
    assert [line.split(" = ")[0].strip() for line in run.err.split("UNKNOWN:\n")[1].splitlines()] == [
        "optimizer.typ",
        "frobnicate.speed",
    ]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, "zero_optimization.stage"),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, "optimizer.type"),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}}, "weight_decay"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "scheduler.type"),
        ({"activation_checkpointing": {"partition_activations": True}}, "activation_checkpointing"),
    ],
)
def test_what_has_no_counterpart_is_said_with_a_reason(thinwire, given, change, key):
    run = thinwire("migrate", given(ADAM | change))
    assert run.code == 1
    assert key in run.err.split("WITHOUT A COUNTERPART:")[1]


def run_lines(lines: str, steps: int) -> tuple[Any, list[float]]:
    """The optimizer that the lines make, and the rates of its steps."""
    rates: list[float] = []
    model = torch.nn.Linear(3, 2)
    inputs = [torch.randn(4, 3) for _ in range(2)]
    names: dict[str, Any] = {
        "model": model,
        "rates": rates,
        "data": [inputs] * steps if "micro_batches" in lines else inputs[:1] * steps,
        "loss_of": lambda model, x: model(x.to(next(model.parameters()).dtype)).float().square().mean(),
    }
    lines = lines.replace('torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")\n', "")
    seen = "    rates.append(optimizer.param_groups[0]['lr'])\n    "
    lines = lines.replace("    optimizer.step()", seen + "optimizer.step()").replace(
        "    scaler.step(optimizer)", seen + "scaler.step(optimizer)"
    )
    exec(compile(lines, "lines", "exec"), names)
    return names["optimizer"], rates


@pytest.mark.few(2)
@pytest.mark.parametrize("config", [ADAM, LAMB, ZERO_ONE, FP16], ids=["adam", "lamb", "zero_one", "fp16"])
def test_the_lines_run_and_make_the_optimizer_that_was_configured(thinwire, given, config):
    run = thinwire("migrate", given(config))
    optimizer, rates = run_lines(run.out, 8)
    params = config["optimizer"]["params"]
    kind = {"AdamW": "Adam"}.get(config["optimizer"]["type"], config["optimizer"]["type"])
    assert type(optimizer) is getattr(optim, kind)
    group = optimizer.param_groups[0]
    for name in {"eps", "weight_decay"} & params.keys():
        assert group[name] == params[name]
    assert len(rates) == optimizer.num_steps == 8
    if kind == "OneBitAdam":
        assert (optimizer.warmup, optimizer.frozen_at, group["betas"]) == (4, 4, (0.9, 0.95))
    if kind == "OneBitLamb":
        assert (optimizer.bounds.max_coeff, optimizer.bounds.factor_max, optimizer.warmup) == (5.0, 3.0, 3)
        assert next(iter(group["params"])).dtype == torch.bfloat16
    if kind == "ZeroOneAdam":
        assert (optimizer.schedule.local_step_clipper, optimizer.frozen_at) == (4, 6)


def deepspeeds_rates(kind: str, p: dict[str, Any], lr: float, steps: int) -> list[float]:
    """As its lr_schedules.py counts: `at` is last_batch_iteration, -1 until the scheduler's first step()."""
    n, total = max(2, p.get("warmup_num_steps", 1000)), p.get("total_num_steps")
    low, high = p.get("warmup_min_lr", 0.0), p.get("warmup_max_lr", lr)
    found = []
    for at in range(-1, steps - 1):
        rise = at / n if p.get("warmup_type") == "linear" else math.log(at + 1) / math.log(n) if at >= 0 else 0.0
        if kind == "WarmupCosineLR":
            down = (1 + math.cos(math.pi * min(1.0, (at - n + 1) / max(1, total - n)))) / 2
            gamma = rise if at < n else 1e-4 + (1 - 1e-4) * down
            found.append(0.0 if at < 0 else lr * gamma)
        else:
            down = max(0.0, (total - at) / max(1.0, total - n)) if kind == "WarmupDecayLR" else 1.0
            found.append(low if at < 0 else low + (high - low) * (rise if at < n else down))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("config", [ADAM, ZERO_ONE, FP16], ids=["decay", "cosine", "constant"])
def test_the_rates_are_those_of_deepspeeds_scheduler_step_for_step(thinwire, given, config):
    _, rates = run_lines(thinwire("migrate", given(config)).out, 14)
    scheduler = config["scheduler"]
    expected = deepspeeds_rates(scheduler["type"], scheduler["params"], config["optimizer"]["params"]["lr"], 14)
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_a_job_file_comes_out_that_the_service_would_take(thinwire, given):
    run = thinwire("migrate", given(ADAM), "--as", "job")
    spec = read_spec(yaml.safe_load(run.out))
    assert (spec.steps, spec.global_batch, spec.optimizer.warmup) == (12, 64, 4)
    assert spec.optimizer.betas == (0.9, 0.95)
    assert run.code == 1, "a recipe clips no gradient, and has no linear decay"
    assert "gradient_clipping = 1.0" in run.err.split("WITHOUT A COUNTERPART:")[1]
    plain = {key: ADAM[key] for key in ("train_batch_size", "optimizer")}
    assert thinwire("migrate", given(plain), "--as", "job", "--steps", "50").code == 0
    assert "give --steps" in thinwire("migrate", given(plain), "--as", "job").err


def test_for_programs_there_is_json(thinwire, given):
    found = json.loads(thinwire("migrate", given(ADAM), "--json").out)
    assert found["whole"] is True
    assert {one["verdict"] for one in found["keys"]} == {"taken over", "not needed"}
    assert found["script"].startswith("import math")


def test_comments_and_commas_of_hjson_are_read_and_those_in_texts_are_kept(thinwire, given, monkeypatch):
    text = '{ // one\n\t"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3,},}, # two\n "x//y": "a,]", /* 3 */ }'
    run = thinwire("migrate", given(text))
    assert 'x//y = "a,]"' in run.err
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert thinwire("migrate", "-").out == run.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON"),
        ("[1]", "must be an object"),
        ('{"a": 1, "a": 2}', "twice"),
        ('{"gradient_clipping": NaN}', "finite"),
        ('{"gradient_clipping": 1e999}', "finite"),
        ('{"optimizer": 3}', "must be an object"),
        ('{"optimizer": {"type": "OneBitAdam", "params": [1]}}', "must be an object"),
        ('{"optimizer": {"type": "OneBitAdam", "params": {"lr": "fast"}}}', 'lr = "fast": must be a number'),
        ('{"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2.5}}}', "whole number"),
        ('{"optimizer": {"type": "OneBitAdam", "params": {"betas": [0.9]}}}', "two numbers"),
        ('{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}', "multiple of 2"),
        ('{"scheduler": {"type": "WarmupDecayLR", "params": {}}}', "total_num_steps"),
        ('{"zero_optimization": {"stage": "two"}}', "must be a whole number"),
        ('{"fp16": true}', "must be an object"),
        ('{"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}', "give --steps"),
        ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "both enabled"),
        ('{"fp16": {"enabled": "perhaps"}}', "true or false"),
        ('{"gradient_clipping": 1' + 400 * "0" + "}", "from 0 to"),
        ('{"gradient_clipping": 1' + 5000 * "0" + "}", "digits"),
        (700 * '{"a": ' + "1" + 700 * "}", "inside one another"),
        ('{"fp16": {"enabled": true, "initial_scale_power": 5000}}', "from 0 to 127"),
        ('{"gradient_accumulation_steps": 10000000000000000000000}', "from 1 to"),
        ("{" * 100_000, "is no JSON"),
        ("\x80", "must"),
    ],
)
def test_what_is_no_configuration_is_refused_in_words(thinwire, given, text, said):
    run = thinwire("migrate", given(text))
    assert run.code == 2
    assert run.out == ""
    if said != "must":
        assert said in run.err


def test_auto_of_the_trainer_is_no_value(thinwire, given):
    auto = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}}
    auto |= {"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "gradient_clipping": "auto"}
    run = thinwire("migrate", given(auto))
    assert run.code == 1
    assert "auto" not in run.out
    assert "NOT KNOWN:" in run.err
    assert "with_thinwire" in run.err


def test_a_file_for_the_trainer_needs_the_steps_alone_and_names_each_key_once():
    auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    optimizer = {"type": "OneBitAdam", "params": {"lr": "auto", "freeze_step": "auto"}}
    found = migration_of({"optimizer": optimizer, "scheduler": {"type": "WarmupDecayLR", "params": auto}}, 500)
    assert found.options["total_steps"] == 500
    assert found.rates is not None
    assert found.rates.total == 500
    assert len({one.key for one in found.said}) == len(found.said)
    given = {one.key: one.value for one in found.said}
    verdicts = {one.key.split(".")[-1]: one.verdict.value for one in found.said}
    assert {verdicts.pop("total_num_steps"), verdicts.pop("warmup_num_steps")} == {"taken over", "not known"}
    assert {given[f"scheduler.params.{name}"] for name in auto} == {given["optimizer.params.freeze_step"]} == {"auto"}


def test_what_deepspeed_takes_is_taken_in_whatever_way_it_is_written():
    assert (
        migration_of({"fp16": {"enabled": "True"}}).dtype == migration_of({"fp16": {"enabled": 1}}).dtype == "float16"
    )
    assert [one.key for one in migration_of({}).said] == ["optimizer"]
    sgd = migration_of({"optimizer": {"type": "SGD", "params": {"nesterov": True, "dampening": 0}}})
    assert {one.key.split(".")[-1]: one.verdict.value for one in sgd.said} == {
        "type": "taken over",
        "nesterov": "no counterpart",
        "dampening": "not needed",
    }
    elastic = {"elasticity": {"enabled": True, "max_gpus": 10_000}}
    assert migration_of(elastic).workers["max"] == 4096
    assert migration_of(elastic | {"train_batch_size": 8}).workers["max"] == 8
