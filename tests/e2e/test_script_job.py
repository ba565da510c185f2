"""A script of one's own through the front door: `thinwire submit train.py`, a real Ray, and what comes of it."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import wait_for
from tests.e2e.test_first_job import pids, regroups

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from pathlib import Path

import torch

from thinwire.optim import Adam
from thinwire.train import session

import beside

with session() as run:
    model = torch.nn.Linear(2, 1)
    optimizer = Adam(model.parameters(), lr=1e-2, group=run.group)
    run.register(model=model, optimizer=optimizer)
    for x in run.batches([torch.ones(2)] * 90, global_batch=4, steps=int(sys.argv[1])):
        beside.look(run.step_number)
        run.step(model(x).square().mean())
    print("the script ends in", Path.cwd().name, beside.WORDS)
"""
GOES_WELL = "from pathlib import Path\nWORDS = Path('words.txt').read_text()\ndef look(step): pass\n"
BAD = {
    "raises in mid-step": (
        "def look(step):\n    if step == 3:\n        raise KeyError('of mine')\n",
        ["KeyError (step 3): 'of mine'", "train.py", "in look"],
    ),
    "raises at import": ("1 / 0\n", ["ZeroDivisionError: division by zero", "train.py", "import beside"]),
    "needs what is not there": ("import nothing_of_that_name\n", ["nothing_of_that_name", "recipe.pip"]),
    "exits early": (
        "import sys\ndef look(step):\n    if step == 3:\n        sys.exit(0)\n",
        ["called sys.exit(0) after step 3 of 5"],
    ),
}


def submit(server, folder, *arguments, code=GOES_WELL, workers=("--workers", "2")):
    """`thinwire submit`, of a folder with the script; the job's ID."""
    folder.mkdir(exist_ok=True)
    (folder / "words.txt").write_text("with its words")
    (folder / "beside.py").write_text(code)
    if not (folder / "train.py").exists():
        (folder / "train.py").write_text(SCRIPT)
    return thinwire(server, "submit", str(folder / "train.py"), *workers, "--", *arguments).strip()


def thinwire(server, *command):
    """What a command prints."""
    environment = {**os.environ, "THINWIRE_HOME": str(server.home), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "thinwire.cli.main", *command], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_folder_with_a_script_is_packed_sent_and_trained_by_two_workers(server, tmp_path):
    job = server.wait_for_end(submit(server, tmp_path / "mine", "40"))
    assert job["state"] == "SUCCEEDED", job["reason"]
    summary = job["summary"]
    assert (summary["steps"], summary["world_size"], summary["replicas_bit_equal"]) == (40, 2, True)
    history = server.history(job["id"])
    assert [sample["step"] for sample in history["samples"]] == list(range(41))
    assert history["samples"][-1]["loss"] < history["samples"][1]["loss"]
    told = re.findall(r"the script ends in _ray_pkg_[0-9a-f]{64} with its words", server.logs(job["id"]))
    assert len(told) == 2


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD)
def test_a_job_fails_with_the_words_of_its_script(server, tmp_path, what):
    code, told = BAD[what]
    job = server.wait_for_end(submit(server, tmp_path / "mine", "5", code=code))
    assert job["state"] == "FAILED"
    assert all(words in job["reason"] for words in told), job["reason"]
    assert job["reason"].index(told[0]) < 40
    assert "runpy" not in job["reason"]
    assert "ray" not in job["reason"].lower()
    assert job["attempt"] == 1


@pytest.mark.slow
def test_a_script_goes_on_through_a_kill_and_a_resize_and_its_weights_can_be_fetched(server, tmp_path):
    folder = tmp_path / "gpt"
    folder.mkdir()
    shutil.copy(ROOT / "examples" / "nanogpt.py", folder / "train.py")
    shutil.copy(ROOT / "tests" / "data" / "tinyshakespeare.txt", folder)
    given = ("--text", "tinyshakespeare.txt", "--steps", "100000")
    job_id = submit(server, folder, *given, workers=("--min", "1", "--max", "2"))
    wait_for("2 workers", lambda: server.job(job_id)["world_size"] == 2)
    server.wait_for_step(job_id, server.job(job_id)["progress"]["step"] + 20)
    first = pids(server, job_id, 0)
    os.kill(pids(server, job_id, 1)[0], signal.SIGKILL)
    wait_for("a replacement", lambda: len(pids(server, job_id, 1)) == 2)
    wait_for("2 workers", lambda: server.job(job_id)["world_size"] == 2)
    for most in (3, 2):
        server.call("PATCH", f"/v1/jobs/{job_id}", json={"workers": {"min": 1, "max": most}})
        wait_for(f"{most} workers", lambda most=most: server.job(job_id)["world_size"] == most)
    step = server.job(job_id)["progress"]["step"]
    server.wait_for_step(job_id, step + 20)
    assert pids(server, job_id, 0) == first
    told = regroups(server, job_id)
    assert told[-1]["world_size"] == 2
    assert 3 in [fields["world_size"] for fields in told]
    assert all(fields["redone"] == 0 for fields in told)
    server.call("POST", f"/v1/jobs/{job_id}/cancel")
    assert server.wait_for_end(job_id)["attempt"] == 1
    history = server.history(job_id)
    assert [event for event in history["events"] if event["kind"] == "resumed"] == []
    steps = [sample["step"] for sample in history["samples"]]
    assert steps == list(range(len(steps)))
    assert "tokens.weight" in thinwire_weights(server, job_id, tmp_path / "weights")


@pytest.mark.slow
def test_a_loop_of_its_own_starts_again_on_all_workers_when_one_is_killed(server, tmp_path):
    own = ROOT / "tests" / "workers" / "session" / "scripts"
    recipe = {"name": "script", "entry": "own_loop.py", "working_dir": str(own), "args": [str(tmp_path), "40"]}
    (tmp_path / "allowed").write_text("17")
    spec = {"name": "own", "recipe": recipe, "workers": {"min": 2, "max": 2, "elastic": "restart"}}
    job_id = server.call("POST", "/v1/jobs", json=spec).json()["id"]
    server.wait_for_step(job_id, 15)
    os.kill(pids(server, job_id, 1)[0], signal.SIGKILL)
    (tmp_path / "allowed").write_text("40")
    job = server.wait_for_end(job_id)
    assert (job["state"], job["attempt"]) == ("SUCCEEDED", 1), job["reason"]
    assert (job["summary"]["steps"], job["summary"]["replicas_bit_equal"]) == (40, True)
    made = [int(line) for line in (tmp_path / "steps-0").read_text().split()]
    assert made[-25:] == list(range(16, 41))  # from the script's own checkpoint after step 15
    assert len(pids(server, job_id, 0)) == 2


def thinwire_weights(server, job_id, to):
    """The names of what `thinwire fetch` writes."""
    from safetensors import safe_open

    path = thinwire(server, "fetch", job_id, "--to", str(to)).strip()
    with safe_open(path, "pt") as weights:
        return set(weights.keys())
