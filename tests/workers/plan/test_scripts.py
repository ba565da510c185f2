"""Scripts of the user's own are rehearsed: each runs until enough is known of it, in processes that end with that."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.workers.plan.rehearsed import rehearsed
from thinwire.contract.plan import Link, PlanFailed, PlanRequest
from thinwire.contract.spec import read_spec
from thinwire.workers.plan import scripts
from thinwire.workers.plan.asked import ASSUMED_STEPS
from thinwire.workers.plan.run import run
from thinwire.workers.plan.schedule import RunSteps
from thinwire.workers.plan.scripts import Learned, OfShapes, dry_steps, slowest_of, with_script

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
GIGABIT = Link(1e-4, 1.2e8, "given")
ENDLESS = """
import itertools, os, sys, torch
from thinwire.optim import OneBitAdam
from thinwire.train import session

open("pid-" + sys.argv[1] + "-" + str(os.getpid()), "w").close()
assert "RANK" not in os.environ and os.environ["COLOUR"] == "blue"
with session("kept", save_every=1) as run:
    model = torch.nn.Linear(64, 64)
    optimizer = OneBitAdam(model.parameters(), lr=1e-3, betas=(0.8, 0.95), group=run.group, warmup=11, overlap=True)
    run.register(model=model, optimizer=optimizer)
    run.evaluate_every(1, lambda: 1 / 0)
    for at in itertools.count():
        for x in run.batches([torch.ones(64)] * 50, global_batch=6, epochs=2):
            run.step(model(x).mean())
            print("a step", flush=True)
            run.save()
"""


def spec_of(folder, text=None, *args, **changes):
    if text is not None:
        (folder / "train.py").write_text(text)
    recipe = {"name": "script", "entry": "train.py", "working_dir": str(folder), "args": args, **changes}
    return read_spec({"name": "mine", "recipe": recipe, "workers": {"max": 2, "device": "cpu"}})


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_script_makes_a_few_steps_keeps_nothing_and_its_processes_are_gone(tmp_path, monkeypatch):
    """Two beside one another, as two workers that share a machine; one of torchrun's ranks may have started them."""
    monkeypatch.setenv("RANK", "1")
    spec, met = spec_of(tmp_path, ENDLESS, "mine", env_vars={"COLOUR": "blue"}), []
    found = dry_steps(spec, 2, 2, 3, ["cpu", "cpu"], lambda: met.append(True))
    assert met == [True]
    assert found.shapes == [[[64, 64], "float32"], [[64], "float32"]]
    assert (found.timed, found.global_batch, found.knows_length, found.overlap) == (3, 6, True, True)
    run = RunSteps(17, "onebit_adam", beta2=0.95, warmup=11, full_exchange="fp32")
    assert found.run == asdict(run)
    assert found.forward_s > 0
    assert found.backward_s > 0
    pids = [int(path.name.split("-")[2]) for path in tmp_path.glob("pid-mine-*")]
    assert len(pids) == 2
    assert all(map(gone, pids))
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"train.py", "pid"}


BAD = {
    "raises": (
        "def deeper():\n    1 / 0\n\ndeeper()\n",
        ['File "train.py", line 4', 'File "train.py", line 2, in deeper', "ZeroDivisionError: division by zero"],
    ),
    "arguments": (
        "import argparse\nargparse.ArgumentParser(prog='train.py').parse_args()\n",
        ["sys.exit(2) before its session", "train.py: error: unrecognized arguments: mine"],
    ),
    "dies": ("import os\nprint('so long', flush=True)\nos._exit(7)\n", ["exit code 7", "so long"]),
}


@pytest.mark.parametrize(
    "bad", ["raises", *(pytest.param(one, marks=pytest.mark.slow) for one in BAD if one != "raises")]
)
def test_what_cannot_be_rehearsed_says_why_the_scripts_own_words_first(tmp_path, bad):
    text, words = BAD[bad]
    with pytest.raises(PlanFailed) as told:
        dry_steps(spec_of(tmp_path, text, "mine"), 2, 1, 1, ["cpu"])
    places = [str(told.value).index(word) for word in words]
    assert places == sorted(places)
    assert "thinwire/" not in str(told.value)


@pytest.mark.slow
def test_one_of_several_that_ends_without_a_word_is_not_waited_for(tmp_path):
    """The second one ends well while the first is awaited."""
    text = ENDLESS.replace("assert ", "time.sleep(0.1)\nif len(os.listdir()) > 2: os._exit(0)\nassert ", 1)
    spec = spec_of(tmp_path, "import time\n" + text, "mine", env_vars={"COLOUR": "blue"})
    with pytest.raises(PlanFailed, match=r"ended \(exit code 0\)"):
        dry_steps(spec, 2, 2, 1, ["cpu", "cpu"])


def test_a_script_that_never_draws_is_given_up_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(scripts, "LIMIT_S", 0.5)
    text = "import os, time\nopen(f'pid-{os.getpid()}', 'w').close()\nwhile True:\n    time.sleep(1)\n"
    with pytest.raises(PlanFailed, match="not drawn its first batch"):
        dry_steps(spec_of(tmp_path, text), 2, 1, 1, ["cpu"])
    assert all(gone(int(path.name.split("-")[1])) for path in tmp_path.glob("pid-*"))


SHAPES = [[[3, 4], "float32"], [[5], "bfloat16"]]
LEARNED = Learned(SHAPES, 0.3, 0.6, 5, 8, asdict(RunSteps(ASSUMED_STEPS, "adam")), False, False)


def test_what_is_rehearsed_has_the_parameters_of_the_script_and_a_gradient_for_each():
    dry = OfShapes(LEARNED.shapes, LEARNED.global_batch)
    model = dry.model()
    dry.loss(model, None).backward()
    assert [(tuple(p.shape), p.dtype) for p in model.parameters()] == [((3, 4), torch.float32), ((5,), torch.bfloat16)]
    assert all(bool((p.grad == 1).all()) for p in model.parameters())


def test_the_scripts_forward_and_backward_take_the_place_of_the_dry_models():
    before = rehearsed(forward_s=0.01, backward_s=0.02)
    found = with_script(before, LEARNED)
    assert (found.forward_s, found.backward_s, found.update_s) == (0.3, 0.6, before.update_s)
    assert found.busy["onebit_adam"].full == pytest.approx(before.busy["onebit_adam"].full + 0.87)
    assert found.busy["onebit_adam"].local == 0
    assert found.busy["zero_one_adam"].local == pytest.approx(before.busy["zero_one_adam"].local + 0.87)


def test_what_a_script_does_not_tell_is_assumed_and_said(tmp_path):
    job = LEARNED.as_job(spec_of(tmp_path))
    assert (job.run.steps, job.global_batch, job.run.method) == (ASSUMED_STEPS, 8, "adam")
    assert any(str(ASSUMED_STEPS) in one for one in LEARNED.assumed())
    slower = replace(LEARNED, backward_s=0.7, run=asdict(RunSteps(70, "adam")), knows_length=True)
    assert slowest_of([LEARNED, slower]).backward_s == 0.7
    assert slower.as_job(spec_of(tmp_path)).run.steps == 70
    assert not any(str(ASSUMED_STEPS) in one for one in slower.assumed())


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["nanogpt.py", "images.py", "accelerate_loop.py", "transformers_trainer.py", "lightning_session.py"]
)
def test_the_examples_are_planned_from_the_script_to_the_verdict(script, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    spec = spec_of(EXAMPLES, entry=script)
    found = run(PlanRequest(spec, GIGABIT, workers=2, steps=1), lambda *_: None)
    assert found.workers == 2
    assert found.elements > 1000
    assert found.forward_s > 0
    assert found.backward_s > 0
    assert found.steps in (80, 120, 147, 300)
    assert found.verdict
