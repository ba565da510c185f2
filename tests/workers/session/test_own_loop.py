"""A script that draws no batch of the session: all workers start again when one is lost, from its own checkpoint.

As processes of torch.distributed, which Ray Train would start: the test does.
"""

import json
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from tests.workers.loop.elastic_job import FORKSERVER
from tests.workers.session.script_job import SCRIPTS
from tests.workers.small_job import Recording
from thinwire.comm import PeerLost, SoloGroup, TorchGroup
from thinwire.contract.run_folder import RunFolder
from thinwire.contract.spec import read_spec
from thinwire.optim import Adam
from thinwire.train import session
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.job import run_job
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, ScriptError, Surroundings
from thinwire.workers.telemetry import history
from thinwire.workers.telemetry.history import write_report
from thinwire.workers.telemetry.reporter import Reporter

STEPS, LOST = 18, 75

pytestmark = pytest.mark.timeout(900)


def spec_of(run_dir):
    recipe = {"name": "script", "entry": "own_loop.py", "working_dir": str(SCRIPTS), "args": [str(run_dir), str(STEPS)]}
    return read_spec({"recipe": recipe, "workers": {"min": 2, "max": 3, "elastic": "restart"}})


def work(run_dir, rank, size, port):
    torch.set_num_threads(1)
    log = (run_dir / f"log-{rank}-{os.getpid()}").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    run = Run(run_dir, time.time())
    try:
        ranks, reporter = FixedRanks(TorchGroup()), Recording(run_dir)
        summary = run_job(spec_of(run_dir), run, ranks, torch.device("cpu"), reporter)
    except PeerLost:
        os._exit(LOST)
    if summary is not None:
        write_report(run_dir, summary)
    os._exit(0)


def started(run_dir, size):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = [FORKSERVER.Process(target=work, args=(run_dir, rank, size, port)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def steps_of(run_dir, rank):
    file = run_dir / f"steps-{rank}"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def logs(run_dir):
    return "\n".join(file.read_text() for file in sorted(run_dir.glob("log-*")))


def ended(processes, run_dir):
    for process in processes:
        process.join(400)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
    assert None not in codes, logs(run_dir)
    return codes


def test_all_start_again_from_the_scripts_own_checkpoint_with_as_many_as_there_are(tmp_path):
    (tmp_path / "allowed").write_text("7")
    first = started(tmp_path, 2)
    while [steps_of(tmp_path, rank)[-1:] for rank in (0, 1)] != [[8], [8]]:
        assert all(process.is_alive() for process in first), logs(tmp_path)
        time.sleep(0.01)
    os.kill(first[1].pid, signal.SIGKILL)
    (tmp_path / "allowed").write_text(str(STEPS))
    assert ended(first, tmp_path) == [LOST, -signal.SIGKILL], logs(tmp_path)
    assert ended(started(tmp_path, 3), tmp_path) == [0, 0, 0], logs(tmp_path)
    assert steps_of(tmp_path, 0) == [
        *range(1, 9),
        *range(6, STEPS + 1),
    ]  # the steps since the checkpoint are made again
    samples = history.read(RunFolder(tmp_path).history)
    assert [sample.step for sample in samples] == list(range(STEPS + 1))
    assert [sample.world_size for sample in samples[1:]] == [2] * 5 + [3] * (STEPS - 5)
    assert [sample.phase for sample in samples[1:]] == ["warmup"] * 6 + ["compressed"] * (STEPS - 6)
    assert all(sample.payload_bytes > 0 for sample in samples[1:])
    losses = [sample.loss for sample in samples[1:]]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    summary = json.loads(RunFolder(tmp_path).summary.read_text())
    assert (summary["steps"], summary["world_size"], summary["replicas_bit_equal"]) == (STEPS, 3, True)


class Elastic(FixedRanks):
    elastic = True


@pytest.mark.slow
def test_a_job_whose_workers_come_and_go_says_what_to_draw_from(tmp_path):
    group = SoloGroup()
    run = Run(tmp_path, 0.0)
    place = Surroundings(Elastic(group), torch.device("cpu"), run, Reporter(), None, group, spec_of(tmp_path))
    with placed(place), session() as run:
        model = torch.nn.Linear(2, 1)
        optimizer = Adam(model.parameters(), group=run.group)
        run.register(optimizer=optimizer)
        model(torch.ones(2)).sum().backward()
        with pytest.raises(ScriptError, match=r"run.batches\(\); or say workers.elastic: restart"):
            optimizer.step()


def test_a_second_optimizer_that_steps_without_a_batch_is_refused(tmp_path):
    group = SoloGroup()
    place = Surroundings(
        FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), Reporter(), None, group, spec_of(tmp_path)
    )
    with placed(place), session() as run:
        optimizers = [Adam(torch.nn.Linear(2, 1).parameters(), group=run.group) for _ in range(2)]
        run.register(first=optimizers[0], second=optimizers[1])
        with pytest.raises(ScriptError, match=r"a second optimizer, Adam, before run.batches\(\)"):
            optimizers[1].step()


SCALED = """
import torch
from thinwire.optim import Adam
from thinwire.train import session

with session() as run:
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = Adam(model.parameters(), group=run.group), torch.amp.GradScaler("cpu")
    run.register(optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(2)).sum() * (torch.inf if step in (0, 1, 3) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.report(loss=loss, made=step)
"""


TIMED = """
import sys, time
import torch
from thinwire.optim import Adam
from thinwire.train import session

with session() as run:
    model = torch.nn.Linear(2, 1)
    optimizer = Adam(model.parameters(), group=run.group)
    run.register(optimizer=optimizer)

    def computed():
        time.sleep(0.1)
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()

    loop, how = sys.argv[1:]
    for _ in range(3) if loop == "own" else run.batches([torch.ones(2)] * 3, global_batch=1, steps=3):
        if how == "closure":
            optimizer.step(computed)
        else:
            computed()
            optimizer.step()
"""


@pytest.mark.parametrize("how", ["plain", "closure"])
@pytest.mark.parametrize("loop", ["own", "batches"])
def test_the_seconds_of_the_optimizer_are_in_a_scripts_summary(tmp_path, loop, how):
    """Of step() alone: what a closure computes is not the optimizer's."""
    (tmp_path / "train.py").write_text(TIMED)
    recipe = {"name": "script", "entry": "train.py", "working_dir": str(tmp_path), "args": [loop, how]}
    spec = read_spec({"recipe": recipe, "workers": {"elastic": "restart"}})
    run = Run(tmp_path / "run", time.time())
    summary = run_job(spec, run, FixedRanks(SoloGroup()), torch.device("cpu"), Recording(tmp_path / "run"))
    parts = summary.seconds.parts
    assert summary.steps == 3
    assert parts["optimizer"] > 0
    assert parts["forward_backward"] >= 3 * 0.1
    assert sum(parts.values()) == pytest.approx(summary.seconds.total, abs=0.01)


def test_a_step_that_a_gradient_scaler_leaves_out_is_none_of_the_history(tmp_path):
    """Its first steps are, until the scale fits; what is reported of them is no other step's."""
    (tmp_path / "train.py").write_text(SCALED)
    recipe = {"name": "script", "entry": "train.py", "working_dir": str(tmp_path)}
    spec = read_spec({"recipe": recipe, "workers": {"elastic": "restart"}})
    reporter = Recording(tmp_path / "run")
    run = Run(tmp_path / "run", time.time())
    summary = run_job(spec, run, FixedRanks(SoloGroup()), torch.device("cpu"), reporter)
    assert summary.steps == 3
    assert [(one.step, one.reported and one.reported["made"]) for one in reporter.samples] == [
        (0, None),
        (1, 2.0),
        (2, 4.0),
        (3, 5.0),
    ]
    assert all(one.loss is not None for one in reporter.samples[1:])
