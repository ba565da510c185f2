"""`thinwire what-if`: its table, its JSON, its picture, and what it refuses."""

import json
import xml.etree.ElementTree as ET

import pytest

from thinwire.cli.main import main

ASKED = ["--nodes", "8", "--gpus", "4", "--rate", "4.1gbit", "--model", "bert-large", "--batch", "16"]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["what-if", *map(str, arguments)])
    told = capsys.readouterr()
    return ended.value.code, told.out, " ".join(told.err.replace("│", " ").split())


def test_the_table_and_the_picture(capsys, tmp_path):
    file = tmp_path / "run.svg"
    code, out, _ = run(capsys, *ASKED, "--price", "2", "--picture", file)
    assert code == 0
    assert "BERT-Large: 336.2 M values, 152000 steps of 512 samples, 8 machines of 4 x V100" in out
    for title in ("dense bf16", "1-bit Adam", "0/1 Adam", "1-bit Muon", "local steps"):
        assert f"\n{title} " in out
    root = ET.fromstring(file.read_text())
    assert root.tag.endswith("svg")
    assert len([one for one in root.iter() if one.tag.endswith("line")]) == 7


def test_json_has_speedup_by_method_and_the_same_words_give_the_same_json(capsys):
    disturbed = ["--stragglers", "0.01:2", "--mtbf", "30d", "--jitter", "0.05", "--seed", "3", "--json"]
    code, out, _ = run(capsys, *ASKED, "--accumulate", "2", *disturbed)
    assert (code, out) == run(capsys, *ASKED, "--accumulate", "2", *disturbed)[:2]
    found = json.loads(out)
    assert found["speedup"]["dense_bf16"] == 1
    assert found["speedup"]["onebit_adam"] == found["methods"]["onebit_adam"]["speedup"] > 2
    assert found["global_batch"] == 8 * 4 * 16 * 2


def test_a_model_by_no_name(capsys):
    own = ["--nodes", "2", "--rate", "1gbit", "--nominal", "--values", "1.3b", "--json", "--methods", "dense_bf16"]
    by_flops = json.loads(run(capsys, *own, "--flops", "2.4e11")[1])
    measured = json.loads(run(capsys, *own, "--compute", "90ms")[1])
    assert by_flops["values"] == measured["values"] == 1_300_000_000
    assert measured["compute_s"] == pytest.approx(0.09)
    assert measured["bytes_per_s"] == pytest.approx(0.957e9 / 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "bert"], "must be one of bert-base, bert-large"),
        ([], "no model: name one"),
        (["--values", "many"], "'many' is not a number: 350m"),
        (["--model", "gpt2", "--rate", "1"], "'1' is not a rate with its unit"),
        (["--model", "gpt2", "--compute", "90"], "'90' is not a time with its unit"),
        (["--model", "gpt2", "--stragglers", "0.1"], "is not CHANCE:TIMES"),
        (["--model", "gpt2", "--jitter", "nan"], "jitter = nan"),
        (["--model", "gpt2", "--mtbf", "0s"], "node_mtbf_s = 0.0: must be 1 s or more"),
        (["--model", "gpt2", "--picture", "/no/such/folder/a.svg"], "No such file or directory"),
    ],
)
def test_what_cannot_be_is_told(capsys, arguments, words):
    code, _, told = run(capsys, "--nodes", "4", "--rate", "1gbit", *arguments)
    assert code == 2
    assert words in told
