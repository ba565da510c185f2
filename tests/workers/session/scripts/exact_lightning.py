"""A Lightning Trainer whose result does not depend on who computed what: exact_lightning.py FOLDER STEPS LOADERS."""

import os
import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader

from thinwire.integrations.lightning_session import SessionStrategy
from thinwire.optim import Adam
from thinwire.train import session

FOLDER, STEPS, WIDTH = Path(sys.argv[1]), int(sys.argv[2]), 6


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.randint(-9, 9, (WIDTH,), generator=torch.Generator().manual_seed(i)) * 2.0**6


class Exact(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.values = torch.nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.validated = []

    def training_step(self, x, index):
        self.seen += 1
        return (self.values * x).sum(dim=1).mean()

    def validation_step(self, x, index):
        self.validated.append(self.global_step)

    def configure_optimizers(self):
        optimizer = Adam(self.parameters(), lr=0.1, group=self.trainer.strategy.group)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


with session() as run:
    module = Exact()
    trainer = lightning.Trainer(
        max_epochs=STEPS // 4,
        strategy=SessionStrategy(run),
        accelerator="cpu",
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(Samples(), batch_size=8, shuffle=True, num_workers=int(sys.argv[3]))
    trainer.fit(module, loader, DataLoader([torch.zeros(1)]))

(optimizer,) = trainer.optimizers
counted = [trainer.global_step, trainer.current_epoch, trainer.lr_scheduler_configs[0].scheduler.state_dict()]
torch.save([module.state_dict(), counted, optimizer.state_dict()["vectors"]], FOLDER / f"final-{os.getpid()}")
assert module.validated == sorted(set(module.validated) & set(range(0, STEPS + 1, 4))), module.validated
assert module.validated[-1] == STEPS, module.validated
