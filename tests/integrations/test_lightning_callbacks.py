"""Lightning's callbacks that freeze, prune, search and stop, with ThinwireStrategy: as with AdamW under DDPStrategy."""

import importlib.util

import pytest

from tests.comm.gloo_ranks import said, start
from tests.conftest import missing
from tests.integrations.test_lightning import MODULE

if importlib.util.find_spec("lightning") is None:
    missing("lightning is not installed: pip install lightning")

SHARED = """
import lightning.pytorch.callbacks as callbacks
from lightning.pytorch.callbacks import ModelCheckpoint

def adamw(params):
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.0)

def adam(params):
    return ours.Adam(params, lr=0.02)

def onebit(params):
    return ours.OneBitAdam(params, lr=0.02, warmup=4)

def zero_one(params):
    return ours.ZeroOneAdam(
        params, lr=0.02, var_freeze_step=3, schedule=ours.ZeroOneSchedule(local_step_scaler=2, local_step_clipper=4)
    )

def ddp():
    return DDPStrategy(find_unused_parameters=True)

def equal_on_all(model):
    mine = torch.cat([param.detach().flatten() for param in model.parameters()])
    others = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(others, mine)
    assert all(torch.equal(mine, other) for other in others)
    return mine
"""

FINETUNING = """
class Tuned(Net):
    # The backbone joins the optimizer when the callback unfreezes it. In a run that goes on that freezes it again.
    goes_on = False
    def __init__(self, make):
        super().__init__(make, scheduled=False)
        self.backbone = self.net[:3]
    def configure_optimizers(self):
        return self.make(filter(lambda param: param.requires_grad, self.parameters()))
    def on_train_start(self):
        self.began = flat(self.backbone)
        if self.goes_on and self.trainer.global_step > 6:
            self.backbone.requires_grad_(True)

class GoesOn(Tuned):
    goes_on = True

def tuned(make, where=None, ckpt_path=None, module=Tuned):
    kept = ModelCheckpoint(dirpath=where, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    unfreezes = callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0)
    model, told = fit(ThinwireStrategy(), make, module=module, max_epochs=3, ckpt_path=ckpt_path,
                      callbacks=[unfreezes, *([kept] if where else [])], enable_checkpointing=where is not None)
    assert len(told.optimizers[0].param_groups) == 2
    assert told.optimizers[0].num_steps == told.global_step == 18
    return equal_on_all(model), model

found = {}
for make in (adam, onebit, zero_one):
    where = os.path.join(folder, make.__name__)
    whole, model = tuned(make, where)
    assert not torch.equal(flat(model.backbone), model.began)
    heard.clear()
    resumed, model = tuned(make, ckpt_path=os.path.join(where, "step=12.ckpt"))
    assert torch.equal(flat(model.backbone)[:48], model.began[:48])  # frozen, as Lightning has it
    assert (rank > 0) == (not any("resumed_frozen" in line for line in heard)), heard
    resumed, model = tuned(make, ckpt_path=os.path.join(where, "step=12.ckpt"), module=GoesOn)
    found[make.__name__] = (whole - resumed).abs().max().item()
say("resumed", found)
"""

CALLBACKS = """
def alike(make_callback, module=Net, **settings):
    plain, _ = fit(ddp(), adamw, module=module, callbacks=[make_callback()], **settings)
    model, told = fit(ThinwireStrategy(), adam, module=module, callbacks=[make_callback()], **settings)
    torch.testing.assert_close(equal_on_all(model), equal_on_all(plain), rtol=1e-4, atol=1e-6)
    for make in (onebit, zero_one):
        model, told = fit(ThinwireStrategy(), make, module=module, callbacks=[make_callback()], **settings)
        equal_on_all(model)

alike(lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 3}))
alike(lambda: callbacks.ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False), max_epochs=3)

class Found(Net):
    lr = 0.01
    def configure_optimizers(self):
        optimizer = self.make(self.parameters())
        optimizer.param_groups[0]["lr"] = self.lr
        return optimizer
alike(lambda: callbacks.LearningRateFinder(1e-4, 1e-1, num_training_steps=30), module=Found, max_epochs=6)

class Reads(Net):
    def __init__(self, make):
        super().__init__(make)
        self.adapters = type("AdaLoraModel", (torch.nn.Module,), {"__module__": "peft.tuners"})()
def mean(params):
    optimizer = onebit(params)
    optimizer.gradients = "mean"
    return optimizer
refused(lambda: fit(ThinwireStrategy(), onebit, module=Reads), "AdaLoraModel", 'gradients = "mean"', kind=RuntimeError)
equal_on_all(fit(ThinwireStrategy(), mean, module=Reads)[0])
say("called", "all")
"""


def run(tmp_path, *sources, timeout_s=280):
    ranks = start(MODULE + SHARED + "".join(sources) + "\ndist.destroy_process_group()\n", 2, tmp_path)
    assert [rank.wait(timeout=timeout_s) for rank in ranks] == [0, 0]


@pytest.mark.slow
def test_a_run_is_resumed_after_the_unfreeze_of_a_backbone(tmp_path):
    run(tmp_path, FINETUNING)
    assert said(tmp_path, 0, "resumed") == "{'adam': 0.0, 'onebit': 0.0, 'zero_one': 0.0}"


@pytest.mark.slow
def test_callbacks_that_change_a_run_train_as_under_ddp(tmp_path):
    run(tmp_path, CALLBACKS)
    assert said(tmp_path, 0, "called") == said(tmp_path, 1, "called") == "all"
