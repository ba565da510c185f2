"""However a script ends, its job says what the script did: its own words first, then its own lines."""

import os
import time

import pytest
import torch

from tests.workers.small_job import Recording
from thinwire.comm import SoloGroup
from thinwire.contract.spec import read_spec
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.job import failure_of_script, run_job
from thinwire.workers.session.training import Run

HEAD = """
import os, sys, torch
from thinwire.optim import Adam
from thinwire.train import session

def step(x):
    {step}

with session() as run:
    model = torch.nn.Linear(2, 1)
    optimizer = Adam(model.parameters(), group=run.group)
    run.register(model=model, optimizer=optimizer)
    for x in {data}:
        step(x)
        run.step(model(x).mean())
{after}
"""
BATCHES = "run.batches([torch.ones(2)] * 9, global_batch=2, steps=3)"


def script(step="pass", data=BATCHES, after=""):
    return HEAD.format(step=step, data=data, after=after)


def run(tmp_path, text, **recipe):
    """The failure; None where it succeeded."""
    (tmp_path / "train.py").write_text(text)
    given = {"name": "script", "entry": "train.py", "working_dir": str(tmp_path), **recipe}
    spec = read_spec({"recipe": given})
    run_dir = tmp_path / "run"
    ranks = FixedRanks(SoloGroup())
    place = os.getcwd()
    try:
        summary = run_job(spec, Run(run_dir, time.time()), ranks, torch.device("cpu"), Recording(run_dir))
        assert summary.steps == 3
        return None
    except BaseException as error:  # noqa: BLE001 - told to the test
        return failure_of_script(error, spec.recipe, ranks.step)
    finally:
        assert os.getcwd() == place


FORK = """
    pid = os.fork()
    if not pid:
        try:
            run.report(loss=1.0)
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
BAD = {
    "raises at import": ("\n1 / 0\n", "ZeroDivisionError", ["division by zero", "train.py", "1 / 0"]),
    "is no Python": ("for\n", "SyntaxError", ["train.py", "invalid syntax"]),
    "needs what is not there": (
        "import nothing_of_that_name\n",
        "ModuleNotFoundError",
        ["nothing_of_that_name", "recipe.pip"],
    ),
    "raises in mid-step": (script("raise KeyError('mine')"), "KeyError", ["mine", "train.py", "in step"]),
    "raises after the last step": (script(after="raise OSError('late')"), "OSError", ["late", "train.py"]),
    "exits early": (script("sys.exit(0)"), "ScriptError", ["called sys.exit(0) after step 0 of 3"]),
    "refuses its arguments": (
        "import argparse\nargparse.ArgumentParser(prog='train.py').parse_args(['--lr', '1'])",
        "ScriptError",
        ["called sys.exit(2) before its session began", "train.py: error: unrecognized arguments: --lr 1"],
    ),
    "exits with a status": (script(after="sys.exit(3)"), "ScriptError", ["called sys.exit(3) after step 3 of 3"]),
    "never draws": (script(data="[]"), "ScriptError", ["came to its end and never drew a batch"]),
    "has no session": ("print(1)\n", "ScriptError", ["without a session"]),
    "has two sessions": (
        "from thinwire.train import session\nsession()\nsession()\n",
        "ScriptError",
        ["session() for a second time"],
    ),
    "raises what has no words": (
        "class Mute(Exception):\n    def __str__(self):\n        return 1 / 0\n" + script("raise Mute"),
        "Mute",
        ["its __str__ raises ZeroDivisionError", "train.py", "in step"],
    ),
    "names a file that is no UTF-8": (
        script("raise OSError('data\\udce9\\0')"),
        "OSError",
        ["data\\udce9\\0\n", "in step"],
    ),
    "says very much": (
        script("raise ValueError('x' * 99_999)"),
        "ValueError",
        ["xxx", "xx... (99999 characters", "in step"],
    ),
    "has a long name": (f"class {'E' * 99}(Exception): pass\n" + script(f"raise {'E' * 99}"), "E" * 64, ["in step"]),
    "raises in a process of the loader": (
        "class Data:\n    __len__ = lambda self: 9\n    def __getitem__(self, i):\n        raise OSError('mine')\n"
        + script(data="run.batches(Data(), global_batch=2, loader=dict(num_workers=1))"),
        "OSError",
        ["Caught OSError", 'File "train.py", line 4, in __getitem__'],
    ),
    "draws from an empty list": (script(data="run.batches([], global_batch=2)"), "ValueError", ["no samples"]),
}


@pytest.mark.parametrize("what", BAD)
def test_the_failure_says_what_the_script_did(tmp_path, what):
    text, kind, told = BAD[what]
    failure = run(tmp_path, text)
    assert failure is not None
    assert failure.kind == kind
    assert all(words in failure.message for words in told), failure.message
    assert "runpy" not in failure.message
    assert str(tmp_path) not in failure.message  # but as seen from the folder
    assert failure.message.index(told[0]) < 200


@pytest.mark.parametrize("entry", ["script.py", "worker.py", "own/session.py", "runpy.py"])
def test_a_script_of_any_name_sees_its_own_lines_and_none_of_ours(tmp_path, entry):
    (tmp_path / entry).parent.mkdir(exist_ok=True)
    (tmp_path / entry).write_text(script("raise KeyError('mine')"))
    failure = run(tmp_path, "", entry=entry)
    assert failure.message.splitlines()[1].strip().startswith(f'File "{entry}", line')


@pytest.mark.parametrize("text", [script(FORK), script(after="sys.exit(0)")], ids=["forks", "exits at its end"])
def test_these_end_well(tmp_path, text):
    assert run(tmp_path, text) is None


def test_arguments_folder_and_secrets_are_those_of_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("ON_THIS_BOX", "hidden")
    (tmp_path / "helper.py").write_text("VALUE = 5\n")
    (tmp_path / "key").write_text("also hidden\n")
    check = (
        "import sys, os, helper\n"
        "assert sys.argv[1:] == ['--a', 'b'] and os.getcwd() == os.path.dirname(__file__), sys.argv\n"
        "assert (os.environ['ONE'], os.environ['TWO'], helper.VALUE) == ('hidden', 'also hidden', 5)\n"
        "assert __name__ == '__main__'\n"
    )
    monkeypatch.setenv("ONE", "")
    monkeypatch.setenv("TWO", "")
    secrets = {"ONE": {"env": "ON_THIS_BOX"}, "TWO": {"file": str(tmp_path / "key")}}
    assert run(tmp_path, check + script(), args=["--a", "b"], secrets=secrets) is None
    failure = run(tmp_path, script(), secrets={"ONE": {"env": "NOWHERE"}})
    assert failure.message.startswith("recipe.secrets.ONE: the environment of Ray on this box has no NOWHERE")


@pytest.mark.parametrize(
    "end", ["raise OSError(f'401: https://host?t={os.environ[\"ONE\"]}')", "sys.exit(os.environ['ONE'])"]
)
def test_a_failure_does_not_tell_the_value_of_a_secret(tmp_path, monkeypatch, end):
    monkeypatch.setenv("ON_THIS_BOX", "hidden-from-all")
    monkeypatch.setenv("ONE", "")
    failure = run(tmp_path, f"import os, sys\n{end}\n", secrets={"ONE": {"env": "ON_THIS_BOX"}})
    assert "hidden" not in failure.message
    assert "*** (the secret ONE)" in failure.message


def test_a_file_that_is_not_there_is_named(tmp_path):
    failure = run(tmp_path, script(), entry="other.py")
    assert failure.message.startswith("recipe.entry = 'other.py' is no file below")
