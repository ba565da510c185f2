"""A Lightning Trainer whose result does not depend on who computed what: exact_lightning.py FOLDER STEPS LOADERS."""

import lightning
import torch
from exact_parts import LOADERS, STEPS, Exact, Samples, keep
from torch.utils.data import DataLoader

from thinwire.integrations.lightning_session import SessionStrategy
from thinwire.optim import Adam
from thinwire.train import session


class Module(Exact, lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.validated = []

    def training_step(self, x, index):
        return self.loss(x)

    def validation_step(self, x, index):
        self.validated.append(self.global_step)

    def configure_optimizers(self):
        optimizer = Adam(self.parameters(), lr=0.1, group=self.trainer.strategy.group)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


with session() as run:
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=STEPS // 4,
        strategy=SessionStrategy(run),
        accelerator="cpu",
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(Samples(32), batch_size=8, shuffle=True, num_workers=LOADERS)
    trainer.fit(module, loader, DataLoader([torch.zeros(1)]))

(optimizer,) = trainer.optimizers
counted = [trainer.global_step, trainer.current_epoch, trainer.lr_scheduler_configs[0].scheduler.state_dict()]
keep([module.state_dict(), counted, optimizer.state_dict()["vectors"]])
assert module.validated == sorted(set(module.validated) & set(range(0, STEPS + 1, 4))), module.validated
assert module.validated[-1] == STEPS, module.validated
