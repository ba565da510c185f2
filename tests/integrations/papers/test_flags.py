"""Each flag that the papers' scripts share does what it says: seen from inside of the model, not by the score alone."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("sklearn")

import datasets

from tests.integrations.papers.script import script

pytestmark = pytest.mark.slow

SCRIPTS = {
    "bert_pretrain": ("BertSelfAttention", ()),
    "squad": ("BertSelfAttention", ("--questions", "40")),
    "glue": ("BertSelfAttention", ("--rows", "40")),
    "gpt2": ("GPT2Attention", ("--held-out-windows", "2")),
    "resnet": ("ResNetBasicLayer", ()),
    "dcgan": ("Sequential", ()),
}
"""A module of each block, for hooks of the block itself stay outside of a checkpoint; and what makes a run short."""
WITH_MEMORY = [name for name in SCRIPTS if name != "dcgan"]


@pytest.fixture(autouse=True)
def _tiny(tmp_path, monkeypatch):
    """Models of a few thousand values, on what each script has as data of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    bert, gpt2, resnet = script("bert_pretrain"), script("gpt2"), script("resnet")
    small = {name: module.PRESETS["small"] for name, module in (("bert", bert), ("gpt2", gpt2))}
    monkeypatch.setitem(bert.PRESETS, "small", replace(small["bert"], width=16, layers=1, pieces=200))
    few = {"layers": 1, "width": 32, "heads": 2, "context": 16, "vocabulary": 280}
    monkeypatch.setitem(gpt2.PRESETS, "small", replace(small["gpt2"], **few))
    monkeypatch.setattr(gpt2, "OWN_BYTES", 20_000)
    monkeypatch.setitem(resnet.SHAPES, 18, ("basic", [1, 1], [8, 16]))
    monkeypatch.setattr(script("parts"), "scenes", lambda: [f"{who}:\n{said}" for who, said in speeches()[:200]])
    speeches = script("parts").speeches


class Seen:
    """What has gone into blocks while they trained: samples at once, and how often. Kinds of all that came out."""

    def __init__(self, block):
        self.block, self.samples, self.dtypes = block, [], set()
        hooks = torch.nn.modules.module
        self.hooks = [
            hooks.register_module_forward_pre_hook(self.before),  # a block that is computed again need not end
            hooks.register_module_forward_hook(self.after),
        ]

    def before(self, module, inputs):
        if module.training and type(module).__name__ == self.block:
            self.samples.append(len(inputs[0]))

    def after(self, module, inputs, output):
        if module.training and isinstance(output, torch.Tensor):
            self.dtypes.add(output.dtype)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()


def run(name, folder, *words):
    """The script, in this process, for two steps of four samples; (its own JSON, what was seen)."""
    block, short = SCRIPTS[name]
    file = folder / "out.json"
    with Seen(block) as seen:
        script(name).main(["--steps", "2", "--batch", "4", "--optimizer", "adam", *short, "--out", str(file), *words])
    return json.loads(file.read_text()), seen


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_micro_computes_so_many_samples_at_once(name, tmp_path):
    whole, of_whole = run(name, tmp_path)
    parts, of_parts = run(name, tmp_path, "--micro", "1")
    assert set(of_whole.samples) == {4}
    assert set(of_parts.samples) == {1}
    if name != "resnet":  # BatchNorm has its statistics of each part
        assert parts["score"] == pytest.approx(whole["score"], rel=1e-3)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_checkpointing_computes_each_block_again_and_comes_to_the_same(name, tmp_path):
    plain, of_plain = run(name, tmp_path)
    again, of_again = run(name, tmp_path, "--checkpointing")
    assert len(of_again.samples) == 2 * len(of_plain.samples)
    assert again["score"] == pytest.approx(plain["score"], rel=1e-4)


@pytest.mark.parametrize("name", SCRIPTS)
def test_bf16_computes_in_bfloat16(name, tmp_path):
    _, plain = run(name, tmp_path)
    _, half = run(name, tmp_path, "--bf16")
    assert torch.bfloat16 not in plain.dtypes
    assert torch.bfloat16 in half.dtypes


@pytest.mark.parametrize("name", SCRIPTS)
def test_compile_trains_what_dynamo_has_made_and_comes_to_the_same(name, tmp_path, monkeypatch):
    """Graphs are counted, and run as they are: what inductor makes of them is torch's."""
    plain, _ = run(name, tmp_path)
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: made(model, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(Seen, "__init__", lambda self, block: setattr(self, "hooks", []))  # dynamo would look into them
    compiled, _ = run(name, tmp_path, "--compile")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert compiled["score"] == pytest.approx(plain["score"], rel=1e-3)


def test_the_second_phase_goes_on_with_the_weights_in_sequences_of_512(tmp_path, monkeypatch):
    bert = script("bert_pretrain")
    run("bert_pretrain", tmp_path, "--save", str(tmp_path / "first"))
    lengths, begun = [], []
    made = bert.Masked.masked
    monkeypatch.setattr(
        bert.Masked, "masked", lambda self, row, n: lengths.append(len(row["input_ids"])) or made(self, row, n)
    )
    taken = bert.BertForPreTraining.from_pretrained
    monkeypatch.setattr(
        bert.BertForPreTraining, "from_pretrained", lambda folder: begun.append(folder) or taken(folder)
    )
    run("bert_pretrain", tmp_path, "--phase", "2", "--weights", str(tmp_path / "first"))
    assert set(lengths) == {512}
    assert begun == [str(tmp_path / "first")]


def test_what_save_and_describe_leave_is_one_model_of_transformers(tmp_path):
    from transformers import AutoTokenizer, BertForMaskedLM

    saved, told = tmp_path / "saved", tmp_path / "told"
    run("bert_pretrain", tmp_path, "--save", str(saved))
    script("bert_pretrain").main(["--describe", str(told)])
    assert not (told / "model.safetensors").exists()
    (saved / "model.safetensors").rename(told / "model.safetensors")  # as `thinwire fetch` leaves it
    model, tokenizer = BertForMaskedLM.from_pretrained(told), AutoTokenizer.from_pretrained(told)
    assert model.config.vocab_size == len(tokenizer) == len(AutoTokenizer.from_pretrained(saved))
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(saved).get_vocab()


@pytest.mark.parametrize("name", ["squad", "glue"])
def test_fine_tuning_begins_with_the_values_of_the_folder(name, tmp_path, monkeypatch):
    from safetensors.torch import load_file

    folder = tmp_path / "bert"
    run("bert_pretrain", tmp_path, "--save", str(folder))
    module, begun = script(name), []
    made = module.a_model
    monkeypatch.setattr(module, "a_model", lambda *a, **k: begun.append(made(*a, **k)) or begun[-1])
    given = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items() if k.startswith("bert.encoder")}
    run(name, tmp_path, "--weights", str(folder), "--lr", "0")
    state = begun[0][0].state_dict()
    assert given
    assert all(torch.equal(state[key], value) for key, value in given.items())


@pytest.mark.parametrize("name", ["bert_pretrain", "squad", "glue"])
def test_a_folder_of_weights_that_is_not_there_is_said(name, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script(name).main(["--weights", str(tmp_path / "none")])
    assert f"{tmp_path / 'none'}: there is no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script(name).main(["--weights", str(tmp_path)])
    assert f"bert_pretrain.py --describe {tmp_path} writes it" in capsys.readouterr().err


def test_dcgan_leaves_both_networks(tmp_path):
    from safetensors.torch import load_file

    dcgan = script("dcgan")
    run("dcgan", tmp_path, "--save", str(tmp_path), "--grid", str(tmp_path / "grid.png"))
    for name, net in (("generator", dcgan.generator), ("discriminator", dcgan.discriminator)):
        net(dcgan.PRESETS["small"]).load_state_dict(load_file(tmp_path / f"{name}.safetensors"))
    assert (tmp_path / "grid.png").stat().st_size > 1000
