"""Lightning's Trainer with ThinwireStrategy: two real processes, against AdamW under Lightning's own DDP strategy."""

import importlib.util

import pytest

from tests.comm.gloo_ranks import said, start
from tests.conftest import missing

if importlib.util.find_spec("lightning") is None:
    missing("lightning is not installed: pip install lightning")

MODULE = """
import contextlib, copy, logging, warnings
warnings.simplefilter("ignore")
os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
import lightning as L
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
import thinwire.optim as ours
from thinwire.integrations.lightning import ThinwireStrategy
gc.freeze()  # modules are no garbage, and are not to be looked through for some
join()

heard = []
class Ear(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())
logging.getLogger("thinwire").addHandler(Ear())

def data(samples=48):
    made = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=made)
    y = torch.tanh(x @ torch.randn(6, 2, generator=made))
    return DataLoader(TensorDataset(x, y), batch_size=4)

class Net(L.LightningModule):
    def __init__(self, make, scheduled=True):
        super().__init__()
        torch.manual_seed(rank)  # rank 0's parameters count
        self.make, self.scheduled, self.evaluated, self.losses = make, scheduled, [], []
        self.net = torch.nn.Sequential(
            # No bias before a BatchNorm: its gradient is rounding alone, which Adam makes steps of.
            torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    def training_step(self, batch, index):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss
    def validation_step(self, batch, index):
        self.evaluated.append(float(flat(self).double().sum()))
        self.log("val", (self.net(batch[0]) - batch[1]).square().mean(), sync_dist=True)
    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        if not self.scheduled:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]

def flat(model):
    return torch.cat([t.detach().float().reshape(-1) for t in (*model.parameters(), *model.buffers())])

def trainer(strategy, **settings):
    settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **settings}
    return L.Trainer(accelerator="cpu", devices=size, strategy=strategy, enable_progress_bar=False,
                     enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=1, **settings)

def fit(strategy, make, validate=False, ckpt_path=None, module=Net, **settings):
    model, train = module(make), trainer(strategy, **settings)
    train.fit(model, data(), data(8) if validate else None, ckpt_path=ckpt_path)
    return model, train

def refused(call, *words, kind=ValueError):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), str(error)
        return
    raise AssertionError(f"was not refused: {words}")
"""

AS_DDP = """
def adamw(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.0)

def adam(params, **options):
    return ours.Adam(params, lr=0.02, **options)

half = {"precision": "bf16-mixed"}
for settings in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, half):
    plain, told = fit(DDPStrategy(), adamw, validate=True, **settings)
    model, told_too = fit(ThinwireStrategy(), adam, validate=True, **settings)
    close = {"rtol": 2e-2, "atol": 2e-3} if settings is half else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(flat(model), flat(plain), **close)
    torch.testing.assert_close(torch.tensor(model.losses), torch.tensor(plain.losses), **close)
    torch.testing.assert_close(told_too.callback_metrics["val"], told.callback_metrics["val"], **close)
    assert told_too.optimizers[0].num_steps == told.global_step
clipped = plain = None

# Overlap with backward is bit-equal to none, with micro-steps too, where the optimizer has the bound itself.
settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
one, _ = fit(ThinwireStrategy(), adam, **settings)
two, told = fit(ThinwireStrategy(), lambda params: adam(params, overlap=True, max_grad_norm=0.05), **settings)
assert told.optimizers[0].stats()["overlapped"]["in_backward"] > 0
assert torch.equal(flat(one), flat(two))
say("replica", flat(two).tolist())
for line in heard:  # nothing of what a loop that was moved over may have left
    assert not line.startswith(("ddp_left_in", "other_optimizer", "buffers_differ", "gradients_")), line
"""

COMPRESSED = """
def onebit(params):
    return ours.OneBitAdam(params, lr=0.02, warmup=4)

class Meter(L.Callback):
    def __init__(self):
        self.sent = []
    def on_train_batch_end(self, trainer, module, *rest):
        self.sent.append(trainer.optimizers[0].stats()["sent_bytes"])

# What is sent, and a run that goes on from a checkpoint of its middle is the run that was not stopped.
from lightning.pytorch.callbacks import ModelCheckpoint
meter, folder_of = Meter(), os.path.join(folder, "saved")
kept = ModelCheckpoint(dirpath=folder_of, every_n_train_steps=6, save_top_k=-1, filename="{step}")
whole, told = fit(ThinwireStrategy(), onebit, callbacks=[meter, kept], gradient_clip_val=1.0, enable_checkpointing=True)
optimizer = told.optimizers[0]
assert optimizer.frozen_at == 4 and optimizer.max_grad_norm is None
each = [b - a for a, b in zip(meter.sent, meter.sent[1:])]
elements = optimizer.space.p_N.numel()
assert each[0] >= 4 * elements and max(each[6:]) < each[0] / 2, each  # tiny: scales and flags weigh as much as signs
assert sorted(os.listdir(folder_of)) == ["step=12.ckpt", "step=6.ckpt"]
resumed, told = fit(ThinwireStrategy(), onebit, ckpt_path=os.path.join(folder_of, "step=6.ckpt"), gradient_clip_val=1.0)
assert told.global_step == 12 and told.optimizers[0].num_steps == 12
assert torch.equal(flat(whole), flat(resumed)), (flat(whole) - flat(resumed)).abs().max()
saved = torch.load(os.path.join(folder_of, "step=12.ckpt"), weights_only=True)
assert torch.equal(flat(whole)[:1], saved["state_dict"]["net.0.weight"].reshape(-1)[:1])
say("whole", flat(whole).tolist())

# 0/1 Adam: ranks differ between syncs. Evaluation, checkpoints and what fit() leaves are of one model.
def zero_one(params):
    return ours.ZeroOneAdam(
        params, lr=0.02, var_freeze_step=3, schedule=ours.ZeroOneSchedule(local_step_scaler=2, local_step_clipper=4)
    )

def local_steps(params):
    return ours.LocalSteps(torch.optim.AdamW(params, lr=0.02), every=5, overlap=True)

away = []
def goes_on(at, make):
    where = os.path.join(folder, "round", make.__name__)
    kept = ModelCheckpoint(dirpath=where, every_n_train_steps=at, save_top_k=-1, filename="{step}")
    one, _ = fit(ThinwireStrategy(), make, callbacks=[Look(), kept], enable_checkpointing=True)
    two, _ = fit(ThinwireStrategy(), make, ckpt_path=os.path.join(where, f"step={at}.ckpt"))
    assert away[at - 1], "the checkpoint was not between syncs: nothing was shown"
    return torch.equal(flat(one), flat(two))

class Look(L.Callback):
    def on_train_batch_end(self, trainer, module, *rest):
        away.append(not trainer.optimizers[0].at_sync)

model, told = fit(ThinwireStrategy(), zero_one, validate=True, val_check_interval=3, callbacks=[Look()], max_epochs=3)
assert any(away), "no step was between syncs: nothing was shown"
away.clear()
assert goes_on(6, zero_one)
away.clear()
assert goes_on(6, local_steps)
say("evaluated", model.evaluated)
say("left", flat(model).tolist())

# A GradScaler, which Lightning has on GPUs; here the plugin is given. One rank overflows, both leave the step out.
from lightning.pytorch.plugins import MixedPrecision
class Overflows(Net):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return loss * float("inf") if index == 2 and rank == 1 and self.trainer.current_epoch == 0 else loss
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
model, told = fit(ThinwireStrategy(), onebit, module=Overflows, plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
                  gradient_clip_val=1.0)
assert told.optimizers[0].steps_skipped == 1 and told.optimizers[0].num_steps == 11
assert torch.isfinite(flat(model)).all()
say("scaled", flat(model).tolist())
"""

AVERAGED = """
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

# What the callback copies into the module stays there when it is saved, and under bfloat16 parameters too.
for settings in ({"precision": "bf16-true"}, {}):
    model, train = fit(ThinwireStrategy(), onebit, validate=True, callbacks=[EMAWeightAveraging(decay=0.5)], **settings)
    averaged = flat(model).clone()
    train.save_checkpoint(os.path.join(folder, f"averaged-{rank}.ckpt"))
    assert torch.equal(flat(model), averaged)
    # Of parameters: what the callback averages of buffers is each rank's own, under DDP too.
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    say("averaged" if settings else "averaged in full", weights.tolist())
    saved = train.optimizers[0].state_dict()
    if settings:
        assert torch.equal(saved["master"].bfloat16(), torch.cat(
            [t.param.detach().flatten() for t in train.optimizers[0].space.tensors]))
for callback in (EMAWeightAveraging(), StochasticWeightAveraging(0.01)):
    for makes in (lambda params: ours.ZeroOneAdam(params, lr=0.02), local_steps):
        refused(lambda: fit(ThinwireStrategy(), makes, callbacks=[callback]),
                type(callback).__name__, "at_sync", "prepare_to_save")
"""

MANUAL = """
# Two optimizers, each its own parameters, clipping and accumulation by hand.
class Two(Net):
    def __init__(self, make):
        super().__init__(make)
        self.automatic_optimization = False
        self.other = torch.nn.Linear(6, 2)
    def configure_optimizers(self):
        return self.make(self.net.parameters()), self.make(self.other.parameters())
    def training_step(self, batch, index):
        for optimizer, net in zip(self.optimizers(), (self.net, self.other)):
            with optimizer.toggle_model(sync_grad=index % 2 == 1):
                self.manual_backward((net(batch[0]) - batch[1]).square().mean())
                if index % 2 == 1:
                    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                    optimizer.step()
                    optimizer.zero_grad()

make = lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.0)
plain, _ = fit(DDPStrategy(find_unused_parameters=True), make, module=Two)  # each loss has half of them
model, told = fit(ThinwireStrategy(), lambda params: ours.Adam(params, lr=0.02), module=Two)
for a, b in zip(model.parameters(), plain.parameters()):  # buffers: DDP leaves each rank its own behind
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
assert [o.num_steps for o in told.optimizers] == [6, 6] and {o.max_grad_norm for o in told.optimizers} == {None}

# What module.optimizers() gives acts on the optimizer, not on Lightning's wrapper alone.
class Late(Net):
    def __init__(self, make):
        super().__init__(make, scheduled=False)  # a schedule knows the groups that there were when it was made
    def on_fit_start(self):
        self.more = torch.nn.Parameter(torch.ones(3))
        self.optimizers().add_param_group({"params": [self.more]})
    def training_step(self, batch, index):
        return super().training_step(batch, index) + self.more.square().sum()
model, told = fit(ThinwireStrategy(), lambda params: ours.Adam(params, lr=0.02), module=Late)
assert model.more.max() < 1 and len(told.optimizers[0].space.spans) == 2

# An optimizer that knows the model, evaluation without a fit, and a second fit of the same trainer.
class Known(Net):
    def configure_optimizers(self):
        return ours.Adam(self.parameters(), lr=0.02, model=self)
model, told = fit(ThinwireStrategy(), None, module=Known, validate=True)
evaluated = trainer(ThinwireStrategy()).validate(model, data(8), verbose=False)[0]["val"]
assert abs(evaluated - float(told.callback_metrics["val"])) < 1e-6
told.fit_loop.max_epochs = 3
told.fit(model, data())  # the same trainer once more: a new optimizer
assert told.optimizers[0].num_steps == 6

# Refused, with what to do.
adam = lambda params, **options: ours.Adam(params, lr=0.02, **options)
refused(lambda: fit(ThinwireStrategy(), make), "torch.optim.adamw.AdamW", "thinwire.optim", "ddp")
refused(lambda: fit(ThinwireStrategy(), adam, gradient_clip_val=1.0, gradient_clip_algorithm="value"), "norm")
bounded = lambda params: adam(params, max_grad_norm=0.5)
refused(lambda: fit(ThinwireStrategy(), bounded, gradient_clip_val=1.0), "1.0", "0.5")
early = lambda params: adam(params, overlap=True)
refused(lambda: fit(ThinwireStrategy(), early, gradient_clip_val=1.0), "overlap", "max_grad_norm=1.0")
from thinwire.comm import SoloGroup
alone = lambda params: adam(params, group=SoloGroup())
refused(lambda: fit(ThinwireStrategy(), alone), "1 ranks", "configure_optimizers")
for setting in ("find_unused_parameters", "ddp_comm_hook", "model_averaging_period"):
    refused(lambda: ThinwireStrategy(**{setting: 1}), setting, "leave it out", kind=TypeError)
say("done", flat(model).tolist())
"""


@pytest.mark.slow
def test_training_is_that_of_lightnings_ddp_and_of_one_model_on_all_ranks(tmp_path):
    """One run of two processes, for to import Lightning takes longer than all that is asked of it.

    Dense Adam trains as AdamW under DDPStrategy; what compresses saves, evaluates and resumes as one model; manual
    optimization works; what cannot train is refused.
    """
    ranks = start(MODULE + AS_DDP + COMPRESSED + AVERAGED + MANUAL + "dist.destroy_process_group()", 2, tmp_path)
    assert [rank.wait(timeout=280) for rank in ranks] == [0, 0]
    for name in ("replica", "whole", "evaluated", "left", "scaled", "averaged", "averaged in full", "done"):
        assert said(tmp_path, 0, name) == said(tmp_path, 1, name), name
