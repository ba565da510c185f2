"""Lightning Fabric with an optimizer of ours: two real processes. What docs/integrations.md says of it."""

import importlib.util

import pytest

from tests.comm.gloo_ranks import said, start
from tests.conftest import missing

if importlib.util.find_spec("lightning") is None:
    missing("lightning is not installed: pip install lightning")

FABRIC = """
import copy, logging, warnings
warnings.simplefilter("ignore")
os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from thinwire.optim import OneBitAdam, ZeroOneAdam, ZeroOneSchedule
gc.freeze()
join()

heard = []
class Ear(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())
logging.getLogger("thinwire").addHandler(Ear())

def dataset():
    made = torch.Generator().manual_seed(3)
    x = torch.randn(48, 6, generator=made)
    return TensorDataset(x, torch.tanh(x @ torch.randn(6, 2, generator=made)))

def net(seed=0):
    torch.manual_seed(seed + rank)  # rank 0's parameters count
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

def flat(model):
    return torch.cat([t.detach().float().reshape(-1) for t in model.parameters()])

def train(model, optimizer, loader, epochs, backward):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            backward((model(x) - y).square().mean())
            optimizer.step()

MAKE = {
    "onebit_adam": lambda model: OneBitAdam(model.parameters(), model=model, lr=1e-2, warmup=5),
    "zero_one_adam": lambda model: ZeroOneAdam(
        model.parameters(), model=model, lr=1e-2, var_freeze_step=3,
        schedule=ZeroOneSchedule(local_step_scaler=2, local_step_clipper=4)),
}
fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
fabric.launch()
loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=4))
plain = DataLoader(dataset(), batch_size=4, sampler=DistributedSampler(dataset(), size, rank, shuffle=False))
"""

AS_BY_HAND = (
    FABRIC
    + """
for name, make in MAKE.items():
    model = fabric.to_device(net())
    optimizer = make(model)
    train(model, optimizer, loader, 3, fabric.backward)
    by_hand = net()
    by_itself = make(by_hand)
    train(by_hand, by_itself, plain, 3, lambda loss: loss.backward())
    assert torch.equal(flat(model), flat(by_hand)), name

    file = os.path.join(folder, name)
    assert name == "onebit_adam" or not optimizer.at_sync  # in the middle of a round
    optimizer.prepare_to_save()
    fabric.save(file, {"model": model, "optimizer": optimizer, "epoch": 3})
    later = net(7)
    resumed = make(later)
    rest = fabric.load(file, {"model": later, "optimizer": resumed})
    assert rest["epoch"] == 3
    for one, its in ((model, optimizer), (later, resumed)):
        train(one, its, loader, 2, fabric.backward)
        its.prepare_to_save()
    assert torch.equal(flat(model), flat(later)), name
    both = [torch.empty_like(flat(model)) for _ in range(size)]
    dist.all_gather(both, flat(model))
    assert torch.equal(both[0], both[1]), name
assert not [line for line in heard if "gradients_equal" in line or "replicas_differ" in line], heard
say("done", "as by hand")
"""
)

SET_UP = (
    FABRIC
    + """
model = net()
optimizer = MAKE["onebit_adam"](model)
model, optimizer = fabric.setup(model, optimizer)
train(model, optimizer, loader, 1, fabric.backward)
assert len([line for line in heard if "gradients_equal" in line]) == (rank == 0), heard
say("done", "said")
"""
)


def ran(tmp_path, program):
    assert [one.wait(120) for one in start(program, 2, tmp_path)] == [0, 0]
    return [said(tmp_path, rank, "done") for rank in range(2)]


@pytest.mark.slow
def test_a_loop_over_fabric_ends_as_one_by_hand_and_goes_on_from_its_checkpoint(tmp_path):
    assert ran(tmp_path, AS_BY_HAND) == ["as by hand"] * 2


@pytest.mark.slow
def test_a_model_that_fabric_sets_up_is_averaged_by_ddp_as_well_which_is_said(tmp_path):
    assert ran(tmp_path, SET_UP) == ["said"] * 2
