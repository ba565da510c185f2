"""What people save a model and its optimizer with writes all of it and no more, and gives the run back."""

import io
import os

import pytest
import torch

from tests.comm.gloo_ranks import said, start
from tests.conftest import missing
from tests.optim.engine.test_resume import network
from thinwire.optim import OneBitAdam

os.environ["HF_HUB_OFFLINE"] = "1"


def library(name):
    try:
        return __import__(name, fromlist=["_"])
    except ImportError:
        missing(f"{name} is not installed: pip install 'thinwire[dev]'")


def trained(net, steps=4):
    optimizer = OneBitAdam(net.parameters(), warmup=2)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.ones(3, 7) + step).square().mean().backward()
        optimizer.step()
    return optimizer


def written(what):
    file = io.BytesIO()
    torch.save(what, file)
    return file.tell()


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_torch_save_writes_a_model_and_a_part_of_one_at_their_own_size(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(7, 999), torch.nn.Tanh(), torch.nn.Linear(999, 3))
    before = written(net.state_dict()), written(net[2].state_dict())
    optimizer = trained(net)
    assert abs(written(net.state_dict()) - before[0]) < 2000
    assert abs(written(net[2].state_dict()) - before[1]) < 2000
    torch.save(net[2].state_dict(), tmp_path / "head.pt")
    head = torch.nn.Linear(999, 3)
    head.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True))
    assert_same(head.state_dict(), net[2].state_dict())
    N = optimizer.space.p_N.nbytes
    assert written(optimizer.state_dict()) < 3 * N + 8000  # m, v, R
    assert written(optimizer.rank_state_dict()) < 4 * N + 8000  # m, v, both errors: on one rank N each


def test_safetensors_saves_and_loads_a_model_with_tied_weights(tmp_path):
    safetensors = library("safetensors.torch")
    net = network(0)
    net.tied = torch.nn.Linear(7, 13)
    net.tied.weight = net[0].weight
    head = torch.nn.Sequential(net[0], net[1], net[2])
    trained(head)
    safetensors.save_model(net, str(tmp_path / "model.safetensors"))
    other = network(3)
    other.tied = torch.nn.Linear(7, 13)
    other.tied.weight = other[0].weight
    trained(torch.nn.Sequential(other[0], other[1], other[2]))
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    assert_same(other.state_dict(), net.state_dict())
    assert os.path.getsize(tmp_path / "model.safetensors") < 4 * sum(p.numel() for p in net.parameters()) + 1000


@pytest.mark.slow
def test_save_pretrained_of_transformers_gives_the_model_back(tmp_path):
    transformers = library("transformers")
    sizes = {"vocab_size": 40, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, warmup=2)
    tokens = torch.arange(8)[None]
    for _ in range(4):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_same(again.state_dict(), model.state_dict())
    assert os.path.getsize(tmp_path / "model.safetensors") < 4 * sum(p.numel() for p in model.parameters()) + 8000


RANKS = """
import copy, logging
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict, set_state_dict)
from tests.optim.reference.written_out import bits
from tests.optim.saves.test_rank_state_dict import everything, made, train, two_groups

os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
told = []
class Told(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())
logging.getLogger().addHandler(Told(level=logging.WARNING))
join()

def resumed_equals_gone_on(name, steps, save, load, exact=True):
    net, optimizer = made(name, None)
    net, optimizer = prepare(net, optimizer)
    inner = getattr(optimizer, "optimizer", optimizer)
    train(net, inner, steps, rank)
    save(net, optimizer)
    train(net, inner, 3, rank)
    gone_on = everything(inner)
    load(net, optimizer)
    assert inner.num_steps == steps
    if rank == 1 and not exact:
        told.clear()
    train(net, inner, 3, rank)
    if exact:
        assert torch.equal(everything(inner), gone_on), name
    return bits(inner.space.p_N).tolist()

# accelerate: all of it by all ranks, then by rank 0 alone
for saves in ("together", "rank"):
    accelerator = Accelerator(cpu=True)
    def prepare(net, optimizer):
        optimizer.saves = saves
        return accelerator.prepare_model(net, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)
    where = os.path.join(folder, "accelerate-" + saves)
    say(saves, resumed_equals_gone_on("onebit_adam", 8, lambda *_: accelerator.save_state(where),
        lambda *_: accelerator.load_state(where), exact=saves == "together"))
    accelerator.save_model(accelerator._models[0], os.path.join(folder, "model-" + saves))
    dist.barrier()
    from safetensors.torch import load_file
    found = load_file(os.path.join(folder, "model-" + saves, "model.safetensors"))
    assert all(torch.equal(found[key], value) for key, value in accelerator._models[0].state_dict().items())
    accelerator.free_memory()
say("log", [line for line in told if "share_of_one_rank" in line])

# torch.distributed.checkpoint: a state_dict of all, and a share of each rank under one name
prepare = lambda net, optimizer: (net, optimizer)
for at, (name, steps, saves) in enumerate([("onebit_adam", 8, "together"), ("onebit_adam", 8, "rank"),
                                           ("zero_one_adam", 10, "rank")]):
    where = os.path.join(folder, f"dcp-{at}")
    def save(net, optimizer):
        optimizer.saves = saves
        dcp.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=where)
    def load(net, optimizer):
        other = made(name, None, seed=5)
        other[1].saves = saves
        if name == "zero_one_adam":
            train(*other, steps, rank)  # a template in a round has the entries of one
        state = {"model": other[0].state_dict(), "optimizer": other[1].state_dict()}
        dcp.load(state, checkpoint_id=where)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    resumed_equals_gone_on(name, steps, save, load)

def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("not refused")

# what a dict to fill in does not name is not read: not half loaded either
where = os.path.join(folder, "dcp-half")
net, optimizer = made("onebit_adam", None)
optimizer.set_global_batch(32)
dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=where)
fresh_net, fresh = made("onebit_adam", None)
state = {"optimizer": fresh.state_dict()}
dcp.load(state, checkpoint_id=where)
say("half", refused(lambda: fresh.load_state_dict(state["optimizer"])))

before = everything(optimizer)
say("get", refused(lambda: get_state_dict(net, optimizer)))
say("get_optimizer", refused(lambda: get_optimizer_state_dict(net, optimizer)))
say("into_torch", refused(lambda: torch.optim.AdamW(two_groups(net)).load_state_dict(optimizer.state_dict())))
adamw = torch.optim.AdamW(net.parameters())
theirs = get_optimizer_state_dict(net, adamw)
say("set_adamw", refused(lambda: set_optimizer_state_dict(net, optimizer, theirs)))
assert torch.equal(everything(optimizer), before)

# what has been read otherwise can be set through its own interface
other_net, other = made("onebit_adam", None, seed=6)
kept = os.path.join(folder, f"{rank}.pt")
train(net, optimizer, 8, rank)
torch.save(optimizer.state_dict(), kept)
set_state_dict(other_net, other, model_state_dict=net.state_dict(), optim_state_dict=torch.load(kept))
assert torch.equal(everything(other), everything(optimizer))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_accelerate_and_dcp_save_and_load_on_two_ranks(tmp_path):
    library("accelerate")
    library("safetensors")
    ranks = start(RANKS, 2, tmp_path, timeout_s=60)
    assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    for saves in ("together", "rank"):
        assert said(tmp_path, 0, saves) == said(tmp_path, 1, saves)
    assert "share_of_one_rank step=8 rank=0 of=2 loaded_by=2" in said(tmp_path, 0, "log")
    assert said(tmp_path, 1, "log") == "[]"
    assert "without ['global_batch']" in said(tmp_path, 0, "half")
    assert "dcp_to_torch_save" in said(tmp_path, 0, "half")
    for what in ("get", "get_optimizer", "into_torch"):
        assert "Save {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}" in said(tmp_path, 0, what)
    assert "of an optimizer of torch.optim" in said(tmp_path, 0, "set_adamw")


ONE_RANK_LOADS = """
import copy
from tests.optim.saves.test_rank_state_dict import made, train
join()
net, optimizer = made("adam", None)
train(net, optimizer, 3, rank)
saved = copy.deepcopy(optimizer.state_dict())
other, resumed = made("adam", None)
if rank == 0:
    resumed.load_state_dict(saved)
try:
    train(other, resumed, 1, rank)
except CallMismatch as error:
    say("error", error)
"""


def test_a_checkpoint_that_one_rank_loads_ends_on_both_with_what_to_do(tmp_path):
    program = "from thinwire.comm.errors import CallMismatch\n" + ONE_RANK_LOADS
    ranks = start(program, 2, tmp_path, timeout_s=20)
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for rank in range(2):
        assert "rank 0 is in Adam.load_state_dict(); rank 1 is in Adam.step() 1" in said(tmp_path, rank, "error")
        assert "Call load_state_dict() on every rank" in said(tmp_path, rank, "error")
