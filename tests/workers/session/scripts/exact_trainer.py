"""A Hugging Face Trainer whose result does not depend on who computed what: exact_trainer.py FOLDER STEPS LOADERS."""

import os
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from thinwire.integrations.transformers import with_thinwire
from thinwire.optim import Adam
from thinwire.train import session

FOLDER, STEPS, WIDTH = Path(sys.argv[1]), int(sys.argv[2]), 6


class Exact(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.values = torch.nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return {"loss": (self.values * x).sum(dim=1).mean()}


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return {"x": torch.randint(-9, 9, (WIDTH,), generator=torch.Generator().manual_seed(i)) * 2.0**6}


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
        dataloader_num_workers=int(sys.argv[3]),
    )
    trainer = with_thinwire(Trainer(Exact(), args, train_dataset=Samples()), Adam, run=run)
    trainer.train()

counted = [trainer.state.global_step, trainer.state.epoch, trainer.lr_scheduler.state_dict()]
vectors = trainer.optimizer.optimizer.state_dict()["vectors"]
torch.save([trainer.model.state_dict(), counted, vectors], FOLDER / f"final-{os.getpid()}")
assert not any(Path(args.output_dir).glob("checkpoint-*"))
