"""Which group an optimizer gets whose user names none: never one of its own where a launcher has started several."""

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from thinwire.comm import SoloGroup
from thinwire.comm.default import LAUNCHERS, given_or_default
from thinwire.optim import Adam, OneBitAdam, ZeroOneAdam


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for variable in LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("make", [Adam, OneBitAdam, ZeroOneAdam])
@pytest.mark.parametrize("variable", LAUNCHERS)
def test_before_init_process_group_under_a_launcher_is_an_error_that_says_what_to_do(make, variable, monkeypatch):
    monkeypatch.setenv(variable, "4")
    model = torch.nn.Linear(3, 2)
    where = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"{variable}=4 .*init_process_group\(\) before .*group=SoloGroup\(\)"):
        make(model.parameters())
    assert [p.data_ptr() for p in model.parameters()] == where  # nothing was touched
    assert make(model.parameters(), group=SoloGroup()).group.size == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": ""},
        {"WORLD_SIZE": "many"},
        {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "8"},  # torchrun inside srun: the nearer one counts
        {"SLURM_NTASKS": "8"},  # a script of sbatch, which is one process
    ],
)
def test_one_process_is_alone_without_a_word(environment, monkeypatch):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert given_or_default(None).size == 1
    model = torch.nn.Linear(3, 2)
    optimizer = OneBitAdam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.num_steps == 1


def test_a_backend_of_torch_is_no_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    process_group = torch.distributed.ProcessGroupGloo(store, 0, 1)
    with pytest.raises(TypeError, match="group = ProcessGroupGloo: must be a Group of thinwire"):
        Adam(torch.nn.Linear(3, 2).parameters(), group=process_group)


LATE = """
from thinwire.comm import SoloGroup
from thinwire.optim import OneBitAdam
model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
early, alone = OneBitAdam(model.parameters()), OneBitAdam(other.parameters(), group=SoloGroup())
join()
try:
    early.step()
except RuntimeError as error:
    say("said", error)
alone.step()
late = OneBitAdam(model.parameters())
late.step()
say("sizes", (early.num_steps, alone.group.size, late.group.size))
dist.destroy_process_group()
"""


def test_a_process_group_that_comes_after_the_optimizer_is_an_error_of_its_first_step(tmp_path):
    assert [rank.wait(timeout=240) for rank in start(LATE, 2, tmp_path)] == [0, 0]
    for rank in range(2):
        assert "made before init_process_group, which has made a group of 2 ranks" in said(tmp_path, rank, "said")
        assert said(tmp_path, rank, "sizes") == "(0, 1, 2)"
