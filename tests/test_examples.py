"""The examples run as they stand."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed import TCPStore

from tests.comm.gloo_ranks import start
from tests.workers.small_job import run_small
from thinwire.contract.spec import ScriptSpec, TrainSpec

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        told, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun's workers too: they would live on
        process.communicate()
        raise
    assert process.returncode == 0, errors
    return told


FORKED = """
import contextlib, runpy
if size > 1:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="AT_PORT", TORCHELASTIC_USE_AGENT_STORE="True")
sys.argv = ARGV
with open(os.path.join(folder, f"{rank}.told"), "w") as told, contextlib.redirect_stdout(told):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_forked(folder: Path, workers: int, *argv: str) -> str:
    """The same in processes that have imported torch already, with what torchrun gives each; what they print."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder.mkdir()
    ranks = start(FORKED.replace("AT_PORT", str(store.port)).replace("ARGV", repr(list(argv))), workers, folder)
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * workers
    return "".join((folder / f"{rank}.told").read_text() for rank in range(workers))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("under", ["torchruns environment", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_two_line_change_compresses(under, tmp_path):
    script = str(EXAMPLES / "two_line_change.py")
    told = run(sys.executable, *TORCHRUN, script) if under == "torchrun" else run_forked(tmp_path / "told", 2, script)
    warmup, compressed = re.search(r"bytes a step: ([\d,]+) in warm-up, ([\d,]+) compressed", told).groups()
    assert int(warmup.replace(",", "")) / int(compressed.replace(",", "")) == pytest.approx(32, rel=0.03)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", told)]
    assert losses[-1] < losses[0] / 10


@pytest.mark.slow
@pytest.mark.parametrize("under", ["torchruns environment", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_workers_with_labels_of_their_own_learn_all_of_them(under, tmp_path):
    """Each has half of six labels, and would be right for those alone."""
    script = str(EXAMPLES / "cfedavg.py")
    told = run(sys.executable, *TORCHRUN, script) if under == "torchrun" else run_forked(tmp_path / "told", 2, script)
    found = [float(x) for x in re.findall(r"accuracy (\d\.\d+)", told)]
    assert len(found) == 3
    assert found[-1] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("under", ["torchruns environment", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_sketched_sgd_learns_with_a_tenth_of_the_bytes(under, tmp_path):
    script = str(EXAMPLES / "sketched_sgd.py")
    told = run(sys.executable, *TORCHRUN, script) if under == "torchrun" else run_forked(tmp_path / "told", 2, script)
    accuracy, sent = re.findall(r"accuracy (\d\.\d+), ([\d,]+) bytes", told)[-1]
    assert float(accuracy) > 0.9
    assert int(sent.replace(",", "")) < 4 * (400 * 64 + 64 + 640 + 10) / 9


@pytest.mark.slow
@pytest.mark.parametrize("under", ["torchruns environment", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_thinned_recommender_learns_nearly_as_much_from_a_tenth_of_the_bytes(under, tmp_path):
    script = str(EXAMPLES / "dlrm.py")
    told = run(sys.executable, *TORCHRUN, script) if under == "torchrun" else run_forked(tmp_path / "told", 2, script)
    (dense, of_dense), (thinned, of_thinned) = re.findall(r"AUC (\d\.\d+), all ranks sent ([\d,]+) bytes", told)
    assert float(dense) > 0.86
    assert float(thinned) > float(dense) - 0.06
    assert int(of_dense.replace(",", "")) > 10 * int(of_thinned.replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("under", ["torchruns environment", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_workers_that_send_what_has_changed_learn_all_labels_with_fewer_uploads(under, tmp_path):
    script = str(EXAMPLES / "cada.py")
    told = run(sys.executable, *TORCHRUN, script) if under == "torchrun" else run_forked(tmp_path / "told", 2, script)
    *_, (accuracy, uploads, possible) = re.findall(r"accuracy (\d\.\d+), (\d+) of (\d+) uploads", told)
    assert float(accuracy) > 0.9
    assert int(possible) == 600
    assert 2.5 * int(uploads) < 600


@pytest.mark.parametrize("under", ["torchruns environment", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_sharded_boxes_compress_what_crosses_between_them(under, tmp_path):
    script = str(EXAMPLES / "sharded_boxes.py")
    by_torchrun = (sys.executable, *TORCHRUN[:-1], "4", script)
    told = run(*by_torchrun) if under == "torchrun" else run_forked(tmp_path / "told", 4, script)
    warmup, compressed = re.search(r"between boxes: ([\d,]+) in warm-up, ([\d,]+) compressed", told).groups()
    assert int(warmup.replace(",", "")) / int(compressed.replace(",", "")) == pytest.approx(32, rel=0.06)
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", told)]
    assert losses[-1] < losses[0] / 4


@pytest.mark.slow
def test_the_two_line_change_runs_on_one_worker_and_sends_nothing():
    told = run(sys.executable, str(EXAMPLES / "two_line_change.py"))
    assert "sent 0 bytes" in told.splitlines()[-1]


@pytest.mark.parametrize(
    "launcher", [None, *(pytest.param(launcher, marks=pytest.mark.slow) for launcher in (TORCHRUN, ()))]
)
def test_a_loop_over_a_session_learns_and_goes_on_from_its_folder(launcher, tmp_path):
    command = (str(EXAMPLES / "nanogpt.py"), "--folder", str(tmp_path / "kept"), "--steps", "60")
    first, second = (
        run_forked(tmp_path / turn, 1, *command) if launcher is None else run(sys.executable, *launcher, *command)
        for turn in ("first", "second")
    )
    assert f"{2 if launcher else 1} workers" in first
    assert float(re.search(r"validation loss (\d\.\d+)", first)[1]) < 5.6  # 6.2 where nothing is known
    assert second.count("step 50") == 0  # it was at its end


@pytest.mark.slow  # importing transformers takes long, and tests/integrations/test_transformers.py has done it
@pytest.mark.parametrize("launcher", [TORCHRUN, ()])
@pytest.mark.parametrize("muon", [[], ["--muon"]])
def test_a_trainer_compresses_under_torchrun_and_runs_alone(launcher, muon):
    pytest.importorskip("transformers")
    told = run(sys.executable, *launcher, str(EXAMPLES / "transformers_trainer.py"), *muon)
    first, *_, last = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", told)]
    assert last < 0.7 * first
    sent = [int(number.replace(",", "")) for number in re.findall(r"sent ([\d,]+) bytes", told)]
    assert len(sent) == 4
    if launcher:
        first_steps = sent[0] / (sent[3] - sent[2])
        assert first_steps < 3 if muon else first_steps > 20  # Muon has no warm-up, and the model is sent once
    else:
        assert sent[-1] == 0


@pytest.mark.slow  # as of transformers
@pytest.mark.parametrize(("script", "learned"), [("sft.py", 0.8), ("sft.py --lora", 0.95), ("dpo.py", 0.5)])
@pytest.mark.parametrize("launcher", [TORCHRUN, ()])
def test_fine_tuning_learns_under_torchrun_and_alone(launcher, script, learned, monkeypatch):
    """learned: the last logged loss over the first, at most."""
    pytest.importorskip("trl")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    script, *options = script.split()
    told = run(sys.executable, *launcher, str(EXAMPLES / script), *options)
    first, *_, last = [float(loss) for loss in re.findall(r"'loss': '([\d.]+)'", told)]
    assert last < learned * first
    trained, sent = re.search(r"trained ([\d,]+) values, sent ([\d,]+) bytes", told).groups()
    assert int(trained.replace(",", "")) == (71_680 if options else 722_560)
    assert (sent == "0") == (launcher == ())


@pytest.mark.slow  # each is run as a job by test_examples_in_a_job.py
@pytest.mark.parametrize(
    ("script", "needs", "told"),
    [
        ("images.py", "torch", r"at the end: (100|9\d|8\d)% of the other images are classified correctly"),
        ("accelerate_loop.py", "accelerate", r"step 100: loss 0\.00\d+, 1 workers"),
        ("lightning_session.py", "lightning", r"epoch 2: validation loss 0\.01\d+"),
    ],
)
def test_a_script_of_a_session_runs_under_python_as_it_stands(script, needs, told):
    pytest.importorskip(needs)
    assert re.search(told, run(sys.executable, str(EXAMPLES / script)))


@pytest.mark.slow  # as of transformers
def test_the_lightning_trainer_compresses():
    pytest.importorskip("lightning")
    told = run(sys.executable, str(EXAMPLES / "lightning_trainer.py"))
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", told)]
    assert losses[-1] < losses[0] / 3
    (share,) = re.findall(r"sent (\d\.\d+) of what DDP would have", told)
    assert 0.2 < float(share) < 0.26  # 40 of 200 steps in full, the rest at 1/32


OF_SCRIPTS = [EXAMPLES / "sharded-job.yaml"]


@pytest.mark.parametrize("file", OF_SCRIPTS, ids=lambda file: file.stem)
def test_every_job_file_of_a_script_is_a_spec_with_its_folder(file):
    """That it trains: tests/workers/session/test_sharded_job.py."""
    asked = yaml.safe_load(file.read_text())
    folder = (file.parent / asked["recipe"]["working_dir"]).resolve()  # which `thinwire submit` packs
    spec = ScriptSpec.model_validate({**asked, "recipe": {**asked["recipe"], "working_dir": str(folder)}})
    assert spec.name == file.stem
    assert (folder / spec.recipe.entry).is_file()


@pytest.mark.few(2)
@pytest.mark.parametrize("file", sorted({*EXAMPLES.glob("*.yaml")} - {*OF_SCRIPTS}), ids=lambda file: file.stem)
def test_every_job_file_is_a_spec_as_it_stands_and_trains(file, tmp_path):
    """Whole runs take minutes: two steps of four samples show that model, data and optimizer can be made."""
    asked = yaml.safe_load(file.read_text())
    spec = TrainSpec.model_validate(asked)
    assert spec.name == file.stem
    changed = {"steps": 2, "global_batch": 4, "evaluation": {"windows": 4}}
    if "every" in asked["optimizer"]:
        changed["optimizer"] = asked["optimizer"] | {"every": 2}
    short = TrainSpec.model_validate(asked | changed)
    (summary, *_), *_ = run_small(tmp_path, short, spec.workers.min)
    assert summary["steps"] == 2
    assert summary["replicas_bit_equal"] is True
