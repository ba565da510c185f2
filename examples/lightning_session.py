"""A Lightning Trainer that a lost worker costs no step: its loader says what a step is, and a session gives it out.

python examples/lightning_session.py                            one worker
thinwire submit examples/lightning_session.py --min 1 --max 4   a job, whose workers may die, come and leave

- optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
+ optimizer = OneBitAdam(self.parameters(), model=self, lr=2e-3, warmup=20, group=self.trainer.strategy.group)
- trainer = lightning.Trainer(max_epochs=3)
+ with session() as run:
+     trainer = lightning.Trainer(max_epochs=3, strategy=SessionStrategy(run))

A step has batch_size samples, however many workers share them. Under torchrun, and where Lightning is to start workers
itself, take ThinwireStrategy: examples/lightning_trainer.py.
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning_session import SessionStrategy
from thinwire.optim import OneBitAdam
from thinwire.train import session


class Student(lightning.LightningModule):
    """Learns what a fixed network says. Its optimizer is one line; the rest is as anywhere."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        )

    def training_step(self, batch, index):
        """The loss of this worker's part of the batch."""
        x, y = batch
        return (self.net(x) - y).square().mean()

    def validation_step(self, batch, index):
        """Each worker validates on all of it."""
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            print(f"epoch {self.current_epoch}: validation loss {loss.item():.4f}", flush=True)
        self.log("validation_loss", loss)

    def configure_optimizers(self):
        """One-bit Adam, with a schedule of torch's."""
        optimizer = OneBitAdam(self.parameters(), model=self, lr=2e-3, warmup=20, group=self.trainer.strategy.group)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main():
    """Train, with whatever workers there are."""
    lightning.seed_everything(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 64))
    x = torch.randn(3200, 64)
    with torch.no_grad():
        train, validation = TensorDataset(x[64:], teacher(x[64:])), TensorDataset(x[:64], teacher(x[:64]))
    with session() as run:
        trainer = lightning.Trainer(
            max_epochs=3,
            strategy=SessionStrategy(run),
            gradient_clip_val=1.0,
            enable_progress_bar=False,
            enable_checkpointing=False,
            logger=False,
        )
        trainer.fit(Student(), DataLoader(train, batch_size=64, shuffle=True), DataLoader(validation, batch_size=64))


if __name__ == "__main__":
    main()
