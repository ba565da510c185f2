"""A validation of Lightning's Trainer inside of a session is one of the run: loss and accuracy are in its history."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader

from tests.conftest import missing
from tests.workers.small_job import Recording
from thinwire.comm import SoloGroup
from thinwire.optim import OneBitAdam
from thinwire.train import session
from thinwire.workers.ranks import FixedRanks
from thinwire.workers.session.session import placed
from thinwire.workers.session.training import Run, Surroundings


def test_what_a_validation_has_logged_is_in_the_history(tmp_path):
    if importlib.util.find_spec("lightning") is None:
        missing("lightning")
    import lightning

    from thinwire.integrations.lightning_session import SessionStrategy

    losses = {}

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3, 1)

        def training_step(self, x, index):
            loss = self.net(x).square().mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, x, index):
            loss = self.net(x).square().mean()
            losses.setdefault(self.global_step, []).append(float(loss))
            self.log("val_loss", loss)
            self.log_dict({"val/accuracy": 0.25, "seen": torch.tensor(float(len(x)))}, on_epoch=True)

        def configure_optimizers(self):
            return OneBitAdam(self.parameters(), lr=0.1, group=self.trainer.strategy.group)

    group, reporter = SoloGroup(), Recording()
    place = Surroundings(FixedRanks(group), torch.device("cpu"), Run(tmp_path, 0.0), reporter, None, group)
    with placed(place), session() as run:
        trainer = lightning.Trainer(
            max_epochs=2,
            strategy=SessionStrategy(run),
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = Module()
        trainer.fit(module, DataLoader(torch.randn(12, 3), batch_size=4), DataLoader(torch.randn(4, 3), batch_size=2))
        trainer.validate(module, DataLoader(torch.randn(4, 3), batch_size=2), verbose=False)  # and none of the run
    found = {sample.step: sample for sample in reporter.samples if sample.validation_loss is not None}
    assert [*found] == [3, 6]
    for step, sample in found.items():
        assert sample.validation_loss == pytest.approx(sum(losses[step][:2]) / 2)
        assert sample.reported == {"validation_accuracy": 0.25, "validation_seen": 2.0}
