"""A Hugging Face Trainer whose result does not depend on who computed what: exact_trainer.py FOLDER STEPS LOADERS."""

import os
from pathlib import Path

import torch
from exact_parts import FOLDER, LOADERS, STEPS, Exact, Samples, keep
from transformers import Trainer, TrainingArguments

from thinwire.integrations.transformers import with_thinwire
from thinwire.optim import Adam
from thinwire.train import session


class Model(Exact, torch.nn.Module):
    def forward(self, x):
        return {"loss": self.loss(x)}


with session() as run:
    args = TrainingArguments(
        str(FOLDER / f"trainer-{os.getpid()}"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=0.1,
        max_grad_norm=0.0,
        logging_steps=4,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=LOADERS,
    )
    trainer = with_thinwire(Trainer(Model(), args, train_dataset=Samples(20, "x")), Adam, run=run)
    trainer.train()

counted = [trainer.state.global_step, trainer.state.epoch, trainer.lr_scheduler.state_dict()]
vectors = trainer.optimizer.optimizer.state_dict()["vectors"]
keep([trainer.model.state_dict(), counted, vectors])
assert not any(Path(args.output_dir).glob("checkpoint-*"))
