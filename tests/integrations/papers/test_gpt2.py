"""GPT-2's script: every format gives the same windows, streams go on exactly, and the score is what its name says."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import datasets

from tests.covering import parametrize
from tests.integrations.papers.script import script
from thinwire.optim import OPTIMIZERS
from thinwire.workers.data.feed import feed_of

gpt2 = script("gpt2")
TEXTS = [f"row {i}: {'the quick brown fox ' * (i % 5)}jumps\n\nover" for i in range(40)] + [None, ""]
SMALL = ("--steps", "4", "--batch", "4", "--held-out-windows", "4")


def tiny(**given):
    fields = {**vars(gpt2.PRESETS["small"]), "layers": 1, "width": 32, "heads": 2, "context": 16, "vocabulary": 280}
    return gpt2.Preset(**{**fields, **given})


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(gpt2.PRESETS, "small", tiny())
    monkeypatch.setattr(gpt2, "OWN_BYTES", 20_000)


@pytest.fixture
def files(tmp_path):
    """The same rows in each format that keeps rows apart."""
    rows = datasets.Dataset.from_dict({"text": TEXTS, "other": list(range(len(TEXTS)))})
    rows.to_json(tmp_path / "rows.jsonl")
    rows.to_parquet(tmp_path / "rows.parquet")
    with datasets.arrow_writer.ArrowWriter(path=str(tmp_path / "rows.arrow"), features=rows.features) as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()
    return {kind: tmp_path / f"rows.{kind}" for kind in ("jsonl", "parquet", "arrow")}


def test_the_presets_are_the_papers():
    paper = vars(script("gpt2").PRESETS["paper"])
    assert {name: paper[name] for name in ("layers", "width", "heads", "context", "vocabulary")} == {
        "layers": 12,
        "width": 768,
        "heads": 12,
        "context": 1024,
        "vocabulary": 50257,
    }
    assert (paper["global_batch"], paper["steps"], paper["lr"]) == (512, 300_000, 1.5e-4)
    with torch.device("meta"):
        model = gpt2.make_model(gpt2.PRESETS["paper"], 50257, None)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808  # openai-community/gpt2


def test_the_rate_rises_and_falls_as_the_paper_says():
    at, warmup = gpt2.factor(gpt2.PRESETS["paper"], 300_000)
    assert warmup == 3000
    assert at(0) == pytest.approx(1 / 3000)
    assert at(2999) == at(3000) == 1.0
    assert at(151_500) == pytest.approx((1 + 1 / 15) / 2)
    assert 1.5e-4 * at(300_000) == pytest.approx(1e-5)


def test_every_format_gives_the_same_windows(files):
    found = []
    for file in files.values():
        trained, validation, *_ = gpt2.prepare(gpt2.arguments(["--data", str(file)]), tiny())
        found.append((trained.digest, validation.digest, len(trained)))
    assert len(set(found)) == 1
    assert found[0][2] > 10


def test_a_text_is_written_back_as_it_was(tmp_path):
    text = "one line\n\n  another\twith \u00e9t\u00e9 \u4e2d\n" * 30
    (tmp_path / "one.txt").write_text(text)
    rows, apart = gpt2.read([tmp_path / "one.txt"], "text", stream=False)
    tokenizer = gpt2.taught(rows, 300)
    tokens, num_bytes = gpt2.packed(rows, gpt2.Encoding(tokenizer, apart))
    assert tokenizer.decode(tokens.tolist()) == text
    assert num_bytes == len(text.encode())


def test_rows_are_apart_and_windows_overlap_by_the_token_that_is_predicted(files):
    rows, apart = gpt2.read([files["jsonl"]], "text", stream=False)
    tokenizer = gpt2.taught(rows, 280)
    tokens, _ = gpt2.packed(rows, gpt2.Encoding(tokenizer, apart))
    assert (tokens == tokenizer.token_to_id(gpt2.END)).sum() == len(TEXTS)
    windows = gpt2.Windows(tokens, 16)
    joined = torch.cat([windows[i][0] for i in range(len(windows))])
    assert torch.equal(joined, tokens[: len(joined)].long())
    assert torch.equal(torch.cat([windows[i][1] for i in range(len(windows))]), tokens[1 : len(joined) + 1].long())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_stream_gives_the_windows_of_all_and_goes_on_at_the_very_next(files, kind):
    def fed():
        rows, apart = gpt2.read([files[kind]], "text", stream=True)
        return feed_of(
            gpt2.Stream(rows.skip(3), gpt2.Encoding(tokenizer, apart), 16),
            3,
            steps=None,
            epochs=2,
            shuffle=False,
            seed=0,
            loader={},
        )

    def given(feed, start):
        return [(share.step, share.batch[0].tolist()) for share in feed.shares(start, 0, 1)]

    rows, apart = gpt2.read([files[kind]], "text", stream=False)
    tokenizer = gpt2.taught(rows, 280)
    windows = gpt2.Windows(gpt2.packed(rows.skip(3), gpt2.Encoding(tokenizer, apart))[0], 16)
    whole = given(fed(), 1)
    epoch = [windows[i][0].tolist() for i in range(len(windows))]
    assert [window for _, batch in whole for window in batch] == epoch * 2
    for stop in (1, 2, len(whole) // 2, len(whole) // 2 + 2, len(whole) - 1):
        first = fed()
        for share in first.shares(1, 0, 1):
            if share.step == stop:
                break
        second = fed()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert given(second, stop + 1) == whole[stop:]


def test_strided_perplexity_counts_each_token_once_with_its_context():
    """A model that knows the last token only by those before it: its loss is written out for each position."""

    class Seen(torch.nn.Module):
        """Says the next token with a certainty that grows with what is before it."""

        def forward(self, inputs):
            logits = torch.zeros(*inputs.shape, 7)
            for t in range(inputs.shape[1]):
                logits[:, t, 0] = t
            return type("Out", (), {"logits": logits})()

    def nats(before):
        return math.log(6 + math.exp(before - 1)) - (before - 1)

    tokens = torch.zeros(41, dtype=torch.int64)
    expected = [nats(n) for n in range(1, 17)]  # the first window
    expected += [nats(n) for n in [*range(9, 17)] * 3]  # half a window each: 24 tokens
    assert len(expected) == 40
    found = gpt2.strided_loss(Seen(), tokens, 16, "cpu")
    assert found == pytest.approx(sum(expected) / 40)
    by_windows = gpt2.strided_loss(Seen(), tokens, 16, "cpu", stride=16)
    assert by_windows == pytest.approx(sum([nats(n) for n in range(1, 17)] * 2 + [nats(n) for n in range(1, 9)]) / 40)


def test_weights_of_a_file_are_taken_and_those_of_another_model_refused(tmp_path):
    model = gpt2.make_model(tiny(), 280, None)
    model.save_pretrained(tmp_path)
    taken = gpt2.make_model(tiny(), 280, tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), taken.parameters(), strict=True))
    of_openai = {name.removeprefix("transformer."): value for name, value in model.transformer.state_dict().items()}
    save_file(of_openai, tmp_path / "openai.safetensors")
    taken = gpt2.make_model(tiny(), 280, tmp_path / "openai.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), taken.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"--weights .*: is not of this preset's GPT-2"):
        gpt2.make_model(tiny(width=64), 280, tmp_path / "model.safetensors")


@pytest.mark.parametrize("option", ["--weights", "--tokenizer"])
def test_files_that_are_not_there_are_said_and_a_folder_has_the_one_that_was_saved(tmp_path, capsys, option):
    with pytest.raises(SystemExit):
        gpt2.arguments([option, str(tmp_path)])
    assert f"{tmp_path}: there is no such file" in capsys.readouterr().err
    (tmp_path / "model.safetensors").touch()
    assert gpt2.arguments(["--weights", str(tmp_path)]).weights == tmp_path / "model.safetensors"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--data", "{}/none.jsonl"], "there is no such file"),
        (["--data", "{}/rows.jsonl", "{}/rows.parquet"], "give files of one kind"),
        (["--data", "{}/rows.pdf"], "give files whose ending is one of .txt"),
        (["--data", "{}/rows.jsonl", "--column", "body"], "--column body: .*has text, other"),
        (["--data", "{}/rows.jsonl", "--column", "other"], "--column other: .*has int64 there"),
        (["--data", "{}/empty.jsonl"], "empty.jsonl: there is no row in it"),
        (["--data", "{}/empty.txt"], "empty.txt: "),
        (["--data", "{}/torn.jsonl"], "torn.jsonl: cannot be read: "),
        (["--data", "{}/latin.txt"], "latin.txt: cannot be read: .*utf-8"),
        (["--data", "{}/rows.jsonl", "--stream-above", "1"], "--held-out-rows 1000: no text is left"),
        (["--data", "{}/rows.jsonl", "--stream-above", "1", "--held-out", "{}/short.txt"], "the text to evaluate has"),
        (["--data", "{}/short.txt"], "the text to train on has 0 tokens|tokens, a window 17"),
    ],
)
def test_what_cannot_be_read_is_said(files, tmp_path, words, error):
    (tmp_path / "short.txt").write_text("a")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "torn.jsonl").write_text('{"text": "a"}\n{"te')
    (tmp_path / "latin.txt").write_bytes(b"na\xefve \xff" * 99)
    given = gpt2.arguments([word.format(tmp_path) for word in words])
    with pytest.raises(ValueError, match=error):
        gpt2.prepare(given, tiny())


def run(folder, *words):
    """The script, in this process; what it writes."""
    gpt2.main([*SMALL, "--out", str(folder / "out.json"), *map(str, words)])
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
def test_accumulated_and_checkpointed_it_computes_the_same(tmp_path):
    plain = run(tmp_path, "--optimizer", "adam")
    parts = run(tmp_path, "--optimizer", "adam", "--micro", 2, "--checkpointing")
    assert parts["score"] == pytest.approx(plain["score"], rel=1e-4)
    assert plain["unit"] == "perplexity of a token"
    assert 100 < plain["score"] < 280  # of 280 tokens, after four steps
    in_bf16 = run(tmp_path, "--optimizer", "adam", "--bf16")
    assert in_bf16["score"] == pytest.approx(plain["score"], rel=2e-2)
    assert in_bf16["score"] != plain["score"]


def test_a_run_that_is_resumed_equals_one_that_went_on(tmp_path, monkeypatch):
    """Dropout, the shuffled windows and the rates included."""
    monkeypatch.setitem(gpt2.PRESETS, "small", tiny(dropout=0.2))
    whole = run(tmp_path, "--folder", tmp_path / "whole")
    made = gpt2.loss_of
    calls = []

    def broken(*given):
        calls.append(given)
        if len(calls) == 5 + 1:  # the first evaluation, then steps
            raise KeyboardInterrupt
        return made(*given)

    monkeypatch.setattr(gpt2, "loss_of", broken)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--folder", tmp_path / "parts")
    monkeypatch.setattr(gpt2, "loss_of", lambda *given: calls.append(given) or made(*given))
    calls.clear()
    resumed = run(tmp_path, "--folder", tmp_path / "parts")
    assert len(calls) < 5  # fewer steps than the whole has, and the evaluations at the end
    assert resumed["score"] == whole["score"]
    assert resumed["other"] == whole["other"]


@parametrize("name", OPTIMIZERS, usual=[2])
def test_every_optimizer_trains_it(tmp_path, name):
    assert math.isfinite(run(tmp_path, "--optimizer", name, "--steps", 8)["score"])
