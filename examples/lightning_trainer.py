"""A LightningModule that two changed lines make send one bit a value.

python examples/lightning_trainer.py        Lightning starts two workers on this machine

- optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
+ optimizer = OneBitAdam(self.parameters(), lr=2e-3, warmup=40)
- trainer = lightning.Trainer(strategy="ddp", ...)
+ trainer = lightning.Trainer(strategy=ThinwireStrategy(), ...)
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning import ThinwireStrategy
from thinwire.optim import OneBitAdam

STEPS = 200


class Student(lightning.LightningModule):
    """Learns what a fixed network says. Its optimizer is one line; the rest is as for any strategy."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))

    def training_step(self, batch, index):
        """The loss of this worker's batch."""
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        if self.global_step % 40 == 0 and self.global_rank == 0:
            stats = self.optimizers().stats()
            print(f"step {self.global_step:3d}  loss {loss.item():.4f}  sent {stats['sent_bytes']:,} bytes")
        return loss

    def configure_optimizers(self):
        """One-bit Adam, with a schedule of torch's."""
        optimizer = OneBitAdam(self.parameters(), lr=2e-3, warmup=40)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main():
    """Train on two workers, each with half of the data."""
    lightning.seed_everything(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 64))
    x = torch.randn(128 * STEPS, 64)
    with torch.no_grad():
        data = DataLoader(TensorDataset(x, teacher(x)), batch_size=64)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ThinwireStrategy(),
        max_steps=STEPS,
        gradient_clip_val=1.0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    student = Student()
    trainer.fit(student, data)
    if trainer.is_global_zero:
        optimizer = trainer.optimizers[0]
        full = 4 * optimizer.space.p_N.numel() * STEPS
        print(f"sent {optimizer.stats()['sent_bytes'] / full:.2f} of what DDP would have")


if __name__ == "__main__":
    main()
