"""BERT's scripts: metrics as published, formats of files, samples and streams that go on, the papers' schedules."""

import importlib.util
import json
import random
import re
from argparse import Namespace
from itertools import islice

import pytest
import torch

from tests.conftest import missing
from tests.integrations.papers.script import script
from thinwire.comm import SoloGroup

ONE = Namespace(group=SoloGroup(), world_size=1, rank=0, step_number=3)


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    """The scripts, as modules: parts, bert, squad, glue."""
    for needed in ("transformers", "datasets", "tokenizers", "sklearn"):
        if importlib.util.find_spec(needed) is None:
            missing(f"{needed} is not installed")
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        names = {"parts": "parts", "bert": "bert_pretrain", "squad": "squad", "glue": "glue"}
        yield Namespace(**{short: script(name) for short, name in names.items()})


TEXT = """To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles.

Now is the winter of our discontent
Made glorious summer by this sun of York;
And all the clouds that lour'd upon our house
In the deep bosom of the ocean buried.

Friends, Romans, countrymen, lend me your ears;
I come to bury Caesar, not to praise him.
The evil that men do lives after them;
The good is oft interred with their bones.
"""


@pytest.fixture(scope="module")
def pieces(papers):
    return papers.bert.learned_pieces(TEXT.split("\n\n"), 200)


# SQuAD ---------------------------------------------------------------------------------------------------------------


def of(*answers):
    return {"answers": {"text": list(answers), "answer_start": [0] * len(answers)}}


def test_squads_metric_is_the_published_one(papers):
    """The examples on the card of `squad` in Hugging Face's evaluate."""
    right = [of("1976"), of("Beyoncé and Bruno Mars"), of("climate change")]
    assert papers.squad.metric(["1976"], right[:1]) == {"exact_match": 100.0, "f1": 100.0}
    found = papers.squad.metric(["1976", "Beyonce", "climate change"], right)
    assert found == {"exact_match": pytest.approx(66.66666666666667), "f1": pytest.approx(66.66666666666667)}


@pytest.mark.parametrize(
    ("answer", "right", "exact", "f1"),
    [
        ("the Denver Broncos!", ["Denver  broncos"], 100, 100),  # case, articles, punctuation and spaces are no matter
        ("in 1976 for", ["1976"], 0, 50),  # one of three words, and all there are: 2 * 1/3 * 1 / (1/3 + 1)
        ("in 1976 for", ["1976", "in 1976"], 0, 80),  # the best of several answers
        ("Santa Clara, California", ["Santa Clara", "Levi's Stadium in Santa Clara"], 0, 80),
        ("", ["1976"], 0, 0),
    ],
)
def test_exact_match_and_f1_are_over_normalised_words(papers, answer, right, exact, f1):
    assert papers.squad.metric([answer], [of(*right)]) == {"exact_match": exact, "f1": pytest.approx(f1)}


CONTEXT = "Hamlet: To be, or not to be. Richard: Now is the winter of our discontent. Antony: I come to bury Caesar."


def squad_json(tmp_path, answers=("Richard",)):
    asked = {
        "id": "q1",
        "question": "Who speaks of winter?",
        "answers": [{"text": one, "answer_start": CONTEXT.index(one)} for one in answers],
    }
    article = {"title": "Plays", "paragraphs": [{"context": CONTEXT, "qas": [asked]}]}
    file = tmp_path / "train-v1.1.json"
    file.write_text(json.dumps({"version": "1.1", "data": [article]}))
    return file


def test_squads_json_and_the_hubs_rows_are_the_same_questions(papers, tmp_path):
    one = papers.squad.questions(squad_json(tmp_path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, one)))
    assert papers.squad.questions(rows) == one
    assert one[0]["answers"] == {"text": ["Richard"], "answer_start": [CONTEXT.index("Richard")]}


def test_other_files_are_refused_in_a_sentence(papers, tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        papers.squad.questions(tmp_path / "none.json")
    (tmp_path / "others.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="neither SQuAD's JSON, nor rows with answers, context, id, question"):
        papers.squad.questions(tmp_path / "others.jsonl")
    (tmp_path / "torn.json").write_text('{"data": [{"paragraphs": [{"context": "x"}]}]}')
    with pytest.raises(ValueError, match=r"torn\.json: is no JSON of SQuAD 1\.1: KeyError\('qas'\)"):
        papers.squad.questions(tmp_path / "torn.json")
    with pytest.raises(ValueError, match=r"has one question, which is held out: give --dev"):
        papers.squad.main(["--train", str(squad_json(tmp_path))])
    (tmp_path / "one.jsonl").write_text('{"sentence": "A", "label": 1}')
    with pytest.raises(ValueError, match=r"has one row, which is held out: give --dev"):
        papers.glue.main(["--task", "sst2", "--train", str(tmp_path / "one.jsonl")])
    with pytest.raises(ValueError, match=r"question q1 has no answer: .*SQuAD 1\.1"):
        papers.squad.questions(squad_json(tmp_path, answers=()))


@pytest.mark.parametrize("length", [24, 64])  # in parts that overlap, and whole
def test_the_pieces_of_the_answer_score_100(papers, pieces, tmp_path, length):
    asked = papers.squad.questions(squad_json(tmp_path))
    cut = papers.squad.features(pieces, asked, length, stride=4)
    assert (len(cut) > 1) == (length == 24)
    parts = []
    for one in cut:
        starts, ends = torch.zeros(length), torch.zeros(length)
        starts[one["start_positions"]] = ends[one["end_positions"]] = 9.0
        parts.append((one["offsets"], starts, ends))
    assert papers.squad.best_answer(asked[0]["context"], parts) == "Richard"
    has_it = [one for one in cut if one["start_positions"] > 0]
    assert has_it
    assert all(pieces.decode(one["input_ids"][one["start_positions"] : one["end_positions"] + 1]) for one in has_it)


def test_an_answer_is_not_too_long_nor_outside_of_the_text(papers):
    offsets = [None, (0, 2), (3, 5), (6, 8), None]
    starts, ends = torch.tensor([9.0, 1, 0, 0, 9]), torch.tensor([9.0, 0, 1, 5, 9])
    assert papers.squad.best_answer("ab cd ef", [(offsets, starts, ends)]) == "ab cd ef"
    assert papers.squad.best_answer("ab cd ef", [(offsets, starts, ends)], longest=1) == "ef"
    assert papers.squad.best_answer("ab cd ef", [([None] * 5, starts, ends)]) == ""


def test_the_questions_that_are_made_have_one_answer_which_is_there(papers):
    made = list(papers.squad.who_says(20, seed=1))
    assert made == list(papers.squad.who_says(20, seed=1))
    for one in made:
        (text,), (start,) = one["answers"]["text"], one["answers"]["answer_start"]
        assert one["context"][start:].startswith(f"{text}: ")


def test_a_question_that_would_leave_no_room_is_cut(papers, pieces, tmp_path):
    (asked,) = papers.squad.questions(squad_json(tmp_path))
    cut = papers.squad.features(pieces, [{**asked, "question": "to be " * 500}], 64, stride=4)
    of_question = (cut[0]["token_type_ids"] == 0) & (cut[0]["attention_mask"] == 1)
    assert of_question.sum() == 1 + 64 // 2 + 1  # [CLS], half of the length, [SEP]
    assert any(one["start_positions"] > 0 for one in cut)


def test_squads_json_with_a_byte_order_mark_is_read(papers, tmp_path):
    file = squad_json(tmp_path)
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert len(papers.squad.questions(file)) == 1
    file.write_bytes(b'{"data": "\xe9"}')
    with pytest.raises(ValueError, match=r"cannot be read: .*utf-8"):
        papers.squad.questions(file)


# GLUE ----------------------------------------------------------------------------------------------------------------


def test_glues_metrics_are_the_published_ones(papers):
    """Of 12 pictures, the example of the phi coefficient's article in Wikipedia: MCC 0.478, F1 by hand 12 / 15."""
    right = [1] * 8 + [0] * 4
    found = [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]
    tasks = papers.glue.TASKS
    assert papers.glue.metric(tasks["cola"], found, right)["matthews"] == pytest.approx(0.478, abs=5e-4)
    assert papers.glue.metric(tasks["mrpc"], found, right) == pytest.approx({"f1": 12 / 15, "accuracy": 9 / 12})
    # scikit-learn's own example of matthews_corrcoef, its -1 as 0; and a guess of one label alone
    assert papers.glue.metric(tasks["cola"], [1, 0, 1, 1], [1, 1, 1, 0])["matthews"] == pytest.approx(-1 / 3)
    assert papers.glue.metric(tasks["cola"], [1, 1], [1, 0])["matthews"] == 0
    three = papers.glue.metric(tasks["mnli"], [0, 2, 1, 1], [0, 1, 2, 1])
    assert three == {"accuracy": 0.5}
    numbers = papers.glue.metric(tasks["stsb"], [1.0, 2.0, 3.0, 4.0, 9.0], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert numbers == pytest.approx({"pearson": 18 / (10 * 38.8) ** 0.5, "spearman": 1.0})  # covariance over deviations
    assert papers.glue.metric(tasks["stsb"], [2.0, 2.0], [0.0, 1.0]) == {"pearson": 0, "spearman": 0}


def test_tsv_files_are_read_as_glue_writes_them(papers, tmp_path):
    tasks = papers.glue.TASKS
    cola = tmp_path / "cola.tsv"
    cola.write_text('gj04\t1\t\tHe said "yes" to it.\ngj04\t0\t*\tHim said to.\n')
    assert papers.glue.rows_of(cola, tasks["cola"]) == [(('He said "yes" to it.',), 1), (("Him said to.",), 0)]
    mrpc = tmp_path / "mrpc.tsv"
    mrpc.write_text('Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t"One\tTwo\n')
    assert papers.glue.rows_of(mrpc, tasks["mrpc"]) == [(('"One', "Two"), 1)]
    rte = tmp_path / "rte.tsv"
    rte.write_text("index\tsentence1\tsentence2\tlabel\n0\tA\tB\tnot_entailment\n")
    assert papers.glue.rows_of(rte, tasks["rte"]) == [(("A", "B"), 1)]
    hub = tmp_path / "stsb.jsonl"
    hub.write_text('{"sentence1": "A", "sentence2": "B", "label": 3.8}\n')
    assert papers.glue.rows_of(hub, tasks["stsb"]) == [(("A", "B"), 3.8)]


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        (
            "rte",
            {"sentence1": "A", "sentence2": "B", "label": -1},
            "the label of row 1 is -1: this task has entailment",
        ),
        ("sst2", {"sentence": "A", "label": "good"}, "the label of row 1 is 'good': this task has 0, 1"),
        ("stsb", {"sentence1": "A", "sentence2": "B", "label": "x"}, "the label of row 1 is 'x', and not a number"),
        ("sst2", {"text": "A", "label": 1}, "it has text, label, but no column sentence"),
        ("sst2", {"sentence": None, "label": 1}, r"row 1 has no text, but \(None,\)"),
    ],
)
def test_rows_of_another_task_are_refused_in_a_sentence(papers, tmp_path, task, row, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=said):
        papers.glue.rows_of(file, papers.glue.TASKS[task])


# Pre-training --------------------------------------------------------------------------------------------------------


def test_the_presets_are_the_papers(papers):
    """arXiv 2102.02888, section 7.1, arXiv 2104.06069, and the files of DeepSpeedExamples that they were run with."""
    adam, lamb = papers.bert.PRESETS["paper-adam"], papers.bert.PRESETS["paper-lamb"]
    for preset, optimizer in ((adam, "onebit_adam"), (lamb, "onebit_lamb")):
        assert (preset.optimizer, preset.width, preset.layers, preset.heads) == (optimizer, 1024, 24, 16)
        assert [phase.length for phase in preset.phases] == [128, 512]
    assert [(p.batch, p.steps, p.full) for p in adam.phases] == [(4096, 152_000, 23_000), (4096, 10_000, 1_500)]
    assert [(p.batch, p.steps, p.full) for p in lamb.phases] == [(65_536, 5_993, 1_000), (32_768, 555, 107)]
    rate = adam.phases[0].rate
    assert [rate(6_250), rate(12_500), rate(13_020)] == pytest.approx([2e-4, 4e-4, 4e-4 * 0.99])
    rate = lamb.phases[0].rate
    assert [rate(225), rate(450), rate(700)] == pytest.approx([11e-3 / 4 + 1e-3, 12e-3, 11e-3 * 0.9 + 1e-3])
    rate = lamb.phases[1].rate
    assert [rate(75), rate(150), rate(300)] == pytest.approx([2e-3 / 4, 2e-3, 2e-3 * 0.9])
    bounds = papers.parts.BERT_BOUNDS
    assert (bounds.max_coeff, bounds.min_coeff) == (0.3, 0.01)
    fine = papers.squad.PRESETS["paper"]
    assert (fine.batch, fine.lr, fine.epochs, fine.full, fine.length, fine.stride) == (96, 3e-5, 2, 400, 384, 128)


def test_bert_large_has_its_parameters(papers):
    config = papers.bert.config_of(papers.bert.PRESETS["paper-adam"], 30522)
    with torch.device("meta"):
        model = papers.bert.BertForPreTraining(config)
    assert sum(p.numel() for p in model.bert.parameters()) == 335_141_888  # as bert-large-uncased


def test_pieces_are_the_same_however_often_they_are_learned(papers, pieces):
    again = papers.bert.learned_pieces(iter(TEXT.split("\n\n")), 200)
    assert again.get_vocab() == pieces.get_vocab()
    assert 100 < len(pieces) <= 200
    assert pieces.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert pieces("To be")["input_ids"][0] == pieces.cls_token_id
    assert pieces.unk_token_id not in pieces(TEXT)["input_ids"]


def test_a_worker_or_a_run_with_other_pieces_is_refused(papers, pieces):
    other = papers.bert.learned_pieces(TEXT.split("\n\n"), 199)
    kept = papers.bert.SamePieces(pieces).state_dict()
    papers.bert.SamePieces(papers.bert.BertTokenizer(vocab=pieces.get_vocab())).load_state_dict(kept)
    with pytest.raises(ValueError, match=r"the pieces of this run are \w+, those that were learned here \w+: give all"):
        papers.bert.SamePieces(other).load_state_dict(kept)


def test_pairs_go_on_or_come_from_elsewhere(papers):
    """Each piece says its document, its sentence and its place, so that it can be seen where it comes from."""
    documents = [[[(d, s, i) for i in range(3 + s % 4)] for s in range(20)] for d in range(30)]
    found = list(papers.bert.pairs(documents, 32, 0.5, random.Random(1)))
    assert {d for first, _, _ in found for d, _, _ in first} == set(range(30))
    for first, second, is_random in found:
        assert 0 < len(first) + len(second) <= 29
        assert ({d for d, _, _ in first} == {d for d, _, _ in second}) != is_random
        assert not is_random or first[0][0] != second[0][0]
        if not is_random:  # in order, whatever was cut off at the ends
            assert second[0] > first[-1]
            assert second[0][1] <= first[-1][1] + 1
    assert 0.4 < sum(is_random for _, _, is_random in found) / len(found) < 0.6


def test_what_cannot_be_paired_gives_no_sample(papers):
    assert list(papers.bert.pairs([[[1, 2, 3]]], 32, 0.5, random.Random(0))) == []  # one sentence, and nothing else
    (one,) = papers.bert.pairs([[[1] * 500, [2] * 500]], 32, 0.0, random.Random(0))
    assert len(one[0]) + len(one[1]) == 29


FORMATS = ("txt", "jsonl", "parquet", "arrow")


def written(folder, kind):
    from datasets import Dataset

    rows = Dataset.from_dict({"text": TEXT.rstrip("\n").split("\n\n") * 4})
    file = folder / f"texts.{kind}"
    if kind == "txt":
        file.write_text("\n\n".join(rows["text"]) + "\n")
    elif kind == "jsonl":
        rows.to_json(file)
    elif kind == "parquet":
        rows.to_parquet(file)
    else:
        rows.save_to_disk(folder / "saved")
        (folder / "saved" / "data-00000-of-00001.arrow").rename(file)
    return str(file)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stream", [False, True])
def test_every_format_gives_the_same_samples_streamed_or_not(papers, pieces, tmp_path, kind, stream):
    from datasets import Dataset

    direct = papers.bert.in_samples(Dataset.from_dict({"text": TEXT.split("\n\n") * 4}), pieces, 32, 0)
    rows = papers.bert.in_samples(papers.parts.documents([written(tmp_path, kind)], stream=stream), pieces, 32, 0)
    assert list(rows) == list(direct)
    assert len(direct) >= 12


def test_a_folder_of_shards_is_its_files_in_order(papers, tmp_path):
    from datasets import Dataset

    rows = Dataset.from_dict({"text": [f"row {i}" for i in range(10)]})
    rows.save_to_disk(tmp_path / "saved", num_shards=3)
    assert papers.parts.documents([tmp_path / "saved"])["text"] == rows["text"]
    assert [row["text"] for row in papers.parts.documents([tmp_path / "saved"], stream=True)] == list(rows["text"])


def test_each_sample_has_a_masked_piece_and_one_of_unknown_pieces_is_none(papers, pieces):
    from datasets import Dataset

    def samples(text):
        return papers.bert.in_samples(Dataset.from_dict({"text": [text]}), pieces, 16, 0)

    assert len(samples("\u4e2d\n\u4e2d")) == 0
    (sample,) = samples("be.\nto.")
    one = papers.bert.Masked([sample], pieces, 0)
    assert all((one.visit(0, number)["labels"] != -100).any() for number in range(50))


def test_masks_follow_from_the_samples_number(papers, pieces):
    rows = papers.bert.in_samples(papers.parts.documents(None).select(range(3)), pieces, 64, 0)
    samples = papers.bert.Masked(rows, pieces, 7)
    one, again, other = samples.visit(0, 5), samples.visit(0, 5), samples.visit(0, 6)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["labels"], other["labels"])
    chosen, special = 0, 0
    for number in range(200):
        labels = samples.visit(0, number)["labels"]
        ids = torch.tensor(rows[0]["input_ids"])
        assert torch.equal(labels[labels != -100], ids[labels != -100])
        chosen += (labels != -100).sum().item()
        special += ((labels != -100) & (ids < 4)).sum().item()
    letters = (torch.tensor(rows[0]["input_ids"]) >= 4).sum().item()
    assert special == 0
    assert chosen / (200 * letters) == pytest.approx(0.15, abs=0.02)


@pytest.mark.parametrize("at", [0, 1, 5])  # within what `datasets` makes of one batch of documents
def test_a_stream_that_goes_on_equals_one_that_went_on(papers, pieces, tmp_path, at):
    def stream():
        rows = papers.parts.documents([written(tmp_path, "jsonl")], stream=True)
        return papers.bert.MaskedStream(papers.bert.in_samples(rows, pieces, 32, 0), pieces, 0)

    whole = list(stream())
    first = stream()
    taken = list(islice(iter(first), at))
    state = json.loads(json.dumps(first.state_dict()))
    second = stream()
    second.load_state_dict(state)
    rest = list(second)
    assert len(list(second)) == len(whole)  # the next epoch
    assert len(taken) + len(rest) == len(whole)
    for one, other in zip(taken + rest, whole, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


# What they share -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["none.txt"], "none.txt: there is no such file"),
        (["a.pdf"], "a.pdf: give files whose ending is one of .txt, .json"),
        (["a.txt", "a.jsonl"], "give files of one kind, not .jsonl and .txt"),
        (["a.jsonl"], "a.jsonl has words"),
        (["empty.parquet"], "empty.parquet: there is no row in it"),
        (["folder"], "folder: there is no file in it whose ending is one of .txt, .json"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_a_sentence(papers, tmp_path, files, said):
    from datasets import Dataset

    Dataset.from_dict({"text": []}).to_parquet(tmp_path / "empty.parquet")
    (tmp_path / "folder").mkdir()
    for name in ("a.pdf", "a.txt", "folder/a.pdf"):
        (tmp_path / name).write_text("x")
    (tmp_path / "a.jsonl").write_text('{"words": "x"}\n')
    with pytest.raises(ValueError, match=re.escape(said)):
        papers.parts.documents([tmp_path / name for name in files])


def test_a_batch_in_parts_gives_the_gradient_of_the_whole(papers):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    batch = {"x": torch.randn(7, 4), "labels": torch.tensor([0, 1, -100, -100, 2, -100, 1])}

    def loss_of(part):
        return torch.nn.functional.cross_entropy(layer(part["x"]), part["labels"])

    def count(part):
        return (part["labels"] != -100).sum()

    found = []
    for micro in (None, 1, 2, 3):
        layer.zero_grad()
        loss = papers.parts.backward(loss_of, batch, Namespace(micro=micro, bf16=False), torch.device("cpu"), count)
        found.append((loss, layer.weight.grad.clone()))
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0])
        torch.testing.assert_close(gradient, found[0][1])


def test_every_optimizer_trains_bert_and_decays_neither_biases_nor_norms(papers):
    torch.manual_seed(0)
    config = papers.bert.config_of(papers.bert.Preset("adam", 16, 1, 2, 64, ()), 64)
    ids = torch.randint(5, 64, (2, 8))
    batch = {"input_ids": ids, "labels": ids, "next_sentence_label": torch.tensor([0, 1])}
    for name in ("adam", "onebit_adam", "onebit_lamb", "zero_one_adam", "onebit_muon"):
        model = papers.bert.BertForPreTraining(config)
        given = Namespace(optimizer=name)
        optimizer = papers.parts.bert_optimizer(given, model, ONE, lr=1e-2, steps=40, rise=2, warmup=4)
        plain = {p for group in optimizer.param_groups if group["weight_decay"] == 0 for p in group["params"]}
        expected = {p for n, p in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n}
        assert plain == expected
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0], name


def test_a_preset_has_the_rate_of_its_own_optimizer(papers):
    def rate(optimizer, lr=None, own="adam", times=1.0, rates=None):
        return papers.parts.rate_of(Namespace(optimizer=optimizer, lr=lr, lr_times=times), 6.0, own, rates)

    assert (rate("onebit_adam"), rate("onebit_lamb"), rate("onebit_lamb", own="onebit_lamb")) == (6, 18, 6)
    assert (rate("adam", own="onebit_lamb"), rate("onebit_lamb", lr=1.0)) == (2, 1)
    assert (rate("onebit_lamb", times=0.5), rate("adam", lr=1.0, times=2.0)) == (9, 2)
    assert (rate("sgd", rates={"sgd": 0.5}), rate("sgd", lr=1.0, rates={"sgd": 0.5})) == (0.5, 1)


def test_dropout_follows_from_the_step_and_the_rank(papers):
    drawn = []
    for step, rank in ((3, 0), (3, 0), (4, 0), (3, 1)):
        papers.parts.seed_step(Namespace(step_number=step, rank=rank), 0)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]
    assert len({tuple(one) for one in drawn}) == 3
